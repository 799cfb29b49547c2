"""The state as records: of one session, and of everything for a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidegate.delivery.group import Group
from tidegate.delivery.routes import Targets
from tidegate.delivery.tick import Stretch
from tidegate.limits import SNAPSHOT_RECORDS_STEP, SNAPSHOT_STEP
from tidegate.router import Retained
from tidegate.session import changes
from tidegate.session.flights import Begun
from tidegate.session.reader import Reader
from tidegate.session.session import Session, Subscription

if TYPE_CHECKING:
    from tidegate.broker.core import Broker


def session_record(broker: Broker, session: Session) -> list[bytes]:
    """The session itself, and its position."""
    positions = broker.delivery.positions(session.reader)
    session.known = True
    link = session.link
    records = [
        changes.session(
            session.number,
            link is not None,
            link.version if link is not None else 0,
            session.expiry_s,
            session.away_since_ms,
            positions[0],
            session.client_id,
            session.tenant,
            session.will,
        )
    ]
    if len(positions) > 1:
        records.append(position_record(session.reader, positions))
    return records


def session_records(broker: Broker, session: Session) -> list[bytes]:
    """All that is known of a session."""
    begun = Begun()
    records = session_record(broker, session)
    for subscription in session.subscriptions.values():
        records += subscription_records(subscription)
    for reader in session.readers():
        if reader is not session.reader:
            records.append(position_record(reader, broker.delivery.positions(reader, begun)))
        records += finished_record(broker, reader, begun)
    if session.inbound:
        records.append(changes.inbounds(session.number, session.inbound))
    if session.flights is not None:
        for f in session.flights:
            if f.qos == 2 or not f.reader.number:
                records.append(changes.flights(session.number, f.reader.number, f.pid, f.qos, f.state, f.positions))
    for filter, due in (session.due or {}).items():
        records.append(changes.due(session.number, filter, due.before))
        if due.passed:
            records.append(changes.passed(session.number, filter, due.passed))
    return records


def subscription_records(subscription: Subscription) -> list[bytes]:
    own = subscription.reader
    options = subscription.qos | subscription.no_local << 2 | subscription.retain_as_published << 3
    number = subscription.session.number
    records = [
        changes.subscribed(
            number, options, subscription.sub_id, subscription.since[0], own.number if own is not None else 0,
            subscription.filter,
        )
    ]  # fmt: skip
    if len(subscription.since) > 1:
        records.append(changes.since(number, subscription.filter, subscription.since[1:]))
    return records


def position_record(reader: Reader, positions: tuple[int, ...]) -> bytes:
    return changes.positions([(reader.number, position) for position in positions])


def finished_record(broker: Broker, reader: Reader, begun: Begun) -> list[bytes]:
    """What is finished above the reader's position, if anything is; and what it has passed since a position of it was
    last written: where only a snapshot knows the newer one, the older one, which follows it in the log, wins."""
    positions = broker.delivery.positions(reader, begun)
    found = broker.delivery.finished_above(reader, positions, begun)
    found += [(before, at) for before, at in zip(reader.written, positions, strict=True) if before < at]
    return [changes.acked(reader.number, found)] if found else []


def group_records(broker: Broker, group: Group, begun: Begun) -> list[bytes]:
    positions = broker.delivery.positions(group, begun)
    return [
        changes.group(group.number, *group.key),
        position_record(group, positions),
        *finished_record(broker, group, begun),
    ]


def retained_record(message: Retained) -> bytes:
    return changes.retained(
        message.topic,
        message.payload,
        message.qos,
        message.properties,
        message.expires_at_ms,
        message.time_ms,
        message.position,
        message.publisher,
    )


def all_records(broker: Broker) -> Iterator[list[bytes]]:
    """The whole state as records, some hundred at a time."""
    records: list[bytes] = []
    taken = 0
    for session in list(broker.sessions):
        taken += 1
        if not session.ended:
            records += session_records(broker, session)
        if taken == SNAPSHOT_STEP or len(records) >= SNAPSHOT_RECORDS_STEP:
            if records:
                yield records
            records, taken = [], 0
    if records:
        yield records
    records, taken = [], 0
    begun = Begun()
    for group in broker.groups.all():
        taken += 1 + len(group.members)
        records += group_records(broker, group, begun)
        if taken >= SNAPSHOT_STEP:
            yield records
            records, taken, begun = [], 0, Begun()
    if records:
        yield records
    scan = broker.retaining.store.scan(b"#")
    while not scan.done:
        messages = scan.take(broker.now_ms, SNAPSHOT_STEP, SNAPSHOT_STEP)
        if messages:
            yield [retained_record(message) for message in messages]


def stretch(row: int, targets: Targets) -> Stretch:
    """One row that stands alone."""
    return Stretch(row, row + 1, targets, {})
