"""A lake that was damaged, torn by power loss, or has no room: nothing is read wrongly, what the log still has is not
lost, what is lost is told, and the jobs go on (C12).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from jobs_kit import context_of, drain
from lake_rows import disjoint, fill, messages, positions, reopened, stored
from log_writer import LogWriter, run
from pyspark.sql import SparkSession

from peers import small_disk
from tidegate.config import Config, Pipeline
from tidegate.errors import StorageError
from tidegate.pipeline import damage as damage_module
from tidegate.pipeline import driver as driver_module
from tidegate.pipeline import lake as lake_module
from tidegate.pipeline.damage import REASON
from tidegate.pipeline.driver import Driver
from tidegate.pipeline.handover import handover_file, tell_broker
from tidegate.pipeline.jobs import Context, archive, cleaner, compaction, retained, traffic
from tidegate.pipeline.lake import CHECKPOINT_COMMITS, Lake, LakeDamaged
from tidegate.pipeline.parquet import FileDamaged, read_file
from tidegate.pipeline.schemas import TABLES
from tidegate.pipeline.status import read_status

ROUNDS, ROWS = 4, 100
PATIENCE_S = 60.0


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path / "log", segment_bytes=2048)  # a segment for each round


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path, writer: LogWriter) -> Context:
    """A lake of four files, made from a log that is still there."""
    context = context_of(spark, tmp_path)
    for i in range(ROUNDS):
        writer.messages(ROWS, start=ROWS * i)
        archive.run(context)
    assert len(context.lake.files("messages")) == ROUNDS
    return context


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    """In every column."""
    raw = bytearray(path.read_bytes())
    for at in range(100, len(raw) // 2, 16):
        raw[at] ^= 0x10
    path.write_bytes(raw)


DAMAGE = [truncated, emptied, flipped, Path.unlink]
Damage = Callable[[Path], None]


def run_once(monkeypatch: pytest.MonkeyPatch, context: Context, *jobs: Any, code: int = 0) -> dict[str, Any]:
    """A driver with some of the jobs. Returns their status."""
    monkeypatch.setattr(driver_module, "JOBS", (archive, *jobs))
    assert Driver(context.config, context.spark).run(once=True) == code
    status = read_status(context.data)
    assert status is not None
    found: dict[str, Any] = status["jobs"]
    return found


def quarantine(lake: Lake) -> list[tuple[str, str, int | None, int | None]]:
    return [(r["reason"], r["detail"], r["first_position"], r["last_position"]) for r in stored(lake, "quarantine")]


# ── files ──


@pytest.mark.attack("C12")
@pytest.mark.req("P.3", "P.11")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again_from_the_log(
    context: Context, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    before = stored(context.lake)
    broken = context.lake.files("messages")[1]
    damage(context.lake.path("messages", broken))
    jobs = run_once(monkeypatch, context, traffic)
    lake = Lake(context.lake.folder)
    assert stored(lake) == before
    assert disjoint(lake)
    assert (jobs["traffic"]["state"], jobs["traffic"]["quarantined"], jobs["traffic"]["failures"]) == ("ok", 1, 1)
    assert sum(row["messages"] for row in stored(lake, "traffic_minutely")) == ROUNDS * ROWS
    detail = f"messages/{broken.path}: {ROWS} rows, made again"
    assert quarantine(lake) == [(REASON, detail, ROWS, 2 * ROWS - 1)]
    assert (lake.folder / "messages" / "_damaged" / broken.path).exists() == (damage is not Path.unlink)


@pytest.mark.attack("C12")
@pytest.mark.req("P.11")
@pytest.mark.parametrize("damage", [flipped, Path.unlink])
def test_what_the_log_does_not_have_any_more_is_lost_and_told(
    context: Context, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    before = stored(context.lake)
    for path in sorted((context.data / "log").glob("*.log"))[:-1]:
        path.unlink()  # the broker has trimmed its log
    broken = context.lake.files("messages")[1]
    damage(context.lake.path("messages", broken))
    jobs = run_once(monkeypatch, context, traffic)
    lake = Lake(context.lake.folder)
    assert stored(lake) == before[:ROWS] + before[2 * ROWS :]
    assert jobs["traffic"]["state"] == "ok"
    assert quarantine(lake) == [(REASON, f"messages/{broken.path}: {ROWS} rows, lost", ROWS, 2 * ROWS - 1)]
    assert lake.end() == ROUNDS * ROWS
    told = json.loads(handover_file(context.data).read_text())
    assert told["lost"] == [{"first": ROWS, "last": 2 * ROWS - 1, "messages": ROWS}]


def test_of_damaged_files_only_the_newest_are_kept(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = context.lake.files("messages")[1:3]
    monkeypatch.setattr(damage_module, "KEPT_BYTES_MAX", broken[1].bytes + 10)
    for file in broken:
        flipped(context.lake.path("messages", file))
        assert damage_module.set_aside_named(context, "a job", StorageError(f"messages/{file.path} is bad"))
    assert [each.name for each in (context.lake.folder / "messages" / "_damaged").iterdir()] == [broken[1].path]


def test_of_torn_commits_only_the_newest_are_kept(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_module, "TORN_MAX", 2)
    log = context.lake.folder / "messages" / "_delta_log"
    for number in range(100, 105):
        (log / f"{number:020d}.json").write_text("{")
        assert Lake(context.lake.folder).rows("messages") == ROUNDS * ROWS
    assert sorted(path.name for path in log.glob("*.torn")) == [f"{number:020d}.torn" for number in (103, 104)]


@pytest.mark.attack("C12")
@pytest.mark.req("P.3")
def test_no_flipped_bit_is_read_as_if_nothing_had_happened(context: Context, tmp_path: Path) -> None:
    rnd = random.Random(3)
    lake = context.lake
    file = lake.files("messages")[0]
    path = lake.path("messages", file)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8  # where pages and columns are; has no checksum
    columns = ("position", "time", "topic", "payload", "publisher", "qos")
    rows = lake.read(context.spark, "messages").select(*columns).orderBy("position").collect()
    table = read_file(path)
    noticed = 0
    for i in range(200):
        raw = bytearray(whole)
        raw[rnd.randrange(len(raw) - footer)] ^= 1 << rnd.randrange(8)
        path.write_bytes(raw)
        try:
            assert read_file(path).equals(table)
        except FileDamaged as error:
            assert file.path in str(error)
            noticed += 1
        if i % 20:
            continue
        try:
            assert lake.read(context.spark, "messages").select(*columns).orderBy("position").collect() == rows
        except AssertionError:
            raise
        except Exception as error:
            assert file.path in str(error)
    assert noticed > 100


@pytest.mark.attack("C12")
@pytest.mark.parametrize("damage", [truncated, emptied, Path.unlink])
def test_a_file_that_is_gone_or_shorter_is_noticed_before_spark_takes_it_for_no_rows(
    context: Context, damage: Damage
) -> None:
    file = context.lake.files("messages")[2]
    damage(context.lake.path("messages", file))
    with pytest.raises(FileDamaged, match=file.path):
        context.lake.read(context.spark, "messages")
    assert context.lake.read(context.spark, "messages", positions=(0, 2 * ROWS)).count() == 2 * ROWS


@pytest.mark.attack("C12")
@pytest.mark.parametrize("damage", [flipped, Path.unlink])
def test_compaction_goes_on_without_a_file_that_it_cannot_read(
    context: Context, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    monkeypatch.setattr(compaction, "FILES_MIN", 3)
    before = stored(context.lake)
    damage(context.lake.path("messages", context.lake.files("messages")[3]))
    jobs = run_once(monkeypatch, context, compaction)
    assert (jobs["compaction"]["state"], jobs["compaction"]["quarantined"]) == ("ok", 1)
    lake = Lake(context.lake.folder)
    assert len(lake.files("messages")) == 1
    assert stored(lake) == before


@pytest.mark.attack("C12")
@pytest.mark.req("P.5")
def test_retained_messages_are_made_again_from_all_messages(
    context: Context, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.tick([run(b"r/1", b"old", flags=0b101), run(b"r/2", b"2", flags=0b101), run(b"r/1", b"1", flags=0b101)])
    run_once(monkeypatch, context, retained)
    before = stored(Lake(context.lake.folder), "retained")
    assert [(row["topic"], row["payload"]) for row in before] == [("r/2", b"2"), ("r/1", b"1")]
    [file] = context.lake.files("retained")
    flipped(context.lake.path("retained", file))
    writer.tick([run(b"r/3", b"3", flags=0b101)])
    jobs = run_once(monkeypatch, context, retained)
    assert (jobs["retained"]["state"], jobs["retained"]["quarantined"]) == ("ok", 1)
    lake = Lake(context.lake.folder)
    assert stored(lake, "retained")[:2] == before
    assert [row["topic"] for row in stored(lake, "retained")] == ["r/2", "r/1", "r/3"]
    assert "made again" in quarantine(lake)[0][1]


@pytest.mark.attack("C12")
@pytest.mark.req("P.11")
def test_damage_to_quarantine_and_verdicts_stops_nothing(
    context: Context, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = context.lake
    row = {"time": 0, "job": "archive", "reason": "", "detail": ""}
    lake.append("quarantine", pa.Table.from_pylist([row], TABLES["quarantine"]), app="test", version=1)
    names = TABLES["abuse_verdicts"].names
    verdict = {name: "" if TABLES["abuse_verdicts"].field(name).type == pa.string() else 0 for name in names}
    lake.append("abuse_verdicts", pa.Table.from_pylist([verdict], TABLES["abuse_verdicts"]), app="test", version=1)
    for name in ("quarantine", "abuse_verdicts"):
        flipped(lake.path(name, lake.files(name)[0]))
    writer.messages(10)
    jobs = run_once(monkeypatch, context, cleaner)
    assert {name: (job["state"], job["quarantined"]) for name, job in jobs.items()} == {
        "archive": ("ok", 1),
        "cleaner": ("ok", 1),
    }
    assert lake.rows("messages") == ROUNDS * ROWS + 10
    assert {detail.split("/")[0] for _, detail, _, _ in quarantine(lake)} == {"abuse_verdicts", "quarantine"}


# ── Delta's log ──


def newest_commit(lake: Lake, name: str = "messages") -> Path:
    return sorted((lake.folder / name / "_delta_log").glob("*.json"))[-1]


def torn_after_lines(lines: int) -> Damage:
    def tear(path: Path) -> None:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))

    tear.__name__ = f"torn after {lines} lines"
    return tear


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.attack("C12")
@pytest.mark.req("P.3")
@pytest.mark.parametrize("both", [False, True], ids=["the last", "both"])
@pytest.mark.parametrize(
    "damage", [emptied, zeroed, truncated, torn_after_lines(1), torn_after_lines(2), torn_after_lines(3), Path.unlink]
)
def test_a_commit_that_power_loss_left_torn_or_took_away_is_made_again(
    spark: SparkSession, tmp_path: Path, both: bool, damage: Damage
) -> None:
    """Of the two tables of the last round, both lose their commit, or only the second does."""
    context = context_of(spark, tmp_path)
    writer = LogWriter(tmp_path / "log")
    session = b"\x01" * 3
    for i in range(3):
        writer.tick([run(b"t", b"%d" % i)], [session])  # no record that makes sense: a row of quarantine
        archive.run(context)
    damage(newest_commit(context.lake))
    if both:
        damage(newest_commit(context.lake, "quarantine"))
    writer.tick([run(b"t", b"3")], [session])
    reborn = reopened(context)
    drain(archive, reborn)
    assert positions(reborn.lake) == list(range(4))
    assert len(quarantine(reborn.lake)) == 4
    assert reborn.lake.progress("messages", "archive") == context.log.end().place
    assert disjoint(reborn.lake)


@pytest.fixture(scope="module")
def summed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake whose log has been summed up, and has gone on since."""
    folder = tmp_path_factory.mktemp("summed") / "lake"
    fill(Lake(folder), files=CHECKPOINT_COMMITS + 2, rows=2)
    assert list((folder / "messages" / "_delta_log").glob("*.checkpoint.parquet"))
    return folder


@pytest.mark.attack("C12")
@pytest.mark.req("P.3")
@pytest.mark.parametrize("name", ["*.checkpoint.parquet", "_last_checkpoint"])
@pytest.mark.parametrize("damage", [emptied, zeroed, truncated, Path.unlink])
def test_a_summary_of_the_log_that_is_torn_or_gone_is_done_without(
    summed_up: Path, tmp_path: Path, name: str, damage: Damage
) -> None:
    folder = tmp_path / "lake"
    shutil.copytree(summed_up, folder)
    [path] = (folder / "messages" / "_delta_log").glob(name)
    damage(path)
    lake = Lake(folder)
    assert lake.progress("messages", "archive") == CHECKPOINT_COMMITS + 2
    assert lake.rows("messages") == 2 * (CHECKPOINT_COMMITS + 2)
    lake.append("messages", messages(range(1000, 1001)), app="archive", version=1000)
    assert Lake(folder).rows("messages") == 2 * (CHECKPOINT_COMMITS + 2) + 1


@pytest.mark.attack("C12")
@pytest.mark.req("P.3")
def test_after_a_torn_summary_the_log_is_summed_up_again(summed_up: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lake"
    shutil.copytree(summed_up, folder)
    [first] = (folder / "messages" / "_delta_log").glob("*.checkpoint.parquet")
    truncated(first)
    lake = Lake(folder)
    for i in range(CHECKPOINT_COMMITS):
        lake.append("messages", messages(range(1000 + i, 1001 + i)), app="archive", version=1000 + i)
    [second] = (folder / "messages" / "_delta_log").glob("*.checkpoint.parquet")
    assert second.name > first.name
    assert Lake(folder).rows("messages") == 3 * CHECKPOINT_COMMITS + 4


@pytest.mark.attack("C12")
def test_a_log_with_a_commit_missing_in_its_middle_is_told_and_left_as_it_is(
    context: Context, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(monkeypatch, context, traffic)
    log = context.lake.folder / "traffic_minutely" / "_delta_log"
    writer.messages(10)
    run_once(monkeypatch, context, traffic)
    commits = sorted(log.glob("*.json"))
    commits[-2].rename(log / "elsewhere")
    names = sorted(path.name for path in log.iterdir())
    writer.messages(10)
    jobs = run_once(monkeypatch, context, traffic, code=1)
    assert jobs["archive"]["state"] == "ok"
    assert jobs["traffic"]["state"] == "failing" and "traffic_minutely" in jobs["traffic"]["last_error"]
    assert sorted(path.name for path in log.iterdir()) == names
    assert Lake(context.lake.folder).rows("messages") == ROUNDS * ROWS + 20
    with pytest.raises(LakeDamaged, match="traffic_minutely"):
        Lake(context.lake.folder).files("traffic_minutely")


@pytest.mark.attack("C11")
def test_a_driver_that_was_killed_while_it_made_a_table_leaves_nothing_in_the_way(context: Context) -> None:
    (context.lake.folder / "traffic_minutely" / "_delta_log").mkdir(parents=True)
    lake = Lake(context.lake.folder)
    assert "traffic_minutely" not in lake.names()
    assert traffic.run(reopened(context)) is not None
    assert sum(row["messages"] for row in stored(lake, "traffic_minutely")) == ROUNDS * ROWS


# ── power loss that takes part of the log ──


@pytest.mark.req("P.3")
def test_before_the_lake_takes_from_a_segment_the_segment_is_on_disk(
    context: Context, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a broker could give its number to another after power loss, and the archive would go on in its middle."""
    done: list[str] = []
    commit, fsync = Lake.commit, os.fsync

    def committing(self: Lake, name: str, *given: Any, **named: Any) -> None:
        done.append(f"commit {name}")
        commit(self, name, *given, **named)

    def syncing(fd: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(Lake, "commit", committing)
    monkeypatch.setattr(os, "fsync", syncing)
    log = context.data / "log"
    writer.messages(ROWS)
    archive.run(context)
    newest = str(sorted(log.glob("*.log"))[-1])
    assert done.index(newest) < done.index("commit messages")
    assert done.index(str(log)) < done.index("commit messages")


@pytest.mark.req("P.3")
def test_a_log_that_lost_its_end_after_it_was_archived_is_gone_on_with(spark: SparkSession, tmp_path: Path) -> None:
    context = context_of(spark, tmp_path)
    writer = LogWriter(tmp_path / "log")
    for _ in range(3):
        writer.messages(ROWS)
    archive.run(context)
    writer.close(clean=False)
    [newest] = (tmp_path / "log").glob("*.log")
    os.truncate(newest, newest.stat().st_size - 100)  # the lake was synced, the end of this was not
    again = LogWriter(tmp_path / "log")
    first = again.messages(ROWS)
    reborn = context_of(spark, tmp_path)
    drain(archive, reborn)
    assert positions(reborn.lake) == [*range(3 * ROWS), *range(first, first + ROWS)]
    assert quarantine(reborn.lake) == []


def test_an_older_copy_of_the_log_is_refused(context: Context, writer: LogWriter, tmp_path: Path) -> None:
    """Its positions would mean something else than those in the lake."""
    writer.close()
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    writer = LogWriter(tmp_path / "log", segment_bytes=2048)
    for _ in range(3):
        writer.messages(ROWS)
    drain(archive, context)
    before = stored(context.lake)
    writer.close()
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "copy").rename(tmp_path / "log")
    other = f"w = LogWriter(Path({str(tmp_path / 'log')!r}), 2048); [w.messages({ROWS}) for _ in range(6)]; w.close()"
    prelude = "from pathlib import Path; from log_writer import LogWriter; "
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", prelude + other], check=True, env=environment)
    with pytest.raises(archive.LogReplaced, match=r"segment 7 .*pipeline\.lake"):
        archive.run(context_of(context.spark, tmp_path))
    assert stored(context.lake) == before


# ── no room, no right ──


def pythons() -> list[psutil.Process]:
    """Spark's Python workers, and what they are forked from."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [child] if "pyspark.daemon" in child.cmdline() else []
    return found


class SmallDisk:
    """A file system of its own for the lake; a second file takes the room."""

    def __init__(self, lake: Path) -> None:
        self.ballast = lake / "ballast"

    def fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def relieve(self) -> None:
        self.ballast.unlink()


class SmallFiles:
    """No worker may write a file of any size."""

    def __init__(self) -> None:
        self.hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def fill(self) -> None:
        limited = 0
        for each in pythons():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (100, self.hard))
                limited += 1
        assert limited

    def relieve(self) -> None:
        for each in pythons():  # also those that were forked meanwhile
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (self.hard, self.hard))


@pytest.fixture(params=["small disk", "small files"])
def scarcity(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk | SmallFiles]:
    if request.param == "small files":
        yield SmallFiles()
        return
    lake = tmp_path / "data" / "lake"
    with small_disk(lake, "8m"):
        yield SmallDisk(lake)


@pytest.mark.req("P.3", "P.11")
def test_without_room_the_archive_tells_it_and_goes_on_when_there_is_some(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scarcity: SmallDisk | SmallFiles
) -> None:
    monkeypatch.setattr(driver_module, "JOBS", (archive, compaction))
    monkeypatch.setattr(driver_module, "RETRY_MAX_S", 1.0)
    config = Config(data=tmp_path / "data", pipeline=Pipeline(archive_interval_s=0))
    context = context_of(spark, config.data)
    writer = LogWriter(config.data / "log", segment_bytes=64 << 10)
    writer.messages(1000)
    archive.run(context)
    tell_broker(config.data, context.lake, archive.archived_to(context.lake))
    told = handover_file(config.data).read_text()
    writer.messages(5000, size=100)
    scarcity.fill()
    driver = Driver(config, spark)
    job = driver._book.status.jobs["archive"]
    seen: list[tuple[str | None, str, int]] = []

    def watch() -> None:
        try:
            until(lambda: job.failures >= 2)
            rows = Lake(config.lake_folder).rows("messages")
            seen.append((job.last_error, handover_file(config.data).read_text(), rows))
        finally:
            scarcity.relieve()
        try:
            until(lambda: Lake(config.lake_folder).rows("messages") == 6000)
        finally:
            driver.stopping.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert driver.run() == 0
    watcher.join()
    [(error, while_full, rows)] = seen
    assert error and ("space" in error or "too large" in error or "Errno 27" in error), error
    assert (while_full, rows) == (told, 1000)  # the broker was promised nothing
    lake = Lake(config.lake_folder)
    assert positions(lake) == list(range(6000))
    assert json.loads(handover_file(config.data).read_text())["archived_position"] == 6000
    status = read_status(config.data)
    assert status is not None and status["jobs"]["archive"]["state"] == "ok"


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to be"
        time.sleep(0.02)


@pytest.mark.req("P.11")
def test_a_lake_that_cannot_be_written_is_told_with_its_folder(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where a folder should: a right that root would have anyway cannot be taken from a test."""
    context = context_of(spark, tmp_path)
    LogWriter(tmp_path / "log").messages(10)
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "messages").write_text("")
    jobs = run_once(monkeypatch, context, code=1)
    assert jobs["archive"]["state"] == "failing"
    assert str(tmp_path / "lake" / "messages") in jobs["archive"]["last_error"]
    (tmp_path / "lake" / "messages").unlink()
    run_once(monkeypatch, context)
    assert positions(Lake(tmp_path / "lake")) == list(range(10))
    with pytest.raises(StorageError):
        Lake(tmp_path / "nowhere").description("messages")
