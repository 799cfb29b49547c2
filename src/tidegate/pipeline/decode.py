"""Frames of the log as Arrow batches, one row per message; large frames without a Python loop over messages.

Payloads, properties and uuids are used in place: the batch keeps the frame's bytes alive. What is
the same for a whole run (topic, publisher, tenant, flags) is repeated by numpy as dictionary indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.log.frame import EXPIRIES, HEADER_BYTES, MESSAGES, PROPERTIES, UUIDS, Buffer, parse_header
from tidegate.log.run import NO_EXPIRY, NOT_KEPT, QOS_MASK, RETAIN, Run
from tidegate.pipeline.schemas import MESSAGES as MESSAGES_TABLE

_NAME = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        field.with_type(_NAME if field.type == pa.string() else pa.binary(16) if field.name == "uuid" else field.type)
        for field in MESSAGES_TABLE
    ]
)
"""One row per message, as in the lake's table; names are dictionary-encoded and uuids of fixed size."""


def _padded(size: int) -> int:
    return size + 7 & ~7


class _Cursor:
    """Walks over the buffers of a frame's body."""

    def __init__(self, buf: Buffer, at: int) -> None:
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


def frame_to_arrow(buf: Buffer, offset: int = 0) -> pa.RecordBatch:
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
    times = np.full(n, header.time_ms * 1000, np.int64)
    columns = [
        pa.array(np.arange(header.base, header.base + n, dtype=np.int64)),
        pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), n, [None, pa.py_buffer(times)]),
        named(3, tenants),
        named(1, topics),
        named(2, publishers),
        pa.array((of_message & QOS_MASK).astype(np.int8)),
        pa.array((of_message & (RETAIN | NOT_KEPT)) == RETAIN),
        payloads,
        uuids,
        expiries,
        properties,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def runs_to_arrow(runs: Sequence[Run]) -> pa.RecordBatch:
    """The messages of many small frames as one batch: for a message here and there, this is the quicker way."""
    counts = np.fromiter((run.count for run in runs), np.int64, len(runs))
    n = int(counts.sum())

    def repeated(values: Iterable[int], dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.repeat(np.fromiter(values, dtype, len(runs)), counts)

    def named(names: list[bytes]) -> pa.Array:
        place = {name: i for i, name in enumerate(dict.fromkeys(names))}
        indices = repeated((place[name] for name in names), np.int32)
        return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(place, pa.binary()).cast(pa.string()))

    def optional(kind: pa.DataType, columns: list[list[Any] | None], absent: Any) -> pa.Array:
        if all(column is None for column in columns):
            return pa.nulls(n, kind)
        values: list[Any] = []
        for run, column in zip(runs, columns, strict=True):
            values += [None] * run.count if column is None else [None if v == absent else v for v in column]
        return pa.array(values, kind)

    within = np.arange(n, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    times = repeated((run.time_ms * 1000 for run in runs), np.int64)
    flags = repeated((run.flags for run in runs), np.uint32)
    columns = [
        pa.array(repeated((run.base for run in runs), np.int64) + within),
        pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), n, [None, pa.py_buffer(times)]),
        named([run.tenant for run in runs]),
        named([run.topic for run in runs]),
        named([run.publisher for run in runs]),
        pa.array((flags & QOS_MASK).astype(np.int8)),
        pa.array((flags & (RETAIN | NOT_KEPT)) == RETAIN),
        pa.array(list(chain.from_iterable([run.payloads for run in runs])), pa.binary()),
        optional(pa.binary(16), [run.uuids for run in runs], bytes(16)),
        optional(pa.int64(), [run.expiries for run in runs], NO_EXPIRY),
        optional(pa.binary(), [run.properties for run in runs], b""),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
