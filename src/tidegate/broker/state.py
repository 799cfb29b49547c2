"""The state as records: of one session, and of everything for a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidegate.delivery.group import Group
from tidegate.delivery.routes import Targets
from tidegate.delivery.tick import Stretch
from tidegate.limits import SNAPSHOT_STEP
from tidegate.router import Retained
from tidegate.session import changes
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
    records = session_record(broker, session)
    for subscription in session.subscriptions.values():
        records += subscription_records(subscription)
    for reader in session.readers():
        if reader is not session.reader:
            records.append(position_record(reader, broker.delivery.positions(reader)))
        records += finished_record(broker, reader)
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


def finished_record(broker: Broker, reader: Reader) -> list[bytes]:
    """What is finished above the reader's position, if anything is; and what it has passed since a position of it was
    last written: where only a snapshot knows the newer one, the older one, which follows it in the log, wins."""
    positions = broker.delivery.positions(reader)
    found = broker.delivery.finished_above(reader, positions)
    found += [(before, at) for before, at in zip(reader.written, positions, strict=True) if before < at]
    return [changes.acked(reader.number, found)] if found else []


def group_records(broker: Broker, group: Group) -> list[bytes]:
    positions = broker.delivery.positions(group)
    return [
        changes.group(group.number, *group.key),
        position_record(group, positions),
        *finished_record(broker, group),
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
    sessions = list(broker.sessions)
    for start in range(0, len(sessions), SNAPSHOT_STEP):
        records: list[bytes] = []
        for session in sessions[start : start + SNAPSHOT_STEP]:
            if not session.ended:
                records += session_records(broker, session)
        if records:
            yield records
    for group in broker.groups.all():
        yield group_records(broker, group)
    scan = broker.retaining.store.scan(b"#")
    while not scan.done:
        messages = scan.take(broker.now_ms, SNAPSHOT_STEP, SNAPSHOT_STEP)
        if messages:
            yield [retained_record(message) for message in messages]


def stretch(row: int, targets: Targets) -> Stretch:
    """One row that stands alone."""
    return Stretch(row, row + 1, targets, {})
