"""A full disk: the append fails whole, readers go on, and it recovers when there is room."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_strategies import messages, simple_run, tick

import peers
from tidegate.errors import DiskFull, StorageError
from tidegate.log.files import SegmentedLog
from tidegate.log.snapshot import SnapshotWriter, load_snapshot


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with peers.small_disk(tmp_path, "256k"):
        yield tmp_path


def fill(log: SegmentedLog, size: int = 3000) -> int:
    """Append until there is no room; returns how many messages found theirs."""
    count = 0
    with pytest.raises(DiskFull) as refused:
        for _ in range(1000):
            log.append(*tick([simple_run(b"t", b"%d" % log.end, b"x" * size)], [], log.end, 1))
            count += 2
    assert refused.value.retriable
    return count


@pytest.mark.attack("C5")
def test_a_full_disk_refuses_whole_ticks_and_recovers_by_itself(small_disk: Path) -> None:
    log = SegmentedLog.open(small_disk, segment_bytes=60_000)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(40_000))
    count = fill(log)
    assert log.end == count > 0
    for _ in range(3):  # still full, still whole
        with pytest.raises(DiskFull):
            log.append(*tick([simple_run(b"t", b"x" * 30_000)], [], log.end, 1))
    log.sync()
    found = log.read(0, bytes_max=1 << 20, wanted=None, end=log.end)
    assert len(messages(found.runs)) == count and found.damaged == 0
    ballast.unlink()
    assert fill(log) > 0
    total = log.end
    log.drop(log.segments()[:1])  # retention makes room as well
    assert fill(log) > 0 and log.end > total
    log.close(clean=False)
    again = SegmentedLog.open(small_disk)
    assert again.report == [] and not again.clean
    again.close(clean=False)


@pytest.mark.attack("C5")
def test_a_log_opens_and_reads_on_a_full_disk(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(20_000))
    log = SegmentedLog.open(small_disk)
    count = fill(log)
    log.close(clean=False)
    with (small_disk / "rest").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(100))
    log = SegmentedLog.open(small_disk)
    assert len(messages(log.read(0, bytes_max=1 << 20, wanted=None, end=count).runs)) == count
    with pytest.raises(DiskFull):
        log.append(*tick([simple_run(b"t", b"x" * 300)], [], log.end, 1))
    start = log.end
    ballast.unlink()
    log.append(*tick([simple_run(b"t", b"room again")], [], log.end, 1))
    assert log.end == start + 1
    log.close()


@pytest.mark.attack("C5")
def test_a_snapshot_that_finds_no_room_leaves_the_old_one(small_disk: Path) -> None:
    writer = SnapshotWriter(small_disk, 1)
    writer.add([b"old"])
    writer.commit()
    writer = SnapshotWriter(small_disk, 2)
    with pytest.raises(DiskFull):
        for _ in range(100):
            writer.add([bytes(10_000)])
        writer.commit()
    writer.abort()
    position, frames, report = load_snapshot(small_disk)
    assert (position, list(frames), report) == (1, [[b"old"]], [])
    assert [path.name for path in small_disk.iterdir()] == ["00000000000000000001.snapshot"]


@pytest.mark.attack("C5")
def test_a_file_size_limit_is_a_full_disk_too(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = SegmentedLog.open(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        count = fill(log)  # the last write is a short one
        newest = log.segments()[-1]
        assert newest.path is not None and newest.path.stat().st_size == newest.bytes < 20_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.append(*tick([simple_run(b"t", b"x")], [], log.end, 1))
    assert len(messages(log.read(0, bytes_max=1 << 20, wanted=None, end=log.end).runs)) == count + 1
    log.close()
    again = SegmentedLog.open(tmp_path)
    assert again.clean and again.report == []
    again.close()


def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SegmentedLog.open(tmp_path)
    frames = tick([simple_run(b"t", b"x")], [], 0, 1)
    log.append(*frames)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageError):
            log.sync()
    with pytest.raises(StorageError):  # the kernel would say yes now, about bytes it has thrown away
        log.sync()
    with pytest.raises(StorageError):
        log.append(*tick([simple_run(b"t", b"y")], [], 1, 1))
    log.close()
    again = SegmentedLog.open(tmp_path)
    assert not again.clean
    again.close()
