from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import ConfigError
from tidegate.router import STRATEGIES, Strategy, make_strategy

MEMBERS = ["ann", "bob", "cyd", "dan", "eve"]


def everyone(member: str) -> bool:
    return True


def all_but(*absent: str) -> Callable[[str], bool]:
    return lambda member: member not in absent


def picks(
    strategy: Strategy[str], count: int, available: Callable[[str], bool] = everyone
) -> list[str | None]:
    return [strategy.pick(MEMBERS, b"pub%d" % i, b"t/%d" % i, available) for i in range(count)]


calls = st.lists(
    st.tuples(st.binary(max_size=4), st.binary(max_size=4), st.sets(st.sampled_from(MEMBERS))), max_size=30
)


@pytest.mark.req("S2.14")
@pytest.mark.parametrize("name", STRATEGIES)
@given(calls=calls, seed=st.integers(0, 2**64))
def test_exactly_one_available_member_is_picked_and_the_same_one_every_time_it_is_played(
    name: str, calls: list[tuple[bytes, bytes, set[str]]], seed: int
) -> None:
    first: Strategy[str] = make_strategy(name, seed)
    second: Strategy[str] = make_strategy(name, seed)
    for publisher, topic, present in calls:
        picked = first.pick(MEMBERS, publisher, topic, present.__contains__)
        assert picked == second.pick(MEMBERS, publisher, topic, present.__contains__)
        assert picked in present if present else picked is None


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_empty_group_has_nobody_to_pick(name: str) -> None:
    strategy: Strategy[str] = make_strategy(name, 1)
    assert strategy.pick([], b"p", b"t", everyone) is None


@pytest.mark.parametrize("name", STRATEGIES)
def test_members_may_leave_between_two_picks(name: str) -> None:
    strategy: Strategy[str] = make_strategy(name, 1)
    for count in (5, 3, 1, 0, 2):
        picked = strategy.pick(MEMBERS[:count], b"p", b"t", everyone)
        assert picked in MEMBERS[:count] if count else picked is None


def test_round_robin_gives_everyone_a_turn() -> None:
    assert picks(make_strategy("round_robin"), 7) == [*MEMBERS, "ann", "bob"]


def test_round_robin_gives_the_turn_of_an_absent_member_to_nobody_twice() -> None:
    assert picks(make_strategy("round_robin"), 8, all_but("bob")) == ["ann", "cyd", "dan", "eve"] * 2


@pytest.mark.parametrize("name", ["random", "hash_publisher", "hash_topic"])
def test_spreading_strategies_reach_everyone_about_equally(name: str) -> None:
    shares = Counter(picks(make_strategy(name, 7), 5_000))
    assert set(shares) == set(MEMBERS)
    assert min(shares.values()) > 800


def test_random_is_uniform_over_those_who_are_there() -> None:
    shares = Counter(picks(make_strategy("random", 7), 4_000, all_but("bob")))
    assert set(shares) == set(MEMBERS) - {"bob"}
    assert max(shares.values()) < 1.2 * min(shares.values())


def test_random_differs_by_seed() -> None:
    assert picks(make_strategy("random", 1), 50) != picks(make_strategy("random", 2), 50)


def test_sticky_stays_with_one_until_it_is_absent_and_then_with_another() -> None:
    strategy: Strategy[str] = make_strategy("sticky", 3)
    [favourite] = set(picks(strategy, 20))
    assert favourite is not None
    [second] = set(picks(strategy, 20, all_but(favourite)))
    assert second != favourite
    assert set(picks(strategy, 20)) == {second}


def test_sticky_follows_its_favourite_to_another_place_and_drops_it_when_it_leaves() -> None:
    strategy: Strategy[str] = make_strategy("sticky", 3)
    favourite = strategy.pick(MEMBERS, b"", b"", everyone)
    assert favourite is not None
    assert strategy.pick([*reversed(MEMBERS)], b"", b"", everyone) == favourite
    assert strategy.pick([m for m in MEMBERS if m != favourite], b"", b"", everyone) != favourite


@pytest.mark.parametrize(("name", "field"), [("hash_publisher", 0), ("hash_topic", 1)])
def test_a_hash_keeps_what_belongs_together_with_one_member(name: str, field: int) -> None:
    strategy: Strategy[str] = make_strategy(name, 0)
    for key in (b"k%d" % i for i in range(20)):
        others = [b"o%d" % i for i in range(20)]
        pairs = [(key, other) if field == 0 else (other, key) for other in others]
        assert len({strategy.pick(MEMBERS, publisher, topic, everyone) for publisher, topic in pairs}) == 1


@pytest.mark.parametrize("name", ["hash_publisher", "hash_topic"])
def test_the_share_of_an_absent_member_goes_to_the_next_and_comes_back(name: str) -> None:
    strategy: Strategy[str] = make_strategy(name, 0)
    before = picks(strategy, 200)
    during = picks(strategy, 200, all_but("bob", "cyd"))
    assert during == ["dan" if member in ("bob", "cyd") else member for member in before]
    assert picks(strategy, 200) == before


def test_hashes_do_not_depend_on_the_process() -> None:
    """Fixed values: `hash()` would differ from run to run, and after a restart order would be lost."""
    assert picks(make_strategy("hash_topic"), 5) == ["dan", "bob", "eve", "bob", "eve"]


def test_an_unknown_strategy_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="round_robin, random, sticky, hash_publisher, hash_topic"):
        make_strategy("fastest")
