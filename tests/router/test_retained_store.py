from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from topic_strategies import filters, topics

from tidegate.router import PutOutcome, Retained, RetainedStore, matches
from tidegate.router.retained import MESSAGE_OVERHEAD_BYTES
from tidegate.router.topic_order import RUN_KEYS_MAX, TopicOrder, key_of


def message(
    topic: bytes, payload: bytes = b"x", expires_at_ms: int | None = None, position: int = 0
) -> Retained:
    return Retained(topic, payload, 1, b"", expires_at_ms, 0, position, b"publisher")


def store_of(*kept: bytes, messages_max: int = 1_000_000, bytes_max: int = 1 << 40) -> RetainedStore:
    store = RetainedStore(messages_max=messages_max, bytes_max=bytes_max)
    for topic in kept:
        assert store.put(message(topic)) is PutOutcome.STORED
    return store


def found(store: RetainedStore, filter: bytes, now_ms: int = 0) -> list[bytes]:
    return [kept.topic for kept in store.match(filter, now_ms)]


class StoreMachine(RuleBasedStateMachine):
    """The store against a dictionary and the plain matcher."""

    def __init__(self) -> None:
        super().__init__()
        self.store = RetainedStore(messages_max=8, bytes_max=8 * (MESSAGE_OVERHEAD_BYTES + 40))
        self.model: dict[bytes, Retained] = {}
        self.position = 0
        self.now_ms = 0
        self.refused = 0

    expiries = st.one_of(st.none(), st.integers(0, 20))

    @rule(topic=topics, payload=st.sampled_from([b"", b"x", b"x" * 50, b"x" * 400]), expires_at_ms=expiries)
    def put(self, topic: bytes, payload: bytes, expires_at_ms: int | None) -> None:
        self.position += 1
        kept = message(topic, payload, expires_at_ms, self.position)
        there = topic in self.model
        outcome = self.store.put(kept)
        if not payload:
            assert outcome is (PutOutcome.DELETED if there else PutOutcome.ABSENT)
            self.model.pop(topic, None)
            return
        after = {**self.model, topic: kept}
        if len(after) > self.store.messages_max:
            assert outcome is PutOutcome.REFUSED_MESSAGES
        elif sum(m.cost_bytes for m in after.values()) > self.store.bytes_max:
            assert outcome is PutOutcome.REFUSED_BYTES
        else:
            assert outcome is (PutOutcome.REPLACED if there else PutOutcome.STORED)
            self.model = after
        self.refused += outcome.refused

    @rule(topic=topics)
    def delete(self, topic: bytes) -> None:
        assert self.store.delete(topic) == self.model.pop(topic, None)

    @rule(later_ms=st.integers(0, 5), steps_max=st.integers(0, 5))
    def expire(self, later_ms: int, steps_max: int) -> None:
        self.now_ms += later_ms
        gone = self.store.expire(self.now_ms, steps_max)
        assert len(gone) <= steps_max
        for kept in gone:
            assert kept.expired(self.now_ms)
            assert self.model.pop(kept.topic) == kept
        if not self.store.due(self.now_ms):
            assert not any(kept.expired(self.now_ms) for kept in self.model.values())

    @rule(filter=st.one_of(filters, topics))
    def match(self, filter: bytes) -> None:
        expected = {
            t for t, kept in self.model.items() if matches(filter, t) and not kept.expired(self.now_ms)
        }
        matched = found(self.store, filter, self.now_ms)
        assert len(matched) == len(set(matched))
        assert set(matched) == expected

    @invariant()
    def it_counts_right_and_stays_within_its_bounds(self) -> None:
        assert len(self.store) == len(self.model) <= self.store.messages_max
        assert self.store.bytes == sum(m.cost_bytes for m in self.model.values()) <= self.store.bytes_max
        assert self.store.refused_messages + self.store.refused_bytes == self.refused
        for topic, kept in self.model.items():
            assert self.store.get(topic) is kept


@pytest.mark.req("S0.4", "S0.10")
class TestTheStoreEqualsADictionaryAndThePlainMatcher(StoreMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.sets(topics, max_size=60), filters)
def test_a_match_finds_each_matching_topic_once_in_the_order_of_levels(
    kept: set[bytes], filter: bytes
) -> None:
    expected = sorted((t for t in kept if matches(filter, t)), key=lambda t: t.split(b"/"))
    assert found(store_of(*kept), filter) == expected


@given(st.data())
def test_a_match_tolerates_changes_between_its_steps(data: st.DataObject) -> None:
    before = data.draw(st.sets(topics, min_size=1, max_size=30))
    filter = data.draw(filters)
    store = store_of(*before)
    always, ever = set(before), set(before)
    matched = []
    for kept in store.match(filter, 0):
        matched.append(kept.topic)
        for topic in data.draw(st.lists(topics, max_size=3)):
            if store.delete(topic) is None:
                store.put(message(topic))
                ever.add(topic)
            always.discard(topic)
    assert len(matched) == len(set(matched))
    assert {t for t in always if matches(filter, t)} <= set(matched)
    assert set(matched) <= {t for t in ever if matches(filter, t)}


@given(st.sets(topics, max_size=40), filters, st.integers(1, 4), st.integers(1, 4), st.sets(topics, max_size=5))
def test_however_small_its_pieces_a_scan_finds_the_same_and_keeps_to_its_bounds(
    kept: set[bytes], filter: bytes, matches_max: int, steps_max: int, expired: set[bytes]
) -> None:
    store = store_of(*kept)
    for topic in expired:
        store.put(message(topic, expires_at_ms=5))
    scan = store.scan(filter)
    pieces: list[bytes] = []
    while not scan.done:
        before = scan.steps
        taken = scan.take(5, matches_max, steps_max)
        assert len(taken) <= matches_max
        assert scan.steps - before <= steps_max
        pieces += [one.topic for one in taken]
    assert scan.take(5) == []
    expected = (topic for topic in kept - expired if matches(filter, topic))
    assert pieces == sorted(expected, key=lambda topic: topic.split(b"/"))


def test_a_match_goes_on_when_everything_is_deleted_under_it() -> None:
    store = store_of(*(b"a/%d" % i for i in range(5_000)))
    stream = store.match(b"#", 0)
    next(stream)
    for i in range(5_000):
        store.delete(b"a/%d" % i)
    assert list(stream) == []


def test_a_match_gives_the_message_that_is_there_when_its_turn_comes() -> None:
    store = store_of(b"a", b"b", b"c", b"d")
    payloads = []
    for kept in store.match(b"#", 0):
        payloads.append((kept.topic, kept.payload))
        store.put(message(b"b", b"new"))
        store.delete(b"c")
    assert payloads == [(b"a", b"x"), (b"b", b"new"), (b"d", b"x")]


@pytest.mark.attack("A20")
def test_a_wildcard_over_many_topics_streams_lazily() -> None:
    store = store_of(*(b"t/%06d" % i for i in range(20_000)))
    scan = store.scan(b"#")
    assert [kept.topic for kept in scan.take(0, matches_max=3)] == [b"t/000000", b"t/000001", b"t/000002"]
    assert scan.steps == 3
    rest = 0
    while not scan.done:
        rest += len(scan.take(0, matches_max=1_000))
    assert rest == 19_997


@pytest.mark.attack("A20", "A13")
def test_a_scan_without_matches_still_returns_after_its_steps() -> None:
    store = store_of(*(b"%d/hum" % i for i in range(1_000)))
    scan = store.scan(b"+/temp")
    assert scan.take(0, steps_max=10) == []
    assert not scan.done
    assert scan.steps == 10


@pytest.mark.req("S0.4")
def test_the_cost_of_a_match_follows_the_matches_not_the_topics() -> None:
    store = store_of(*(b"site/%d/dev/%d/temp" % (i, j) for i in range(50) for j in range(100)))

    def steps(filter: bytes) -> tuple[int, int]:
        scan = store.scan(filter)
        count = 0
        while not scan.done:
            count += len(scan.take(0))
        return count, scan.steps

    assert steps(b"site/7/dev/8/temp") == (1, 1)
    assert steps(b"site/7/dev/8/hum")[0] == 0
    assert steps(b"site/7/dev/8/hum")[1] <= 2
    matched, looked_at = steps(b"site/7/#")
    assert matched == 100
    assert looked_at <= 102
    matched, looked_at = steps(b"site/+/dev/8/temp")
    assert matched == 50
    assert looked_at <= 50 * 3 + 3
    assert steps(b"site/7/dev/+") == (0, 100)
    assert steps(b"other/#")[1] <= 2


def test_wildcards_in_front_skip_the_dollar_topics_in_one_step() -> None:
    store = store_of(*(b"$SYS/%d" % i for i in range(100)), b"!", b"a")
    scan = store.scan(b"#")
    assert [kept.topic for kept in scan.take(0)] == [b"!", b"a"]
    assert scan.steps == 3
    assert len(found(store, b"$SYS/#")) == 100


@pytest.mark.attack("A13")
def test_a_topic_of_thousands_of_levels_is_stored_and_found() -> None:
    deep = b"/".join([b"a"] * 32_000)
    store = store_of(deep, b"b")
    assert found(store, b"a/+/#") == [deep]
    assert found(store, b"+/+") == []
    assert found(store, deep) == [deep]


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.req("S0.4")
@pytest.mark.attack("A20")
def test_a_message_beyond_the_number_allowed_is_refused_and_counted() -> None:
    store = store_of(b"a", b"b", messages_max=2)
    assert store.put(message(b"c")) is PutOutcome.REFUSED_MESSAGES
    assert store.get(b"c") is None
    assert store.refused_messages == 1
    assert store.put(message(b"b", b"new")) is PutOutcome.REPLACED
    assert store.put(message(b"b", b"")) is PutOutcome.DELETED
    assert store.put(message(b"c")) is PutOutcome.STORED


@pytest.mark.req("S0.4")
@pytest.mark.attack("A20")
def test_bytes_beyond_those_allowed_are_refused_and_counted_and_the_older_message_stays() -> None:
    store = store_of(b"a", bytes_max=2_000)
    assert store.put(message(b"a", b"x" * 5_000)) is PutOutcome.REFUSED_BYTES
    assert store.refused_bytes == 1
    assert [kept.payload for kept in store.match(b"a", 0)] == [b"x"]


def test_a_smaller_message_replaces_a_larger_one_when_the_bound_was_lowered() -> None:
    store = store_of()
    store.put(message(b"a", b"x" * 5_000))
    store.bytes_max = 100
    assert store.put(message(b"a", b"x" * 4_000)) is PutOutcome.REPLACED
    assert store.put(message(b"a", b"x" * 4_001)) is PutOutcome.REFUSED_BYTES


@pytest.mark.attack("A20")
def test_the_bytes_counted_are_no_less_than_the_memory_taken() -> None:
    count = 20_000
    tracemalloc.start()
    try:
        store = RetainedStore(messages_max=count, bytes_max=1 << 40)
        for i in range(count):
            store.put(
                Retained(
                    b"site/%d/temp" % i, b"%d" % i, 1, b"", 10**12 + i, 10**12 + i, 10**9 + i, b"p%d" % i
                )
            )
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= store.bytes
    assert taken / count <= 1_024


# --- expiry ---------------------------------------------------------------------------------------


def test_an_expired_message_is_not_matched_even_before_it_is_removed() -> None:
    store = store_of(b"a/stays")
    store.put(message(b"a/goes", expires_at_ms=100))
    assert found(store, b"a/#", now_ms=99) == [b"a/goes", b"a/stays"]
    assert found(store, b"a/#", now_ms=100) == [b"a/stays"]
    assert store.get(b"a/goes", now_ms=100) is None
    assert len(store) == 2


def test_expiry_goes_in_small_steps_and_returns_what_it_removed() -> None:
    store = store_of(b"stays")
    for i in range(10):
        store.put(message(b"%d" % i, expires_at_ms=i))
    assert [kept.topic for kept in store.expire(4, steps_max=3)] == [b"0", b"1", b"2"]
    assert store.due(4)
    assert [kept.topic for kept in store.expire(4)] == [b"3", b"4"]
    assert not store.due(4)
    assert store.expired == 5
    assert len(store) == 6


def test_a_replaced_message_does_not_expire_with_its_predecessor() -> None:
    store = store_of()
    store.put(message(b"a", expires_at_ms=10))
    store.put(message(b"a", expires_at_ms=50))
    assert store.expire(20) == []
    store.put(message(b"a"))
    assert store.expire(60) == []
    assert found(store, b"a", now_ms=60) == [b"a"]


@pytest.mark.attack("A20")
def test_replacing_one_message_for_ever_does_not_grow_the_store() -> None:
    store = store_of()
    for i in range(10_000):
        store.put(message(b"a", expires_at_ms=10**9 + i))
        assert len(store._due) < 2_000
    for i in range(10_000):
        store.put(message(b"b", expires_at_ms=i + 1))
        store.delete(b"b")
        assert len(store._due) < 2_000
    assert [kept.topic for kept in store.expire(2 * 10**9, steps_max=10_000)] == [b"a"]


# --- the order of topics --------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5_000)), max_size=50), st.integers(0, 3))
def test_the_order_equals_a_sorted_set(changes: list[tuple[bool, int]], rounds: int) -> None:
    order, model = TopicOrder(), set[bytes]()
    for block in range(rounds):
        for i in range(RUN_KEYS_MAX):
            key = b"%04d" % ((i * 7 + block) % 5_001)
            if key not in model:
                order.add(key)
                model.add(key)
    for add, number in changes:
        key = b"%04d" % number
        if not add:
            order.discard(key)
            model.discard(key)
        elif key not in model:
            order.add(key)
            model.add(key)
    assert [key for run in order.runs for key in run] == sorted(model)
    assert order.lasts == [run[-1] for run in order.runs]


@given(topics, topics)
def test_keys_are_ordered_as_lists_of_levels(one: bytes, other: bytes) -> None:
    assert (key_of(one) < key_of(other)) == (one.split(b"/") < other.split(b"/"))
