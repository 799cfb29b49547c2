"""What a reader is not to send again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Skip:
    """Positions that are finished although they lie above a reader's position: what its client acknowledged out of
    order, and QoS 2 messages that went through to their end. Disjoint ranges in order."""

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def __contains__(self, position: int) -> bool:
        at = bisect_right(self.starts, position) - 1
        return at >= 0 and position < self.stops[at]

    def __bool__(self) -> bool:
        return bool(self.starts)

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.stops, strict=True))

    def add(self, start: int, stop: int) -> None:
        first = bisect_left(self.stops, start)
        last = first
        while last < len(self.starts) and self.starts[last] <= stop:
            last += 1
        if first < last:
            start, stop = min(start, self.starts[first]), max(stop, self.stops[last - 1])
        self.starts[first:last] = [start]
        self.stops[first:last] = [stop]

    def forget_below(self, position: int, floor: int = 0) -> None:
        """Let go of ranges of one partition, which begins at `floor`, that end at or below `position`."""
        kept = [(a, b) for a, b in self.ranges() if b > position or a < floor]
        self.starts, self.stops = [a for a, _ in kept], [b for _, b in kept]
