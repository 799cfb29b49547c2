"""The log on disk: opening, appending, syncing, dropping, closing."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tidegate.errors import DiskFull, FolderLocked, StorageError
from tidegate.log.files.disk import Held, fsync_folder, lock_file, make_folder, replace_file, storage_error, write_all
from tidegate.log.files.segment_file import SegmentFile
from tidegate.log.frame import WRITER, frame_entries
from tidegate.log.index import (
    INDEX_HEADER_BYTES,
    TOPICS_MAX,
    IndexBuilder,
    parse_index_header,
)
from tidegate.log.reading import ShelfGone, ShelvedLog
from tidegate.log.recovery import POSITION_GAP, Damage, examine
from tidegate.log.segment import (
    SEGMENT_HEADER_BYTES,
    SegmentFacts,
    SegmentHeader,
    encode_segment_header,
    index_name,
    parse_segment_header,
    segment_name,
    sequence_of,
    snapshot_position_of,
)

SEGMENT_BYTES = 128 << 20
SEGMENT_BYTES_MAX = 2**31  # an index counts bytes in u32
UNINDEXED_MAX = 2
"""Sealed segments whose index is still to be written; one more, and the append writes it itself."""

IndexEntry = tuple[int, int, int, Iterable[bytes] | None]
"""(offset of a frame in what is appended, base, count, its topics): topics None for CHANGES."""

Progress = Callable[[str, int, int], None]
"""(what, done, of how many)"""

_SIZE_AND_TIME = struct.Struct("<I12xq").unpack_from  # from byte 8 of a frame's header


class SegmentedLog(ShelvedLog[SegmentFile]):
    """Made by `open`."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__()
        self.folder = folder
        self.clean = True  # whether the last stop was
        self._segment_bytes = min(segment_bytes, SEGMENT_BYTES_MAX)
        self._active: SegmentFile | None = None
        self._sequence = 0  # of the newest segment file
        self._newest_bytes = SEGMENT_BYTES_MAX  # its size when the log was opened
        self._durable_start = False  # the next segment's header must be durable before it is used
        self._mapped: deque[SegmentFile] = deque()
        self._lock = threading.Lock()  # guards the three fields below
        self._unsynced: list[SegmentFile] = []  # sealed, but not synced since
        self._folder_dirty = False
        self._unindexed: list[SegmentFile] = []
        self._deleting: list[SegmentFile] = []  # dropped, and still on disk
        self._syncing = threading.Lock()
        self._indexing = threading.Lock()
        self._indexer: threading.Thread | None = None
        self.failed: StorageError | None = None  # for good: it has to be opened anew
        self._lock_fd = -1

    # Opening -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, progress: Progress | None = None
    ) -> SegmentedLog:
        """Take the folder and recover what it holds. Raises FolderLocked and StorageError.

        After an unclean stop `end` jumps by POSITION_GAP, and the new segment that says so is durable
        before this returns: a position that somebody saw is never given again."""
        log = cls(folder, segment_bytes=segment_bytes)
        try:
            make_folder(folder)
            log._lock_fd = _lock(folder)
            log._recover(progress or (lambda what, done, total: None))
        except OSError as error:
            log._unlock()
            raise storage_error(error, f"cannot open the log in {folder}") from error
        except BaseException:
            log._unlock()
            raise
        return log

    def _recover(self, progress: Progress) -> None:
        folder = self.folder
        marker = _read_marker(folder)
        names = {path.name for path in folder.iterdir()}
        for name in names:
            orphan = name.endswith(".index") and name.replace(".index", ".log") not in names
            if orphan or name.endswith((".index.tmp", ".log.tmp", "CLEAN.tmp")):
                (folder / name).unlink()
        sequences = sorted(n for n in map(sequence_of, names) if n is not None)
        snapshots = [n for n in map(snapshot_position_of, names) if n is not None]
        known = max([0, *snapshots] if marker is None else [0, marker[0], *snapshots])
        unreadable = 0  # segments at the end of which nothing is known
        shelves: list[SegmentFile] = []
        for done, sequence in enumerate(sequences):
            progress("segments", done, len(sequences))
            after = sequences[done + 1] if done + 1 < len(sequences) else None
            segment = self._load(sequence, shelves[-1].end if shelves else 0, after, marker is None)
            if segment is None:
                unreadable += 1
            else:
                unreadable = 0
                if shelves:
                    self._tell_missing(shelves[-1], segment, set(sequences))
                shelves.append(segment)
        progress("segments", len(sequences), len(sequences))
        self._shelves = tuple(shelves)
        if sequences:
            self._sequence = sequences[-1]
            self._newest_bytes = (folder / segment_name(self._sequence)).stat().st_size
        self.end = shelves[-1].end if shelves else 0
        last = shelves[-1] if shelves else None
        as_left = marker == (self.end, self._sequence, last.length if last else 0)
        self.clean = as_left or (marker is None and not any(map(_ours, names)))
        if marker is not None:
            if not as_left and marker[0] > self.end:
                lost = Damage(segment_name(marker[1]), 0, 0, self.end, marker[0] - 1, "the end of the log is missing")
                self.report.append(lost)
            (folder / "CLEAN").unlink()
            fsync_folder(folder)
        if not self.clean:
            self.end = max(self.end, known) + POSITION_GAP * (1 + unreadable)
            self._durable_start = True
            try:
                self._start_segment()
            except DiskFull:
                pass  # the first append tries again

    def _load(self, sequence: int, base: int, after: int | None, may_cut: bool) -> SegmentFile | None:
        """A segment as its index describes it, or else as an examination of all its bytes does."""
        path = self.folder / segment_name(sequence)
        size = path.stat().st_size
        header = parse_segment_header(_first_bytes(path, SEGMENT_HEADER_BYTES))
        index_path = self.folder / index_name(sequence)
        index = parse_index_header(_first_bytes(index_path, INDEX_HEADER_BYTES))
        if (
            index is not None
            and header == (sequence, index.base, header.created_ms if header else 0, index.writer)
            and index.sequence == sequence
            and index.segment_bytes == size
            and index.file_bytes == index_path.stat().st_size
            and index.base >= base
        ):
            segment = SegmentFile(path, header, None, self._mapped)
            segment.end, segment.length, segment.frames = index.end, size, index.frames
            segment.first_time_ms, segment.last_time_ms = index.first_time_ms, index.last_time_ms
            return segment
        following = None
        if after is not None:
            following = parse_segment_header(_first_bytes(self.folder / segment_name(after), SEGMENT_HEADER_BYTES))
        found = examine(
            path.read_bytes(), path.name, sequence, last=after is None and may_cut, base=base,
            next_base=following.base if following and after == sequence + 1 else None,
        )  # fmt: skip
        self.report += found.damages
        if found.header is None:
            return None
        if found.header.base < base:
            self.report.append(
                Damage(path.name, 0, size, base, base - 1, "the segment repeats positions of an earlier one")
            )
            return None
        segment = SegmentFile(path, found.header, found.index, self._mapped)
        segment.end, segment.length = found.end, found.keep_bytes
        segment.make_durable(found.keep_bytes if found.keep_bytes < size else None)
        segment.take_facts(found.index)
        try:
            segment.write_index()
        except OSError:
            pass  # it stays in memory
        return segment

    def _tell_missing(self, before: SegmentFile, segment: SegmentFile, present: set[int]) -> None:
        for sequence in range(before.sequence + 1, segment.sequence):
            if sequence not in present:
                name = segment_name(sequence)
                lost = Damage(name, 0, 0, before.end, segment.base - 1, "the segment is missing")
                self.report.append(lost)

    # Appending -----------------------------------------------------------------------------------

    def append(self, frames: bytes, end: int, index_entries: Sequence[IndexEntry] | None = None) -> None:
        """Write the frames of a tick, whole or not at all; `end` is the log's end after them.

        Raises DiskFull when there is no room, and may be tried again; StorageError for the rest."""
        if self.failed is not None:
            raise self.failed
        segment = self._active
        entries = index_entries or list(frame_entries(frames))
        self.end = max(self.end, entries[0][1])
        if (
            segment is None
            or segment.end < self.end  # positions were given up: within a segment they count its messages
            or segment.length >= self._segment_bytes
            or segment.length + len(frames) > SEGMENT_BYTES_MAX
            or len(segment.builder.topics) >= TOPICS_MAX  # type: ignore[union-attr]
        ):
            segment = self._start_segment()
        try:
            write_all(segment.fd, frames)
        except OSError as error:
            self._take_back(segment)
            raise storage_error(error, f"cannot append to {segment.path}") from error
        at = segment.length
        builder = segment.builder
        assert builder is not None  # an active segment has one
        for offset, base, count, topics in entries:
            size, time_ms = _SIZE_AND_TIME(frames, offset + 8)
            if topics is None:
                builder.add_changes(at + offset, base, size)
            else:
                builder.add(at + offset, base, count, topics, size, time_ms)
        segment.last_time_ms = builder.last_time_ms
        segment.length = at + len(frames)
        segment.end = end
        self.end = end

    def _take_back(self, segment: SegmentFile) -> None:
        """Undo a write that failed half-way."""
        try:
            os.ftruncate(segment.fd, segment.length)
        except OSError as error:
            self.failed = storage_error(error, f"cannot undo a failed write to {segment.path}")

    def roll(self) -> None:
        """Seal the active segment and begin a new one."""
        self._start_segment()

    def _start_segment(self) -> SegmentFile:
        sealed = self._active
        empty = sealed is not None and sealed.length <= SEGMENT_HEADER_BYTES
        if sealed is not None and empty and sealed.base == self.end:
            return sealed
        # A file without a frame gives its number to the next, or crashes in a row would pile them up.
        replaces = empty or (sealed is None and self._newest_bytes <= SEGMENT_HEADER_BYTES)
        sequence = self._sequence if replaces else self._sequence + 1
        header = SegmentHeader(sequence, self.end, time.time_ns() // 1_000_000, WRITER)
        path = self.folder / segment_name(sequence)
        try:
            if replaces:
                path.with_suffix(".index").unlink(missing_ok=True)
            replace_file(path, encode_segment_header(header), durable=self._durable_start)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error, f"cannot begin {path}") from error
        self._durable_start = False
        segment = SegmentFile(path, header, IndexBuilder(), self._mapped)
        segment.fd = fd
        segment.sealed = False
        with self._lock:
            self._folder_dirty = True
            if sealed is not None:
                sealed.sealed = True
                self._unsynced.append(sealed)
                if not empty:
                    self._unindexed.append(sealed)
            self._active = segment
            self._shelves = (*(s for s in self._shelves if s.sequence != sequence), segment)
        self._sequence = sequence
        if len(self._unindexed) > UNINDEXED_MAX:
            self._write_indices()
        elif sealed is not None:
            self._indexer = threading.Thread(target=self._write_indices, name="tidegate-index", daemon=True)
            self._indexer.start()
        return segment

    def _write_indices(self) -> None:
        """Write the indices of sealed segments, each after its segment is durable: the next start
        believes an index that fits."""
        with self._indexing:
            for segment in tuple(self._unindexed):
                try:
                    segment.make_durable()
                    segment.write_index()
                except OSError:
                    if not segment.dropped:
                        continue  # it stays in memory until there is room
                with self._lock:
                    self._unindexed.remove(segment)

    def sync_sealed(self) -> None:
        """Make the sealed segments durable and let go of their descriptors."""
        if self._unsynced:
            self._sync(with_active=False)

    def sync(self) -> None:
        """Return when everything appended before the call is durable.

        A failure is final, because the kernel forgets what it could not write: from then on append
        and sync raise, and the log has to be opened anew."""
        self._sync(with_active=True)

    def _sync(self, with_active: bool) -> None:
        with self._syncing:
            if self.failed is not None:
                raise self.failed
            with self._lock:
                sealed, active, folder_dirty = tuple(self._unsynced), self._active, self._folder_dirty
                self._folder_dirty = False
            try:
                for segment in sealed:
                    os.fdatasync(segment.fd)
                if active is not None and with_active:
                    os.fdatasync(active.fd)
                if folder_dirty:
                    fsync_folder(self.folder)
            except OSError as error:
                self.failed = StorageError(f"cannot sync the log in {self.folder}: {error.strerror}")
                raise self.failed from error
            with self._lock:
                for segment in sealed:
                    self._unsynced.remove(segment)
                    os.close(segment.fd)
                    segment.fd = -1

    # The rest ------------------------------------------------------------------------------------

    def drop(self, segments: Iterable[SegmentFacts]) -> None:
        """Delete sealed segments, from the oldest on; stops at the first that is not among
        `segments`, and at the newest, which remembers the log's end. What could not be deleted is tried again
        with the next call. One thread may call it."""
        going = {segment.sequence for segment in segments}
        self.sync()  # the newest segment must be there for good before others go
        gone = []
        with self._lock:
            for shelf in self._shelves[:-1]:
                if shelf.sequence not in going or not shelf.sealed:
                    break
                gone.append(shelf)
            self._shelves = self._shelves[len(gone) :]
        for shelf in gone:
            shelf.dropped = True
        self._deleting += gone
        if not self._deleting:
            return
        try:
            while self._deleting:
                shelf = self._deleting[0]
                shelf.path.unlink(missing_ok=True)
                shelf.index_path.unlink(missing_ok=True)
                del self._deleting[0]
            fsync_folder(self.folder)
        except OSError as error:
            raise storage_error(error, f"cannot drop segments of {self.folder}") from error

    def verify(self, progress: Progress | None = None) -> Iterator[Damage]:
        """Check every byte. Holds one segment in memory at a time."""
        shelves = self._shelves
        for done, segment in enumerate(shelves):
            if progress is not None:
                progress("segments", done, len(shelves))
            following = shelves[done + 1] if done + 1 < len(shelves) else None
            try:
                next_base = None if following is None else following.base
                yield from segment.examine(last=False, next_base=next_base).damages
            except ShelfGone:
                continue
            if following is not None and following.sequence != segment.sequence + 1:
                name = segment_name(segment.sequence + 1)
                yield Damage(name, 0, 0, segment.end, following.base - 1, "the segment is missing")
        if progress is not None:
            progress("segments", len(shelves), len(shelves))

    def close(self, clean: bool = True) -> None:
        """Sync, write what makes the next start quick, and let the folder go."""
        if self._lock_fd < 0:
            return
        if self._indexer is not None:
            self._indexer.join()
        try:
            if self.failed is None and clean:
                self._close_cleanly()
        finally:
            for segment in (*self._unsynced, self._active):
                if segment is not None and segment.fd >= 0:
                    os.close(segment.fd)
                    segment.fd = -1
            self._active = None
            for segment in self._mapped:
                segment.index = None
            self._mapped.clear()
            self._unlock()

    def _close_cleanly(self) -> None:
        self.sync()
        if self._active is not None:
            self._active.sealed = True
            with self._lock:
                self._unindexed.append(self._active)
        self._write_indices()
        last = self._shelves[-1] if self._shelves else None
        marker = f"{self.end} {self._sequence} {last.length if last else 0}\n"
        try:
            replace_file(self.folder / "CLEAN", marker.encode(), durable=True)
        except OSError as error:
            raise storage_error(error, "the log is safe, but its stop was not noted as clean") from error

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _ours(name: str) -> bool:
    """Whether a file shows that there was a log in the folder."""
    return name.endswith((".log", ".index", ".snapshot"))


def _lock(folder: Path) -> int:
    try:
        return lock_file(folder / "LOCK")
    except Held as owner:
        raise FolderLocked(f"{folder} is in use by process {owner}") from None


def _read_marker(folder: Path) -> tuple[int, int, int] | None:
    """(end, newest sequence, its bytes) at a clean stop."""
    try:
        end, sequence, size = (int(word) for word in (folder / "CLEAN").read_bytes().split())
    except (FileNotFoundError, ValueError):
        return None
    return end, sequence, size


def _first_bytes(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except FileNotFoundError:
        return b""
