"""The state of sessions for jobs: its changes as rows of the lake, and what is so now as what readers wait for.

`change_rows` needs no state of its own: a record becomes the same row whoever reads it, in whatever stretch of the log.
So a subscription or a position names its session by number alone, and the row of the session itself has the name.

`waiting_readers` says of every reader what is still to come to it, in the terms by which the broker decides that when
it catches up (S4.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from struct import error as StructError
from typing import NamedTuple

from tidegate.errors import CorruptLog, PeerError
from tidegate.log.snapshot import state_beside
from tidegate.router.filters import parse
from tidegate.session import changes
from tidegate.session.skip import Skip
from tidegate.session.stored import SHARED, StoredSession, StoredState, StoredSubscription

INT32_MAX = 2**31 - 1
TIME_MS_MAX = 2**53  # beyond, the microseconds would not fit
# Kinds that are the broker's own bookkeeping within a conversation, or a table of their own (retained).
_NO_ROWS = frozenset(
    (
        *(changes.INBOUND, changes.RELEASED, changes.FLIGHT, changes.RETAINED, changes.UNRETAINED, changes.FLIGHTS),
        *(changes.INBOUNDS, changes.RELEASES, changes.ACKED, changes.SINCE, changes.DUE, changes.HANDED),
        changes.PASSED,
    )
)


class SessionRow(NamedTuple):
    """A row of `sessions`, in the order of its columns; times in microseconds.

    connected, away  number, client, tenant, version (0: not known), expiry_s, `at` its position
    gone             number, of a session or of a shared group
    subscribed       number, filter, qos, since, reader (None: it is read with the session's own position)
    unsubscribed     number, filter
    position         reader, `at`; a session's own reader has the session's number
    group            reader, filter as its members subscribed to it
    """

    place: int
    ordinal: int
    time: int
    position: int
    kind: str
    number: int | None = None
    reader: int | None = None
    client: str | None = None
    tenant: str | None = None
    version: int | None = None
    expiry_s: int | None = None
    filter: str | None = None
    qos: int | None = None
    since: int | None = None
    at: int | None = None


class DeadRow(NamedTuple):
    """A row of `dead_letters`, likewise. `time` is when the message was given up."""

    place: int
    ordinal: int
    time: int
    reason: str
    detail: str
    attempts: int
    client: str
    tenant: str
    position: int
    topic: str
    publisher: str
    qos: int
    retain: bool
    payload: bytes
    properties: bytes | None


class Unreadable(NamedTuple):
    """A record that makes no sense, for quarantine."""

    reason: str
    detail: str
    raw: bytes


def change_rows(
    records: list[bytes], place: int, time_ms: int, position: int
) -> tuple[list[SessionRow], list[DeadRow], list[Unreadable]]:
    """The rows of one CHANGES frame at `place`. Of positions only the last per reader makes a row, after all others:
    a busy session acknowledges thousands of times."""
    found: list[SessionRow] = []
    dead: list[DeadRow] = []
    unreadable: list[Unreadable] = []
    positions: dict[int, int] = {}
    time_us = time_ms * 1000
    for record in records:
        try:
            kind = record[0]
            if kind == changes.POSITIONS:
                positions.update(changes.read_positions(record))
            elif kind == changes.DEAD:
                dead.append(_dead_row(record, place, len(dead)))
            elif kind not in _NO_ROWS:
                row = _session_row(kind, record, place, len(found), time_us, position)
                if row is None:
                    unreadable.append(Unreadable("unknown record", f"kind {kind}", record))
                else:
                    found.append(row)
        except (IndexError, StructError, CorruptLog, UnicodeDecodeError) as error:
            kind_name = f"kind {record[0]}" if record else "no kind"
            unreadable.append(Unreadable("unreadable record", f"{kind_name}: {error}", record))
    for reader, at in positions.items():
        found.append(SessionRow(place, len(found), time_us, position, "position", None, reader, at=at))
    return found, dead, unreadable


def _session_row(
    kind: int, record: bytes, place: int, ordinal: int, time_us: int, position: int
) -> SessionRow | None:
    if kind == changes.SESSION:
        number, connected, version, expiry_s, _, at, client, tenant, _ = changes.read_session(record)
        return SessionRow(
            place, ordinal, time_us, position, "connected" if connected else "away", number, None,
            client.decode(), tenant.decode(), version, expiry_s, at=at,
        )  # fmt: skip
    if kind == changes.SUBSCRIBED:
        number, options, _, since, reader, filter = changes.read_subscribed(record)
        return SessionRow(
            place, ordinal, time_us, position, "subscribed", number, reader or None,
            filter=filter.decode(), qos=options & 3, since=since,
        )  # fmt: skip
    if kind == changes.UNSUBSCRIBED:
        number, filter = changes.read_unsubscribed(record)
        return SessionRow(place, ordinal, time_us, position, "unsubscribed", number, filter=filter.decode())
    if kind == changes.GONE:
        return SessionRow(place, ordinal, time_us, position, "gone", changes.read_number(record))
    if kind == changes.GROUP:
        reader, group, pattern = changes.read_group(record)
        shared = b"$share/%b/%b" % (group, pattern)
        return SessionRow(place, ordinal, time_us, position, "group", None, reader, filter=shared.decode())
    return None


def _dead_row(record: bytes, place: int, ordinal: int) -> DeadRow:
    letter = changes.read_dead(record)
    if not 0 <= letter.time_ms < TIME_MS_MAX:
        raise CorruptLog("a message given up at no possible time")
    return DeadRow(
        place,
        ordinal,
        letter.time_ms * 1000,
        letter.reason_name,
        letter.detail.decode("utf-8", "backslashreplace"),
        min(letter.attempts, INT32_MAX),
        letter.client.decode(),
        letter.tenant.decode(),
        letter.position,
        letter.topic.decode(),
        letter.publisher.decode(),
        letter.qos,
        letter.retain,
        letter.payload,
        letter.properties or None,
    )


# ── what is so now ──


def stored_state(log: Path) -> StoredState:
    """The sessions as of now, from the log folder of a broker that may be running."""
    return StoredState(state_beside(log))


class WaitingFilter(NamedTuple):
    """One filter of a reader. It takes messages from `floor` on, with `no_local` not the client's own."""

    filter: str
    floor: int
    no_local: bool


@dataclass(slots=True)
class WaitingReader:
    """Somebody with a position in the log: a session, one of its `$replay` subscriptions, or a shared group, whose
    `client` is `$share/<group>/<filter>`."""

    number: int
    client: str
    tenant: str
    filters: list[WaitingFilter]
    any_qos: bool = False  # a replay has QoS 0 as well; nobody else is owed that
    finished: Skip = field(default_factory=Skip)  # positions that are not to come, or come by themselves


class Begun(NamedTuple):
    """A message that the client has begun to take, and gets again to its end whatever it has subscribed to now."""

    client: str
    tenant: str
    reader: int  # 0: a retained message
    position: int


class Waiting(NamedTuple):
    readers: list[WaitingReader]
    begun: list[Begun]

    @property
    def floor(self) -> int | None:
        """No message below it is wanted by anyone; None if no message is."""
        floors = [filter.floor for reader in self.readers for filter in reader.filters]
        return min(floors + [each.position for each in self.begun], default=None)


def absent_readers(state: StoredState, now_ms: int) -> Waiting:
    """What waits for sessions to come back: those that are persistent, away, and not away for too long."""
    absent = [s for s in state.sessions.values() if s.persistent and not s.connected and not s.expired(now_ms)]
    attended = {
        subscription.reader
        for session in state.sessions.values()
        if session.connected
        for filter, subscription in session.subscriptions.items()
        if filter.startswith(SHARED)
    }
    return _waiting(state, absent, attended)


def waiting_readers(state: StoredState) -> Waiting:
    """What any session that there is may still need, connected or not. One that was away for too long counts until the
    broker has ended it: its clock decides."""
    return _waiting(state, [s for s in state.sessions.values() if s.persistent], set())


def _waiting(state: StoredState, sessions: list[StoredSession], attended: set[int]) -> Waiting:
    """The readers of `sessions`; not the groups that are `attended` by somebody."""
    found: dict[int, WaitingReader] = {}
    begun: list[Begun] = []
    for session in sessions:
        for filter, subscription in session.subscriptions.items():
            if subscription.reader not in attended:
                _add_filter(found, state, session, filter, subscription)
    for session in sessions:
        for flight in session.flights.values():
            if flight.to_come:
                client, tenant = session.client_id.decode(), session.tenant.decode()
                begun.append(Begun(client, tenant, flight.reader, flight.position))
            if flight.reader in found:
                found[flight.reader].finished.add(flight.position, flight.position + 1)
    for reader in found.values():
        for first, after in state.done[reader.number].ranges() if reader.number in state.done else ():
            reader.finished.add(first, after)
        reader.finished.forget_below(state.positions.get(reader.number, 0))
    return Waiting(list(found.values()), begun)


def _add_filter(
    found: dict[int, WaitingReader],
    state: StoredState,
    session: StoredSession,
    filter: bytes,
    subscription: StoredSubscription,
) -> None:
    try:
        parsed = parse(filter)
    except PeerError:
        return  # a recovering broker cannot use it either
    replay = subscription.reader != 0 and parsed.kind != "shared"
    if not subscription.qos and not replay:
        return  # S4.4
    number = subscription.reader or session.number
    floor = state.positions.get(number, subscription.since)
    if not subscription.reader:
        floor = max(floor, subscription.since)
    reader = found.get(number)
    if reader is None:
        client = filter if parsed.kind == "shared" else session.client_id
        reader = found[number] = WaitingReader(number, client.decode(), session.tenant.decode(), [], replay)
    elif parsed.kind == "shared":
        return  # another member of the same group
    reader.filters.append(WaitingFilter(parsed.filter.decode(), floor, subscription.no_local))
