"""Frames of messages for tests, made of runs as the disk has them."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.log.frame import WRITER, encode_rows
from tidegate.log.rows import Rows
from tidegate.log.run import Run


def encode_messages(
    runs: Sequence[Run], base: int, time_ms: int, writer: int = WRITER, followed: bool = False
) -> bytes:
    """One frame of all `runs`, in order. Tells each run its `base` and `time_ms`."""
    position = base
    for run in runs:
        run.base, run.time_ms = position, time_ms
        position += run.count
    return encode_rows(Rows.of(runs), base, time_ms, writer, followed)[0]
