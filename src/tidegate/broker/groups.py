"""Shared groups: who is in them; joining, leaving, coming and going."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from zlib import crc32

from tidegate.broker import state
from tidegate.delivery.group import Group, forget_handed_on
from tidegate.router.groups import Strategy, make_strategy
from tidegate.session import changes
from tidegate.session.flights import Flight
from tidegate.session.reader import AWAY, Reader
from tidegate.session.session import Session, Subscription
from tidegate.session.skip import Skip

if TYPE_CHECKING:
    from tidegate.broker.core import Broker


class Groups:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._by_name: dict[tuple[bytes, bytes], Group] = {}
        self.by_number: dict[int, Group] = {}
        self.members = 0

    def all(self) -> list[Group]:
        return list(self._by_name.values())

    def find_or_make(self, name: bytes, pattern: bytes) -> Group:
        broker = self._broker
        group = self._by_name.get((name, pattern))
        if group is None:
            group = self.make(next(broker.numbers), name, pattern, list(broker.delivery.ends))
            broker.change(changes.group(group.number, name, pattern))
            broker.change(state.position_record(group, tuple(group.cursors)))
        return group

    def make(self, number: int, name: bytes, pattern: bytes, cursors: list[int]) -> Group:
        named = self._broker.config.mqtt.shared_strategy
        strategy: Strategy[Subscription] = make_strategy(named, seed=crc32(name + pattern))
        group = self._by_name[name, pattern] = Group(number, name, pattern, cursors, strategy)
        self.by_number[number] = group
        return group

    def rename(self, group: Group, name: bytes, pattern: bytes) -> None:
        """The snapshot's name for it, after the replay of an older one."""
        self._by_name[name, pattern] = group

    def forget(self, number: int) -> None:
        group = self.by_number.pop(number, None)
        if group is not None and self._by_name.get(group.key) is group:
            del self._by_name[group.key]

    def join(self, group: Group, subscription: Subscription) -> None:
        before = len(group.members)
        group.members = [m for m in group.members if m.session is not subscription.session] + [subscription]
        group.member_targets = {}
        self.members += len(group.members) - before
        self.attend(subscription.session, [group])

    def left(self, subscription: Subscription, begun: Mapping[Reader, list[Flight]] | None = None) -> None:
        """A member unsubscribed or its session ended; the last one takes the group with it. `begun`: what its session
        has in flight, for who asks of many."""
        broker = self._broker
        group = subscription.reader
        if not isinstance(group, Group) or subscription not in group.members:
            return
        flights = subscription.session.flights
        its: list[Flight] = []
        if flights is not None:
            its = begun.get(group, []) if begun is not None else flights.of(group)
        group.take_back(subscription.session, its)
        for flight in its:
            # QoS 2 messages that it has begun go to nobody else, also after a crash [MQTT-4.8.2-5].
            if flight.qos == 2:
                group.skip = group.skip or Skip()
                for position in flight.positions:
                    group.skip.add(position, position + 1)
        group.members = [m for m in group.members if m is not subscription]
        group.member_targets = {}
        group.targets = None
        self.members -= 1
        if not group.members:
            self.forget(group.number)
            broker.delivery.end(group)
            broker.table.left(group)
            broker.change(changes.gone(group.number))
            return
        self._without(group)

    def attend(self, session: Session, groups: list[Group] | None = None) -> None:
        """A member is there: its groups may have waited for one."""
        for group in groups if groups is not None else _groups_of(session):
            if group.standing is AWAY:
                if not any(m.session.link is not None for m in group.members if m.session is not session):
                    group.live_from = tuple(self._broker.delivery.ends)
                self._broker.delivery.attach(group)
            elif not group.live:
                self._broker.delivery.behind(group)

    def absent(self, session: Session) -> None:
        """A member has gone: what it had not acknowledged goes to the others at once (S1.22)."""
        forget_handed_on(session)
        begun = session.flights.by_reader() if session.flights is not None else {}
        for group in _groups_of(session):
            group.take_back(session, begun.get(group, ()))
            group.member_targets = {}
            self._without(group)

    def _without(self, group: Group) -> None:
        """One member less: the others get what it left, or the group waits for one to come back."""
        delivery = self._broker.delivery
        if not group.attended:
            delivery.detach(group)
            self._broker.table.left(group)
            delivery.moved.add(group)
        elif group.redo:
            delivery.behind(group)


def _groups_of(session: Session) -> list[Group]:
    return [s.reader for s in session.subscriptions.values() if isinstance(s.reader, Group)]
