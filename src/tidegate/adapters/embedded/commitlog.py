"""The commit log port on `log.files.SegmentedLog` or `log.memory.MemoryLog`.

Appending is a write(2) on the loop's thread. Everything that can wait for the disk (fdatasync, reads, snapshots,
deleting) happens on two threads: one syncs, one does the rest, so that a slow read never delays an acknowledgement.

What the disk refuses is told: a read is asked again, until it succeeds or what it is about counts as lost
(`log/unreadable`); deleting is tried again; a store that can take nothing more has failed (`on_failure`). Anything else
that goes wrong on a thread nobody foresaw, and it ends the thread (`worker`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

from tidegate.adapters.embedded.asking_again import AskingAgain, Report
from tidegate.adapters.embedded.worker import Worker
from tidegate.errors import StorageError
from tidegate.log.files import SegmentedLog
from tidegate.log.files.disk import storage_error
from tidegate.log.frame import encode_changes, encode_rows
from tidegate.log.index import Wanted
from tidegate.log.memory import MemoryLog
from tidegate.log.reading import Read, Unfinished
from tidegate.log.recovery import Damage
from tidegate.log.rows import Rows
from tidegate.log.segment import SegmentFacts
from tidegate.log.snapshot import SnapshotWriter, load_snapshot, snapshot_positions
from tidegate.ports.commitlog import NO_DISK, Disk, Listener, Snapshot

# Ticks of so few messages are announced before they are written: who waits for them need not wait for the disk.
EARLY_ROWS_MAX = 4

# A sync waits so long for company, if there was some lately: many syncs of a little cost more than they give.
PACE_S = 0.001
PACED_SYNCS = 16

# What could not be deleted is tried again after this.
DELETE_AGAIN_S = 5.0


class NoListener:
    def announced(self, partition: int, rows: Rows) -> None:
        """Nobody listens yet."""

    def stored(self, ticket: int) -> None:
        """Nor now."""

    def refused(self, ticket: int, why: StorageError) -> None:
        raise why


def unheard(event: str, fields: Mapping[str, object]) -> None:
    """Nobody listens."""


class EmbeddedLog:
    def __init__(
        self,
        store: SegmentedLog | MemoryLog,
        *,
        wait_for_disk: bool,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[StorageError], None],
        report: Report = unheard,
    ) -> None:
        self._store = store
        self._folder: Path | None = store.folder if isinstance(store, SegmentedLog) else None
        self._wait_for_disk = wait_for_disk
        self._loop = loop
        self._on_failure = on_failure
        self._report = report
        self._ticket = 0
        self.stored = 0
        self._seen = 0  # the position after messages that were announced early, and refused
        # A snapshot may lie behind the last message, and what is appended from now on belongs behind the snapshot.
        behind = snapshot_positions(self._folder)[:1] if self._folder is not None else []
        self.ends: tuple[int, ...] = (max([store.end, *behind]),)
        self.listener: Listener = NoListener()
        self.report: list[Damage] = store.report
        self._written = (0, 0)  # the last ticket whose bytes are in the file, and how many there are by then
        self._synced_bytes = 0
        self._syncing = False
        self._accompanied = 0  # syncs to come that wait for company
        self._sync_requests: SimpleQueue[bool] = SimpleQueue()
        self._asking_again = AskingAgain(report)
        self._worker = Worker("tidegate-disk")
        self._syncer = threading.Thread(target=self._sync_forever, name="tidegate-sync", daemon=True)
        self._syncer.start()

    @property
    def floors(self) -> tuple[int, ...]:
        return (self._store.floor,)

    @property
    def unstored_bytes(self) -> int:
        return self._written[1] - self._synced_bytes if self._wait_for_disk else 0

    # ── appending ──

    def append(self, rows: Rows, changes: Sequence[bytes], time_ms: int) -> int:
        base = self.ends[0]
        count = len(rows.payloads)
        end = base + count
        self._ticket = ticket = self._ticket + 1
        early = 0 < count <= EARLY_ROWS_MAX and not changes and max(rows.flags) < 2
        if count:
            rows.positions = range(base, end)
        if early:
            self.ends = (end,)  # whatever becomes of the write, nobody else gets these positions (I10)
            self.listener.announced(0, rows)
        entries: list[tuple[int, int, int, Collection[bytes] | None]] = []
        frames = b""
        if count:
            frames, topics = encode_rows(rows, base, time_ms, followed=bool(changes))
            entries.append((0, base, count, topics))
        if changes:
            entries.append((len(frames), end, len(changes), None))
            frames += encode_changes(changes, end, time_ms)
        if frames:
            try:
                self._store.append(frames, end, entries)
            except StorageError as error:
                if early:
                    self._seen = end
                self.listener.refused(ticket, error)
                return ticket
        self._written = (ticket, self._written[1] + len(frames))
        if not self._wait_for_disk:
            self.stored = ticket
        if count and not early:
            self.ends = (end,)
            self.listener.announced(0, rows)
        return ticket

    def commit(self) -> None:
        """Sync on the other thread; while one is under way, everything appended shares the next."""
        if not self._syncing and self._wait_for_disk:
            self._syncing = True
            self._sync_requests.put(True)

    def close_sealed(self) -> None:
        """For durability "os": sealed segments are synced too. The active one is left to the kernel, because
        appending to a file waits while it is being synced."""
        if not self._wait_for_disk:
            self._on_worker(self._store.sync_sealed, self._on_failure)

    def _sync_forever(self) -> None:
        while self._sync_requests.get():
            if self._accompanied > 0:
                # Others were publishing during one of the last syncs: they share this one. A lone publisher, which
                # waits for its answer before it goes on, is never in company, and never waits.
                self._accompanied -= 1
                time.sleep(PACE_S)
            ticket, written_bytes = self._written  # by now
            try:
                self._store.sync()
            except StorageError as error:
                self._call(self._on_failure, error)
                return
            if self._written[0] > ticket:
                self._accompanied = PACED_SYNCS
            self._call(self._synced, ticket, written_bytes)

    def sync_now(self) -> None:
        """Wait for the disk; not on the loop's thread while clients are served."""
        self._store.sync()

    def _synced(self, ticket: int, written_bytes: int) -> None:
        self._syncing = False
        self._synced_bytes = written_bytes
        if self._wait_for_disk:
            self.stored = ticket
            self.listener.stored(ticket)

    def _on_worker(self, job: Callable[[], None], refused: Callable[[StorageError], None]) -> None:
        """Do it on the other thread; what the disk refuses is told on this one."""

        def work() -> None:
            try:
                job()
            except StorageError as error:
                self._call(refused if self._store.failed is None else self._on_failure, error)

        self._worker.do(work)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    # ── reading ──

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        def work() -> None:
            try:
                found = self._store.read(position, bytes_max=bytes_max, wanted=wanted, end=end, in_turns=True)
            except Unfinished:
                self._worker.do(work)  # behind the reads of others
            except (OSError, MemoryError) as error:
                self._call(self._later, position, error, done)
            else:
                self._call(self._found, position, found, done)

        self._worker.do(work)

    def _found(self, position: int, found: Read, done: Callable[[Read], None]) -> None:
        self._asking_again.passed(position)
        done(found)

    def _later(self, position: int, error: OSError | MemoryError, done: Callable[[Read], None]) -> None:
        pause_s = self._asking_again.failed(position, error)
        self._loop.call_later(pause_s, done, Read([], position, 0))  # nothing of it is lost: it is asked again

    def positions_at_time(self, time_ms: int, found: Callable[[list[int]], None]) -> tuple[list[int], bool]:
        floor = self._store.floor
        asked = -time_ms  # no position

        def look_again() -> None:
            positions, known = self.positions_at_time(time_ms, found)
            if known:
                found(positions)

        try:
            position = self._store.position_at_time(time_ms)
        except (OSError, MemoryError) as error:
            self._loop.call_later(self._asking_again.failed(asked, error), look_again)
            return [floor], False
        self._asking_again.passed(asked)
        return [position], True

    # ── state ──

    def state(self) -> Iterator[list[bytes]]:
        position = 0
        if self._folder is not None:
            try:
                position, frames, damage = load_snapshot(self._folder)
            except OSError as error:
                raise storage_error(error, f"cannot read the snapshots in {self._folder}") from error
            yield from frames
            self.report += damage
            if damage:
                position = 0  # what the snapshot lost may still stand in the log; the rest is replayed to the same end
        try:
            yield from self._store.changes_from(position)
        except OSError as error:
            raise storage_error(error, f"cannot read {error.filename}") from error

    def snapshot(self) -> Snapshot:
        if self._folder is not None:
            # A place of its own: changes before it are in the snapshot, also when no message lies between them.
            self.ends = (self.ends[0] + 1,)
        return FileSnapshot(self, self._folder, self.ends[0])

    def snapshot_floor(self) -> int:
        if self._folder is None:
            return self.ends[0]  # state in memory is not rebuilt
        try:
            positions = snapshot_positions(self._folder)
        except OSError:
            return 0  # nobody knows at the moment: everything may be needed
        return positions[-1] if positions else 0

    # ── keeping house ──

    def segments(self) -> list[SegmentFacts]:
        return self._store.segments()

    def topics(self, segment: SegmentFacts) -> Iterator[bytes]:
        try:
            yield from self._store.topics(segment)
        except OSError as error:
            raise storage_error(error, f"cannot read {error.filename}") from error

    def drop(self, segments: Sequence[SegmentFacts]) -> None:
        def refused(error: StorageError) -> None:
            self._report("log.untrimmed", {"error": str(error)})
            self._loop.call_later(DELETE_AGAIN_S, self.drop, segments)

        self._on_worker(lambda: self._store.drop(segments), refused)

    def disk(self) -> Disk:
        if self._folder is None:
            return NO_DISK
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return NO_DISK  # whoever cannot be asked does not limit; the next write will tell
        return Disk(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def close(self) -> None:
        self._sync_requests.put(False)
        self._worker.finish()
        self._syncer.join()
        # Positions of a refused tick that was announced early have been seen: the next start jumps over them (I10).
        unwritten = self._store.end < self._seen
        if unwritten and self._store.failed is None:
            self._store.sync()
        self._store.close(clean=not unwritten)


class FileSnapshot:
    def __init__(self, log: EmbeddedLog, folder: Path | None, position: int) -> None:
        self._log = log
        self._writer = SnapshotWriter(folder, position) if folder is not None else None

    def add(self, records: Sequence[bytes]) -> None:
        if self._writer is not None:
            self._writer.add(records)

    def commit(self, done: Callable[[bool], None]) -> None:
        writer = self._writer
        if writer is None:
            self._log._loop.call_soon(done, True)
            return

        def work() -> None:
            try:
                self._log.sync_now()  # a snapshot must not know what the log could still lose
                writer.commit()
            except StorageError:
                writer.abort()
                raise
            self._log._call(done, True)

        self._log._on_worker(work, lambda error: done(False))

    def commit_now(self) -> None:
        """For the last one, when the loop is about to end."""
        if self._writer is not None:
            self._log.sync_now()
            self._writer.commit()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
