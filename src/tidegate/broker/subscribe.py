"""SUBSCRIBE and UNSUBSCRIBE: the index and the session log change, then the answer, then retained messages.

`$share/<group>/<filter>` joins a group. `$replay/<from>/<filter>`, or the MQTT 5 user property `tidegate-from` on a
plain filter, gives the subscription a reader of its own that starts in the past and then stays live.

A packet may name thousands of filters: they are worked on in steps, and the client's next packet waits for the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.broker import state, tracing
from tidegate.delivery.gate import Job
from tidegate.delivery.group import Group
from tidegate.delivery.tick import Kind
from tidegate.errors import PeerError, Refused
from tidegate.limits import FILTERS_STEP
from tidegate.router import check_form, parse, parse_start
from tidegate.session import changes
from tidegate.session.link import Link
from tidegate.session.reader import GONE, Reader
from tidegate.session.session import Session, Subscription
from tidegate.wire import NO_PROPERTIES, FilterRequest, Reason, Suback, Subscribe, Unsuback, Unsubscribe

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

REPLAY_PROPERTY = b"tidegate-from"
CHECKED_STEP = 1000  # filters whose form is checked in one step
RETAIN_NEW_ONLY, RETAIN_NEVER = 1, 2


def _check(filters: list[bytes]) -> Job:
    """A malformed filter ends the connection before anything is done."""
    for number, filter in enumerate(filters, 1):
        check_form(filter)
        if number % CHECKED_STEP == 0:
            yield CHECKED_STEP // 8


def on_subscribe(broker: Broker, link: Link, packet: Subscribe) -> Job:
    session = link.session
    assert session is not None
    yield from _check([request.filter for request in packet.filters])
    if link.session is not session:
        return
    broker.settle()  # what is in the log now is before the subscription, everything else after
    broker.spent += 2 * min(len(packet.filters), FILTERS_STEP)
    sub_id = packet.properties.subscription_ids[0] if packet.properties.subscription_ids else 0
    start = next((value for name, value in packet.properties.user if name == REPLAY_PROPERTY), None)
    reasons: list[int] = []
    first_error: PeerError | None = None
    retained = False
    cost = 0
    for number, request in enumerate(packet.filters, 1):
        cost += 2 if not request.filter.startswith(b"$") else 12  # a group, or a reader of its own
        try:
            subscription, new = _subscribe(broker, link, session, request, sub_id, start)
        except Refused as error:
            first_error = first_error or error
            broker.counters.refused[f"SUBSCRIBE 0x{error.reason:02X}"] += 1
            reasons.append(error.reason if link.v5 else 0x80)
        else:
            reasons.append(request.qos)
            wants = request.retain_handling != RETAIN_NEVER and (new or request.retain_handling != RETAIN_NEW_ONLY)
            if wants and subscription.reader is None:
                retained = broker.retaining.wanted(session, subscription, tuple(broker.delivery.ends)) or retained
        if cost >= 2 * FILTERS_STEP and number < len(packet.filters):
            yield cost
            cost = 0
            if link.session is not session:
                return
            broker.settle()
    why = broker.why(link, first_error) if first_error is not None else NO_PROPERTIES
    answer = Suback(packet.packet_id, tuple(reasons), why)
    if min(reasons) < Reason.UNSPECIFIED_ERROR and broker.storing.on:
        broker.hold(link, answer)
        if retained:
            broker.post.tick.promise(Kind.CALL, link, lambda: broker.retaining.go_on(link))
    else:
        # Nothing that the log would have to keep first, and a full disk must not silence it.
        broker.send(link, answer)
        if retained:
            broker.retaining.go_on(link)


def _subscribe(
    broker: Broker, link: Link, session: Session, request: FilterRequest, sub_id: int, start: bytes | None
) -> tuple[Subscription, bool]:
    """One filter: returns its subscription, and whether there was none before. Raises Refused."""
    parsed = parse(request.filter, broker.config.mqtt.topic_levels_max)
    if parsed.filter.startswith(b"$") and parsed.filter.split(b"/", 1)[0] != b"$SYS":
        raise Refused(f"unknown $ topic {parsed.filter.decode()!r}", reason=Reason.TOPIC_FILTER_INVALID)
    before = session.subscriptions.get(request.filter)
    if before is None and len(session.subscriptions) >= broker.config.mqtt.subscriptions_per_session_max:
        raise Refused("too many subscriptions in this session", reason=Reason.QUOTA_EXCEEDED)
    if not broker.storing.on and (session.persistent or parsed.kind == "shared"):
        raise Refused("the log takes no changes at the moment", reason=Reason.QUOTA_EXCEEDED)
    ends = tuple(broker.delivery.ends)
    reader: Reader | None = None
    if parsed.kind == "shared":
        if request.no_local:
            raise Refused("no-local on a shared subscription", reason=Reason.PROTOCOL_ERROR)
        reader = broker.groups.find_or_make(parsed.group, parsed.filter)
    elif parsed.kind == "replay" or start is not None:
        asked = parse_start(parsed.start or start or b"", broker.now_ms)
        reader = Reader(next(broker.numbers), session, list(ends))
    since = ends
    if before is not None and reader is None and before.reader is None:
        # Subscribing again changes the options, not what the subscription already covers: at QoS 0 what came while
        # the client was here.
        since = before.since if before.qos else tuple(map(max, before.since, session.live_from))
    subscription = Subscription(
        session,
        request.filter,
        request.filter if parsed.kind == "plain" else parsed.filter,  # one object: there may be millions
        request.qos,
        since,
        no_local=request.no_local,
        retain_as_published=request.retain_as_published,
        sub_id=sub_id,
        reader=reader,
    )
    if before is not None:
        _drop_reader(broker, before, replaced_by=subscription)
        broker.table.unsubscribe(before)
    session.subscriptions[request.filter] = subscription
    session.since_max = tuple(map(max, session.since_max or subscription.since, subscription.since))
    broker.delivery.filters_changed(session.reader)
    broker.table.subscribe(subscription)
    if isinstance(reader, Group):
        broker.groups.join(reader, subscription)
    elif reader is not None:
        session.own_readers = session.own_readers or {}
        session.own_readers[reader] = None
        reader.subscription = subscription
        _place(broker, reader, asked.kind, asked.value)
    if broker.storing.on:
        for record in state.subscription_records(subscription):
            broker.change(record)
        if reader is not None and not isinstance(reader, Group):
            broker.change(state.position_record(reader, tuple(reader.cursors)))
    else:
        broker.storing.note(session)
    tracing.watched(broker, subscription)
    return subscription, before is None


def _place(broker: Broker, reader: Reader, kind: str, value: int) -> None:
    """Put a reader where it is asked to start, and let it go on from there."""
    delivery = broker.delivery
    if kind == "earliest":
        reader.cursors = list(broker.log.floors)
    elif kind == "position":
        # Below the floor: it is told what it cannot get (S3.14).
        reader.cursors = delivery.from_position(value)
    else:
        reader.seeking = True
        cursors, exact = broker.log.positions_at_time(value, lambda positions: delivery.found(reader, positions))
        reader.cursors, reader.seeking = cursors, not exact
    reader.written = tuple(reader.cursors)
    delivery.attach(reader)


def _drop_reader(broker: Broker, subscription: Subscription, replaced_by: Subscription | None = None) -> None:
    """What a subscription had of its own goes with it."""
    reader = subscription.reader
    if reader is None or (replaced_by is not None and replaced_by.reader is reader):
        return
    if isinstance(reader, Group):
        broker.groups.left(subscription)
    elif reader.standing is not GONE:
        broker.delivery.end(reader)
        broker.table.left(reader)
        session = subscription.session
        if session.own_readers is not None:
            session.own_readers.pop(reader, None)
        reader.subscription = None  # no circle is left for the garbage collector, which seldom looks


def on_unsubscribe(broker: Broker, link: Link, packet: Unsubscribe) -> Job:
    session = link.session
    assert session is not None
    yield from _check(list(packet.filters))
    if link.session is not session:
        return
    broker.settle()
    broker.spent += 2 * min(len(packet.filters), FILTERS_STEP)
    reasons: list[int] = []
    cost = 0
    for number, filter in enumerate(packet.filters, 1):
        cost += 2
        subscription = session.subscriptions.pop(filter, None)
        if subscription is None:
            reasons.append(Reason.NO_SUBSCRIPTION_EXISTED)
        else:
            broker.retaining.unwanted(session, filter)
            if isinstance(subscription.reader, Group) and session.flights is not None:
                cost += len(session.flights) // 200  # they are gone through for it
            _drop_reader(broker, subscription)
            broker.table.unsubscribe(subscription)
            broker.delivery.filters_changed(session.reader)
            gone = changes.unsubscribed(session.number, filter)
            if session.persistent or isinstance(subscription.reader, Group):
                broker.change(gone)  # also while the log refuses: no more of them than there are subscriptions
            else:
                broker.sessions.change(session, gone)
            tracing.unwatched(broker, subscription)
            reasons.append(Reason.SUCCESS)
        if cost >= 2 * FILTERS_STEP and number < len(packet.filters):
            yield cost
            cost = 0
            if link.session is not session:
                return
            broker.settle()
    answer = Unsuback(packet.packet_id, tuple(reasons))
    if broker.storing.on or session.persistent:
        broker.hold(link, answer)
    else:
        broker.send(link, answer)  # nothing that would have to be stored first
