"""What cannot be read: when it is asked for again, and when it counts as lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from log_strategies import messages, simple_run, tick

from tidegate.log import unreadable
from tidegate.log.files import SegmentedLog, segment_file
from tidegate.log.snapshot import SnapshotWriter, load_snapshot
from tidegate.log.unreadable import Ailing

SHORT_OF_SOMETHING = [
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EACCES, errno.EPERM, errno.EBUSY,
    errno.ETIMEDOUT, errno.ESTALE,
]  # fmt: skip


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    passed_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds

    monkeypatch.setattr(unreadable.time, "monotonic", lambda: passed_s)
    return pass_time


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SegmentedLog]:
    """300 messages in as many frames, some 8 KiB each, with a change between them."""
    log = SegmentedLog.open(tmp_path)
    for i in range(300):
        log.append(*tick([simple_run(b"t", b"%04d" % i + b"x" * 8000)], [b"change %d" % i], log.end, 1))
    yield log
    log.close()


def bad_block(monkeypatch: pytest.MonkeyPatch, at: int, number: int = errno.EIO) -> None:
    """Reads up to this byte of any file are cut short, as the kernel does; reads at it fail."""
    pread = os.pread

    def fail(fd: int, size: int, offset: int) -> bytes:
        if offset <= at < offset + size:
            if offset // 4096 == at // 4096:
                raise OSError(number, os.strerror(number))
            size = at // 4096 * 4096 - offset
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", fail)


@pytest.mark.parametrize("number", SHORT_OF_SOMETHING, ids=errno.errorcode.get)
def test_what_the_system_is_short_of_is_never_damage(now, number):
    ailing = Ailing()
    for _ in range(10_000):
        assert not ailing.is_lost(OSError(number, "no"))
        now(5)


@pytest.mark.parametrize("number", unreadable.DEVICE_ERRORS, ids=errno.errorcode.get)
def test_a_device_that_fails_has_minutes_to_come_back(now, number):
    ailing = Ailing()
    error = OSError(number, "no")
    for _ in range(int(unreadable.LOST_AFTER_S / 5)):
        assert not ailing.is_lost(error)
        now(5)
    assert ailing.is_lost(error)


def test_a_device_that_came_back_has_minutes_again(now):
    ailing = Ailing()
    error = OSError(errno.EIO, "no")
    assert not ailing.is_lost(error, 4096)
    for _ in range(100):
        ailing.was_read(0)  # another place says nothing
        now(5)
        lost = ailing.is_lost(error, 4096)
    assert lost
    ailing.was_read(4096)
    assert not ailing.is_lost(error, 4096)
    now(10 * unreadable.LOST_AFTER_S)
    assert not ailing.is_lost(error, 4096), "nobody asked meanwhile, so nobody knows how long it lasted"


def test_a_bad_block_costs_what_lies_in_it_and_nothing_before_the_time(log, monkeypatch, now):
    """A read that is cut short by the device is not a file that is cut short."""
    bad_block(monkeypatch, 1_000_000)
    position, payloads, lost = 0, [], 0
    waited_s = 0.0
    while position < log.end:
        try:
            found = log.read(position, bytes_max=1 << 18, end=log.end)
        except OSError as error:
            assert error.errno == errno.EIO and str(error.filename).endswith(".log")
            assert lost == 0
            now(5)
            waited_s += 5
            continue
        payloads += [row[6] for row in messages(found.runs)]
        lost += found.damaged
        position = found.next_position
    assert waited_s >= unreadable.LOST_AFTER_S
    assert lost == 1
    assert len(payloads) == 299


def test_an_index_that_the_device_cannot_read_is_made_anew(log, tmp_path, monkeypatch):
    log.roll()
    log.sync()
    log._indexer.join()
    segment = log._shelves[0]
    assert segment.builder is None
    segment.index = None
    fail_open(monkeypatch, segment.index_path, errno.EIO)
    assert sum(run.count for run in log.read(0, bytes_max=1 << 30, end=log.end).runs) == 300


def test_state_is_waited_for_at_the_start(log, monkeypatch, now):
    """A start cannot come back later: it waits for the device, and goes on without what is lost."""
    bad_block(monkeypatch, 1_000_000)
    monkeypatch.setattr(segment_file.time, "sleep", now)
    found = [record for records in log.changes_from(0) for record in records]
    assert len(found) + len(log.report) == 300 and len(log.report) <= 1
    monkeypatch.undo()
    fail_open(monkeypatch, log._shelves[0].path, errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        list(log.changes_from(0))


def test_a_snapshot_that_cannot_be_opened_for_the_moment_is_not_given_up(tmp_path, monkeypatch):
    writer = SnapshotWriter(tmp_path, 7)
    writer.add([b"state"])
    writer.commit()
    with monkeypatch.context() as patched:
        patched.setattr("tidegate.log.snapshot._mapped", refuse(errno.EMFILE))
        with pytest.raises(OSError, match="Too many open files"):
            load_snapshot(tmp_path)
    position, frames, damage = load_snapshot(tmp_path)
    assert (position, list(frames), damage) == (7, [[b"state"]], [])


def refuse(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def fail_open(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    real, real_open = os.open, Path.open

    def fail(name: str | Path, *rest: int) -> int:
        if Path(name) == path:
            raise OSError(number, os.strerror(number), str(name))
        return real(name, *rest)

    def fail_path(self: Path, *rest: str) -> object:
        if self == path and "r" in "".join(rest):
            raise OSError(number, os.strerror(number), str(self))
        return real_open(self, *rest)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(Path, "open", fail_path)
