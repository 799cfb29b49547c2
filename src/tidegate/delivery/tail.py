"""The end of a partition, kept in memory: readers that are only a little behind never touch the disk (S4.3)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from tidegate.log.rows import Rows


class Tail:
    """Rows in log order, one batch per announcement, bounded by bytes.

    Everything from `floor` to what was announced last is here.
    """

    __slots__ = ("batches", "bytes", "bytes_max", "firsts", "floor", "sizes", "start")

    def __init__(self, bytes_max: int, floor: int) -> None:
        self.bytes_max = bytes_max
        self.floor = floor
        self.bytes = 0
        self.firsts: list[int] = []  # the first position of each batch
        self.batches: list[Rows | None] = []
        self.sizes: list[int] = []
        self.start = 0  # batches before this have been let go; the lists are shortened now and then

    def add(self, rows: Rows, size: int) -> None:
        self.firsts.append(rows.positions[0])
        self.batches.append(rows)
        self.sizes.append(size)
        self.bytes += size
        if self.bytes > self.bytes_max:
            self._trim()

    def _trim(self) -> None:
        start, last = self.start, len(self.batches) - 1
        while self.bytes > self.bytes_max and start < last:
            self.bytes -= self.sizes[start]
            self.batches[start] = None
            start += 1
        self.floor = self.firsts[start]
        if start > 1024 and start * 2 > last:
            del self.firsts[:start], self.batches[:start], self.sizes[:start]
            start = 0
        self.start = start

    def newest(self) -> int:
        """How many rows the last batch has."""
        last = self.batches[-1] if self.batches else None
        return len(last) if last is not None else 0

    def from_position(self, position: int) -> tuple[Rows, int] | None:
        """The batch with the first row that is not before `position` (≥ floor), and that row."""
        index = max(self.start, bisect_right(self.firsts, position, lo=self.start) - 1)
        while index < len(self.batches):
            rows: Rows = self.batches[index]  # type: ignore[assignment]
            row = row_from(rows.positions, position)
            if row < len(rows):
                return rows, row
            index += 1
        return None

    def find(self, position: int) -> tuple[Rows, int] | None:
        """The row that has this position, if it is still here."""
        if position < self.floor:
            return None
        found = self.from_position(position)
        return found if found is not None and found[0].positions[found[1]] == position else None


def row_from(positions: Sequence[int], position: int) -> int:
    """The first row that is not before `position`."""
    if isinstance(positions, range):
        return max(0, min(len(positions), position - positions.start))
    return bisect_left(positions, position)
