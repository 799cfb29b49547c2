"""Data tests: what must hold of the lake's tables, whatever has happened. Each finding is something that does not.

    readable       every file that a table names is there and can be read
    not null       no column is null that must not be
    unique         no key is there twice
    range          every value can be: QoS, kinds, order of positions and times …
    no overlap     files of messages have their positions to themselves
    complete       of the last hour, as many messages as can be read in the log
    counted        of the last hour, traffic adds up to the messages
    fresh          what is older than a quarter of an hour has been archived, and has been worked through by each job
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tidegate.pipeline.jobs import abuse, archive, retained, traffic
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.schemas import RAW_BYTES_MAX
from tidegate.pipeline.segments import LogFolder, Split, read_split
from tidegate.router.filters import POSITION_MAX

RECENT = timedelta(hours=1)
"""Nothing has been cleaned away of this, so it can be counted."""
LATE = timedelta(minutes=15)

KEYS = {
    "messages": ("position",),
    "sessions": ("place", "ordinal"),
    "dead_letters": ("place", "ordinal"),
    "backlog": ("tenant", "client", "topic"),
    "retained": ("tenant", "topic"),
    "traffic_minutely": ("minute", "tenant", "topic", "publisher"),
    "abuse_verdicts": ("id",),
}
RANGES = {
    "messages": ("position >= 0", "qos between 0 and 2", "topic <> ''", "uuid is null or length(uuid) = 16"),
    "sessions": (
        "kind in ('connected', 'away', 'gone', 'subscribed', 'unsubscribed', 'position', 'group')",
        "number is not null or kind in ('position', 'group')",
        "client is not null or kind not in ('connected', 'away')",
        "filter is not null or kind not in ('subscribed', 'unsubscribed', 'group')",
    ),
    "dead_letters": ("qos between 0 and 2", "reason <> ''", "attempts >= 0"),
    "backlog": ("first_position <= last_position", "messages between 1 and last_position - first_position + 1"),
    "retained": ("qos between 0 and 2", "octet_length(payload) > 0", "expires_at is null or expires_at >= time"),
    "traffic_minutely": (
        "minute = date_trunc('minute', minute)",
        "messages > 0 and messages = qos0 + qos1 + qos2",
        "retained between 0 and messages",
        "bytes >= 0",
        "messages <= last_position - first_position + 1",
    ),
    "abuse_verdicts": (
        "rule in ('topics', 'subscribes', 'connects')",
        "observed > limit",
        "window_end = window_start + interval 1 minute",
    ),
    "quarantine": ("reason <> ''", "job <> ''", f"raw is null or octet_length(raw) <= {RAW_BYTES_MAX}"),
}
FOLLOWERS = (
    (retained.TABLE, retained.NAME),
    (traffic.TABLE, traffic.NAME),
    (abuse.TABLE, abuse.FOLLOWS_TRAFFIC),
)
"""(table, app) of the jobs that follow the messages."""


class Finding(NamedTuple):
    table: str
    check: str
    detail: str


def check(lake: Lake, spark: SparkSession, log: LogFolder | None = None, now: datetime | None = None) -> list[Finding]:
    """Everything that is wrong with the lake; with `log`, also in comparison to that."""
    now = now or datetime.now(UTC)
    found: list[Finding] = []
    for name in lake.names():
        try:
            frame = lake.read(spark, name)
            found += _rows(name, frame, [field.name for field in lake.schema(name) if not field.nullable])
        except Exception as error:  # whatever Spark or Delta says of a damaged file
            found.append(Finding(name, "readable", (str(error).strip() or repr(error)).splitlines()[0]))
    if any(finding.check == "readable" for finding in found):
        return found  # what follows would only fail for the same reason
    found += _no_overlap(lake)
    found += _counted(lake, spark, now - RECENT)
    if log is not None:
        found += _complete(lake, spark, log, now - RECENT)
        found += _archived(lake, log, now - LATE)
    found += _followed(lake, now - LATE)
    return found


def _rows(name: str, frame: DataFrame, required: list[str]) -> Iterator[Finding]:
    """What holds of each row, in one pass; then what holds of each key."""
    ranges = RANGES.get(name, ())
    wrong = frame.agg(
        *[f.count_if(f.col(column).isNull()) for column in required],
        *[f.count_if(~f.coalesce(f.expr(rule), f.lit(False))) for rule in ranges],
    ).collect()[0]
    for what, rows in zip([*required, *ranges], wrong, strict=True):
        if rows:
            test = "not null" if what in required else "range"
            yield Finding(name, test, f"{rows} rows: {what}")
    key = ("position",) if name.startswith("json_") else KEYS.get(name)
    if key is not None:
        twice = frame.groupBy(*key).count().where("count > 1").count()
        if twice:
            yield Finding(name, "unique", f"{twice} times: {', '.join(key)}")


def _no_overlap(lake: Lake) -> Iterator[Finding]:
    for one, other in itertools.pairwise(lake.files("messages")):
        if one.max_position >= other.min_position:
            yield Finding("messages", "no overlap", f"{one.path} and {other.path}")


def _counted(lake: Lake, spark: SparkSession, since: datetime) -> Iterator[Finding]:
    """By minute: traffic may not know the newest messages yet, and has kept older ones than the lake."""
    counted = lake.progress(traffic.TABLE, traffic.NAME)
    if counted is None:
        return
    first = min((file.low["time"] for file in lake.files("messages")), default=since)
    start = f.lit(max(since, first).replace(second=0, microsecond=0) + timedelta(minutes=1))  # the first whole one
    messages = lake.read(spark, "messages", positions=(0, counted))
    by_minute = messages.groupBy(traffic.minute("time").alias("minute")).agg(f.count("*").alias("there"))
    rows = lake.read(spark, traffic.TABLE).groupBy("minute").agg(f.sum("messages").alias("counted"))
    both = by_minute.join(rows, "minute", "full_outer").where(f.col("minute") >= start)
    wrong = both.where(~f.col("there").eqNullSafe(f.col("counted"))).orderBy("minute")
    for row in wrong.select(f.col("minute").cast("string"), "there", "counted").limit(100).collect():
        yield Finding(traffic.TABLE, "counted", f"{row[0]}: {row[2] or 0} counted, {row[1] or 0} messages")


def _complete(lake: Lake, spark: SparkSession, log: LogFolder, since: datetime) -> Iterator[Finding]:
    end = archive.archived_to(lake)
    if end is None:
        return
    start = log.place_at_time(int(since.timestamp() * 1000))
    splits = log.splits(start.place, end) if start.place < end else []
    in_log = sum(spark.sparkContext.parallelize(splits, max(len(splits), 1)).map(_rows_in).collect())
    there = lake.read(spark, "messages", positions=(start.position, POSITION_MAX)).count()
    if there != in_log:
        yield Finding("messages", "complete", f"{there} from position {start.position} on; the log has {in_log}")


def _rows_in(split: Split) -> int:
    return sum(batch.num_rows for batch in read_split(split))


def _archived(lake: Lake, log: LogFolder, late: datetime) -> Iterator[Finding]:
    reached = archive.archived_to(lake) or log.start().place
    due = log.place_at_time(int(late.timestamp() * 1000)).place
    waiting = log.rows(reached, due) if reached < due else 0
    if waiting:
        yield Finding("messages", "fresh", f"{waiting} messages that came before {late:%F %T} are not archived")


def _followed(lake: Lake, late: datetime) -> Iterator[Finding]:
    for table, app in FOLLOWERS:
        reached = lake.progress(table, app) or 0
        waiting = sum(
            file.rows for file in lake.files("messages") if file.min_position >= reached and file.high["time"] < late
        )
        if waiting:
            yield Finding(table, "fresh", f"{waiting} messages that came before {late:%F %T} have not been looked at")
