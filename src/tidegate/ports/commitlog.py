"""The commit log as the core sees it.

`append` gives positions and a ticket; the ticket is stored when `stored` has reached it, of which `on_stored`
tells. A promise to a client (PUBACK, PUBREC, PUBREL, PUBCOMP) waits for its ticket; delivery of QoS 0 and 1
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.run import Run
from tidegate.log.segment import SegmentFacts


class Snapshot(Protocol):
    """A compacted copy of the state that is being written while the broker goes on."""

    def add(self, records: Sequence[bytes]) -> None: ...

    def commit(self, done: Callable[[bool], None]) -> None:
        """Make it the one to start from; `done` is told whether that worked, on the loop's thread."""

    def abort(self) -> None: ...


class CommitLog(Protocol):
    end: int  # the next message's position
    stored: int  # the last ticket that is safe
    on_stored: Callable[[], None]  # called on the loop's thread when `stored` has moved

    @property
    def floor(self) -> int:
        """The first position that is still held."""

    @property
    def unstored_bytes(self) -> int:
        """Written and not yet safe."""

    def append(self, runs: Sequence[Run], changes: Sequence[bytes], time_ms: int) -> int:
        """Store messages and state changes as one, in this order; sets `base` and `time_ms` of each run.

        Returns the ticket. Raises StorageError with nothing stored if it cannot."""

    def skip(self, positions: int) -> None:
        """Leave out so many positions: the next message gets a later one."""

    def commit(self) -> None:
        """Everything appended should now become safe. Returns at once."""

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        """Read messages from `position` up to `end`; `done` is called on the loop's thread, never within."""

    def position_at_time(self, time_ms: int, found: Callable[[int], None]) -> tuple[int, bool]:
        """The first position at or after that time (the end, if there is none yet), and True. Where that takes a
        search: a position that is not behind it, and False; `found` is told the right one, on the loop's thread."""

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

    def close(self) -> None:
        """Make everything safe and note that the stop was clean."""
