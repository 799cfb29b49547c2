"""Compaction: the same rows in fewer files, whatever else happens to the table meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from jobs_kit import Killed, context_of, drain, kill_at_commit
from lake_rows import aged, disjoint, fill, messages, positions, reopened, stored
from log_writer import LogWriter
from pyspark.sql import SparkSession

from tidegate.pipeline.jobs import Context, archive, compaction, traffic
from tidegate.pipeline.lake import LakeFile
from tidegate.pipeline.parquet import FILE_BYTES_MAX, FILE_ROWS_MAX
from tidegate.pipeline.schemas import TABLES


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> Context:
    return context_of(spark, tmp_path)


@pytest.mark.req("P.3")
def test_small_files_become_one_with_the_same_rows(context: Context) -> None:
    lake = context.lake
    given = fill(lake, files=30, rows=20)
    before = lake.progress("messages", "archive")
    [batch] = drain(compaction, context)
    assert batch.rows == 600
    [file] = lake.files("messages")
    assert (file.min_position, file.max_position, file.rows) == (0, 599, 600)
    assert stored(lake) == given.sort_by("position").to_pylist()
    assert disjoint(lake)
    assert lake.progress("messages", "archive") == before
    newest = sorted((lake.folder / "messages" / "_delta_log").glob("*.json"))[-1]
    actions = [json.loads(line) for line in newest.read_text().splitlines()]
    changes = [action[kind]["dataChange"] for action in actions for kind in ("add", "remove") if kind in action]
    assert changes and not any(changes)  # nobody who follows the table need look
    for i in range(30, 50):
        lake.append("messages", messages(range(20 * i, 20 * i + 20)), app="archive", version=i + 1)
    drain(compaction, context)  # the one that was made before, and new ones
    [file] = lake.files("messages")
    assert positions(lake) == list(range(1000))


@pytest.mark.req("P.3")
def test_tables_without_topics_are_compacted_as_well(context: Context) -> None:
    lake = context.lake
    for i in range(20):
        row = {"place": i, "ordinal": 0, "time": i, "position": i, "kind": "gone", "number": i}
        lake.append("sessions", pa.Table.from_pylist([row], TABLES["sessions"]), app="archive", version=i + 1)
    before = stored(lake, "sessions")
    drain(compaction, context)
    assert len(lake.files("sessions")) == 1
    assert stored(lake, "sessions") == before and len(before) == 20


@pytest.mark.req("P.3")
@pytest.mark.attack("C11")
def test_archive_and_compaction_at_the_same_time_lose_and_repeat_nothing(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "FILES_MIN", 3)
    writer = LogWriter(tmp_path / "log", segment_bytes=32 << 10)
    written = threading.Event()
    failures: list[BaseException] = []

    def archiving() -> None:
        try:
            for i in range(15):
                writer.messages(50, start=50 * i)
                archive.run(context)
        except BaseException as error:
            failures.append(error)
        finally:
            written.set()

    thread = threading.Thread(target=archiving)
    thread.start()
    compacted = 0
    while not written.is_set():
        compacted += len(drain(compaction, context))
        written.wait(0.05)
    thread.join()
    compacted += len(drain(compaction, context))
    assert not failures
    assert compacted > 1
    assert positions(context.lake) == list(range(750))
    assert disjoint(context.lake)
    assert context.lake.progress("messages", "archive") == context.log.end().place


@pytest.mark.attack("C11")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compaction_that_is_cut_off_changes_no_row(
    context: Context, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    given = fill(context.lake, files=20, rows=10).sort_by("position").to_pylist()
    kill_at_commit(monkeypatch, "messages", when)
    with pytest.raises(Killed):
        compaction.run(context)
    reborn = reopened(context)
    assert stored(reborn.lake) == given
    drain(compaction, reborn)
    assert stored(reborn.lake) == given
    assert len(reborn.lake.files("messages")) == 1


@pytest.mark.attack("C11", "C15")
def test_vacuum_deletes_what_nothing_names_any_more_and_nothing_else(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = context.lake
    given = fill(lake, files=20, rows=10).sort_by("position").to_pylist()
    folder = lake.folder / "messages"
    named = {file.path for file in lake.files("messages")}
    with monkeypatch.context() as past:
        past.setattr("tidegate.pipeline.lake.time.time", lambda: time.time_ns() / 1e9 - 7200)
        compaction.run(context)  # two hours ago
    (folder / "_damaged").mkdir()
    kept = folder / "_damaged" / "part-0.parquet"
    kept.write_bytes(b"kept for a look")
    aged(kept, 7200)
    leftover = folder / "part-00000000-0000-0000-0000-000000000000.parquet"  # of a worker that was killed
    leftover.write_bytes(b"half a file")
    aged(leftover, 7200)
    at_work = folder / "part-11111111-1111-1111-1111-111111111111.parquet"  # of one that is just writing
    at_work.write_bytes(b"half a fi")
    drain(compaction, context)
    assert not leftover.exists()
    assert not any((folder / name).exists() for name in named)
    assert at_work.exists() and kept.exists()
    assert stored(reopened(context).lake) == given


@pytest.mark.attack("C11")
def test_files_that_were_just_replaced_are_left_for_those_who_read_them(context: Context) -> None:
    lake = context.lake
    fill(lake, files=20, rows=10)
    reading = lake.read(context.spark, "messages")
    drain(compaction, context)
    assert len(lake.files("messages")) == 1
    assert reading.count() == 200


@pytest.mark.req("P.9", "P.11")
def test_who_follows_the_table_takes_the_new_rows_alone_and_says_so(context: Context) -> None:
    lake = context.lake
    fill(lake, files=20, rows=10)
    drain(traffic, context)
    lake.append("messages", messages(range(200, 207)), app="archive", version=21)
    drain(compaction, context)
    assert len(lake.files("messages")) == 1
    [batch] = drain(traffic, context)
    assert (batch.rows, batch.reached) == (7, 207)
    assert sum(row["messages"] for row in stored(lake, "traffic_minutely")) == 207


def _file(i: int, rows: int, size: int) -> LakeFile:
    return LakeFile(f"part-{i}.parquet", rows, size, {"position": i}, {"position": i})


def test_groups_are_neighbours_and_no_larger_than_a_file() -> None:
    rnd = random.Random(1)
    files = [_file(i, int(10 ** rnd.uniform(0, 5.8)), int(10 ** rnd.uniform(2, 7.5))) for i in range(3000)]
    data = {file.path: int(file.bytes * rnd.uniform(1, 30)) for file in files}
    found = compaction.groups(files, lambda file: data[file.path])
    assert found
    for group in found:
        first = group[0].min_position
        assert [file.min_position for file in group] == list(range(first, first + len(group)))
        assert sum(file.rows for file in group) <= FILE_ROWS_MAX
        assert sum(data[file.path] for file in group) <= FILE_BYTES_MAX
        assert len(group) >= compaction.FILES_MIN


def test_files_that_are_small_only_because_they_compress_well_are_left_alone() -> None:
    """They would come out as they went in, again and again."""
    files = [_file(i, 16_000, 10_000) for i in range(100)]
    assert compaction.groups(files, lambda file: FILE_BYTES_MAX) == []


def test_what_is_left_over_is_reported_as_lag(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SMALL_ROWS", 30)
    lake = context.lake
    fill(lake, files=16, rows=10)
    lake.append("messages", messages(range(160, 200)), app="archive", version=17)  # not small: two groups
    for i in range(16):
        lake.append("messages", messages(range(200 + 10 * i, 210 + 10 * i)), app="archive", version=18 + i)
    first, second = drain(compaction, context)
    assert (first.rows, first.lag_rows) == (160, 160)
    assert (second.rows, second.lag_rows) == (160, 0)
    assert [file.rows for file in lake.files("messages")] == [160, 40, 160]
