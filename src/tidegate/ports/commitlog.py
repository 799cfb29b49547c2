"""The commit log as the core sees it. It takes a tick whole, and answers later:

    announced(partition, rows)   these messages are in the log, at these positions, in the order of the partition.
                                 What is announced is what is delivered, and nothing else is
    stored(ticket)               everything appended up to this ticket is safe, and has been announced before:
                                 promises to clients that waited for it are kept
    refused(ticket, why)         nothing of this append was taken: it is never read, and gone after a restart. What was
                                 appended after it, before this was told, is refused as well: changes keep their order

Of a refused append nothing has been announced, but for one exception that a listener must cope with: a log may announce
a few messages within `append` before it writes them, and then refuse them. The embedded log does so with ticks of at
most four, without changes, of which none is retained or has QoS 2. Whoever was sent them has them, and acknowledges
positions at which nobody ever reads anything: they have been seen, and are not given again; `ends` stays behind them,
and reads end before it until the next append is taken. Their publishers are refused, and may send them again.

A log has partitions; a position is `partition << PARTITION_SHIFT | offset`, and nothing outside the log computes or
predicts one. The embedded log has one partition and announces within the call. A log on other machines announces what
comes back from its partitions, each in its own time. All calls come on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tidegate.errors import StorageError
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.rows import Rows
from tidegate.log.segment import SegmentFacts


class Disk(NamedTuple):
    """The file system that a log lies on."""

    bytes: int
    free_bytes: int


NO_DISK = Disk(1 << 62, 1 << 62)
"""For a log that does not lie on one: there is always room."""


class Listener(Protocol):
    """Who is told. There is one, the core."""

    def announced(self, partition: int, rows: Rows) -> None: ...

    def stored(self, ticket: int) -> None: ...

    def refused(self, ticket: int, why: StorageError) -> None: ...


class Snapshot(Protocol):
    """A compacted copy of the state that is being written while the broker goes on."""

    def add(self, records: Sequence[bytes]) -> None: ...

    def commit(self, done: Callable[[bool], None]) -> None:
        """Make it the one to start from; `done` is told whether that worked, on the loop's thread."""

    def abort(self) -> None: ...


class CommitLog(Protocol):
    listener: Listener
    ends: tuple[int, ...]  # per partition, the position after the last announced message
    stored: int  # the last ticket that is safe; where `append` itself makes it so, `stored` is not told

    @property
    def floors(self) -> tuple[int, ...]:
        """Per partition, the first position that is still held."""

    @property
    def unstored_bytes(self) -> int:
        """Taken and not yet safe."""

    def append(self, rows: Rows, changes: Sequence[bytes], time_ms: int) -> int:
        """Take messages and state changes as one, in this order: the ticket. Never raises StorageError: a refusal is
        told, within the call or later."""

    def commit(self) -> None:
        """Everything appended should now become safe. Returns at once. A call while this is under way asks for
        nothing: after `stored` is the time to ask for what was appended meanwhile."""

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        """Read messages of one partition from `position` up to `end`; `done` is called on the loop's thread, never
        within."""

    def positions_at_time(self, time_ms: int, found: Callable[[list[int]], None]) -> tuple[list[int], bool]:
        """Per partition the first position at or after that time (the end, if there is none yet), and True. Where that
        takes a search: positions that are not behind them, and False; `found` is told the right ones."""

    def state(self) -> Iterator[list[bytes]]:
        """The records of the last snapshot and all changes since, in order; for start-up."""

    def snapshot(self) -> Snapshot:
        """Begin a snapshot: changes appended from now on will be replayed on top of it."""

    def snapshot_floor(self) -> int:
        """Messages before it are not needed to rebuild the state."""

    def segments(self) -> list[SegmentFacts]:
        """What is held, oldest first; only whole segments can be dropped."""

    def topics(self, segment: SegmentFacts) -> Iterator[bytes]:
        """The topics that have messages in a segment."""

    def drop(self, segments: Sequence[SegmentFacts]) -> None:
        """Let go of the oldest segments."""

    def disk(self) -> Disk:
        """What it lies on, as it is now."""

    def close(self) -> None:
        """Make everything safe and note that the stop was clean."""
