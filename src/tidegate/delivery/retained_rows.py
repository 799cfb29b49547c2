"""Retained messages as rows, for the outbox."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.log.rows import Rows
from tidegate.log.run import NO_EXPIRY, RETAIN
from tidegate.router import Retained


def rows_of(messages: Sequence[Retained], now_ms: int) -> Rows:
    """Their expiry counts from now."""
    rows = Rows(now_ms)
    for message in messages:
        expiry = NO_EXPIRY
        if message.expires_at_ms is not None:
            expiry = max(0, message.expires_at_ms - now_ms + 999) // 1000
        rows.add(
            message.topic, message.publisher, b"", message.qos | RETAIN, message.payload, message.properties, expiry
        )
    rows.positions = [message.position for message in messages]
    return rows
