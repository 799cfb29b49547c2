"""Reading messages from a row of segments: where to look, what to step over, when to stop.

Works on anything that is a `Shelf`; a segmented log's files and a memory log's chunks both are.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidegate.limits import SEARCH_WORK_MAX
from tidegate.log.frame import check_body, decode_changes, decode_messages, parse_header
from tidegate.log.index import FrameTable, IndexBuilder, Wanted
from tidegate.log.recovery import POSITION_GAP, Damage
from tidegate.log.run import Run
from tidegate.log.segment import SegmentFacts

FETCH_BYTES_MAX = 1 << 20
"""Frames that follow each other are read together up to this size."""
SHELVES_MAX = 16
"""A read looks through this many segments at most, so that it returns in time when nothing matches."""
PLAIN_FRAMES = 32
"""With fewer frames left than this, looking at each is cheaper than asking the index."""
FOUND_MAX = 4
"""Segments and files that a `Wanted` remembers something about."""
NAMES_STEP = 32
"""Topics that are compared with filters before the work is looked at."""


class Read(NamedTuple):
    """Go on at `next_position`; at the `end` asked for when nothing is left, at the same position when
    it could not be read for the moment. `damaged`: how many messages of the range are lost that might
    have been wanted."""

    runs: list[Run]
    next_position: int
    damaged: int


class Shelf(Protocol):
    """A segment as a reader sees it."""

    @property
    def sequence(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def writer(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def last_time_ms(self) -> int: ...
    def table(self) -> FrameTable: ...
    def facts(self) -> SegmentFacts: ...
    def fetch(self, offset: int, size: int) -> bytes:
        """What there is of these bytes, others for what is lost. Raises ShelfGone, and OSError for what may pass: see
        `unreadable`."""
        ...

    def fetch_waiting(self, offset: int, size: int) -> bytes:
        """The same for who cannot come back later."""
        ...


class ShelfGone(Exception):
    """The segment was dropped while somebody read it. Never leaves this package."""


class Unfinished(Exception):
    """Where to look is not known yet, and others are to have a turn. The next read with the same `Wanted` goes on."""


_S = TypeVar("_S", bound=Shelf)


class ShelvedLog(Generic[_S]):
    """What every log on shelves can be asked. Threads may ask while one other appends: the tuple of
    shelves is replaced, never changed, and `end` is published last."""

    def __init__(self) -> None:
        self._shelves: tuple[_S, ...] = ()
        self.end = 0  # the position after the last message
        self.report: list[Damage] = []

    @property
    def floor(self) -> int:
        """The first position that is still held."""
        shelves = self._shelves
        return shelves[0].base if shelves else self.end

    @property
    def first(self) -> SegmentFacts | None:
        """The oldest segment that is still held."""
        shelves = self._shelves
        return shelves[0].facts() if shelves else None

    def read(
        self, position: int, *, bytes_max: int, wanted: Wanted | None = None, end: int, in_turns: bool = False
    ) -> Read:
        """Runs with positions in `position` … `end`-1; see `Read`. Begins at `floor` if that is higher: the caller
        compares, to tell its reader what it lost. Raises OSError for what may pass: nothing of it is lost. `in_turns`:
        raises Unfinished after a share of work."""
        end = min(end, self.end)
        while True:
            try:
                return read(self._shelves, position, bytes_max=bytes_max, wanted=wanted, end=end)
            except ShelfGone:
                continue
            except Unfinished:
                if in_turns:
                    raise

    def changes_from(self, position: int) -> Iterator[list[bytes]]:
        """The records of every CHANGES frame whose base is not lower than `position`, in order.

        Ticks without messages share a base, so frames that a snapshot at `position` already holds
        come again: replaying a record twice must be harmless. Damaged frames go to `report`. For
        start-up, before anything is dropped."""
        for shelf in self._shelves:
            if shelf.end < position:
                continue
            table = shelf.table()
            bases = table.changes_bases
            for i in range(bisect_left(bases, position), len(bases)):
                offset, size = table.changes_offsets[i], table.changes_sizes[i]
                chunk = shelf.fetch_waiting(offset, size)
                header = parse_header(chunk)
                if header is None or header.writer != shelf.writer or not check_body(chunk, 0, header):
                    lost = Damage(shelf.name, offset, size, bases[i], bases[i] - 1, "changes are damaged")
                    self.report.append(lost)
                    continue
                yield decode_changes(chunk)

    def position_at_time(self, time_ms: int) -> int:
        """The first position with a time not before `time_ms`; `end` if there is none. Raises OSError for what may
        pass."""
        for shelf in self._shelves:
            if shelf.last_time_ms >= time_ms:
                try:
                    found = shelf.table().position_at_time(time_ms)
                except ShelfGone:
                    continue
                if found is not None:
                    return found
        return self.end

    def segments(self) -> list[SegmentFacts]:
        """All segments, oldest first."""
        return [shelf.facts() for shelf in self._shelves]

    def topics(self, segment: SegmentFacts) -> Iterator[bytes]:
        """The topics that have messages in a segment; none if it is gone. Raises OSError for what may pass."""
        for shelf in self._shelves:
            if shelf.sequence == segment.sequence:
                try:
                    table = shelf.table()
                except ShelfGone:
                    return
                yield from table.prefix_topics(b"")


def read(shelves: Sequence[Shelf], position: int, *, bytes_max: int, wanted: Wanted | None, end: int) -> Read:
    """Runs with positions in `position` … `end`-1, in order, until about `bytes_max` of frames. Raises Unfinished."""
    if wanted is not None:
        wanted.begin()
    began = position
    runs: list[Run] = []
    damaged = 0
    budget = bytes_max
    i = bisect_right(shelves, position, key=lambda shelf: shelf.end)
    for looked, shelf in enumerate(shelves[i:], i):
        if shelf.base >= end:
            position = max(position, end)
            break
        if looked - i == SHELVES_MAX:
            break
        if position < shelf.base:
            if looked and shelves[looked - 1].sequence + 1 != shelf.sequence:
                damaged += (shelf.base - max(position, shelves[looked - 1].end)) % POSITION_GAP
            position = shelf.base
        try:
            reached, spent, lost = _read_shelf(shelf, position, budget, wanted, end, runs)
        except Unfinished:
            if position == began:
                raise
            break
        damaged += lost
        position = reached
        budget -= spent
        if budget <= 0:
            break
    else:
        position = max(position, end)
    return Read(runs, position, damaged)


def _read_shelf(
    shelf: Shelf, position: int, budget: int, wanted: Wanted | None, end: int, runs: list[Run]
) -> tuple[int, int, int]:
    """Append what is wanted to `runs`; returns the position reached, bytes spent, messages lost."""
    upto = min(shelf.end, end)  # before the table: frames added from now on are not for this read
    table = shelf.table()
    first = table.ordinal_at(position)
    after = bisect_left(table.bases, upto)
    lost = spent = 0
    reached = upto
    for offset, size, group in _fetches(table, _candidates(shelf, table, wanted, first, after), budget):
        chunk = shelf.fetch(offset, size)
        for i in group:
            at = table.offsets[i] - offset
            header = parse_header(chunk, at)
            base, count = table.bases[i], table.counts[i]
            if (
                header is None
                or header.writer != shelf.writer
                or header.base != base
                or not check_body(chunk, at, header)
                or not _decode(chunk, at, wanted, position, upto, runs)
            ):
                lost += min(base + count, upto) - max(base, position)
            spent += table.sizes[i]
            if spent >= budget:
                reached = min(base + count, upto)
                break
        if spent >= budget:
            break
    for start, count in table.damages:
        lost += max(0, min(start + count, reached) - max(start, position))
    return reached, spent, lost


def _decode(chunk: bytes, at: int, wanted: Wanted | None, position: int, upto: int, runs: list[Run]) -> bool:
    """False if the frame is not what a writer of ours makes, although its checksums are right."""
    try:
        found = decode_messages(chunk, at, wanted, position)
    except (ValueError, IndexError, struct.error):
        return False
    while found and found[-1].base + found[-1].count > upto:
        run = found.pop()
        if run.base < upto:
            found.append(_head_of(run, upto - run.base))
    runs += found
    return True


def _head_of(run: Run, count: int) -> Run:
    return Run(
        run.topic,
        run.publisher,
        run.tenant,
        run.flags,
        run.payloads[:count],
        run.properties and run.properties[:count],
        run.expiries and run.expiries[:count],
        run.uuids and run.uuids[:count],
        run.base,
        run.time_ms,
    )


def _fetches(table: FrameTable, ordinals: Sequence[int], budget: int) -> Iterator[tuple[int, int, list[int]]]:
    """Group frames that lie close together: (offset, size, ordinals) of one read from the disk."""
    i = 0
    most = min(budget, FETCH_BYTES_MAX)
    while i < len(ordinals):
        offset = table.offsets[ordinals[i]]
        stop = offset + table.sizes[ordinals[i]]
        group = [ordinals[i]]
        i += 1
        while i < len(ordinals):
            ordinal = ordinals[i]
            after = table.offsets[ordinal] + table.sizes[ordinal]
            if after - offset > most or table.offsets[ordinal] - stop > 4096:
                break
            group.append(ordinal)
            stop = after
            i += 1
        yield offset, stop - offset, group


class _Found:
    """What a `Wanted` has found in one segment so far."""

    __slots__ = ("at", "dense", "frames", "fresh", "grows", "names", "ordinals", "seen", "topics", "upto")

    def __init__(self) -> None:
        self.topics: list[bytes] = []
        self.seen = 0  # topics of a growing index that were looked at
        self.names: Iterator[bytes] | None = None  # topics of a finished index that are still to be looked at
        self.frames = 0  # frames that `ordinals` speaks of
        self.ordinals = array("I")
        self.dense = False
        self.grows = True
        # A search that goes on in another turn: of `topics` those before `at` were looked up, for frames below `upto`.
        self.upto = 0
        self.at = 0
        self.fresh: set[int] = set()


def _candidates(shelf: Shelf, table: FrameTable, wanted: Wanted | None, first: int, after: int) -> Sequence[int]:
    """The frames in first … after-1 that may hold something wanted. Raises Unfinished."""
    if wanted is None or after - first < PLAIN_FRAMES:
        return range(first, after)
    found = wanted.found.get(shelf)
    if not isinstance(found, _Found):
        while len(wanted.found) >= FOUND_MAX:
            del wanted.found[next(iter(wanted.found))]
        wanted.found[shelf] = found = _Found()
    while found.frames < after and not found.dense:
        _search(table, wanted, found, after)
    if found.dense:
        return range(first, after)
    a, b = bisect_left(found.ordinals, first), bisect_left(found.ordinals, after)
    return found.ordinals[a:b]


def _search(table: FrameTable, wanted: Wanted, found: _Found, after: int) -> None:
    """Bring `found` up to the frame `after`, or to where a search that was begun before ends."""
    if not found.upto:
        found.upto = after
        if not found.topics:
            found.topics = list(wanted.exact)
    if wanted.match is not None:
        _look_at_names(table, wanted, found)
    topics, fresh = found.topics, found.fresh
    frames, upto = found.frames, found.upto
    while found.at < len(topics):
        if wanted.work > SEARCH_WORK_MAX:
            raise Unfinished
        wanted.work += 1
        ordinals = table.ordinals(topics[found.at])
        found.at += 1
        fresh.update(ordinals[bisect_left(ordinals, frames) : bisect_left(ordinals, upto)])
        some = len(found.ordinals) + len(fresh)
        if some > 256 and 2 * some > upto:
            found.dense = True
            found.topics, found.names, found.fresh = [], None, set()
            return
    found.ordinals.extend(sorted(fresh))
    found.frames = upto
    found.upto = found.at = 0
    found.fresh = set()


def _look_at_names(table: FrameTable, wanted: Wanted, found: _Found) -> None:
    """Add the topics that filters with wildcards want."""
    exact = wanted.exact
    if isinstance(table, IndexBuilder):
        while new := table.topics[found.seen : found.seen + NAMES_STEP]:
            if wanted.work > SEARCH_WORK_MAX:
                raise Unfinished
            found.seen += len(new)
            found.topics += [topic for topic in new if topic not in exact and wanted.takes(topic)]
    elif found.grows:  # sealed since, or never looked at
        if found.names is None:
            found.topics, found.at = list(exact), 0
            found.names = chain.from_iterable(map(table.prefix_topics, wanted.prefixes))
        while new := list(islice(found.names, NAMES_STEP)):
            found.topics += [topic for topic in new if topic not in exact and wanted.takes(topic)]
            if wanted.work > SEARCH_WORK_MAX:
                raise Unfinished
        found.names = None
        found.grows = False
