"""The one configuration tree: typed, bounded, with defaults that are right for a single machine.

Every setting is a field below, with its reason. `config_sources` fills the tree from a TOML file, the
environment and flags, and remembers where each value came from.
"""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, not a shared default)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
HOUR, DAY = 3600, 86400

Durability = Literal["fsync", "os", "memory"]
Strategy = Literal["round_robin", "random", "sticky", "hash_publisher", "hash_topic"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


def setting(default: Any, doc: str, low: int | None = None, high: int | None = None) -> Any:
    """A field with the sentence that `config show` and the reference page print, and its bounds."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high})


def table(doc: str, low: int | None = None, default: Mapping[str, str] | None = None) -> Any:
    """A mapping whose keys the user chooses. The sentence and the bound hold for each value in it; what it holds
    from the beginning is `default`. Never printed with the tree: passwords for other systems may be among it."""
    about = {"doc": doc, "low": low, "high": None}
    return field(default_factory=lambda: dict(default or {}), repr=False, metadata=about)


@dataclass(frozen=True, slots=True)
class Listen:
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = setting(1883, "TCP port for MQTT; 0 picks a free one", 0, 65535)
    connections_max: int = setting(100_000, "connections at once; further ones are closed", 1, 10_000_000)
    connect_timeout_s: int = setting(10, "how long a new connection may take to send its CONNECT", 1, 3600)


@dataclass(frozen=True, slots=True)
class Log:
    durability: Durability = setting(
        "fsync",
        "when a publisher is acknowledged: after fsync, after the write (os), or without files (memory)",
    )
    segment_bytes: int = setting(128 * MIB, "size at which a segment is sealed", 64 * KIB, 2 * GIB)
    retention_bytes: int = setting(
        16 * GIB, "the log is trimmed to this size, but not below what sessions need", MIB
    )
    retention_s: int = setting(
        7 * DAY, "messages older than this are trimmed, but not below what sessions need", 1
    )
    hard_bytes: int = setting(
        64 * GIB,
        "above this, or what the disk has room for, even what sessions need is trimmed; or, before it is archived, "
        "no more is taken",
        MIB,
    )
    reserve_bytes: int = setting(
        GIB, "room left free on the disk, for the lake to be written with; at most a twentieth of the disk", 0
    )
    memory_bytes: int = setting(
        256 * MIB, "with durability memory: how much the log holds before the oldest messages go", MIB
    )
    clean_interval_s: int = setting(5, "seconds between two looks at what may be trimmed", 1, HOUR)
    tail_bytes: int = setting(
        64 * MIB, "how much of the log's end is kept in memory for readers", 64 * KIB, 64 * GIB
    )
    store_qos0: bool = setting(True, "whether QoS 0 messages are stored too (replay and archive need it)")


@dataclass(frozen=True, slots=True)
class Mqtt:
    packet_bytes_max: int = setting(4 * MIB, "largest packet accepted", 64, 268_435_460)
    client_id_bytes_max: int = setting(
        1024, "longest client id accepted; what MQTT 3.1 promises is 23", 23, 65535
    )
    receive_maximum: int = setting(
        8192, "QoS 1 and 2 messages a client may have unfinished towards us", 1, 65535
    )
    inflight_max: int = setting(
        8192, "unacknowledged messages towards a client that states no limit", 1, 65535
    )
    topic_alias_maximum: int = setting(64, "topic aliases a client may set", 0, 65535)
    topic_alias_out_maximum: int = setting(
        64, "topic aliases used towards a client that allows them", 0, 65535
    )
    keep_alive_max_s: int = setting(
        0, "longest keep-alive granted (MQTT 5 clients are told); 0 for any", 0, 65535
    )
    session_expiry_max_s: int = setting(30 * DAY, "longest a session outlives its connection", 0, 0xFFFFFFFF)
    ack_timeout_s: int = setting(60, "a client that acknowledges nothing for so long is disconnected", 1, DAY)
    sessions_max: int = setting(2_000_000, "sessions kept, connected or not", 1)
    subscriptions_per_session_max: int = setting(10_000, "filters one session may hold", 1)
    topic_levels_max: int = setting(128, "levels in a topic or filter", 1, 65535)
    check_payload_format: bool = setting(True, "refuse payloads that claim to be UTF-8 and are not (0x99)")
    shared_strategy: Strategy = setting("round_robin", "which member of a shared subscription gets a message")


@dataclass(frozen=True, slots=True)
class RetainedLimits:
    messages_max: int = setting(1_000_000, "retained messages kept", 0)
    bytes_max: int = setting(GIB, "memory for retained messages", 0)


@dataclass(frozen=True, slots=True)
class Sys:
    interval_s: int = setting(10, "seconds between updates of $SYS; 0 turns it off", 0, HOUR)


@dataclass(frozen=True, slots=True)
class Pipeline:
    enabled: bool = setting(True, "whether `tidegate up` starts the Spark pipeline beside the broker")
    lake: str = setting("", "the lake's folder; empty for `lake` in the data folder")
    archive_interval_s: int = setting(1, "seconds between two looks for new messages to archive", 0, HOUR)
    lake_retention_s: int = setting(
        365 * DAY, "archived messages older than this are deleted, but not what sessions need", 1
    )
    lake_retention_bytes: int = setting(
        TIB, "the archived messages are trimmed to this size, but not below what sessions need", MIB
    )
    tenant_retention_s: Mapping[str, int] = table("how long this tenant's archived messages are kept", 1)
    abuse_topics_max: int = setting(1000, "new topics a client may publish to in a minute", 1)
    abuse_subscribes_max: int = setting(1000, "subscriptions a client may make in a minute", 1)
    abuse_connects_max: int = setting(120, "connections a client may open in a minute", 1)


@dataclass(frozen=True, slots=True)
class Extract:
    """Typed columns from the JSON payloads of some topics."""

    filter: str = setting(MISSING, "the topics whose JSON payloads are taken apart")
    columns: str = setting(MISSING, "the columns and their types, as Spark writes them")


@dataclass(frozen=True, slots=True)
class Config:
    data: Path = setting(Path("data"), "the data folder")
    log_level: LogLevel = setting("info", "the least severe events that are written to standard error")
    log_format: LogFormat = setting("text", "how they are written: text for people, json for programs")
    listen: Listen = field(default_factory=Listen)
    log: Log = field(default_factory=Log)
    mqtt: Mqtt = field(default_factory=Mqtt)
    retained: RetainedLimits = field(default_factory=RetainedLimits)
    sys: Sys = field(default_factory=Sys)
    pipeline: Pipeline = field(default_factory=Pipeline)
    spark: Mapping[str, str] = table(
        "a setting of Spark, under Spark's own name; spark.master says where it runs (local[*]: here, on every core)",
        default={"spark.master": "local[*]"},
    )
    extract: Mapping[str, Extract] = table("typed columns from JSON payloads: one table in the lake for each name")

    @property
    def lake_folder(self) -> Path:
        return Path(self.pipeline.lake) if self.pipeline.lake else self.data / "lake"
