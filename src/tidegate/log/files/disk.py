"""The few operations on files that need care, for whoever keeps some: `files`, `snapshot`, the pipeline."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from tidegate.errors import DiskFull, StorageError

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def storage_error(error: OSError, what: str) -> StorageError:
    """The operating system's error in our tree."""
    kind = DiskFull if error.errno in NO_ROOM else StorageError
    return kind(f"{what}: {error.strerror or error}")


def fsync_folder(folder: Path) -> None:
    """Make names that were created, renamed or removed in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make `folder`, and what is missing above it, each with its name durable."""
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def write_all(fd: int, content: bytes) -> None:
    """Write all of `content`; one system call unless the disk is full or a signal came."""
    written = os.write(fd, content)
    while written < len(content):
        written += os.write(fd, memoryview(content)[written:])


def replace_file(path: Path, content: bytes, *, durable: bool) -> None:
    """Put `content` at `path`, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        try:
            write_all(fd, content)
            if durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


class Held(Exception):
    """Another process has the lock; the message is its id."""


def lock_file(path: Path) -> int:
    """Lock `path` for this process and note its id there; the lock ends with the descriptor. Raises Held."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise Held(owner) from None
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except OSError:
        pass  # the lock holds without the note
    return fd
