"""What the broker tells whoever runs it, on standard error: a line an event, with a stable name and its fields.

    text   2026-01-31T12:00:00.000Z INFO client.connected client=pump-7 peer=10.0.0.7:51234
    json   {"time": "2026-01-31T12:00:00.000Z", "level": "info", "event": "client.connected", "client": "pump-7", …}

How severe an event is stands in `LEVELS`. Clients choose their ids, and may cause as many events as they like: what
comes from outside is escaped and cut, and of each event so many lines are written in a second; then a line says how
many were left out.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging import CRITICAL, ERROR, INFO, WARNING
from typing import IO

from tidegate.config import LogFormat, LogLevel

LEVELS = {
    "answer.undeliverable": INFO,
    "broker.crashed": CRITICAL,
    "broker.loading": INFO,
    "broker.recovered": INFO,
    "broker.refused": CRITICAL,  # to start
    "broker.stopping": INFO,
    "client.connected": INFO,
    "client.disconnected": INFO,
    "client.refused": INFO,
    "connection.refused": WARNING,  # before it could say who it is: a limit of the broker's, not a fault of its own
    "events.left_out": WARNING,
    "lake.damaged": ERROR,
    "lake.unreadable": WARNING,
    "listen.unprotected": WARNING,
    "log.accepted": WARNING,  # as severe as log.refused, so that nobody reads only the one
    "log.damaged": ERROR,
    "log.failed": CRITICAL,
    "log.limited": INFO,
    "log.promise_broken": ERROR,
    "log.readable": WARNING,  # as severe as log.unreadable
    "log.refused": WARNING,
    "log.trimmed": INFO,
    "log.unreadable": WARNING,
    "log.untrimmed": WARNING,
    "peer.fault": INFO,  # the peer's, not ours
    "publish.refused": INFO,
    "reader.damage": ERROR,
    "reader.overrun": WARNING,
    "record.set_aside": ERROR,
    "retained.dropped": WARNING,
    "session.ended": INFO,
    "session.taken_over": INFO,
    "snapshot.failed": ERROR,
    "timer.failed": ERROR,
    "will.refused": WARNING,
}
"""What is not here is INFO."""

LINES_PER_S = 20  # of one event
FIELD_CHARS_MAX = 1024
TRACE_CHARS_MAX = 16_000
PLAIN_TYPES = (int, float, bool, type(None))


class Events:
    """Called on the event loop; `each_second` tells what was left out."""

    def __init__(
        self,
        level: LogLevel = "info",
        form: LogFormat = "text",
        out: IO[str] | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._least = logging.getLevelNamesMapping()[level.upper()]
        self._line = _json_line if form == "json" else _text_line
        self._out = sys.stderr if out is None else out
        self._now_s, self._wall_s = now_s, wall_s
        self._floods: dict[str, _Flood] = {}

    def report(self, name: str, fields: Mapping[str, object], level: int | None = None) -> None:
        self._tell(name, fields, LEVELS.get(name, INFO) if level is None else level)

    def crashed(self, error: BaseException) -> None:
        self._tell("broker.crashed", {"error": f"{type(error).__name__}: {error}"}, CRITICAL, _trace(error))

    def take_logging(self) -> None:
        """What libraries write to Python's own log becomes events too."""
        logging.basicConfig(level=self._least, handlers=[_FromLogging(self)], force=True)

    def each_second(self) -> None:
        now_s = self._now_s()
        for name, flood in list(self._floods.items()):  # other threads may log
            if now_s - flood.since_s >= 1.0:
                self._begin(name, flood, now_s)

    def close(self) -> None:
        for name, flood in list(self._floods.items()):
            self._begin(name, flood, self._now_s())

    def _tell(self, name: str, fields: Mapping[str, object], level: int, trace: str = "") -> None:
        if level < self._least:
            return
        now_s = self._now_s()
        flood = self._floods.get(name)
        if flood is None:
            flood = self._floods[name] = _Flood(now_s)
        elif now_s - flood.since_s >= 1.0:
            self._begin(name, flood, now_s)
        if flood.lines >= LINES_PER_S:
            flood.left_out += 1
            return
        flood.lines += 1
        self._write(name, fields, level, trace)

    def _begin(self, name: str, flood: _Flood, now_s: float) -> None:
        """A new second for this event."""
        left_out = flood.left_out
        flood.since_s, flood.lines, flood.left_out = now_s, 0, 0
        if left_out:
            level = max(LEVELS["events.left_out"], self._least)
            self._write("events.left_out", {"of": name, "lines": left_out}, level, "")

    def _write(self, name: str, fields: Mapping[str, object], level: int, trace: str) -> None:
        moment = datetime.fromtimestamp(self._wall_s(), UTC).isoformat(timespec="milliseconds")
        line = self._line(moment.replace("+00:00", "Z"), logging.getLevelName(level), name, fields, trace)
        try:
            self._out.write(line + "\n")
            self._out.flush()
        except (OSError, ValueError):
            pass  # nobody listens, or their disk is full: no reason to stop serving


class _Flood:
    """How many lines of an event there were since when."""

    __slots__ = ("left_out", "lines", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.lines = self.left_out = 0


class _FromLogging(logging.Handler):
    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        fields = {"message": record.getMessage()}
        self._events._tell(f"python.{record.name}", fields, record.levelno, _trace(error) if error else "")


# ── lines ──


def _text_line(moment: str, level: str, name: str, fields: Mapping[str, object], trace: str) -> str:
    told = "".join(f" {key}={word(_plain(value))}" for key, value in fields.items())
    below = "".join("\n" + (line if line.isprintable() else json.dumps(line)) for line in trace.splitlines())
    return f"{moment} {level} {name}{told}{below}"


def _json_line(moment: str, level: str, name: str, fields: Mapping[str, object], trace: str) -> str:
    row: dict[str, object] = {"time": moment, "level": level.lower(), "event": name}
    row |= {key: _plain(value) for key, value in fields.items()}
    if trace:
        row["trace"] = trace
    return json.dumps(row, allow_nan=False)


def _plain(value: object) -> object:
    """A value that JSON has, of bounded length."""
    if isinstance(value, PLAIN_TYPES):
        return value if not isinstance(value, float) or value - value == 0 else str(value)
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= FIELD_CHARS_MAX else text[: FIELD_CHARS_MAX - 1] + "…"


def word(value: object) -> str:
    """As it is if it reads as one word; in quotes, with escapes for what is not printable, otherwise."""
    if not isinstance(value, str):
        return json.dumps(value)
    if value and value.isprintable() and not set(' "\\=') & set(value):
        return value
    return json.dumps(value, ensure_ascii=not value.isprintable())


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:].rstrip()
