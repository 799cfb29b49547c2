"""What commands that use Spark share: the session, how far its tasks are, and its errors in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidegate.config import Config

from .failure import Failure
from .pipeline import missing_packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from tidegate.pipeline.lake import Lake

POLL_S = 0.2


def lake_of(config: Config) -> Lake:
    """The lake, if there is one."""
    if missing := missing_packages():
        raise Failure(
            f"the lake is read with {' and '.join(missing)}", "pip install 'tidegate[pipeline]' brings everything"
        )
    from tidegate.pipeline.lake import Lake

    lake = Lake(config.lake_folder)
    if not lake.names():
        hint = "`tidegate up` keeps one, `tidegate pipeline run --once` makes one; --data names another data folder"
        raise Failure(f"there is no lake in {config.lake_folder}", hint)
    return lake


@contextmanager
def spark_for(name: str, config: Config, console: Console, *, quick: bool = False) -> Iterator[SparkSession]:
    """A session for one command; `quick` if Spark has little to do in it. One that runs in this process already is
    used, and left running."""
    from pyspark.sql import SparkSession

    from tidegate.pipeline.spark import JAVA_OPTIONS, QUICK_COMPILER, spark_session, step_back

    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    with console.status("starting Spark") if console.is_terminal else _nothing():
        settings = dict(config.spark)
        if quick:
            settings[JAVA_OPTIONS] = f"{QUICK_COMPILER} {settings.get(JAVA_OPTIONS, '')}"
        spark = spark_session(name, settings)
        step_back(spark)
        spark.sparkContext.setLogLevel("OFF")  # what fails is raised, and told once
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def watched(spark: SparkSession, console: Console, what: str) -> Iterator[None]:
    """On a terminal, a bar of the tasks that Spark is at."""
    if not console.is_terminal:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done = threading.Event()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        thread = threading.Thread(target=_follow, args=(spark, bar, task, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _follow(spark: SparkSession, bar: Progress, task: TaskID, done: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not done.wait(POLL_S):
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        if known:
            total = sum(stage.numTasks for stage in known)
            bar.update(task, completed=sum(stage.numCompletedTasks for stage in known), total=total)
