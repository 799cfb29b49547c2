"""Start-up: sessions, subscriptions, positions, unfinished QoS 2 flows and retained messages from the log (S0.3, S0.4).

Records are applied in order; each says what is so, so the last one about a thing wins. What was connected when the
broker died is known (S4.6): those sessions count as disconnected now, and their wills are due.

Whatever a record holds, the broker starts: one that cannot be applied is set aside, counted and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tidegate.broker import tracing
from tidegate.broker.retaining import Due
from tidegate.delivery.group import Group
from tidegate.delivery.outbox import RETAINED_READER
from tidegate.limits import PACKET_IDS, PARTITION_SHIFT
from tidegate.router import Retained, parse
from tidegate.session import changes
from tidegate.session.flights import State
from tidegate.session.reader import Reader
from tidegate.session.session import NEVER, Session, Subscription
from tidegate.session.skip import Skip

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# Records that are reported one by one before only their number is.
REPORTED_MAX = 10

# Ranges of finished positions that are kept for a reader before those below its position are let go.
DONE_RANGES_MAX = 4096


class Recovered(NamedTuple):
    sessions: int
    were_connected: int
    subscriptions: int
    retained: int
    set_aside: int  # records that could not be applied


class Recovery:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.connected: set[int] = set()
        self.by_number: dict[int, Session] = {}
        self.positions: dict[tuple[int, int], int] = {}  # by reader and partition
        self.readers: dict[int, Reader] = {}
        # session → packet id → (reader, qos, state, position)
        self.flights: dict[int, dict[int, tuple[int, int, int, int]]] = {}
        self.done: dict[int, Skip] = {}  # reader → what is finished, some of it below its position
        self.highest = 0
        self.set_aside = 0
        self.retained_refused = 0  # a bound has been lowered since they were stored

    def run(self, progress: Callable[[str, int], None]) -> Recovered:
        broker = self.broker
        applied = 0
        for records in broker.log.state():
            for record in records:
                try:
                    APPLY[record[0]](self, record)
                except Exception as error:
                    self._set_aside(record, error)
            applied += len(records)
            progress("records", applied)
        if self.retained_refused:
            broker.counters.dropped["retained, no room"] += self.retained_refused
            broker.report("retained.dropped", {"messages": self.retained_refused, "why": "no room"})
        broker.numbers = count(self.highest + 1)
        self._place_readers()
        self._restore_flights()
        were_connected = len(self.connected)
        self._restart_clocks()
        return Recovered(
            len(broker.sessions), were_connected, len(broker.table.index), len(broker.retaining.store), self.set_aside
        )

    def _set_aside(self, record: bytes, error: Exception) -> None:
        self.set_aside += 1
        self.broker.counters.refused["record"] += 1
        if self.set_aside <= REPORTED_MAX:
            kind = record[0] if record else "none"
            why = f"{type(error).__name__}: {error}"
            self.broker.report("record.set_aside", {"kind": kind, "bytes": len(record), "why": why})

    # ── records ──

    def session(self, record: bytes) -> None:
        sessions = self.broker.sessions
        number, connected, _, expiry_s, away_ms, position, client_id, tenant, will = changes.read_session(record)
        self.highest = max(self.highest, number)
        session = self.by_number.get(number)
        if session is None:
            older = sessions.get(client_id)
            if older is not None:
                self._forget(older)
            session = Session(number, client_id, tenant, expiry_s, [position])
            session.known = True
            sessions.add(session)
            self.by_number[number] = session
        session.expiry_s, session.away_since_ms, session.will = expiry_s, away_ms, will
        self.positions[number, 0] = position
        (self.connected.add if connected else self.connected.discard)(number)

    def gone(self, record: bytes) -> None:
        number = changes.read_number(record)
        session = self.by_number.get(number)
        if session is not None:
            self._forget(session)
        group = self.broker.groups.by_number.get(number)
        if group is not None:
            for member in list(group.members):  # the end of its session is still to be written
                member.session.subscriptions.pop(member.filter, None)
                self._remove(member)
            self.broker.groups.forget(number)
        self.positions.pop((number, 0), None)

    def _forget(self, session: Session) -> None:
        for subscription in session.subscriptions.values():
            self._remove(subscription)
        self.by_number.pop(session.number, None)
        self.broker.sessions.forget(session)
        self.connected.discard(session.number)
        for reader, _, _, position in self.flights.pop(session.number, {}).values():
            if reader:
                self._finished(reader, position, position + 1)  # of a group: nobody else gets it [MQTT-4.8.2-5]

    def subscribed(self, record: bytes) -> None:
        broker = self.broker
        number, options, sub_id, since, reader_number, filter = changes.read_subscribed(record)
        self.highest = max(self.highest, reader_number)
        session = self.by_number.get(number)
        if session is None:
            return
        parsed = parse(filter, broker.config.mqtt.topic_levels_max)
        before = session.subscriptions.pop(filter, None)
        if before is not None:
            self._remove(before)
        sinces = (since, *broker.log.ends[1:])
        reader: Reader | None = None
        if parsed.kind == "shared":
            reader = broker.groups.by_number.get(reader_number)
            if reader is None:
                reader = broker.groups.make(reader_number, parsed.group, parsed.filter, list(sinces))
        elif reader_number:
            reader = self.readers[reader_number] = Reader(reader_number, session, list(sinces))
            session.own_readers = session.own_readers or {}
            session.own_readers[reader] = None
        subscription = Subscription(
            session,
            filter,
            parsed.filter,
            options & 3,
            sinces,
            no_local=bool(options & 4),
            retain_as_published=bool(options & 8),
            sub_id=sub_id,
            reader=reader,
        )
        session.subscriptions[filter] = subscription
        session.since_max = tuple(map(max, session.since_max or sinces, sinces))
        broker.table.index.add(subscription.pattern, (session.number, filter), subscription)
        tracing.watched(broker, subscription)
        if isinstance(reader, Group):
            reader.members.append(subscription)
            broker.groups.members += 1
        elif reader is not None:
            reader.subscription = subscription

    def since(self, record: bytes) -> None:
        number, filter, others = changes.read_filter_positions(record)
        session = self.by_number.get(number)
        if session is not None and filter in session.subscriptions:
            subscription = session.subscriptions[filter]
            subscription.since = (subscription.since[0], *others)[: len(self.broker.log.ends)]
            session.since_max = tuple(map(max, session.since_max, subscription.since))

    def unsubscribed(self, record: bytes) -> None:
        number, filter = changes.read_unsubscribed(record)
        session = self.by_number.get(number)
        subscription = session.subscriptions.pop(filter, None) if session is not None else None
        if subscription is not None:
            self._remove(subscription)
        if session is not None and session.due is not None:
            session.due.pop(filter, None)

    def _remove(self, subscription: Subscription) -> None:
        key = subscription.session.number, subscription.filter
        self.broker.table.index.remove(subscription.pattern, key)
        tracing.unwatched(self.broker, subscription)
        reader = subscription.reader
        if isinstance(reader, Group):
            before = len(reader.members)
            reader.members = [m for m in reader.members if m is not subscription]
            self.broker.groups.members += len(reader.members) - before
        elif reader is not None:
            self.readers.pop(reader.number, None)
            if subscription.session.own_readers is not None:
                subscription.session.own_readers.pop(reader, None)

    def set_positions(self, record: bytes) -> None:
        for reader, position in changes.read_positions(record):
            self.positions[reader, position >> PARTITION_SHIFT] = position

    def inbound(self, record: bytes) -> None:
        number, pid = changes.read_pid(record)
        self._inbound(number, [pid.to_bytes(2, "big")])

    def inbounds(self, record: bytes) -> None:
        self._inbound(*changes.read_pids(record))

    def _inbound(self, number: int, pids: list[bytes]) -> None:
        session = self.by_number.get(number)
        if session is not None:
            session.inbound = (session.inbound or set()) | set(pids)

    def released(self, record: bytes) -> None:
        number, pid = changes.read_pid(record)
        self._released(number, [pid.to_bytes(2, "big")])

    def releases(self, record: bytes) -> None:
        self._released(*changes.read_pids(record))

    def _released(self, number: int, pids: list[bytes]) -> None:
        session = self.by_number.get(number)
        if session is not None and session.inbound is not None:
            session.inbound.difference_update(pids)

    def flight(self, record: bytes) -> None:
        number, reader, pid, qos, state, position, floor = changes.read_flight(record)
        if reader:
            self.positions[reader, 0] = floor
        self._flights(number, reader, pid, qos, state, range(position, position + 1))

    def flights_of(self, record: bytes) -> None:
        self._flights(*changes.read_flights(record))

    def _flights(self, number: int, reader: int, pid: int, qos: int, state: int, positions: range) -> None:
        pids = [(pid + i - 1) % PACKET_IDS + 1 for i in range(len(positions))]
        if state == State.DONE:
            if number in self.flights:
                for each in pids:
                    self.flights[number].pop(each, None)
            if reader and positions.step == 1:
                self._finished(reader, positions.start, positions.stop)
            elif reader:
                for position in positions:
                    self._finished(reader, position, position + 1)
        elif number in self.by_number:
            of_session = self.flights.setdefault(number, {})
            for each, position in zip(pids, positions, strict=True):
                if state == State.SENT:
                    of_session.pop(each, None)  # so that they stay in the order of sending
                of_session[each] = (reader, qos, state, position)

    def acked(self, record: bytes) -> None:
        reader, ranges = changes.read_acked(record)
        for first, after in ranges:
            self._finished(reader, first, after)

    def _finished(self, reader: int, first: int, after: int) -> None:
        done = self.done.get(reader)
        if done is None:
            done = self.done[reader] = Skip()
        done.add(first, after)
        if len(done.starts) > DONE_RANGES_MAX:
            partition = first >> PARTITION_SHIFT
            done.forget_below(self.positions.get((reader, partition), 0), partition << PARTITION_SHIFT)

    def retained(self, record: bytes) -> None:
        if self.broker.retaining.store.put(Retained(*changes.read_retained(record))).refused:
            self.retained_refused += 1

    def unretained(self, record: bytes) -> None:
        self.broker.retaining.store.delete(changes.read_unretained(record))

    def due(self, record: bytes) -> None:
        number, filter, before = changes.read_filter_positions(record)
        session = self.by_number.get(number)
        if session is not None and filter in session.subscriptions:
            session.due = session.due or {}
            session.due[filter] = Due(session.subscriptions[filter], tuple(before))

    def handed(self, record: bytes) -> None:
        number, filter = changes.read_unsubscribed(record)
        session = self.by_number.get(number)
        if session is not None and session.due is not None:
            session.due.pop(filter, None)

    def passed(self, record: bytes) -> None:
        number, filter, topic = changes.read_passed(record)
        session = self.by_number.get(number)
        if session is not None and session.due is not None and filter in session.due:
            session.due[filter].passed = topic

    def group(self, record: bytes) -> None:
        number, name, pattern = changes.read_group(record)
        self.highest = max(self.highest, number)
        groups = self.broker.groups
        known = groups.by_number.get(number)
        if known is None:
            groups.make(number, name, pattern, [0] * len(self.broker.log.ends))
        else:
            groups.rename(known, name, pattern)

    def dead(self, record: bytes) -> None:
        """A message that was given up: for the pipeline, no state."""

    # ── afterwards ──

    def _place_readers(self) -> None:
        broker = self.broker
        ends = broker.log.ends
        for number, group in list(broker.groups.by_number.items()):
            if not group.members:
                broker.groups.forget(number)
        for session in broker.sessions:
            self.readers[session.number] = session.reader
        self.readers.update(broker.groups.by_number)
        for number, reader in self.readers.items():
            # A stored position never lies beyond the log's end (I10).
            reader.cursors = [min(self.positions.get((number, p), end), end) for p, end in enumerate(ends)]
            reader.written = tuple(reader.cursors)

    def _restore_flights(self) -> None:
        kept = self._retained_in_flight()
        for number, by_pid in self.flights.items():
            session = self.by_number.get(number)
            if session is None:
                continue
            flights = session.in_flight()
            for pid, (reader_number, qos, state, position) in by_pid.items():
                reader = self.readers.get(reader_number) if reader_number else RETAINED_READER
                if reader is None:  # unsubscribed since: the client still gets it to its end [MQTT-3.10.4-3]
                    reader = Reader(reader_number, session, list(self.broker.log.ends))
                if reader_number:
                    self._finished(reader_number, position, position + 1)
                message = kept.get(position) if reader is RETAINED_READER else None
                flights.restore(pid, position, qos, reader, State(state), message)
            session.rest()
        for reader_number, done in self.done.items():
            reader = self.readers.get(reader_number)
            if reader is not None:
                for partition, cursor in enumerate(reader.cursors):
                    done.forget_below(cursor, partition << PARTITION_SHIFT)
                reader.skip = done if done else None

    def _retained_in_flight(self) -> dict[int, Retained]:
        """Retained messages on their way to somebody, by position: the log may have let go of them."""
        wanted = {f[3] for by_pid in self.flights.values() for f in by_pid.values() if not f[0]}
        if not wanted:
            return {}
        return {m.position: m for m in self.broker.retaining.store.match(b"#", 0) if m.position in wanted}

    def _restart_clocks(self) -> None:
        broker = self.broker
        sessions = broker.sessions
        now_s, now_ms = broker.now_s, broker.now_ms
        for session in list(sessions):
            if session.number in self.connected:
                session.away_since_ms = now_ms
            away_s = max(0, now_ms - session.away_since_ms) / 1000
            if session.will is not None:
                delay_s = min(session.will.delay_s, session.expiry_s)
                session.will_at_s = now_s + max(0.0, delay_s - away_s)
                if session.will_at_s <= now_s:
                    sessions.send_will(session)
            if not session.persistent or (session.expiry_s != NEVER and away_s >= session.expiry_s):
                sessions.end(session, "expired" if session.persistent else "the broker was restarted")
                continue
            if session.expiry_s != NEVER:
                session.expires_at_s = now_s + session.expiry_s - away_s
            if session.number in self.connected:
                sessions.record(session)
            broker.deadlines.expect(session)


APPLY: dict[int, Callable[[Recovery, bytes], None]] = {
    changes.SESSION: Recovery.session,
    changes.GONE: Recovery.gone,
    changes.SUBSCRIBED: Recovery.subscribed,
    changes.UNSUBSCRIBED: Recovery.unsubscribed,
    changes.POSITIONS: Recovery.set_positions,
    changes.INBOUND: Recovery.inbound,
    changes.RELEASED: Recovery.released,
    changes.FLIGHT: Recovery.flight,
    changes.RETAINED: Recovery.retained,
    changes.UNRETAINED: Recovery.unretained,
    changes.GROUP: Recovery.group,
    changes.DEAD: Recovery.dead,
    changes.FLIGHTS: Recovery.flights_of,
    changes.INBOUNDS: Recovery.inbounds,
    changes.RELEASES: Recovery.releases,
    changes.ACKED: Recovery.acked,
    changes.SINCE: Recovery.since,
    changes.DUE: Recovery.due,
    changes.HANDED: Recovery.handed,
    changes.PASSED: Recovery.passed,
}
