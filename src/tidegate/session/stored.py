"""The sessions that a stretch of state records describes: what a recovering broker would know of them, as plain facts.

For whoever looks at the state beside a running broker. Wills, retained messages and packets received are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from struct import error as StructError
from typing import NamedTuple

from tidegate.errors import CorruptLog
from tidegate.limits import PACKET_IDS
from tidegate.session import changes
from tidegate.session.flights import State
from tidegate.session.session import NEVER
from tidegate.session.skip import Skip

SHARED = b"$share/"
DONE_RANGES_MAX = 4096  # finished ranges that are kept before those below their reader's position are let go


class StoredSubscription(NamedTuple):
    qos: int
    no_local: bool
    since: int  # what was published before does not belong to it
    reader: int  # 0: the session's own; else of a `$replay` subscription or of a shared group


class StoredFlight(NamedTuple):
    """A message that the client has begun to take, and whose packet id is remembered. Reader 0: a retained one."""

    reader: int
    qos: int
    state: State
    position: int

    @property
    def to_come(self) -> bool:
        """Whether the client gets the message again; if not, it only has to let go of the packet id."""
        return self.state is State.SENT


@dataclass(slots=True)
class StoredSession:
    number: int
    client_id: bytes
    tenant: bytes
    connected: bool = False
    version: int = 0  # 0: it was not connected since the snapshot
    expiry_s: int = 0
    away_since_ms: int = 0
    subscriptions: dict[bytes, StoredSubscription] = field(default_factory=dict)  # by filter, as the client wrote it
    flights: dict[int, StoredFlight] = field(default_factory=dict)  # by packet id

    @property
    def persistent(self) -> bool:
        return self.expiry_s > 0

    def expired(self, now_ms: int) -> bool:
        """Whether it was away for too long; it ends when the broker notices."""
        if self.connected or self.expiry_s == NEVER:
            return False
        return now_ms - self.away_since_ms >= self.expiry_s * 1000


class StoredState:
    """Records are applied in order, and the last one about a thing counts."""

    def __init__(self, frames: Iterable[list[bytes]] = ()) -> None:
        self.sessions: dict[int, StoredSession] = {}
        self.positions: dict[int, int] = {}  # by reader; a session's own reader has the session's number
        self.done: dict[int, Skip] = {}  # by reader: what is finished, though it lies above the position
        self.unreadable = 0
        self._by_client: dict[bytes, int] = {}
        for records in frames:
            for record in records:
                self.apply(record)

    def position(self, session: StoredSession) -> int:
        """Everything before it is acknowledged, by whichever of the session's own readers is furthest behind."""
        own = [s.reader for filter, s in session.subscriptions.items() if s.reader and not filter.startswith(SHARED)]
        return min(self.positions[reader] for reader in (session.number, *own) if reader in self.positions)

    def apply(self, record: bytes) -> None:
        try:
            self._apply(record)
        except (IndexError, ValueError, StructError, CorruptLog):
            self.unreadable += 1  # `tidegate log verify` is for damage

    def _apply(self, record: bytes) -> None:
        kind = record[0]
        if kind == changes.POSITIONS:
            self.positions.update(changes.read_positions(record))
        elif kind == changes.FLIGHT:
            number, reader, pid, qos, state, position, floor = changes.read_flight(record)
            if reader:
                self.positions[reader] = floor
            self._flights(number, reader, pid, qos, state, range(position, position + 1))
        elif kind == changes.FLIGHTS:
            self._flights(*changes.read_flights(record))
        elif kind == changes.ACKED:
            reader, ranges = changes.read_acked(record)
            for first, after in ranges:
                self._finished(reader, first, after)
        elif kind == changes.SESSION:
            self._session(record)
        elif kind == changes.SUBSCRIBED:
            number, options, _, since, reader, filter = changes.read_subscribed(record)
            if number in self.sessions:
                subscriptions = self.sessions[number].subscriptions
                subscriptions.pop(filter, None)  # the newest is the last
                subscriptions[filter] = StoredSubscription(options & 3, bool(options & 4), since, reader)
        elif kind == changes.UNSUBSCRIBED:
            number, filter = changes.read_unsubscribed(record)
            if number in self.sessions:
                self.sessions[number].subscriptions.pop(filter, None)
        elif kind == changes.GONE:
            self._forget(changes.read_number(record))

    def _session(self, record: bytes) -> None:
        facts = changes.read_session(record)
        number, connected, version, expiry_s, away_since_ms, position, client_id, tenant, _ = facts
        session = self.sessions.get(number)
        if session is None:
            older = self._by_client.get(client_id)
            if older is not None:
                self._forget(older)
            session = self.sessions[number] = StoredSession(number, client_id, tenant)
            self._by_client[client_id] = number
        session.connected, session.expiry_s, session.away_since_ms = connected, expiry_s, away_since_ms
        session.version = version or session.version
        self.positions[number] = position

    def _forget(self, number: int) -> None:
        """A session ended, or a group."""
        session = self.sessions.pop(number, None)
        self.positions.pop(number, None)
        self.done.pop(number, None)
        if session is None:
            return
        if self._by_client.get(session.client_id) == number:
            del self._by_client[session.client_id]
        for flight in session.flights.values():
            if flight.reader != number and flight.reader:
                # Of a group: nobody else gets it.
                self._finished(flight.reader, flight.position, flight.position + 1)

    def _finished(self, reader: int, first: int, after: int) -> None:
        done = self.done.setdefault(reader, Skip())
        done.add(first, after)
        if len(done.starts) > DONE_RANGES_MAX:
            done.forget_below(self.positions.get(reader, 0))

    def _flights(self, number: int, reader: int, pid: int, qos: int, state: int, positions: range) -> None:
        session = self.sessions.get(number)
        if state == State.DONE:
            if session is not None:
                for i in range(len(positions)):
                    session.flights.pop((pid + i - 1) % PACKET_IDS + 1, None)
            if reader and positions.step == 1:
                self._finished(reader, positions.start, positions.stop)
            elif reader:
                for position in positions:
                    self._finished(reader, position, position + 1)
        elif session is not None:
            for i, position in enumerate(positions):
                each = (pid + i - 1) % PACKET_IDS + 1
                session.flights[each] = StoredFlight(reader, qos, State(state), position)
