"""What is synced, and in which order: the promise of durability "fsync"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from log_strategies import simple_run, tick

from tidegate.log.files import SegmentedLog
from tidegate.log.segment import segment_name
from tidegate.log.snapshot import SnapshotWriter, snapshot_name


class Disk:
    """Remembers what was synced, by name, and how long it was then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._recorded(getattr(os, name)))

    def _recorded(self, real):  # type: ignore[no-untyped-def]
        def sync(fd: int) -> None:
            real(fd)
            path = Path(f"/proc/self/fd/{fd}").readlink()
            self.events.append((path.name, os.fstat(fd).st_size if path.is_file() else 0))

        return sync

    def take(self) -> list[tuple[str, int]]:
        taken, self.events = self.events, []
        return taken


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def add(log: SegmentedLog) -> int:
    log.append(*tick([simple_run(b"t", b"x")], [b"r"], log.end, 1))
    return log.segments()[-1].bytes


def names(events: list[tuple[str, int]]) -> list[str]:
    return [name for name, _ in events]


def test_a_sync_covers_a_segment_that_was_sealed_since_the_last(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentedLog, "_write_indices", lambda self: None)  # it syncs as well
    log = SegmentedLog.open(tmp_path)
    old = add(log)
    log.roll()
    new = add(log)
    disk.take()
    log.sync()
    assert disk.take() == [(segment_name(1), old), (segment_name(2), new), (tmp_path.name, 0)]
    new = add(log)
    log.sync()
    assert disk.take() == [(segment_name(2), new)]
    log.close(clean=False)


def test_an_index_is_written_only_when_its_segment_is_durable(tmp_path: Path, disk: Disk) -> None:
    log = SegmentedLog.open(tmp_path)
    size = add(log)
    log.roll()
    log.close(clean=False)
    assert (tmp_path / segment_name(1)).with_suffix(".index").exists()
    assert (segment_name(1), size) in disk.take()


@pytest.mark.attack("C1")
def test_the_jump_after_an_unclean_stop_is_durable_before_anyone_can_append(tmp_path: Path, disk: Disk) -> None:
    log = SegmentedLog.open(tmp_path)
    size = add(log)
    log.close(clean=False)
    with (tmp_path / segment_name(1)).open("ab") as file:
        file.write(b"torn")
    disk.take()
    log = SegmentedLog.open(tmp_path)
    recovered = disk.take()
    assert recovered[0] == (segment_name(1), size)  # what was found, and cut, is durable too
    events = names(recovered)
    assert events.index(segment_name(2) + ".tmp") < len(events) - 1 and events[-1] == tmp_path.name
    assert (tmp_path / segment_name(2)).stat().st_size == 64
    log.close(clean=False)


def test_the_newest_segment_is_durable_before_older_ones_go(tmp_path: Path, disk: Disk) -> None:
    log = SegmentedLog.open(tmp_path)
    add(log)
    log.roll()
    size = add(log)
    disk.take()
    log.drop(log.segments()[:1])
    events = disk.take()
    assert (segment_name(2), size) in events and events[-1][0] == tmp_path.name
    log.close(clean=False)


def test_a_clean_stop_is_noted_only_after_everything_is_durable(tmp_path: Path, disk: Disk) -> None:
    log = SegmentedLog.open(tmp_path)
    add(log)
    log.close()
    events = names(disk.take())
    assert events.index(segment_name(1)) < events.index("CLEAN.tmp") < len(events) - 1
    assert events[-1] == tmp_path.name
    SegmentedLog.open(tmp_path)
    assert not (tmp_path / "CLEAN").exists()
    assert names(disk.take()) == [tmp_path.name]


def test_a_snapshot_is_synced_before_it_gets_its_name(tmp_path: Path, disk: Disk) -> None:
    writer = SnapshotWriter(tmp_path, 7)
    writer.add([b"x"])
    writer.commit()
    assert names(disk.take()) == [snapshot_name(7) + ".tmp", tmp_path.name]
