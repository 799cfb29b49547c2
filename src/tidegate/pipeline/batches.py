"""A DataFrame's rows for the driver, as Arrow, in the DataFrame's order, one partition at a time.

`DataFrame.toArrow` holds everything at once, and `toLocalIterator` makes a Python object of each row. Here each Arrow
batch travels as one value of one row: Spark keeps the order and the bounds, and nobody looks inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame


def arrow_batches(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    for row in frame.mapInArrow(_pack, "batch binary").toLocalIterator(prefetchPartitions=True):
        with pa.ipc.open_stream(row["batch"]) as reader:
            yield from reader


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], ["batch"])
