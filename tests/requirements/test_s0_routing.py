"""Which subscriptions a message goes to: the index, the cache in front of it, and the clients behind it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import KEPT

from tidegate.delivery import routes
from tidegate.delivery.group import Group
from tidegate.delivery.routes import RouteTable, Targets
from tidegate.errors import PeerError
from tidegate.router import SubscriptionIndex, matches
from tidegate.router.groups import make_strategy
from tidegate.session.link import Link
from tidegate.session.session import Session, Subscription
from tidegate.wire import Properties, Publish

# ── the index ──


def index_beside(others: int) -> SubscriptionIndex[int, str]:
    """Four filters that match `plant/7/temperature` among many that do not."""
    index: SubscriptionIndex[int, str] = SubscriptionIndex()
    for number, filter in enumerate((b"plant/7/temperature", b"plant/+/temperature", b"plant/#", b"#")):
        index.add(filter, number, filter.decode())
    for number in range(others):
        filter = (b"plant/x%d/+", b"site%d/#", b"+/%d/other", b"plant/7/%d")[number % 4] % number
        index.add(filter, 10 + number, "other")
    return index


@pytest.mark.req("S0.1")
def test_a_match_does_the_same_work_among_a_hundred_subscriptions_and_among_forty_thousand():
    visits = set()
    for others in (100, 40_000):
        index = index_beside(others)
        before = index.visits
        found = sorted(index.match(b"plant/7/temperature"))
        assert found == ["#", "plant/#", "plant/+/temperature", "plant/7/temperature"]
        visits.add(index.visits - before)
    assert len(visits) == 1


@pytest.mark.req("S0.1", "S1.19")
def test_a_message_finds_its_few_among_thousands_of_filters(client, unique):
    sub = client(unique + "s", 5)
    for start in range(0, 5000, 1000):
        sub.subscribe(*(f"{unique}/{i}/{'+' if i % 2 else 'x'}" for i in range(start, start + 1000)))
    pub = client(unique + "p")
    for i in (0, 1, 4999):
        pub.publish(f"{unique}/{i}/x", b"%d" % i)
    pub.publish(f"{unique}/4998/y", b"matches nothing")
    assert sub.payloads(3) == [b"0", b"1", b"4999"]
    sub.nothing()


# ── the cache ──


@pytest.mark.req("S0.2")
def test_the_answer_for_a_topic_is_kept_until_something_changes_it():
    table = RouteTable(128)
    first = table.admit(b"hot")
    assert table.routes.get(b"hot") is first
    assert table.resolve(b"hot") is first.targets
    table.changed(b"cold/+")
    assert table.routes.get(b"hot") is first
    table.changed(b"+")
    assert b"hot" not in table.routes


@pytest.mark.req("S0.2")
def test_to_look_a_topic_up_keeps_nothing():
    """Stored topics, and the broker's own, which nobody publishes to."""
    table = RouteTable(128)
    assert table.resolve(b"$SYS/broker/uptime").list == []
    assert not table.routes


@pytest.mark.attack("A8", "A9")
@pytest.mark.parametrize("topic", [b"", b"a/+", b"#", b"a\0b", b"\xff", b"$SYS/x", b"$share/g/a", b"a/" * 128 + b"a"])
def test_a_topic_that_is_not_allowed_has_no_route(topic):
    table = RouteTable(128)
    with pytest.raises(PeerError):
        table.admit(topic)
    assert not table.routes


@pytest.mark.attack("A19")
def test_there_are_no_more_routes_than_allowed(monkeypatch):
    monkeypatch.setattr(routes, "ROUTES_MAX", 10)
    table = RouteTable(128)
    for i in range(95):
        assert table.admit(b"t/%d" % i).topic == b"t/%d" % i
        assert len(table.routes) <= 10
    table.changed(b"t/+")
    assert not table.routes


LEVELS = (b"a", b"b")
TOPICS = [b"/".join(levels) for depth in (1, 2, 3) for levels in product(LEVELS, repeat=depth)]
FILTERS = [b"a", b"a/b", b"b/a/b", b"+", b"+/b", b"a/+", b"a/#", b"#", b"+/+/b", b"b/+/#"]

Found = list[tuple[int, list[bytes]]]


class Steps:
    """Sessions that come, go, subscribe and unsubscribe, and a group, on a route table that is asked in between."""

    def __init__(self) -> None:
        self.table = RouteTable(128)
        self.sessions = [Session(n, b"c%d" % n, b"t", 100, [0]) for n in range(1, 4)]
        self.group = Group(9, b"g", b"#", [0], make_strategy("round_robin"))

    def step(self, kind: str, who: int, filter: bytes) -> None:
        session = self.sessions[who]
        shared = kind in ("join", "part")
        written = b"$share/g/" + filter if shared else filter
        had = session.subscriptions.get(written)
        if kind in ("subscribe", "join"):
            if had is not None:
                self.table.unsubscribe(had)
            reader = self.group if shared else None
            new = session.subscriptions[written] = Subscription(session, written, filter, who, (0,), reader=reader)
            self.table.subscribe(new)
        elif kind in ("unsubscribe", "part") and had is not None:
            self.table.unsubscribe(session.subscriptions.pop(written))
        elif kind == "come or go":
            if session.link is None:
                session.link = Link()
                for subscription in session.subscriptions.values():
                    self.table.changed(subscription.pattern)
            else:
                session.link = None
                self.table.left(session.reader)
                self.table.left(self.group)
        elif kind == "forget":
            self.table.forget_all()

    def cached(self, topic: bytes) -> tuple[bool, Found]:
        route = self.table.routes.get(topic) or self.table.admit(topic)
        assert self.table.resolve(topic) is route.targets
        assert route.matched == route.targets.matched
        return route.matched, sorted(
            (target.reader.number, sorted(s.filter for s in target.subscriptions)) for target in route.targets.list
        )

    def recomputed(self, topic: bytes) -> tuple[bool, Found]:
        found: dict[int, list[bytes]] = {}
        matched = False
        for session in self.sessions:
            for subscription in session.subscriptions.values():
                if matches(subscription.pattern, topic):
                    matched = True
                    if session.link is not None:
                        reader = subscription.reader or session.reader
                        found.setdefault(reader.number, []).append(subscription.filter)
        return matched, sorted((number, sorted(filters)) for number, filters in found.items())

    def share(self) -> None:
        """Routes whose subscribers are the same have one list of them, and each list knows whose it is."""
        by_subscribers: dict[frozenset[int], Targets] = {}
        topics: dict[int, set[bytes]] = {}
        for topic, route in self.table.routes.items():
            its = frozenset(id(s) for target in route.targets.list for s in target.subscriptions)
            key = frozenset((*its, -1)) if route.matched else its
            assert by_subscribers.setdefault(key, route.targets) is route.targets, topic
            topics.setdefault(id(route.targets), set()).add(topic)
        for targets in by_subscribers.values():
            assert targets.topics == topics[id(targets)]

    def nothing_is_left(self) -> None:
        assert set(self.table._cached.scan(b"#").take(1000, 1000)) == set(self.table.routes)
        known = {id(route.targets) for route in self.table.routes.values()}
        assert {id(targets) for targets in self.table._shared.values()} == known
        assert {id(t) for all_of in self.table._of_reader.values() for t in all_of} <= known


@pytest.mark.req("S0.2")
@pytest.mark.parametrize("step", [routes.ROUTES_STEP, 3], ids=["few routes", "many routes"])
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["subscribe", "unsubscribe", "join", "part", "come or go", "come or go", "forget"]),
            st.integers(0, 2),
            st.sampled_from(FILTERS),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_after_every_change_the_cache_answers_as_if_there_were_none(step, steps):
    before, routes.ROUTES_STEP = routes.ROUTES_STEP, step
    try:
        world = Steps()
        for kind, who, filter in steps:
            world.step(kind, who, filter)
            world.nothing_is_left()
            for topic in TOPICS:
                assert world.cached(topic) == world.recomputed(topic), (kind, who, filter, topic)
            world.share()
            world.nothing_is_left()
    finally:
        routes.ROUTES_STEP = before


@pytest.mark.req("S0.2")
def test_topics_with_the_same_subscribers_share_one_list_of_them():
    world = Steps()
    for who in (0, 1):
        world.step("subscribe", who, b"a/#")
        world.step("come or go", who, b"")
    first, second, other = (world.table.admit(topic) for topic in (b"a/1", b"a/2", b"b"))
    assert first.targets is second.targets is not other.targets
    assert [target.reader for target in first.targets.list] == [s.reader for s in world.sessions[:2]]
    world.step("come or go", 1, b"")
    again = world.table.admit(b"a/1")
    assert [target.reader for target in again.targets.list] == [world.sessions[0].reader]
    assert b"a/2" not in world.table.routes and world.table.routes[b"b"] is other


@pytest.mark.req("S0.2")
@pytest.mark.parametrize("filter", ["{}/hot", "{}/+", "{}/#", "$share/g/{}/hot"])
def test_a_hot_topic_reaches_a_new_subscriber_and_no_longer_one_that_unsubscribed(client, unique, filter):
    filter = filter.format(unique)
    pub, sub = client(unique + "p", 5), client(unique + "s", 5)
    assert pub.publish(unique + "/hot", b"before", 1) == 0x10  # no matching subscribers: and that is cached now
    sub.subscribe(filter, qos=1)
    assert pub.publish(unique + "/hot", b"during", 1) == 0
    assert sub.message().payload == b"during"
    sub.unsubscribe(filter)
    assert pub.publish(unique + "/hot", b"after", 1) == 0x10
    sub.nothing()


@pytest.mark.req("S0.2")
@pytest.mark.parametrize("ending", ["disconnect", "drop", "clean start", "takeover"])
def test_a_hot_topic_forgets_a_session_that_ended(client, unique, ending):
    pub, sub = client(unique + "p", 5), client(unique + "s", 5)
    sub.subscribe(unique + "/hot", unique + "/#", qos=1)
    assert pub.publish(unique + "/hot", b"during", 1) == 0
    sub.message()
    if ending == "disconnect":
        sub.disconnect()
    elif ending == "drop":
        sub.close()
        client(unique + "s", 5).disconnect()  # its CONNECT comes after the end of the old connection
    else:
        again = client(unique + "s", 5, clean=ending == "clean start")
        assert not again.connack.session_present
    assert pub.publish(unique + "/hot", b"after", 1) == 0x10


@pytest.mark.req("S0.2")
def test_a_hot_topic_reaches_a_session_that_came_back(client, unique):
    pub = client(unique + "p", 5)
    sub = client(unique + "s", 5, clean=False, properties=KEPT)
    sub.subscribe(unique + "/+", qos=1)
    for i in range(3):
        pub.publish(unique + "/hot", b"live %d" % i, 1)
        assert sub.message().payload == b"live %d" % i
        sub.disconnect()
        pub.publish(unique + "/hot", b"away %d" % i, 1)
        sub = client(unique + "s", 5, clean=False, properties=KEPT)
        assert sub.message().payload == b"away %d" % i
    sub.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S0.2", "S1.8")
def test_a_hot_topic_follows_new_options_of_a_subscription(client, unique):
    pub, sub = client(unique + "p", 5), client(unique + "s", 5)
    for qos in (1, 0, 2, 1):
        sub.subscribe(unique + "/hot", qos=qos)
        pub.publish(unique + "/hot", b"x", 2)
        assert sub.message().qos == qos


@pytest.mark.req("S0.2")
def test_many_hot_topics_reach_a_new_wildcard_subscriber(client, unique):
    pub, sub = client(unique + "p", 5), client(unique + "s", 5)
    for i in range(600):  # more routes than are matched one by one
        pub.publish(f"{unique}/{i}", b"", 0)
    pub.publish(unique, b"", 1)  # acknowledged: so the others are through as well
    sub.subscribe(unique + "/+", qos=1)
    for i in range(600):
        pub.publish(f"{unique}/{i}", b"%d" % i, 0)
    assert [int(p) for p in sub.payloads(600)] == list(range(600))


# ── from the index to the clients ──


@pytest.mark.req("S0.11", "S1.17")
def test_a_message_is_pushed_through_every_matching_session_that_is_here_in_its_own_terms(client, unique):
    v3 = client(unique + "v3", 3)
    v4 = client(unique + "v4", 4)
    v5 = client(unique + "v5", 5)
    v3.subscribe(unique + "/+", qos=0)
    v4.subscribe(unique + "/#", qos=1)
    v5.subscribe(unique + "/a", qos=2, properties=Properties(subscription_ids=(77,)))
    away = client(unique + "away", 5, clean=False, properties=KEPT)
    away.subscribe(unique + "/a", qos=1)
    away.close()
    client(unique + "p", 5).publish(unique + "/a", b"x", 2, properties=Properties(content_type=b"text/plain"))
    got = [c.message() for c in (v3, v4, v5)]
    assert [(g.topic.decode(), g.payload, g.qos) for g in got] == [(unique + "/a", b"x", q) for q in (0, 1, 2)]
    assert got[2].properties.subscription_ids == (77,)
    assert got[2].properties.content_type == b"text/plain"
    back = client(unique + "away", 5, clean=False, properties=KEPT)
    assert back.message().payload == b"x"
    back.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S0.11")
def test_a_client_that_does_not_read_keeps_nothing_from_the_others(client, unique):
    stuck, reading, pub = client(unique + "stuck"), client(unique + "reading"), client(unique + "p")
    stuck.subscribe(unique)
    reading.subscribe(unique)
    for i in range(300):
        pub.publish(unique, b"%06d" % i + b"x" * 20_000)
    assert [int(reading.expect(Publish).payload[:6]) for _ in range(300)] == list(range(300))
