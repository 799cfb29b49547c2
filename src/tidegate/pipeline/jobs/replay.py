"""Replay: a slice of the lake published again through the broker, in order, at a chosen speed.

Spark selects and renames; one publisher in this process sends, so that there is one order, one pace and one place to
stop at. The files of `messages` hold ranges of positions that do not overlap: the slice is taken some files at
a time, the next ones while the last ones are sent, and is never sorted, or held, as a whole. The files are looked up
anew each time, because a slow replay outlives those that it began with.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from tidegate.client.publisher import BulkPublisher
from tidegate.errors import BrokerUnreachable, ConfigError, PublishRefused
from tidegate.limits import PACKET_IDS
from tidegate.pipeline.lake import Lake, LakeFile
from tidegate.pipeline.topics import topic_matches
from tidegate.router.filters import Start

STEP_ROWS = 250_000
STEP_BYTES = 32 << 20
"""What is read at once, if it is more than one file."""
STEPS_AHEAD = 2
"""So many are read while one is sent: files differ in size."""
BATCH_ROWS = 65_536
SEND_ROWS = 2_048
"""Between two looks at whether to stop."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.005, 0.5
FLUSH_PAUSE_S = 0.05
"""Before a longer pause everything is acknowledged first."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime(9999, 1, 1, tzinfo=UTC)


# ── what ──


@dataclass(frozen=True, slots=True)
class Selection:
    """Messages from `start` up to, not including, `stop`; of one filter and one tenant if they are given."""

    start: Start
    stop: Start | None = None
    filter: str | None = None
    tenant: str | None = None

    def positions(self, end: int) -> tuple[int, int]:
        first = self.start.value if self.start.kind == "position" else 0
        if self.stop is not None and self.stop.kind == "position":
            end = min(end, self.stop.value)
        return first, end

    def times(self) -> tuple[datetime, datetime]:
        return (
            _moment(self.start.value) if self.start.kind == "time" else _EPOCH,
            _moment(self.stop.value) if self.stop is not None and self.stop.kind == "time" else _END,
        )


def _moment(time_ms: int) -> datetime:
    return min(datetime.fromtimestamp(min(time_ms, 10**13) / 1000, UTC), _END)


def selected(rows: DataFrame, selection: Selection) -> DataFrame:
    """The rows of `messages`, or of `dead_letters`, that are in the slice."""
    first, end = selection.positions(2**63 - 1)
    since, until = selection.times()
    if selection.start.kind == "position" or (selection.stop is not None and selection.stop.kind == "position"):
        rows = rows.where((f.col("position") >= first) & (f.col("position") < end))
    if (since, until) != (_EPOCH, _END):
        rows = rows.where((f.col("time") >= f.lit(since)) & (f.col("time") < f.lit(until)))
    if selection.tenant is not None:
        rows = rows.where(f.col("tenant") == selection.tenant)
    if selection.filter is not None:
        rows = rows.where(topic_matches(f.col("topic"), selection.filter))
    return rows


class Template:
    """A topic made of another: `{topic}` stands for all of it, `{1}`, `{2}` … for its levels."""

    def __init__(self, text: str) -> None:
        self.parts = re.split(r"\{([^{}]*)\}", text)
        literal, names = "".join(self.parts[::2]), self.parts[1::2]
        hint = "such as 'replayed/{topic}' or 'lab/{2}/{1}'"
        wrong = [name for name in names if name != "topic" and not re.fullmatch("[1-9][0-9]{0,2}", name)]
        if wrong:
            raise ConfigError("--to-topic", f"{{{wrong[0]}}} stands for nothing", hint)
        if not text or re.search(r"[+#{}\0]", literal) or text.startswith("$"):
            raise ConfigError("--to-topic", f"{text!r} makes no topic that can be published to", hint)

    @property
    def levels(self) -> int:
        """How many levels a topic must have."""
        return max((int(name) for name in self.parts[1::2] if name != "topic"), default=0)

    def column(self) -> Column:
        levels = f.split("topic", "/")
        made = [f.lit(part) for part in self.parts]
        for at in range(1, len(self.parts), 2):
            name = self.parts[at]
            made[at] = f.col("topic") if name == "topic" else f.get(levels, f.lit(int(name) - 1))
        return f.concat(*made)


def as_published(rows: DataFrame, template: Template | None, qos: int | None, retain: bool) -> DataFrame:
    """What is sent. Without `retain` nothing replaces a retained message of today by one of old."""
    return rows.select(
        "position",
        "time",
        (f.col("topic") if template is None else template.column()).alias("topic"),
        "payload",
        (f.col("qos") if qos is None else f.lit(qos).cast("byte")).alias("qos"),
        (f.col("retain") if retain else f.lit(False)).alias("retain"),
        (f.col("expiry") if "expiry" in rows.columns else f.lit(None).cast("long")).alias("expiry"),
        "properties",
        *[name for name in ("place", "ordinal") if name in rows.columns],
    )


class Found(NamedTuple):
    """What a slice holds."""

    messages: int
    topics: int
    first_position: int
    last_position: int
    first_time: datetime
    last_time: datetime
    fewest_levels: int


def survey(rows: DataFrame) -> Found | None:
    """None if it holds nothing."""
    row = rows.agg(
        f.count("position").alias("messages"),
        f.approx_count_distinct("topic").alias("topics"),
        f.min("position").alias("first_position"),
        f.max("position").alias("last_position"),
        f.unix_micros(f.min("time")).alias("first_time"),
        f.unix_micros(f.max("time")).alias("last_time"),
        f.min(f.size(f.split("topic", "/"))).alias("fewest_levels"),
    ).first()
    if row is None or not row["messages"]:
        return None
    fields = row.asDict()
    for name in ("first_time", "last_time"):
        fields[name] = datetime.fromtimestamp(fields[name] / 1e6, UTC)
    return Found(**fields)


# ── in order ──


def in_order(
    spark: SparkSession, lake: Lake, selection: Selection, prepare: Callable[[DataFrame], DataFrame]
) -> Iterator[pa.RecordBatch]:
    """The slice of `messages`, prepared, by position; as far as the lake reaches now."""
    reached, end = selection.positions(lake.end())
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")  # more than 2 GiB of payloads can be sorted
    with ThreadPoolExecutor(1, thread_name_prefix="tidegate-replay") as ahead:

        def read(files: Sequence[LakeFile], positions: tuple[int, int]) -> list[pa.RecordBatch]:
            rows = selected(lake.read(spark, "messages", positions, files), selection)
            found: pa.Table = prepare(rows).coalesce(1).toArrow()
            return list(found.sort_by("position").to_batches(BATCH_ROWS))

        coming: deque[Future[list[pa.RecordBatch]]] = deque()
        try:
            while True:
                files = next_files(lake.files("messages"), reached, end, selection.times())
                if files:
                    upto = min(end, files[-1].max_position + 1)
                    coming.append(ahead.submit(read, files, (reached, upto)))
                    reached = upto
                if len(coming) > STEPS_AHEAD or not files:
                    if not coming:
                        return
                    yield from coming.popleft().result()
        finally:
            ahead.shutdown(cancel_futures=True)  # whoever stops early waits for no more than the step at hand


def next_files(
    files: Iterable[LakeFile], reached: int, end: int, times: tuple[datetime, datetime]
) -> list[LakeFile]:
    """The next files with messages from `reached` on, in order; some small ones together."""
    taken: list[LakeFile] = []
    rows = size = 0
    for file in files if reached < end else ():
        if not file.overlaps("position", reached, end) or not file.overlaps("time", *times):
            continue
        if taken and (rows + file.rows > STEP_ROWS or size + file.bytes > STEP_BYTES):
            break
        taken.append(file)
        rows += file.rows
        size += file.bytes
    return taken


# ── at a pace ──


@dataclass(frozen=True, slots=True)
class Speed:
    """With `factor` the messages' own spacing, so many times as fast; with `per_second` evenly; else all at once."""

    factor: float = 0.0
    per_second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Speed:
        if text == "max":
            return cls()
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?(x|/s|msg/s)?", text)
        if found is None or not float(found[1]):
            raise ConfigError("--speed", f"{text!r} is no speed", "max; 1x, 10x, 0.5x; 500/s")
        number = float(found[1])
        return cls(factor=number) if found[2] == "x" else cls(per_second=number)

    def due_s(self, times_us: npt.NDArray[np.int64], first_us: int, sent: int) -> npt.NDArray[np.float64] | None:
        """When each message is due, in seconds from the start; None: now. A clock that went back delays nobody."""
        due: npt.NDArray[np.float64] | None = None
        if self.factor:
            due = np.maximum.accumulate((times_us - first_us) / (1e6 * self.factor))
        elif self.per_second:
            due = (sent + np.arange(len(times_us))) / self.per_second
        return due


class Stopped(NamedTuple):
    """How far it came: so many messages, the last of them the row `after`, are published. Not `exact`: and perhaps
    some behind them."""

    sent: int
    after: dict[str, int] | None
    exact: bool = True


class Replay:
    """Sends batches in order. `stop` may be set by anybody at any time."""

    def __init__(self, publisher: BulkPublisher, speed: Speed, stop: threading.Event) -> None:
        self._publisher = publisher
        self._speed = speed
        self._stop = stop
        self._began_s = time.monotonic()
        self._first_us: int | None = None
        self._sent = 0
        self._recent: deque[tuple[int, dict[str, npt.NDArray[np.int64]]]] = deque()  # what may not be acknowledged

    def run(self, batches: Iterable[pa.RecordBatch], progress: Callable[[int], None]) -> Stopped:
        """Returns when everything is acknowledged, or when it was stopped. Raises as BulkPublisher does; `reached`
        then tells how far it came."""
        for batch in batches:
            if not self._send(batch, progress):
                break
        self._publisher.flush()
        progress(self._sent)
        return Stopped(self._sent, self._row(self._sent - 1))

    def reached(self, error: Exception) -> Stopped:
        """After an error: where to go on so that nothing is missing. Behind a message that was refused; at those that
        no broker would take."""
        if isinstance(error, PublishRefused):
            return Stopped(error.number, self._row(error.number))
        if not isinstance(error, BrokerUnreachable):
            self._publisher.flush()
            return Stopped(self._sent, self._row(self._sent - 1))
        certain = max(0, self._publisher.given - PACKET_IDS)
        return Stopped(certain, self._row(certain - 1), exact=False)

    def _send(self, batch: pa.RecordBatch, progress: Callable[[int], None]) -> bool:
        """False if it was stopped."""
        times_us = batch.column("time").cast(pa.int64()).to_numpy()
        if self._first_us is None and len(times_us):
            self._first_us = int(times_us[0])
            self._began_s = time.monotonic()
        due_s = self._speed.due_s(times_us, self._first_us or 0, self._sent)
        self._remember(batch)
        at = 0
        while at < batch.num_rows and not self._stop.is_set():
            upto = min(at + SEND_ROWS, batch.num_rows)
            if due_s is not None:
                elapsed_s = time.monotonic() - self._began_s
                upto = min(upto, int(np.searchsorted(due_s, elapsed_s, side="right")))
                if upto <= at:
                    self._pause(float(due_s[at]) - elapsed_s)
                    continue
            self._publisher.publish(**_columns(batch.slice(at, upto - at)))
            self._sent += upto - at
            at = upto
            progress(self._sent)
        return not self._stop.is_set()

    def _pause(self, seconds: float) -> None:
        if seconds > FLUSH_PAUSE_S:
            self._publisher.flush()
        self._stop.wait(min(max(seconds, PAUSE_MIN_S), PAUSE_MAX_S))

    def _remember(self, batch: pa.RecordBatch) -> None:
        names = [name for name in ("position", "place", "ordinal") if name in batch.schema.names]
        self._recent.append((self._sent, {name: batch.column(name).to_numpy() for name in names}))
        while len(self._recent) > 1 and self._recent[1][0] < self._sent - PACKET_IDS:
            self._recent.popleft()

    def _row(self, number: int) -> dict[str, int] | None:
        """Which row was sent as this number."""
        for first, columns in reversed(self._recent):
            if 0 <= number - first < len(columns["position"]):
                return {name: int(values[number - first]) for name, values in columns.items()}
        return None


def _columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """The arguments of `BulkPublisher.publish`; those that say nothing are left out."""

    def plain(name: str) -> list[Any]:
        column = batch.column(name)
        if pa.types.is_string(column.type):
            column = column.cast(pa.binary())
        elif pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return values

    found: dict[str, Any] = {"topics": plain("topic"), "payloads": plain("payload"), "qos": plain("qos")}
    if pc.any(batch.column("retain")).as_py():
        found["retains"] = plain("retain")
    if batch.column("properties").null_count < batch.num_rows:
        found["properties"] = plain("properties")
    if batch.column("expiry").null_count < batch.num_rows:
        found["expiries"] = batch.column("expiry").to_pylist()
    if len(set(found["qos"])) == 1:
        found["qos"] = found["qos"][0]
    return found
