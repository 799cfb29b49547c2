"""A thread for what can wait for a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Does one job after the other. What a job raises ends the thread and goes to `threading.excepthook`, where the
    server learns of everything that nobody foresaw: a job catches what it foresees, and nothing else."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        # A daemon: a file system that does not answer must not keep the broker from stopping.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            job()

    def finish(self) -> None:
        """Return when everything is done."""
        self._jobs.put(None)
        self._thread.join()

    def abandon(self, wait_s: float) -> None:
        """Begin nothing more, and wait so long for the job that is under way."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(wait_s)
