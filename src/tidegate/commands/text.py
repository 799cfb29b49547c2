"""Payloads, topics and times as text that is safe on a terminal and stays on one line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

# C0 and C1 controls (escape sequences among them), line separators, and marks that reorder text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_AGO = re.compile(r"-(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def safe(text: str) -> str:
    return _UNSAFE.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text)


def payload_text(payload: bytes) -> str:
    """UTF-8 with control characters escaped; anything else as hexadecimal digits."""
    try:
        return safe(payload.decode("utf-8"))
    except UnicodeDecodeError:
        return "0x" + payload.hex()


def utc(time_ms: int) -> str:
    """Unix milliseconds as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_ms(text: str, now_ms: int) -> int:
    """A time that a person wrote: "-15m" before now, or ISO 8601 (local time unless it says otherwise)."""
    if match := _AGO.fullmatch(text):
        return now_ms - int(timedelta(**{_UNITS[match[2]]: int(match[1])}).total_seconds() * 1000)
    try:
        return int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000)
    except ValueError:
        raise ValueError(
            f'"{text}" is not a place in the log; give earliest, a position, a time like '
            "2026-03-01T12:00 or 2026-03-01T12:00:00Z, or a span like -15m"
        ) from None
