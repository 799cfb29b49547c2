"""Snapshots: the whole state at a position, so that older CHANGES frames can go.

    %020d.snapshot, named by the position

    offset  size  field
         0     4  magic       b"TGN1"
         4     4  version     1
         8     8  position    the log's end when the state was taken
        16     8  created_ms  Unix milliseconds
        24     4  writer      the number that all its frames carry
        28    32  reserved    0
        60     4  crc         zlib crc32 of bytes 0 … 60
        64        CHANGES frames with base = position, then the end:
         0     4  magic       b"TGNE"
         4     4  reserved    0
         8     8  records     in all frames
        16     8  bytes       of the whole file
        24     4  reserved    0
        28     4  crc         zlib crc32 of these bytes 0 … 28

A snapshot is written under a temporary name, synced and renamed, so a file with the right name is
whole unless its bytes were damaged later. It is readable if its header and its end are valid; frames
that are not are stepped over. The one before is kept until the next is committed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from tidegate.log.files.disk import fsync_folder, storage_error
from tidegate.log.frame import CHANGES, WRITER, decode_changes, encode_changes
from tidegate.log.recovery import Damage
from tidegate.log.segment import Status, scan, snapshot_position_of

SNAPSHOT_MAGIC = b"TGN1"
END_MAGIC = b"TGNE"
SNAPSHOT_HEADER_BYTES = 64
END_BYTES = 32
SNAPSHOTS_KEPT = 2

_HEAD = struct.Struct("<4sIqqI32x")
_END = struct.Struct("<4s4xQQ4x")
_U32 = struct.Struct("<I")


def snapshot_name(position: int) -> str:
    return f"{position:020d}.snapshot"


def snapshot_positions(folder: Path) -> list[int]:
    """The positions of the snapshots in `folder`, newest first. The log must keep the CHANGES frames
    from the last of them on for the fallback to be of use."""
    found = (snapshot_position_of(path.name) for path in folder.iterdir())
    return sorted((position for position in found if position is not None), reverse=True)


class SnapshotWriter:
    """Write the state as of `position`. Nothing is changed before `commit`. Every method raises
    StorageError or DiskFull; after that only `abort` is left."""

    def __init__(self, folder: Path, position: int) -> None:
        self._folder = folder
        self._position = position
        self._time_ms = time.time_ns() // 1_000_000
        self._path = folder / snapshot_name(position)
        self._temporary = self._path.with_name(self._path.name + ".tmp")
        self._records = 0
        self._bytes = SNAPSHOT_HEADER_BYTES
        self._file: BinaryIO | None = None
        try:
            for left in folder.glob("*.snapshot.tmp"):
                left.unlink()
            self._file = self._temporary.open("wb")
            head = _HEAD.pack(SNAPSHOT_MAGIC, 1, position, self._time_ms, WRITER)
            self._file.write(head + _U32.pack(crc32(head)))
        except OSError as error:
            self.abort()
            raise storage_error(error, f"cannot begin {self._temporary}") from error

    def add(self, records: Sequence[bytes]) -> None:
        """Add one frame. A few thousand records each make good frames."""
        assert self._file is not None, "the snapshot is finished"
        frame = encode_changes(records, self._position, self._time_ms)
        try:
            self._file.write(frame)
        except OSError as error:
            raise storage_error(error, f"cannot write {self._temporary}") from error
        self._records += len(records)
        self._bytes += len(frame)

    def commit(self) -> None:
        """Make it durable and the newest; snapshots before the previous one go."""
        assert self._file is not None, "the snapshot is finished"
        end = _END.pack(END_MAGIC, self._records, self._bytes + END_BYTES)
        try:
            self._file.write(end + _U32.pack(crc32(end)))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self._path)
            self._file = None
            fsync_folder(self._folder)
            for position in snapshot_positions(self._folder)[SNAPSHOTS_KEPT:]:
                (self._folder / snapshot_name(position)).unlink()
        except OSError as error:
            raise storage_error(error, f"cannot commit {self._path}") from error

    def abort(self) -> None:
        """Leave no trace. Harmless after `commit`."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                pass  # what it could not flush is thrown away anyhow
            self._file = None
            self._temporary.unlink(missing_ok=True)


def load_snapshot(folder: Path) -> tuple[int, Iterator[list[bytes]], list[Damage]]:
    """The newest readable snapshot: its position, its records frame by frame, and what is damaged.

    The report is complete when the iterator is. Without any snapshot the position is 0. If none is
    readable, what is left of the newest that has a header is better than nothing."""
    report: list[Damage] = []
    salvage: tuple[int, Iterator[list[bytes]], list[Damage]] | None = None
    positions = snapshot_positions(folder) if folder.is_dir() else []
    for position in positions:
        path = folder / snapshot_name(position)
        try:
            with path.open("rb") as file:
                buf: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: an empty file
            buf = b""
        writer = _writer_of(buf, position)
        records = _records_of(buf)
        if writer is None or records is None:
            what = "header" if writer is None else "end"
            report.append(Damage(path.name, 0, len(buf), position, position - 1, f"the snapshot's {what} is damaged"))
            if writer is not None and salvage is None:
                salvage = position, _frames(buf, len(buf), path.name, position, writer, None, report), report
            continue
        stop = len(buf) - END_BYTES
        return position, _frames(buf, stop, path.name, position, writer, records, report), report
    return salvage or (0, iter(()), report)


def _writer_of(buf: bytes | mmap.mmap, position: int) -> int | None:
    head = buf[:SNAPSHOT_HEADER_BYTES]
    if len(head) < SNAPSHOT_HEADER_BYTES or crc32(head[:60]) != _U32.unpack_from(head, 60)[0]:
        return None
    magic, version, written, _, writer = _HEAD.unpack(head[:60])
    if magic != SNAPSHOT_MAGIC or version != 1 or written != position:
        return None
    return int(writer)


def _records_of(buf: bytes | mmap.mmap) -> int | None:
    """The number of records by the end of the file, or None without a valid end."""
    end = buf[max(len(buf) - END_BYTES, 0) :]
    if len(end) < END_BYTES or crc32(end[:28]) != _U32.unpack_from(end, 28)[0]:
        return None
    magic, records, size = _END.unpack(end[:28])
    return int(records) if magic == END_MAGIC and size == len(buf) else None


def _frames(
    buf: bytes | mmap.mmap,
    stop: int,
    name: str,
    position: int,
    writer: int,
    records: int | None,
    report: list[Damage],
) -> Iterator[list[bytes]]:
    found = 0
    damaged = False
    for item in scan(buf, SNAPSHOT_HEADER_BYTES, writer, position):
        if item.offset >= stop:
            break
        if item.status is Status.VALID and item.header is not None and item.header.kind == CHANGES:
            frame = decode_changes(buf, item.offset)
            found += len(frame)
            yield frame
        else:
            size = min(item.size, stop - item.offset)
            report.append(Damage(name, item.offset, size, position, position - 1, item.status.value))
            damaged = True
    if records is not None and found != records:
        reason = f"{records - found} of {records} records are lost"
        report.append(Damage(name, 0, 0, position, position - 1, reason))
    elif damaged and records is None:
        report.append(Damage(name, 0, 0, position, position - 1, "an unknown number of records is lost"))
