from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from topic_strategies import filters, topics

from tidegate.router import TopicSet, matches, topic_order

MANY = 3_000


@pytest.fixture(scope="module", autouse=True)
def short_runs() -> Iterator[None]:
    """So that even small sets have more than one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topic_order, "RUN_KEYS_MAX", 4)
        yield


def set_of(*topics: bytes) -> TopicSet:
    known = TopicSet()
    for topic in topics:
        known.add(topic)
    return known


def steps(known: TopicSet, filter: bytes) -> tuple[int, int]:
    """How many topics match, and how many were looked at."""
    scan = known.scan(filter)
    count = 0
    while not scan.done:
        count += len(scan.take(7))
    return count, scan.steps


class SetMachine(RuleBasedStateMachine):
    """The topic set against a plain set and the plain matcher."""

    def __init__(self) -> None:
        super().__init__()
        self.known = TopicSet()
        self.model: set[bytes] = set()

    @rule(topic=topics)
    def add(self, topic: bytes) -> None:
        self.known.add(topic)
        self.model.add(topic)

    @rule(topic=topics)
    def discard(self, topic: bytes) -> None:
        self.known.discard(topic)
        self.model.discard(topic)

    @rule()
    def clear(self) -> None:
        self.known.clear()
        self.model.clear()

    @rule(filter=st.one_of(filters, topics))
    def match(self, filter: bytes) -> None:
        found = list(self.known.matching(filter))
        assert sorted(found) == sorted(topic for topic in self.model if matches(filter, topic))

    @invariant()
    def it_knows_its_size_and_topics(self) -> None:
        assert len(self.known) == len(self.model)
        assert all(topic in self.known for topic in self.model)


@pytest.mark.req("S0.2")
class TestTheTopicSetEqualsThePlainMatcher(SetMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.sets(topics, max_size=60), filters, st.integers(1, 5), st.integers(1, 5))
def test_however_small_its_pieces_a_scan_finds_what_the_plain_matcher_finds(
    listed: set[bytes], filter: bytes, matches_max: int, steps_max: int
) -> None:
    scan = set_of(*listed).scan(filter)
    found: list[bytes] = []
    while not scan.done:
        before = scan.steps
        piece = scan.take(matches_max, steps_max)
        assert len(piece) <= matches_max
        assert scan.steps - before <= steps_max
        found += piece
    expected = (topic for topic in listed if matches(filter, topic))
    assert found == sorted(expected, key=lambda topic: topic.split(b"/"))


@given(st.data())
def test_the_set_may_change_while_matches_are_being_taken(data: st.DataObject) -> None:
    before = data.draw(st.sets(topics, min_size=1, max_size=30))
    filter = data.draw(filters)
    known = set_of(*before)
    always, ever = set(before), set(before)
    found = []
    for topic in known.matching(filter):
        assert topic in known
        found.append(topic)
        for changed in data.draw(st.lists(topics, max_size=3)):
            if changed in known:
                known.discard(changed)
            else:
                known.add(changed)
                ever.add(changed)
            always.discard(changed)
    assert len(found) == len(set(found))
    assert {topic for topic in always if matches(filter, topic)} <= set(found)
    assert set(found) <= {topic for topic in ever if matches(filter, topic)}


def test_each_match_may_be_discarded_as_it_comes() -> None:
    known = set_of(*(b"a/%d/b" % i for i in range(MANY)), b"other")
    for topic in known.matching(b"a/+/b"):
        known.discard(topic)
    assert list(known.matching(b"#")) == [b"other"]


@pytest.mark.req("S0.2")
def test_the_cost_follows_the_matches_and_not_the_topics() -> None:
    known = set_of(*(b"site/%d/dev/%d" % (i, j) for i in range(100) for j in range(100)))
    assert steps(known, b"site/7/dev/8") == (1, 1)
    assert steps(known, b"site/7/#") == (100, 100)
    assert steps(known, b"site/7/dev/+") == (100, 100)
    assert steps(known, b"other/#") == (0, 0)
    assert steps(known, b"site/7/alarm/+")[1] <= 2
    matched, looked_at = steps(known, b"site/+/dev/8")
    assert matched == 100
    assert looked_at <= 3 * 100 + 1


@pytest.mark.attack("A13")
def test_a_filter_that_matches_nothing_still_comes_in_steps() -> None:
    known = set_of(*(b"%d/hum" % i for i in range(1_000)))
    scan = known.scan(b"+/temp")
    assert scan.take(100, steps_max=10) == []
    assert not scan.done
    assert scan.steps == 10
