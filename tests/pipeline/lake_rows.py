"""Rows for a lake that no archive has written: chosen positions, times and tenants, in files of chosen size."""

from __future__ import annotations

import itertools
import os
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.pipeline.jobs import Context
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.schemas import TABLES

NOW_S = datetime.now(UTC).timestamp()


def messages(positions: range, age_s: float = 0.0, **columns: Any) -> pa.Table:
    """One message a millisecond, the first of them `age_s` ago; on a few topics, in no order."""
    rnd = random.Random(positions.start)
    first_us = int((NOW_S - age_s) * 1e6)
    plain = {"tenant": "", "publisher": "p", "qos": 1, "retain": False}
    rows = [
        {
            "position": position,
            "time": first_us + 1000 * (position - positions.start),
            "topic": f"t/{rnd.randrange(7)}",
            "payload": b"%d" % position,
            "uuid": rnd.randbytes(16) if rnd.random() < 0.3 else None,
            "properties": rnd.randbytes(5) if rnd.random() < 0.3 else None,
            **plain,
            **columns,
        }
        for position in positions
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["messages"])


def fill(lake: Lake, files: int, rows: int, **columns: Any) -> pa.Table:
    """Append files of messages; returns all of them."""
    tables = [messages(range(i * rows, (i + 1) * rows), **columns) for i in range(files)]
    for i, table in enumerate(tables):
        lake.append("messages", table, app="archive", version=i + 1)
    return pa.concat_tables(tables)


def stored(lake: Lake, name: str = "messages") -> list[dict[str, Any]]:
    """All rows that the table's log names, in order of position, read without Spark."""
    rows = [row for file in lake.files(name) for row in pq.read_table(lake.path(name, file)).to_pylist()]
    return sorted(rows, key=lambda row: repr(row) if "position" not in row else (row["position"], repr(row)))


def positions(lake: Lake) -> list[int]:
    return [row["position"] for row in stored(lake)]


def disjoint(lake: Lake) -> bool:
    """Whether each file of messages has positions of its own, and its rows are by topic and position."""
    files = lake.files("messages")
    for file in files:
        rows = pq.read_table(lake.path("messages", file), columns=["topic", "position"]).to_pylist()
        keys = [(row["topic"], row["position"]) for row in rows]
        found = [position for _, position in keys]
        if keys != sorted(keys) or (min(found), max(found)) != (file.min_position, file.max_position):
            return False
    return all(a.max_position < b.min_position for a, b in itertools.pairwise(files))


def reopened(context: Context) -> Context:
    """As a driver has it that was started anew."""
    return Context(context.spark, Lake(context.lake.folder), context.log, context.data, context.config)


def aged(path: Path, age_s: float) -> Path:
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path
