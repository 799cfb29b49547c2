from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from topic_strategies import filters, topics

from instructions import instructions
from tidegate.router import SubscriptionIndex, has_wildcard, matches


class IndexMachine(RuleBasedStateMachine):
    """The index against a dictionary of entries and the plain matcher."""

    def __init__(self) -> None:
        super().__init__()
        self.index: SubscriptionIndex[int, int] = SubscriptionIndex()
        self.entries: dict[tuple[bytes, int], int] = {}
        self.values = itertools.count()

    subscribed = st.one_of(filters, topics)
    keys = st.integers(0, 3)

    @rule(filter=subscribed, key=keys)
    def add(self, filter: bytes, key: int) -> None:
        value = next(self.values)
        assert self.index.add(filter, key, value) is ((filter, key) not in self.entries)
        self.entries[filter, key] = value

    @rule(filter=subscribed, key=keys)
    def remove(self, filter: bytes, key: int) -> None:
        found = self.entries.pop((filter, key), None) is not None
        assert self.index.remove(filter, key) is found

    @rule(choice=st.integers(0))
    def remove_one_that_is_there(self, choice: int) -> None:
        if self.entries:
            filter, key = sorted(self.entries)[choice % len(self.entries)]
            del self.entries[filter, key]
            assert self.index.remove(filter, key) is True

    @rule(topic=topics)
    def match(self, topic: bytes) -> None:
        expected = [value for (filter, _), value in self.entries.items() if matches(filter, topic)]
        assert sorted(self.index.match(topic)) == sorted(expected)

    @invariant()
    def every_subscribed_topic_is_matched_right(self) -> None:
        for filter, _ in self.entries:
            self.match(filter.replace(b"+", b"a").replace(b"#", b"b"))

    @invariant()
    def it_knows_its_size_and_filters(self) -> None:
        assert len(self.index) == len(self.entries)
        assert sorted(self.index.filters()) == sorted({filter for filter, _ in self.entries})

    @invariant()
    def it_keeps_no_node_without_use(self) -> None:
        paths: set[tuple[bytes, ...]] = {()}
        for filter, _ in self.entries:
            if has_wildcard(filter):
                levels = tuple(level for level in filter.split(b"/") if level != b"#")
                paths.update(levels[: depth + 1] for depth in range(len(levels)))
        assert self.index.nodes() <= len(paths)

    def teardown(self) -> None:
        for filter, key in self.entries:
            assert self.index.remove(filter, key)
        assert self.index.nodes() == 1
        assert len(self.index) == 0


@pytest.mark.req("S0.1")
class TestTheIndexEqualsThePlainMatcher(IndexMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.req("S0.1")
@given(st.sets(filters, max_size=40), topics)
def test_many_overlapping_filters_match_as_the_plain_matcher_says(
    subscribed: set[bytes], topic: bytes
) -> None:
    index: SubscriptionIndex[str, bytes] = SubscriptionIndex()
    for filter in subscribed:
        index.add(filter, "client", filter)
    assert sorted(index.match(topic)) == sorted(filter for filter in subscribed if matches(filter, topic))


def test_one_key_with_several_matching_filters_has_several_values() -> None:
    index: SubscriptionIndex[str, int] = SubscriptionIndex()
    for value, filter in enumerate([b"a/b", b"a/+", b"a/#", b"#"]):
        index.add(filter, "client", value)
    assert sorted(index.match(b"a/b")) == [0, 1, 2, 3]


@pytest.mark.req("S1.8")
@pytest.mark.parametrize("filter", [b"a/b", b"a/+", b"a/#"])
def test_adding_again_replaces_the_value(filter: bytes) -> None:
    index: SubscriptionIndex[str, int] = SubscriptionIndex()
    assert index.add(filter, "x", 1) is True
    assert index.add(filter, "x", 2) is False
    assert index.add(filter, "y", 3) is True
    assert index.add(filter, "y", 4) is False
    assert index.match(b"a/b") == [2, 4]
    assert len(index) == 2


@pytest.mark.req("S0.1")
def test_the_cost_of_a_match_does_not_grow_with_the_number_of_subscriptions() -> None:
    def visits(count: int) -> int:
        index: SubscriptionIndex[int, int] = SubscriptionIndex()
        for i in range(count):
            index.add(b"site/%d/+/temp" % i, i, i)
            index.add(b"site/%d/dev/#" % i, i, i)
        before = index.visits
        assert len(index.match(b"site/7/dev/temp")) == 2
        return index.visits - before

    assert visits(10_000) == visits(10)


@pytest.mark.attack("A13")
def test_a_topic_of_few_levels_is_matched_in_few_visits_whatever_is_subscribed_to() -> None:
    """Each level of the topic at most doubles the paths that fit: the literal one and `+`."""
    index: SubscriptionIndex[int, int] = SubscriptionIndex()
    for i, levels in enumerate(itertools.product([b"a", b"b", b"+"], repeat=8)):
        index.add(b"/".join([*levels, b"#"]), i, i)
    for depth in range(1, 9):
        before = index.visits
        index.match(b"/".join([b"a"] * depth))
        assert index.visits - before <= 2 ** (depth + 1)


class Counted:
    """A key that counts how often it is compared with others."""

    compared = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return isinstance(other, Counted) and self.number == other.number


@pytest.mark.parametrize("filter", [b"a/b", b"a/+", b"a/#"])
def test_joining_and_leaving_a_filter_looks_at_none_of_the_others_that_have_it(filter: bytes) -> None:
    index: SubscriptionIndex[Counted, int] = SubscriptionIndex()
    count = 2_000
    Counted.compared = 0
    for number in range(count):
        index.add(filter, Counted(number), number)
    assert len(index) == count
    for number in range(count):
        assert index.remove(filter, Counted(number))
    assert len(index) == 0
    assert Counted.compared <= 4 * count


@pytest.mark.attack("A13")
def test_filters_in_all_combinations_cost_no_more_than_the_branches_that_are_there() -> None:
    index: SubscriptionIndex[int, int] = SubscriptionIndex()
    depth = 10
    for i, levels in enumerate(itertools.product([b"a", b"+"], repeat=depth)):
        index.add(b"/".join([*levels, b"x"]), i, i)
    nodes = index.nodes()
    assert index.match(b"/".join([b"a"] * depth + [b"y"])) == []
    assert index.visits <= nodes
    # Filters of one client, each of the deepest kind: the frontier is one node wide.
    index = SubscriptionIndex()
    for i in range(1, 128):
        index.add(b"+/" * i + b"#", i, i)
    assert len(index.match(b"/".join([b"a"] * 128))) == 127
    assert index.visits <= 2 * 128


@pytest.mark.attack("A13")
def test_deep_filters_cost_about_two_visits_each_and_not_one_for_each_level() -> None:
    index: SubscriptionIndex[int, int] = SubscriptionIndex()
    depth = 60
    count = 0
    for one, other in itertools.combinations(range(depth), 2):
        levels = [b"+"] * depth
        levels[one] = levels[other] = b"a"
        index.add(b"/".join([*levels, b"x"]), count, count)
        count += 1
    assert index.match(b"/".join([b"a"] * (depth + 1))) == []
    assert index.visits <= 3 * count
    assert len(index.match(b"/".join([b"a"] * depth + [b"x"]))) == count


@pytest.mark.attack("A13")
def test_a_topic_of_thousands_of_levels_costs_no_more_than_the_deepest_filter() -> None:
    index: SubscriptionIndex[str, str] = SubscriptionIndex()
    index.add(b"+/+/#", "client", "found")
    index.add(b"a/a/a/a", "client", "not found")
    assert index.match(b"/".join([b"a"] * 32_768)) == ["found"]
    assert index.visits <= 4


@pytest.mark.attack("A13")
def test_a_filter_deeper_than_the_stack_is_added_matched_listed_and_removed() -> None:
    depth = 10 * sys.getrecursionlimit()
    filter = b"+/" * depth + b"#"
    index: SubscriptionIndex[str, str] = SubscriptionIndex()
    index.add(filter, "client", "found")
    assert index.match(b"a/" * depth + b"a") == ["found"]
    assert list(index.filters()) == [filter]
    assert index.remove(filter, "client")
    assert index.nodes() == 1


@pytest.mark.attack("A13")
def test_when_deep_filters_are_gone_matching_is_as_cheap_as_before() -> None:
    index: SubscriptionIndex[str, str] = SubscriptionIndex()
    index.add(b"a/#", "shallow", "found")
    index.add(b"a/" * 100 + b"#", "deep", "found")
    index.remove(b"a/" * 100 + b"#", "deep")
    assert index._depths == [0, 1]  # how deep a topic is split
    assert index.match(b"a/" * 100) == ["found"]
    assert index.visits <= 3


def filled(size: int) -> SubscriptionIndex[int, int]:
    """Filters of which few match any one topic."""
    index: SubscriptionIndex[int, int] = SubscriptionIndex()
    for number in range(size // 4):
        for filter in (b"site/%d/state", b"site/%d/+", b"site/%d/#", b"+/%d/state/+"):
            index.add(filter % number, number, number)
    return index


@pytest.mark.req("S0.1")
@pytest.mark.parametrize("topic", [b"site/7/state", b"site/7/other/deeper", b"elsewhere", b"site/none/state"])
def test_matching_takes_as_many_instructions_among_a_hundred_thousand_filters_as_among_a_hundred(topic: bytes) -> None:
    few, many = filled(100), filled(100_000)
    assert sorted(few.match(topic)) == sorted(many.match(topic))
    among_few = instructions(lambda: few.match(topic))
    among_many = instructions(lambda: many.match(topic))
    assert 0 < among_many <= 2 * among_few
