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
CONNECTED, AWAY, SUBSCRIBED = "connected", "away", "subscribed"
FOLLOWS_TRAFFIC = "abuse traffic"
FOLLOWS_SESSIONS = "abuse sessions"

REMEMBERED = timedelta(days=1)
"""A topic that nobody published to for so long is new again."""


# ── the rules: (minute, tenant, client, observed) of those above the limit ──


def many_topics(traffic: DataFrame, limit: int) -> DataFrame:
    """(minute, tenant, client) that were the first on more than `limit` topics in that minute. Others cannot have
    created as many."""
    return _above(_first_on(traffic), limit).drop("observed")


def created_topics(traffic: DataFrame, busy: DataFrame, known: DataFrame, limit: int) -> DataFrame:
    """Of the `busy`, those for whom more than `limit` were new: not `known` from traffic in the day before."""
    used = _first_on(traffic).join(busy, ["minute", "tenant", "client"], "left_semi")
    seen = known.select("tenant", "topic", f.col("minute").alias("seen"))
    same = (used["tenant"] == seen["tenant"]) & (used["topic"] == seen["topic"])
    before = (seen["seen"] < used["minute"]) & (seen["seen"] >= used["minute"] - f.lit(REMEMBERED))
    return _above(used.join(seen, same & before, "left_anti"), limit)


def _first_on(traffic: DataFrame) -> DataFrame:
    """Of each topic, who used it first in a minute."""
    return traffic.groupBy("minute", "tenant", "topic").agg(f.min_by("publisher", "first_position").alias("client"))


def often(sessions: DataFrame, connects_max: int, subscribes_max: int) -> DataFrame:
    """Who connected or subscribed more often than that in a minute, with the `kind`. A subscription names its session
    by number alone; the client stands in the last row of the session itself before. If that is not in the window,
    `number` is given instead of the client, and the first `place`."""
    before = Window.partitionBy("number").orderBy("place", "ordinal").rowsBetween(Window.unboundedPreceding, 0)
    rows = sessions.where(f.col("kind").isin(CONNECTED, AWAY, SUBSCRIBED)).select(
        "kind",
        minute("time").alias("minute"),
        *[f.last(column, ignorenulls=True).over(before).alias(column) for column in ("tenant", "client")],
        "number",
        "place",
    )
    unnamed = f.when(f.col("client").isNull(), f.col("number")).alias("number")
    counted = rows.groupBy("kind", "minute", "tenant", "client", unnamed).agg(
        f.count("*").alias("observed"), f.min("place").alias("place")
    )
    limit = f.when(f.col("kind") == CONNECTED, connects_max).when(f.col("kind") == SUBSCRIBED, subscribes_max)
    return counted.where(f.col("observed") > limit)


def named(found: DataFrame, sessions: DataFrame) -> DataFrame:
    """What is `often`, all of it with tenant and client: a session may have connected long before. A number may have
    been used before as well, so the last row counts."""
    unnamed = found.where(f.col("client").isNull()).drop("tenant", "client")
    owners = sessions.where(f.col("kind").isin(CONNECTED, AWAY)).select(
        "number", "tenant", "client", f.col("place").alias("since")
    )
    earlier = f.broadcast(unnamed).join(owners, "number").where(f.col("since") < f.col("place"))
    owned = earlier.groupBy("kind", "minute", "number", "observed").agg(
        f.max_by(f.struct("tenant", "client"), "since").alias("owner")
    )
    columns = ("kind", "minute", "tenant", "client", "observed")
    rows = found.where(f.col("client").isNotNull()).select(*columns)
    rows = rows.unionByName(owned.select("kind", "minute", "owner.*", "observed"))
    return rows.groupBy(*columns[:-1]).agg(f.sum("observed").alias("observed"))


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
    """A step of each half. `reached` is that of the messages."""
    topics = _follow_traffic(context)
    sessions = _follow_sessions(context)
    if topics is None or sessions is None:
        return topics or sessions
    return topics._replace(rows=topics.rows + sessions.rows, lag_rows=topics.lag_rows + sessions.lag_rows)


def _follow_traffic(context: Context) -> Batch | None:
    lake, limit = context.lake, context.config.pipeline.abuse_topics_max
    reached = lake.progress(TABLE, FOLLOWS_TRAFFIC) or 0
    # Not beyond what traffic has counted: what it does not know yet would look new.
    step = next_step(lake.files("messages"), "position", reached, lake.progress(traffic.TABLE, traffic.NAME) or 0)
    if step is None:
        return None
    window = _window(context, traffic.TABLE, "minute", step)
    busy = many_topics(window, limit)
    if busy.isEmpty():
        lake.commit(TABLE, [], app=FOLLOWS_TRAFFIC, version=step.end)
    else:
        known = _window(context, traffic.TABLE, "minute", step, REMEMBERED)
        found = created_topics(window, busy, known, limit)
        _decide(context, verdicts(found, TOPICS, limit, _now()), step, FOLLOWS_TRAFFIC)
    return Batch(step.rows, step.end, step.left_rows)


def _follow_sessions(context: Context) -> Batch | None:
    lake, limits = context.lake, context.config.pipeline
    step = next_step(lake.files("sessions"), "place", lake.progress(TABLE, FOLLOWS_SESSIONS) or 0)
    if step is None:
        return None
    found = often(_window(context, "sessions", "time", step), limits.abuse_connects_max, limits.abuse_subscribes_max)
    if found.isEmpty():
        lake.commit(TABLE, [], app=FOLLOWS_SESSIONS, version=step.end)
    else:
        found = named(found, lake.read(context.spark, "sessions"))
        connects, subscribes = (found.where(f.col("kind") == kind) for kind in (CONNECTED, SUBSCRIBED))
        now = _now()
        rows = verdicts(connects, CONNECTS, limits.abuse_connects_max, now)
        rows = rows.unionByName(verdicts(subscribes, SUBSCRIBES, limits.abuse_subscribes_max, now))
        _decide(context, rows, step, FOLLOWS_SESSIONS)
    return Batch(step.rows, lake.progress(TABLE, FOLLOWS_TRAFFIC) or 0, step.left_rows)


def _window(context: Context, table: str, column: str, step: Step, before: timedelta = timedelta(0)) -> DataFrame:
    """The rows of all minutes that the step has something of, or may have; and of the time `before` them."""
    start = step.oldest.replace(second=0, microsecond=0) - before
    end = step.newest.replace(second=0, microsecond=0) + timedelta(minutes=1)
    files = [file for file in context.lake.files(table) if file.overlaps(column, start, end)]
    rows = context.lake.read(context.spark, table, files=files)
    return rows.where((f.col(column) >= f.lit(start)) & (f.col(column) < f.lit(end)))


def _decide(context: Context, found: DataFrame, step: Step, app: str) -> None:
    """Commit what has not been decided before."""
    context.lake.create(TABLE)
    known = _window(context, TABLE, "window_start", step)
    context.lake.write(TABLE, found.join(known, "id", "left_anti").coalesce(1), app=app, version=step.end)


def _now() -> datetime:
    return datetime.now(UTC)


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
