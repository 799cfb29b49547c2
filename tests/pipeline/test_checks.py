"""The data tests find nothing wrong with what the jobs make, and everything that was made wrong on purpose."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from jobs_kit import archived, context_of, drain
from log_writer import LogWriter, run
from pyspark.sql import SparkSession

from tidegate.config import Extract, Pipeline
from tidegate.pipeline import checks
from tidegate.pipeline.checks import check
from tidegate.pipeline.jobs import Context, abuse, extract, retained, traffic
from tidegate.pipeline.lake import Lake, LakeFile
from tidegate.pipeline.parquet import WrittenFile, read_file, write_file
from tidegate.pipeline.schemas import TABLES
from tidegate.session import changes

SETTINGS = {"extract": {"n": Extract("n", "n INT")}, "pipeline": Pipeline(abuse_topics_max=3)}


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A data folder with something in every table but `backlog` and `dead_letters`, and the time at its end."""
    data = tmp_path_factory.mktemp("made")
    writer = LogWriter(data / "log")
    found = context_of(spark, data, **SETTINGS)
    session = changes.session(1, True, 4, 0, 0, 0, b"client", b"", None)
    for part in range(3):
        writer.tick([run(b"n", b'{"n": 1}', b"bad"), run(b"kept", b"x", flags=5)], [session])
        writer.tick([run(b"t/%d" % n, b"x", flags=n % 3) for n in range(10 * part, 10 * part + 10)])
        writer.time_ms += 90_000
        archived(found)
    for job in (retained, traffic, extract, abuse):
        drain(job, found)
    writer.close()
    return data, writer.time_ms


@pytest.fixture
def context(spark: SparkSession, made: tuple[Path, int], tmp_path: Path) -> Context:
    shutil.copytree(made[0], tmp_path / "data")
    return context_of(spark, tmp_path / "data", **SETTINGS)


@pytest.fixture
def writer(context: Context, made: tuple[Path, int]) -> LogWriter:
    writer = LogWriter(context.log.folder)
    writer.time_ms = made[1]
    return writer


def now(writer: LogWriter) -> datetime:
    return datetime.fromtimestamp(writer.time_ms / 1000, UTC)


MINUTE = datetime(2026, 1, 1, tzinfo=UTC)
# A row of each table that is as it should be.
RIGHT: dict[str, dict[str, Any]] = {
    "messages": {"qos": 1, "retain": False},
    "sessions": {"kind": "subscribed", "number": 1, "client": "c", "filter": "f"},
    "dead_letters": {"qos": 1, "retain": False},
    "backlog": {"first_position": 1, "last_position": 9, "messages": 9},
    "retained": {"qos": 1},
    "traffic_minutely": {"minute": MINUTE, "messages": 3, "qos0": 1, "qos1": 1, "qos2": 1, "last_position": 9},
    "abuse_verdicts": {
        "rule": "topics", "observed": 2, "window_start": MINUTE, "window_end": MINUTE + timedelta(minutes=1)
    },
    "quarantine": {},
}  # fmt: skip
# What makes it break one rule, and no other.
WRONG: dict[str, list[dict[str, Any]]] = {
    "messages": [{"position": -1}, {"qos": 3}, {"topic": ""}, {"uuid": b"short"}],
    "sessions": [{"kind": "asleep"}, {"number": None}, {"kind": "away", "client": None}, {"filter": None}],
    "dead_letters": [{"qos": -1}, {"reason": ""}, {"attempts": -1}],
    "backlog": [{"first_position": 11, "messages": 0}, {"messages": 10}],
    "retained": [{"qos": 3}, {"payload": b""}, {"expires_at": 0}],
    "traffic_minutely": [
        {"minute": MINUTE + timedelta(seconds=1)}, {"messages": 4}, {"retained": 4}, {"bytes": -1}, {"last_position": 2}
    ],
    "abuse_verdicts": [{"rule": "manners"}, {"observed": 1}, {"window_end": MINUTE + timedelta(minutes=2)}],
    "quarantine": [{"reason": ""}, {"job": ""}, {"raw": bytes(4097)}],
}  # fmt: skip
BREAKS_BOTH = ("backlog", "messages between 1 and last_position - first_position + 1")


def put(lake: Lake, name: str, rows: list[dict[str, Any]]) -> None:
    """Rows that no job would write, into a table all the same. Each gets a key of its own, unless it brings one."""
    schema = TABLES[name]
    nullable = pa.schema([field.with_nullable(True) for field in schema])
    plain = {
        field.name: {pa.binary(): b"x", pa.string(): "x"}.get(field.type, 1) for field in schema if not field.nullable
    }
    numbered = []
    for number, row in enumerate(rows):
        key = checks.KEYS.get(name, ("time",))[-1]
        own = str(number) if schema.field(key).type == pa.string() else 10**6 + number
        numbered.append(plain | RIGHT[name] | {key: own} | row)
    lake.create(name)
    table = pa.Table.from_pylist(numbered, nullable)
    lake.commit(name, [write_file(table, str(lake.folder / name))], app="test", version=1)


@pytest.mark.req("P.3", "P.5", "P.9", "P.11")
def test_nothing_is_wrong_with_what_the_jobs_make(context: Context, writer: LogWriter) -> None:
    assert {"messages", "sessions", "retained", "traffic_minutely", "abuse_verdicts", "quarantine", "json_n"} <= {
        name for name in context.lake.names() if context.lake.rows(name)
    }
    # Late enough that nothing may be waiting, soon enough that all of it is counted.
    assert check(context.lake, context.spark, context.log, now(writer) + timedelta(minutes=30)) == []


def reported(context: Context, kind: str) -> list[tuple[str, str]]:
    found = check(context.lake, context.spark)
    return sorted((finding.table, finding.detail) for finding in found if finding.check == kind)


@pytest.mark.req("P.11")
def test_every_range_is_checked(context: Context) -> None:
    assert list(WRONG) == list(RIGHT) == list(checks.RANGES)
    for name, rows in WRONG.items():
        put(context.lake, name, [{}, *rows])
    expected = []
    for name, rules in checks.RANGES.items():
        expected += [(name, f"{2 if (name, rule) == BREAKS_BOTH else 1} rows: {rule}") for rule in rules]
    assert reported(context, "range") == sorted(expected)


@pytest.mark.req("P.11")
def test_every_column_that_must_not_be_null_is_checked(context: Context) -> None:
    required = {name: [field.name for field in TABLES[name] if not field.nullable] for name in TABLES}
    for name, columns in required.items():
        put(context.lake, name, [{column: None} for column in columns])
    expected = [(name, f"1 rows: {column}") for name, columns in required.items() for column in columns]
    assert reported(context, "not null") == sorted(expected)


@pytest.mark.req("P.11")
def test_every_key_is_checked(context: Context) -> None:
    for name, key in checks.KEYS.items():
        same = {key[-1]: "same" if TABLES[name].field(key[-1]).type == pa.string() else 10**6}
        put(context.lake, name, [same, same])
    again = context.lake.files("json_n")[0]
    context.lake.commit("json_n", [twin(context.lake, "json_n", again)], app="test", version=1)
    expected = [(name, f"1 times: {', '.join(key)}") for name, key in checks.KEYS.items()]
    assert reported(context, "unique") == sorted([*expected, ("json_n", f"{again.rows} times: position")])


def twin(lake: Lake, name: str, file: LakeFile) -> WrittenFile:
    """A file once more, under another name."""
    return write_file(read_file(lake.path(name, file)), str(lake.folder / name))


@pytest.mark.req("P.3", "P.9")
def test_messages_that_are_there_twice_or_not_at_all_are_found(context: Context, writer: LogWriter) -> None:
    lake = context.lake
    second = lake.files("messages")[1]
    lake.commit("messages", [twin(lake, "messages", second)], app="test", version=1)
    found = check(lake, context.spark, context.log, now(writer))
    assert [(each.table, each.check) for each in found] == [
        ("messages", "unique"),
        ("messages", "no overlap"),
        ("traffic_minutely", "counted"),
        ("messages", "complete"),
    ]
    assert found[-1].detail == "52 from position 0 on; the log has 39"
    both = [file for file in lake.files("messages") if file.min_position == second.min_position]
    lake.commit("messages", [], app="test", version=2, remove=both)
    found = check(lake, context.spark, context.log, now(writer))
    assert [(each.table, each.check) for each in found] == [("traffic_minutely", "counted"), ("messages", "complete")]
    assert found[0].detail.endswith("13 counted, 0 messages")
    assert found[1].detail == "26 from position 0 on; the log has 39"


@pytest.mark.req("P.11")
def test_what_is_late_is_found(context: Context, writer: LogWriter) -> None:
    writer.tick([run(b"late", b"1", b"2")])
    archived(context)
    writer.tick([run(b"later", b"3")])
    assert check(context.lake, context.spark, context.log, now(writer) + timedelta(minutes=14)) == []
    found = check(context.lake, context.spark, context.log, now(writer) + timedelta(minutes=16))
    assert [(each.table, each.check, each.detail.partition(" ")[0]) for each in found] == [
        ("messages", "fresh", "1"),
        ("retained", "fresh", "2"),
        ("traffic_minutely", "fresh", "2"),
        ("abuse_verdicts", "fresh", "2"),
    ]


@pytest.mark.req("P.11")
@pytest.mark.attack("C12")
def test_a_file_that_cannot_be_read_is_found(context: Context, writer: LogWriter) -> None:
    path = context.lake.path("traffic_minutely", context.lake.files("traffic_minutely")[0])
    whole = path.read_bytes()
    for damaged in (whole[:100], b"x" * len(whole)):
        path.write_bytes(damaged)
        found = check(context.lake, context.spark, context.log, now(writer))
        assert [(each.table, each.check) for each in found] == [("traffic_minutely", "readable")]
