"""What the broker does now and then, in small steps: positions to the log, snapshots of the state, retention.

Each call does a bounded piece of work; the server calls `often` ten times a second and `each_second` once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidegate.broker import connect, timers
from tidegate.broker.publish import retained_record
from tidegate.broker.subscribe import record_of
from tidegate.errors import StorageError
from tidegate.limits import SNAPSHOT_CHANGES_BYTES, SNAPSHOT_STEP
from tidegate.log.retention import plan
from tidegate.log.segment import SegmentFacts
from tidegate.ports.commitlog import Snapshot
from tidegate.session import changes
from tidegate.session.flights import State
from tidegate.session.session import Reader, Session

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

TOPICS_PER_STEP = 200
SESSIONS_PER_STEP = 5000


class Housekeeping:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._snapshot: Snapshot | None = None
        self._state: Iterator[list[bytes]] | None = None
        self._snapshot_at = broker.log.end
        self._snapshot_s = broker.now_s  # when the last one began
        self._snapshot_pause_s: float = broker.config.log.clean_interval_s
        self._retention_s = broker.now_s
        self._trimming: Iterator[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way: then `often` should come more often."""
        return self._state is not None

    def often(self) -> None:
        self.write_positions()
        if self._state is not None:
            self._continue_snapshot()
        if self._trimming is not None:
            next(self._trimming, None)

    def each_second(self) -> None:
        broker = self.broker
        timers.run(broker)
        if broker.retained.due(broker.now_ms):
            for message in broker.retained.expire(broker.now_ms):
                broker.change(changes.unretained(message.topic))
        self._mind_the_archive()
        if not broker.storing:
            broker.request_tick()  # try again whether there is room now
        if broker.now_s - self._retention_s >= broker.config.log.clean_interval_s and self._trimming is None:
            self._retention_s = broker.now_s
            self._trimming = self._trim()
        if broker.changes_bytes > SNAPSHOT_CHANGES_BYTES:
            self.start_snapshot()

    # ── positions ──

    def write_positions(self) -> None:
        """Positions that moved since the last time. What a crash loses of this is sent again, never skipped."""
        broker = self.broker
        if not broker.moved:
            return
        position = broker.dispatcher.position
        pairs = []
        for _ in range(min(len(broker.moved), SESSIONS_PER_STEP)):
            reader = broker.moved.pop()
            if reader.session is not None and not reader.session.persistent:
                continue
            now_at = position(reader)
            if reader.skip is not None:
                reader.skip = {skipped for skipped in reader.skip if skipped >= now_at} or None
            if now_at != reader.floor:
                reader.floor = now_at
                pairs.append((reader.number, now_at))
        if pairs:
            broker.change(changes.positions(pairs))

    # ── snapshots ──

    def start_snapshot(self) -> None:
        broker = self.broker
        early = broker.now_s - self._snapshot_s < self._snapshot_pause_s
        if early or self._state is not None or self._snapshot is not None:
            return
        self._snapshot_s = broker.now_s
        broker.flush()
        try:
            self._snapshot = broker.log.snapshot()
        except StorageError as error:
            broker.report("snapshot.failed", {"error": str(error)})
            return
        broker.changes_bytes = 0
        self._state = state_records(broker)

    def _continue_snapshot(self) -> None:
        assert self._snapshot is not None and self._state is not None
        broker = self.broker
        broker.flush()  # what is copied has been appended …
        try:
            records = next(self._state, None)
            if records is not None:
                self._snapshot.add(records)
                return
        except StorageError as error:
            self._snapshot.abort()
            self._snapshot = self._state = None
            broker.report("snapshot.failed", {"error": str(error)})
            return
        if broker.dispatcher.changes or broker.log.stored < broker.ticket:
            return  # … and stored, before it counts: else after a crash it would know of what never was
        self._state = None
        self._snapshot.commit(self._snapshot_done)

    def _snapshot_done(self, worked: bool) -> None:
        self._snapshot = None
        # The more there is to write, the longer until it is written again: it fills at most half of the time.
        took_s = self.broker.now_s - self._snapshot_s
        self._snapshot_pause_s = max(2 * took_s, self.broker.config.log.clean_interval_s)
        if not worked:
            self.broker.report("snapshot.failed", {})

    # ── retention ──

    def _mind_the_archive(self) -> None:
        """What is not in the lake yet is never let go: above the hard limit the log stops growing until it is."""
        broker = self.broker
        archived = broker.archived
        segments = broker.log.segments() if archived is not None else []
        full = ""
        if archived is not None and len(segments) > 1 and segments[0].sequence >= archived.segment:
            size, most = sum(segment.bytes for segment in segments), broker.config.log.hard_bytes
            if size > most:
                full = f"the log may hold {most} bytes (log.hard_bytes), and the pipeline has not archived its oldest"
        if bool(full) != bool(broker.full):
            broker.limit(full)

    def _trim(self) -> Iterator[None]:
        """Let go of segments that are due and that nobody needs; above the hard limit, also of needed ones.

        Where there is an archive, only of what is in the lake; and then whether it is needed or not, if it can be read
        there."""
        broker = self.broker
        limits = broker.config.log
        archived = broker.archived
        in_lake = archived is not None and archived.readable
        dropped: list[SegmentFacts] = []
        segments = broker.log.segments()
        total = sum(segment.bytes for segment in segments)
        due = plan(
            segments,
            broker.now_ms,
            retention_bytes=limits.retention_bytes,
            retention_ms=limits.retention_s * 1000,
            hard_bytes=limits.hard_bytes,
        ).drop
        for segment in due:
            if archived is not None and segment.sequence >= archived.segment:
                break
            if segment.end > broker.log.snapshot_floor():
                self.start_snapshot()  # the state in it must be elsewhere first
                break
            if in_lake:
                dropped.append(segment)
                continue
            needing: set[Reader] = set()
            for index, topic in enumerate(broker.log.topics(segment)):
                self._add_needing(topic, segment, needing)
                if needing and total <= limits.hard_bytes:
                    break
                if index % TOPICS_PER_STEP == TOPICS_PER_STEP - 1:
                    yield
            if needing and total <= limits.hard_bytes:
                break
            if needing:
                broker.counters.dropped["needed, but the log was full"] += 1
                broker.report("log.promise_broken", {"first": segment.base, "last": segment.end - 1})
            yield from self._pass_by(segment, needing)
            dropped.append(segment)
            total -= segment.bytes
            yield
        if dropped:
            if in_lake:
                yield from self._write_down_live()
            broker.log.drop(dropped)
            broker.report("log.trimmed", {"segments": len(dropped), "floor": dropped[-1].end})
        self._trimming = None

    def _add_needing(self, topic: bytes, segment: SegmentFacts, needing: set[Reader]) -> None:
        """Add the readers that still want messages of a topic in a segment."""
        broker = self.broker
        for subscription in broker.table.index.match(topic):
            if not subscription.qos or not subscription.session.persistent:
                continue
            reader = subscription.reader or subscription.session.reader
            if broker.dispatcher.position(reader) < segment.end and subscription.since < segment.end:
                needing.add(reader)
                continue
            flights = subscription.session.flights
            begun = flights.lowest(reader) if flights is not None else None
            if begun is not None and begun < segment.end:
                needing.add(reader)  # with QoS 2 for a group, whose position does not wait for it

    def _write_down_live(self) -> Iterator[None]:
        """Positions of those who have everything, or after a crash they would look for it in the lake."""
        broker = self.broker
        for index, session in enumerate(list(broker.sessions.values())):
            if index % SESSIONS_PER_STEP == SESSIONS_PER_STEP - 1:
                yield
            if session.reader.live and session.persistent:
                broker.moved.add(session.reader)

    def _pass_by(self, segment: SegmentFacts, needing: set[Reader]) -> Iterator[None]:
        """Nothing in the segment is for the others, read or not: the positions of absent ones move behind it."""
        broker = self.broker
        for group in broker.groups.values():
            if not group.live and not group.attended and group.cursor < segment.end and group not in needing:
                group.cursor = segment.end
                broker.moved.add(group)
        for index, session in enumerate(list(broker.sessions.values())):
            if index % SESSIONS_PER_STEP == SESSIONS_PER_STEP - 1:
                yield
            reader = session.reader
            if not reader.live and session.link is None and reader.cursor < segment.end and reader not in needing:
                reader.cursor = segment.end
                broker.moved.add(reader)
            elif reader.live and session.persistent:
                broker.moved.add(reader)


def state_records(broker: Broker) -> Iterator[list[bytes]]:
    """The whole state as records, some hundred at a time."""
    sessions = list(broker.sessions.values())
    for start in range(0, len(sessions), SNAPSHOT_STEP):
        records: list[bytes] = []
        for session in sessions[start : start + SNAPSHOT_STEP]:
            if broker.sessions.get(session.client_id) is session:
                records += _session_records(broker, session)
        if records:
            yield records
    for group in list(broker.groups.values()):
        assert group.key is not None
        yield [
            changes.group(group.number, *group.key),
            changes.positions([(group.number, broker.dispatcher.position(group))]),
            *_skipped_records(broker, 0, group),
        ]
    scan = broker.retained.scan(b"#")
    while not scan.done:
        messages = scan.take(broker.now_ms, SNAPSHOT_STEP, SNAPSHOT_STEP)
        if messages:
            yield [retained_record(message) for message in messages]


def _session_records(broker: Broker, session: Session) -> list[bytes]:
    dispatcher = broker.dispatcher
    position = dispatcher.position(session.reader)
    records = [
        changes.session(
            session.number,
            session.link is not None,
            session.link.version if session.link is not None else 0,
            session.expiry_s,
            session.away_since_ms,
            position,
            session.client_id,
            session.tenant,
            session.will,
        )
    ]
    own: list[tuple[int, int]] = []
    for subscription in session.subscriptions.values():
        records.append(record_of(subscription))
        reader = subscription.reader
        if reader is not None and reader.session is session:
            own.append((reader.number, dispatcher.position(reader)))
    if own:
        records.append(changes.positions(own))
    records += [changes.inbound(session.number, pid) for pid in session.inbound or ()]
    if session.flights is not None:
        for f in session.flights.queue:
            if f.qos == 2 or not f.reader.number:
                records.append(_flight_record(broker, session, f.reader, f.pid, f.qos, f.state, f.base))
    for reader in connect.readers(session):
        records += _skipped_records(broker, session.number, reader)
    return records


def _skipped_records(broker: Broker, number: int, reader: Reader) -> list[bytes]:
    """Positions that were finished before a crash and that lie above the reader's own."""
    floor = broker.dispatcher.position(reader)
    return [changes.flight(number, reader.number, 0, 2, State.DONE, skipped, floor) for skipped in reader.skip or ()]


def _flight_record(
    broker: Broker, session: Session, reader: Reader, pid: int, qos: int, state: State, position: int
) -> bytes:
    floor = broker.dispatcher.position(reader) if reader.number else 0
    return changes.flight(session.number, reader.number, pid, qos, state, position, floor)
