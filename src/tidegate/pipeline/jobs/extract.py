"""Extracts: the JSON payloads of some topics as typed columns, a table `json_<name>` for each in the configuration.

A message gives one row of its table, or one of `quarantine` with the reason:

    not UTF-8                 the bytes are no text
    not JSON                  no, or more than, one whole JSON value
    not an object             JSON, but a list, a number, …
    does not fit the columns  a value is of another type than its column, or out of its range

A column that is missing, or null, is null; what is in the payload besides the columns is left out.

Quarantine is committed first, and says how far it has been told. If the job is cut off before the rows themselves
are committed, the step happens again, and adds of the bad rows only those that quarantine does not have.

A table is made for one filter and one set of columns. When either changes in the configuration, a new table is begun,
`json_<name>_2` and so on, from the first message that the lake still has; the old one stays as it is, since it may hold
what the lake no longer has. Changing it back goes on with the old table.
"""

from __future__ import annotations

import itertools

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from tidegate.config import Extract
from tidegate.errors import ConfigError
from tidegate.pipeline.jobs import Batch, Context
from tidegate.pipeline.jobs.following import next_step
from tidegate.pipeline.lake import Lake, write_frame
from tidegate.pipeline.schemas import MESSAGES, QUARANTINE, RAW_BYTES_MAX
from tidegate.pipeline.topics import topic_matches

NAME = "extract"
INTERVAL_S = 5.0

KEY = ("position", "time", "tenant", "topic", "publisher")
KINDS = (
    t.StringType, t.BooleanType, t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.FloatType, t.DoubleType,
    t.DateType, t.TimestampType,
)  # fmt: skip
"""No DECIMAL: Spark takes minutes and gigabytes to read 1e-100000000 as one, and anybody may publish that."""

NOT_UTF8, NOT_JSON, NOT_AN_OBJECT, MISFIT = "not UTF-8", "not JSON", "not an object", "does not fit the columns"
YEARS = (1000, 9999)
"""Statistics in the table's log have years of four digits."""

# JSON and nothing else: Spark would take single quotes, NaN and Infinity as well.
_STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_UNREAD = "unread"
_PERMISSIVE = {**_STRICT, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNREAD}


def columns_of(name: str, extract: Extract) -> t.StructType:
    """The configured columns. Raises ConfigError for what Spark, Delta or this job cannot do."""
    path = f"extract.{name}.columns"
    try:
        columns = t.StructType.fromDDL(extract.columns)
    except PySparkException as error:
        wrong = f'"{extract.columns}" is not a list of columns'
        raise ConfigError(path, wrong, 'for example "value DOUBLE, unit STRING"') from error
    assert isinstance(columns, t.StructType)
    taken = set(KEY)
    for column in columns:
        if column.name.lower() in taken:
            raise ConfigError(path, f"the column {column.name} is there already", f"every table has {', '.join(KEY)}")
        taken.add(column.name.lower())
        if set(column.name) & set(" ,;{}()\n\t="):
            raise ConfigError(path, f'"{column.name}" is no name for a column of a Delta table')
        kind = _wrong_kind(column.dataType)
        if kind is not None:
            allowed = ", ".join(each().simpleString().upper() for each in KINDS)
            raise ConfigError(path, f"{column.name} cannot be {kind.simpleString()}", f"{allowed}; ARRAY, MAP, STRUCT")
    return columns


def _wrong_kind(kind: t.DataType) -> t.DataType | None:
    if isinstance(kind, t.ArrayType):
        return _wrong_kind(kind.elementType)
    if isinstance(kind, t.MapType):
        return _wrong_kind(kind.keyType) or _wrong_kind(kind.valueType)
    if isinstance(kind, t.StructType):
        return next((wrong for field in kind if (wrong := _wrong_kind(field.dataType)) is not None), None)
    return None if type(kind) in KINDS else kind


def taken_apart(messages: DataFrame, columns: t.StructType) -> DataFrame:
    """Each message with `found`, a struct of its columns; or with the `reason` and `detail` why there is none."""
    text = f.col("payload").cast("string")
    # Spark reads one JSON value and never looks at what follows. Within an object and within a list, whatever follows
    # is either wrong in one of the two, or makes the list longer.
    wrapper = t.StructType([t.StructField("found", columns), t.StructField(_UNREAD, t.StringType())])
    inside = f.concat(f.lit('{"found":'), text, f.lit("}"))
    listed = f.from_json(f.concat(f.lit("["), text, f.lit("]")), "array<string>", _STRICT)
    read = messages.select(
        *KEY, "payload", f.from_json(inside, wrapper, _PERMISSIVE).alias("read"), (f.size(listed) == 1).alias("single")
    )
    found = f.col("read.found")
    sound = [_sound(found[column.name], column.dataType) for column in columns]
    utf8 = f.is_valid_utf8(text)
    good = utf8 & f.col("single") & f.col(f"read.{_UNREAD}").isNull() & found.isNotNull()
    for each in sound:
        good &= each
    json = f.col("single") & f.from_json(inside, "map<string,string>", _STRICT).isNotNull()
    reason = (
        f.when(f.coalesce(good, f.lit(False)), f.lit(None))
        .when(~utf8, NOT_UTF8)
        .when(~f.coalesce(json, f.lit(False)), NOT_JSON)
        .when(~text.rlike(r"\A\s*\{"), NOT_AN_OBJECT)
        .otherwise(MISFIT)
    )
    detail = f.when(reason == MISFIT, _misfits(text, found, columns)).otherwise("")
    return read.select(*KEY, "payload", found.alias("found"), reason.alias("reason"), detail.alias("detail"))


def _sound(value: Column, kind: t.DataType) -> Column:
    """Whether a value that Spark has read is one that others can read."""
    if isinstance(kind, t.DateType | t.TimestampType):
        return value.isNull() | f.year(value).between(*YEARS)
    if isinstance(kind, t.FloatType | t.DoubleType):
        return value.isNull() | (f.abs(value) < float("inf"))
    return f.lit(True)


def _misfits(text: Column, found: Column, columns: t.StructType) -> Column:
    """The columns that have a value in the payload, but not in `found`."""
    given = f.from_json(text, "map<string,string>", _STRICT)
    wrong = [
        f.when(
            given[column.name].isNotNull()
            & (found[column.name].isNull() | ~_sound(found[column.name], column.dataType)),
            f"{column.name} is no {column.dataType.simpleString()}",
        )
        for column in columns
    ]
    named = f.array_join(f.array_compact(f.array(*wrong)), ", ")
    return f.when(f.length(named) > 0, named).otherwise("a value within a column")


def rows_of(parts: DataFrame) -> DataFrame:
    """What belongs into the table."""
    return parts.where(f.col("reason").isNull()).select(*KEY, "found.*")


def refused_of(parts: DataFrame, table: str) -> DataFrame:
    """What belongs into quarantine."""
    return parts.where(f.col("reason").isNotNull()).select(
        "time",
        f.lit(NAME).alias("job"),
        "reason",
        f.concat_ws(": ", f.lit(table), f.when(f.col("detail") != "", f.col("detail"))).alias("detail"),
        f.lit(None).cast("long").alias("place"),
        f.col("position").alias("first_position"),
        f.col("position").alias("last_position"),
        f.substring("payload", 1, RAW_BYTES_MAX).alias("raw"),
    )


def run(context: Context) -> Batch | None:
    """A step of each extract. One that fails does not keep the others from theirs."""
    batches: list[Batch] = []
    failed: list[Exception] = []
    for name, extract in context.config.extract.items():
        try:
            batch = _step(context, name, extract)
        except Exception as error:
            failed.append(error)
        else:
            batches += [batch] if batch is not None else []
    if failed:
        raise failed[0]
    if not batches:
        return None
    rows, reached, lag, quarantined = zip(*batches, strict=True)
    return Batch(sum(rows), min(reached), sum(lag), sum(quarantined))


def _step(context: Context, name: str, extract: Extract) -> Batch | None:
    spark, lake = context.spark, context.lake
    columns = columns_of(name, extract)
    table = table_of(lake, name, extract, columns)
    step = next_step(lake.files("messages"), "position", lake.progress(table, NAME) or 0)
    if step is None:
        return None
    messages = lake.read(spark, "messages", positions=(step.start, step.end))
    parts = taken_apart(messages.where(topic_matches(f.col("topic"), extract.filter)), columns)
    refused = _quarantine(lake, table, parts, step.end)
    lake.write(table, rows_of(parts), app=NAME, version=step.end, sort=("topic", "position"))
    return Batch(step.rows, step.end, step.left_rows, refused)


def _quarantine(lake: Lake, table: str, parts: DataFrame, end: int) -> int:
    app = f"{NAME} {table}"
    told = lake.progress("quarantine", app) or 0
    if told >= end:
        return 0
    lake.create("quarantine")
    bad = refused_of(parts.where(f.col("position") >= told), table)
    files = write_frame(bad, str(lake.folder / "quarantine"), QUARANTINE)
    if files:
        lake.commit("quarantine", files, app=app, version=end)
    return sum(file.rows for file in files)


def table_of(lake: Lake, name: str, extract: Extract, columns: t.StructType) -> str:
    """The table for this filter and these columns; made if there is none."""
    purpose = f"extract {name}: the JSON of {extract.filter} as {columns.simpleString()}"
    for generation in itertools.count(1):
        table = f"json_{name}" if generation == 1 else f"json_{name}_{generation}"
        if not lake.exists(table):
            key = [MESSAGES.field(each) for each in KEY]
            lake.create(table, pa.schema(key + list(to_arrow_schema(columns, timezone="UTC"))), purpose)
            return table
        if lake.description(table) == purpose:
            return table
    raise AssertionError("there is always a next number")
