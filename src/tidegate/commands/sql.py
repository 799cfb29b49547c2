"""`tidegate sql`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from tidegate.config import Config

from .config import data_option, with_config
from .failure import Failure, Refusal
from .spark import lake_of, spark_for, watched
from .text import safe

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

SHOWN_ROWS = 100
"""A table for people has so many rows, unless they ask for another number."""
CELL_CHARS_MAX = 200

FORMATS = ("table", "csv", "json", "parquet")
_SUFFIXES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}


@click.command("sql")
@click.argument("query")
@with_config(data=data_option)
@click.option(
    "--format", "chosen", type=click.Choice(FORMATS), help="What comes out (default: a table, or what --out ends in)."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help=f"At most N rows (a table: {SHOWN_ROWS}).")
def sql(
    config: Config, query: str, chosen: str | None, out: Path | None, limit: int | None
) -> None:
    """Ask the lake, in Spark SQL. Only looks; works beside a running pipeline.

    The tables are messages, sessions, dead_letters, backlog, retained, traffic_minutely, abuse_verdicts, quarantine,
    and those of your own extracts. `show tables` lists what there is, `describe messages` its columns.

    \b
    Examples:
      tidegate sql "select topic, count(*) n from messages group by topic order by n desc"
      tidegate sql "select * from messages where topic like 'demo/%'" --format json
      tidegate sql "select * from traffic_minutely" --out traffic.parquet
      tidegate sql "select reason, count(*) from dead_letters group by reason"
    """
    form = _format(chosen, out)
    lake = lake_of(config)
    from pyspark.errors import PySparkException
    from rich.console import Console

    from tidegate.pipeline.batches import arrow_batches
    from tidegate.pipeline.query import BadQuery, explained
    from tidegate.pipeline.query import query as ask

    console = Console(stderr=True)
    with spark_for("sql", config, console) as spark:
        try:
            frame = _named(ask(spark, lake, query))
            bound = limit or (SHOWN_ROWS if form == "table" else None)
            if bound is not None:
                frame = frame.limit(bound + 1 if form == "table" else bound)  # one more tells whether there are more
            batches = arrow_batches(frame)
            if out is not None:
                with watched(spark, console, "the query"):
                    _write(frame, batches, form, out)
                return
            with watched(spark, console, "the query"):
                first = list(batches if form == "table" else islice(batches, 1))
            if form == "table":
                _show(frame.columns, list(_rows(first)), bound or SHOWN_ROWS)
            else:
                _TEXT[form](frame.columns, _rows(chain(first, batches)), sys.stdout)
                sys.stdout.flush()
        except BadQuery as error:
            raise Failure(str(error), error.hint) from error
        except PySparkException as error:
            raise Refusal(explained(error)) from error


def _format(chosen: str | None, out: Path | None) -> str:
    form = chosen or (_SUFFIXES.get(out.suffix.lower(), "") if out is not None else "table")
    if not form:
        raise Failure(f"{out} does not say what to write", "add --format csv, json or parquet")
    if form == "parquet" and out is None:
        raise Failure("Parquet is no text", "name a file with --out")
    if form == "table" and out is not None:
        raise Failure("a table is for people", "add --format csv, json or parquet for a file")
    return form


def _named(frame: DataFrame) -> DataFrame:
    """Each column with a name of its own: `select a.x, b.x` gives x and x_2."""
    names: list[str] = []
    for name in frame.columns:
        number, unique = 1, name
        while unique in names:
            number += 1
            unique = f"{name}_{number}"
        names.append(unique)
    return frame.toDF(*names)


def _write(frame: DataFrame, batches: Iterator[pa.RecordBatch], form: str, out: Path) -> None:
    with _replacing(out) as path:
        if form == "parquet":
            _parquet(frame, batches, path)
        else:
            with path.open("w", encoding="utf-8", newline="") as file:
                _TEXT[form](frame.columns, _rows(batches), file)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """The file appears when it is whole."""
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


# ── the formats ──


def _show(names: Sequence[str], rows: list[tuple[Any, ...]], bound: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = rows[:bound]
    table = Table(header_style="bold")
    for at, name in enumerate(names):
        numbers = all(isinstance(row[at], int | float | Decimal) for row in shown if row[at] is not None)
        table.add_column(Text(safe(name)), justify="right" if numbers and shown else "left", overflow="fold")
    for row in shown:
        table.add_row(*(Text(_cell(value), style="dim" if value is None else "") for value in row))
    Console().print(table)
    count = "1 row" if len(shown) == 1 else f"{len(shown):,} rows"
    more = f"{count}, and there are more: --limit shows another number, --format csv or json all"
    click.echo(more if len(rows) > bound else count, err=True)


def _cell(value: Any) -> str:
    text = "null" if value is None else safe(_text(value))
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def _csv(names: Sequence[str], rows: Iterable[tuple[Any, ...]], file: IO[str]) -> None:
    writer = csv.writer(file)
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if value is None else _text(value) for value in row])


def _json(names: Sequence[str], rows: Iterable[tuple[Any, ...]], file: IO[str]) -> None:
    for row in rows:
        fields = {}
        for name, value in zip(names, row, strict=True):
            if isinstance(value, bytes) and not _is_text(value):
                fields[f"{name}_hex"] = value.hex()
            else:
                fields[name] = value.decode() if isinstance(value, bytes) else value
        file.write(json.dumps(fields, ensure_ascii=False, default=_plain) + "\n")


_TEXT: dict[str, Callable[[Sequence[str], Iterable[tuple[Any, ...]], IO[str]], None]] = {"csv": _csv, "json": _json}


def _parquet(frame: DataFrame, batches: Iterator[pa.RecordBatch], path: Path) -> None:
    import pyarrow.parquet as pq
    from pyspark.sql.pandas.types import to_arrow_schema

    with pq.ParquetWriter(path, to_arrow_schema(frame.schema, timezone="UTC"), compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


# ── values ──


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode() if _is_text(value) else "0x" + value.hex()
    if isinstance(value, bool | dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=_plain)
    return str(_plain(value))


def _plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, datetime):
        fine = "microseconds" if value.microsecond % 1000 else "milliseconds"
        moment = value.astimezone(UTC) if value.tzinfo is not None else value
        return moment.isoformat(timespec=fine).replace("+00:00", "Z")
    return _text(value) if isinstance(value, bytes) else str(value)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
