"""One segment on disk, as a shelf to read from and a file to append to."""

from __future__ import annotations

import mmap
import os
from collections import deque
from pathlib import Path

from tidegate.log.files.disk import replace_file
from tidegate.log.index import FrameTable, IndexBuilder, TopicIndex
from tidegate.log.reading import ShelfGone
from tidegate.log.recovery import Examined, examine
from tidegate.log.segment import SEGMENT_HEADER_BYTES, SegmentFacts, SegmentHeader

INDICES_MAX = 64
"""Indices of sealed segments that are kept mapped, over all segments of a log."""


class SegmentFile:
    """A segment file. `fd` is open for appending while it is active and not synced since."""

    __slots__ = ("_mapped", "base", "builder", "dropped", "end", "fd", "first_time_ms", "frames", "index",
                 "last_time_ms", "length", "path", "sealed", "sequence", "writer")  # fmt: skip

    def __init__(
        self, path: Path, header: SegmentHeader, builder: IndexBuilder | None, mapped: deque[SegmentFile]
    ) -> None:
        self.path = path
        self._mapped = mapped  # the segments whose index is mapped, oldest first
        self.sequence, self.base, self.writer = header.sequence, header.base, header.writer
        self.end = header.base
        self.length = SEGMENT_HEADER_BYTES
        self.builder = builder  # until the index is written
        self.index: TopicIndex | None = None  # mapped when somebody reads
        self.first_time_ms = self.last_time_ms = self.frames = 0
        self.fd = -1
        self.sealed = True
        self.dropped = False

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def index_path(self) -> Path:
        return self.path.with_suffix(".index")

    def take_facts(self, builder: IndexBuilder) -> None:
        self.first_time_ms, self.last_time_ms = builder.first_time_ms, builder.last_time_ms
        self.frames = len(builder.bases)

    def facts(self) -> SegmentFacts:
        if self.builder is not None:
            self.take_facts(self.builder)
        return SegmentFacts(
            self.sequence, self.path, self.base, self.end, self.length, self.first_time_ms, self.last_time_ms,
            self.frames, self.sealed,
        )  # fmt: skip

    def fetch(self, offset: int, size: int) -> bytes:
        """What there is of these bytes. Raises OSError: it may pass."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self.dropped:
                raise ShelfGone from None
            return b""
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def fetch_or_nothing(self, offset: int, size: int) -> bytes:
        """`fetch` for who cannot wait: an unreadable sector is damage like any other."""
        try:
            return self.fetch(offset, size)
        except OSError:
            return b""

    def table(self) -> FrameTable:
        # The builder is let go only after the index is there, so one of the two always answers.
        return self.builder or self.index or self.load_index()

    def load_index(self) -> FrameTable:
        """Map the index; make it anew if it is not as it was written."""
        try:
            with self.index_path.open("rb") as file:
                index = TopicIndex.load(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (FileNotFoundError, ValueError):
            index = None
        if index is not None and index.header.segment_bytes == self.length:
            self.index = index
            self._mapped.append(self)
            while len(self._mapped) > INDICES_MAX:
                self._mapped.popleft().index = None
            return index
        whole = self.fetch(0, self.length)
        found = examine(whole, self.name, self.sequence, last=False, base=self.base, next_base=self.end)
        self.builder = builder = found.index
        if found.header is None:  # the file is gone or overwritten: say so to every reader
            builder.damages = [(self.base, self.end - self.base)]
            return builder
        try:
            self.write_index()
        except OSError:
            pass  # it stays in memory
        return builder

    def examine(self, *, last: bool, next_base: int | None = None) -> Examined:
        whole = self.fetch_or_nothing(0, self.length)
        return examine(whole, self.name, self.sequence, last=last, base=self.base, next_base=next_base)

    def make_durable(self, size: int | None = None) -> None:
        """Sync the file, cut to `size` before if that is given. Raises OSError."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if size is not None:
                os.ftruncate(fd, size)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def write_index(self) -> None:
        """Let the file take the builder's place. Raises OSError."""
        builder = self.builder
        if builder is None:
            return
        content = builder.build(self.sequence, self.base, self.end, self.length, self.writer)
        replace_file(self.index_path, content, durable=False)
        self.take_facts(builder)
        self.builder = None
