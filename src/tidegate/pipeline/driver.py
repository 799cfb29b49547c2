"""The driver: one Spark session, the jobs in turns, until told to stop.

The archive has a thread of its own, so that a long step of another job does not delay it. A step that fails is
reported, and tried again with growing pauses; the others go on meanwhile. If Spark itself is gone, the process ends
and whoever started it starts it again: everything that counts is in the lake.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from pyspark.sql import SparkSession

from tidegate.config import Config
from tidegate.errors import StorageError
from tidegate.log.files.disk import Held, lock_file
from tidegate.pipeline import damage
from tidegate.pipeline.handover import tell_broker
from tidegate.pipeline.jobs import (
    Batch,
    Context,
    abuse,
    archive,
    backlog,
    cleaner,
    compaction,
    extract,
    retained,
    traffic,
)
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder
from tidegate.pipeline.spark import spark_session
from tidegate.pipeline.status import StatusBook

log = logging.getLogger("tidegate.pipeline")

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
REST = 4
"""A job that took long rests so many times as long: a backlog over months of messages leaves room for the others."""
WAIT_S = 0.1
STATUS_S = 1.0
ERROR_CHARS_MAX = 500


class Job(Protocol):
    """A module of `jobs`."""

    NAME: str
    INTERVAL_S: float

    def run(self, context: Context) -> Batch | None: ...


JOBS: Sequence[Job] = (archive, retained, traffic, extract, abuse, backlog, cleaner, compaction)

_LOST_TASK = re.compile(r"^.*? Lost task .*? executor \S+\): ")

Progress = Callable[[int, int], None]
"""(messages archived, of how many)"""


class AlreadyRunning(StorageError):
    pass


class SparkGone(StorageError):
    """The JVM has ended, or stopped its context."""


class StoppedEarly(BaseException):
    """Told to stop before Spark had started."""


class Driver:
    def __init__(self, config: Config, spark: SparkSession | None = None) -> None:
        """`spark` is a session of the caller's own; without one, the driver starts and stops its own."""
        self.config = config
        self._spark = spark
        self.stopping = threading.Event()
        self._book = StatusBook(config.data, config.spark["spark.master"], [job.NAME for job in JOBS])
        self._pauses: dict[str, float] = {}
        self._gone: str | None = None
        self._starting = False

    def run(self, once: bool = False, progress: Progress | None = None) -> int:
        """Until stopped; with `once`, until there is nothing left to do. Returns the process's exit code."""
        lock = _lock(self.config.data / "pipeline")
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._book.write()
            self._starting = True
            context = self._start()
            self._starting = False
            self._book.state("running")
            code = self._drain(context, progress) if once else self._serve(context)
            self._book.state("failed" if self._gone else "stopped", self._gone)
            return code
        except StoppedEarly:
            self._book.state("stopped")
            return 0
        except BaseException as error:
            self._book.state("failed", _brief(error))
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(lock)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping.set()
        if self._starting:
            raise StoppedEarly  # nothing is at hand that would have to be finished, and Spark takes a while to start

    def _start(self) -> Context:
        config = self.config
        lake = Lake(config.lake_folder)
        log_folder = LogFolder(config.data / "log")
        # From now on the broker keeps what is not in the lake, also if it takes us a while to begin.
        tell_broker(config.data, lake, archive.archived_to(lake))
        spark = self._spark or spark_session("pipeline", config.spark)
        context = Context(spark, lake, log_folder, config.data, config)
        self._book.quarantined(self._count_quarantined(context))
        return context

    def _count_quarantined(self, context: Context) -> Counter[str]:
        try:
            return Counter(context.lake.column("quarantine", "job"))
        except StorageError as error:  # whether it can be read must not decide whether anything runs
            log.error("pipeline.quarantine_unreadable error=%s", _brief(error))
            self._set_damaged_aside(context, archive.NAME, error)
            return Counter()

    def _end(self, context: Context) -> None:
        if self._spark is None and self._gone is None:
            try:
                context.spark.stop()
            except Exception as error:  # whoever told us to end may have told Java as well
                log.info("pipeline.spark_gone error=%s", _brief(error))

    # ── running ──

    def _serve(self, context: Context) -> int:
        threads = [
            threading.Thread(target=self._turns, args=(context, [JOBS[0]]), name="archive", daemon=True),
            threading.Thread(target=self._turns, args=(context, JOBS[1:]), name="jobs", daemon=True),
        ]
        for thread in threads:
            thread.start()
        while not self.stopping.wait(STATUS_S):
            self._book.write()
            if not _alive(context):
                self._give_up("Spark has ended: its process is gone")
            if not all(thread.is_alive() for thread in threads):
                self._give_up("a thread has ended that should not")
        for thread in threads:
            thread.join()
        self._end(context)
        return 1 if self._gone else 0

    def _turns(self, context: Context, jobs: Sequence[Job]) -> None:
        """Each job when it is due, until the end."""
        context.spark.sparkContext.setLocalProperty("spark.scheduler.pool", jobs[0].NAME)
        due = {job.NAME: 0.0 for job in jobs}
        while not self.stopping.is_set():
            for job in jobs:
                if time.monotonic() < due[job.NAME] or self.stopping.is_set():
                    continue
                began = time.monotonic()
                worked = self._step(context, job)
                ended = time.monotonic()
                if worked is None:
                    due[job.NAME] = ended + self._pauses.get(job.NAME, 0.0)
                elif job is JOBS[0]:
                    due[job.NAME] = ended + (0 if worked.lag_rows else self.config.pipeline.archive_interval_s)
                elif not worked.lag_rows:
                    due[job.NAME] = ended + max(job.INTERVAL_S, REST * (ended - began))
            self.stopping.wait(WAIT_S)

    def _drain(self, context: Context, progress: Progress | None) -> int:
        """Everything that there is now, job after job. A job that fails is not tried again."""
        start, end = context.log.start().place, context.log.end().place  # a broker may go on appending
        total = context.log.rows(max(start, archive.archived_to(context.lake) or 0), end)
        done = 0
        for job in JOBS:
            if progress is not None:
                progress(done, max(total, done))
            while not self.stopping.is_set():
                batch = self._step(context, job)
                if batch is None or batch is NOTHING:
                    break
                done += batch.rows if job is JOBS[0] else 0
                if progress is not None:
                    progress(done, max(total, done))
                self._book.write()
                if job is JOBS[0] and batch.reached >= end:
                    break
        failing = [name for name, job in self._book.status.jobs.items() if job.state == "failing"]
        self._end(context)
        return 1 if failing or self._gone else 0

    def _step(self, context: Context, job: Job) -> Batch | None:
        """One step of a job. None if it failed; NOTHING if there was nothing to do."""
        name = job.NAME
        began = time.monotonic()
        while True:
            try:
                batch = job.run(context)
                if batch is not None and job is JOBS[0]:
                    tell_broker(context.data, context.lake, batch.reached)
                break
            except Exception as error:
                self._failed(context, name, error)
                if self.stopping.is_set() or not self._set_damaged_aside(context, name, error):
                    return None
        self._pauses.pop(name, None)
        if batch is None:
            self._book.idle(name)
            return NOTHING
        self._book.did(name, batch.rows, time.monotonic() - began, batch.lag_rows, batch.quarantined)
        return batch

    def _failed(self, context: Context, name: str, error: Exception) -> None:
        if not _alive(context):
            if self.stopping.is_set():
                return  # Java was told to end as well, and the step at hand ended with it: it is taken again next time
            self._give_up(f"Spark has ended: {_brief(error)}")
        pause_s = self._pauses[name] = min(2 * self._pauses.get(name, RETRY_MIN_S / 2), RETRY_MAX_S)
        log.warning("pipeline.failed job=%s retry_s=%s error=%s", name, pause_s, _brief(error), exc_info=error)
        self._book.failed(name, _brief(error), pause_s)

    def _give_up(self, why: str) -> None:
        if self._gone is None and not self.stopping.is_set():
            self._gone = why
            log.error("pipeline.gives_up error=%s", why)
        self.stopping.set()

    def _set_damaged_aside(self, context: Context, job: str, error: Exception) -> bool:
        """If the failure names files of the lake that cannot be read, take them out, so that it works without them."""
        try:
            found = damage.set_aside_named(context, job, error)
        except Exception as other:  # the disk may be full: then the next failure is soon enough
            log.warning("lake.not_mended error=%s", _brief(other))
            return False
        for name in found:
            log.error("lake.damaged file=%s job=%s", name, job)
        self._book.quarantined(Counter({job: len(found)}))
        return bool(found)


NOTHING = Batch(0, 0)


def _alive(context: Context) -> bool:
    try:
        return not context.spark.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False


def _brief(error: BaseException) -> str:
    """The line that says what is wrong: the first, before Java's stack; the last, after a worker's."""
    lines = [line for line in str(error).splitlines() if line.strip()] or ["for no reason given"]
    if "Traceback (most recent call last):" in lines:
        said = next(line for line in reversed(lines) if not line[0].isspace())
    elif len(lines) > 1 and lines[1].startswith(": "):  # py4j says what it called before it says what Java said
        said = _LOST_TASK.sub("", lines[1].removeprefix(": "))
    else:
        said = f"{type(error).__name__}: {lines[0]}"
    return said[:ERROR_CHARS_MAX]


def _lock(folder: Path) -> int:
    """One driver for a data folder. The file names the process."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return lock_file(folder / "pid")
    except Held as owner:
        raise AlreadyRunning(f"a pipeline already runs for {folder.parent}: process {owner}") from None
