"""Retained messages (P.5): the latest of each topic, as the broker itself has it.

The table is what it was, and the new retained messages; per topic the one with the highest position stays. An empty
payload clears its topic. A message with an expiry leaves the table when messages of a later time have come; until
then whoever reads the table must leave out what `expires_at` says is over.

The first step begins with what the broker's newest snapshot has: the log may have been trimmed before there was a lake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tidegate.log.snapshot import load_snapshot
from tidegate.pipeline.jobs import Batch, Context
from tidegate.pipeline.jobs.following import next_step
from tidegate.pipeline.schemas import RETAINED, spark_schema
from tidegate.session import changes

NAME = "retained"
INTERVAL_S = 5.0

TABLE = "retained"
TENANT = "default"
"""Records of retained messages name no tenant: so far there is one."""


def as_retained(messages: DataFrame) -> DataFrame:
    """The retained ones among messages, as rows of the table; those that clear their topic included."""
    expires_at = f.timestamp_micros(f.unix_micros("time") + f.col("expiry") * 1_000_000)
    return messages.where("retain").withColumn("expires_at", expires_at).select(*RETAINED.names)


def latest(rows: DataFrame, as_of: datetime) -> DataFrame:
    """The last of each topic, if it was not to clear it and has not expired by `as_of`."""
    rest = [name for name in RETAINED.names if name not in ("tenant", "topic")]
    newest = rows.groupBy("tenant", "topic").agg(f.max_by(f.struct(*rest), "position").alias("newest"))
    kept = newest.select("tenant", "topic", "newest.*")
    in_force = f.col("expires_at").isNull() | (f.col("expires_at") > f.lit(as_of))
    return kept.where((f.octet_length("payload") > 0) & in_force)


def run(context: Context) -> Batch | None:
    spark, lake = context.spark, context.lake
    reached = lake.progress(TABLE, NAME) or 0  # 0: it is to be made, or made again after damage
    step = next_step(lake.files("messages"), "position", reached)
    if step is None:
        return None
    news = as_retained(lake.read(spark, "messages", positions=(step.start, step.end)))
    batch = Batch(step.rows, step.end, step.left_rows)
    if reached and news.isEmpty():
        lake.commit(TABLE, [], app=NAME, version=step.end)
        return batch
    files = lake.files(TABLE)
    before = lake.read(spark, TABLE, files=files) if reached else snapshot_rows(spark, context.log.folder)
    table = latest(before.unionByName(news), step.newest)
    lake.write(TABLE, table, app=NAME, version=step.end, remove=files, sort=("tenant", "topic"))
    return batch


def snapshot_rows(spark: SparkSession, log: Path) -> DataFrame:
    """The retained messages of the broker's newest snapshot, read by a worker a frame at a time."""
    return spark.range(1).mapInArrow(_reader_of(str(log)), spark_schema(RETAINED))


def _reader_of(log: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            for records in load_snapshot(Path(log))[1]:
                rows = [_row(each) for each in records if each[0] == changes.RETAINED]
                yield pa.RecordBatch.from_pylist(rows, RETAINED)

    return read


def _row(record: bytes) -> dict[str, object]:
    topic, payload, qos, properties, expires_at_ms, time_ms, position, publisher = changes.read_retained(record)
    return {
        "tenant": TENANT,
        "topic": topic.decode(),
        "position": position,
        "time": time_ms * 1000,
        "publisher": publisher.decode(),
        "qos": qos,
        "payload": payload,
        "expires_at": None if expires_at_ms is None else expires_at_ms * 1000,
        "properties": properties or None,
    }
