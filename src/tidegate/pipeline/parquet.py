"""One file of the lake: written by a worker, on disk for good before anybody hears of it, with what Delta asks for.

Neither Spark nor delta-rs syncs what it writes. A file that is named in a commit of ours has been.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.errors import StorageError

FILE_ROWS_MAX = 500_000
FILE_BYTES_MAX = 64 << 20
"""Before compression. A reader that wants a file's rows in another order holds it in memory as a whole."""
ROW_GROUP_ROWS = 65_536
TEXT_BYTES_MAX = 64
"""Statistics keep this much of a text."""


class FileDamaged(StorageError):
    """A file that was once written is not whole any more, or gone."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} cannot be read: {why}")


class WrittenFile(NamedTuple):
    """A file that no commit names yet. Plain values: it travels from worker to driver."""

    name: str
    rows: int
    bytes: int
    modified_ms: int
    stats: str


def write_file(table: pa.Table, folder: str) -> WrittenFile:
    """Write and sync one file. Dictionary columns are stored as what they stand for."""
    name = f"part-{uuid.uuid4()}.parquet"
    path = Path(folder, name)
    names = [field.name for field in table.schema if _repeats(field.type)]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=1,
        use_dictionary=names,
        store_schema=False,
        row_group_size=ROW_GROUP_ROWS,
        write_page_index=True,
        write_page_checksum=True,  # else more than half of all flipped bits would be read as if nothing had happened
        coerce_timestamps="us",
    )
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    return WrittenFile(name, table.num_rows, size, int(time.time() * 1000), _statistics(table))


def read_file(path: Path, columns: list[str] | None = None) -> pa.Table:
    """All rows. Raises FileDamaged."""
    try:
        return pq.read_table(path, columns=columns, partitioning=None, page_checksum_verification=True)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise FileDamaged(path, str(error)) from error


def data_bytes(path: Path) -> int:
    """How much a file holds before compression. Raises FileDamaged."""
    try:
        about = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise FileDamaged(path, str(error)) from error
    return sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))


def _repeats(kind: pa.DataType) -> bool:
    """Whether a column's values are worth a dictionary in the file: names are, payloads and positions are not."""
    return bool(pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_timestamp(kind))


def _statistics(table: pa.Table) -> str:
    """The lowest and highest value of each column that can be searched by, as Delta's log wants them."""
    low: dict[str, object] = {}
    high: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = field.type
        nulls[field.name] = column.null_count
        if pa.types.is_dictionary(kind):
            values = [pc.min_max(_used(chunk)) for chunk in column.chunks if len(chunk)]
            bounds = [(v["min"].as_py(), v["max"].as_py()) for v in values if v["min"].is_valid]
            if bounds:
                low[field.name] = _text(min(b[0] for b in bounds), up=False)
                high[field.name] = _text(max(b[1] for b in bounds), up=True)
            continue
        if not (pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_string(kind)):
            continue
        found = pc.min_max(column)
        a, b = found["min"], found["max"]
        if not a.is_valid:
            continue
        if pa.types.is_timestamp(kind):
            low[field.name], high[field.name] = _iso(a.cast(pa.int64()).as_py()), _iso(b.cast(pa.int64()).as_py(), 999)
        elif pa.types.is_string(kind):
            low[field.name], high[field.name] = _text(a.as_py(), up=False), _text(b.as_py(), up=True)
        else:
            low[field.name], high[field.name] = a.as_py(), b.as_py()
    return json.dumps({"numRecords": table.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def _used(chunk: pa.DictionaryArray) -> pa.Array:
    """The entries of a dictionary that occur."""
    return chunk.dictionary.take(pa.array(np.unique(chunk.indices.to_numpy(zero_copy_only=False))))


def _iso(us: int, up: int = 0) -> str:
    """Delta's statistics have milliseconds; a highest value is rounded up to the next."""
    seconds, ms = divmod((us + up) // 1000, 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{ms:03d}Z"


def _text(value: str, up: bool) -> str:
    if len(value) <= TEXT_BYTES_MAX:
        return value
    return value[:TEXT_BYTES_MAX] + ("\U0010ffff" if up else "")


def in_files(
    batches: Iterable[pa.RecordBatch], rows_max: int = FILE_ROWS_MAX, bytes_max: int = FILE_BYTES_MAX
) -> Iterator[pa.Table]:
    """Batches gathered into tables of a file's size."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        while batch.num_rows:
            width = max(1, batch.nbytes // batch.num_rows)
            room = max(1, min(rows_max - rows, (bytes_max - size) // width))
            part = batch.slice(0, room)
            batch = batch.slice(part.num_rows)
            held.append(part)
            rows += part.num_rows
            size += part.num_rows * width
            if rows >= rows_max or size >= bytes_max:
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)


def sorted_by_topic(table: pa.Table) -> pa.Table:
    """By topic, and within a topic as they came. `topic` is dictionary-encoded."""
    table = table.unify_dictionaries().combine_chunks()
    topic = table.column("topic").combine_chunks()
    if isinstance(topic, pa.ChunkedArray):
        topic = topic.chunk(0)
    names = topic.dictionary
    order = pc.sort_indices(names).to_numpy()
    rank = np.empty(len(names), np.uint16 if len(names) <= 1 << 16 else np.uint32)
    rank[order] = np.arange(len(names), dtype=rank.dtype)
    rows = np.argsort(rank[topic.indices.to_numpy()], kind="stable")  # a radix sort for 16 bits
    return table.take(pa.array(rows))
