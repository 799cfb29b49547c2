"""What the tests of the jobs share: a context without a driver, and steps until there is nothing left to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from pyspark.sql import SparkSession

from tidegate.config import Config
from tidegate.pipeline.jobs import Batch, Context, archive
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder


class Job(Protocol):
    run: Callable[[Context], Batch | None]


class Killed(Exception):
    """Stands for kill -9."""


def context_of(spark: SparkSession, data: Path, **settings: Any) -> Context:
    return Context(spark, Lake(data / "lake"), LogFolder(data / "log"), data, Config(data=data, **settings))


def drain(job: Any, context: Context) -> list[Batch]:
    """Every step that there is to do. The lake is opened anew, as by a driver that has just been started."""
    batches = []
    while (batch := job.run(context)) is not None:
        batches.append(batch)
    return batches


def archived(context: Context) -> Context:
    drain(archive, context)
    return context


def table(context: Context, name: str, *columns: str) -> list[tuple[Any, ...]]:
    """The rows of a table, in order."""
    frame = context.lake.read(context.spark, name)
    rows = (frame.select(*columns) if columns else frame).collect()
    return sorted((tuple(row) for row in rows), key=repr)


def kill_at_commit(monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    """The next commit to the table `name` is not made, or is the last thing that happens."""
    commit = Lake.commit

    def dying(self: Lake, table: str, *arguments: Any, **named: Any) -> None:
        if table != name:
            return commit(self, table, *arguments, **named)
        monkeypatch.setattr(Lake, "commit", commit)
        if when == "after":
            commit(self, table, *arguments, **named)
        raise Killed

    monkeypatch.setattr(Lake, "commit", dying)
