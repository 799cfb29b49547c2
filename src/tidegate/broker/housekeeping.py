"""What the broker does now and then, in small steps: positions to the log, snapshots of the state, retention.

Each call does a bounded piece of work; the server calls `often` ten times a second and `each_second` once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidegate.broker import deadlines, state
from tidegate.delivery.gate import Job
from tidegate.delivery.group import Group
from tidegate.errors import StorageError
from tidegate.limits import PARTITION_SHIFT, SNAPSHOT_CHANGES_BYTES
from tidegate.log.retention import plan
from tidegate.log.segment import SegmentFacts
from tidegate.ports.commitlog import Snapshot
from tidegate.session import changes
from tidegate.session.flights import Begun
from tidegate.session.reader import AWAY, Reader

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

TOPICS_PER_STEP = 128
SESSIONS_PER_STEP = 1000

# A client that acknowledges in an odd order leaves many gaps: those of so many are written once a second only.
GAPS_MANY = 256

# Messages in flight to all members of a group, up to which what they acknowledged beyond a gap is written down.
GROUP_FLIGHTS_MAX = 1024


class Housekeeping:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._snapshot: Snapshot | None = None
        self._state: Iterator[list[bytes]] | None = None
        self._snapshot_s = broker.now_s  # when the last one began
        self._snapshot_pause_s: float = broker.config.log.clean_interval_s
        self._retention_s = broker.now_s
        self._trimming = False

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way: then `often` should come more often."""
        return self._state is not None

    def often(self) -> None:
        self.write_positions()
        if self._state is not None:
            self._continue_snapshot()
        self.broker.delivery.ask_again()

    def deadlines(self) -> bool:
        """Judge what is due; whether there is more. Reads that have arrived come first, so the server calls it once it
        has taken them."""
        return deadlines.run(self.broker)

    def each_second(self) -> None:
        broker = self.broker
        broker.retaining.expire()
        for outbox in list(broker.post.stuck):
            outbox.look()
            if outbox.full and outbox.room():
                # It was never paused, so nobody tells that its socket has taken what others had no room for.
                outbox.full = False
                broker.unblock(outbox)
        broker.room.look()
        broker.storing.retry()  # is there room now?
        if broker.now_s - self._retention_s >= broker.config.log.clean_interval_s and not self._trimming:
            self._retention_s = broker.now_s
            self._trimming = True
            broker.gate.add(self._trim())
        if broker.storing.changes_bytes > SNAPSHOT_CHANGES_BYTES:
            self.start_snapshot()

    # ── positions ──

    def write_positions(self, *, last: bool = False) -> None:
        """Positions that moved since the last time. What a crash loses of this is sent again, never skipped.

        `last`: there is no later."""
        broker = self.broker
        delivery = broker.delivery
        moved = delivery.moved
        if not moved or not broker.storing.on:
            return
        pairs: list[tuple[int, int]] = []
        later: list[Reader] = []
        begun = Begun()
        work = 0
        while moved and work < SESSIONS_PER_STEP:
            reader = moved.pop()
            work += 1
            if reader.session is not None and not reader.session.persistent:
                continue
            now_at = delivery.positions(reader, begun)
            work += _flights_of(reader) // 64
            pairs += [
                (reader.number, position)
                for position, before in zip(now_at, reader.written, strict=True)
                if position != before
            ]
            reader.written = now_at
            if isinstance(reader, Group):
                self._forget_skipped(reader, now_at)
            if not self._write_gaps(reader, now_at, last, begun):
                later.append(reader)
        moved.update(later)
        if pairs:
            broker.change(changes.positions(pairs))

    def _write_gaps(self, reader: Reader, positions: tuple[int, ...], last: bool, begun: Begun) -> bool:
        """What the client acknowledged beyond a gap is not sent to it again after a restart (S4.5)."""
        if isinstance(reader, Group):
            # Its members' flights lie between each other: looked at only where they are few.
            unfinished = [m.session.flights.unfinished for m in reader.members if m.session.flights is not None]
            if sum(unfinished) > GROUP_FLIGHTS_MAX:
                return True
        else:
            flights = reader.session.flights if reader.session is not None else None
            if flights is None or flights.contiguous:
                return True
        found = self.broker.delivery.finished_above(reader, positions, begun)
        if not found or found == reader.noted:
            return True
        if len(found) > GAPS_MANY and self.broker.now_s - reader.noted_s < 1.0 and not last:
            return False
        reader.noted, reader.noted_s = found, self.broker.now_s
        self.broker.change(changes.acked(reader.number, found))
        return True

    def _forget_skipped(self, group: Group, positions: tuple[int, ...]) -> None:
        if group.skip is not None:
            for partition, position in enumerate(positions):
                group.skip.forget_below(position, partition << PARTITION_SHIFT)
            group.skip = group.skip if group.skip else None

    # ── snapshots ──

    def start_snapshot(self) -> None:
        broker = self.broker
        early = broker.now_s - self._snapshot_s < self._snapshot_pause_s
        if early or self._state is not None or self._snapshot is not None or not broker.storing.may_write:
            return
        self._snapshot_s = broker.now_s
        broker.flush()
        try:
            self._snapshot = broker.log.snapshot()
        except StorageError as error:
            broker.report("snapshot.failed", {"error": str(error)})
            return
        broker.storing.changes_bytes = 0
        self._state = state.all_records(broker)

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
        if broker.post.tick or not broker.storing.idle:
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

    def _trim(self) -> Job:
        try:
            yield from self._trim_due()
        except StorageError as error:
            self.broker.report("log.untrimmed", {"error": str(error)})  # the next time may go better
        self._trimming = False

    def _trim_due(self) -> Job:
        """Let go of segments that are due and that nobody needs; above the hard limit, also of needed ones.

        Where there is an archive, only of what is in the lake; and then whether it is needed or not, if it can be read
        there."""
        broker = self.broker
        limits = broker.config.log
        hard_bytes = broker.room.limit_bytes
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
            hard_bytes=hard_bytes,
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
            cost = 0
            for topic in broker.log.topics(segment):
                cost += 2 + self._add_needing(topic, segment, needing) // 8
                if needing and total <= hard_bytes:
                    break
                if cost >= 2 * TOPICS_PER_STEP:
                    yield cost
                    cost = 0
            if needing and total <= hard_bytes:
                break
            if needing:
                broker.counters.dropped["needed, but the log was full"] += 1
                broker.report("log.promise_broken", {"first": segment.base, "last": segment.end - 1})
            yield from self._pass_by(segment, needing)
            dropped.append(segment)
            total -= segment.bytes
            yield TOPICS_PER_STEP
        if dropped:
            if in_lake:
                yield from self._write_down_live()
            broker.log.drop(dropped)
            broker.room.dropped(sum(segment.bytes for segment in dropped))
            broker.report("log.trimmed", {"segments": len(dropped), "floor": dropped[-1].end})

    def _add_needing(self, topic: bytes, segment: SegmentFacts, needing: set[Reader]) -> int:
        """Add the readers that still want messages of a topic in a segment; how many subscriptions match it."""
        broker = self.broker
        delivery = broker.delivery
        partition = segment.base >> PARTITION_SHIFT
        found = broker.table.index.match(topic)
        for subscription in found:
            session = subscription.session
            if not subscription.qos or not session.persistent or session.ended:
                continue
            reader = subscription.reader or session.reader
            if reader in needing:
                continue
            if delivery.positions(reader)[partition] < segment.end and subscription.since[partition] < segment.end:
                needing.add(reader)
                continue
            begun = session.flights.lowest(reader, len(delivery.ends))[partition] if session.flights else None
            if begun is not None and begun < segment.end:
                needing.add(reader)  # with QoS 2 for a group, whose position does not wait for it
        return len(found)

    def _write_down_live(self) -> Job:
        """Positions of those who have everything, or after a crash they would look for it in the lake."""
        for index, session in enumerate(list(self.broker.sessions)):
            if index % SESSIONS_PER_STEP == SESSIONS_PER_STEP - 1:
                yield SESSIONS_PER_STEP // 4
            if session.reader.live and session.persistent:
                self.broker.delivery.moved.add(session.reader)

    def _pass_by(self, segment: SegmentFacts, needing: set[Reader]) -> Job:
        """Nothing in the segment is for the others, read or not: the positions of absent ones move behind it."""
        broker = self.broker
        moved = broker.delivery.moved
        partition = segment.base >> PARTITION_SHIFT
        for group in broker.groups.all():
            if group.standing is AWAY and group.cursors[partition] < segment.end and group not in needing:
                group.cursors[partition] = segment.end
                moved.add(group)
        for index, session in enumerate(list(broker.sessions)):
            if index % SESSIONS_PER_STEP == SESSIONS_PER_STEP - 1:
                yield SESSIONS_PER_STEP // 4
            for reader in session.readers():
                if reader.standing is AWAY and reader.cursors[partition] < segment.end and reader not in needing:
                    reader.cursors[partition] = segment.end
                    moved.add(reader)
                elif reader.live and session.persistent:
                    moved.add(reader)


def _flights_of(reader: Reader) -> int:
    """Flights that are looked at for its position, in the worst case."""
    if isinstance(reader, Group):
        return 16 * len(reader.members)  # those of its members are gone through once for all their groups
    flights = reader.session.flights if reader.session is not None else None
    return len(flights) if flights is not None else 0
