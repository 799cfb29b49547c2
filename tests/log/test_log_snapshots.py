"""Snapshots: whole or not at all, and readable around damage."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.log.files import SegmentedLog
from tidegate.log.recovery import POSITION_GAP, Damage
from tidegate.log.snapshot import SnapshotWriter, load_snapshot, snapshot_name, snapshot_positions

FRAMES = [[b"a-%d-%d" % (frame, i) for i in range(3)] for frame in range(4)]


def write(folder: Path, position: int, frames: list[list[bytes]]) -> Path:
    writer = SnapshotWriter(folder, position)
    for records in frames:
        writer.add(records)
    writer.commit()
    return folder / snapshot_name(position)


def load(folder: Path) -> tuple[int, list[list[bytes]], list[Damage]]:
    position, frames, report = load_snapshot(folder)
    return position, list(frames), report


@given(st.lists(st.lists(st.binary(max_size=30), max_size=5), max_size=5), st.integers(0, 2**62))
@settings(deadline=None, max_examples=50)
@pytest.mark.req("S4.1")
def test_a_snapshot_comes_back_as_it_was(frames: list[list[bytes]], position: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), position, frames)
        assert load(Path(name)) == (position, frames, [])


def test_without_a_snapshot_there_is_no_state(tmp_path: Path) -> None:
    assert load(tmp_path) == (0, [], [])
    assert load(tmp_path / "not there") == (0, [], [])


def test_nothing_changes_before_the_commit(tmp_path: Path) -> None:
    write(tmp_path, 1, FRAMES)
    writer = SnapshotWriter(tmp_path, 2)
    writer.add([b"new"])
    assert load(tmp_path)[0] == 1
    writer.abort()
    assert [path.name for path in tmp_path.iterdir()] == [snapshot_name(1)]
    abandoned = SnapshotWriter(tmp_path, 3)
    abandoned.add([b"x"])
    write(tmp_path, 4, [])  # clears what a crash left
    assert snapshot_positions(tmp_path) == [4, 1]
    assert not list(tmp_path.glob("*.tmp"))


def test_the_previous_one_is_kept_and_older_ones_go(tmp_path: Path) -> None:
    for position in (1, 5, 9):
        write(tmp_path, position, FRAMES)
    assert snapshot_positions(tmp_path) == [9, 5]


@pytest.mark.attack("C4")
def test_a_cut_at_every_byte_falls_back_to_the_previous(tmp_path: Path) -> None:
    write(tmp_path, 1, [[b"old"]])
    path = write(tmp_path, 2, FRAMES)
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        position, frames, report = load(tmp_path)
        assert (position, frames) == (1, [[b"old"]])
        assert report


@pytest.mark.attack("C4")
def test_a_cut_snapshot_without_another_yields_what_is_left(tmp_path: Path) -> None:
    path = write(tmp_path, 2, FRAMES)
    content = path.read_bytes()
    best = 0
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        _, frames, report = load(tmp_path)
        assert frames == FRAMES[: len(frames)] and len(frames) >= best and report
        best = len(frames)
    assert best == len(FRAMES)


@pytest.mark.attack("C4")
def test_a_flip_at_every_byte_loses_one_frame_or_falls_back(tmp_path: Path) -> None:
    write(tmp_path, 1, [[b"old"]])
    path = write(tmp_path, 2, FRAMES)
    content = path.read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0x20
        path.write_bytes(damaged)
        position, frames, report = load(tmp_path)
        assert report
        if position == 2:
            assert len(frames) == len(FRAMES) - 1 and all(frame in FRAMES for frame in frames)
            assert any("3 of 12 records are lost" in damage.reason for damage in report)
        else:
            assert frames == [[b"old"]] and (at < 64 or at >= len(content) - 32)


def test_the_log_never_ends_below_a_snapshot(tmp_path: Path) -> None:
    write(tmp_path, 1000, [[b"x"]])
    log = SegmentedLog.open(tmp_path)
    assert not log.clean and log.end >= 1000 + POSITION_GAP
    log.close()


@pytest.mark.attack("C4")
def test_a_snapshot_that_lost_bytes_in_its_middle_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path, 1, [[b"old"]])
    path = write(tmp_path, 2, FRAMES)
    content = path.read_bytes()
    path.write_bytes(content[:200] + content[300:])
    assert load(tmp_path)[:2] == (1, [[b"old"]])
