"""A frame of the log as an Arrow batch, one row per message, without a Python loop over messages.

Payloads, properties and uuids are used in place: the batch keeps the frame's bytes alive. What is
the same for a whole run (topic, publisher, tenant, flags) is repeated by numpy as dictionary indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.log.frame import EXPIRIES, HEADER_BYTES, MESSAGES, PROPERTIES, UUIDS, parse_header
from tidegate.log.run import NO_EXPIRY, QOS_MASK, RETAIN

_NAME = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),
        pa.field("time", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("tenant", _NAME, nullable=False),
        pa.field("topic", _NAME, nullable=False),
        pa.field("publisher", _NAME, nullable=False),
        pa.field("qos", pa.int8(), nullable=False),
        pa.field("retain", pa.bool_(), nullable=False),
        pa.field("uuid", pa.binary(16)),
        pa.field("expiry", pa.int64()),  # seconds from `time`
        pa.field("properties", pa.binary()),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
"""One row per message."""


def _padded(size: int) -> int:
    return size + 7 & ~7


class _Cursor:
    """Walks over the buffers of a frame's body."""

    def __init__(self, buf: bytes, at: int) -> None:
        self._bytes = buf
        self._buffer = pa.py_buffer(buf)
        self.at = at

    def column(self, dtype: str, entries: int) -> npt.NDArray[Any]:
        found = np.frombuffer(self._bytes, dtype, entries, self.at)
        self.at += _padded(found.nbytes)
        return found

    def raw(self, size: int) -> pa.Buffer:
        found = self._buffer.slice(self.at, size)
        self.at += _padded(size)
        return found

    def strings(self, kind: pa.DataType, entries: int, valid: pa.Buffer | None = None) -> pa.Array:
        last = int(np.frombuffer(self._bytes, "<i4", 1, self.at + 4 * entries)[0])
        offsets = self.raw(4 * (entries + 1))
        return pa.Array.from_buffers(kind, entries, [valid, offsets, self.raw(last)])

    def nullable_strings(self, entries: int) -> pa.Array:
        """Empty means that there is none."""
        lengths = np.diff(np.frombuffer(self._bytes, "<i4", entries + 1, self.at))
        return self.strings(pa.binary(), entries, _valid(lengths > 0))


def _valid(present: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(present, bitorder="little"))


def frame_to_arrow(buf: bytes, offset: int = 0) -> pa.RecordBatch:
    """The MESSAGES frame at `offset`, which has passed `check_body`. Raises ValueError for any other."""
    header = parse_header(buf, offset)
    if header is None or header.kind != MESSAGES:
        raise ValueError(f"there is no MESSAGES frame at byte {offset}")
    n, runs = header.count, header.runs
    cursor = _Cursor(buf, offset + HEADER_BYTES)
    table = cursor.column("<u4", 5 * runs).reshape(5, runs)
    counts, flags = table[0], table[4]
    topics = cursor.strings(pa.string(), header.topics)
    publishers = cursor.strings(pa.string(), header.publishers)
    tenants = cursor.strings(pa.string(), header.tenants)
    payloads = cursor.strings(pa.binary(), n)
    properties = cursor.nullable_strings(n) if header.columns & PROPERTIES else pa.nulls(n, pa.binary())
    if header.columns & EXPIRIES:
        seconds = cursor.column("<u4", n)
        expiries = pa.array(seconds.astype(np.int64), mask=seconds == NO_EXPIRY)
    else:
        expiries = pa.nulls(n, pa.int64())
    if header.columns & UUIDS:
        halves = np.frombuffer(buf, "<u8", 2 * n, cursor.at)
        present = (halves[0::2] | halves[1::2]) != 0
        uuids = pa.Array.from_buffers(pa.binary(16), n, [_valid(present), cursor.raw(16 * n)])
    else:
        uuids = pa.nulls(n, pa.binary(16))

    def named(row: int, names: pa.Array) -> pa.Array:
        indices = np.repeat(table[row].astype(np.int32), counts)
        return pa.DictionaryArray.from_arrays(pa.array(indices), names)

    of_message = np.repeat(flags, counts)
    times = np.full(n, header.time_ms, np.int64)
    columns = [
        pa.array(np.arange(header.base, header.base + n, dtype=np.int64)),
        pa.Array.from_buffers(pa.timestamp("ms", tz="UTC"), n, [None, pa.py_buffer(times)]),
        named(3, tenants),
        named(1, topics),
        named(2, publishers),
        pa.array((of_message & QOS_MASK).astype(np.int8)),
        pa.array((of_message & RETAIN).astype(np.bool_)),
        uuids,
        expiries,
        properties,
        payloads,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
