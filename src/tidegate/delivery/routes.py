"""Routes: for a tenant's topic, everything that has been decided about its messages, ready to be carried out.

A route is looked up once per message by the topic's bytes. It names the connected readers only: a session that is away
costs nothing here. Routes whose subscribers are the same share one list of targets, so that messages to many topics can
go one way together. Routes are forgotten when a subscription changes or a session comes or goes (S0.2), and made again
from the subscription index at the next message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.delivery.encode import Key, encode_sub_ids, key_of
from tidegate.errors import Refused
from tidegate.limits import ROUTES_BYTES_MAX, ROUTES_MAX, ROUTES_STEP
from tidegate.router import SubscriptionIndex, TopicSet, check_topic, has_wildcard
from tidegate.session.link import Link
from tidegate.session.reader import Reader
from tidegate.session.session import Subscription


class Target:
    """One reader of some topics and how messages are put for it."""

    __slots__ = ("kept_keys", "keys", "link", "no_local", "qos", "reader", "retain", "sub_ids", "subscriptions")

    def __init__(self, reader: Reader, link: Link | None, subscriptions: Sequence[Subscription]) -> None:
        self.reader = reader
        self.link = link
        self.subscriptions = subscriptions
        self.qos = max([s.qos for s in subscriptions])  # highest of the overlapping [MQTT-3.3.5-1]
        self.retain = True in [s.retain_as_published for s in subscriptions]
        self.no_local = reader.session is not None and True in [s.no_local for s in subscriptions]
        v5 = link is not None and link.v5
        ids = sorted([s.sub_id for s in subscriptions if s.sub_id])  # one used twice is carried twice (3.3.4)
        self.sub_ids = encode_sub_ids(ids) if ids and v5 else b""
        # By QoS: of plain messages, and of those that keep their retain flag.
        self.keys, self.kept_keys = _keys(v5, self.sub_ids) if self.sub_ids else _KEYS[v5]

    def without_own(self) -> Target | None:
        """This target for messages of the subscriber itself: no-local subscriptions do not take part."""
        left = [s for s in self.subscriptions if not s.no_local]
        return Target(self.reader, self.link, left) if left else None


def _keys(v5: bool, sub_ids: bytes) -> tuple[list[Key], list[Key]]:
    return [key_of(v5, qos, False, sub_ids) for qos in range(3)], [key_of(v5, qos, True, sub_ids) for qos in range(3)]


_KEYS = {v5: _keys(v5, b"") for v5 in (False, True)}


class Targets:
    """Who gets the messages of some topics."""

    __slots__ = ("key", "list", "matched", "topics")

    def __init__(self, key: tuple[int, ...], targets: list[Target], matched: bool) -> None:
        self.key = key
        self.list = targets
        self.matched = matched  # whether anybody subscribed, connected or not
        self.topics: set[bytes] = set()  # whose routes have these


class Route:
    __slots__ = ("matched", "targets", "topic")

    def __init__(self, topic: bytes, targets: Targets) -> None:
        self.topic = topic
        self.targets = targets
        self.matched = targets.matched


class RouteTable:
    """The routes of one tenant."""

    def __init__(self, levels_max: int) -> None:
        self._levels_max = levels_max
        self.index: SubscriptionIndex[tuple[int, bytes], Subscription] = SubscriptionIndex()
        self.routes: dict[bytes, Route] = {}
        self.routes_bytes = 0  # of their topics
        self.work = 0  # what finding subscriptions has cost so far, in units of about 10 µs
        self._cached = TopicSet()  # the topics of `routes`
        self._shared: dict[tuple[int, ...], Targets] = {}  # by the identities of the subscriptions
        self._of_reader: dict[Reader, set[Targets]] = {}

    def admit(self, topic: bytes) -> Route:
        """The route of a topic that a client publishes to and that is not in `routes`; raises PeerError for a name that
        is not allowed."""
        check_topic(topic)
        if topic.startswith(b"$"):
            raise Refused("topics that begin with $ belong to the broker", reason=0x90)
        if topic.count(b"/") >= self._levels_max:
            raise Refused(f"topic has more than {self._levels_max} levels", reason=0x90)
        if len(self.routes) >= ROUTES_MAX or self.routes_bytes + len(topic) > ROUTES_BYTES_MAX:
            self.forget_all()
        targets = self._targets(topic)
        shared = self._shared.setdefault(targets.key, targets)
        if shared is targets:
            for target in targets.list:
                self._of_reader.setdefault(target.reader, set()).add(targets)
        route = self.routes[topic] = Route(topic, shared)
        self.routes_bytes += len(topic)
        shared.topics.add(topic)
        self._cached.add(topic)
        return route

    def resolve(self, topic: bytes) -> Targets:
        """Who gets the messages of a topic, whatever its name: a stored one, or one of the broker's own."""
        route = self.routes.get(topic)
        return route.targets if route is not None else self._targets(topic)

    def _targets(self, topic: bytes) -> Targets:
        visits = self.index.visits
        found = self.index.match(topic)
        # Those of sessions that are away lead nowhere, but are looked at.
        self.work += 1 + (self.index.visits - visits) // 64 + len(found) // 64 + len(topic) // 4096
        there = [s for s in found if s.session.link is not None and not s.session.ended]
        self.work += len(there) // 16
        key = (bool(found), *map(id, there))
        shared = self._shared.get(key)
        if shared is not None:
            return shared
        by_reader: dict[Reader, list[Subscription]] = {}
        for subscription in there:
            by_reader.setdefault(subscription.reader or subscription.session.reader, []).append(subscription)
        targets = [
            Target(reader, reader.session.link if reader.session is not None else None, subscriptions)
            for reader, subscriptions in by_reader.items()
        ]
        return Targets(key, targets, bool(found))

    # ── changes ──

    def subscribe(self, subscription: Subscription) -> None:
        self.index.add(subscription.pattern, _key(subscription), subscription)
        self.changed(subscription.pattern)

    def unsubscribe(self, subscription: Subscription) -> None:
        self.index.remove(subscription.pattern, _key(subscription))
        self.changed(subscription.pattern)

    def changed(self, pattern: bytes) -> None:
        """Routes that the filter matches have another set of readers now."""
        routes = self.routes
        if not has_wildcard(pattern):
            if pattern in routes:
                self._forget((pattern,))
            return
        scan = self._cached.scan(pattern)
        found = scan.take(ROUTES_STEP, 2 * ROUTES_STEP)
        if scan.done:
            self._forget(found)
        else:
            self.forget_all()  # quicker than one by one

    def left(self, reader: Reader) -> None:
        """The reader's connection is gone: nothing leads to it any more."""
        of_reader = self._of_reader.get(reader, ())
        if sum(len(targets.topics) for targets in of_reader) > ROUTES_STEP:
            self.forget_all()  # quicker than one by one
        else:
            for targets in list(of_reader):
                self._forget(list(targets.topics))

    def _forget(self, topics: Iterable[bytes]) -> None:
        for topic in topics:
            route = self.routes.pop(topic, None)
            if route is None:
                continue
            self.routes_bytes -= len(topic)
            self._cached.discard(topic)
            targets = route.targets
            targets.topics.discard(topic)
            if not targets.topics:
                del self._shared[targets.key]
                for target in targets.list:
                    of_reader = self._of_reader[target.reader]
                    of_reader.discard(targets)
                    if not of_reader:
                        del self._of_reader[target.reader]

    def forget_all(self) -> None:
        for route in self.routes.values():
            route.targets.topics = set()
        self.routes.clear()
        self.routes_bytes = 0
        self._cached.clear()
        self._shared.clear()
        self._of_reader.clear()


def _key(subscription: Subscription) -> tuple[int, bytes]:
    """One entry per session and filter as written: `a`, `$share/g/a` and `$replay/0/a` are three."""
    return subscription.session.number, subscription.filter
