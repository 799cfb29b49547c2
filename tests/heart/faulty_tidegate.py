"""`tidegate`, whose calls to the kernel fail, wait or are counted as the files of a folder say.

    python faulty_tidegate.py <folder> broker --data …

A fault is a file in the folder; it is looked at with every call, so a test makes and removes it as it likes.

    hold-sync      fsync and fdatasync of what lies under the log wait until it is gone
    crash-write    the next write to a segment raises a RuntimeError, as a bug would; removed when it has
    fail-read      "EIO 3": the next three reads of a segment (open or pread) fail so; counts down, then is removed
    count-blocks   removed, and `blocks` appears: how many blocks of memory Python has in use

Nothing of the broker is touched, only `os` before the broker is imported.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
POLL_S = 0.005

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


def held(call: Any) -> Any:
    def sync(descriptor: int) -> None:
        if "/log" in name_of(descriptor):
            while on("hold-sync"):
                time.sleep(POLL_S)
        call(descriptor)

    return sync


def crashing(call: Any) -> Any:
    def write(descriptor: int, *content: Any) -> int:
        if on("crash-write") and is_segment(name_of(descriptor)):
            (FOLDER / "crash-write").unlink()
            raise RuntimeError("an injected bug")
        written: int = call(descriptor, *content)
        return written

    return write


def failing(call: Any, name: Any) -> Any:
    def read(first: Any, *rest: Any, **named: Any) -> Any:
        if on("fail-read") and is_segment(name(first, *rest)) and (kind := take_one("fail-read")):
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
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
    io.open = failing(io.open, opened)
    threading.Thread(target=count_blocks, name="count-blocks", daemon=True).start()
    del sys.argv[1]
    from tidegate.cli import main as tidegate

    tidegate()


if __name__ == "__main__":
    main()
