"""The broker's core without sockets, disk or clock: a test decides when the log has stored, when a read is answered,
when a tick comes, what time it is, and when everything crashes.

    SimulatedLog     the commit log port in memory, with late completion, refusals, crashes and snapshots
    SimulatedLink    a connection that collects what it is sent
    SimulatedBroker  a broker on such a log, its housekeeping and its clock
    SimulatedClient  the other end of a link: sends packets, decodes what comes back
    Answerer         a client that owes answers, and gives them when told
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidegate.broker.core import Broker
from tidegate.broker.housekeeping import Housekeeping
from tidegate.broker.recover import Recovered, Recovery
from tidegate.config import Config
from tidegate.errors import DiskFull
from tidegate.limits import PARTITION_SHIFT
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.rows import Rows
from tidegate.log.run import Run
from tidegate.log.segment import SegmentFacts
from tidegate.ports.commitlog import NO_DISK, Disk, Listener
from tidegate.session.link import Link, Phase
from tidegate.wire import (
    Connack,
    Connect,
    Packet,
    PacketStream,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    decode,
    encode,
)

# After a crash positions go on far behind those that anybody may have seen.
POSITION_GAP = 1_000_000
OFFSETS = (1 << PARTITION_SHIFT) - 1
# A broker that has not come to rest after so many ticks never will.
TICKS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """What one append stored."""

    ticket: int
    end: int
    runs: list[Run]
    changes: list[bytes]


class SimulatedLog:
    """`late`: what is appended is stored only when the test calls `store`; reads wait for `answer` in any case.

    With several partitions a topic belongs to one of them. It is a log on other machines then: what is appended is
    announced partition by partition when the test calls `announce`, before it is stored. `prompt`: it is announced
    within the call all the same."""

    def __init__(self, *, late: bool = True, partitions: int = 1, prompt: bool = False) -> None:
        self.late = late
        self.partitions = partitions
        self.prompt = prompt or partitions == 1
        self.entries: list[Entry] = []
        self.ends: tuple[int, ...] = tuple(p << PARTITION_SHIFT for p in range(partitions))
        self.stored = 0
        self.listener: Listener = None  # type: ignore[assignment]
        self.refusing = False
        self.lowest = list(self.ends)  # everything before it has been let go
        self._given = list(self.ends)  # positions given, announced or not
        self._unannounced: list[list[tuple[int, Rows]]] = [[] for _ in range(partitions)]
        self._ticket = 0
        self._requested: int | None = None
        self._reads: list[Callable[[], None]] = []
        self._snapshot: tuple[int, list[list[bytes]]] = (0, [])  # the log's length when it began, and its records
        self._snapshot_floor = 0

    # ── what the test decides ──

    @property
    def end(self) -> int:
        return self.ends[0]

    @property
    def length(self) -> int:
        """How many positions were given; where there is one partition, the position after the last."""
        return sum(given & OFFSETS for given in self._given)

    @property
    def has_snapshot(self) -> bool:
        return bool(self._snapshot[1])

    @property
    def waiting(self) -> bool:
        """Something is to be announced, stored or answered."""
        return self._requested is not None or bool(self._reads) or any(self._unannounced)

    def announce(self, partition: int | None = None) -> None:
        """A partition's oldest messages that were not announced come back; of all, one after the other, for None."""
        for p in range(self.partitions) if partition is None else (partition,):
            while self._unannounced[p]:
                _, rows = self._unannounced[p].pop(0)
                ends = list(self.ends)
                ends[p] = rows.positions[-1] + 1
                self.ends = tuple(ends)
                self.listener.announced(p, rows)
                if partition is not None:
                    break

    def store(self) -> None:
        """The sync that is under way has ended."""
        if self._requested is not None:
            self.announce()
            self.stored, self._requested = self._requested, None
            self.listener.stored(self.stored)

    def answer(self) -> None:
        """The oldest read has ended."""
        if self._reads:
            self._reads.pop(0)()

    def crashed(self, kept: int = 0) -> SimulatedLog:
        """The log as the next start finds it: what was stored, and `kept` more appends that reached the disk all the
        same."""
        after = SimulatedLog(late=self.late, partitions=self.partitions, prompt=self.prompt)
        after.entries = [e for e in self.entries if e.ticket <= self.stored + kept]
        after.ends = tuple(given + POSITION_GAP for given in self._given)
        after._given = list(after.ends)
        after.lowest = list(self.lowest)
        after._ticket = after.stored = after.entries[-1].ticket if after.entries else 0
        after._snapshot, after._snapshot_floor = self._snapshot, self._snapshot_floor
        return after

    def messages(self, *, safe: bool = False) -> Iterator[tuple[int, Run, int]]:
        """Every message as (position, run, index in it); `safe`: those that a crash cannot take."""
        for entry in self.entries:
            if not safe or entry.ticket <= self.stored:
                for run in entry.runs:
                    for index in range(run.count):
                        yield run.base + index, run, index

    # ── the port ──

    @property
    def floors(self) -> tuple[int, ...]:
        return tuple(self.lowest)

    @property
    def unstored_bytes(self) -> int:
        return 0

    def append(self, rows: Rows, changes: Sequence[bytes], time_ms: int) -> int:
        self._ticket += 1
        if self.refusing:
            self.listener.refused(self._ticket, DiskFull("no room"))
            return self._ticket
        shares = self._share(rows)
        kept = []
        for partition, share in shares:
            first = self._given[partition]
            share.positions = range(first, first + len(share))
            share.time_ms = time_ms
            self._given[partition] += len(share)
            kept += [_copy(run, 0, run.count) for run in share.runs()]
        self.entries.append(Entry(self._ticket, self.length, kept, list(changes)))
        if self.prompt and not self.late:
            self.stored = self._ticket
        for partition, share in shares:
            self._unannounced[partition].append((self._ticket, share))
            if self.prompt:
                self.announce(partition)
        return self._ticket

    def _share(self, rows: Rows) -> list[tuple[int, Rows]]:
        if self.partitions == 1:
            return [(0, rows)] if len(rows) else []
        by_partition: dict[int, list[int]] = {}
        for row, topic in enumerate(rows.topics):
            by_partition.setdefault(sum(topic) % self.partitions, []).append(row)
        shares = []
        for partition, places in by_partition.items():
            share = Rows.of([Run(*_run(rows, row)) for row in places])
            shares.append((partition, share))
        return shares

    def commit(self) -> None:
        if (self.late or not self.prompt) and self._requested is None:
            self._requested = self._ticket

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        end = min(end, self.ends[position >> PARTITION_SHIFT])
        self._reads.append(lambda: done(self._read(position, end, bytes_max, wanted)))

    def _read(self, position: int, end: int, bytes_max: int, wanted: Wanted | None) -> Read:
        found: list[Run] = []
        for entry in self.entries:
            for run in entry.runs:
                first, last = max(position, run.base), min(end, run.base + run.count)
                if first >= last or (wanted is not None and not wanted(run.topic)):
                    continue
                found.append(_copy(run, first - run.base, last - run.base))
                bytes_max -= sum(map(len, run.payloads)) + 100
                if bytes_max <= 0:
                    return Read(found, last, 0)
        return Read(found, max(position, end), 0)

    def positions_at_time(self, time_ms: int, found: Callable[[list[int]], None]) -> tuple[list[int], bool]:
        firsts = list(self.ends)
        for _, run, _ in self.messages():
            partition = run.base >> PARTITION_SHIFT
            if run.time_ms >= time_ms and run.base < firsts[partition]:
                firsts[partition] = run.base
        return firsts, True

    def state(self) -> Iterator[list[bytes]]:
        position, records = self._snapshot
        yield from records
        for entry in self.entries:
            # Ticks without messages share a position, so some that the snapshot holds come again.
            if entry.end >= position and entry.changes:
                yield entry.changes

    def snapshot(self) -> SimulatedSnapshot:
        return SimulatedSnapshot(self)

    def snapshot_floor(self) -> int:
        return self._snapshot_floor

    def segments(self) -> list[SegmentFacts]:
        return []

    def topics(self, segment: SegmentFacts) -> Iterator[bytes]:
        return iter(())

    def drop(self, segments: Sequence[SegmentFacts]) -> None:
        raise NotImplementedError

    def disk(self) -> Disk:
        return NO_DISK

    def close(self) -> None:
        self.store()


def _run(rows: Rows, row: int) -> tuple[Any, ...]:
    return (
        rows.topics[row],
        rows.publishers[row],
        rows.tenants[row],
        rows.flags[row],
        [rows.payloads[row]],
        rows.properties and [rows.properties[row]],
        rows.expiries and [rows.expiries[row]],
        rows.uuids and [rows.uuids[row]],
    )


class SimulatedSnapshot:
    def __init__(self, log: SimulatedLog) -> None:
        self.log = log
        self.position, self.floor = log.length, log._given[0]
        self.records: list[list[bytes]] = []

    def add(self, records: Sequence[bytes]) -> None:
        self.records.append(list(records))

    def commit(self, done: Callable[[bool], None]) -> None:
        def finish() -> None:
            self.log._snapshot = (self.position, self.records)
            self.log._snapshot_floor = self.floor
            done(True)

        self.log._reads.append(finish)

    def abort(self) -> None:
        self.records = []


def _copy(run: Run, start: int, stop: int) -> Run:
    """Part of a run as it comes from the disk: nothing shared with the one in memory."""
    return Run(
        run.topic,
        run.publisher,
        run.tenant,
        run.flags,
        run.payloads[start:stop],
        run.properties and run.properties[start:stop],
        run.expiries and run.expiries[start:stop],
        run.uuids and run.uuids[start:stop],
        run.base + start,
        run.time_ms,
    )


class SimulatedLink(Link):
    """Collects what it is sent. `outbox.paused` is the test's to set; `SimulatedBroker.drain` ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False
        self.throttled = False
        self.waiting_bytes = 0  # so much of what was written waits for the socket

    def write(self, data: bytes) -> int:
        if not self.closed:
            self.written += data
        return self.waiting_bytes

    def unsent(self) -> int:
        return self.waiting_bytes

    def close(self) -> None:
        self.closed = True

    def throttle(self, on: bool) -> None:
        self.throttled = on


class SimulatedBroker:
    def __init__(self, log: SimulatedLog | None = None, **mqtt: Any) -> None:
        """`mqtt` are settings of that section; `tail_bytes` is small so that readers soon read from the log."""
        tail_bytes = mqtt.pop("tail_bytes", 64 << 20)
        store_qos0 = mqtt.pop("store_qos0", True)
        config = Config()
        self.config = replace(
            config,
            mqtt=replace(config.mqtt, **mqtt),
            log=replace(config.log, tail_bytes=tail_bytes, store_qos0=store_qos0),
            sys=replace(config.sys, interval_s=0),
        )
        self.hurrying = False  # few messages are carried out as they come
        self.now_s = 1000.0
        self.reports: list[tuple[str, dict[str, object]]] = []
        self.log = log or SimulatedLog()
        self.start()

    def start(self) -> Recovered:
        """A new process on the log as it is."""
        self.woken = False
        self.broker = Broker(
            self.config,
            self.log,
            now_s=self.now_s,
            now_ms=int(self.now_s * 1000),
            wake=self._wake,
            report=lambda event, fields: self.reports.append((event, dict(fields))),
        )
        self.broker.hurry = self._hurry
        recovered = Recovery(self.broker).run(lambda *_: None)
        assert not recovered.set_aside
        self.broker.at(self.now_s, int(self.now_s * 1000))
        self.housekeeping = Housekeeping(self.broker)
        return recovered

    def _wake(self) -> None:
        self.woken = True

    def _hurry(self) -> bool:
        if self.hurrying:
            self.broker.hurrying = True
            self.broker.flush()
            self.broker.hurrying = False
        return self.hurrying

    @property
    def idle(self) -> bool:
        return not self.woken and not self.log.waiting

    def tick(self) -> None:
        if self.woken:
            self.woken = False
            self.broker.flush()

    def rest(self) -> None:
        """Let everything come to its end, the log included."""
        for _ in range(TICKS_MAX):
            if self.idle:
                return
            self.tick()
            self.log.store()
            self.log.answer()
        raise AssertionError("the broker does not come to rest")

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.broker.at(self.now_s, int(self.now_s * 1000))
        self.housekeeping.often()
        self.housekeeping.each_second()
        while self.housekeeping.deadlines():
            pass

    def snapshot(self) -> None:
        """Begin a snapshot; each `pass_time` takes it one step further."""
        self.pass_time(31)
        self.housekeeping.start_snapshot()

    def drain(self, link: SimulatedLink) -> None:
        self.broker.drained(link)

    def crash(self, kept: int = 0) -> Recovered:
        """Die at this instant, and start again on what reached the disk."""
        self.log = self.log.crashed(kept)
        return self.start()

    def client(self, client_id: str, version: int = 4, **connect: Any) -> SimulatedClient:
        """A connected client; everything comes to rest first."""
        client = SimulatedClient(self, version)
        client.connect(client_id, **connect)
        self.rest()
        return client


class SimulatedClient:
    def __init__(self, simulated: SimulatedBroker, version: int = 4) -> None:
        self.simulated = simulated
        self.version = version
        self.link = SimulatedLink()
        simulated.broker.accept(self.link)
        self._stream = PacketStream(268_435_460)
        self._packet_id = 0

    @property
    def open(self) -> bool:
        return self.link.phase is Phase.OPEN

    def send(self, *packets: Packet) -> None:
        self.send_bytes(b"".join(encode(packet, self.version) for packet in packets))

    def send_bytes(self, data: bytes) -> None:
        if self.link.phase is not Phase.CLOSED:
            self.simulated.broker.receive(self.link, data)

    def connect(self, client_id: str, *, clean: bool = True, will: Any = None, **properties: Any) -> None:
        asked = Properties(**properties)
        self.send(Connect(self.version, client_id.encode(), clean, will=will, properties=asked))

    def next_packet_id(self) -> int:
        self._packet_id += 1
        return self._packet_id

    def drop(self) -> None:
        """The connection breaks."""
        self.simulated.broker.lost(self.link)
        self.link.closed = True

    def received(self) -> list[Packet]:
        """What came since the last call."""
        data = bytes(self.link.written)
        self.link.written.clear()
        return [decode(first, body, self.version, from_server=True) for first, body in self._stream.feed(data)]

    def only(self, kind: type) -> list[Any]:
        """Of what came since the last call, the packets of one kind."""
        return [packet for packet in self.received() if isinstance(packet, kind)]

    def connack(self) -> Connack:
        (found,) = self.only(Connack)
        return found

    def suback(self) -> Suback:
        (found,) = self.only(Suback)
        return found


class Answerer:
    """A client that owes answers, and remembers all it got."""

    def __init__(self, client: SimulatedClient) -> None:
        self.client = client
        self.transcript: list[Any] = []
        self.owed: list[Any] = []

    def look(self) -> None:
        for packet in self.client.received():
            self.transcript.append(packet)
            if isinstance(packet, Publish) and packet.qos:
                self.owed.append((Puback if packet.qos == 1 else Pubrec)(packet.packet_id))
            elif isinstance(packet, Pubrel):
                self.owed.append(Pubcomp(packet.packet_id))

    def acknowledge(self, places: list[int]) -> None:
        """In order where the places are 0, else not; all in one piece."""
        packets = [self.owed.pop(place % len(self.owed)) for place in places if self.owed]
        self.client.send_bytes(b"".join(encode(packet, self.client.version) for packet in packets))
