"""A log without files, for durability "memory": the same interface, bounded by bytes.

It keeps frames in chunks with an index each, and lets the oldest chunk go when it is full.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

from tidegate.log.frame import WRITER, frame_entries
from tidegate.log.index import TOPICS_MAX, FrameTable, IndexBuilder
from tidegate.log.reading import ShelvedLog
from tidegate.log.recovery import Damage
from tidegate.log.segment import SegmentFacts

MEMORY_BYTES = 256 << 20
CHUNKS = 16
"""The log holds between 15/16 and all of its bytes when it is full."""

_SIZE_AND_TIME = struct.Struct("<I12xq").unpack_from


class Chunk:
    """A segment in memory."""

    __slots__ = ("_bytes", "_index", "base", "end", "sealed", "sequence", "writer")

    def __init__(self, sequence: int, base: int) -> None:
        self.sequence = sequence
        self.base = self.end = base
        self.writer = WRITER
        self.sealed = False
        self._bytes = bytearray()
        self._index = IndexBuilder()

    @property
    def name(self) -> str:
        return f"chunk {self.sequence}"

    @property
    def last_time_ms(self) -> int:
        return self._index.last_time_ms

    @property
    def full(self) -> bool:
        return len(self._index.topics) >= TOPICS_MAX

    def __len__(self) -> int:
        return len(self._bytes)

    def table(self) -> FrameTable:
        return self._index

    def fetch(self, offset: int, size: int) -> bytes:
        return bytes(self._bytes[offset : offset + size])

    def fetch_waiting(self, offset: int, size: int) -> bytes:
        return self.fetch(offset, size)

    def add(self, frames: bytes, offset: int, base: int, count: int, topics: Iterable[bytes] | None) -> None:
        size, time_ms = _SIZE_AND_TIME(frames, offset + 8)
        at = len(self._bytes) + offset
        if topics is None:
            self._index.add_changes(at, base, size)
        else:
            self._index.add(at, base, count, topics, size, time_ms)

    def extend(self, frames: bytes, end: int) -> None:
        self._bytes += frames
        self.end = end

    def facts(self) -> SegmentFacts:
        index = self._index
        return SegmentFacts(
            self.sequence, None, self.base, self.end, len(self._bytes), index.first_time_ms,
            index.last_time_ms, len(index.bases), self.sealed,
        )  # fmt: skip


class MemoryLog(ShelvedLog[Chunk]):
    """Like SegmentedLog. `sync` has nothing to do; what is dropped was promised to nobody."""

    clean = True
    failed = None

    def __init__(self, bytes_max: int = MEMORY_BYTES) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self._bytes = 0
        self._shelves = (Chunk(1, 0),)

    def append(
        self,
        frames: bytes,
        end: int,
        index_entries: Sequence[tuple[int, int, int, Iterable[bytes] | None]] | None = None,
    ) -> None:
        """Keep the frames of a tick; the oldest chunks go when there is no room."""
        chunk = self._shelves[-1]
        if chunk.full or len(chunk) >= self._bytes_max // CHUNKS:
            self.roll()
            chunk = self._shelves[-1]
        for entry in index_entries or frame_entries(frames):
            chunk.add(frames, *entry)
        chunk.extend(frames, end)
        self._bytes += len(frames)
        self.end = end
        while self._bytes > self._bytes_max and len(self._shelves) > 1:
            self._bytes -= len(self._shelves[0])
            self._shelves = self._shelves[1:]

    def sync(self) -> None:
        """Nothing is ever durable here."""

    def sync_sealed(self) -> None:
        """Nor here."""

    def roll(self) -> None:
        last = self._shelves[-1]
        if len(last):
            last.sealed = True
            self._shelves = (*self._shelves, Chunk(last.sequence + 1, self.end))

    def drop(self, segments: Iterable[SegmentFacts]) -> None:
        """Let sealed chunks go, from the oldest on."""
        going = {segment.sequence for segment in segments}
        while self._shelves[0].sequence in going and self._shelves[0].sealed:
            self._bytes -= len(self._shelves[0])
            self._shelves = self._shelves[1:]

    def verify(self, progress: Callable[[str, int, int], None] | None = None) -> Iterator[Damage]:
        """Memory is believed."""
        return iter(())

    def close(self, clean: bool = True) -> None:
        """Forget everything."""
        self._shelves = (Chunk(1, self.end),)
        self._bytes = 0
