"""Which segments may go. A rule without a clock or a disk: it returns a plan.

Segments go from the oldest on, whole, and never the one that is being written. A segment is due when
the log is larger than `retention_bytes` or its newest message is older than `retention_ms`. One that
holds a promised position, one that a session still needs, stays although it is due:
unless the log has passed `hard_bytes`, for a full disk would break every promise at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidegate.log.segment import SegmentFacts


class Plan(NamedTuple):
    """`drop`, oldest first. `broken` is the part of it that somebody still needed; positions below
    `floor` are gone after it."""

    drop: tuple[SegmentFacts, ...]
    broken: tuple[SegmentFacts, ...]
    floor: int


def plan(
    segments: Sequence[SegmentFacts],
    now_ms: int,
    *,
    retention_bytes: int | None = None,
    retention_ms: int | None = None,
    promised: int | None = None,
    hard_bytes: int | None = None,
) -> Plan:
    """`segments` oldest first. `promised` is the lowest position that is still needed, None if none
    is. A limit of None does not limit."""
    total = sum(segment.bytes for segment in segments)
    drop: list[SegmentFacts] = []
    broken: list[SegmentFacts] = []
    for segment in segments[:-1]:
        too_large = retention_bytes is not None and total > retention_bytes
        too_old = retention_ms is not None and segment.last_time_ms < now_ms - retention_ms
        too_much = hard_bytes is not None and total > hard_bytes
        needed = promised is not None and promised < segment.end
        if not segment.sealed or not (too_large or too_old or too_much) or (needed and not too_much):
            break
        drop.append(segment)
        if needed and segment.base < segment.end:
            broken.append(segment)
        total -= segment.bytes
    left = segments[len(drop) :]
    return Plan(tuple(drop), tuple(broken), left[0].base if left else 0)
