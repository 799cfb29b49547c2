"""What the pipeline tells the broker: read when it changes, believed when it makes sense."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lake_tools import TestLake, rows_table
from tidegate.adapters.embedded import archive as archive_module
from tidegate.adapters.embedded.archive import LakeArchive
from tidegate.limits import VERDICTS_MAX
from tidegate.log.reading import Read
from tidegate.ports.archive import NOTHING, Archived

MESSAGES = [{"position": i, "topic": "a", "time": 1000 * i} for i in range(10, 110)]


class Watched:
    """An archive and what it reported."""

    def __init__(self, data: Path, log_end: int = 1 << 40) -> None:
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.archive = LakeArchive(
            data,
            lambda: log_end,
            loop=asyncio.get_running_loop(),
            report=lambda event, fields: self.reports.append((event, dict(fields))),
        )
        self.archive.open()

    async def poll(self) -> Archived | None:
        """Look, and wait until everything that follows from it has happened."""
        self.archive.poll()
        while self.archive._looking or self.archive._refreshing:
            await asyncio.sleep(0.001)
        return self.archive.archived

    async def read(self, start: int, end: int) -> Read:
        done: asyncio.Future[Read] = asyncio.get_running_loop().create_future()
        self.archive.read(start, end, 1 << 20, None, done.set_result)
        return await done

    def events(self) -> list[str]:
        return [event for event, _ in self.reports]


@pytest.fixture
async def watch():
    opened: list[Watched] = []

    def open_archive(data: Path, **more: Any) -> Watched:
        opened.append(Watched(data, **more))
        return opened[-1]

    yield open_archive
    for each in opened:
        each.archive.close()


Watch = Callable[..., Watched]


def lake_in(data: Path) -> TestLake:
    lake = TestLake(data)
    lake.add(rows_table(MESSAGES))
    lake.segment, lake.position = 5, 110
    return lake.tell()


async def test_without_a_note_there_is_no_archive(watch: Watch, tmp_path):
    watched = watch(tmp_path)
    assert watched.archive.archived is None
    assert await watched.poll() is None
    assert watched.reports == []


async def test_a_note_that_is_there_is_known_before_anybody_is_served(watch: Watch, tmp_path):
    lake_in(tmp_path)
    assert watch(tmp_path).archive.archived == Archived(5, 110, 10, True, ())


async def test_a_note_that_appears_is_seen_and_so_is_each_new_one(watch: Watch, tmp_path):
    watched = watch(tmp_path)
    lake = lake_in(tmp_path)
    assert await watched.poll() == Archived(5, 110, 10, True, ())
    lake.segment = 6
    lake.tell()
    assert await watched.poll() == Archived(6, 110, 10, True, ())
    (tmp_path / "pipeline" / "to-broker.json").unlink()
    assert await watched.poll() is None


async def test_a_lake_that_holds_nothing_yet_has_no_floor_that_anybody_could_reach(watch: Watch, tmp_path):
    lake = TestLake(tmp_path).tell()
    lake.table()
    assert watch(tmp_path).archive.archived == Archived(0, 0, NOTHING, True, ())


async def test_the_floor_is_known_as_soon_as_an_empty_lake_is_filled(watch: Watch, tmp_path):
    lake = TestLake(tmp_path).tell()
    lake.table()
    watched = watch(tmp_path)
    lake_in(tmp_path)
    assert await watched.poll() == Archived(5, 110, 10, True, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "{}",
        "\x00",
        '{"version": 2}',
        *(
            json.dumps(
                {"version": 1, "archived_segment": 1, "archived_position": 1, "lake": "x", "verdicts": []} | wrong
            )
            for wrong in (
                {"version": "1"},
                {"archived_segment": -1},
                {"archived_segment": "7"},
                {"archived_segment": True},
                {"archived_position": 1.5},
                {"archived_position": 10**13},  # more than this log has
                {"lake": None},
                {"lost": None},
                {"lost": [{"first": 1, "last": 2}]},
                {"lost": [{"first": 1, "last": 2, "messages": -1}]},
                {"verdicts": None},
                {"verdicts": [None]},
                {"verdicts": [{"id": "1"}]},
                {"verdicts": [{"id": 1, "time": "", "rule": "", "client": ""}]},
                {"verdicts": [{"id": "x" * 2**20, "time": "", "rule": "", "client": ""}]},
            )
        ),
    ],
    ids=str,
)
async def test_a_malformed_note_is_reported_once_and_the_last_good_one_stays(watch: Watch, tmp_path, text):
    lake = lake_in(tmp_path)
    watched = watch(tmp_path, log_end=10**12)
    before = watched.archive.archived
    lake.tell_raw(text)
    for _ in range(3):
        assert await watched.poll() == before
    assert watched.events() == ["archive.malformed"]
    lake.segment = 9
    lake.tell()
    assert await watched.poll() == Archived(9, 110, 10, True, ())


@pytest.mark.req("P.6")
@pytest.mark.parametrize("kind", ["malformed", "a folder"])
async def test_a_note_that_was_never_understood_counts_as_an_archive_that_has_nothing(watch: Watch, tmp_path, kind):
    lake = lake_in(tmp_path)
    if kind == "malformed":
        lake.tell_raw("{")
    else:
        (tmp_path / "pipeline" / "to-broker.json").unlink()
        (tmp_path / "pipeline" / "to-broker.json").mkdir()
    watched = watch(tmp_path)
    assert watched.archive.archived == Archived(0, 0, 0, False, ())
    assert await watched.poll() == Archived(0, 0, 0, False, ())
    assert len(watched.reports) == 1


async def test_verdicts_are_taken_newest_last_and_only_so_many(watch: Watch, tmp_path):
    lake = lake_in(tmp_path)
    lake.verdicts = [
        {"id": f"v{i}", "time": f"2026-01-01T{i // 60:02d}:{i % 60:02d}:00", "rule": "topics", "client": f"c{i}"}
        for i in reversed(range(VERDICTS_MAX + 20))
    ]
    lake.tell()
    archived = watch(tmp_path).archive.archived
    assert archived is not None
    assert [verdict.id for verdict in archived.verdicts] == [f"v{i}" for i in range(20, VERDICTS_MAX + 20)]
    assert json.loads(archived.verdicts[0].told) == lake.verdicts[-21]


@pytest.mark.parametrize("package", ["deltalake", "pyarrow"])
async def test_missing_packages_are_named_and_the_lake_counts_as_unreadable(
    watch: Watch, tmp_path, monkeypatch, package
):
    lake = lake_in(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    watched = watch(tmp_path)
    assert watched.archive.archived == Archived(5, 110, NOTHING, False, ())
    for segment in (6, 7):
        lake.segment = segment
        lake.tell()
        await watched.poll()
    ((event, fields),) = watched.reports
    assert event == "lake.unreadable"
    assert package in fields["why"] and "pip install" in fields["why"]


@pytest.mark.attack("C12")
async def test_a_table_that_cannot_be_read_is_reported_and_looked_at_again(watch: Watch, tmp_path):
    lake = lake_in(tmp_path)
    commits = sorted((lake.folder / "_delta_log").glob("*.json"))
    content = commits[-1].read_bytes()
    commits[-1].write_bytes(content[: len(content) // 2])
    watched = watch(tmp_path)
    assert watched.archive.archived == Archived(5, 110, 0, False, ())
    await asyncio.sleep(0)
    assert watched.events() == ["lake.unreadable"]
    commits[-1].write_bytes(content)
    assert await watched.poll() == Archived(5, 110, 10, True, ())


@pytest.mark.req("P.10")
@pytest.mark.attack("C12")
async def test_whoever_asks_while_the_table_cannot_be_read_waits_for_it(watch: Watch, tmp_path):
    lake = lake_in(tmp_path)
    commit = max((lake.folder / "_delta_log").glob("*.json"))
    content = commit.read_bytes()
    commit.write_bytes(b"{")
    watched = watch(tmp_path)
    read = asyncio.ensure_future(watched.read(10, 110))
    sought: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    assert watched.archive.before(50) == 0
    watched.archive.seek(50, sought.set_result)
    await watched.poll()
    assert not read.done() and not sought.done()
    commit.write_bytes(content)
    await watched.poll()
    assert await read == Read([], 10, 0)  # and now it may ask again
    assert await sought == 50


async def test_a_damaged_table_does_not_take_back_what_was_known_of_it(watch: Watch, tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "LISTING_AGE_S", 0.0)
    lake = lake_in(tmp_path)
    watched = watch(tmp_path)
    commits = sorted((lake.folder / "_delta_log").glob("*.json"))
    commits[-1].write_bytes(b"{")
    assert await watched.poll() == Archived(5, 110, 10, True, ())
    assert sum(run.count for run in (await watched.read(10, 110)).runs) == 100
    assert watched.archive.messages_read == 100


async def test_the_lakes_own_retention_raises_the_floor(watch: Watch, tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "LISTING_AGE_S", 0.0)
    lake = lake_in(tmp_path)
    lake.add(rows_table([{"position": 200, "topic": "a"}]))
    watched = watch(tmp_path)
    lake.remove(lake.files()[:1])
    found = await watched.poll()
    assert found is not None and found.floor == 200


async def test_a_read_that_fails_for_the_moment_is_tried_again_and_loses_nothing(watch: Watch, tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "RETRY_S", 0.01)
    lake_in(tmp_path)
    watched = watch(tmp_path)
    lake = watched.archive._lake
    assert lake is not None
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise OSError(24, "Too many open files")

        patched.setattr(lake, "read", fail)
        assert await watched.read(10, 110) == Read([], 10, 0)  # where it was
    assert sum(run.count for run in (await watched.read(10, 110)).runs) == 100
    assert watched.events() == ["lake.unreadable"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_in_a_read_of_the_lake_goes_to_whoever_looks_after_threads(watch: Watch, tmp_path, monkeypatch):
    lake_in(tmp_path)
    watched = watch(tmp_path)
    lake = watched.archive._lake
    assert lake is not None
    told = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda failed: told.set())

    def fail(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(lake, "read", fail)
    watched.archive.read(10, 110, 1000, None, lambda read: None)
    assert await asyncio.to_thread(told.wait, 10)
    assert watched.events() == []


async def test_damaged_files_are_reported_and_counted(watch: Watch, tmp_path):
    lake = lake_in(tmp_path)
    watched = watch(tmp_path)
    lake.files()[0].write_bytes(b"not a file of Parquet")
    assert (await watched.read(10, 110)).damaged == 100
    assert watched.archive.damaged == 100
    assert watched.events() == ["lake.damaged"]


@pytest.mark.attack("C12")
async def test_what_the_pipeline_has_taken_out_for_good_is_counted_by_readers_that_pass_it(
    watch: Watch, tmp_path, monkeypatch
):
    monkeypatch.setattr(archive_module, "LISTING_AGE_S", 1e9)  # the news alone must do
    lake = lake_in(tmp_path)
    lake.add(rows_table([{"position": i, "topic": "a"} for i in range(110, 310)]), rows_per_file=100)
    lake.position = 310
    lake.tell()
    watched = watch(tmp_path)
    lake.lost = [{"first": 110, "last": 209, "messages": 100}]
    lake.tell()
    lake.remove(lake.files()[1:2])
    await watched.poll()
    found = await watched.read(10, 310)
    assert found.runs[0].base == 10 and found.damaged == 100
    assert sum(run.count for run in found.runs) == 200
    assert (await watched.read(150, 310)).damaged == 60
    assert (await watched.read(210, 310)).damaged == 0
    assert watched.archive.damaged == 100 and watched.events() == ["lake.damaged"]


async def test_what_is_gone_and_older_than_all_the_rest_is_a_matter_of_retention(watch: Watch, tmp_path):
    lake = lake_in(tmp_path)
    lake.lost = [{"first": 0, "last": 9, "messages": 10}]
    lake.tell()
    watched = watch(tmp_path)
    assert watched.archive.archived is not None and watched.archive.archived.floor == 10
