"""Payloads, topics, times and places in the log, as safe text of one line."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from tidegate.errors import PeerError
from tidegate.router.filters import Start, parse_start

from .failure import Failure

# C0 and C1 controls (escape sequences among them), line separators, and marks that reorder text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def safe(text: str) -> str:
    return _UNSAFE.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text)


def payload_text(payload: bytes | bytearray) -> str:
    """UTF-8 with control characters escaped; anything else as hexadecimal digits."""
    try:
        return safe(payload.decode("utf-8"))
    except UnicodeDecodeError:
        return "0x" + payload.hex()


def utc(time_ms: int) -> str:
    """Unix milliseconds as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_place(text: str, now_ms: int) -> Start:
    """A place in the log, in the words that `$replay/<from>/…` understands."""
    try:
        return parse_start(text.encode(), now_ms)
    except PeerError as error:
        raise Failure(str(error)) from error
