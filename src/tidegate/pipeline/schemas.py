"""The lake's tables: their columns, and what one row of each stands for.

    messages          one accepted message; key: position
    sessions          one change of a session's state; key: place, ordinal
    dead_letters      one message that was given up for one client; key: place, ordinal
    backlog           what an absent session has to come of one topic, as a range of positions; key: client, topic
    retained          the latest retained message of one topic; key: tenant, topic
    traffic_minutely  one minute of one publisher on one topic; key: minute, tenant, topic, publisher
    abuse_verdicts    one client that broke one rule in one window; key: id
    quarantine        one thing that a job could not process, with the reason
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TIME = pa.timestamp("us", tz="UTC")  # what Delta, Spark and Arrow share


def _columns(*columns: tuple[str, pa.DataType], null: tuple[tuple[str, pa.DataType], ...] = ()) -> pa.Schema:
    """`columns` are never null, `null` may be."""
    fields = [pa.field(name, kind, nullable=False) for name, kind in columns]
    return pa.schema(fields + [pa.field(name, kind) for name, kind in null])


MESSAGES = _columns(
    ("position", pa.int64()),
    ("time", _TIME),
    ("tenant", pa.string()),
    ("topic", pa.string()),
    ("publisher", pa.string()),
    ("qos", pa.int8()),
    ("retain", pa.bool_()),
    ("payload", pa.binary()),
    null=(
        ("uuid", pa.binary()),
        ("expiry", pa.int64()),  # seconds from `time`
        ("properties", pa.binary()),  # as in a PUBLISH packet of MQTT 5, without their length
    ),
)

SESSIONS = _columns(
    ("place", pa.int64()),
    ("ordinal", pa.int32()),
    ("time", _TIME),
    ("position", pa.int64()),  # the log's end when it happened
    ("kind", pa.string()),
    null=(
        ("number", pa.int64()),
        ("reader", pa.int64()),
        ("client", pa.string()),
        ("tenant", pa.string()),
        ("version", pa.int32()),
        ("expiry_s", pa.int64()),
        ("filter", pa.string()),
        ("qos", pa.int8()),
        ("since", pa.int64()),
        ("at", pa.int64()),
    ),
)

DEAD_LETTERS = _columns(
    ("place", pa.int64()),
    ("ordinal", pa.int32()),
    ("time", _TIME),
    ("reason", pa.string()),
    ("detail", pa.string()),
    ("attempts", pa.int32()),
    ("client", pa.string()),
    ("tenant", pa.string()),
    ("position", pa.int64()),
    ("topic", pa.string()),
    ("publisher", pa.string()),
    ("qos", pa.int8()),
    ("retain", pa.bool_()),
    ("payload", pa.binary()),
    null=(("properties", pa.binary()),),
)

BACKLOG = _columns(
    ("client", pa.string()),
    ("tenant", pa.string()),
    ("topic", pa.string()),
    ("first_position", pa.int64()),
    ("last_position", pa.int64()),
    ("messages", pa.int64()),
)

RETAINED = _columns(
    ("tenant", pa.string()),
    ("topic", pa.string()),
    ("position", pa.int64()),
    ("time", _TIME),
    ("publisher", pa.string()),
    ("qos", pa.int8()),
    ("payload", pa.binary()),
    null=(("expires_at", _TIME), ("properties", pa.binary())),
)

TRAFFIC_MINUTELY = _columns(
    ("minute", _TIME),
    ("tenant", pa.string()),
    ("topic", pa.string()),
    ("publisher", pa.string()),
    ("messages", pa.int64()),
    ("bytes", pa.int64()),
    ("qos0", pa.int64()),
    ("qos1", pa.int64()),
    ("qos2", pa.int64()),
    ("retained", pa.int64()),
    ("first_position", pa.int64()),
    ("last_position", pa.int64()),
)

ABUSE_VERDICTS = _columns(
    ("id", pa.string()),
    ("window_start", _TIME),
    ("window_end", _TIME),
    ("tenant", pa.string()),
    ("client", pa.string()),
    ("rule", pa.string()),
    ("observed", pa.int64()),
    ("limit", pa.int64()),
    ("decided_at", _TIME),
)

QUARANTINE = _columns(
    ("time", _TIME),
    ("job", pa.string()),
    ("reason", pa.string()),
    ("detail", pa.string()),
    null=(
        ("place", pa.int64()),
        ("first_position", pa.int64()),
        ("last_position", pa.int64()),
        ("raw", pa.binary()),
    ),
)

TABLES: dict[str, pa.Schema] = {
    "messages": MESSAGES,
    "sessions": SESSIONS,
    "dead_letters": DEAD_LETTERS,
    "backlog": BACKLOG,
    "retained": RETAINED,
    "traffic_minutely": TRAFFIC_MINUTELY,
    "abuse_verdicts": ABUSE_VERDICTS,
    "quarantine": QUARANTINE,
}

RAW_BYTES_MAX = 4096
"""How much of a thing goes into quarantine."""


def spark_schema(schema: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)
