"""Segments: the files that frames are written to, one after the other.

A segment is named by its sequence number, `%020d.log`; its index is `%020d.index`. Numbers increase
by one without a hole, so a missing file is noticed. A segment is written by one process only.

    offset  size  field
         0     4  magic       b"TGS1"
         4     4  version     1
         8     8  sequence    the number in the file's name
        16     8  base        the log's end when the segment was made: no position in it is lower
        24     8  created_ms  Unix milliseconds
        32     4  writer      the number that all its frames carry
        36    24  reserved    0
        60     4  crc         zlib crc32 of bytes 0 … 60
        64        frames, without a byte between them, to the end of the file

A frame of a segment is valid if it is valid in itself, carries the segment's writer number and its
base is not lower than the end of the frame before it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from tidegate.log.frame import MAGIC, Buffer, FrameHeader, check_body, parse_header

SEGMENT_MAGIC = b"TGS1"
SEGMENT_HEADER_BYTES = 64
SEGMENT_VERSION = 1

_HEAD = struct.Struct("<4sIQqqI24x")
_U32 = struct.Struct("<I")
_NAME = re.compile(r"(\d{20})\.log")
_SNAPSHOT = re.compile(r"(\d{20})\.snapshot")


def segment_name(sequence: int) -> str:
    return f"{sequence:020d}.log"


def index_name(sequence: int) -> str:
    return f"{sequence:020d}.index"


def sequence_of(name: str) -> int | None:
    """The sequence number in a segment's file name; None for other files."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def snapshot_position_of(name: str) -> int | None:
    """The position in a snapshot's file name; None for other files."""
    found = _SNAPSHOT.fullmatch(name)
    return int(found[1]) if found else None


class SegmentHeader(NamedTuple):
    sequence: int
    base: int
    created_ms: int
    writer: int


def encode_segment_header(header: SegmentHeader) -> bytes:
    head = _HEAD.pack(SEGMENT_MAGIC, SEGMENT_VERSION, header.sequence, header.base, header.created_ms, header.writer)
    return head + _U32.pack(crc32(head))


def parse_segment_header(raw: bytes) -> SegmentHeader | None:
    """The header of a segment file, or None where it is not valid."""
    if len(raw) < SEGMENT_HEADER_BYTES or raw[:4] != SEGMENT_MAGIC:
        return None
    if crc32(raw[:60]) != _U32.unpack_from(raw, 60)[0]:
        return None
    _, version, sequence, base, created_ms, writer = _HEAD.unpack(raw[:60])
    return SegmentHeader(sequence, base, created_ms, writer) if version == SEGMENT_VERSION else None


class SegmentFacts(NamedTuple):
    """What is known of a segment without reading it. A MemoryLog's segments have no file."""

    sequence: int
    path: Path | None
    base: int
    end: int
    bytes: int
    first_time_ms: int
    last_time_ms: int  # the newest, also when the clock went back
    frames: int  # MESSAGES frames
    sealed: bool


class Status(Enum):
    VALID = "valid"
    BODY = "a frame's body fails its checksum"
    HEADER = "no valid frame header"
    CUT = "the file ends within a frame"


class Scanned(NamedTuple):
    """A frame, or a range of bytes where there is none. `header` is None for HEADER."""

    offset: int
    size: int
    header: FrameHeader | None
    status: Status


def scan(
    buf: Buffer,
    offset: int = SEGMENT_HEADER_BYTES,
    writer: int | None = None,
    position: int = 0,
    end: int | None = None,
) -> Iterator[Scanned]:
    """Every frame from `offset` to the end (`end`, or that of `buf`), and every range of bytes between that is none.

    `writer` None takes the number of the frame at `offset`. A damaged body is stepped over by its
    header's length. Where there is no valid header, the next one is searched for."""
    size = len(buf) if end is None else min(end, len(buf))
    if writer is None:
        first = parse_header(buf, offset)
        if first is not None:
            writer = first.writer
    while offset < size:
        header = _frame_header(buf, offset, writer, position)
        if header is None:
            after = _next_frame(buf, offset + 8, writer, position, size)
            yield Scanned(offset, after - offset, None, Status.HEADER)
            offset = after
            continue
        if offset + header.length > size:
            yield Scanned(offset, size - offset, header, Status.CUT)
            return
        valid = check_body(buf, offset, header)
        yield Scanned(offset, header.length, header, Status.VALID if valid else Status.BODY)
        offset += header.length
        position = header.end


def _frame_header(buf: Buffer, offset: int, writer: int | None, position: int) -> FrameHeader | None:
    header = parse_header(buf, offset)
    if header is None or header.writer != writer or header.base < position:
        return None
    return header


def _next_frame(buf: Buffer, offset: int, writer: int | None, position: int, size: int) -> int:
    """Where the next valid header is, at a multiple of 8; `size` if there is none."""
    while True:
        offset = buf.find(MAGIC, offset, size)
        if offset < 0:
            return size
        if offset & 7 == 0 and _frame_header(buf, offset, writer, position) is not None:
            return offset
        offset += 1
