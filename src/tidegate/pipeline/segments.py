"""The log folder for readers beside a running broker: how far it reaches, and byte ranges to read in parallel.

A *place* is a frame's boundary, `sequence << 32 | byte`: unlike a position it also tells apart the state changes
that were written between two messages. Nothing here takes a lock or writes. What follows the last whole tick of the
newest segment is not there yet: the broker is about to finish it, or will cut it off when it starts again.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import error as StructError
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import CorruptLog, StorageError
from tidegate.log.frame import (
    CHANGES,
    MESSAGES,
    Buffer,
    FrameHeader,
    check_body,
    decode_changes,
    decode_messages,
    parse_header,
)
from tidegate.log.index import INDEX_HEADER_BYTES, IndexHeader, TopicIndex, parse_index_header
from tidegate.log.recovery import POSITION_GAP
from tidegate.log.run import Run
from tidegate.log.segment import (
    SEGMENT_HEADER_BYTES,
    Scanned,
    SegmentHeader,
    Status,
    index_name,
    parse_segment_header,
    scan,
    segment_name,
    sequence_of,
)
from tidegate.pipeline.decode import frame_to_arrow, runs_to_arrow
from tidegate.pipeline.schemas import RAW_BYTES_MAX

SPLIT_BYTES = 64 << 20
SMALL_FRAME = 64
"""Frames with fewer messages are gathered before they become Arrow: a batch has a price of its own."""
BATCH_ROWS = 65_536
COLUMNS_KEPT_MAX = 16
"""Finished segments whose frame tables are kept, at most some 20 MB each."""

_MASK = 0xFFFFFFFF


class LogGone(StorageError):
    """What was asked for is no longer in the log."""


class Place(NamedTuple):
    """A boundary between frames, and the position of the next message there."""

    place: int
    position: int

    @property
    def sequence(self) -> int:
        return self.place >> 32

    @property
    def byte(self) -> int:
        return self.place & _MASK


def place(sequence: int, byte: int) -> int:
    return sequence << 32 | byte


@dataclass(frozen=True, slots=True)
class Split:
    """Bytes `start` … `end` of a segment. No position in it is below `base`; `rows` is how many messages it holds if
    none is damaged, `next_base` where the positions go on behind it, if that is known."""

    path: str
    sequence: int
    start: int
    end: int
    writer: int
    base: int
    rows: int
    next_base: int | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Bytes of a split that hold no valid frame."""

    place: int
    reason: str
    first_position: int | None
    last_position: int | None
    raw: bytes


class _Columns(NamedTuple):
    """The frames of a segment, one entry each."""

    offsets: npt.NDArray[np.int64]
    bases: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]  # 0 for changes
    times: npt.NDArray[np.int64]  # the newest so far


class _Frames:
    """Where the frames of one segment are. Grows while the segment does; a finished one is looked up in its index, and
    what was found there can be forgotten."""

    def __init__(self, path: Path, header: SegmentHeader) -> None:
        self.path = path
        self.header = header
        self.finished = False
        self.kept: _Columns | None = None
        self._from_the_start()

    def _from_the_start(self) -> None:
        self.end = SEGMENT_HEADER_BYTES  # bytes looked at
        self.end_position = self.header.base
        self.newest_ms = 0
        self._indexed = False
        self._seen = array("q"), array("q"), array("q"), array("q")  # as _Columns

    def columns(self) -> _Columns:
        if not self._indexed:
            return _Columns(*(np.array(each, np.int64) for each in self._seen))
        if self.kept is None:
            index = TopicIndex.load(_map(self.path.with_name(index_name(self.header.sequence))))
            if index is None or not self._fits(index.header):
                self._from_the_start()
                self.finished = False
                self._scan(newest=False)
                return self.columns()
            self.kept = _columns_of(index)
        return self.kept

    def _fits(self, index: IndexHeader) -> bool:
        return index.segment_bytes == self.path.stat().st_size and index.writer == self.header.writer

    def _find_index(self) -> bool:
        """Whether the segment has an index, which says how far it reaches."""
        try:
            with self.path.with_name(index_name(self.header.sequence)).open("rb") as file:
                index = parse_index_header(file.read(INDEX_HEADER_BYTES))
        except FileNotFoundError:
            return False
        if index is None or not self._fits(index):
            return False
        self.end, self.end_position, self.newest_ms = index.segment_bytes, index.end, index.last_time_ms
        self._indexed = self.finished = True
        self._seen = array("q"), array("q"), array("q"), array("q")
        return True

    def grow(self, newest: bool) -> None:
        """Look at what was appended since. `newest`: what is not whole may still become so."""
        if not self.finished and (newest or not self._find_index()):
            self._scan(newest)

    def _scan(self, newest: bool) -> None:
        start = self.end
        buf = _tail(self.path, start)  # a copy: a mapped file that the broker cuts meanwhile would kill us
        size = len(buf)
        found: list[tuple[int, FrameHeader]] = []
        at, position = 0, self.end_position
        while at < size:
            header = parse_header(buf, at)
            if header is None or header.writer != self.header.writer or header.base < position:
                break
            if at + header.length > size:
                break
            found.append((at, header))
            at += header.length
            position = header.end
        if newest:
            at = _whole(buf, found, at)
        else:
            at = size  # what is not valid here is damage, for whoever reads it to report
            self.finished = True
        offsets, bases, counts, times = self._seen
        for offset, header in found:
            self.newest_ms = max(self.newest_ms, header.time_ms)
            offsets.append(start + offset)
            bases.append(header.base)
            counts.append(header.count if header.kind == MESSAGES else 0)
            times.append(self.newest_ms)
            self.end_position = header.end
        self.end = start + at

    def boundary(self, byte: int) -> int:
        """The first frame that begins at or after `byte`, as an ordinal."""
        return int(np.searchsorted(self.columns().offsets, byte))

    def byte_of(self, ordinal: int) -> int:
        offsets = self.columns().offsets
        return int(offsets[ordinal]) if ordinal < len(offsets) else self.end

    def position_of(self, ordinal: int) -> int:
        bases = self.columns().bases
        return int(bases[ordinal]) if ordinal < len(bases) else self.end_position

    def end_before(self, ordinal: int) -> int:
        """The position after the frame before. What follows it may be damaged, and then no frame that is known."""
        columns = self.columns()
        return int(columns.bases[ordinal - 1] + columns.counts[ordinal - 1]) if ordinal else self.header.base


def _columns_of(index: TopicIndex) -> _Columns:
    changes = np.asarray(index.changes_offsets, np.int64)
    none = np.zeros(len(changes), np.int64)
    offsets = np.concatenate([np.asarray(index.offsets, np.int64), changes])
    order = np.argsort(offsets, kind="stable")
    bases = np.concatenate([np.asarray(index.bases, np.int64), np.asarray(index.changes_bases, np.int64)])
    counts = np.concatenate([np.asarray(index.counts, np.int64), none])
    times = np.concatenate([np.asarray(index.times, np.int64), none])[order]
    return _Columns(offsets[order], bases[order], counts[order], np.maximum.accumulate(times) if len(times) else times)


def _whole(buf: Buffer, found: list[tuple[int, FrameHeader]], end: int) -> int:
    """Drop the frames at the end that may not be finished; returns where the whole ones end. Only the last write can
    be under way, so only the last tick is checked: messages, and the changes that belong to them."""
    while found:
        offset, header = found[-1]
        if header.kind == MESSAGES and header.followed:
            end = found.pop()[0]  # its changes are not there yet
            continue
        if check_body(buf, offset, header):
            if header.kind == CHANGES and len(found) > 1 and found[-2][1].followed:
                before, messages = found[-2]
                if not check_body(buf, before, messages):
                    end = before
                    del found[-2:]
                    continue
            return end
        end = found.pop()[0]
    return end


class LogFolder:
    """A log folder, looked at again and again; remembers what cannot change any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[int, _Frames] = {}

    def refresh(self) -> list[_Frames]:
        """The segments that there are now, oldest first."""
        try:
            names = [each.name for each in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        sequences = sorted(n for n in map(sequence_of, names) if n is not None)
        known: dict[int, _Frames] = {}
        for sequence in sequences:
            path = self.folder / segment_name(sequence)
            try:
                frames = self._known.get(sequence)
                if frames is None or (frames.end == SEGMENT_HEADER_BYTES and not frames.finished):
                    before = next(reversed(known.values()), None)
                    frames = _Frames(path, _segment_header(path, sequence, before.end_position if before else 0))
                frames.grow(newest=sequence == sequences[-1])
            except FileNotFoundError:
                continue  # trimmed by the broker since the folder was read
            known[sequence] = frames
        self._known = known
        self._forget()
        return list(known.values())

    def _forget(self) -> None:
        """The columns of old segments, except for a few: there may be thousands of segments."""
        kept = [frames for frames in self._known.values() if frames.kept is not None]
        for frames in kept[: -COLUMNS_KEPT_MAX]:
            frames.kept = None

    def start(self) -> Place:
        """The first place that is still there."""
        segments = self.refresh()
        if not segments:
            return Place(0, 0)
        first = segments[0]
        return Place(place(first.header.sequence, SEGMENT_HEADER_BYTES), first.position_of(0))

    def end(self) -> Place:
        """After the last whole tick."""
        segments = self.refresh()
        if not segments:
            return Place(0, 0)
        last = segments[-1]
        return Place(place(last.header.sequence, last.end), last.end_position)

    def segment(self, sequence: int) -> SegmentHeader | None:
        """None if it is not there."""
        return next((each.header for each in self.refresh() if each.header.sequence == sequence), None)

    def position_at(self, at: int) -> int:
        """The position of the next message at a place."""
        for frames in self.refresh():
            if frames.header.sequence >= at >> 32:
                here = frames.header.sequence == at >> 32
                return frames.end_before(frames.boundary(at & _MASK)) if here else frames.header.base
        return self.end().position

    def place_of(self, position: int) -> Place:
        """Where the frame with `position` begins, or else the first one after it; the end if there is none."""
        for frames in self.refresh():
            if frames.end_position > position:
                columns = frames.columns()
                ordinal = int(np.searchsorted(columns.bases + columns.counts, position, side="right"))
                return Place(place(frames.header.sequence, frames.byte_of(ordinal)), frames.position_of(ordinal))
        return self.end()

    def place_at_time(self, time_ms: int) -> Place:
        """The first place whose messages are not older than `time_ms`; the end if there is none."""
        for frames in self.refresh():
            if frames.newest_ms >= time_ms and frames.end > SEGMENT_HEADER_BYTES:
                ordinal = int(np.searchsorted(frames.columns().times, time_ms))
                return Place(place(frames.header.sequence, frames.byte_of(ordinal)), frames.position_of(ordinal))
        return self.end()

    def splits(self, start: int, end: int, bytes_max: int = SPLIT_BYTES) -> list[Split]:
        """The bytes from place `start` to place `end` in pieces of about `bytes_max`, of whole frames each. Raises
        LogGone if the first of them are no longer there."""
        segments = [each for each in self.refresh() if start >> 32 <= each.header.sequence <= end >> 32]
        if start < end and segments and segments[0].header.sequence > max(start >> 32, 1) and start >> 32:
            raise LogGone(f"the log begins with segment {segments[0].header.sequence} now; {start >> 32} is gone")
        found: list[Split] = []
        for at, frames in enumerate(segments):
            sequence = frames.header.sequence
            first = start & _MASK if sequence == start >> 32 else SEGMENT_HEADER_BYTES
            after = min(end & _MASK, frames.end) if sequence == end >> 32 else frames.end
            next_base = segments[at + 1].header.base if at + 1 < len(segments) else None
            found += _cut(frames, max(first, SEGMENT_HEADER_BYTES), after, bytes_max, next_base)
        return found

    def rows(self, start: int, end: int) -> int:
        """How many messages lie between two places."""
        return sum(split.rows for split in self.splits(start, end, 1 << 62))

    def bounded(self, start: int, end: int, bytes_max: int) -> int:
        """The furthest place up to `end` that is at most about `bytes_max` behind `start`."""
        left = bytes_max
        for split in self.splits(start, end, bytes_max):
            if left < split.end - split.start and left < bytes_max:
                return place(split.sequence, split.start)
            left -= split.end - split.start
        return end

    def ahead(self, start: Place, end: Place, rows: int) -> Place:
        """`rows` messages behind `start`, but no further than `end`. All three positions may lie within the frame that
        begins at their place: then only the messages from there on, or up to there, are meant."""
        for frames in self.refresh():
            sequence = frames.header.sequence
            if not start.sequence <= sequence <= end.sequence:
                continue
            columns = frames.columns()
            first = frames.boundary(start.byte) if sequence == start.sequence else 0
            last = frames.boundary(end.byte) + 1 if sequence == end.sequence else len(columns.offsets)
            bases = columns.bases[first:last]
            ends = bases + columns.counts[first:last]
            wanted = np.maximum(np.minimum(ends, end.position) - np.maximum(bases, start.position), 0)
            totals = np.cumsum(wanted)
            at = int(np.searchsorted(totals, rows, side="right"))
            if at < len(totals):
                left = rows - int(totals[at] - wanted[at])
                return Place(place(sequence, frames.byte_of(first + at)), max(int(bases[at]), start.position) + left)
            rows -= int(totals[-1]) if len(totals) else 0
        return end

    def behind(self, point: Place) -> int:
        """The boundary up to which one has to read for all messages below `point`'s position."""
        for frames in self.refresh():
            if frames.header.sequence == point.sequence:
                at = frames.boundary(point.byte)
                if frames.byte_of(at) == point.byte and frames.position_of(at) < point.position:
                    return place(point.sequence, frames.byte_of(at + 1))
        return point.place

    def holes(self, start: int, end: int, position: int | None = None) -> list[Lost]:
        """Segments between two places that are not there any more, though nobody has read them. `position`: of the
        next message at `start`."""
        found: list[Lost] = []
        expected = start >> 32
        for frames in self.refresh():
            sequence = frames.header.sequence
            if sequence > end >> 32:
                break
            if expected and sequence > expected:
                names = segment_name(expected) if sequence == expected + 1 else f"{expected} to {sequence - 1}"
                reason = f"segment {names} is missing: trimmed or lost before it was read"
                last = frames.header.base - 1
                found.append(Lost(place(expected, start & _MASK), reason, position, last, b""))
            if sequence >= expected:
                expected, position = sequence + 1, frames.end_position
        return found


def _cut(frames: _Frames, start: int, end: int, bytes_max: int, next_base: int | None) -> Iterator[Split]:
    offsets, bases, counts, _ = frames.columns()
    while start < end:
        ordinal, stop = np.searchsorted(offsets, (start, start + bytes_max)).tolist()
        stop = max(stop, ordinal + 1)
        upto = min(int(offsets[stop]), end) if stop < len(offsets) else end
        after = int(np.searchsorted(offsets, upto))
        yield Split(
            str(frames.path),
            frames.header.sequence,
            start,
            upto,
            frames.header.writer,
            int(bases[ordinal - 1] + counts[ordinal - 1]) if ordinal else frames.header.base,
            int(counts[ordinal:after].sum()),
            next_base if upto == frames.end else int(bases[after]) if after < len(bases) else frames.end_position,
        )
        start = upto


def _segment_header(path: Path, sequence: int, base: int) -> SegmentHeader:
    with path.open("rb") as file:
        raw = file.read(2 * SEGMENT_HEADER_BYTES)
    header = parse_segment_header(raw[:SEGMENT_HEADER_BYTES])
    if header is not None and header.sequence == sequence:
        return header
    first = parse_header(raw, SEGMENT_HEADER_BYTES)  # as a recovering broker does
    if first is not None:
        return SegmentHeader(sequence, first.base, first.time_ms, first.writer)
    return SegmentHeader(sequence, base, 0, 0)  # nothing in it can be trusted; readers report all of it as lost


def _tail(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def _map(path: Path) -> Buffer:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return b""


# ── reading a split ──


def read_split(
    split: Split,
    *,
    rows_max: int = BATCH_ROWS,
    topic_test: Callable[[bytes], bool] | None = None,
    on_lost: Callable[[Lost], None] | None = None,
    on_changes: Callable[[int, FrameHeader, list[bytes]], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The messages of a split as Arrow batches (`decode.SCHEMA`). Damaged bytes go to `on_lost`; the records of
    CHANGES frames, with their frame's place, to `on_changes`. Raises LogGone if the segment has been trimmed."""
    try:
        buf = _map(Path(split.path))
    except FileNotFoundError:
        raise LogGone(f"segment {split.sequence} is no longer in the log") from None
    runs: list[Run] = []  # of small frames
    rows = 0
    position = split.base
    gap: Scanned | None = None  # bytes without a header: what they held is known when the next one is found

    def lost(item: Scanned, reason: str, first: int, after: int | None) -> None:
        if on_lost is not None:
            raw = bytes(buf[item.offset : item.offset + min(item.size, RAW_BYTES_MAX)])
            last = None if after is None or after - first >= POSITION_GAP else after - 1
            on_lost(Lost(place(split.sequence, item.offset), reason, first, last, raw))

    for item in scan(buf, split.start, split.writer, split.base, split.end):
        header = item.header
        if header is None:
            gap = item
            continue
        if gap is not None:
            lost(gap, gap.status.value, position, header.base)
            gap = None
        position = header.end
        if item.status is not Status.VALID:
            lost(item, item.status.value, header.base, header.end)
            continue
        try:
            if header.kind == CHANGES:
                if on_changes is not None:
                    on_changes(place(split.sequence, item.offset), header, decode_changes(buf, item.offset))
            elif topic_test is not None or header.count < SMALL_FRAME:
                taken = decode_messages(buf, item.offset, topic_test)
                runs += taken
                rows += sum(run.count for run in taken)
            else:
                if runs:
                    yield runs_to_arrow(runs)
                    runs, rows = [], 0
                yield from _sliced(frame_to_arrow(buf, item.offset), rows_max)
        except (ValueError, CorruptLog, pa.ArrowInvalid, IndexError, StructError) as error:
            lost(item, f"a frame of an unknown form: {error}", header.base, header.end)
        if rows >= rows_max:
            yield runs_to_arrow(runs)
            runs, rows = [], 0
    if runs:
        yield runs_to_arrow(runs)
    if gap is not None:
        lost(gap, gap.status.value, position, split.next_base)


def _sliced(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, rows_max):
        yield batch.slice(start, rows_max)

