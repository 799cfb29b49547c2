"""Messages read back from the lake: all of them, in order, as they were, whatever happens to the files meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake_tools import TestLake, flip_bytes, rows_table
from tidegate.adapters.embedded import lake as lake_module
from tidegate.adapters.embedded.lake import Lake
from tidegate.log import unreadable
from tidegate.log.index import Wanted
from tidegate.log.run import NO_EXPIRY, Run
from tidegate.router import has_wildcard, literal_prefix, matches

Row = dict[str, Any]
ALL = 1 << 62


@dataclass
class Reading:
    """A lake on disk, the reader's view of it, and what the reader was told."""

    made: TestLake
    lake: Lake
    told: list[tuple[str, dict[str, object]]]

    def all(self, filter: str = "#", start: int = 0, end: int = ALL, bytes_max: int = 2000) -> list[Run]:
        return list(self.steps(filter, start, end, bytes_max))

    def steps(self, filter: str = "#", start: int = 0, end: int = ALL, bytes_max: int = 2000) -> Iterator[Run]:
        """Read on until nothing is left, as a reader that is behind does."""
        wanted = wanted_by(filter)
        while start < end:
            found = self.lake.read(start, end, bytes_max, wanted, archived=ALL)
            self.damaged += found.damaged
            assert found.next_position > start
            start = found.next_position
            yield from found.runs

    damaged = 0


@pytest.fixture
def reading(tmp_path: Path) -> Callable[..., Reading]:
    """Makes a lake of rows in files of so many rows."""

    def make(rows: list[Row], rows_per_file: int = 1000, rows_per_group: int = 1000) -> Reading:
        return lake_of(tmp_path, rows, rows_per_file, rows_per_group)

    return make


def lake_of(data: Path, rows: list[Row], rows_per_file: int, rows_per_group: int) -> Reading:
    made = TestLake(data)
    made.add(rows_table(rows), rows_per_file, rows_per_group)
    told: list[tuple[str, dict[str, object]]] = []
    lake = Lake(made.folder, lambda event, fields: told.append((event, dict(fields))))
    lake.refresh(0)
    return Reading(made, lake, told)


def wanted_by(filter: str) -> Wanted:
    pattern = filter.encode()
    if not has_wildcard(pattern):
        return Wanted(frozenset([pattern]))
    return Wanted(frozenset(), (literal_prefix(pattern),), lambda topic: matches(pattern, topic))


def plain(count: int, topics: int = 7, start: int = 0) -> list[Row]:
    return [
        {"position": i, "time": 1000 * i, "topic": f"t/{i % topics}", "payload": b"%d" % i}
        for i in range(start, start + count)
    ]


def positions(runs: list[Run]) -> list[int]:
    return [run.base + i for run in runs for i in range(run.count)]


def rows_of(runs: list[Run]) -> list[Row]:
    """Runs as the rows that they were made of."""
    return [
        {
            "position": run.base + i,
            "time": run.time_ms * 1000,
            "tenant": run.tenant.decode(),
            "topic": run.topic.decode(),
            "publisher": run.publisher.decode(),
            "qos": run.flags & 3,
            "retain": bool(run.flags & 4),
            "payload": run.payloads[i],
            "uuid": None if run.uuids is None or run.uuids[i] == bytes(16) else run.uuids[i],
            "expiry": None if run.expiries is None or run.expiries[i] == NO_EXPIRY else run.expiries[i],
            "properties": (run.properties[i] if run.properties is not None else b"") or None,
        }
        for run in runs
        for i in range(run.count)
    ]


@st.composite
def lakes(draw: st.DrawFn) -> list[Row]:
    position = draw(st.integers(0, 2**40))
    rows = []
    for gap in draw(st.lists(st.sampled_from([1, 1, 1, 2, 1000, 2**32]), min_size=1, max_size=40)):
        position += gap
        rows.append(
            {
                "position": position,
                "time": 1000 * draw(st.integers(0, 3)) + 10**15,
                "tenant": draw(st.sampled_from(["default", "acme"])),
                "topic": draw(st.sampled_from(["a", "a/b", "a/b/c", "a/c", "b", "grün/1", "$x/a"])),
                "publisher": draw(st.sampled_from(["", "p1"])),
                "qos": draw(st.integers(0, 2)),
                "retain": draw(st.booleans()),
                "payload": draw(st.binary(max_size=40)),
                "uuid": draw(st.none() | st.binary(min_size=16, max_size=16).filter(any)),
                "expiry": draw(st.none() | st.integers(0, 2**32 - 2)),
                "properties": draw(st.none() | st.binary(min_size=1, max_size=9)),
            }
        )
    return rows


@pytest.mark.req("P.10")
@settings(deadline=None, max_examples=60)
@given(
    lakes(),
    st.sampled_from(["#", "a", "a/b", "a/#", "+/b", "a/+/c", "nobody", "nobody/#", "grün/+", "$x/#"]),
    st.integers(1, 10),
    st.integers(1, 5),
    st.integers(1, 600),
)
def test_what_comes_back_is_what_was_archived(
    rows: list[Row], filter: str, rows_per_file: int, rows_per_group: int, bytes_max: int
) -> None:
    wanted = wanted_by(filter)
    with TemporaryDirectory() as folder:
        reading = lake_of(Path(folder), rows, rows_per_file, rows_per_group)
        end = rows[-1]["position"] + 1
        found = reading.all(filter, rows[0]["position"], end, bytes_max)
        assert rows_of(found) == [row for row in rows if wanted(row["topic"].encode())]
        assert reading.damaged == 0 and reading.told == []
        middle = rows[len(rows) // 2]["position"]
        assert positions(reading.all(filter, middle, end, bytes_max)) == [p for p in positions(found) if p >= middle]
        before = reading.all(filter, rows[0]["position"], middle, bytes_max)
        assert positions(before) == [p for p in positions(found) if p < middle]


def test_messages_that_are_alike_and_follow_each_other_come_as_one_run(reading):
    same = [{"position": i, "topic": "a", "payload": b"x"} for i in range(10)]
    assert [(run.base, run.count) for run in reading(same).all()] == [(0, 10)]


@pytest.mark.parametrize("filter", ["#", "a"])
def test_a_run_is_read_in_as_many_pieces_as_the_size_of_a_read_demands(reading, filter):
    found = reading([{"position": i, "topic": "a", "payload": b"%d" % i} for i in range(100)])
    runs = found.all(filter, end=100, bytes_max=1000)
    assert 5 < len(runs) < 10
    assert [row["payload"] for row in rows_of(runs)] == [b"%d" % i for i in range(100)]


def test_a_run_ends_where_anything_changes(reading):
    rows: list[Row] = [{"position": i, "topic": "a"} for i in range(8)]
    for i, change in enumerate(
        [{"topic": "b"}, {"publisher": "q"}, {"tenant": "acme"}, {"qos": 2}, {"retain": True}, {"time": 1000}]
    ):
        rows[i + 1] |= change
    assert [run.count for run in reading(rows).all()] == [1] * 8


def test_two_readers_of_one_file_share_what_was_decoded(reading, monkeypatch):
    found = reading(plain(500), rows_per_file=500)
    decoded: list[Path] = []

    def counting(path: Path, *rest: Any) -> lake_module.Block:
        decoded.append(path)
        return decode(path, *rest)

    decode = lake_module.decode
    monkeypatch.setattr(lake_module, "decode", counting)
    pairs = zip(found.steps("#"), found.steps("t/+"), strict=True)
    assert positions([one for one, _ in pairs]) == list(range(500))
    assert len(decoded) == 1


def test_what_is_kept_decoded_stays_within_its_bound(reading, monkeypatch):
    monkeypatch.setattr(lake_module, "LAKE_CACHE_BYTES_MAX", 50_000)
    found = reading(plain(2000), rows_per_file=100)
    assert positions(found.all()) == list(range(2000))
    assert sum(block.bytes for block in found.lake._blocks.values()) == found.lake._bytes <= 50_000


def test_a_reader_of_one_topic_does_not_touch_the_row_groups_of_others(reading):
    """Shown by damage where it has no business."""
    found = reading(sorted(plain(3000, topics=3), key=lambda row: row["position"]), 3000, 1000)
    (path,) = found.made.files()
    spoil_row_group(path, 2)
    assert positions(found.all("t/0")) == list(range(0, 3000, 3))
    assert positions(found.all("t/1")) == list(range(1, 3000, 3))
    assert found.damaged == 0
    assert positions(found.all("t/2")) == []
    assert found.damaged == 1000


def spoil_row_group(path: Path, number: int) -> None:
    group = pq.ParquetFile(path).metadata.row_group(number)
    column = group.column(0)
    content = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle] ^= 0xFF
    path.write_bytes(content)


def test_a_read_that_finds_nothing_returns_after_a_few_files(reading):
    found = reading(plain(2000), rows_per_file=100)
    first = found.lake.read(0, 2000, 1000, wanted_by("nobody"), ALL)
    assert first.runs == [] and 100 <= first.next_position < 2000
    assert found.all("nobody", end=2000) == []


@pytest.mark.req("P.10")
def test_files_that_are_committed_later_are_found_when_the_archive_has_grown(reading):
    found = reading(plain(100))
    assert found.lake.read(100, 200, 1000, None, archived=0).runs == []  # as far as it knows
    found.made.add(rows_table(plain(100, start=100)))
    assert positions(found.lake.read(100, 200, ALL, None, archived=200).runs) == list(range(100, 200))


def test_a_file_that_no_commit_names_is_not_read(reading):
    found = reading(plain(100))
    (path,) = found.made.files()
    (path.parent / "half-written.parquet").write_bytes(path.read_bytes()[:1000])
    found.lake.refresh(1)
    assert positions(found.all()) == list(range(100))


@pytest.mark.req("P.10")
def test_the_files_that_the_pipeline_writes_are_read(tmp_path):
    """Its own writer and its own commits, without Spark: the format is shared, not only described."""
    from tidegate.pipeline.lake import Lake as PipelineLake
    from tidegate.pipeline.parquet import in_files, write_file

    rows = [row | {"tenant": "default", "publisher": "p", "qos": 1, "retain": False} for row in plain(1000)]
    made = PipelineLake(tmp_path)
    made.create("messages")
    for start in range(0, 1000, 250):
        parts = in_files(rows_table(rows[start : start + 250]).to_batches(), rows_max=100)
        written = [write_file(part.sort_by([("topic", "ascending")]), str(tmp_path / "messages")) for part in parts]
        made.commit("messages", written, app="archive", version=start + 250)
    lake = Lake(tmp_path / "messages", print)
    lake.refresh(1000)
    assert lake.listing.floor == 0
    found: list[Run] = []
    position = 0
    while position < 1000:
        read = lake.read(position, 1000, 5000, wanted_by("t/+"), 1000)
        found += read.runs
        position = read.next_position
    assert [(row["position"], row["topic"], row["payload"]) for row in rows_of(found)] == [
        (row["position"], row["topic"], row["payload"]) for row in rows
    ]
    assert lake.position_at_time(500, 1000) == 500


# ── files that are replaced ──


@pytest.mark.req("P.10")
@pytest.mark.parametrize("filter", ["#", "t/3"])
def test_a_reader_goes_on_in_the_file_that_compaction_has_put_in_the_place_of_others(reading, filter):
    found = reading(plain(3000), rows_per_file=300)
    steps = found.steps(filter, end=3000, bytes_max=5000)
    runs = [next(steps) for _ in range(20)]
    found.made.compact(found.made.files())
    runs += steps
    expected = [i for i in range(3000) if filter == "#" or i % 7 == 3]
    assert positions(runs) == expected and found.damaged == 0 and found.told == []


def test_a_reader_that_the_lakes_retention_has_passed_stays_where_it_is_and_sees_the_new_floor(reading):
    found = reading(plain(3000), rows_per_file=300)
    found.made.remove(found.made.files()[:5])
    read = found.lake.read(0, 3000, 1000, wanted_by("#"), ALL)
    assert (read.runs, read.next_position, read.damaged) == ([], 0, 0)
    assert found.lake.listing.floor == 1500


# ── damage ──


@pytest.mark.attack("C12")
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "no footer", "garbage"])
def test_a_lost_file_is_counted_and_reported_once_and_reading_goes_on_behind_it(reading, damage):
    found = reading(plain(900), rows_per_file=300)
    path = found.made.files()[1]
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "no footer":
            path.write_bytes(content[:-100] + bytes(100))
        case "garbage":
            path.write_bytes(b"PAR1" + b"\xa5" * len(content) + b"PAR1")
    for _ in range(2):
        assert positions(found.all(end=900)) == [*range(300), *range(600, 900)]
    assert found.damaged == 600  # by each of the two
    assert sum(found.lake.lost.values()) == 300
    ((event, fields),) = found.told
    assert (event, fields["file"], fields["messages"]) == ("lake.damaged", path.name, 300)


@pytest.mark.attack("C12")
def test_only_the_damaged_part_of_a_file_is_lost(reading):
    found = reading(plain(3000, topics=3), 3000, 1000)
    (path,) = found.made.files()
    spoil_row_group(path, 1)
    assert positions(found.all(bytes_max=5000)) == [i for i in range(3000) if i % 3 != 1]
    assert found.damaged == 1000 and found.told[0][1]["messages"] == 1000


@pytest.mark.attack("C12")
def test_no_flipped_byte_makes_a_message_that_was_never_published(reading, tmp_path):
    """Wherever it is: what is read is right, and what is not read is counted."""
    rows = plain(400)
    for step in range(40):
        found = lake_of(tmp_path / str(step), rows, 400, 100)
        flip_bytes(found.made.files()[0], step / 40)
        runs = found.all(end=400)
        told = {row["position"]: row["payload"] for row in rows_of(runs)}
        assert all(told[i] == b"%d" % i for i in told)
        assert len(told) + found.damaged >= 400


def test_a_reader_that_begins_behind_a_lost_file_has_lost_nothing(reading):
    found = reading(plain(900), rows_per_file=300)
    found.made.files()[0].unlink()
    assert positions(found.all(start=300, end=900)) == list(range(300, 900))
    assert found.damaged == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.EIO])
def test_what_may_be_different_next_time_is_not_counted_as_lost(reading, monkeypatch, number):
    found = reading(plain(100))

    def fail(path: Path, *_: object) -> None:
        raise OSError(number, "for the moment")

    with monkeypatch.context() as patched:
        patched.setattr(lake_module, "decode", fail)
        with pytest.raises(OSError, match="for the moment"):
            found.all()
    assert found.told == []
    assert positions(found.all()) == list(range(100))


def test_what_the_device_cannot_read_for_minutes_is_lost(reading, monkeypatch):
    """One of three files: first it is asked for again, and in the end it is stepped over."""
    found = reading(plain(300), rows_per_file=100)
    bad = found.made.files()[1]
    decode = lake_module.decode

    def fail(path: Path, *rest: Any) -> lake_module.Block:
        if path == bad:
            raise OSError(errno.EIO, "Input/output error")
        return decode(path, *rest)

    monkeypatch.setattr(lake_module, "decode", fail)
    with pytest.raises(OSError, match="Input/output"):
        found.all()
    monkeypatch.setattr(unreadable, "LOST_AFTER_S", 0.0)
    assert len(positions(found.all())) == 200
    assert found.damaged == 100
    assert [event for event, _ in found.told] == ["lake.damaged"]


def test_a_mistake_of_ours_is_not_taken_for_damage(reading, monkeypatch):
    found = reading(plain(100))

    def fail(path: Path, *_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(lake_module, "decode", fail)
    with pytest.raises(TypeError):
        found.all()
    assert found.told == []


# ── times ──


@pytest.mark.req("P.10")
@settings(deadline=None, max_examples=25)
@given(lakes(), st.integers(1, 10))
def test_a_time_is_found_at_its_first_message(rows: list[Row], rows_per_file: int) -> None:
    with TemporaryDirectory() as folder:
        lake = lake_of(Path(folder), rows, rows_per_file, 3).lake
        for time_ms in range(10**12 - 1, 10**12 + 5):
            newer = [row["position"] for row in rows if row["time"] // 1000 >= time_ms]
            assert lake.position_at_time(time_ms, 0) == (newer[0] if newer else None)


@pytest.mark.req("P.10")
def test_a_time_is_found_in_the_file_that_compaction_has_put_in_the_place_of_others(reading):
    found = reading(plain(900), rows_per_file=300)
    found.made.compact(found.made.files())
    assert found.lake.position_at_time(450, 0) == 450


@pytest.mark.attack("C12")
@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_time_in_a_lost_file_is_taken_to_be_at_its_begin(reading, damage):
    found = reading(plain(900), rows_per_file=300)
    path = found.made.files()[1]
    path.unlink()
    if damage == "empty":
        path.touch()
    assert found.lake.position_at_time(450, 0) == 300
