"""One segment on disk, as a shelf to read from and a file to append to."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from pathlib import Path

from tidegate.log.files.disk import replace_file
from tidegate.log.index import FrameTable, IndexBuilder, TopicIndex
from tidegate.log.reading import ShelfGone
from tidegate.log.recovery import Examined, examine
from tidegate.log.segment import SEGMENT_HEADER_BYTES, SegmentFacts, SegmentHeader
from tidegate.log.unreadable import DEVICE_ERRORS, Ailing

INDICES_MAX = 64
"""Indices of sealed segments that are kept mapped, over all segments of a log."""
BLOCK_BYTES = 4096
"""What a device fails to read at least, as a rule."""
WAIT_S = 1.0
"""Between two tries of who waits for the device."""


class SegmentFile:
    """A segment file. `fd` is open for appending while it is active and not synced since."""

    __slots__ = ("_mapped", "ailing", "base", "builder", "dropped", "end", "fd", "first_time_ms", "frames", "index",
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
        self.ailing = Ailing()

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
        """What there is of these bytes, zeros for what is lost. Raises ShelfGone, and OSError for what may pass."""
        try:
            found = self._read(offset, size)
        except FileNotFoundError:
            if self.dropped:
                raise ShelfGone from None
            return b""
        except OSError as error:
            if self.ailing.is_lost(error, offset):
                return self._salvage(offset, size)
            error.filename = str(self.path)
            raise
        self.ailing.was_read(offset)
        return found

    def _read(self, offset: int, size: int) -> bytes:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.pread(fd, size, offset)
            while len(found) < size:  # the file ends here; or the device fails here, which only the next call tells
                more = os.pread(fd, size - len(found), offset + len(found))
                if not more:
                    break
                found += more
            return found
        finally:
            os.close(fd)

    def _salvage(self, offset: int, size: int) -> bytes:
        """What can be read of bytes some of which cannot, with zeros for those: checksums tell what is lost."""
        found = bytearray()
        while len(found) < size:
            at = offset + len(found)
            most = min(size - len(found), BLOCK_BYTES - at % BLOCK_BYTES)
            try:
                block = self._read(at, most)
            except OSError as error:
                if error.errno not in DEVICE_ERRORS:
                    raise
                block = bytes(most)
            if not block:
                break
            found += block
        return bytes(found)

    def fetch_waiting(self, offset: int, size: int) -> bytes:
        """`fetch` for who cannot come back later: waits until the device answers or what it has is lost."""
        while True:
            try:
                return self.fetch(offset, size)
            except OSError as error:
                if error.errno not in DEVICE_ERRORS:
                    raise
                time.sleep(WAIT_S)

    def fetch_or_nothing(self, offset: int, size: int) -> bytes:
        """`fetch` for who asks what is wrong: what the device cannot read is damaged."""
        try:
            return self.fetch(offset, size)
        except OSError as error:
            if error.errno not in DEVICE_ERRORS:
                raise
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
        except OSError as error:
            if error.errno not in DEVICE_ERRORS:
                raise
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
