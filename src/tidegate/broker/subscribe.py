"""SUBSCRIBE and UNSUBSCRIBE: the index and the session log change, then the answer, then retained messages.

`$share/<group>/<filter>` joins a group. `$replay/<from>/<filter>`, or the MQTT 5 user property `tidegate-from` on a
plain filter, gives the subscription a reader of its own that starts in the past and then stays live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.broker import groups
from tidegate.errors import PeerError, Refused
from tidegate.router import check_filter, parse, parse_start
from tidegate.session import changes
from tidegate.session.link import Link
from tidegate.session.session import Reader, Session, Subscription
from tidegate.wire import NO_PROPERTIES, FilterRequest, Reason, Suback, Subscribe, Unsuback, Unsubscribe

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

REPLAY_PROPERTY = b"tidegate-from"
RETAIN_NEW_ONLY, RETAIN_NEVER = 1, 2


def on_subscribe(broker: Broker, link: Link, packet: Subscribe) -> None:
    session = link.session
    assert session is not None
    broker.settle()  # what is in the log now is before the subscription, everything else after
    sub_id = packet.properties.subscription_ids[0] if packet.properties.subscription_ids else 0
    start = next((value for name, value in packet.properties.user if name == REPLAY_PROPERTY), None)
    reasons: list[int] = []
    first_error: PeerError | None = None
    if len(packet.filters) > broker.config.mqtt.subscriptions_per_session_max:
        # More than any session may hold: not worth a look at each, which could take seconds.
        broker.counters.refused[f"SUBSCRIBE 0x{Reason.QUOTA_EXCEEDED:02X}"] += len(packet.filters)
        full = Reason.QUOTA_EXCEEDED if link.v5 else 0x80
        broker.hold(link, Suback(packet.packet_id, (full,) * len(packet.filters)))
        return
    retained: list[Subscription] = []
    for request in packet.filters:
        try:
            subscription, new = _subscribe(broker, link, session, request, sub_id, start)
        except PeerError as error:
            first_error = first_error or error
            broker.counters.refused[f"SUBSCRIBE 0x{error.reason:02X}"] += 1
            reasons.append(error.reason if link.v5 else 0x80)
            continue
        reasons.append(request.qos)
        wants_retained = request.retain_handling != RETAIN_NEVER and (new or request.retain_handling != RETAIN_NEW_ONLY)
        if wants_retained and subscription.reader is None:
            retained.append(subscription)
    why = broker.why(link, first_error) if first_error is not None else NO_PROPERTIES
    if min(reasons) < Reason.UNSPECIFIED_ERROR:
        broker.hold(link, Suback(packet.packet_id, tuple(reasons), why))
    else:
        # Nothing that the log would have to keep first, and a full disk must not silence it.
        broker.send(link, Suback(packet.packet_id, tuple(reasons), NO_PROPERTIES if link.packet_max else why))
    if retained:
        before = broker.log.end
        broker.dispatcher.hold(link, lambda: _start_retained(broker, link, retained, before))


def _start_retained(broker: Broker, link: Link, subscriptions: list[Subscription], before: int) -> None:
    for subscription in subscriptions:
        broker.retained_delivery.start(link, subscription, before)


def _subscribe(
    broker: Broker, link: Link, session: Session, request: FilterRequest, sub_id: int, start: bytes | None
) -> tuple[Subscription, bool]:
    """One filter: returns its subscription, and whether there was none before. Raises PeerError."""
    levels_max = broker.config.mqtt.topic_levels_max
    parsed = parse(request.filter, levels_max)
    check_filter(parsed.filter, levels_max)
    if parsed.filter.startswith(b"$") and parsed.filter.split(b"/", 1)[0] != b"$SYS":
        raise Refused(f"unknown $ topic {parsed.filter.decode()!r}", reason=Reason.TOPIC_FILTER_INVALID)
    before = session.subscriptions.get(request.filter)
    if before is None and len(session.subscriptions) >= broker.config.mqtt.subscriptions_per_session_max:
        raise Refused("too many subscriptions in this session", reason=Reason.QUOTA_EXCEEDED)
    if not broker.storing:
        raise Refused("the log takes no changes at the moment", reason=Reason.QUOTA_EXCEEDED)
    end = broker.log.end
    reader: Reader | None = None
    if parsed.kind == "shared":
        if request.no_local:
            raise Refused("no-local on a shared subscription", reason=Reason.PROTOCOL_ERROR)
        reader = groups.find_or_make(broker, parsed.group, parsed.filter)
    elif parsed.kind == "replay" or start is not None:
        reader = Reader(next(broker.numbers), session, 0)
        _place(broker, reader, parsed.start or start or b"")
    subscription = Subscription(
        session,
        request.filter,
        request.filter if parsed.kind == "plain" else parsed.filter,  # one object: there may be millions
        request.qos,
        # Subscribing again changes the options, not what the subscription already covers.
        before.since if before is not None and reader is None and before.reader is None else end,
        no_local=request.no_local,
        retain_as_published=request.retain_as_published,
        sub_id=sub_id,
        reader=reader,
    )
    if before is not None:
        _drop_reader(broker, before, replaced_by=subscription)
        broker.table.unsubscribe(before)
    session.subscriptions[request.filter] = subscription
    session.since_max = max(session.since_max, subscription.since)
    session.reader.targets = session.reader.wanted = None
    broker.table.subscribe(subscription)
    broker.change(record_of(subscription))
    if parsed.kind == "shared":
        groups.join(broker, reader, subscription)  # type: ignore[arg-type]
    elif reader is not None:
        reader.subscription = subscription
        broker.change(changes.positions([(reader.number, reader.cursor)]))
        broker.dispatcher.queue(reader)
    return subscription, before is None


def _place(broker: Broker, reader: Reader, start: bytes) -> None:
    """Put a reader where it is asked to start."""
    asked = parse_start(start, broker.now_ms)
    if asked.kind == "earliest":
        reader.cursor = broker.log.floor
    elif asked.kind == "position":
        reader.cursor = min(asked.value, broker.log.end)  # below the floor: it is told what it cannot get (S3.14)
    else:

        def found(position: int) -> None:
            if reader.blocked:
                return  # unsubscribed meanwhile
            reader.reading = False
            reader.cursor = position
            broker.moved.add(reader)
            broker.dispatcher.queue(reader)

        reader.cursor, exact = broker.log.position_at_time(asked.value, found)
        reader.reading = not exact  # it waits
    reader.floor = reader.cursor


def record_of(subscription: Subscription) -> bytes:
    own = subscription.reader
    options = subscription.qos | subscription.no_local << 2 | subscription.retain_as_published << 3
    return changes.subscribed(
        subscription.session.number,
        options,
        subscription.sub_id,
        subscription.since,
        own.number if own is not None else 0,
        subscription.filter,
    )


def _drop_reader(broker: Broker, subscription: Subscription, replaced_by: Subscription | None = None) -> None:
    """What a subscription had of its own goes with it."""
    reader = subscription.reader
    if reader is None or (replaced_by is not None and replaced_by.reader is reader):
        return
    if reader.session is None:
        groups.left(broker, subscription)
    else:
        reader.live = False
        reader.blocked = True  # its turn never comes again
        if reader.session.link is not None and reader in reader.session.link.waiting:
            reader.session.link.waiting.remove(reader)
        broker.catch_up.release(reader)
        broker.moved.discard(reader)


def on_unsubscribe(broker: Broker, link: Link, packet: Unsubscribe) -> None:
    session = link.session
    assert session is not None
    broker.settle()
    reasons: list[int] = []
    for filter in packet.filters:
        subscription = session.subscriptions.pop(filter, None)
        if subscription is None:
            reasons.append(Reason.NO_SUBSCRIPTION_EXISTED)
            continue
        _drop_reader(broker, subscription)
        broker.table.unsubscribe(subscription)
        session.reader.targets = session.reader.wanted = None
        broker.change(changes.unsubscribed(session.number, filter))
        reasons.append(Reason.SUCCESS)
    broker.hold(link, Unsuback(packet.packet_id, tuple(reasons)))
