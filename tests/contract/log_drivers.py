"""Logs of every kind behind one handle: a driver hides how time passes in each, and remembers all that was appended and
told, so that a clause of the contract reads the same for all of them.

    EmbeddedDriver    the log on disk (fsync, os), continued into a lake that is not there, or in memory; on asyncio
    SimulatedDriver   the tests' own log, whose announcements, syncs and reads end when they are told to

A *message* here is everything the log keeps of one, with its position; None before it has one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from simulated import SimulatedLog

from tidegate.adapters.embedded.archive import LakeArchive
from tidegate.adapters.embedded.commitlog import EmbeddedLog
from tidegate.adapters.embedded.tiered import TieredLog
from tidegate.errors import StorageError
from tidegate.limits import PARTITION_SHIFT
from tidegate.log.files import SegmentedLog
from tidegate.log.index import Wanted
from tidegate.log.memory import MemoryLog
from tidegate.log.reading import Read
from tidegate.log.rows import NO_UUID, Rows
from tidegate.log.run import NO_EXPIRY, Run
from tidegate.log.segment import SEGMENT_HEADER_BYTES, scan

# Small, so that a few ticks already fill several.
SEGMENT_BYTES = 1024
# What becomes neither stored nor answered in this time never will.
PATIENCE_S = 20.0
# So often is a log asked to store before it counts as one that does not.
COMMITS_MAX = 100


class Message(NamedTuple):
    position: int | None
    topic: bytes
    publisher: bytes
    tenant: bytes
    flags: int
    payload: bytes
    properties: bytes
    expiry: int
    uuid: bytes
    time_ms: int


def messages_of(rows: Rows) -> list[Message]:
    count = len(rows)
    columns: tuple[Sequence[Any], ...] = (
        rows.positions or [None] * count,
        rows.topics,
        rows.publishers,
        rows.tenants,
        rows.flags,
        rows.payloads,
        rows.properties or [b""] * count,
        rows.expiries or [NO_EXPIRY] * count,
        rows.uuids or [NO_UUID] * count,
        [rows.time_ms] * count,
    )
    return [Message(*entries) for entries in zip(*columns, strict=True)]


def messages_in(runs: Sequence[Run]) -> list[Message]:
    return [message for run in runs for message in messages_of(Rows.of([run]))]


class Append(NamedTuple):
    ticket: int
    messages: list[Message]  # as they were handed over: without positions
    changes: list[bytes]


class Announced(NamedTuple):
    partition: int
    messages: list[Message]
    ends: tuple[int, ...]  # the log's, when it told


class Stored(NamedTuple):
    ticket: int
    known: int  # what the log itself said was stored, when it told


class Refused(NamedTuple):
    ticket: int
    why: StorageError


class Ears:
    """Hears what the log tells."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self.events: list[Announced | Stored | Refused] = []

    def announced(self, partition: int, rows: Rows) -> None:
        self.events.append(Announced(partition, messages_of(rows), self._log.ends))

    def stored(self, ticket: int) -> None:
        self.events.append(Stored(ticket, self._log.stored))

    def refused(self, ticket: int, why: StorageError) -> None:
        self.events.append(Refused(ticket, why))


class Driver(ABC):
    """A log that runs. `crash` and `restart` put another in its place, as the next start finds it."""

    log: Any
    ears: Ears
    stored_at_once = False  # append itself makes it safe
    early_rows_max = 0  # ticks of so few QoS 0/1 messages without changes may be announced, and refused then

    def __init__(self) -> None:
        self.appends: list[Append] = []  # since the last start
        self.seen: list[Announced] = []  # what was announced before it

    def attend(self) -> None:
        """Listen to a log that has just been opened."""
        if hasattr(self, "ears"):
            self.seen += self.of(Announced)
        self.ears = self.log.listener = Ears(self.log)
        self.appends = []

    # ── what was told ──

    @property
    def events(self) -> list[Announced | Stored | Refused]:
        return self.ears.events

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.ears.events if type(event) is kind]

    def announced(self, partition: int | None = None) -> list[Message]:
        """Messages announced since the last start, in order."""
        told = self.of(Announced)
        return [m for event in told if partition in (None, event.partition) for m in event.messages]

    @property
    def partitions(self) -> range:
        return range(len(self.log.ends))

    # ── what is done ──

    def append(self, rows: Rows, changes: Sequence[bytes] = (), time_ms: int | None = None) -> int:
        """As the broker does it: the rows know their time."""
        if time_ms is not None:
            rows.time_ms = time_ms
        before = [message._replace(position=None) for message in messages_of(rows)]
        ticket: int = self.log.append(rows, list(changes), rows.time_ms)
        self.appends.append(Append(ticket, before, list(changes)))
        return ticket

    async def read(self, position: int, end: int, bytes_max: int = 1 << 30, wanted: Wanted | None = None) -> Read:
        answers: list[Read] = []
        self.log.read(position, end, bytes_max, wanted, answers.append)
        assert not answers, "answered within the call"
        await self.until(lambda: bool(answers))
        assert len(answers) == 1
        return answers[0]

    async def everything(
        self, partition: int, *, bytes_max: int = 1 << 30, wanted: Wanted | None = None
    ) -> list[Message]:
        """What a reader finds who goes through a partition from its floor to its end."""
        position, end = self.log.floors[partition], self.log.ends[partition]
        found: list[Message] = []
        while position < end:
            read = await self.read(position, end, bytes_max, wanted)
            assert read.damaged == 0
            assert position < read.next_position <= end, "it does not get on"
            assert all(position <= (m.position or 0) < read.next_position for m in messages_in(read.runs))
            found += messages_in(read.runs)
            position = read.next_position
        return found

    async def holds(self) -> list[Message]:
        """All that can be read back, partition by partition."""
        return [message for partition in self.partitions for message in await self.everything(partition)]

    async def everything_known(self) -> list[Message]:
        """Like `holds`, where what was announced may end behind what can be read: then a reader waits there."""
        found: list[Message] = []
        for partition in self.partitions:
            position, end = self.log.floors[partition], self.log.ends[partition]
            while position < end:
                read = await self.read(position, end)
                found += messages_in(read.runs)
                if read.next_position == position:
                    break
                position = read.next_position
        return found

    async def positions_at_time(self, time_ms: int) -> list[int]:
        told: list[list[int]] = []
        positions, final = self.log.positions_at_time(time_ms, told.append)
        assert not told, "told within the call"
        if not final:
            await self.until(lambda: bool(told))
            positions = told[0]
        return list(positions)

    def records(self) -> list[bytes]:
        """The state, as a start reads it."""
        return [record for records in self.log.state() for record in records]

    async def safe(self, ticket: int | None = None) -> None:
        """Come to where everything up to the ticket is stored; everything appended, for None."""
        refused = {event.ticket for event in self.of(Refused)}
        taken = [append.ticket for append in self.appends if append.ticket not in refused]
        ticket = ticket if ticket is not None else (taken[-1] if taken else 0)
        for _ in range(COMMITS_MAX):
            if self.log.stored >= ticket:
                return
            told = len(self.of(Stored))
            self.log.commit()
            await self.until(lambda told=told: len(self.of(Stored)) > told)  # type: ignore[misc]
        raise AssertionError(f"ticket {ticket} is never stored")

    async def committed(self, snapshot: Any) -> bool:
        """Commit a snapshot: whether that worked."""
        told: list[bool] = []
        snapshot.commit(told.append)
        assert not told, "told within the call"
        await self.until(lambda: bool(told))
        return told[0]

    # ── what differs ──

    @abstractmethod
    async def until(self, done: Callable[[], bool]) -> None:
        """Let what is under way end, until `done`."""

    @abstractmethod
    async def settle(self) -> None:
        """Let everything that is appended be announced."""

    @abstractmethod
    def full(self) -> Any:
        """A context in which the log takes nothing."""

    @abstractmethod
    async def crash(self) -> None:
        """The process dies; the next one starts on what is there."""

    @abstractmethod
    async def restart(self) -> None:
        """A clean stop, and a start."""

    @abstractmethod
    def torn(self) -> Iterator[Driver]:
        """The logs that starts find after power failed at each moment that makes a difference."""

    @abstractmethod
    def close(self) -> None: ...


class EmbeddedDriver(Driver):
    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.root = folder
        self.starts = 0
        self.folder = folder / "log0"
        self.stored_at_once = kind != "fsync"
        # It knows the positions that it will give, and does not let those who wait for few messages wait for the disk.
        self.early_rows_max = 4
        self.failures: list[StorageError] = []
        self.open()

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        if self.kind == "memory":
            self.store: Any = MemoryLog()
        else:
            self.store = SegmentedLog.open(self.folder, segment_bytes=SEGMENT_BYTES)
        if self.kind == "tiered":
            store = self.store
            archive = LakeArchive(self.root, lambda: store.end, loop=loop, report=lambda event, fields: None)
            archive.open()
            self.log = TieredLog(store, archive, wait_for_disk=False, loop=loop, on_failure=self.failures.append)
        else:
            self.log = EmbeddedLog(
                self.store, wait_for_disk=self.kind == "fsync", loop=loop, on_failure=self.failures.append
            )
        self.attend()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not done():
                assert not self.failures, self.failures
                await asyncio.sleep(0.0005)

    async def settle(self) -> None:
        """It announces within the append."""

    @contextmanager
    def full(self, taken_bytes: int = 0) -> Iterator[None]:
        """The disk takes so many bytes more, and nothing after them."""
        write = os.write
        left = taken_bytes

        def refuse(fd: int, content: Any) -> int:
            nonlocal left
            if not Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(self.root):
                return write(fd, content)
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")
            some = bytes(content)[:left]
            left -= len(some)
            return write(fd, some)

        os.write = refuse  # type: ignore[assignment]
        try:
            yield
        finally:
            os.write = write

    def _copy(self) -> Path:
        """The files as they are at this instant: what the next process would find."""
        while True:
            self.starts += 1
            folder = self.root / f"log{self.starts}"
            try:
                shutil.copytree(self.folder, folder)
            except shutil.Error:
                continue  # an index was being renamed, or a segment dropped: that was no instant
            return folder

    async def crash(self) -> None:
        folder = self._copy()
        self.log.close()
        self.folder = folder
        self.open()

    async def restart(self) -> None:
        self.log.close()
        self.open()

    def torn(self) -> Iterator[Driver]:
        """The newest segment ends after each of its frames, and within each; what was synced may be among it, or not,
        for both are told as cut."""
        newest = max(self.folder.glob("*.log"))
        whole = newest.read_bytes()
        places = {SEGMENT_HEADER_BYTES, len(whole)}
        for item in scan(whole):
            places |= {item.offset, item.offset + 8, item.offset + item.size - 8, item.offset + item.size}
        for place in sorted(places):
            copy = self._copy()
            os.truncate(copy / newest.name, place)
            yield self.beside(copy)

    def beside(self, folder: Path) -> Driver:
        """Another log, on a folder of this one."""
        other = EmbeddedDriver.__new__(EmbeddedDriver)
        Driver.__init__(other)
        other.kind, other.root, other.starts, other.folder = self.kind, folder, 0, folder
        other.stored_at_once, other.early_rows_max, other.failures = self.stored_at_once, self.early_rows_max, []
        other.open()
        return other

    def close(self) -> None:
        self.log.close()


class SimulatedDriver(Driver):
    def __init__(self, *, late: bool, partitions: int) -> None:
        super().__init__()
        self.stored_at_once = not late and partitions == 1
        self.log = SimulatedLog(late=late, partitions=partitions)
        self.attend()

    async def until(self, done: Callable[[], bool]) -> None:
        for _ in range(COMMITS_MAX):
            if done():
                return
            assert self.log.waiting, "nothing is under way"
            self.log.store()
            self.log.answer()
        raise AssertionError("it never ends")

    async def settle(self) -> None:
        """The partitions answer one after the other, the last first."""
        for partition in reversed(self.partitions):
            while self.log._unannounced[partition]:
                self.log.announce(partition)

    @contextmanager
    def full(self, taken_bytes: int = 0) -> Iterator[None]:
        self.log.refusing = True
        try:
            yield
        finally:
            self.log.refusing = False

    async def crash(self) -> None:
        self.log = self.log.crashed()
        self.attend()

    async def restart(self) -> None:
        await self.safe()
        self.log.close()
        self.log = self.log.crashed()
        self.attend()

    def torn(self) -> Iterator[Driver]:
        unstored = sum(append.ticket > self.log.stored for append in self.appends)
        for kept in range(unstored + 1):
            other = SimulatedDriver.__new__(SimulatedDriver)
            Driver.__init__(other)
            other.stored_at_once = self.stored_at_once
            other.log = self.log.crashed(kept)
            other.attend()
            yield other

    def close(self) -> None:
        """It has nothing to let go of."""


MAKERS: dict[str, Callable[[Path], Driver]] = {
    "disk-fsync": lambda folder: EmbeddedDriver(folder, "fsync"),
    "disk-os": lambda folder: EmbeddedDriver(folder, "os"),
    "tiered": lambda folder: EmbeddedDriver(folder, "tiered"),
    "memory": lambda folder: EmbeddedDriver(folder, "memory"),
    "simulated-late": lambda folder: SimulatedDriver(late=True, partitions=1),
    "simulated-at-once": lambda folder: SimulatedDriver(late=False, partitions=1),
    "simulated-partitions": lambda folder: SimulatedDriver(late=True, partitions=3),
}
ALL = tuple(MAKERS)
LASTING = tuple(name for name in ALL if name != "memory")  # what lives in memory ends with the process
ON_DISK = ("disk-fsync", "disk-os", "tiered")
LATE = ("disk-fsync", "simulated-late", "simulated-partitions")


# ── what to append ──


def row(
    rows: Rows, topic: bytes, payload: bytes, *, qos: int = 1, flags: int = 0, publisher: bytes = b"p",
    properties: bytes = b"", expiry: int = NO_EXPIRY, uuid: bytes = NO_UUID,
) -> None:  # fmt: skip
    """One more message; a run grows where it is like the one before."""
    n = len(rows)
    rows.add(topic, publisher, b"default", qos | flags, payload, properties, expiry)
    if uuid != NO_UUID:
        rows.uuids = rows.uuids if rows.uuids is not None else [NO_UUID] * (n + 1)
        rows.uuids[n] = uuid
    if n and all(column[n] == column[n - 1] for column in (rows.topics, rows.publishers, rows.flags)):
        rows.cuts.pop()


def tick(*messages: tuple[bytes, bytes], qos: int = 1, time_ms: int = 1000) -> Rows:
    """Messages as (topic, payload)."""
    rows = Rows(time_ms)
    for topic, payload in messages:
        row(rows, topic, payload, qos=qos)
    return rows


def many(start: int, count: int, *, topics: int = 5, qos: int = 1, time_ms: int = 1000, size: int = 0) -> Rows:
    """`count` messages, numbered from `start`, over some topics."""
    return tick(
        *((b"t/%d" % (n % topics), b"%d" % n + b"." * size) for n in range(start, start + count)),
        qos=qos,
        time_ms=time_ms,
    )


def partition_of(position: int) -> int:
    return position >> PARTITION_SHIFT
