"""Abuse (P.8): clients that create topics, subscribe or connect more often in a minute than is allowed.

    topics      topics that this client was the first to publish to, and nobody at all in the day before
    subscribes  filters subscribed to
    connects    connections opened

A minute is judged as soon as something of it has arrived, and again while more does, so a flood is found while it
lasts. A verdict's id names minute, tenant, client and rule: it is given once, with what had been observed by then.

Both halves follow a table of their own, with their own progress. The topics come from `traffic_minutely`, which has
exactly the windows that are needed: few rows, and a day of them is all that has to be remembered. Only when a client
has used more topics than it may create is that day looked at.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from tidegate.pipeline.jobs import Batch, Context, traffic
from tidegate.pipeline.jobs.following import Step, next_step
from tidegate.pipeline.jobs.traffic import minute
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.parquet import read_file
from tidegate.pipeline.schemas import ABUSE_VERDICTS

NAME = "abuse"
INTERVAL_S = 10.0

TABLE = "abuse_verdicts"
TOPICS, SUBSCRIBES, CONNECTS = "topics", "subscribes", "connects"
FOLLOWS_TRAFFIC = "abuse traffic"
FOLLOWS_SESSIONS = "abuse sessions"

REMEMBERED = timedelta(days=1)
"""A topic that nobody published to for so long is new again."""


# ── the rules: (minute, tenant, client, observed) of those above the limit ──


def many_topics(window: DataFrame, limit: int) -> DataFrame:
    """Of traffic, the topics of clients that used more than `limit` of them in a minute and were the first to do so.
    Others cannot have created as many."""
    first = window.groupBy("minute", "tenant", "topic").agg(f.min_by("publisher", "first_position").alias("client"))
    busy = first.groupBy("minute", "tenant", "client").count().where(f.col("count") > limit).drop("count")
    return first.join(busy, ["minute", "tenant", "client"], "left_semi")


def created_topics(used: DataFrame, known: DataFrame, limit: int) -> DataFrame:
    """Of `used` topics, the clients for whom more than `limit` were new: not `known` from traffic in the day before."""
    seen = known.select("tenant", "topic", f.col("minute").alias("seen"))
    same = (used["tenant"] == seen["tenant"]) & (used["topic"] == seen["topic"])
    before = (seen["seen"] < used["minute"]) & (seen["seen"] >= used["minute"] - f.lit(REMEMBERED))
    return _above(used.join(seen, same & before, "left_anti"), limit)


def connected_often(sessions: DataFrame, limit: int) -> DataFrame:
    opened = sessions.where(f.col("kind") == "connected")
    return _above(opened.select(minute("time").alias("minute"), "tenant", "client"), limit)


def subscribed_often(sessions: DataFrame, limit: int) -> DataFrame:
    """(minute, number): a subscription names its session by number alone."""
    made = sessions.where(f.col("kind") == "subscribed").groupBy(minute("time").alias("minute"), "number")
    return made.count().where(f.col("count") > limit).drop("count")


def named(found: DataFrame, sessions: DataFrame, limit: int) -> DataFrame:
    """What `subscribed_often` found, by client: that of the session's last row before. A number may be used again."""
    numbers = found.select("number").distinct()
    rows = sessions.join(f.broadcast(numbers), "number", "left_semi")
    before = Window.partitionBy("number").orderBy("place", "ordinal").rowsBetween(Window.unboundedPreceding, 0)
    owned = rows.where(f.col("kind").isin("connected", "away", "subscribed")).select(
        "kind",
        "number",
        minute("time").alias("minute"),
        *[f.last(name, ignorenulls=True).over(before).alias(name) for name in ("tenant", "client")],
    )
    made = owned.where((f.col("kind") == "subscribed") & f.col("client").isNotNull())
    return _above(made.join(f.broadcast(found), ["minute", "number"], "left_semi"), limit)


def _above(rows: DataFrame, limit: int) -> DataFrame:
    counted = rows.groupBy("minute", "tenant", "client").agg(f.count("*").alias("observed"))
    return counted.where(f.col("observed") > limit)


def verdicts(found: DataFrame, rule: str, limit: int, decided_at: datetime) -> DataFrame:
    """Rows of the table."""
    parts: list[Column] = [f.unix_seconds("minute").cast("string"), f.col("tenant"), f.col("client"), f.lit(rule)]
    return found.select(
        f.substring(f.sha2(f.concat_ws("\0", *parts), 256), 1, 32).alias("id"),
        f.col("minute").alias("window_start"),
        (f.col("minute") + f.expr("interval 1 minute")).alias("window_end"),
        "tenant",
        "client",
        f.lit(rule).alias("rule"),
        "observed",
        f.lit(limit).cast("long").alias("limit"),
        f.lit(decided_at).alias("decided_at"),
    ).select(*ABUSE_VERDICTS.names)


# ── the steps ──


def run(context: Context) -> Batch | None:
    """A step of each half. `reached` and the lag are those of the messages."""
    topics = _follow_traffic(context)
    sessions = _follow_sessions(context)
    if topics is None or sessions is None:
        return topics or sessions
    return topics._replace(rows=topics.rows + sessions.rows, lag_rows=topics.lag_rows + sessions.lag_rows)


def _follow_traffic(context: Context) -> Batch | None:
    spark, lake = context.spark, context.lake
    limit = context.config.pipeline.abuse_topics_max
    reached = lake.progress(TABLE, FOLLOWS_TRAFFIC) or 0
    # Not beyond what traffic has counted: what it does not know yet would look new.
    step = next_step(lake.files("messages"), "position", reached, lake.progress(traffic.TABLE, traffic.NAME) or 0)
    if step is None:
        return None
    batch = Batch(step.rows, step.end, step.left_rows)
    files = lake.files(traffic.TABLE)
    recent = [each for each in files if each.high["last_position"] >= step.start]
    counted = lake.read(spark, traffic.TABLE, files=recent)
    fresh = counted.where((f.col("last_position") >= step.start) & (f.col("first_position") < step.end))
    first, last = fresh.agg(f.min(f.unix_seconds("minute")), f.max(f.unix_seconds("minute"))).collect()[0]
    if first is None:  # it has been cleaned away since
        lake.commit(TABLE, [], app=FOLLOWS_TRAFFIC, version=step.end)
        return batch
    minutes = fresh.select("minute").distinct()
    start, end = _time(first), _time(last) + timedelta(minutes=1)
    window = lake.read(spark, traffic.TABLE, files=[each for each in files if each.overlaps("minute", start, end)])
    used = many_topics(window.join(f.broadcast(minutes), "minute", "left_semi"), limit)
    if used.isEmpty():
        lake.commit(TABLE, [], app=FOLLOWS_TRAFFIC, version=step.end)
    else:
        remembered = [each for each in files if each.overlaps("minute", start - REMEMBERED, end)]
        found = created_topics(used, lake.read(spark, traffic.TABLE, files=remembered), limit)
        _decide(context, verdicts(found, TOPICS, limit, _now()), start, end, FOLLOWS_TRAFFIC, step)
    return batch


def _follow_sessions(context: Context) -> Batch | None:
    spark, lake, limits = context.spark, context.lake, context.config.pipeline
    files = lake.files("sessions")
    step = next_step(files, "place", lake.progress(TABLE, FOLLOWS_SESSIONS) or 0)
    if step is None:
        return None
    batch = Batch(step.rows, lake.progress(TABLE, FOLLOWS_TRAFFIC) or 0, step.left_rows)
    rows = lake.read(spark, "sessions", files=[each for each in files if each.overlaps("place", step.start, step.end)])
    fresh = rows.where((f.col("place") >= step.start) & (f.col("place") < step.end))
    fresh = fresh.where(f.col("kind").isin("connected", "subscribed"))
    first, last = fresh.agg(f.min(f.unix_seconds("time")), f.max(f.unix_seconds("time"))).collect()[0]
    if first is None:
        lake.commit(TABLE, [], app=FOLLOWS_SESSIONS, version=step.end)
        return batch
    minutes = fresh.select(minute("time").alias("minute")).distinct()
    start, end = _time(first - first % 60), _time(last - last % 60) + timedelta(minutes=1)
    near = lake.read(spark, "sessions", files=[each for each in files if each.overlaps("time", start, end)])
    window = near.join(f.broadcast(minutes), minute("time") == minutes["minute"], "left_semi")
    decided_at = _now()
    connects = connected_often(window, limits.abuse_connects_max)
    found = verdicts(connects, CONNECTS, limits.abuse_connects_max, decided_at)
    busy = subscribed_often(window, limits.abuse_subscribes_max)
    if not busy.isEmpty():
        every = lake.read(spark, "sessions", files=files)  # a session may have connected long ago
        subscribes = named(busy, every, limits.abuse_subscribes_max)
        found = found.unionByName(verdicts(subscribes, SUBSCRIBES, limits.abuse_subscribes_max, decided_at))
    _decide(context, found, start, end, FOLLOWS_SESSIONS, step)
    return batch


def _decide(context: Context, found: DataFrame, start: datetime, end: datetime, app: str, step: Step) -> None:
    """Commit what has not been decided before."""
    lake = context.lake
    near = [each for each in lake.files(TABLE) if each.overlaps("window_start", start, end)]
    lake.create(TABLE)
    known = lake.read(context.spark, TABLE, files=near)
    lake.write(TABLE, found.join(known, "id", "left_anti").coalesce(1), app=app, version=step.end)


def _now() -> datetime:
    return datetime.now(UTC)


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def newest_verdicts(lake: Lake, limit: int) -> list[dict[str, Any]]:
    """The last `limit` verdicts, oldest first, as the broker is told of them."""
    files = sorted(lake.files(TABLE), key=lambda file: file.high["decided_at"])
    tables: list[pa.Table] = []
    while files and sum(table.num_rows for table in tables) < limit:
        tables.append(read_file(lake.path(TABLE, files.pop())))
    rows = [row for table in tables for row in table.to_pylist()]
    rows.sort(key=lambda row: (row["decided_at"], row["id"]))
    return [
        {
            "id": row["id"],
            "time": row["decided_at"].isoformat(),
            "client": row["client"],
            "tenant": row["tenant"],
            "rule": row["rule"],
            "observed": row["observed"],
            "limit": row["limit"],
            "window_start": row["window_start"].isoformat(),
            "window_end": row["window_end"].isoformat(),
        }
        for row in rows[-limit:]
    ]
