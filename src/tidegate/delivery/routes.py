"""Routes: for a topic, everything that has been decided about its messages, ready to be carried out.

A route is looked up once per run of messages by the topic's bytes. It names the connected readers only: a
session that is away costs nothing here. Routes are dropped when a subscription changes or a session comes or
goes (S0.2), and made again from the subscription index at the next message.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.delivery.encode import VariantKey, encode_sub_ids, variant_key
from tidegate.errors import PeerError, Refused
from tidegate.limits import ROUTES_MAX
from tidegate.router import SubscriptionIndex, check_topic, has_wildcard, matches
from tidegate.session.link import Link
from tidegate.session.session import Reader, Session, Subscription
from tidegate.wire.properties import with_length

# Above this many cached routes a changed wildcard filter clears them all instead of being matched with each.
SCAN_ROUTES_MAX = 512


class Target:
    """One reader of a topic and how messages are put for it.

    `fast`: whole runs can be sent from their ready-made encodings. Not so where each message needs a look
    (no-local, shared groups, aliases, packet limits)."""

    __slots__ = (
        "block",
        "fast",
        "key0",
        "key1",
        "key2",
        "link",
        "qos",
        "reader",
        "retain",
        "sub_ids",
        "subscriptions",
        "v5",
    )

    def __init__(self, reader: Reader, link: Link | None, subscriptions: Sequence[Subscription]) -> None:
        self.reader = reader
        self.link = link
        self.subscriptions = subscriptions
        self.qos = max(s.qos for s in subscriptions)  # highest of the overlapping [MQTT-3.3.5-1]
        self.retain = any(s.retain_as_published for s in subscriptions)
        ids = sorted(s.sub_id for s in subscriptions if s.sub_id)  # one used twice is carried twice (3.3.4)
        self.v5 = link is not None and link.v5
        self.sub_ids = encode_sub_ids(ids) if ids and self.v5 else b""
        self.block = with_length(self.sub_ids) if self.v5 else b""  # of a message without properties of its own
        self.fast = link is not None and link.simple and not any(s.no_local for s in subscriptions)
        self.key0: VariantKey = variant_key(self.v5, 0, False, self.sub_ids)
        self.key1: VariantKey = variant_key(self.v5, 1, False, self.sub_ids)
        self.key2: VariantKey = variant_key(self.v5, 2, False, self.sub_ids)

    def without_own(self, publisher: bytes) -> Target | None:
        """This target for a message of the subscriber itself: no-local subscriptions do not take part."""
        session = self.reader.session
        if session is None or session.client_id != publisher:
            return self
        left = [s for s in self.subscriptions if not s.no_local]
        if len(left) == len(self.subscriptions):
            return self
        return Target(self.reader, self.link, left) if left else None


class Route:
    __slots__ = ("head", "matched", "targets", "topic")

    def __init__(self, topic: bytes, targets: list[Target], matched: bool) -> None:
        self.topic = topic
        self.head = len(topic).to_bytes(2, "big") + topic  # as packets carry it
        self.targets = targets
        self.matched = matched  # whether anybody subscribed, connected or not


class RouteTable:
    __slots__ = ("_levels_max", "index", "routes")

    def __init__(self, levels_max: int) -> None:
        self._levels_max = levels_max
        self.index: SubscriptionIndex[tuple[int, bytes], Subscription] = SubscriptionIndex()
        self.routes: dict[bytes, Route] = {}

    def resolve(self, topic: bytes) -> Route:
        """The route of a topic that is not in `routes`; raises PeerError for a name that is not allowed."""
        check_topic(topic)
        own = topic.startswith(b"$")  # the broker's: clients cannot publish there
        if topic.count(b"/") >= self._levels_max and not own:
            raise Refused(f"topic has more than {self._levels_max} levels", reason=0x90)
        by_reader: dict[Reader, list[Subscription]] = {}
        found = self.index.match(topic)
        for subscription in found:
            session = subscription.session
            if session.link is not None:
                by_reader.setdefault(subscription.reader or session.reader, []).append(subscription)
        targets = [
            Target(reader, reader.session.link if reader.session is not None else None, subscriptions)
            for reader, subscriptions in by_reader.items()
        ]
        route = Route(topic, targets, bool(found))
        if own:
            return route  # never among the ready-made ones that publishers look into
        if len(self.routes) >= ROUTES_MAX:
            self.routes.clear()
        self.routes[topic] = route
        return route

    def admit(self, topic: bytes) -> Route | None:
        """`resolve` for a client on the fast path: None where it may not publish; the plain way says why."""
        if topic.startswith(b"$"):
            return None
        try:
            return self.resolve(topic)
        except PeerError:
            return None

    def subscribe(self, subscription: Subscription) -> None:
        self.index.add(subscription.pattern, _key(subscription), subscription)
        self.changed(subscription.pattern)

    def unsubscribe(self, subscription: Subscription) -> None:
        self.index.remove(subscription.pattern, _key(subscription))
        self.changed(subscription.pattern)

    def session_changed(self, session: Session) -> None:
        """It came or went: routes that its filters match have another set of readers now."""
        for subscription in session.subscriptions.values():
            self.changed(subscription.pattern)

    def changed(self, pattern: bytes) -> None:
        routes = self.routes
        if not has_wildcard(pattern):
            routes.pop(pattern, None)
        elif len(routes) > SCAN_ROUTES_MAX:
            routes.clear()
        else:
            for topic in [t for t in routes if matches(pattern, t)]:
                del routes[topic]


def _key(subscription: Subscription) -> tuple[int, bytes]:
    """One entry per session and filter as written: `a`, `$share/g/a` and `$replay/0/a` are three."""
    return subscription.session.number, subscription.filter
