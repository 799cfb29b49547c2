"""The end of the log, kept in memory: readers that are only a little behind never touch the disk (S4.3)."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from tidegate.log.run import Run


class Tail:
    """Batches of runs in log order, one batch per tick, bounded by bytes.

    Everything from `floor` to the log's end is here.
    """

    __slots__ = ("bases", "batches", "bytes", "bytes_max", "floor", "sizes", "start")

    def __init__(self, bytes_max: int, floor: int) -> None:
        self.bytes_max = bytes_max
        self.floor = floor
        self.bytes = 0
        self.bases: list[int] = []
        self.batches: list[list[Run]] = []
        self.sizes: list[int] = []
        self.start = 0  # batches before this have been let go; the lists are shortened now and then

    def add(self, base: int, runs: list[Run], size: int) -> None:
        self.bases.append(base)
        self.batches.append(runs)
        self.sizes.append(size)
        self.bytes += size
        if self.bytes > self.bytes_max:
            self._trim()

    def _trim(self) -> None:
        start, last = self.start, len(self.batches) - 1
        while self.bytes > self.bytes_max and start < last:
            self.bytes -= self.sizes[start]
            self.batches[start] = []
            start += 1
        self.floor = self.bases[start]
        if start > 1024 and start * 2 > last:
            del self.bases[:start], self.batches[:start], self.sizes[:start]
            start = 0
        self.start = start

    def batch_at(self, position: int) -> int:
        """Index of the batch that holds `position` (≥ floor), or of the first one after it."""
        index = bisect_right(self.bases, position, lo=self.start) - 1
        if index < self.start:
            return self.start
        last = self.batches[index][-1]
        return index if position < last.base + last.count else index + 1

    def find(self, position: int) -> Run | None:
        """The run that holds `position`, if it is still here."""
        if position < self.floor:
            return None
        index = self.batch_at(position)
        if index < len(self.batches):
            batch = self.batches[index]
            run = batch[run_at(batch, position)]
            if run.base <= position < run.base + run.count:
                return run
        return None


def run_at(batch: list[Run], position: int) -> int:
    """Index of the last run of a batch that does not begin after `position`; 0 if all do."""
    return max(0, bisect_right(batch, position, key=attrgetter("base")) - 1)
