"""How the jobs are doing: kept by the driver, written to `status.json`, shown by `tidegate pipeline status`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tidegate.pipeline.small_files import read_json, replace_json

log = logging.getLogger("tidegate.pipeline")

FILE_NAME = "status.json"
RATE_WINDOW_S = 60.0

State = Literal["starting", "running", "stopped", "failed"]
JobState = Literal["waiting", "ok", "failing"]


@dataclass(slots=True)
class JobStatus:
    state: JobState = "waiting"
    last_batch_at: str | None = None
    last_batch_rows: int = 0
    last_batch_s: float = 0.0
    rows: int = 0  # since the driver started
    rate: float = 0.0  # rows a second, over the last minute
    lag_rows: int = 0
    lag_s: float = 0.0
    failures: int = 0
    last_error: str | None = None
    retry_at: str | None = None
    quarantined: int = 0  # in the lake, of all runs


@dataclass(slots=True)
class Status:
    state: State
    pid: int
    started_at: str
    updated_at: str
    spark_master: str
    error: str | None = None
    jobs: dict[str, JobStatus] = field(default_factory=dict)
    version: int = 1


def status_file(data: Path) -> Path:
    return data / "pipeline" / FILE_NAME


def read_status(data: Path) -> Mapping[str, Any] | None:
    """What the driver last wrote; None if there never was one."""
    found = read_json(status_file(data))
    return found if isinstance(found, dict) else None


def now() -> str:
    return moment(time.time())


def moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


class StatusBook:
    """The status as it changes. Jobs on several threads tell it what happened."""

    def __init__(self, data: Path, master: str, jobs: list[str]) -> None:
        self._path = status_file(data)
        self._lock = threading.Lock()
        self._recent: dict[str, deque[tuple[float, int]]] = {name: deque() for name in jobs}
        self._caught_up: dict[str, float] = dict.fromkeys(jobs, time.time())
        self._started = time.monotonic()
        self.status = Status("starting", os.getpid(), now(), now(), master)
        self.status.jobs = {name: JobStatus() for name in jobs}

    def state(self, state: State, error: str | None = None) -> None:
        with self._lock:
            self.status.state, self.status.error = state, error
        self.write()

    def did(self, job: str, rows: int, took_s: float, lag_rows: int, quarantined: int) -> None:
        with self._lock:
            found = self.status.jobs[job]
            found.last_batch_at, found.last_batch_rows, found.last_batch_s = now(), rows, round(took_s, 3)
            found.rows += rows
            found.quarantined += quarantined
            found.lag_rows = lag_rows
            self._recent[job].append((time.monotonic(), rows))
            self._well(job, found)

    def idle(self, job: str) -> None:
        """It looked, and there was nothing to do."""
        with self._lock:
            found = self.status.jobs[job]
            found.lag_rows = 0
            self._well(job, found)

    def _well(self, job: str, found: JobStatus) -> None:
        found.state, found.last_error, found.retry_at = "ok", None, None
        if not found.lag_rows:
            self._caught_up[job] = time.time()

    def failed(self, job: str, error: str, retry_s: float) -> None:
        with self._lock:
            found = self.status.jobs[job]
            found.state, found.last_error = "failing", error
            found.failures += 1
            found.retry_at = moment(time.time() + retry_s)

    def quarantined(self, counts: Counter[str]) -> None:
        """More rows in quarantine, by job."""
        with self._lock:
            for job, count in counts.items():
                if job in self.status.jobs:
                    self.status.jobs[job].quarantined += count

    def write(self) -> None:
        with self._lock:
            at = time.monotonic()
            window = max(min(RATE_WINDOW_S, at - self._started), 1.0)
            for name, found in self.status.jobs.items():
                recent = self._recent[name]
                while recent and recent[0][0] < at - RATE_WINDOW_S:
                    recent.popleft()
                found.rate = round(sum(rows for _, rows in recent) / window, 1)
                behind = found.lag_rows or found.state == "failing"
                found.lag_s = round(time.time() - self._caught_up[name], 1) if behind else 0.0
            self.status.updated_at = now()
            try:
                replace_json(self._path, asdict(self.status), durable=False)
            except OSError as error:  # no room, perhaps; what it would tell goes on all the same
                log.warning("pipeline.status_not_written error=%s", error)
