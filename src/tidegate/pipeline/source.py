"""`format("tidegate")`: the log as a Spark source, batch and streaming. `sink` is the way back, under the same name.

An offset is `{"place": …, "position": …}`: the frame to go on with, and the first message of it that was not read
yet. So a query can stop after any message, and both numbers mean the same for ever: a batch that is planned again
after a crash holds the same rows. The rows are those of the lake's table `messages`.

The driver plans byte ranges of segments, and leaves out what the options exclude, by the segments' indices. A worker
maps its range, checks every frame, and hands Arrow batches to Spark.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tidegate.errors import ConfigError, CorruptLog, PeerError
from tidegate.log.index import TopicIndex
from tidegate.log.segment import sequence_of
from tidegate.pipeline.options import Options
from tidegate.pipeline.schemas import TABLES, spark_schema
from tidegate.pipeline.segments import LogFolder, LogGone, Lost, Place, Split, read_split
from tidegate.router.filters import START_FORMS, has_wildcard, literal_prefix, matches, parse, parse_start

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter

NAME: Final = "tidegate"
READ_OPTIONS: Final = (
    "path", "from", "until", "filter", "columns", "maxRowsPerTrigger", "bytesPerSplit", "damage",
)  # fmt: skip

SPLIT_BYTES: Final = 32 << 20
BATCH_ROWS: Final = 32_768
BATCH_BYTES: Final = 16 << 20
"""A batch that is handed to Spark has about so many rows, or bytes of payload. Below, each costs more than its rows;
above, it needs memory for nothing."""

SPAN_GAP_BYTES: Final = 64 << 10
"""Frames that a filter excludes are read all the same if fewer bytes than this lie between two that it wants."""
TOPICS_KEPT: Final = 100_000

_LATEST: Final = "latest"
_ROWS_MAX: Final = 2**31 - 1
_log = logging.getLogger("tidegate.source")


@dataclass(frozen=True, slots=True)
class Slice:
    """What is to be read, as the options say."""

    log: Path
    start: str  # earliest, latest, or a form that `parse_start` knows
    until: str  # empty for the end
    now_ms: int  # what ages count from
    filter: str  # empty for everything
    rows_per_trigger: int  # 0 for no limit
    split_bytes: int
    fail_on_damage: bool

    @classmethod
    def of(cls, options: Options) -> Slice:
        now_ms = time.time_ns() // 1_000_000
        start, until, filter = options.text("from", "earliest"), options.text("until"), options.text("filter")
        for name, point in (("from", start), ("until", until)):
            if point not in ("", _LATEST):
                try:
                    parse_start(point.encode(), now_ms)
                except PeerError:
                    hint = f"{START_FORMS}; `latest`"
                    raise ConfigError(f"option {name}", f"{point!r} is no place in the log", hint) from None
        if filter:
            try:
                kind = parse(filter.encode()).kind
            except PeerError as error:
                raise ConfigError("option filter", f"{filter!r}: {error}") from None
            if kind != "plain":
                raise ConfigError("option filter", f"{filter!r} is no plain filter", "`from` goes back in time")
        return cls(
            _log_folder(options.text("path")),
            start,
            until,
            now_ms,
            filter,
            options.number("maxRowsPerTrigger", 0, 1, _ROWS_MAX),
            options.number("bytesPerSplit", SPLIT_BYTES, 64 << 10, 1 << 40),
            options.choice("damage", ("skip", "fail")) == "fail",
        )

    def first(self, log: LogFolder) -> Place:
        """Where it begins."""
        if self.start == _LATEST:
            return log.end()
        start, _ = self._point(log, self.start)
        return start

    def check_not_future(self, begin: Place, end: Place) -> None:
        """A stream cannot begin at a time to come: its offset is a place in the log, and there is none yet."""
        if begin == end and self.start != _LATEST:
            point = parse_start(self.start.encode(), self.now_ms)
            if point.kind == "time" and point.value > self.now_ms:
                raise ConfigError("option from", f"{self.start!r} lies in the future")

    def last(self, log: LogFolder) -> Place:
        """Where it ends, as far as the log has come."""
        if self.until in ("", _LATEST):
            return log.end()
        point, exact = self._point(log, self.until)
        end = log.end()
        return point if not exact or point.position < end.position else end

    def _point(self, log: LogFolder, point: str) -> tuple[Place, bool]:
        """The place, and whether it was named by its position."""
        parsed = parse_start(point.encode(), self.now_ms)
        if parsed.kind == "time":
            return log.place_at_time(parsed.value), False
        if parsed.kind == "earliest":
            return log.start(), False
        found = log.place_of(parsed.value)
        return Place(found.place, max(found.position, parsed.value)), True

    @property
    def lake_hint(self) -> str:
        return f"what is older than the log is in the lake: read the table messages below {self.log.parent / 'lake'}"


def _log_folder(path: str) -> Path:
    """A data folder has its log in `log`; the log folder itself may be named as well."""
    if not path:
        raise ConfigError("option path", "is missing", "the broker's data folder, or its log folder")
    folder = Path(path.removeprefix("file://").removeprefix("file:")).absolute()
    if not folder.is_dir():
        raise ConfigError("option path", f"there is no folder {folder}", "on this machine and on every worker")
    if (folder / "log").is_dir():
        return folder / "log"
    if (folder / "LOCK").exists() or any(sequence_of(each.name) is not None for each in folder.iterdir()):
        return folder
    raise ConfigError("option path", f"{folder} holds no log", "the broker's data folder, or its log folder")


# ── planning ──


@dataclass(repr=False)
class LogPartition(InputPartition):
    """Messages `low` … `high` - 1 in some byte ranges of a split."""

    split: Split
    spans: list[tuple[int, int]]
    low: int
    high: int


def plan(log: LogFolder, wanted: Slice, start: Place, end: Place) -> list[InputPartition]:
    """The messages from `start` up to `end`, for one task each. Raises LogGone and, if it shall, CorruptLog."""
    if end.position <= start.position:
        return []
    oldest = log.start()
    begin = start.place
    if max(start.sequence, 1) < oldest.sequence:  # segments are numbered from 1 on
        if start.position < oldest.position:
            raise LogGone(
                f"the log in {wanted.log} begins at position {oldest.position} now; the messages from {start.position} "
                f"on were trimmed before this query read them; {wanted.lake_hint}"
            )
        begin = oldest.place  # all that was in the trimmed segments had been read
    until = log.behind(end)
    damage = _Damage(wanted)
    for hole in log.holes(begin, until, start.position):
        damage.add(hole)
    damage.report()
    try:
        splits = log.splits(begin, until, wanted.split_bytes)
    except LogGone as error:
        raise LogGone(f"{error}; {wanted.lake_hint}") from None
    found: list[InputPartition] = []
    for split in splits:
        spans = _spans(split, wanted.filter) if wanted.filter else [(split.start, split.end)]
        if spans:
            found.append(LogPartition(split, spans, start.position, end.position))
    return found


def _spans(split: Split, filter: str) -> list[tuple[int, int]]:
    """The parts of a split that may hold messages for a filter."""
    frames = _indexed(split.path, split.writer, filter)
    if frames is None:
        return [(split.start, split.end)]
    starts, ends = frames
    a, b = np.searchsorted(starts, (split.start, split.end))
    spans: list[tuple[int, int]] = []
    for start, end in zip(starts[a:b].tolist(), ends[a:b].tolist(), strict=True):
        if spans and start - spans[-1][1] < SPAN_GAP_BYTES:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


@lru_cache(maxsize=4)
def _indexed(path: str, writer: int, filter: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Where the frames with topics for a filter begin and end in a segment, by its index; None if there is none that
    can be trusted to say so."""
    try:
        size = Path(path).stat().st_size
        index = TopicIndex.load(Path(path).with_suffix(".index").read_bytes())
    except FileNotFoundError:
        return None
    if index is None or index.header.segment_bytes != size or index.header.writer != writer or index.damages:
        return None
    wanted = filter.encode()
    if has_wildcard(wanted):
        topics = [topic for topic in index.prefix_topics(literal_prefix(wanted)) if matches(wanted, topic)]
    else:
        topics = [wanted]
    ordinals = sorted({ordinal for topic in topics for ordinal in index.ordinals(topic)})
    starts = np.asarray(index.offsets, np.int64)[ordinals]
    return starts, starts + np.asarray(index.sizes, np.int64)[ordinals]


class _Damage:
    """What could not be read. It is counted and logged once, or ends the query if it shall."""

    def __init__(self, wanted: Slice) -> None:
        self._wanted = wanted
        self._count = 0
        self._first = ""

    def add(self, lost: Lost) -> None:
        self._count += 1
        if self._count == 1:
            self._first = (
                f"segment {lost.place >> 32} of the log in {self._wanted.log}, byte {lost.place & 0xFFFFFFFF}: "
                f"{lost.reason}; positions {lost.first_position} to {lost.last_position} cannot be read"
            )
        if self._wanted.fail_on_damage:
            raise CorruptLog(self._first)

    def report(self) -> None:
        if self._count:
            _log.warning("stepped over %d damaged places, the first in %s", self._count, self._first)


# ── reading ──


def read(partition: InputPartition, wanted: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, in batches that are worth handing over."""
    if not isinstance(partition, LogPartition):  # Spark's own, when there is nothing to read
        return
    damage = _Damage(wanted)
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    try:
        for batch in _rows(partition, wanted.filter, damage):
            waiting.append(batch)
            rows += batch.num_rows
            size += batch.column("payload").nbytes
            if rows >= BATCH_ROWS or size >= BATCH_BYTES:
                yield from _in_batches(waiting, rows, size, schema)
                waiting, rows, size = [], 0, 0
    except LogGone as error:
        raise LogGone(f"{error}: the broker trimmed it while this query ran; {wanted.lake_hint}") from None
    if waiting:
        yield from _in_batches(waiting, rows, size, schema)
    damage.report()


def _rows(partition: LogPartition, filter: str, damage: _Damage) -> Iterator[pa.RecordBatch]:
    split, low, high = partition.split, partition.low, partition.high
    test = _TopicTest(filter) if filter else None
    for start, end in partition.spans:
        part = replace(split, start=start, end=end)
        for batch in read_split(part, rows_max=BATCH_ROWS, on_lost=damage.add):
            positions = batch.column("position").to_numpy()
            if len(positions) and (positions[0] < low or positions[-1] >= high):
                a, b = np.searchsorted(positions, (low, high))
                batch = batch.slice(a, b - a)
            if test is not None:
                batch = test.matching(batch)
            if batch.num_rows:
                yield batch


class _TopicTest:
    """Which topics belong to a filter, each asked once."""

    def __init__(self, filter: str) -> None:
        self._filter = filter.encode()
        self._known: dict[str, bool] = {}

    def matching(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = batch.column("topic")
        known = self._known
        if len(known) > TOPICS_KEPT:
            known.clear()
        topics = names.dictionary.to_numpy(zero_copy_only=False).tolist()
        found = [known.get(topic) for topic in topics]
        if None in found:
            for i, topic in enumerate(topics):
                if found[i] is None:
                    found[i] = known[topic] = matches(self._filter, topic.encode())
        wanted = np.array(found, np.bool_)
        if wanted.all():
            return batch
        if not wanted.any():
            return batch.slice(0, 0)
        return batch.filter(pa.array(wanted[names.indices.to_numpy()]))


def _in_batches(waiting: list[pa.RecordBatch], rows: int, size: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Batches as Spark takes them: the columns asked for, with plain strings, joined to one batch if they are small,
    cut if they are large."""
    columns = [_plain([batch.column(field.name) for batch in waiting], field.type) for field in schema]
    joined = pa.RecordBatch.from_arrays(columns, schema=schema)
    step = rows if size <= 2 * BATCH_BYTES else max(1, rows * BATCH_BYTES // size)
    for start in range(0, rows, step):
        yield joined.slice(start, step)


def _plain(chunks: list[pa.Array], kind: pa.DataType) -> pa.Array:
    if all(chunk.null_count == len(chunk) for chunk in chunks):
        return pa.nulls(sum(map(len, chunks)), kind)
    if chunks[0].type != kind:
        chunks = [chunk.cast(kind) for chunk in chunks]
    return pa.concat_arrays(chunks) if len(chunks) > 1 else chunks[0]


# ── what Spark sees ──


class TidegateDataSource(DataSource):
    """`spark.read.format("tidegate")`, `readStream`, `write`, `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        options = Options(self.options, READ_OPTIONS)
        Slice.of(options)  # a wrong option is told at load(), not when the query runs
        chosen = [column.strip() for column in options.text("columns").split(",") if column.strip()]
        messages = TABLES["messages"]
        for column in chosen:
            if column not in messages.names:
                raise ConfigError(
                    "option columns", f"there is no column {column!r}", f"known are {', '.join(messages.names)}"
                )
        return spark_schema(pa.schema([messages.field(name) for name in dict.fromkeys(chosen or messages.names)]))

    def reader(self, schema: StructType) -> DataSourceReader:
        wanted = Slice.of(Options(self.options, READ_OPTIONS))
        if wanted.start == _LATEST:
            raise ConfigError("option from", "a batch query has nothing to read from `latest` on", START_FORMS)
        return LogReader(wanted, _arrow_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LogStreamReader(Slice.of(Options(self.options, READ_OPTIONS)), _arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidegate.pipeline.sink import BrokerWriter, Publication

        return BrokerWriter(Publication.of(self.options, schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tidegate.pipeline.sink import BrokerStreamWriter, Publication

        return BrokerStreamWriter(Publication.of(self.options, schema, overwrite))


def _arrow_schema(schema: StructType) -> pa.Schema:
    """The schema may have been given by the user: some of our columns, with their types."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    messages = TABLES["messages"]
    for field in arrow:
        if field.name not in messages.names:
            raise ConfigError("schema", f"there is no column {field.name!r}", f"known are {', '.join(messages.names)}")
        if field.type != messages.field(field.name).type:
            known = spark_schema(messages)[field.name].dataType.simpleString()
            raise ConfigError("schema", f"the column {field.name!r} has another type", f"it is {known}")
    return arrow


class LogReader(DataSourceReader):
    def __init__(self, wanted: Slice, schema: pa.Schema) -> None:
        self._wanted = wanted
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        log = LogFolder(self._wanted.log)
        end = self._wanted.last(log)  # before the start: the log may be trimmed meanwhile, and then grows
        return plan(log, self._wanted, self._wanted.first(log), end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition, self._wanted, self._schema)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, wanted: Slice, schema: pa.Schema) -> None:
        self._wanted = wanted
        self._schema = schema
        self._beginning: Place | None = None  # known when the query is new, or did not finish its first batch
        self._planned = False
        self._target: Place | None = None

    @cached_property
    def _folder(self) -> LogFolder:
        return LogFolder(self._wanted.log)

    def initialOffset(self) -> dict[str, int]:
        if self._beginning is None:  # Spark asks twice, and the log may grow meanwhile
            self._beginning = self._wanted.first(self._folder)
            self._wanted.check_not_future(self._beginning, self._folder.end())
        return _offset(self._beginning)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, int]:
        begin = _place(start)
        if not self._planned:
            # A query's first batch is empty. It puts the beginning into the checkpoint: were the query killed before
            # that, `latest`, `earliest` and an age would mean another place when it is started again.
            self._planned = True
            if begin == self._beginning:
                return start
        end = self._target or self._wanted.last(self._folder)
        if end.position <= begin.position:
            return start
        if isinstance(limit, ReadMaxRows):
            end = self._folder.ahead(begin, end, limit.max_rows)
        return _offset(end)

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._wanted.rows_per_trigger
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, int]:
        return _offset(self._folder.end())

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._wanted.last(self._folder)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._planned = True
        return plan(self._folder, self._wanted, _place(start), _place(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition, self._wanted, self._schema)


def _offset(place: Place) -> dict[str, int]:
    return {"place": place.place, "position": place.position}


def _place(offset: dict[str, Any]) -> Place:
    return Place(int(offset["place"]), int(offset["position"]))
