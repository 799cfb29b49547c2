"""How long to wait before something that ended is tried again."""

from __future__ import annotations


class Backoff:
    """Twice as long each time, up to a bound; from the shortest pause on again after it went well for a while."""

    def __init__(self, min_s: float, max_s: float, settled_s: float) -> None:
        self._min_s, self._max_s, self._settled_s = min_s, max_s, settled_s
        self._next_s = min_s

    def pause_s(self, went_well_s: float) -> float:
        """The pause after a try that went well for so long."""
        if went_well_s >= self._settled_s:
            self._next_s = self._min_s
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._max_s)
        return pause_s
