"""`df.write.format("tidegate")` and `writeStream`: rows published as messages, at least once.

A task publishes the rows of its partition in their order over one connection, and ends when the broker has
acknowledged all of them; only then does Spark commit. A task that fails is started again by Spark, and publishes its
rows again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from tidegate.client.publisher import BulkPublisher
from tidegate.errors import ConfigError, PeerError, PublishRefused
from tidegate.pipeline.options import Options
from tidegate.pipeline.schemas import TABLES
from tidegate.router.filters import check_topic

WRITE_OPTIONS: Final = ("host", "port", "qos", "topic", "clientId")

_NUMBER: Final = (ByteType, ShortType, IntegerType, LongType)
_TEXT: Final = (StringType, BinaryType)
_COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "topic": _TEXT,
    "payload": _TEXT,
    "qos": _NUMBER,
    "retain": (BooleanType,),
    "expiry": _NUMBER,
    "properties": (BinaryType,),
}
# Columns of the log's own rows that the broker sets itself; so what was read can be written again.
_IGNORED: Final = frozenset(TABLES["messages"].names) - _COLUMNS.keys()

_QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class Publication:
    """Where and how rows are published, as the options say."""

    host: str
    port: int
    qos: int
    topic: str  # for all rows; empty if they have a column
    client_id: str  # of each task, without the partition's number; empty to make one

    @classmethod
    def of(cls, given: Mapping[str, str], schema: StructType, overwrite: bool) -> Publication:
        """Raises ConfigError for options, columns and modes that cannot be published."""
        options = Options(given, WRITE_OPTIONS)
        if overwrite:
            raise ConfigError(
                "mode", "what was published cannot be overwritten", 'mode("append"), outputMode("append")'
            )
        topic = options.text("topic")
        if topic:
            try:
                check_topic(topic.encode())
            except PeerError as error:
                raise ConfigError("option topic", f"{topic!r}: {error}") from None
        _check_columns(schema, bool(topic))
        return cls(
            options.text("host", "127.0.0.1"),
            options.number("port", 1883, 1, 65535),
            options.number("qos", 1, 0, 2),
            topic,
            options.text("clientId"),
        )

    def publish(self, batches: Iterator[pa.RecordBatch], name: str) -> Published:
        """One partition's rows. Raises ClientError, and ValueError for a row that cannot be published."""
        task = TaskContext.get()
        partition = task.partitionId() if task is not None else 0
        # A query keeps its name, so that its publishers look the same from batch to batch and after a restart.
        query = task.getLocalProperty(_QUERY_ID) if task is not None else None
        client_id = self.client_id or f"spark-{(query or name)[:8]}"
        with BulkPublisher(self.host, self.port, f"{client_id}-{partition}") as publisher:
            try:
                for batch in batches:
                    publisher.publish(**self._columns(batch, publisher.given))
                publisher.flush()
            except ValueError as error:
                raise ValueError(f"partition {partition}, counted from row 0: {error}") from None
            except PublishRefused as error:
                raise PublishRefused(
                    f"partition {partition}, counted from row 0: {error}", error.reason, error.number, error.topic
                ) from None
            return Published(publisher.given)

    def _columns(self, batch: pa.RecordBatch, first: int) -> dict[str, Any]:
        """The arguments of `BulkPublisher.publish`."""
        count = batch.num_rows
        found: dict[str, Any] = {"payloads": _bytes(batch, "payload", first), "qos": self.qos}
        found["topics"] = [self.topic.encode()] * count if self.topic else _bytes(batch, "topic", first)
        names = batch.schema.names
        if "qos" in names:
            found["qos"] = _filled(batch.column("qos"), self.qos)
        if "retain" in names:
            found["retains"] = _filled(batch.column("retain"), False)
        if "expiry" in names:
            found["expiries"] = batch.column("expiry").to_pylist()
        if "properties" in names:
            found["properties"] = _objects(batch.column("properties"))
        return found


def _check_columns(schema: StructType, has_topic: bool) -> None:
    names = schema.fieldNames()
    for name in ("payload",) if has_topic else ("topic", "payload"):
        if name not in names:
            hint = "a column topic, or the option topic" if name == "topic" else "a column payload, binary or string"
            raise ConfigError(f"column {name}", "is missing", hint)
    if has_topic and "topic" in names:
        raise ConfigError("option topic", "the rows have a column topic as well", "one of the two")
    for field in schema:
        allowed = _COLUMNS.get(field.name)
        if allowed is None:
            if field.name not in _IGNORED:
                hint = f"known are {', '.join(_COLUMNS)}"
                raise ConfigError(f"column {field.name}", "cannot be published", hint)
        elif not isinstance(field.dataType, allowed):
            right = " or ".join(kind.typeName() for kind in allowed)
            raise ConfigError(f"column {field.name}", f"is {field.dataType.simpleString()}", f"{right}")


def _bytes(batch: pa.RecordBatch, name: str, first: int) -> list[bytes]:
    values = _objects(batch.column(name))
    if None in values:
        raise ValueError(f"message {first + values.index(None)}: its {name} is null")
    return values


def _filled(column: pa.Array, default: int) -> list[int]:
    values: list[int] = pc.fill_null(column, default).to_numpy(zero_copy_only=False).tolist()
    return values


def _objects(column: pa.Array) -> list[Any]:
    """As Python's bytes: strings are UTF-8 already. By way of numpy, which is five times as fast as `to_pylist`."""
    binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    plain = column.cast(binary) if column.type != binary else column
    values: list[Any] = plain.to_numpy(zero_copy_only=False).tolist()
    return values


@dataclass
class Published(WriterCommitMessage):
    """How many messages a task has published, all acknowledged."""

    messages: int


class BrokerWriter(DataSourceArrowWriter):
    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self._name = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._publication.publish(iterator, self._name)


class BrokerStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self._name = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._publication.publish(iterator, self._name)
