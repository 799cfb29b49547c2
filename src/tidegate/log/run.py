"""A run: consecutive messages of one publisher to one topic, alike in everything but their content.

What a reader of the log's files gets, run by run, as the disk stores them. Inside the broker messages are columns
(`log.rows`). A message's position is `base` + its index in the run. A single message is a run of one.
"""

from __future__ import annotations

QOS_MASK = 0b011
RETAIN = 0b100
NOT_KEPT = 0b1000  # with RETAIN: there was no room to keep it as its topic's retained message

NO_EXPIRY = 0xFFFFFFFF


class Run:
    """Messages `base` … `base + count - 1`. `properties`, `expiries` and `uuids` are None when no
    message of the run has any; otherwise they have one entry per message."""

    __slots__ = (
        "base",
        "count",
        "expiries",
        "flags",
        "payloads",
        "properties",
        "publisher",
        "tenant",
        "time_ms",
        "topic",
        "uuids",
    )

    def __init__(
        self,
        topic: bytes,
        publisher: bytes,
        tenant: bytes,
        flags: int,
        payloads: list[bytes],
        properties: list[bytes] | None = None,
        expiries: list[int] | None = None,
        uuids: list[bytes] | None = None,
        base: int = -1,
        time_ms: int = 0,
    ) -> None:
        self.topic = topic
        self.publisher = publisher
        self.tenant = tenant
        self.flags = flags  # QoS in bits 0–1, retain in bit 2, not kept in bit 3
        self.payloads = payloads
        self.properties = properties  # MQTT 5 property bytes to pass on, without their length prefix
        self.expiries = expiries  # seconds from time_ms; NO_EXPIRY where a message has none
        self.uuids = uuids  # 16 bytes each, zeros where a message has none
        self.count = len(payloads)
        self.base = base  # given at the append
        self.time_ms = time_ms  # when the broker accepted it, Unix milliseconds
