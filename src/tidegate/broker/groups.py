"""Who is in a shared group: joining, leaving, coming and going."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from tidegate.delivery.group import Group, forget_handed_on
from tidegate.router.groups import Strategy, make_strategy
from tidegate.session import changes
from tidegate.session.session import Session, Subscription

if TYPE_CHECKING:
    from tidegate.broker.core import Broker


def find_or_make(broker: Broker, name: bytes, pattern: bytes) -> Group:
    group = broker.groups.get((name, pattern))
    if group is None:
        group = make(broker, next(broker.numbers), name, pattern, broker.log.end)
        group.live = True
        broker.change(changes.group(group.number, name, pattern))
        broker.change(changes.positions([(group.number, group.cursor)]))
    return group


def make(broker: Broker, number: int, name: bytes, pattern: bytes, position: int) -> Group:
    strategy: Strategy[Subscription] = make_strategy(broker.config.mqtt.shared_strategy, seed=crc32(name + pattern))
    group = broker.groups[name, pattern] = Group(number, name, pattern, position, strategy)
    broker.groups_by_number[number] = group
    return group


def join(broker: Broker, group: Group, subscription: Subscription) -> None:
    group.members = [m for m in group.members if m.session is not subscription.session] + [subscription]
    attend(broker, subscription.session)


def left(broker: Broker, subscription: Subscription) -> None:
    """A member unsubscribed or its session ended; the last one takes the group with it."""
    group = subscription.reader
    if not isinstance(group, Group):
        return
    group.take_back(subscription.session)
    if subscription.session.flights is not None:
        # QoS 2 messages that it has begun go to nobody else, also after a crash [MQTT-4.8.2-5].
        begun = {f.base for f in subscription.session.flights.queue if f.reader is group and f.qos == 2}
        group.skip = (group.skip or set()) | begun or None
    group.members = [m for m in group.members if m is not subscription]
    if not group.members:
        assert group.key is not None
        del broker.groups[group.key]
        del broker.groups_by_number[group.number]
        broker.moved.discard(group)
        broker.catch_up.release(group)
        broker.change(changes.gone(group.number))
        return
    _without(broker, group)


def attend(broker: Broker, session: Session) -> None:
    """A member is there: its groups may have waited for one."""
    for group in _groups_of(session):
        if not group.live:
            if not any(m.session.link is not None for m in group.members if m.session is not session):
                group.live_from = broker.log.end
            group.blocked = False
            broker.dispatcher.queue(group)


def absent(broker: Broker, session: Session) -> None:
    """A member has gone: what it had not acknowledged goes to the others at once (S1.22)."""
    forget_handed_on(session)
    for group in _groups_of(session):
        group.take_back(session)
        _without(broker, group)


def _without(broker: Broker, group: Group) -> None:
    """One member less: the others get what it left, or the group waits for one to come back."""
    if group.attended and not group.redo:
        return
    if group.live:
        group.cursor = broker.log.end
    group.live = group.blocked = False
    if group.attended:
        broker.dispatcher.queue(group)
    else:
        broker.catch_up.release(group)
        broker.moved.add(group)


def _groups_of(session: Session) -> list[Group]:
    return [s.reader for s in session.subscriptions.values() if isinstance(s.reader, Group)]
