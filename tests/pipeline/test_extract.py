"""JSON payloads become typed rows; what cannot goes to quarantine with the reason, once, and stops nothing."""

from __future__ import annotations

from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import pytest
from jobs_kit import Killed, archived, context_of, drain, kill_at_commit, table
from log_writer import LogWriter, run
from pyspark.sql import SparkSession

from tidegate.config import Extract
from tidegate.errors import ConfigError
from tidegate.pipeline.jobs import Context, extract
from tidegate.pipeline.jobs.extract import MISFIT, NOT_AN_OBJECT, NOT_JSON, NOT_UTF8
from tidegate.pipeline.jobs.following import next_step

CLIMATE = Extract("plant/+/climate/#", "value DOUBLE, count INT, unit STRING, ok BOOLEAN, seen TIMESTAMP, day DATE")
WHOLE = (
    b'{"value": -1.5e1, "count": 3, "unit": "\xc2\xb0C", "ok": true, "seen": "2026-03-01T12:00:00+02:00", '
    b'"day": "2026-03-01", "more": [1, {"deep": null}]}'
)
SEEN = datetime(2026, 3, 1, 10, tzinfo=UTC)

GOOD: dict[bytes, tuple[Any, ...]] = {
    WHOLE: (-15.0, 3, "°C", True, SEEN, date(2026, 3, 1)),
    b"{}": (None, None, None, None, None, None),
    b' \n{"count": null, "value": 7}\t': (7.0, None, None, None, None, None),
    b'{"found": {"count": 1}}': (None, None, None, None, None, None),
    b'{"unit": 5, "Count": 1}': (None, None, "5", None, None, None),
    b'{"unit": {"a": [1, "}]"]}}': (None, None, '{"a":[1,"}]"]}', None, None, None),
    b'{"unit": "\\u0000\\"}] x"}': (None, None, '\0"}] x', None, None, None),
    b'{"seen": 1772359200}': (None, None, None, None, SEEN, None),
    b'{"deep": ' + b"[" * 900 + b"]" * 900 + b"}": (None, None, None, None, None, None),
}
BAD: dict[bytes, tuple[str, str]] = {
    b"\xff\xfe": (NOT_UTF8, ""),
    b'{"unit": "\xe9"}': (NOT_UTF8, ""),
    b'{"unit": "\xed\xa0\x80"}': (NOT_UTF8, ""),
    b"": (NOT_JSON, ""),
    b"  ": (NOT_JSON, ""),
    b"21.5 \xc2\xb0C": (NOT_JSON, ""),
    b'{"count": 1': (NOT_JSON, ""),
    b'{"count": 1,}': (NOT_JSON, ""),
    b'{"count": 01}': (NOT_JSON, ""),
    b"{count: 1}": (NOT_JSON, ""),
    b"{'count': 1}": (NOT_JSON, ""),
    b'{"value": NaN}': (NOT_JSON, ""),
    b'// no\n{"count": 1}': (NOT_JSON, ""),
    b'\xef\xbb\xbf{"count": 1}': (NOT_JSON, ""),
    # One value, and something behind it.
    b'{"count": 1} x': (NOT_JSON, ""),
    b'{"count": 1}{"count": 2}': (NOT_JSON, ""),
    b'{"count": 1},{"count": 2}': (NOT_JSON, ""),
    b'{"count": 1},"found":{"count": 2}': (NOT_JSON, ""),
    b'{"count": 1}}': (NOT_JSON, ""),
    b'{"count": 1}]': (NOT_JSON, ""),
    b'{"count": 1}] }': (NOT_JSON, ""),
    b'{"count": 1}} ]': (NOT_JSON, ""),
    b'{"count": 1}\x00': (NOT_JSON, ""),
    # What is meant to break a parser.
    b"[" * 100_000: (NOT_JSON, ""),
    b'{"count":' * 50_000: (NOT_JSON, ""),
    b'{"value": ' + b"9" * 5000 + b"}": (NOT_JSON, ""),
    b"null": (NOT_AN_OBJECT, ""),
    b"5": (NOT_AN_OBJECT, ""),
    b'"text"': (NOT_AN_OBJECT, ""),
    b"[]": (NOT_AN_OBJECT, ""),
    b'[{"count": 1}]': (NOT_AN_OBJECT, ""),
    b'{"count": "3"}': (MISFIT, "count is no int"),
    b'{"count": 1.5, "value": "x", "unit": "ok"}': (MISFIT, "value is no double, count is no int"),
    b'{"count": 3000000000}': (MISFIT, "count is no int"),
    b'{"count": 1e-100000000}': (MISFIT, "count is no int"),
    b'{"value": 1e400}': (MISFIT, "value is no double"),
    b'{"value": "NaN"}': (MISFIT, "value is no double"),
    b'{"ok": 1}': (MISFIT, "ok is no boolean"),
    b'{"seen": "soon"}': (MISFIT, "seen is no timestamp"),
    b'{"seen": 1772359200000}': (MISFIT, "seen is no timestamp"),
    b'{"seen": "+12345-01-01T00:00:00Z"}': (MISFIT, "seen is no timestamp"),
    b'{"seen": "-0044-03-15T00:00:00Z"}': (MISFIT, "seen is no timestamp"),
    b'{"day": "2026-02-30"}': (MISFIT, "day is no date"),
    b'{"count": 1, "count": "x"}': (MISFIT, "a value within a column"),
}


def configured(spark: SparkSession, data: Path, **extracts: Extract) -> Context:
    return context_of(spark, data, extract=extracts)


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path / "log")


def quarantined(context: Context) -> list[tuple[Any, ...]]:
    return table(context, "quarantine", "first_position", "reason", "detail")


def plainly(context: Context, name: str, order: str) -> list[dict[str, Any]]:
    """A table as anybody else reads it: without Spark."""
    rows = deltalake.DeltaTable(str(context.lake.folder / name)).to_pyarrow_table()
    return rows.sort_by(order).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.req("P.11")
def test_every_payload_becomes_a_row_or_is_quarantined_with_the_reason(
    spark: SparkSession, tmp_path: Path, writer: LogWriter
) -> None:
    payloads = [*GOOD, *BAD]
    writer.tick([run(b"plant/7/climate", each, publisher=b"dev", tenant=b"acme") for each in payloads])
    elsewhere = [b"plant/climate", b"plant/7/climates", b"plant/a/b/climate", b"plants/7/climate"]
    writer.tick([run(topic, each) for topic in elsewhere for each in (b"{}", b"no")])
    context = configured(spark, tmp_path, climate=CLIMATE)
    batches = drain(extract, archived(context))
    assert [(batch.rows, batch.quarantined) for batch in batches] == [(len(payloads) + 8, len(BAD))]

    rows = plainly(context, "json_climate", "position")
    names = CLIMATE.columns.replace(",", "").split()[::2]
    assert [tuple(row[name] for name in names) for row in rows] == list(GOOD.values())
    assert [row["position"] for row in rows] == list(range(len(GOOD)))
    assert {(row["tenant"], row["topic"], row["publisher"]) for row in rows} == {("acme", "plant/7/climate", "dev")}
    assert {row["time"].timestamp() * 1000 for row in rows} == {writer.time_ms - 1000}

    bad = plainly(context, "quarantine", "first_position")
    told = {payloads[row["first_position"]]: (row["reason"], row["detail"]) for row in bad}
    assert told == {
        payload: (reason, f"json_climate: {detail}" if detail else "json_climate")
        for payload, (reason, detail) in BAD.items()
    }
    assert len(bad) == len(BAD)
    for row in bad:
        assert row["raw"] == payloads[row["first_position"]][:4096] and row["last_position"] == row["first_position"]
        assert row["job"] == "extract" and row["time"].timestamp() * 1000 == writer.time_ms - 1000


@pytest.mark.req("P.11")
def test_lists_maps_and_structs_are_columns_too(spark: SparkSession, tmp_path: Path, writer: LogWriter) -> None:
    columns = "tags ARRAY<STRING>, at STRUCT<x: DOUBLE, y: DOUBLE>, counts MAP<STRING, BIGINT>"
    writer.tick([run(b"n", b'{"tags": ["a", null], "at": {"x": 1}, "counts": {"k": 5}}', b'{"at": {"x": "w"}}')])
    context = configured(spark, tmp_path, nested=Extract("n", columns))
    drain(extract, archived(context))
    (row,) = plainly(context, "json_nested", "position")
    assert (row["tags"], row["at"], row["counts"]) == (["a", None], {"x": 1.0, "y": None}, [("k", 5)])
    assert quarantined(context) == [(1, MISFIT, "json_nested: a value within a column")]


@pytest.mark.req("P.11")
@pytest.mark.attack("C11")
@pytest.mark.parametrize("where", ["quarantine", "json_c"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_row_is_extracted_or_quarantined_once_whenever_the_driver_is_killed(
    spark: SparkSession, tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch, where: str, when: str
) -> None:
    def tick(n: int) -> None:
        writer.tick([run(b"c", b'{"n": %d}' % n), run(b"c", b"bad %d" % n)])

    context = configured(spark, tmp_path, c=Extract("c", "n INT"))
    tick(0)
    archived(context)
    kill_at_commit(monkeypatch, where, when)
    with pytest.raises(Killed):
        extract.run(context)
    tick(1)  # the next driver finds more to do
    again = configured(spark, tmp_path, c=Extract("c", "n INT"))
    drain(extract, archived(again))
    assert table(again, "json_c", "position", "n") == [(0, 0), (2, 1)]
    assert [position for position, _, _ in quarantined(again)] == [1, 3]


@pytest.mark.req("P.11")
def test_steps_of_any_size_end_in_the_same_rows(
    spark: SparkSession, tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "next_step", partial(next_step, rows_max=1))
    context = configured(spark, tmp_path, c=Extract("c", "n INT"), all=Extract("#", "n INT"))
    for n in range(3):
        writer.tick([run(b"c", b'{"n": %d}' % n), run(b"d", b"bad")])
        archived(context)
    assert [(batch.rows, batch.quarantined) for batch in drain(extract, context)] == [(4, 1)] * 3
    for name in ("json_c", "json_all"):
        assert table(context, name, "position", "n") == [(0, 0), (2, 1), (4, 2)]
    assert quarantined(context) == [(n, NOT_JSON, "json_all") for n in (1, 3, 5)]


@pytest.mark.req("P.11")
def test_other_columns_or_another_filter_begin_another_table(
    spark: SparkSession, tmp_path: Path, writer: LogWriter
) -> None:
    def extracted(filter: str, columns: str) -> list[str]:
        context = configured(spark, tmp_path, c=Extract(filter, columns))
        drain(extract, archived(context))
        return context.lake.names()

    writer.tick([run(b"c", b'{"n": 1, "m": 2}')])
    assert "json_c_2" not in extracted("c", "n INT")
    assert "json_c_2" not in extracted("c", " n   int ")  # the same
    assert "json_c_3" not in extracted("c", "n INT, m INT")
    assert "json_c_3" in extracted("#", "n INT, m INT")
    writer.tick([run(b"c", b'{"n": 3, "m": 4}')])
    extracted("c", "n INT")  # goes on where it was
    context = configured(spark, tmp_path)
    assert table(context, "json_c", "position", "n") == [(0, 1), (1, 3)]
    assert table(context, "json_c_2", "position", "n", "m") == [(0, 1, 2)]
    assert table(context, "json_c_3", "position", "n", "m") == [(0, 1, 2)]
    assert "json_c_4" not in context.lake.names()


@pytest.mark.req("P.11")
@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ("n NUMBER OF THINGS", "not a list of columns"),
        ("n DECIMAL(10, 2)", "n cannot be decimal"),
        ("a ARRAY<STRUCT<x: MAP<STRING, DECIMAL(3, 1)>>>", r"a cannot be decimal\(3,1\)"),
        ("v VARIANT", "v cannot be variant"),
        ("Topic STRING", "the column Topic is there already"),
        ("n INT, N INT", "the column N is there already"),
        ("`a b` INT", "no name for a column"),
    ],
)
def test_columns_that_cannot_be_are_refused_naming_the_setting(spark: SparkSession, columns: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"extract\.c\.columns: .*{why}"):
        extract.columns_of("c", Extract("c", columns))


@pytest.mark.req("P.11")
def test_an_extract_that_fails_does_not_stop_the_others(spark: SparkSession, tmp_path: Path, writer: LogWriter) -> None:
    writer.tick([run(b"c", b'{"n": 1}')])
    context = configured(spark, tmp_path, bad=Extract("c", "n WRONG"), c=Extract("c", "n INT"))
    with pytest.raises(ConfigError, match="bad"):
        extract.run(archived(context))
    assert table(context, "json_c", "n") == [(1,)]


@pytest.mark.req("P.11")
def test_without_extracts_there_is_nothing_to_do(spark: SparkSession, tmp_path: Path, writer: LogWriter) -> None:
    writer.messages(1)
    assert extract.run(archived(configured(spark, tmp_path))) is None
