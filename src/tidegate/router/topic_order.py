"""Topics in order, for range scans that survive changes.

A key is the topic with every `/` replaced by NUL. No topic contains NUL and NUL is the smallest byte, so the
order of keys is the order of the lists of levels, and a topic with everything below it is one contiguous run:

    topic      key          `a/#` is the run from `a` up to, not including, `a\\x01`
    a          a            ┐
    a/b        a\\0b         │
    a/b/c      a\\0b\\0c      ┘
    a-b        a-b

(In plain byte order `a-b` would stand between `a` and `a/b`.)

The keys live in a list of short sorted lists: an insertion shifts one short list, never a million slots.
A scan (`topic_scan`) remembers the key that it wants next, never a place, so anything may change between two of
its steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

SEPARATOR: Final = b"\0"
AFTER_SEPARATOR: Final = b"\x01"

# A run is cut in two beyond this. 1,000 slots are 8 KB to shift, and a million keys are about 1,500 runs.
RUN_KEYS_MAX: Final = 1_000


def key_of(topic: bytes) -> bytes:
    return topic.replace(b"/", SEPARATOR)


class TopicOrder:
    """A sorted set of keys. `runs` and `lasts` are for scans to read."""

    __slots__ = ("lasts", "runs")

    def __init__(self) -> None:
        self.runs: list[list[bytes]] = []  # none is empty
        self.lasts: list[bytes] = []  # the last key of each run

    def add(self, key: bytes) -> None:
        """`key` must not be there yet."""
        if not self.runs:
            self.runs.append([key])
            self.lasts.append(key)
            return
        at = min(bisect_left(self.lasts, key), len(self.runs) - 1)
        run = self.runs[at]
        insort(run, key)
        if len(run) > RUN_KEYS_MAX:
            # Keys often come in order. Cutting the last run near its end leaves full runs behind.
            middle = len(run) * 9 // 10 if at == len(self.runs) - 1 else len(run) // 2
            self.runs.insert(at + 1, run[middle:])
            del run[middle:]
            self.lasts.insert(at + 1, self.runs[at + 1][-1])
        self.lasts[at] = run[-1]

    def discard(self, key: bytes) -> None:
        at = bisect_left(self.lasts, key)
        if at == len(self.runs):
            return
        run = self.runs[at]
        place = bisect_left(run, key)
        if run[place] != key:
            return
        del run[place]
        if run:
            self.lasts[at] = run[-1]
        else:
            del self.runs[at], self.lasts[at]

    def clear(self) -> None:
        self.runs.clear()
        self.lasts.clear()
