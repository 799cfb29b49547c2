"""The archive as the core sees it: how far the log's messages have been carried into the lake, and what the pipeline
has found out about clients.

What the hot log lets go of is read back through the commit log port, which asks `read` and `seek`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tidegate.log.index import Wanted
from tidegate.log.reading import Read

NOTHING = 2**63 - 1
"""The floor of a lake without messages: above every position."""


class Verdict(NamedTuple):
    """A client that broke a rule, as the pipeline saw it."""

    id: str
    rule: str
    client: str
    told: bytes  # all of it, as JSON


class Archived(NamedTuple):
    """What is in the lake, durably."""

    segment: int  # the first segment that is not there as a whole
    position: int  # every message below it is there
    floor: int  # the lowest position that can be read back; 0 while that is not known, and reads wait
    readable: bool
    verdicts: tuple[Verdict, ...]


class Archive(Protocol):
    messages_read: int  # served from the lake
    damaged: int  # messages that unreadable files have lost

    @property
    def archived(self) -> Archived | None:
        """None as long as no pipeline has run."""

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        """Like the commit log's, for positions that the lake holds."""

    def before(self, time_ms: int) -> int | None:
        """A position in the lake that is not behind the first message at or after that time; None if all are older."""

    def seek(self, time_ms: int, done: Callable[[int | None], None]) -> None:
        """`done` is told the first position in the lake at or after that time, on the loop's thread."""
