"""`tidegate`, whose calls to the kernel fail, wait or are counted as the files of a folder say.

    python faulty_tidegate.py <folder> broker --data …

A fault is a file in the folder; it is looked at with every call, so a test makes and removes it as it likes.

    hold-sync      fsync and fdatasync of what lies under the log wait until it is gone
    crash-write    the next write to a segment raises a RuntimeError, as a bug would; removed when it has
    crash-read     the same for the next read of a segment, with a TypeError
    crash-sync     "tidegate-disk": the same for the next sync of a segment on the thread of this name
    crash-unlink   the same for the next segment that is deleted
    crash-call     "stored": the same for the next call of this function, one of `CALLS`; "packet" with an OSError,
                   which the event loop must not take for one of the peer's
    fail-read      "EIO 3": the next three reads of a segment (open or pread) fail so; counts down, then is removed
    fail-sync      "EIO": syncs of a segment fail so until it is gone
    fail-unlink    "EACCES 3": the next three segments to be deleted are not
    count-blocks   removed, and `blocks` appears: how many blocks of memory Python has in use

Nothing of the broker is touched but `CALLS`, only `os` before the broker is imported.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(sys.argv[1])
POLL_S = 0.005

# What nothing but the broker itself does: a bug in it is put before the call.
CALLS = {
    "stored": ("tidegate.broker.storing", "Storing.stored"),
    "timer": ("tidegate.broker.deadlines", "run"),
    "gate": ("tidegate.broker.housekeeping", "Housekeeping._trim_due"),
    "packet": ("tidegate.broker.core", "Broker.handle"),
}

_lock = threading.Lock()


def on(fault: str) -> bool:
    return (FOLDER / fault).exists()


def name_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 (the fewest calls)
    except OSError:
        return ""


def is_segment(name: str) -> bool:
    return name.endswith(".log") and os.path.dirname(name).endswith("/log")  # noqa: PTH120


def take_one(fault: str) -> str:
    """Use up one of the times that a fault is to happen: its kind, or nothing when there is none left."""
    path = FOLDER / fault
    if not path.exists():
        return ""
    with _lock:
        try:
            kind, times = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return ""
        if int(times) > 1:
            path.write_text(f"{kind} {int(times) - 1}")
        else:
            path.unlink()
        return kind


def content(fault: str) -> str:
    try:
        return (FOLDER / fault).read_text()
    except FileNotFoundError:
        return ""


def fail(kind: str) -> NoReturn:
    raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))


def crash(fault: str, kind: type[Exception] = RuntimeError) -> NoReturn:
    (FOLDER / fault).unlink()
    raise kind("an injected bug")


def held(call: Any) -> Any:
    def sync(descriptor: int) -> None:
        name = name_of(descriptor)
        if "/log" in name:
            while on("hold-sync"):
                time.sleep(POLL_S)
        if is_segment(name):
            if (thread := content("crash-sync")) and threading.current_thread().name.startswith(thread):
                crash("crash-sync")
            if kind := content("fail-sync"):
                fail(kind)
        call(descriptor)

    return sync


def deleting(call: Any) -> Any:
    def unlink(path: Any, *rest: Any, **named: Any) -> None:
        if is_segment(os.fspath(path)):
            if on("crash-unlink"):
                crash("crash-unlink")
            if kind := take_one("fail-unlink"):
                fail(kind)
        call(path, *rest, **named)

    return unlink


def with_bug(name: str, call: Any) -> Any:
    def called(*arguments: Any, **named: Any) -> Any:
        if content("crash-call") == name:
            crash("crash-call", OSError if name == "packet" else RuntimeError)
        return call(*arguments, **named)

    return called


def put_bugs() -> None:
    for name, (module, path) in CALLS.items():
        owner: Any = importlib.import_module(module)
        *outer, last = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        setattr(owner, last, with_bug(name, getattr(owner, last)))


def crashing(call: Any) -> Any:
    def write(descriptor: int, *content: Any) -> int:
        if on("crash-write") and is_segment(name_of(descriptor)):
            crash("crash-write")
        written: int = call(descriptor, *content)
        return written

    return write


def failing(call: Any, name: Any) -> Any:
    def read(first: Any, *rest: Any, **named: Any) -> Any:
        if (on("fail-read") or on("crash-read")) and is_segment(name(first, *rest)):
            if on("crash-read"):
                crash("crash-read", TypeError)
            if kind := take_one("fail-read"):
                fail(kind)
        return call(first, *rest, **named)

    return read


def opened(path: Any, mode: Any = "r", *rest: Any) -> str:
    """The file that a call of open is about to read; nothing when it is going to write."""
    reading = mode & os.O_ACCMODE == os.O_RDONLY if isinstance(mode, int) else not set(mode) & set("wa+x")
    return os.fspath(path) if reading and isinstance(path, str | os.PathLike) else ""


def count_blocks() -> None:
    while True:
        if on("count-blocks"):
            made = FOLDER / "blocks.new"
            made.write_text(str(sys.getallocatedblocks()))
            made.rename(FOLDER / "blocks")
            (FOLDER / "count-blocks").unlink()
        time.sleep(POLL_S)


def main() -> None:
    os.fsync, os.fdatasync = held(os.fsync), held(os.fdatasync)
    os.write, os.writev = crashing(os.write), crashing(os.writev)
    os.pwrite, os.pwritev = crashing(os.pwrite), crashing(os.pwritev)
    os.pread = failing(os.pread, lambda descriptor, *_: name_of(descriptor))
    os.preadv = failing(os.preadv, lambda descriptor, *_: name_of(descriptor))
    os.open = failing(os.open, opened)
    os.unlink = deleting(os.unlink)
    io.open = failing(io.open, opened)
    threading.Thread(target=count_blocks, name="count-blocks", daemon=True).start()
    del sys.argv[1]
    from tidegate.cli import main as tidegate

    put_bugs()
    tidegate()


if __name__ == "__main__":
    main()
