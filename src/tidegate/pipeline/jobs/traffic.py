"""Traffic (P.9): one row per minute, tenant, topic and publisher.

A step sums up its messages and adds the sums to the rows that are there already. Only the files that may hold one of
the step's minutes are replaced, in the commit that also says how far the job has come: each message is counted once,
and a minute's row is there once, whatever is killed when. The files are cut along the minutes and kept small, so what
a step reads and writes again is the newest of them, or as much as its own minutes hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from tidegate.pipeline.jobs import Batch, Context
from tidegate.pipeline.jobs.following import next_step
from tidegate.pipeline.lake import LakeFile

NAME = "traffic"
INTERVAL_S = 10.0

TABLE = "traffic_minutely"
GRAIN = ("minute", "tenant", "topic", "publisher")
SUMS = ("messages", "bytes", "qos0", "qos1", "qos2", "retained")

FILE_ROWS = 50_000
"""The newest file is taken along into the next step until it has so many rows: it is written again each time."""


def minute(time: str) -> Column:
    return f.date_trunc("minute", f.col(time))


def each_counted(messages: DataFrame) -> DataFrame:
    """Every message as a row of its own."""
    return messages.select(
        minute("time").alias("minute"),
        "tenant",
        "topic",
        "publisher",
        f.lit(1).cast("long").alias("messages"),
        f.octet_length("payload").cast("long").alias("bytes"),
        *[(f.col("qos") == qos).cast("long").alias(f"qos{qos}") for qos in range(3)],
        f.col("retain").cast("long").alias("retained"),
        f.col("position").alias("first_position"),
        f.col("position").alias("last_position"),
    )


def rollup(rows: DataFrame) -> DataFrame:
    """Rows of the same minute, tenant, topic and publisher as one."""
    return rows.groupBy(*GRAIN).agg(
        *[f.sum(name).alias(name) for name in SUMS],
        f.min("first_position").alias("first_position"),
        f.max("last_position").alias("last_position"),
    )


def run(context: Context) -> Batch | None:
    spark, lake = context.spark, context.lake
    reached = lake.progress(TABLE, NAME) or 0
    step = next_step(lake.files("messages"), "position", reached)
    if step is None:
        return None
    lake.create(TABLE)
    messages = lake.read(spark, "messages", positions=(step.start, step.end))
    seconds = messages.select(f.unix_seconds(minute("time"))).distinct().collect()
    minutes = sorted(datetime.fromtimestamp(row[0], UTC) for row in seconds)
    touched = to_replace(lake.files(TABLE), minutes)
    before = lake.read(spark, TABLE, files=touched)
    finished = before.where(f.col("minute") < f.lit(minutes[0]))
    open_ = rollup(before.where(f.col("minute") >= f.lit(minutes[0])).unionByName(each_counted(messages)))
    if sum(file.rows for file in touched) < FILE_ROWS:
        table = finished.unionByName(open_).coalesce(1)
    else:
        table = finished.coalesce(1).unionByName(open_.coalesce(1))  # the finished minutes are left alone from now on
    lake.write(TABLE, table, app=NAME, version=step.end, remove=touched, sort=GRAIN)
    return Batch(step.rows, step.end, step.left_rows)


def to_replace(files: Sequence[LakeFile], minutes: Sequence[datetime]) -> list[LakeFile]:
    """The files that may have rows of these minutes, which are in order; and the newest, while it is small."""
    found = [file for file in files if _holds(file, minutes)]
    newest = max(files, key=lambda file: file.high["minute"], default=None)
    if newest is not None and newest not in found and newest.rows < FILE_ROWS:
        found.append(newest)
    return found


def _holds(file: LakeFile, minutes: Sequence[datetime]) -> bool:
    """Whether a file may have rows of one of these minutes."""
    at = bisect_left(minutes, file.low["minute"])
    return at < len(minutes) and minutes[at] <= file.high["minute"]
