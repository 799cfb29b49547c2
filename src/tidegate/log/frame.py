"""Frames: what one tick of the event loop committed, as bytes.

All integers are little endian; every buffer begins at a multiple of 8 bytes from the frame's start
and is followed by zeros up to the next multiple. A frame is a header of 64 bytes and a body:

    offset  size  field
         0     4  magic            b"TGF1"
         4     1  kind             1 messages, 2 changes
         5     1  columns          bit 0 properties, bit 1 expiries, bit 2 uuids
         6     2  followed         1 if the CHANGES frame of the same tick follows; the two are one
         8     4  length           of the whole frame with header and padding; a multiple of 8
        12     4  body crc         zlib crc32 of bytes 64 … length
        16     8  base             position of the first message (changes: the log's end then)
        24     8  time_ms          Unix milliseconds at which the broker accepted the tick
        32     4  count            messages (changes: records)
        36     4  runs             rows of the runs table
        40     4  topics           entries of the topic dictionary
        44     4  publishers       entries of the publisher dictionary
        48     4  tenants          entries of the tenant dictionary
        52     4  dictionary bytes of the three dictionaries with their padding
        56     4  writer           drawn at random by each process that writes; see below
        60     4  header crc       zlib crc32 of bytes 0 … 60

Body of a MESSAGES frame, in this order, n = count:

    runs table     5 columns of u32[runs]: count, topic, publisher, tenant, flags; then padding
    dictionaries   topics, publishers, tenants; each i32[entries + 1] offsets, padding, bytes, padding
    payloads       i32[n + 1] offsets, padding, bytes, padding
    properties     if columns bit 0: as payloads; empty where a message has none
    expiries       if columns bit 1: u32[n], 0xFFFFFFFF where a message has none
    uuids          if columns bit 2: 16 bytes × n, zeros where a message has none

Body of a CHANGES frame: `count` records, each a u32 length and its bytes, then padding.

A header is valid when its magic, kind and header crc are right and its length is a multiple of 8
from 64 up. The body is valid when its crc is. The header has a checksum of its own so that the
length can be trusted, and the next frame found, when the body is damaged.

A payload may contain the bytes of a perfectly valid frame. A reader that searches for the next frame
after damage must not take that for ours, so a segment names its writer and only frames with the
same number, which clients never see, count (SQLite's WAL salts serve the same end).
"""

from __future__ import annotations

import secrets
import struct
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import accumulate, pairwise, repeat
from mmap import mmap
from typing import NamedTuple
from zlib import crc32

from tidegate.log.rows import Rows
from tidegate.log.run import NO_EXPIRY, Run

if sys.byteorder != "little":  # the arrays below are written in the machine's order
    raise ImportError("tidegate's log is written on little-endian machines only")

Buffer = bytes | mmap

MAGIC = b"TGF1"
HEADER_BYTES = 64
MESSAGES = 1
CHANGES = 2
PROPERTIES = 1
EXPIRIES = 2
UUIDS = 4

FRAME_BYTES_MAX = 2**31 - 8
"""Offsets are i32."""

WRITER = secrets.randbits(32)
"""This process's number in the frames it writes."""

_PAD = tuple(bytes(n) for n in range(8))
_NO_UUID = bytes(16)
_NO_HEADER = bytes(HEADER_BYTES)
_MANY = 256
_FEW, _OFTEN, _SMALL = 32, 16384, 65536  # so many values of so few bytes each: their offsets are kept ready
_HEAD = struct.Struct("<4sBBHIIqqIIIIIII")  # all but the header's own crc
_HEADER = struct.Struct("<4sBBHIIqqIIIIIIII")
_U32 = struct.Struct("<I")
_ONE_RUN = struct.Struct("<IIIIIIii")  # the runs table of a single run and the first dictionary's offsets
_I32 = struct.Struct("<i")
_PAIR = struct.Struct("<ii")

_head = _HEAD.pack
_one_run = _ONE_RUN.pack
_pair = _PAIR.pack
_u32 = _U32.pack


class FrameHeader(NamedTuple):
    kind: int
    columns: int
    length: int
    body_crc: int
    base: int
    time_ms: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    runs: int
    topics: int
    publishers: int
    tenants: int
    dictionary_bytes: int
    writer: int
    followed: bool

    @property
    def end(self) -> int:
        """The position after the frame."""
        return self.base + self.count if self.kind == MESSAGES else self.base


def encode_rows(
    rows: Rows,
    base: int,
    time_ms: int,
    writer: int = WRITER,
    followed: bool = False,
) -> tuple[bytes, Collection[bytes]]:
    """One frame of all `rows`, and its distinct topics. `followed`: the tick's CHANGES frame comes right after it, and
    one is not valid without the other.

    Raises ValueError above FRAME_BYTES_MAX; the caller splits its ticks well below that."""
    cuts = rows.cuts
    payloads = rows.payloads
    count = len(payloads)
    topics: Collection[bytes]
    if len(cuts) == 1:
        topic, publisher, tenant = rows.topics[0], rows.publishers[0], rows.tenants[0]
        n, p, t = len(topic), len(publisher), len(tenant)
        parts = [
            _one_run(count, 0, 0, 0, rows.flags[0], 0, 0, n), topic, _PAD[-n & 7],
            _pair(0, p), publisher, _PAD[-p & 7],
            _pair(0, t), tenant, _PAD[-t & 7],
        ]  # fmt: skip
        dictionary = 24 + (n + 7 & ~7) + (p + 7 & ~7) + (t + 7 & ~7)
        topics = (topic,)
        entries = (1, 1, 1)
        if count == 1:
            payload = payloads[0]
            n = len(payload)
            parts += (_pair(0, n), payload, _PAD[-n & 7])
        else:
            _add_column(parts, payloads)
    else:
        parts = []
        topics, entries, dictionary = _add_runs(parts, rows)
        _add_column(parts, payloads)
    columns = 0
    if rows.properties is not None or rows.expiries is not None or rows.uuids is not None:
        columns = _add_options(parts, rows)
    if count < _MANY:
        body = b"".join(parts)
        length = HEADER_BYTES + len(body)
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {length} bytes is more than {FRAME_BYTES_MAX}")
        head = _head(
            MAGIC, MESSAGES, columns, followed, length, crc32(body), base, time_ms,
            count, len(cuts), *entries, dictionary, writer,
        )  # fmt: skip
        return b"".join((head, _u32(crc32(head)), body)), topics
    # Joining thousands of parts makes a scratch array so large that malloc gives it back to the
    # system and faults it in again each time; writelines needs none and is four times as fast.
    out = BytesIO()
    out.write(_NO_HEADER)
    out.writelines(parts)
    length = out.tell()
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes is more than {FRAME_BYTES_MAX}")
    with out.getbuffer() as view:
        head = _head(
            MAGIC, MESSAGES, columns, followed, length, crc32(view[HEADER_BYTES:]), base, time_ms,
            count, len(cuts), *entries, dictionary, writer,
        )  # fmt: skip
        view[:HEADER_BYTES] = head + _u32(crc32(head))
    return out.getvalue(), topics


def _add_column(parts: list[bytes], values: list[bytes]) -> None:
    """Offsets and bytes of one column of byte strings."""
    count = len(values)
    offsets = b""
    if _FEW < count < _OFTEN and len(values[0]) == len(values[1]) == len(values[-1]) < _SMALL:
        sizes = list(map(len, values))
        if sizes.count(sizes[0]) == count:
            size = sizes[0] * count
            offsets = _even_offsets(sizes[0])[: 4 * (count + 1)]
    if not offsets:
        ends = list(accumulate(map(len, values), initial=0))
        size = ends[-1]
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a column of {size} bytes is more than {FRAME_BYTES_MAX}")
        offsets = struct.pack(f"<{count + 1}i", *ends)
    parts.append(offsets)
    if not count & 1:
        parts.append(_PAD[4])
    parts += values
    parts.append(_PAD[-size & 7])


@lru_cache(32)
def _even_offsets(size: int) -> bytes:
    """Devices often send readings of one size: then the offsets are the same each time."""
    return struct.pack(f"<{_OFTEN}i", *range(0, _OFTEN * size, size) if size else bytes(_OFTEN))


def _add_runs(parts: list[bytes], rows: Rows) -> tuple[Collection[bytes], tuple[int, int, int], int]:
    """The runs table and the dictionaries; returns the distinct topics, and the header's numbers about them (entries
    of each dictionary, bytes)."""
    cuts = rows.cuts
    runs = len(cuts)
    alone = runs == len(rows.payloads)  # each row is a run of its own
    if alone:
        table = [1] * runs
    else:
        table = [b - a for a, b in pairwise(cuts)]
        table.append(len(rows.payloads) - cuts[-1])
    dictionaries: list[list[bytes]] = []
    for names in (rows.topics, rows.publishers, rows.tenants):
        if not alone:
            names = [names[cut] for cut in cuts]
        distinct = list(dict.fromkeys(names))
        dictionaries.append(distinct)
        if len(distinct) == 1:
            table += repeat(0, runs)
        else:
            place = dict(zip(distinct, range(len(distinct)), strict=True))
            table += map(place.__getitem__, names)
    table += rows.flags if alone else [rows.flags[cut] for cut in cuts]
    parts.append(array("I", table).tobytes())
    parts.append(_PAD[4 * (runs & 1)])
    first = len(parts)
    for distinct in dictionaries:
        _add_column(parts, distinct)
    entries = (len(dictionaries[0]), len(dictionaries[1]), len(dictionaries[2]))
    return dictionaries[0], entries, sum(map(len, parts[first:]))


def _add_options(parts: list[bytes], rows: Rows) -> int:
    """The columns that only some messages have; returns their bit mask."""
    columns = 0
    if rows.properties is not None:
        columns |= PROPERTIES
        _add_column(parts, rows.properties)
    if rows.expiries is not None:
        columns |= EXPIRIES
        parts.append(array("I", rows.expiries).tobytes())
        parts.append(_PAD[4 * (len(rows.expiries) & 1)])
    if rows.uuids is not None:
        columns |= UUIDS
        parts += rows.uuids
    return columns


def encode_changes(records: Sequence[bytes], base: int, time_ms: int, writer: int = WRITER) -> bytes:
    """One CHANGES frame; `base` is the log's end after the messages written with it."""
    parts: list[bytes] = []
    size = 0
    for record in records:
        parts.append(_u32(len(record)))
        parts.append(record)
        size += 4 + len(record)
    parts.append(_PAD[-size & 7])
    body = b"".join(parts)
    length = HEADER_BYTES + len(body)
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes is more than {FRAME_BYTES_MAX}")
    head = _head(MAGIC, CHANGES, 0, 0, length, crc32(body), base, time_ms, len(records), 0, 0, 0, 0, 0, writer)
    return b"".join((head, _u32(crc32(head)), body))


def parse_header(buf: Buffer, offset: int = 0) -> FrameHeader | None:
    """The header at `offset`, or None where there is no valid one."""
    raw = buf[offset : offset + HEADER_BYTES]
    if len(raw) < HEADER_BYTES or raw[:4] != MAGIC:
        return None
    (_, kind, columns, followed, length, body_crc, base, time_ms, count, runs,
     topics, publishers, tenants, dictionary, writer, crc) = _HEADER.unpack(raw)  # fmt: skip
    if crc32(raw[:60]) != crc or kind not in (MESSAGES, CHANGES) or length < HEADER_BYTES or length & 7:
        return None
    return FrameHeader(
        kind, columns, length, body_crc, base, time_ms, count, runs, topics, publishers, tenants, dictionary,
        writer, bool(followed),
    )  # fmt: skip


def check_body(buf: Buffer, offset: int, header: FrameHeader) -> bool:
    """Whether the whole body is there and as it was written."""
    end = offset + header.length
    if end > len(buf):
        return False
    if header.length < 65536:  # a small copy is cheaper than a view
        return crc32(buf[offset + HEADER_BYTES : end]) == header.body_crc
    with memoryview(buf) as whole, whole[offset + HEADER_BYTES : end] as body:
        return crc32(body) == header.body_crc


def _padded(size: int) -> int:
    return size + 7 & ~7


def _names(buf: Buffer, at: int, entries: int) -> tuple[list[bytes], int]:
    """A dictionary that begins at `at`, and where the next one begins."""
    offsets = struct.unpack_from(f"<{entries + 1}i", buf, at)
    start = at + _padded(4 * (entries + 1))
    names = [buf[start + a : start + b] for a, b in pairwise(offsets)]
    return names, start + _padded(offsets[-1])


def frame_topics(buf: Buffer, offset: int = 0) -> list[bytes]:
    """The distinct topics of a MESSAGES frame."""
    header = parse_header(buf, offset)
    if header is None or header.kind != MESSAGES:
        return []
    return _names(buf, offset + HEADER_BYTES + _padded(20 * header.runs), header.topics)[0]


def decode_messages(
    buf: Buffer, offset: int = 0, wanted: Callable[[bytes], bool] | None = None, start: int = 0
) -> list[Run]:
    """The runs whose topic is `wanted`, cut so that no position lies below `start`.

    The frame must have passed `check_body`. Payloads of other runs are not touched."""
    header = parse_header(buf, offset)
    if header is None or header.kind != MESSAGES:
        return []
    table = offset + HEADER_BYTES
    rows = header.runs
    at = table + _padded(20 * rows)
    topics, at = _names(buf, at, header.topics)
    keep = None if wanted is None else [wanted(topic) for topic in topics]
    if keep is not None and True not in keep:
        return []
    publishers, at = _names(buf, at, header.publishers)
    tenants, at = _names(buf, at, header.tenants)
    columns = _Columns(buf, at, header)
    numbers = struct.unpack_from(f"<{5 * rows}I", buf, table)
    runs = []
    first = 0
    for row in range(rows):
        count, topic, publisher, tenant, flags = numbers[row::rows]
        skip = min(max(start - header.base - first, 0), count)
        if skip < count and (keep is None or keep[topic]):
            a, b = first + skip, first + count
            payloads, properties, expiries, uuids = columns.cut(a, b)
            runs.append(
                Run(
                    topics[topic], publishers[publisher], tenants[tenant], flags,
                    payloads, properties, expiries, uuids, header.base + a, header.time_ms,
                )
            )  # fmt: skip
        first += count
    return runs


class _Columns:
    """Where a frame's message columns are, to cut a run's share out of them."""

    __slots__ = ("_buf", "_count", "_expiries", "_payloads", "_properties", "_uuids")

    def __init__(self, buf: Buffer, at: int, header: FrameHeader) -> None:
        self._buf = buf
        self._count = header.count
        self._payloads = at
        self._properties = self._expiries = self._uuids = -1
        at = self._past(at)
        if header.columns & PROPERTIES:
            self._properties = at
            at = self._past(at)
        if header.columns & EXPIRIES:
            self._expiries = at
            at += _padded(4 * header.count)
        if header.columns & UUIDS:
            self._uuids = at

    def _past(self, at: int) -> int:
        """Where the buffer after a column of byte strings begins."""
        last: int = _I32.unpack_from(self._buf, at + 4 * self._count)[0]
        return at + _padded(4 * (self._count + 1)) + _padded(last)

    def _strings(self, at: int, a: int, b: int) -> list[bytes]:
        buf = self._buf
        start = at + _padded(4 * (self._count + 1))
        offsets = struct.unpack_from(f"<{b - a + 1}i", buf, at + 4 * a)
        if offsets[0] == offsets[-1]:
            return [b""] * (b - a)
        return [buf[start + x : start + y] for x, y in pairwise(offsets)]

    def cut(self, a: int, b: int) -> tuple[list[bytes], list[bytes] | None, list[int] | None, list[bytes] | None]:
        """Payloads, properties, expiries and uuids of the messages a … b-1."""
        properties = expiries = uuids = None
        if self._properties >= 0:
            properties = self._strings(self._properties, a, b)
            if not any(properties):
                properties = None
        if self._expiries >= 0:
            expiries = list(struct.unpack_from(f"<{b - a}I", self._buf, self._expiries + 4 * a))
            if expiries.count(NO_EXPIRY) == b - a:
                expiries = None
        if self._uuids >= 0:
            at = self._uuids
            uuids = [self._buf[at + 16 * i : at + 16 * i + 16] for i in range(a, b)]
            if uuids.count(_NO_UUID) == b - a:
                uuids = None
        return self._strings(self._payloads, a, b), properties, expiries, uuids


def decode_changes(buf: Buffer, offset: int = 0) -> list[bytes]:
    """The records of a CHANGES frame that has passed `check_body`."""
    header = parse_header(buf, offset)
    if header is None or header.kind != CHANGES:
        return []
    records = []
    at = offset + HEADER_BYTES
    for _ in range(header.count):
        size: int = _U32.unpack_from(buf, at)[0]
        records.append(buf[at + 4 : at + 4 + size])
        at += 4 + size
    return records


def frame_entries(frames: bytes) -> Iterator[tuple[int, int, int, list[bytes] | None]]:
    """What an index needs to know of each of `frames`: (offset, base, count, topics), topics None for
    a CHANGES frame."""
    offset = 0
    while (header := parse_header(frames, offset)) is not None:
        topics = frame_topics(frames, offset) if header.kind == MESSAGES else None
        yield offset, header.base, header.count, topics
        offset += header.length
