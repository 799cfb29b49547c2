"""What a job that follows a table takes in one step: whole files, up to a number of rows.

A step goes by files rather than by numbers, because positions have gaps: after a crash they jump by four thousand
million, and nobody should walk through that.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from tidegate.pipeline.lake import LakeFile

STEP_ROWS = 1_000_000
"""Some seconds of work on one machine. A job that is cut off does so much again."""


class Step(NamedTuple):
    """Rows with `start` <= column < `end`; `left_rows` come after it. Its files are of `oldest` … `newest`."""

    start: int
    end: int
    rows: int
    left_rows: int
    oldest: datetime
    newest: datetime


def next_step(
    files: Sequence[LakeFile], column: str, reached: int, end: int | None = None, rows_max: int = STEP_ROWS
) -> Step | None:
    """The next step from `reached` on, but not beyond `end`; None if there is nothing yet. `rows` and `left_rows` are
    upper bounds."""
    ahead = [file for file in files if file.high[column] >= reached and (end is None or file.low[column] < end)]
    if not ahead:
        return None
    ahead.sort(key=lambda file: int(file.high[column]))
    taken = [ahead.pop(0)]
    while ahead and sum(file.rows for file in taken) + ahead[0].rows <= rows_max:
        taken.append(ahead.pop(0))
    reach = max(int(file.high[column]) for file in taken) + 1
    return Step(
        reached,
        reach if end is None else min(reach, end),
        sum(_rows_from(file, column, reached) for file in taken),
        sum(file.rows for file in ahead),
        min(file.low["time"] for file in taken),
        max(file.high["time"] for file in taken),
    )


def _rows_from(file: LakeFile, column: str, reached: int) -> int:
    """At most so many of its rows have not been taken yet: a file that compaction has made may reach far back."""
    return min(file.rows, int(file.high[column]) - reached + 1)
