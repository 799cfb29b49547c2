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
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.run import Run
from tidegate.log.segment import SegmentFacts
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
# A broker that has not come to rest after so many ticks never will.
TICKS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """What one append stored."""

    ticket: int
    base: int
    end: int
    runs: list[Run]
    changes: list[bytes]


class SimulatedLog:
    """`late`: what is appended is stored only when the test calls `store`; reads wait for `answer` in any case."""

    def __init__(self, *, late: bool = True) -> None:
        self.late = late
        self.entries: list[Entry] = []
        self.end = 0
        self.stored = 0
        self.on_stored: Callable[[], None] = lambda: None
        self.refusing = False
        self.lowest = 0  # everything before it has been let go
        self._ticket = 0
        self._requested: int | None = None
        self._reads: list[Callable[[], None]] = []
        self._snapshot: tuple[int, list[list[bytes]]] = (0, [])

    # ── what the test decides ──

    @property
    def waiting(self) -> bool:
        """Something is to be stored or answered."""
        return self._requested is not None or bool(self._reads)

    def store(self) -> None:
        """The sync that is under way has ended."""
        if self._requested is not None:
            self.stored, self._requested = self._requested, None
            self.on_stored()

    def answer(self) -> None:
        """The oldest read has ended."""
        if self._reads:
            self._reads.pop(0)()

    def crashed(self, kept: int = 0) -> SimulatedLog:
        """The log as the next start finds it: what was stored, and `kept` more appends that reached the disk all the
        same."""
        after = SimulatedLog(late=self.late)
        after.entries = [e for e in self.entries if e.ticket <= self.stored + kept]
        after.end = self.end + POSITION_GAP
        after.lowest = self.lowest
        after._ticket = after.stored = after.entries[-1].ticket if after.entries else 0
        after._snapshot = self._snapshot
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
    def floor(self) -> int:
        return self.lowest

    @property
    def unstored_bytes(self) -> int:
        return 0

    def append(self, runs: Sequence[Run], changes: Sequence[bytes], time_ms: int) -> int:
        if self.refusing:
            raise DiskFull("no room")
        base = self.end
        kept = []
        for run in runs:
            run.base, run.time_ms = self.end, time_ms
            self.end += run.count
            kept.append(_copy(run, 0, run.count))
        self._ticket += 1
        self.entries.append(Entry(self._ticket, base, self.end, kept, list(changes)))
        if not self.late:
            self.stored = self._ticket
        return self._ticket

    def skip(self, positions: int) -> None:
        self.end += positions

    def commit(self) -> None:
        if self.late and self._requested is None:
            self._requested = self._ticket

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        self._reads.append(lambda: done(self._read(position, min(end, self.end), bytes_max, wanted)))

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

    def position_at_time(self, time_ms: int, found: Callable[[int], None]) -> tuple[int, bool]:
        return next((run.base for _, run, _ in self.messages() if run.time_ms >= time_ms), self.end), True

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
        return self._snapshot[0]

    def segments(self) -> list[SegmentFacts]:
        return []

    def topics(self, segment: SegmentFacts) -> Iterator[bytes]:
        return iter(())

    def drop(self, segments: Sequence[SegmentFacts]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.store()


class SimulatedSnapshot:
    def __init__(self, log: SimulatedLog) -> None:
        self.log = log
        self.position = log.end
        self.records: list[list[bytes]] = []

    def add(self, records: Sequence[bytes]) -> None:
        self.records.append(list(records))

    def commit(self, done: Callable[[bool], None]) -> None:
        def finish() -> None:
            self.log._snapshot = (self.position, self.records)
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
    """Collects what it is sent. `paused` is the test's to set; `SimulatedBroker.drain` ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False
        self.throttled = False

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    def throttle(self, on: bool) -> None:
        self.throttled = on


class SimulatedBroker:
    def __init__(self, log: SimulatedLog | None = None, *, fast: bool = True, **mqtt: Any) -> None:
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
        self.fast = fast
        self.hurrying = False  # messages are handed over ahead of the tick that appends them
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
        self.broker.fast = self.fast
        self.broker.hurry = self._hurry
        recovered = Recovery(self.broker).run(lambda *_: None)
        assert not recovered.unreadable
        self.housekeeping = Housekeeping(self.broker)
        return recovered

    def _wake(self) -> None:
        self.woken = True

    def _hurry(self) -> bool:
        if self.hurrying and self.broker.hand_over():
            self.woken = True
            return True
        return False

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
        self.broker.now_s, self.broker.now_ms = self.now_s, int(self.now_s * 1000)
        self.housekeeping.often()
        self.housekeeping.each_second()

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
