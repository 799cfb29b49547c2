"""The gate: all work that a packet can cause beyond its own bytes passes here, in steps, with a share of each tick.

A job is an iterator; each step does a little and yields what it cost, in units of about one message handled. Jobs take
turns in one queue, so that none makes another wait for longer than a step, and a tick does no more than its budget: the
loop gets back to its sockets in between.

The gate also knows the bytes that readers hold; with those on their way to links (`Post.sending_bytes`) and those of
the tick they are what memory is bounded by (I6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from tidegate.limits import GATE_UNITS

Job = Iterator[int]


class Gate:
    __slots__ = ("_request_tick", "held_bytes", "jobs")

    def __init__(self, request_tick: Callable[[], None]) -> None:
        self._request_tick = request_tick
        self.jobs: deque[Job] = deque()
        self.held_bytes = 0  # read from disk for readers, and not yet sent

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        self._request_tick()

    def turn(self) -> None:
        """A tick's share."""
        jobs = self.jobs
        budget = GATE_UNITS
        while jobs and budget > 0:
            job = jobs.popleft()
            cost = next(job, None)
            if cost is None:
                budget -= 1
            else:
                budget -= max(cost, 1)
                jobs.append(job)
        if jobs:
            self._request_tick()
