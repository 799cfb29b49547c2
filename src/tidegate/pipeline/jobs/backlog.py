"""Backlog: what waits for the sessions that are away (S4.4), as ranges of positions; never a copy of a message.

Messages and wildcard filters are joined without looking at a single pair of the two. The filters have few *shapes*
(`a/+/c` and `x/+/z` have the same one). A topic, rewritten in a shape (`a/b/c` becomes `a/+/c`), is exactly the filter
of that shape that matches it, so each distinct topic is rewritten once per shape that fits its depth, and what is left
is a join of equal strings.

How many messages of a topic a reader has before it is a matter of order, not of pairs either: messages and floors of a
topic are put in one order, and a running count from the end tells it to every floor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from tidegate.pipeline.jobs import Batch, Context
from tidegate.pipeline.jobs.archive import archived_to
from tidegate.pipeline.state import Begun, Waiting, WaitingReader, absent_readers, stored_state, waiting_readers

NAME = "backlog"
INTERVAL_S = 60.0

KEYS = ("tenant", "topic")
_FILTERS = pa.schema(
    [
        pa.field("reader", pa.int64(), nullable=False),
        pa.field("client", pa.string(), nullable=False),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("filter", pa.string(), nullable=False),
        pa.field("floor", pa.int64(), nullable=False),
        pa.field("no_local", pa.bool_(), nullable=False),
        pa.field("any_qos", pa.bool_(), nullable=False),
    ]
)
_FINISHED = pa.schema(
    [
        pa.field("reader", pa.int64(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("after", pa.int64(), nullable=False),
    ]
)
_BEGUN = pa.schema(
    [
        pa.field("client", pa.string(), nullable=False),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
    ]
)


def run(context: Context) -> Batch | None:
    """Write the whole table anew: its rows change with every session that comes, goes or acknowledges. It is as of the
    archive's place, which moves with every message and with every change of a session."""
    lake = context.lake
    place = archived_to(lake)
    if place is None or place == lake.progress(NAME, NAME):
        return None
    before, end = lake.files(NAME), lake.end()
    now_ms = time.time_ns() // 1_000_000
    waiting = absent_readers(stored_state(context.log.folder), now_ms)
    floor = waiting.floor
    if floor is None or floor >= end:
        lake.commit(NAME, [], app=NAME, version=place, remove=before)
        return Batch(0, place)
    messages = lake.read(context.spark, "messages", positions=(floor, end))
    rows = backlog(messages, waiting, now_ms)
    written = lake.write(NAME, rows, app=NAME, version=place, remove=before, sort=("tenant", "client", "topic"))
    return Batch(written, place)


def needed_floor(context: Context, below: int) -> int | None:
    """The lowest position before `below` that an existing session, connected or not, may still need; None if there is
    none. Where that would take a look at each message for each reader, it is lower rather than exact."""
    waiting = waiting_readers(stored_state(context.log.folder))
    # A retained message that is on its way comes from the retained ones if it is not here.
    begun = [each.position for each in waiting.begun if each.reader and each.position < below]
    floor = min((filter.floor for reader in waiting.readers for filter in reader.filters), default=below)
    files = context.lake.files("messages")
    first = files[0].min_position if files else below
    found = [position for position in begun if position >= first]
    if floor < below:
        messages = context.lake.read(context.spark, "messages", positions=(floor, below))
        lowest = _lowest(messages, _filters(context.spark, waiting.readers), time.time_ns() // 1_000_000)
        found += [] if lowest is None else [lowest]
    return min(found, default=None)


def _lowest(messages: DataFrame, filters: DataFrame, now_ms: int) -> int | None:
    kept = _unexpired(messages, now_ms)
    floors = matches(kept.select(*KEYS).distinct(), filters).groupBy(*KEYS).agg(
        f.min("floor").alias("floor"), f.min(f.when(f.col("any_qos"), f.col("floor"))).alias("any_floor")
    )
    due = (f.col("qos") > 0) & (f.col("position") >= f.col("floor")) | (f.col("position") >= f.col("any_floor"))
    row = kept.join(floors, list(KEYS)).where(due).agg(f.min("position").alias("position")).first()
    return None if row is None else row["position"]


# ── the join ──


def backlog(messages: DataFrame, waiting: Waiting, now_ms: int) -> DataFrame:
    """One row per client and topic that has something to come."""
    spark = messages.sparkSession
    kept = _unexpired(messages, now_ms)
    plain = [reader for reader in waiting.readers if not _particular(reader)]
    particular = [reader for reader in waiting.readers if _particular(reader)]
    parts: list[DataFrame] = []
    if plain:
        parts.append(_counted(kept.where("qos > 0"), _filters(spark, plain)))
    if particular:
        parts.append(_counted_one_by_one(kept, _filters(spark, particular), _finished(spark, particular)))
    if waiting.begun:
        parts.append(_counted_begun(kept, _begun(spark, waiting.begun)))
    if not parts:
        parts.append(_counted(kept, _filters(spark, [])))
    every = reduce(DataFrame.unionByName, parts)
    if len(parts) == 1:
        return every
    return every.groupBy("client", *KEYS).agg(
        f.min("first_position").alias("first_position"),
        f.max("last_position").alias("last_position"),
        f.sum("messages").alias("messages"),
    )


def _unexpired(messages: DataFrame, now_ms: int) -> DataFrame:
    return messages.where(f.isnull("expiry") | (f.unix_millis("time") + f.col("expiry") * 1000 >= now_ms))


def _particular(reader: WaitingReader) -> bool:
    """Whether each message needs a look. Such readers are few."""
    return reader.any_qos or bool(reader.finished) or any(filter.no_local for filter in reader.filters)


def matches(topics: DataFrame, filters: DataFrame) -> DataFrame:
    """The pairs of distinct `topics` (tenant, topic) and of `filters` that match: `router.filters.matches` in bulk."""
    levels = f.split("filter", "/")
    below = f.element_at(levels, -1) == "#"
    depth = f.size(levels) - below.cast("int")
    plus = f.transform(f.slice(levels, 1, depth), lambda level: level == "+")
    shapes = filters.select(depth.alias("depth"), below.alias("below"), plus.alias("plus")).distinct()
    named = topics.withColumn("levels", f.split("topic", "/"))
    named = named.withColumn("depth", f.explode(f.sequence(f.lit(0), f.size("levels"))))
    literal_first = (f.col("depth") > 0) & ~f.coalesce(f.get("plus", f.lit(0)), f.lit(False))
    shaped = (
        named.join(f.broadcast(shapes), "depth")
        .where(f.col("below") | (f.col("depth") == f.size("levels")))
        .where(literal_first | ~f.col("topic").startswith("$"))  # [MQTT-4.7.2-1]
    )
    return shaped.withColumn("filter", _rewritten()).select(*KEYS, "filter").join(filters, ["tenant", "filter"])


def _rewritten() -> Column:
    """A topic's levels in a shape."""
    kept = f.transform(
        f.slice("levels", 1, f.col("depth")),
        lambda level, i: f.when(f.get("plus", i), "+").otherwise(level),
    )
    return f.array_join(f.when(f.col("below"), f.array_append(kept, "#")).otherwise(kept), "/")


def _counted(messages: DataFrame, filters: DataFrame) -> DataFrame:
    """Of each topic and reader that match: the messages from the reader's floor on."""
    pairs = matches(messages.select(*KEYS).distinct(), filters)
    floors = pairs.groupBy(*KEYS, "client").agg(f.min("floor").alias("position"))
    waits = f.lit(True).alias("waits")
    both = messages.select(*KEYS, "position", f.lit(None).cast("string").alias("client"), (~waits).alias("waits"))
    both = both.unionByName(floors.select(*KEYS, "position", "client", waits))
    # From the topic's end. At the same position the message comes first, for it is not below the floor.
    order = Window.partitionBy(*KEYS).orderBy(f.desc("position"), "waits")
    upto = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    message = f.when(~f.col("waits"), f.col("position"))
    counted = both.select(
        "client",
        *KEYS,
        f.min(message).over(upto).alias("first_position"),
        f.max(message).over(upto).alias("last_position"),
        f.count(message).over(upto).alias("messages"),
        "waits",
    )
    return counted.where("waits and messages > 0").drop("waits")


def _counted_one_by_one(messages: DataFrame, filters: DataFrame, finished: DataFrame) -> DataFrame:
    pairs = matches(messages.select(*KEYS).distinct(), filters)
    readers = pairs.groupBy(*KEYS, "client", "reader", "any_qos").agg(
        f.min("floor").alias("floor"), f.min(f.when(~f.col("no_local"), f.col("floor"))).alias("own_floor")
    )
    floor = f.when(f.col("publisher") == f.col("client"), f.col("own_floor")).otherwise(f.col("floor"))
    owed = (
        messages.join(readers, list(KEYS))
        .where((f.col("any_qos") | (f.col("qos") > 0)) & (f.col("position") >= floor))
    )
    within = (owed["position"] >= finished["first"]) & (owed["position"] < finished["after"])
    return _ranges(owed.join(f.broadcast(finished), (owed["reader"] == finished["reader"]) & within, "left_anti"))


def _counted_begun(messages: DataFrame, begun: DataFrame) -> DataFrame:
    return _ranges(messages.join(f.broadcast(begun), ["tenant", "position"]))


def _ranges(owed: DataFrame) -> DataFrame:
    return owed.groupBy("client", *KEYS).agg(
        f.min("position").alias("first_position"),
        f.max("position").alias("last_position"),
        f.count("position").alias("messages"),
    )


# ── the driver's rows for Spark ──


def _filters(spark: SparkSession, readers: list[WaitingReader]) -> DataFrame:
    rows = [
        (reader.number, reader.client, reader.tenant, filter, floor, no_local, reader.any_qos)
        for reader in readers
        for filter, floor, no_local in reader.filters
    ]
    return _frame(spark, rows, _FILTERS)


def _finished(spark: SparkSession, readers: list[WaitingReader]) -> DataFrame:
    return _frame(spark, [(reader.number, *span) for reader in readers for span in reader.finished.ranges()], _FINISHED)


def _begun(spark: SparkSession, begun: list[Begun]) -> DataFrame:
    return _frame(spark, [(each.client, each.tenant, each.position) for each in begun], _BEGUN)


def _frame(spark: SparkSession, rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> DataFrame:
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, schema=schema))
