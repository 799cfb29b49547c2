"""Progress while much is loaded: a bar on a terminal, a line now and then where there is none, or events."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType

QUIET_S = 1.0  # a start that is quicker than this says nothing


class Progress:
    def __init__(self, report: Callable[[str, Mapping[str, object]], None] | None = None) -> None:
        self._report = report
        self._began_s = time.monotonic()
        self._said_s = self._began_s
        self._width = 0

    def of(self, what: str, done: int, total: int) -> None:
        self._say(what, done, total)

    def count(self, what: str, done: int) -> None:
        self._say(what, done, None)

    def _say(self, what: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        terminal = self._report is None and sys.stderr.isatty()
        if now_s - self._began_s < QUIET_S or now_s - self._said_s < (0.1 if terminal else 2.0):
            return
        self._said_s = now_s
        if self._report is not None:
            self._report("broker.loading", {"what": what, "done": done, "total": total})
            return
        bar = "" if not total else "[" + ("#" * round(done / total * 30)).ljust(30, ".") + "] "
        line = f"tidegate: loading {bar}{what}: {done:,}" + ("" if total is None else f" of {total:,}")
        if terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
