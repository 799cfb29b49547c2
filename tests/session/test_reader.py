"""Readers: which state may follow which, and the positions they pass over."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.session.reader import (
    AWAY,
    BEHIND,
    BLOCKED,
    GONE,
    LIVE,
    READING,
    RESENDING,
    TRANSITIONS,
    Reader,
    Skip,
    Standing,
)

# Written out once more, by who may cause it.
ALLOWED = {
    (AWAY, RESENDING),  # its client is back, and had not acknowledged everything
    (AWAY, BEHIND),  # … or had, and missed something
    (AWAY, LIVE),  # … or nothing
    (AWAY, READING),  # asks for its place by time before its client is there
    (RESENDING, BEHIND),  # everything was sent again
    (RESENDING, READING),
    (RESENDING, BLOCKED),
    (BEHIND, READING),
    (BEHIND, BLOCKED),
    (BEHIND, LIVE),
    (READING, RESENDING),
    (READING, BEHIND),
    (BLOCKED, RESENDING),
    (BLOCKED, BEHIND),
    (LIVE, BLOCKED),
    (LIVE, BEHIND),
    *((standing, AWAY) for standing in (RESENDING, BEHIND, READING, BLOCKED, LIVE)),
    *((standing, GONE) for standing in (AWAY, RESENDING, BEHIND, READING, BLOCKED, LIVE)),
}


def reader_in(standing: Standing) -> Reader:
    reader = Reader(7, None, [0])
    reader.standing, reader.live = standing, standing is LIVE
    return reader


def test_the_table_names_every_state():
    assert set(TRANSITIONS) == set(Standing)
    assert {(before, after) for before, afters in TRANSITIONS.items() for after in afters} == ALLOWED


@pytest.mark.parametrize(("before", "after"), [pair for pair in product(Standing, Standing) if pair[0] is not pair[1]])
def test_a_transition_is_in_the_table_or_a_bug(before, after):
    reader = reader_in(before)
    if (before, after) in ALLOWED:
        reader.enter(after)
        assert reader.standing is after
        assert reader.live == (after is LIVE)
    else:
        with pytest.raises(AssertionError, match=after.name):
            reader.enter(after)
        assert reader.standing is before
        assert reader.live == (before is LIVE)


@pytest.mark.parametrize("standing", Standing)
def test_to_stay_is_no_transition(standing):
    reader = reader_in(standing)
    reader.enter(standing)
    assert reader.standing is standing


@pytest.mark.req("S3.11")
def test_a_reader_begins_away_and_costs_nothing():
    reader = Reader(7, None, [5, 6])
    assert reader.standing is AWAY and not reader.live and not reader.queued
    assert reader.held is reader.skip is reader.targets is reader.wanted is None
    assert reader.written == (5, 6)


def test_what_has_ended_does_not_come_back():
    assert TRANSITIONS[GONE] == frozenset()


# ── positions to pass over ──

RANGES = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def members(skip: Skip) -> set[int]:
    return {position for first, after in skip.ranges() for position in range(first, after)}


@pytest.mark.req("S4.5")
@given(st.lists(RANGES | st.integers(0, 80), max_size=30))
def test_skipped_positions_are_a_set(steps):
    """A range adds positions; a plain number lets go of what ends at or below it."""
    skip, plain = Skip(), set()
    for step in steps:
        if isinstance(step, int):
            whole = [(a, b) for a, b in skip.ranges() if b <= step]
            skip.forget_below(step)
            plain -= {p for a, b in whole for p in range(a, b)}
            assert not any(b <= step for _, b in skip.ranges())
        else:
            skip.add(*step)
            plain |= set(range(*step))
        assert members(skip) == plain
        assert [p for p in range(-1, 80) if p in skip] == sorted(plain)
        assert bool(skip) == bool(plain)


@given(st.lists(RANGES, max_size=30))
def test_ranges_are_in_order_and_never_touch(steps):
    skip = Skip()
    for step in steps:
        skip.add(*step)
    edges = [edge for pair in skip.ranges() for edge in pair]
    assert edges == sorted(set(edges))


@given(st.lists(RANGES, max_size=20), st.lists(RANGES, max_size=20), st.integers(0, 80))
def test_partitions_are_forgotten_one_by_one(low, high, below):
    floor = 1000
    skip = Skip()
    for first, after in low:
        skip.add(first, after)
    for first, after in high:
        skip.add(floor + first, floor + after)
    before = skip.ranges()
    skip.forget_below(floor + below, floor)
    assert skip.ranges() == [(a, b) for a, b in before if a < floor or b > floor + below]
