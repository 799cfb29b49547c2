"""Reads that fail for the moment: how long to wait before they are tried again, and what whoever runs the broker hears.

One event says which file cannot be read and why: when it begins, once a minute while it lasts. Another says that it is
over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 5.0
TELL_S = 60.0

# Who has not asked for so long has gone away.
GONE_S = 60.0

Report = Callable[[str, Mapping[str, object]], None]


class AskingAgain:
    """Called on the loop's thread. A read is known by the position that it asks for."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._failing: dict[int, tuple[float, float]] = {}  # position → since when, and when the last time
        self._since_s = self._told_s = 0.0

    def failed(self, position: int, error: OSError | MemoryError) -> float:
        """How long to wait: the longer it lasts, the longer."""
        now_s = time.monotonic()
        if not self._failing:
            self._since_s = now_s
        if not self._failing or now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            file = error.filename if isinstance(error, OSError) else None
            why = error.strerror if isinstance(error, OSError) else "no memory"
            self._report("log.unreadable", {"file": file, "why": why, "for_s": round(now_s - self._since_s)})
        since_s, _ = self._failing.get(position, (now_s, now_s))
        self._failing[position] = since_s, now_s
        return min(max((now_s - since_s) / 2, PAUSE_MIN_S), PAUSE_MAX_S)

    def passed(self, position: int) -> None:
        if not self._failing:
            return
        now_s = time.monotonic()
        self._failing.pop(position, None)
        self._failing = {at: times for at, times in self._failing.items() if now_s - times[1] < GONE_S}
        if not self._failing:
            self._report("log.readable", {"after_s": round(now_s - self._since_s)})
