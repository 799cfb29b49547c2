"""Time for the core: seconds that never go back for intervals, milliseconds since 1970 for records.

Record time follows the system's clock but never runs backwards, and small steps of it (NTP, a suspended machine) are
followed gradually: a jump must not expire messages early or confuse what came first (C6). A system clock that is
ahead by more than ten minutes was wrong before, and is followed at once.
"""

from __future__ import annotations

from collections.abc import Callable

SLEW = 0.05  # how much faster or slower record time may run to meet the system's clock
STEP_MS = 10 * 60 * 1000


class Clock:
    __slots__ = ("_monotonic", "_offset_ms", "_wall", "now_ms", "now_s")

    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], float], not_before_ms: int = 0) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self.now_s = monotonic()
        self.now_ms = max(int(wall() * 1000), not_before_ms)
        self._offset_ms = self.now_ms - self.now_s * 1000

    def tick(self) -> None:
        """Read the interval clock; record time moves with it."""
        self.now_s = self._monotonic()
        self.now_ms = max(self.now_ms, int(self.now_s * 1000 + self._offset_ms))

    def adjust(self, elapsed_s: float) -> None:
        """Move record time towards the system's clock; called about once a second."""
        ahead_ms = self._wall() * 1000 - (self.now_s * 1000 + self._offset_ms)
        most_ms = elapsed_s * 1000 * SLEW
        self._offset_ms += ahead_ms if ahead_ms > STEP_MS else max(-most_ms, min(most_ms, ahead_ms))
