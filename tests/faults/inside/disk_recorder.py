"""A recorder, and a brake, for what a process does to its disk below the folder RECORD_UNDER. The command itself is the
real one and knows nothing of it.

Each process writes into the folder RECORD_TO:

    <pid>.journal   one JSON object a line, see `_note`; times are the machine's monotonic clock, in seconds
    <pid>.blobs     bytes that the journal points into

What a sync promises is what lay in the file, or stood in the folder, when it *began*; so that is looked at first, and
it does not matter by which call it came there. Files in RECORD_TO steer it:

    block           while it is there, each sync waits before it is carried out
    pass-<number>   lets the one with this number through, and is gone
    delay           how long each sync takes at least, in seconds
"""

# ruff: noqa: PTH100, PTH110, PTH115, PTH116, PTH123, SIM115 (it stands in for what pathlib calls)

import itertools
import json
import os
import stat
import threading
import time
from typing import Any

_TO = os.environ.get("RECORD_TO", "")
_UNDER = os.environ.get("RECORD_UNDER", "")
_POLL_S = 0.002
_real = {name: getattr(os, name) for name in (
    "fsync", "fdatasync", "write", "writev", "pwrite", "pwritev", "ftruncate", "truncate", "rename", "replace",
    "unlink", "remove",
)}  # fmt: skip
_lock = threading.RLock()
_numbers = itertools.count(1)  # of syncs
_files: dict[str, Any] = {}  # this process's journal and blobs: a forked one gets its own
_known: dict[int, bytes] = {}  # inode → its content at the last sync
_kept_open: dict[int, int] = {}  # inode → a descriptor, so that its number is not given to another file


def _note(operation: str, blob: bytes | None = None, **about: Any) -> None:
    with _lock:
        if _files.get("pid") != os.getpid():
            _known.clear()
            _files["pid"] = os.getpid()
            _files["journal"] = open(f"{_TO}/{os.getpid()}.journal", "ab", buffering=0)
            _files["blobs"] = open(f"{_TO}/{os.getpid()}.blobs", "ab", buffering=0)
        if blob is not None:
            about["blob"] = [_files["blobs"].tell(), len(blob)]
            _files["blobs"].write(blob)
        line = {"operation": operation, **about}
        line.setdefault("time", time.monotonic())
        _files["journal"].write(json.dumps(line).encode() + b"\n")


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _ours(path: Any) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return os.path.abspath(text).startswith(_UNDER) if text else False


def _keep(fd: int) -> int:
    inode = os.fstat(fd).st_ino
    if inode not in _kept_open:
        _kept_open[inode] = os.dup(fd)
    return inode


def _content(fd: int, path: str) -> bytes:
    size = os.fstat(fd).st_size
    with open(f"/proc/self/fd/{fd}" if "(deleted)" in path else path, "rb") as file:
        return file.read(size)


def _sync(name: str, fd: Any) -> None:
    number = fd if isinstance(fd, int) else fd.fileno()
    path = _path_of(number)
    if not _ours(path):
        _real[name](fd)
        return
    with _lock:
        number_of_sync = next(_numbers)
        began = time.monotonic()
        blob: bytes | None = None
        about: dict[str, Any]
        if stat.S_ISDIR(os.fstat(number).st_mode):
            with os.scandir(path) as entries:
                names = {e.name: [e.inode(), e.is_dir(follow_symlinks=False)] for e in entries}
            about = {"names": names}
        else:
            inode = _keep(number)
            blob = _content(number, path)
            about = {"inode": inode, "bytes": len(blob)}
    _note("sync begins", path=path, number=number_of_sync)
    while os.path.exists(f"{_TO}/block"):
        try:
            _real["unlink"](f"{_TO}/pass-{number_of_sync}")
            break
        except FileNotFoundError:
            time.sleep(_POLL_S)
    try:
        with open(f"{_TO}/delay") as file:
            time.sleep(float(file.read() or 0))
    except FileNotFoundError:
        pass
    _real[name](fd)
    with _lock:
        if blob is not None:
            before = _known.get(about["inode"], b"")
            about["after"] = len(before) if blob.startswith(before) else 0
            _known[about["inode"]] = blob
            blob = blob[about["after"] :]
        _note("sync", blob, path=path, began=began, **about)


def _written(fd: int, content: bytes, at: int | None) -> None:
    path = _path_of(fd)
    if _ours(path):
        if at is None:
            appends = os.fstat(fd).st_size == os.lseek(fd, 0, os.SEEK_CUR)
            at = os.fstat(fd).st_size - len(content) if appends else os.lseek(fd, 0, os.SEEK_CUR) - len(content)
        _note("write", content, path=path, inode=_keep(fd), at=at)


def install() -> None:
    if not _TO or not _UNDER:
        return

    def sync(name: str) -> Any:
        return lambda fd: _sync(name, fd)

    def write(fd: int, content: Any) -> int:
        done: int = _real["write"](fd, content)
        _written(fd, bytes(content)[:done], None)
        return done

    def writev(fd: int, parts: Any) -> int:
        done: int = _real["writev"](fd, parts)
        _written(fd, b"".join(map(bytes, parts))[:done], None)
        return done

    def pwrite(fd: int, content: Any, offset: int) -> int:
        done: int = _real["pwrite"](fd, content, offset)
        _written(fd, bytes(content)[:done], offset)
        return done

    def pwritev(fd: int, parts: Any, offset: int, flags: int = 0) -> int:
        done: int = _real["pwritev"](fd, parts, offset, flags)
        _written(fd, b"".join(map(bytes, parts))[:done], offset)
        return done

    def ftruncate(fd: int, length: int) -> None:
        _real["ftruncate"](fd, length)
        if _ours(_path_of(fd)):
            _note("truncate", path=_path_of(fd), inode=_keep(fd), bytes=length)

    def truncate(path: Any, length: int) -> None:
        if isinstance(path, int):
            ftruncate(path, length)
            return
        _real["truncate"](path, length)
        if _ours(path):
            _note("truncate", path=os.path.abspath(path), inode=os.stat(path).st_ino, bytes=length)

    def rename(name: str) -> Any:
        def renamed(source: Any, target: Any, **options: Any) -> None:
            _real[name](source, target, **options)
            if not options and _ours(target):
                paths = {"path": os.path.abspath(source), "target": os.path.abspath(target)}
                _note("rename", **paths, inode=os.stat(target).st_ino)

        return renamed

    def unlink(name: str) -> Any:
        def unlinked(path: Any, **options: Any) -> None:
            if not options and _ours(path):
                try:
                    fd = os.open(path, os.O_RDONLY)
                    _keep(fd)
                    os.close(fd)
                except OSError:
                    pass
            _real[name](path, **options)
            if not options and _ours(path):
                _note("unlink", path=os.path.abspath(path))

        return unlinked

    os.fsync, os.fdatasync = sync("fsync"), sync("fdatasync")
    os.write, os.writev, os.pwrite, os.pwritev = write, writev, pwrite, pwritev
    os.ftruncate, os.truncate = ftruncate, truncate
    os.rename, os.replace = rename("rename"), rename("replace")
    os.unlink, os.remove = unlink("unlink"), unlink("remove")
