"""What the retention rule may and may not drop."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.log.retention import plan
from tidegate.log.segment import SegmentFacts

limits = st.none() | st.integers(0, 400)


@st.composite
def segment_rows(draw: st.DrawFn) -> list[SegmentFacts]:
    found: list[SegmentFacts] = []
    position = 0
    for i in range(draw(st.integers(0, 8))):
        position += draw(st.sampled_from([0, 0, 100]))
        end = position + draw(st.integers(0, 20))
        size, time_ms = draw(st.integers(64, 120)), draw(st.integers(0, 100))
        found.append(SegmentFacts(i, Path(str(i)), position, end, size, 0, time_ms, 1, True))
        position = end
    if found:
        found[-1] = found[-1]._replace(sealed=False)
    return found


@given(segment_rows(), st.integers(0, 200), limits, limits, limits, st.none() | st.integers(0, 1000))
@pytest.mark.req("S2.22", "S3.10", "S4.13")
def test_a_plan_keeps_its_rules(
    segments: list[SegmentFacts],
    now: int,
    size: int | None,
    age: int | None,
    promised: int | None,
    hard: int | None,
) -> None:
    found = plan(segments, now, retention_bytes=size, retention_ms=age, promised=promised, hard_bytes=hard)
    gone = list(found.drop)
    left = segments[len(gone) :]
    assert gone == segments[: len(gone)]  # from the oldest on
    assert not segments or left  # never the one being written
    total = sum(s.bytes for s in segments)
    for segment in gone:
        needed = promised is not None and promised < segment.end
        over_hard = hard is not None and total > hard
        assert over_hard or not needed
        assert (segment in found.broken) == (needed and segment.base < segment.end)
        due = (size is not None and total > size) or (age is not None and segment.last_time_ms < now - age)
        assert due or over_hard
        total -= segment.bytes
    if hard is not None and len(left) > 1:
        assert total <= hard
    if promised is None and size is not None and len(left) > 1:
        assert total <= size
    if left:
        assert found.floor == left[0].base


def test_without_limits_nothing_goes() -> None:
    segments = [SegmentFacts(i, None, i, i + 1, 100, 0, 0, 1, True) for i in range(3)]
    assert plan(segments, 10**12).drop == ()
