"""Shared subscriptions: one reader for many sessions. Each message goes to one member that can take it.

The group has the position; members have the flights. When a member goes, its unacknowledged QoS 1 messages
return to the group (`redo`) and are the next to be handed out. QoS 2 messages stay with the member they were
begun with, as the standard demands (MQTT 5, section 4.8.2).
"""

from __future__ import annotations

from bisect import insort

from tidegate.router.groups import Strategy, make_strategy
from tidegate.session.flights import State
from tidegate.session.link import Phase
from tidegate.session.session import Reader, Session, Subscription


class Group(Reader):
    __slots__ = ("live_from", "members", "redo", "strategy")

    def __init__(
        self, number: int, name: bytes, pattern: bytes, cursor: int, strategy: Strategy[Subscription]
    ) -> None:
        super().__init__(number, None, cursor)
        self.key = (name, pattern)
        self.members: list[Subscription] = []
        self.redo: list[int] = []  # positions that came back from members, in order
        self.strategy = strategy
        self.live_from = cursor  # QoS 0 from before anyone was there is owed to nobody

    @property
    def attended(self) -> bool:
        return any(member.session.link is not None for member in self.members)

    def position(self, end: int) -> int:
        """Everything before it has been acknowledged by somebody, or is a QoS 2 message that a member has begun:
        that one is recorded by itself and stays with its member, however long it is away."""
        lowest = end if self.live else self.cursor
        if self.redo:
            lowest = min(lowest, self.redo[0])
        for member in self.members:
            flights = member.session.flights
            if flights is not None:
                base = flights.lowest(self, qos_max=1)
                if base is not None and base < lowest:
                    lowest = base
        return lowest

    def take_back(self, session: Session) -> int:
        """What `session` had in flight for this group with QoS 1 is to be handed out again: how many."""
        flights = session.flights
        if flights is None:
            return 0
        returned = 0
        for flight in [f for f in flights.queue if f.reader is self and f.qos == 1 and f.state is not State.DONE]:
            for position in range(flight.base, flight.base + flight.count):
                insort(self.redo, position)
            returned += flight.count
            if session.link is None:
                flights.drop(flight)
            else:
                flight.reader = HANDED_ON  # the client will still answer, and till then it fills its window
        return returned


# The reader of what a connected client was sent before it left the group, and which others get now.
HANDED_ON = Group(0xFFFFFFFF, b"", b"", 0, make_strategy("round_robin"))


def forget_handed_on(session: Session) -> None:
    """The connection is gone on which the client could have answered."""
    if session.flights is not None:
        for flight in [f for f in session.flights.queue if f.reader is HANDED_ON and f.state is not State.DONE]:
            session.flights.drop(flight)


def can_take(member: Subscription, qos: int) -> bool:
    """Whether the member is there and has room for one more message."""
    link = member.session.link
    if link is None or link.phase is not Phase.OPEN or link.paused:
        return False
    return not qos or not member.qos or (link.on_wire < link.window and member.session.in_flight().room() > 0)
