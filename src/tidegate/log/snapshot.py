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

import errno
import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

from tidegate.log.files.disk import fsync_folder, storage_error
from tidegate.log.frame import CHANGES, WRITER, Buffer, check_body, decode_changes, encode_changes, parse_header
from tidegate.log.index import TopicIndex
from tidegate.log.recovery import Damage
from tidegate.log.segment import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    Status,
    index_name,
    parse_segment_header,
    scan,
    sequence_of,
    snapshot_position_of,
)
from tidegate.log.unreadable import DEVICE_ERRORS

SNAPSHOT_MAGIC = b"TGN1"
END_MAGIC = b"TGNE"
SNAPSHOT_HEADER_BYTES = 64
END_BYTES = 32
SNAPSHOTS_KEPT = 2
ATTEMPTS = 5
"""A running broker replaces snapshots and drops segments while somebody reads; how often to look again."""

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
            try:
                self._temporary.unlink(missing_ok=True)
            except OSError:
                pass  # the next snapshot removes it


def load_snapshot(folder: Path) -> tuple[int, Iterator[list[bytes]], list[Damage]]:
    """The newest readable snapshot: its position, its records frame by frame, and what is damaged.

    The report is complete when the iterator is. Without any snapshot the position is 0. If none is
    readable, what is left of the newest that has a header is better than nothing. Raises OSError for
    what may pass."""
    report: list[Damage] = []
    salvage: tuple[int, Iterator[list[bytes]], list[Damage]] | None = None
    positions = snapshot_positions(folder) if folder.is_dir() else []
    for position in positions:
        path = folder / snapshot_name(position)
        try:
            buf = _mapped(path)
        except OSError as error:
            if error.errno != errno.ENOENT and error.errno not in DEVICE_ERRORS:
                raise  # it is as it was, and another start may read it
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


def _writer_of(buf: Buffer, position: int) -> int | None:
    head = buf[:SNAPSHOT_HEADER_BYTES]
    if len(head) < SNAPSHOT_HEADER_BYTES or crc32(head[:60]) != _U32.unpack_from(head, 60)[0]:
        return None
    magic, version, written, _, writer = _HEAD.unpack(head[:60])
    if magic != SNAPSHOT_MAGIC or version != 1 or written != position:
        return None
    return int(writer)


def _records_of(buf: Buffer) -> int | None:
    """The number of records by the end of the file, or None without a valid end."""
    end = buf[max(len(buf) - END_BYTES, 0) :]
    if len(end) < END_BYTES or crc32(end[:28]) != _U32.unpack_from(end, 28)[0]:
        return None
    magic, records, size = _END.unpack(end[:28])
    return int(records) if magic == END_MAGIC and size == len(buf) else None


def _frames(
    buf: Buffer,
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


def state_beside(folder: Path) -> Iterator[list[bytes]]:
    """The state records as a broker would recover them, beside one that may be running: the newest snapshot, then the
    changes since.

    The snapshot comes first: it was taken while changes went on, and only what was appended up to its end makes it
    consistent. So the log is looked at after it, and must still reach back to it."""
    for _ in range(ATTEMPTS):
        position, frames, damage = load_snapshot(folder)
        segments = _segments_from(folder, position)
        if not segments or segments[0].header.base <= position:
            break
    yield from frames
    if damage:
        position = 0  # what the snapshot lost may still stand in the log
        segments = _segments_from(folder, position)
    for segment in segments:
        yield from _changes_from(segment, position)


class _Segment(NamedTuple):
    header: SegmentHeader
    buf: Buffer
    topics: TopicIndex | None


def _segments_from(folder: Path, position: int) -> list[_Segment]:
    """The segments that may hold changes at or after `position`, oldest first."""
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if sequence_of(path.name) is not None)
    found: list[_Segment] = []
    for path in reversed(paths):
        try:
            # The newest is copied: the broker may cut it, and whoever looks at a mapping of what is gone is killed.
            buf = path.read_bytes() if path is paths[-1] else _mapped(path)
        except FileNotFoundError:
            break  # dropped since, and all before it
        header = parse_segment_header(buf[:SEGMENT_HEADER_BYTES])
        if header is None:
            continue
        found.append(_Segment(header, buf, _index_of(path, header, len(buf))))
        if header.base < position:
            break  # what lies before ends below
    return found[::-1]


def _index_of(path: Path, segment: SegmentHeader, size: int) -> TopicIndex | None:
    try:
        index = TopicIndex.load(_mapped(path.with_name(index_name(segment.sequence))))
    except FileNotFoundError:
        return None
    fits = index is not None and index.header.segment_bytes == size and index.header.writer == segment.writer
    return index if fits else None


def _mapped(path: Path) -> Buffer:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return b""


def _changes_from(segment: _Segment, position: int) -> Iterator[list[bytes]]:
    segment_header, buf, index = segment
    if index is None:
        for item in scan(buf, SEGMENT_HEADER_BYTES, segment_header.writer, segment_header.base):
            header = item.header
            if item.status is Status.VALID and header and header.kind == CHANGES and header.base >= position:
                yield decode_changes(buf, item.offset)
        return
    for offset in index.changes_offsets[bisect_left(index.changes_bases, position) :]:
        header = parse_header(buf, offset)
        if header is not None and header.writer == segment_header.writer and check_body(buf, offset, header):
            yield decode_changes(buf, offset)
