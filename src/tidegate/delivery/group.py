"""Shared subscriptions: one reader for many sessions. Each message goes to one member that can take it.

The group has the position; members have the flights. When a member goes, its unacknowledged QoS 1 messages
return to the group (`redo`) and are the next to be handed out. QoS 2 messages stay with the member they were
begun with, as the standard demands (MQTT 5, section 4.8.2).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from tidegate.delivery.routes import Target
from tidegate.log.rows import Rows
from tidegate.log.run import QOS_MASK
from tidegate.router.groups import Strategy, make_strategy
from tidegate.session.flights import Flight
from tidegate.session.link import OPEN
from tidegate.session.reader import Reader
from tidegate.session.session import Session, Subscription


class Group(Reader):
    __slots__ = ("key", "live_from", "member_targets", "members", "redo", "strategy")

    def __init__(
        self, number: int, name: bytes, pattern: bytes, cursors: list[int], strategy: Strategy[Subscription]
    ) -> None:
        super().__init__(number, None, cursors)
        self.key = (name, pattern)
        self.members: list[Subscription] = []
        self.member_targets: dict[Subscription, Target] = {}
        self.redo: list[int] = []  # positions that came back from members, in order
        self.strategy = strategy
        self.live_from: tuple[int, ...] = tuple(cursors)  # QoS 0 from before anyone was there is owed to nobody

    @property
    def attended(self) -> bool:
        return any(member.session.link is not None for member in self.members)

    def take_back(self, session: Session, begun: Sequence[Flight]) -> int:
        """What `session` had in flight for this group (`begun`) with QoS 1 is to be handed out again: how many."""
        flights = session.flights
        if flights is None:
            return 0
        returned = 0
        for flight in begun:
            if flight.qos != 1:
                continue
            for position in flight.positions:
                insort(self.redo, position)
            returned += flight.count
            if session.link is None:
                flights.drop(flight)
            else:
                flight.reader = HANDED_ON  # the client will still answer, and till then it fills its window
        return returned

    def give_up(self, position: int) -> int:
        """What was to be handed out again under this position is not stored, and the position will be another
        message's: how many."""
        first, after = bisect_left(self.redo, position), bisect_right(self.redo, position)
        del self.redo[first:after]
        return after - first

    # ── handing out ──

    def deal(self, rows: Rows, a: int, b: int) -> int:
        """Hand out rows a … b-1, which have the same flags, to members that have room: the row reached."""
        while a < b:
            reached = self._deal(rows, a, b)
            if reached == a:
                break
            a = reached  # what has expired or is too large for its member took no room: there may be more
        return a

    def _deal(self, rows: Rows, a: int, b: int) -> int:
        qos = rows.flags[a] & QOS_MASK
        credits = _Credits(qos, b - a)
        if len(set(rows.publishers[a:b])) == 1:
            shares = self.strategy.share(self.members, b - a, rows.publishers[a], credits)
            if shares is not None:
                for member, places in shares:
                    self._hand(member, rows.take(range(a + places.start, a + places.stop, places.step)))
                return b
        dealt: dict[Subscription, list[int]] = {}
        row = a
        while row < b:
            picked = self.strategy.pick(
                self.members, rows.publishers[row], rows.topics[row], lambda m: credits[m] > 0
            )
            if picked is None:
                break
            credits[picked] -= 1
            dealt.setdefault(picked, []).append(row)
            row += 1
        for member, places_of in dealt.items():
            self._hand(member, rows.take(places_of))
        return row

    def _hand(self, member: Subscription, some: Rows) -> None:
        link = member.session.link
        target = self.member_targets.get(member)
        if target is None or target.link is not link:
            target = self.member_targets[member] = Target(self, link, [member])
        assert link is not None
        reached = link.outbox.send(target, some, 0, len(some))
        for position in some.positions[reached:]:  # no packet id was free after all
            insort(self.redo, position)


# The reader of what a connected client was sent before it left the group, and which others get now.
HANDED_ON = Group(0xFFFFFFFF, b"", b"", [0], make_strategy("round_robin"))


def forget_handed_on(session: Session) -> None:
    """The connection is gone on which the client could have answered."""
    if session.flights is not None:
        for flight in session.flights.of(HANDED_ON):
            session.flights.drop(flight)


class _Credits(dict[Subscription, int]):
    """How many messages members can take: found out when asked, for a group may have thousands and a message goes to
    one."""

    def __init__(self, qos: int, wanted: int) -> None:
        self._qos = qos
        self._wanted = wanted

    def __missing__(self, member: Subscription) -> int:
        credit = self[member] = _credit(member, self._qos, self._wanted)
        return credit


def _credit(member: Subscription, qos: int, wanted: int) -> int:
    """How many of these messages the member can take now."""
    link = member.session.link
    if link is None or link.phase is not OPEN or not link.outbox.room():
        return 0
    if not qos or not member.qos:
        return wanted
    outbox = link.outbox
    return int(min(wanted, outbox.window - outbox.used)) if outbox.credit(1) else 0
