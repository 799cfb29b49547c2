"""Start-up: sessions, subscriptions, positions, unfinished QoS 2 flows and retained messages from the log (S0.3, S0.4).

Records are applied in order; each says what is so, so the last one about a thing wins. What was connected when the
broker died is known (S4.6): those sessions count as disconnected now, and their wills are due.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from struct import error as StructError
from typing import TYPE_CHECKING, NamedTuple

from tidegate.broker import connect, groups, timers
from tidegate.delivery.dispatcher import RETAINED_READER
from tidegate.delivery.group import Group
from tidegate.errors import CorruptLog, PeerError
from tidegate.router import Retained, parse
from tidegate.session import changes
from tidegate.session.flights import Flight, State
from tidegate.session.session import NEVER, Reader, Session, Subscription

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

DONE_PRUNED_EVERY = 4096


class Recovered(NamedTuple):
    sessions: int
    were_connected: int
    subscriptions: int
    retained: int
    unreadable: int  # records that made no sense


class Recovery:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.connected: set[int] = set()
        self.by_number: dict[int, Session] = {}
        self.positions: dict[int, int] = {}
        self.readers: dict[int, Reader] = {}
        # session → packet id → (reader, qos, state, position)
        self.flights: dict[int, dict[int, tuple[int, int, int, int]]] = {}
        self.done: dict[int, set[int]] = {}  # reader → positions of finished QoS 2 messages, those below its own aside
        self.highest = 0
        self.unreadable = 0
        self.retained_refused = 0  # a bound has been lowered since they were stored

    def run(self, progress: Callable[[str, int], None]) -> Recovered:
        broker = self.broker
        applied = 0
        for records in broker.log.state():
            for record in records:
                try:
                    APPLY[record[0]](self, record)
                except (KeyError, IndexError, StructError, CorruptLog, PeerError):
                    self.unreadable += 1
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
            len(broker.sessions), were_connected, len(broker.table.index), len(broker.retained), self.unreadable
        )

    # ── records ──

    def session(self, record: bytes) -> None:
        broker = self.broker
        number, connected, _, expiry_s, away_ms, position, client_id, tenant, will = changes.read_session(record)
        self.highest = max(self.highest, number)
        session = self.by_number.get(number)
        if session is None:
            older = broker.sessions.get(client_id)
            if older is not None:
                self._forget(older)
            session = Session(number, client_id, tenant, expiry_s, position)
            broker.sessions[client_id] = session
            self.by_number[number] = session
        session.expiry_s, session.away_since_ms, session.will = expiry_s, away_ms, will
        self.positions[number] = position
        (self.connected.add if connected else self.connected.discard)(number)

    def gone(self, record: bytes) -> None:
        number = changes.read_number(record)
        session = self.by_number.get(number)
        if session is not None:
            self._forget(session)
        group = self.broker.groups_by_number.pop(number, None)
        if group is not None and group.key is not None and self.broker.groups.get(group.key) is group:
            del self.broker.groups[group.key]
        self.positions.pop(number, None)

    def _forget(self, session: Session) -> None:
        broker = self.broker
        for subscription in session.subscriptions.values():
            self._remove(subscription)
        self.by_number.pop(session.number, None)
        if broker.sessions.get(session.client_id) is session:
            del broker.sessions[session.client_id]
        self.connected.discard(session.number)
        for reader, _, _, position in self.flights.pop(session.number, {}).values():
            if reader:
                self.done.setdefault(reader, set()).add(position)  # of a group: nobody else gets it [MQTT-4.8.2-5]

    def subscribed(self, record: bytes) -> None:
        broker = self.broker
        number, options, sub_id, since, reader_number, filter = changes.read_subscribed(record)
        self.highest = max(self.highest, reader_number)
        session = self.by_number.get(number)
        if session is None:
            return
        before = session.subscriptions.pop(filter, None)
        if before is not None:
            self._remove(before)
        parsed = parse(filter, broker.config.mqtt.topic_levels_max)
        reader: Reader | None = None
        if parsed.kind == "shared":
            reader = broker.groups_by_number.get(reader_number)
            if reader is None:
                reader = groups.make(broker, reader_number, parsed.group, parsed.filter, since)
        elif reader_number:
            reader = self.readers[reader_number] = Reader(reader_number, session, since)
        subscription = Subscription(
            session,
            filter,
            parsed.filter,
            options & 3,
            since,
            no_local=bool(options & 4),
            retain_as_published=bool(options & 8),
            sub_id=sub_id,
            reader=reader,
        )
        session.subscriptions[filter] = subscription
        session.since_max = max(session.since_max, since)
        broker.table.index.add(subscription.pattern, (session.number, filter), subscription)
        if isinstance(reader, Group):
            reader.members.append(subscription)
        elif reader is not None:
            reader.subscription = subscription

    def unsubscribed(self, record: bytes) -> None:
        number, filter = changes.read_unsubscribed(record)
        session = self.by_number.get(number)
        subscription = session.subscriptions.pop(filter, None) if session is not None else None
        if subscription is not None:
            self._remove(subscription)

    def _remove(self, subscription: Subscription) -> None:
        key = subscription.session.number, subscription.filter
        self.broker.table.index.remove(subscription.pattern, key)
        if isinstance(subscription.reader, Group):
            subscription.reader.members = [m for m in subscription.reader.members if m is not subscription]
        elif subscription.reader is not None:
            self.readers.pop(subscription.reader.number, None)

    def set_positions(self, record: bytes) -> None:
        self.positions.update(changes.read_positions(record))

    def inbound(self, record: bytes) -> None:
        number, pid = changes.read_pid(record)
        session = self.by_number.get(number)
        if session is not None:
            if session.inbound is None:
                session.inbound = set()
            session.inbound.add(pid)

    def released(self, record: bytes) -> None:
        number, pid = changes.read_pid(record)
        session = self.by_number.get(number)
        if session is not None and session.inbound is not None:
            session.inbound.discard(pid)

    def flight(self, record: bytes) -> None:
        number, reader, pid, qos, state, position, floor = changes.read_flight(record)
        if reader:
            self.positions[reader] = floor
        if state == State.DONE:
            if number in self.flights:
                self.flights[number].pop(pid, None)
            if reader:
                done = self.done.setdefault(reader, set())
                done.add(position)
                if len(done) % DONE_PRUNED_EVERY == 0:
                    self.done[reader] = {each for each in done if each >= floor}
        elif number in self.by_number:
            of_session = self.flights.setdefault(number, {})
            if state == State.SENT:
                of_session.pop(pid, None)  # so that they stay in the order of sending
            of_session[pid] = (reader, qos, state, position)

    def retained(self, record: bytes) -> None:
        if self.broker.retained.put(Retained(*changes.read_retained(record))).refused:
            self.retained_refused += 1

    def unretained(self, record: bytes) -> None:
        self.broker.retained.delete(changes.read_unretained(record))

    def group(self, record: bytes) -> None:
        number, name, pattern = changes.read_group(record)
        self.highest = max(self.highest, number)
        known = self.broker.groups_by_number.get(number)
        if known is None:
            groups.make(self.broker, number, name, pattern, 0)
        else:
            self.broker.groups[name, pattern] = known  # the snapshot's, after the replay of an older one

    def dead(self, record: bytes) -> None:
        """A message that was given up: for the pipeline, no state."""

    # ── afterwards ──

    def _place_readers(self) -> None:
        broker = self.broker
        end = broker.log.end
        for number, group in list(broker.groups_by_number.items()):
            if not group.members:
                del broker.groups_by_number[number]
                if group.key is not None:
                    broker.groups.pop(group.key, None)
        for session in broker.sessions.values():
            self.readers[session.number] = session.reader
        self.readers.update(broker.groups_by_number)
        for number, reader in self.readers.items():
            # A stored position never lies beyond the log's end (I10).
            reader.cursor = reader.floor = min(self.positions.get(number, end), end)
            reader.live = False

    def _restore_flights(self) -> None:
        for number, by_pid in self.flights.items():
            session = self.by_number.get(number)
            if session is None:
                continue
            flights = session.in_flight()
            for pid, (reader_number, qos, state, position) in by_pid.items():
                reader = self.readers.get(reader_number) if reader_number else RETAINED_READER
                if reader is None:  # unsubscribed since: the client still gets it to its end [MQTT-3.10.4-3]
                    reader = Reader(reader_number, session, position)
                if reader_number:
                    self.done.setdefault(reader_number, set()).add(position)
                flights.add(Flight(pid, 1, position, qos, reader, State(state)))
                flights.next_pid = pid % 65535 + 1
                flights.scrambled = True  # QoS 1 messages before it are sent again after it
            session.rest()
        for reader_number, positions in self.done.items():
            reader = self.readers.get(reader_number)
            if reader is not None:
                reader.skip = {position for position in positions if position >= reader.cursor} or None

    def _restart_clocks(self) -> None:
        broker = self.broker
        now_s, now_ms = broker.now_s, broker.now_ms
        for session in list(broker.sessions.values()):
            if session.number in self.connected:
                session.away_since_ms = now_ms
            away_s = max(0, now_ms - session.away_since_ms) / 1000
            if session.will is not None:
                delay_s = min(session.will.delay_s, session.expiry_s)
                session.will_at_s = now_s + max(0.0, delay_s - away_s)
                if session.will_at_s <= now_s:
                    connect.send_will_of(broker, session)
            if not session.persistent or (session.expiry_s != NEVER and away_s >= session.expiry_s):
                connect.remove(broker, session)
                continue
            if session.expiry_s != NEVER:
                session.expires_at_s = now_s + session.expiry_s - away_s
            if session.number in self.connected:
                connect.record(broker, session, connected=False)
            timers.watch_absent(broker, session)


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
}
