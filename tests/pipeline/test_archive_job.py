"""Archive: every message of the log is in the lake once, whatever is cut off when."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import deltalake
import duckdb
import polars
import pytest
from deltalake.exceptions import DeltaError
from log_writer import LogWriter, run, write_damaged
from pyspark.sql import SparkSession

from peers import small_disk
from tidegate.config import Config
from tidegate.pipeline.handover import handover_file, tell_broker
from tidegate.pipeline.jobs import Context, archive
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder
from tidegate.session import changes


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> Context:
    return Context(spark, Lake(tmp_path / "lake"), LogFolder(tmp_path / "log"), tmp_path, Config(data=tmp_path))


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path / "log", segment_bytes=64 << 10)


def drain(context: Context) -> int:
    rows = 0
    while (batch := archive.run(context)) is not None:
        rows += batch.rows
    return rows


def restarted(context: Context) -> Context:
    """As the next driver sees it."""
    return replace(context, lake=Lake(context.lake.folder), log=LogFolder(context.log.folder))


def positions(context: Context) -> list[int]:
    return sorted(row.position for row in context.lake.read(context.spark, "messages").select("position").collect())


@pytest.mark.req("P.1", "P.3")
def test_every_message_is_archived_once(context: Context, writer: LogWriter) -> None:
    assert archive.run(context) is None  # an empty log
    for i in range(30):
        writer.messages(97, start=97 * i)
    assert drain(context) == 30 * 97
    assert archive.run(context) is None
    writer.messages(5)
    writer.tick([], [changes.gone(1)])  # no message, but the log has grown
    assert drain(context) == 5
    assert positions(context) == list(range(30 * 97 + 5))
    files = context.lake.files("messages")
    assert all(a.max_position < b.min_position for a, b in pairwise(files))


@pytest.mark.req("P.3")
def test_rows_are_what_was_published(context: Context, writer: LogWriter) -> None:
    writer.tick([run(b"b", b"2", flags=0b110, publisher=b"me"), run("ü/1".encode(), b"\xff\x00", tenant=b"acme")])
    drain(context)
    rows = [row.asDict() for row in context.lake.read(context.spark, "messages").orderBy("position").collect()]
    assert [(r["position"], r["topic"], r["publisher"], r["tenant"], r["qos"], r["retain"]) for r in rows] == [
        (0, "b", "me", "", 2, True),
        (1, "ü/1", "p", "acme", 1, False),
    ]
    assert [bytes(r["payload"]) for r in rows] == [b"2", b"\xff\x00"]
    assert all(r["uuid"] is r["expiry"] is r["properties"] is None for r in rows)
    assert rows[0]["time"].timestamp() * 1000 == writer.time_ms


@pytest.mark.req("P.3")
@pytest.mark.attack("C11")
@pytest.mark.parametrize("table", ["sessions", "dead_letters", "quarantine", "messages"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_round_that_is_cut_off_at_any_commit_ends_well(
    context: Context, writer: LogWriter, monkeypatch: pytest.MonkeyPatch, table: str, when: str
) -> None:
    class Killed(BaseException):
        pass

    def tick(i: int) -> None:
        letter = changes.Dead(
            reason=changes.DeadReason.EXPIRED, attempts=1, position=i, time_ms=0, qos=1, retain=False, client=b"c",
            tenant=b"", topic=b"t", publisher=b"p", detail=b"", properties=b"", payload=b"x",
        )  # fmt: skip
        session = changes.session(i, True, 4, 0, 0, 0, b"c%d" % i, b"", None)
        writer.tick([run(b"t", b"%d" % i)], [session, changes.dead(letter), b"\xf0 unknown"])

    commit = Lake.commit

    def killed(self: Lake, name: str, *args: object, **named: object) -> None:
        if name == table and when == "before":
            raise Killed
        commit(self, name, *args, **named)  # type: ignore[arg-type]
        if name == table:
            raise Killed

    for i in range(5):
        tick(i)
    with monkeypatch.context() as patch:
        patch.setattr(Lake, "commit", killed)
        with pytest.raises(Killed):
            archive.run(context)
    for i in range(5, 8):
        tick(i)  # the log has grown when the next driver comes
    reborn = restarted(context)
    drain(reborn)
    assert positions(reborn) == list(range(8))
    for name, key in (("sessions", "number"), ("dead_letters", "position"), ("quarantine", "place")):
        rows = reborn.lake.read(reborn.spark, name).collect()
        assert len(rows) == len({row[key] for row in rows}) == 8, name


@pytest.mark.attack("C5")
def test_a_round_fits_the_disk_that_the_lake_is_to_be_made_on(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64m"):
        assert archive.round_bytes(tmp_path / "data" / "lake") == 32 << 20
        (tmp_path / "ballast").write_bytes(bytes(60 << 20))
        assert archive.round_bytes(tmp_path / "data" / "lake") == archive.SPLIT_BYTES_MIN  # it has to try something


@pytest.mark.req("P.3")
@pytest.mark.attack("C11")
def test_of_two_drivers_one_is_refused(context: Context, writer: LogWriter) -> None:
    writer.messages(10)
    drain(context)
    writer.messages(10)

    late = Lake(context.lake.folder)
    place = late.progress("messages", "archive")
    assert place is not None
    with late._table("messages") as stale:
        drain(context)
        with pytest.raises(DeltaError, match=r"[Cc]oncurrent"):
            stale.create_write_transaction(
                [],
                "append",
                stale.schema(),
                commit_properties=deltalake.CommitProperties(
                    app_transactions=[deltalake.Transaction("archive", place + 1)]
                ),
            )
    assert positions(context) == list(range(20))


@pytest.mark.req("P.3", "P.11")
@pytest.mark.attack("C4", "C12")
def test_a_corrupt_frame_goes_to_quarantine_and_the_rest_is_archived(context: Context, tmp_path: Path) -> None:
    write_damaged(tmp_path / "log")
    batch = archive.run(context)
    assert batch is not None and batch.quarantined == 1
    assert positions(context) == [*range(100), *range(200, 300)]
    [row] = context.lake.read(context.spark, "quarantine").collect()
    assert (row.job, row.first_position, row.last_position) == ("archive", 100, 199)
    assert "checksum" in row.reason


@pytest.mark.req("P.11")
def test_segments_that_vanished_before_they_were_archived_are_told(
    context: Context, writer: LogWriter, tmp_path: Path
) -> None:
    writer.messages(10)
    drain(context)
    for i in range(60):
        writer.messages(97, start=97 * i)
    for path in sorted((tmp_path / "log").glob("*.log"))[:2]:
        path.unlink()
    drain(context)
    found = positions(context)
    assert found[:10] == list(range(10))
    assert found[-1] == 10 + 60 * 97 - 1
    [row] = context.lake.read(context.spark, "quarantine").collect()
    assert "missing" in row.reason
    assert row.last_position == found[10] - 1


def test_a_lake_of_another_log_is_refused(context: Context, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", segment_bytes=64 << 10)
    for i in range(60):
        writer.messages(97, start=97 * i)
    drain(context)
    writer.close()
    for path in (tmp_path / "log").iterdir():
        path.unlink()
    LogWriter(tmp_path / "log").messages(1)
    with pytest.raises(archive.LogReplaced, match=r"pipeline\.lake"):
        archive.run(context)


@pytest.mark.req("P.3")
def test_spark_duckdb_and_polars_read_the_same_rows(context: Context, writer: LogWriter) -> None:
    for i in range(10):
        writer.messages(50, start=50 * i)
        archive.run(context)
    path = str(context.lake.folder / "messages")
    spark_rows = [
        (r.position, r.time.timestamp(), r.topic, bytes(r.payload))
        for r in context.lake.read(context.spark, "messages").orderBy("position").collect()
    ]
    table = deltalake.DeltaTable(path)
    messages = table.to_pyarrow_dataset()
    with duckdb.connect() as database:
        database.execute("set timezone = 'UTC'")
        database.register("messages", messages)
        duck_rows = [
            (p, t.timestamp(), topic, payload)
            for p, t, topic, payload in database.sql(
                "select position, time, topic, payload from messages order by position"
            ).fetchall()
        ]
    frame = polars.read_delta(path).sort("position")
    polars_rows = [
        (p, t.timestamp(), topic, payload)
        for p, t, topic, payload in frame.select("position", "time", "topic", "payload").iter_rows()
    ]
    pandas_rows = [
        (r.position, r.time.timestamp(), r.topic, r.payload)
        for r in table.to_pandas().sort_values("position").itertuples()
    ]
    assert spark_rows == duck_rows == polars_rows == pandas_rows
    assert len(spark_rows) == 500


@pytest.mark.attack("C12")
def test_a_torn_commit_is_taken_back(context: Context, writer: LogWriter) -> None:
    """As power loss leaves it: the newest commit was not synced, so nobody was told of it."""
    for i in range(3):
        writer.messages(10, start=10 * i)
        archive.run(context)
    newest = sorted((context.lake.folder / "messages" / "_delta_log").glob("*.json"))[-1]
    newest.write_bytes(newest.read_bytes()[:40])
    reborn = restarted(context)
    assert positions(reborn) == list(range(20))
    drain(reborn)
    assert positions(reborn) == list(range(30))


@pytest.mark.attack("C12")
def test_files_that_no_commit_names_are_nobodys_rows(context: Context, writer: LogWriter) -> None:
    writer.messages(10)
    split = context.log.splits(context.log.start().place, context.log.end().place)[0]
    context.lake.create("messages")
    archive.archive_split(split, str(context.lake.folder))  # a worker that was killed before the driver heard of it
    (context.lake.folder / "messages" / "part-half.parquet").write_bytes(b"PAR1 half a file")
    drain(context)
    assert positions(context) == list(range(10))


@pytest.mark.req("P.6")
def test_the_broker_is_told_how_far_it_may_trim(context: Context, writer: LogWriter, tmp_path: Path) -> None:
    tell_broker(tmp_path, context.lake, archive.archived_to(context.lake))
    told: Callable[[], dict[str, object]] = lambda: json.loads(handover_file(tmp_path).read_text())  # noqa: E731
    assert (told()["archived_segment"], told()["archived_position"]) == (0, 0)
    for i in range(60):
        writer.messages(97, start=97 * i)
    drain(context)
    tell_broker(tmp_path, context.lake, archive.archived_to(context.lake))
    newest = max(int(path.stem) for path in (tmp_path / "log").glob("*.log"))
    assert told()["archived_segment"] == newest
    assert told()["archived_position"] == 60 * 97


@pytest.mark.req("P.3")
def test_delta_s_log_is_summed_up_and_keeps_the_progress(context: Context, writer: LogWriter) -> None:
    for i in range(55):
        writer.messages(1, start=i)
        archive.run(context)
    assert list((context.lake.folder / "messages" / "_delta_log").glob("*.checkpoint*.parquet"))
    reborn = Lake(context.lake.folder)
    assert reborn.progress("messages", "archive") == context.log.end().place
    assert reborn.rows("messages") == 55
