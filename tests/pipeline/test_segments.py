"""The log folder beside a broker: how far it reaches, and what splits hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_writer import START_MS, LogWriter, run, write_damaged

from message_frames import encode_messages
from tidegate.log.frame import encode_changes, parse_header
from tidegate.log.run import Run
from tidegate.log.segment import SEGMENT_HEADER_BYTES
from tidegate.pipeline.segments import LogFolder, LogGone, Lost, read_split


def positions(folder: LogFolder, start: int, end: int, bytes_max: int = 1 << 20) -> list[int]:
    found: list[int] = []
    for split in folder.splits(start, end, bytes_max):
        for batch in read_split(split):
            found += batch.column("position").to_pylist()
    return found


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path / "log", segment_bytes=64 << 10)


@pytest.fixture
def folder(tmp_path: Path) -> LogFolder:
    return LogFolder(tmp_path / "log")


def test_there_is_nothing_in_an_empty_folder(folder: LogFolder) -> None:
    assert folder.start() == folder.end() == (0, 0)
    assert folder.splits(0, 0) == []


@pytest.mark.req("P.2")
@pytest.mark.parametrize("closed", [False, True], ids=["running", "closed"])
@pytest.mark.parametrize("bytes_max", [1, 5000, 1 << 30])
def test_splits_hold_each_message_once(writer: LogWriter, folder: LogFolder, closed: bool, bytes_max: int) -> None:
    for i in range(40):
        writer.messages(97, start=i * 97)
    if closed:
        writer.close()
    start, end = folder.start(), folder.end()
    assert end.position == 40 * 97
    assert end.sequence > start.sequence  # several segments
    splits = folder.splits(start.place, end.place, bytes_max)
    assert sum(split.rows for split in splits) == folder.rows(start.place, end.place) == 40 * 97
    assert positions(folder, start.place, end.place, bytes_max) == list(range(40 * 97))


@pytest.mark.req("P.2")
def test_a_log_that_grows_is_read_on_from_where_it_was(writer: LogWriter, folder: LogFolder) -> None:
    reached = folder.start().place
    found: list[int] = []
    for i in range(60):
        writer.messages(31 if i % 2 else 500, start=i)
        end = folder.end().place
        found += positions(folder, reached, end)
        reached = end
    assert found == list(range(30 * 31 + 30 * 500))


def test_messages_of_small_and_large_frames_are_the_same(writer: LogWriter, folder: LogFolder) -> None:
    optional = [b"\x01\x01", b""], [60, 0xFFFFFFFF], [b"u" * 16, bytes(16)]
    rich = Run(b"a/b", b"me", b"acme", 0b110, [b"x", b"y"], *optional)
    writer.tick([rich])  # small
    writer.tick([run(b"fill", b"z") for _ in range(100)] + [rich])  # large
    rows = [
        {key: value for key, value in row.items() if key not in ("position", "time")}
        for split in folder.splits(folder.start().place, folder.end().place)
        for batch in read_split(split)
        for row in batch.to_pylist()
        if row["topic"] == "a/b"
    ]
    first = {"tenant": "acme", "topic": "a/b", "publisher": "me", "qos": 2, "retain": True}
    assert rows[:2] == rows[2:] == [
        {**first, "payload": b"x", "uuid": b"u" * 16, "expiry": 60, "properties": b"\x01\x01"},
        {**first, "payload": b"y", "uuid": None, "expiry": None, "properties": None},
    ]


def test_what_is_not_finished_is_not_there_yet(writer: LogWriter, folder: LogFolder, tmp_path: Path) -> None:
    writer.messages(10)
    reached = folder.end()
    path = sorted((tmp_path / "log").glob("*.log"))[-1]
    writer.log.sync()
    whole = encode_messages([run(b"t", b"1")], 10, START_MS, followed=True)
    whole += encode_changes([b"\x02abcd"], 11, START_MS)
    size = path.stat().st_size
    for cut in (1, 63, 64, 80, parse_header(whole).length, len(whole) - 1):  # type: ignore[union-attr]
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(whole[:cut])
        assert folder.end() == reached, cut
    with path.open("r+b") as file:
        file.seek(size)
        file.write(whole[:-1] + b"\xff")  # all there, but not what was meant
    assert folder.end() == reached
    with path.open("r+b") as file:
        file.seek(size)
        file.write(whole)
    assert folder.end().position == 11


def test_a_torn_tail_is_damage_once_a_new_segment_follows(tmp_path: Path, folder: LogFolder) -> None:
    writer = LogWriter(tmp_path / "log")
    writer.messages(10)
    path = sorted((tmp_path / "log").glob("*.log"))[-1]
    writer.close(clean=False)
    with path.open("ab") as file:
        file.write(b"torn")
    assert folder.end().position == 10
    reached = folder.end().place
    again = LogWriter(tmp_path / "log")  # cuts the tail off and jumps
    first = again.messages(5)
    assert first >= 2**32
    assert positions(folder, reached, folder.end().place) == list(range(first, first + 5))


@pytest.mark.attack("C4")
def test_a_flipped_bit_is_lost_and_told_and_the_rest_is_read(tmp_path: Path, folder: LogFolder) -> None:
    write_damaged(tmp_path / "log")
    lost: list[Lost] = []
    found: list[int] = []
    for split in folder.splits(folder.start().place, folder.end().place):
        for batch in read_split(split, on_lost=lost.append):
            found += batch.column("position").to_pylist()
    assert found == [*range(100), *range(200, 300)]
    assert [(each.first_position, each.last_position) for each in lost] == [(100, 199)]


@pytest.mark.attack("C4")
@pytest.mark.parametrize("indexed", [True, False], ids=["with index", "without"])
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_of_a_damaged_header_exactly_the_frame_behind_it_is_lost(
    tmp_path: Path, folder: LogFolder, broken: int, indexed: bool
) -> None:
    """Not what follows it in the same split, and not less when the damage begins it."""
    writer = LogWriter(tmp_path / "log")
    for i in range(4):
        writer.messages(100, start=100 * i)
    writer.log.roll()
    writer.messages(100, start=400)
    writer.close()
    path = sorted((tmp_path / "log").glob("*.log"))[0]
    index = path.with_suffix(".index")
    raw = bytearray(path.read_bytes())
    offset = SEGMENT_HEADER_BYTES
    for _ in range(broken):
        header = parse_header(raw, offset)
        assert header is not None
        offset += header.length
    raw[offset + 20] ^= 1  # in its base
    path.write_bytes(raw)
    index.unlink()
    if indexed:  # as a broker makes it anew when it starts
        LogWriter(tmp_path / "log").close()
        assert index.exists()
    lost: list[Lost] = []
    found: list[int] = []
    for bytes_max in (1, 1 << 30):
        lost.clear()
        found.clear()
        for split in folder.splits(folder.start().place, folder.end().place, bytes_max):
            for batch in read_split(split, on_lost=lost.append):
                found += batch.column("position").to_pylist()
        gone = range(100 * broken, 100 * broken + 100)
        assert found == [position for position in range(500) if position not in gone]
        assert [(each.first_position, each.last_position) for each in lost] == [(gone[0], gone[-1])]
        assert [each.place & 0xFFFFFFFF for each in lost] == [offset]


@pytest.mark.attack("C4")
def test_a_segment_that_is_no_segment_any_more_is_lost_as_a_whole_and_nothing_else(
    tmp_path: Path, folder: LogFolder
) -> None:
    writer = LogWriter(tmp_path / "log")
    for i in range(3):
        writer.messages(100, start=100 * i)
        writer.log.roll()
    writer.close()
    broken = sorted((tmp_path / "log").glob("*.log"))[1]
    broken.write_bytes(bytes(broken.stat().st_size))
    broken.with_suffix(".index").unlink()
    lost: list[Lost] = []
    found: list[int] = []
    for split in folder.splits(folder.start().place, folder.end().place):
        for batch in read_split(split, on_lost=lost.append):
            found += batch.column("position").to_pylist()
    assert found == [*range(100), *range(200, 300)]
    assert [(each.first_position, each.last_position) for each in lost] == [(100, 199)]


def test_places_by_position_and_time(writer: LogWriter, folder: LogFolder) -> None:
    for i in range(50):
        writer.messages(100, start=i)
    for position in (0, 1, 99, 100, 2345, 4999):
        at = folder.place_of(position)
        assert at.position == position - position % 100
        assert positions(folder, at.place, folder.end().place)[0] == at.position
    assert folder.place_of(5000) == folder.end()
    assert folder.place_at_time(START_MS + 10_000).position == 900
    assert folder.place_at_time(0) == folder.start()
    assert folder.place_at_time(START_MS + 10**9) == folder.end()


def test_a_trimmed_segment_is_told(writer: LogWriter, folder: LogFolder, tmp_path: Path) -> None:
    for i in range(40):
        writer.messages(97, start=i * 97)
    start, end = folder.start().place, folder.end().place
    split = folder.splits(start, end)[0]
    first = sorted((tmp_path / "log").glob("*.log"))[0]
    first.unlink()
    with pytest.raises(LogGone, match="is gone"):
        folder.splits(start, end)
    with pytest.raises(LogGone, match="no longer in the log"):
        list(read_split(split))
    [hole] = folder.holes(start, end)
    assert "missing" in hole.reason
    assert hole.last_position == folder.start().position - 1


def test_a_bound_in_bytes_is_kept(writer: LogWriter, folder: LogFolder) -> None:
    for i in range(60):
        writer.messages(100, start=i)
    start, end = folder.start().place, folder.end().place
    reached, steps = start, 0
    found: list[int] = []
    while reached < end:
        until = folder.bounded(reached, end, 30_000)
        assert reached < until
        found += positions(folder, reached, until)
        reached, steps = until, steps + 1
    assert steps > 5
    assert found == list(range(6000))
