"""The topic index of a segment: topic → the frames that hold it, and position or time → frame.

An index file stands beside each sealed segment. It can always be rebuilt from the segment, and is,
when it is missing or fails a checksum. Little endian, each section at a multiple of 8 bytes:

    offset  size  field                              offset  size  field
         0     4  magic b"TGI1"                          60     4  frames (MESSAGES frames)
         4     4  version, 1                             64     4  topics
         8     8  sequence of the segment                68     4  postings
        16     8  base position of the segment           72     4  changes (CHANGES frames)
        24     8  end: position after its last message   76     4  damages
        32     8  first time_ms                          80     4  topic bytes
        40     8  newest time_ms                         84    36  reserved, 0
        48     8  bytes of the segment file             120     4  body crc: crc32 of bytes 128 … end
        56     4  writer of the segment                 124     4  header crc: crc32 of bytes 0 … 124

    u32[frames] offset · u32[frames] size · u32[frames] count · i64[frames] base
    i64[frames] newest time_ms of this and all earlier frames of the segment
    u32[changes] offset · u32[changes] size · i64[changes] base
    i64[damages] first position · i64[damages] messages lost from there on
    u32[topics + 1] where a topic's name begins · u32[topics + 1] where its postings begin
    u32[postings] ordinals of frames, increasing within a topic
    topic names, one after the other, in increasing order of their bytes

The times are a running maximum, so they increase even when the clock did not, and a search by
bisection still finds the first frame that is not older than a given time.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import accumulate
from mmap import mmap
from typing import NamedTuple
from zlib import crc32

from tidegate.limits import WANTED_WORK_MAX

INDEX_MAGIC = b"TGI1"
INDEX_HEADER_BYTES = 128
INDEX_VERSION = 1
TOPICS_MAX = 2**18
"""A segment is sealed early when its index holds this many topics: some 60 MB of memory."""

_HEAD = struct.Struct("<4sIQqqqqQIIIIIII36xI")
_U32 = struct.Struct("<I")
_SORT_CHUNK = 8192  # one sort holds the interpreter for about 2 ms


class Wanted:
    """What a reader wants: topics named in full, and whatever `match` accepts among the topics that
    begin with one of `prefixes`. Reuse the object from read to read, one read at a time: what it found
    in an index is kept in it.

    Reads take turns, and `work` counts what this turn has asked, in units of some microseconds. Above
    WANTED_WORK_MAX more is accepted than is wanted: whoever asks looks at each message anyway."""

    __slots__ = ("exact", "found", "match", "prefixes", "work")

    def __init__(
        self,
        exact: frozenset[bytes] = frozenset(),
        prefixes: Iterable[bytes] = (),
        match: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.exact = exact
        self.prefixes = shortest(prefixes)
        self.match = match
        self.found: dict[object, object] = {}  # owned by whoever reads
        self.work = 0

    def begin(self) -> None:
        """A turn begins, on the thread that reads."""
        self.work = 0

    def takes(self, topic: bytes) -> bool:
        """Whether a topic that is not named in full is wanted."""
        self.work += 1
        at = bisect_right(self.prefixes, topic) - 1  # none begins with another, so only this one can fit
        return (
            self.match is not None and at >= 0 and topic.startswith(self.prefixes[at]) and self.match(topic)
        )

    def __call__(self, topic: bytes) -> bool:
        return topic in self.exact or self.work > WANTED_WORK_MAX or self.takes(topic)


def shortest(prefixes: Iterable[bytes]) -> tuple[bytes, ...]:
    """Those that no other one covers, in order."""
    found: list[bytes] = []
    for prefix in sorted(prefixes):
        if not found or not prefix.startswith(found[-1]):
            found.append(prefix)
    return tuple(found)


class FrameTable:
    """The columns about frames that a growing and a finished index have in common."""

    __slots__ = ("bases", "changes_bases", "changes_offsets", "changes_sizes", "counts", "damages", "offsets",
                 "sizes", "times")  # fmt: skip

    offsets: Sequence[int]
    sizes: Sequence[int]
    counts: Sequence[int]
    bases: Sequence[int]
    times: Sequence[int]
    changes_offsets: Sequence[int]
    changes_sizes: Sequence[int]
    changes_bases: Sequence[int]
    damages: list[tuple[int, int]]  # (first position, messages lost)

    def ordinal_at(self, position: int) -> int:
        """The frame that holds `position`, or else the next one; the number of frames if none."""
        i = bisect_right(self.bases, position) - 1
        return i if i >= 0 and position < self.bases[i] + self.counts[i] else i + 1

    def frame_at(self, position: int) -> int | None:
        """The offset of the frame that holds `position`, or of the next one."""
        i = self.ordinal_at(position)
        return self.offsets[i] if i < len(self.offsets) else None

    def position_at_time(self, time_ms: int) -> int | None:
        """The first position that is not older than `time_ms`."""
        i = bisect_left(self.times, time_ms)
        return self.bases[i] if i < len(self.bases) else None

    def ordinals(self, topic: bytes) -> Sequence[int]:
        raise NotImplementedError

    def prefix_topics(self, prefix: bytes) -> Iterator[bytes]:
        raise NotImplementedError

    def exact(self, topic: bytes) -> list[int]:
        """The offsets of the frames that hold `topic`."""
        return [self.offsets[i] for i in self.ordinals(topic)]

    def frames_for(self, topics: Iterable[bytes]) -> list[int]:
        """The sorted offsets of the frames that hold any of `topics`."""
        found: set[int] = set()
        for topic in topics:
            found.update(self.ordinals(topic))
        return [self.offsets[i] for i in sorted(found)]


class IndexBuilder(FrameTable):
    """The index of a segment that still grows. One thread adds; others may read: every step is
    atomic under the interpreter's lock, and readers stop at the end position published after it."""

    __slots__ = ("first_time_ms", "last_time_ms", "postings", "topics")

    offsets: array[int]
    sizes: array[int]
    counts: array[int]
    bases: array[int]
    times: array[int]
    changes_offsets: array[int]
    changes_sizes: array[int]
    changes_bases: array[int]

    def __init__(self) -> None:
        self.offsets, self.sizes, self.counts = array("I"), array("I"), array("I")
        self.bases, self.times = array("q"), array("q")
        self.changes_offsets, self.changes_sizes = array("I"), array("I")
        self.changes_bases = array("q")
        self.topics: list[bytes] = []  # in order of appearance
        self.postings: dict[bytes, int | array[int]] = {}  # a lone ordinal is kept as itself
        self.damages = []
        self.first_time_ms = self.last_time_ms = 0

    def add(
        self,
        frame_offset: int,
        base: int,
        count: int,
        topics: Iterable[bytes],
        size: int = 0,
        time_ms: int = 0,
    ) -> None:
        """A MESSAGES frame of `size` bytes was appended."""
        ordinal = len(self.bases)
        if not ordinal:
            self.first_time_ms = time_ms
        if time_ms > self.last_time_ms:
            self.last_time_ms = time_ms
        self.offsets.append(frame_offset)
        self.sizes.append(size)
        self.counts.append(count)
        self.times.append(self.last_time_ms)
        self.bases.append(base)
        postings = self.postings
        for topic in topics:
            known = postings.get(topic)
            if type(known) is array:
                if known[-1] != ordinal:
                    known.append(ordinal)
            elif known is None:
                postings[topic] = ordinal
                self.topics.append(topic)
            elif known != ordinal:
                postings[topic] = array("I", (known, ordinal))  # type: ignore[arg-type]

    def add_changes(self, frame_offset: int, base: int, size: int) -> None:
        """A CHANGES frame was appended."""
        self.changes_offsets.append(frame_offset)
        self.changes_sizes.append(size)
        self.changes_bases.append(base)

    def ordinals(self, topic: bytes) -> Sequence[int]:
        known = self.postings.get(topic)
        if known is None:
            return ()
        return (known,) if isinstance(known, int) else known[:]

    def prefix_topics(self, prefix: bytes) -> Iterator[bytes]:
        return iter([topic for topic in self.topics[:] if topic.startswith(prefix)])

    def build(self, sequence: int = 0, base: int = 0, end: int = 0, segment_bytes: int = 0, writer: int = 0) -> bytes:
        """The index file. Meant for a thread of its own: it lets others run in between."""
        topics = self.topics
        chunks = [sorted(topics[i : i + _SORT_CHUNK]) for i in range(0, len(topics), _SORT_CHUNK)]
        names = list(merge(*chunks)) if len(chunks) > 1 else chunks[0] if chunks else []
        postings = array("I")
        starts = array("I", [0])
        for name in names:
            known = self.postings[name]
            if isinstance(known, int):
                postings.append(known)
            else:
                postings.extend(known)
            starts.append(len(postings))
        name_starts = array("I", accumulate(map(len, names), initial=0))
        parts: list[bytes] = []
        sections = (
            self.offsets, self.sizes, self.counts, self.bases, self.times,
            self.changes_offsets, self.changes_sizes, self.changes_bases,
            array("q", [first for first, _ in self.damages]), array("q", [lost for _, lost in self.damages]),
            name_starts, starts, postings,
        )  # fmt: skip
        for section in sections:
            raw = section.tobytes()
            parts.append(raw)
            parts.append(bytes(-len(raw) & 7))
        parts.extend(names)
        body = b"".join(parts)
        head = _HEAD.pack(
            INDEX_MAGIC, INDEX_VERSION, sequence, base, end, self.first_time_ms, self.last_time_ms,
            segment_bytes, writer, len(self.bases), len(names), len(postings), len(self.changes_bases),
            len(self.damages), name_starts[-1], crc32(body),
        )  # fmt: skip
        return b"".join((head, _U32.pack(crc32(head)), body))


class IndexHeader(NamedTuple):
    sequence: int
    base: int
    end: int
    first_time_ms: int
    last_time_ms: int
    segment_bytes: int
    writer: int
    frames: int
    topics: int
    postings: int
    changes: int
    damages: int
    topic_bytes: int
    body_crc: int

    @property
    def file_bytes(self) -> int:
        """How long the index file must be."""
        f, c, d = self.frames, self.changes, self.damages
        sections = (4 * f, 4 * f, 4 * f, 8 * f, 8 * f, 4 * c, 4 * c, 8 * c, 8 * d, 8 * d,
                    4 * (self.topics + 1), 4 * (self.topics + 1), 4 * self.postings)  # fmt: skip
        return INDEX_HEADER_BYTES + sum(size + 7 & ~7 for size in sections) + self.topic_bytes


def parse_index_header(raw: bytes) -> IndexHeader | None:
    """The header of an index file, or None where it is not valid."""
    if len(raw) < INDEX_HEADER_BYTES or raw[:4] != INDEX_MAGIC:
        return None
    if crc32(raw[:124]) != _U32.unpack_from(raw, 124)[0]:
        return None
    _, version, *rest = _HEAD.unpack(raw[:124])
    return IndexHeader(*rest) if version == INDEX_VERSION else None


class TopicIndex(FrameTable):
    """A finished index, read in place from `buf`."""

    __slots__ = ("_buf", "_name_starts", "_names_at", "_postings", "_starts", "header")

    def __init__(self, buf: bytes | mmap, header: IndexHeader) -> None:
        self._buf = buf
        self.header = header
        view = memoryview(buf)
        at = INDEX_HEADER_BYTES

        def column(code: str, entries: int) -> Sequence[int]:
            nonlocal at
            size = entries * (4 if code == "I" else 8)
            part = view[at : at + size].cast(code)  # type: ignore[call-overload]
            at += size + 7 & ~7
            return part  # type: ignore[no-any-return]

        frames, changes = header.frames, header.changes
        self.offsets, self.sizes, self.counts = (column("I", frames) for _ in range(3))
        self.bases, self.times = column("q", frames), column("q", frames)
        self.changes_offsets, self.changes_sizes = column("I", changes), column("I", changes)
        self.changes_bases = column("q", changes)
        firsts, losts = column("q", header.damages), column("q", header.damages)
        self.damages = list(zip(firsts, losts, strict=True))
        self._name_starts = column("I", header.topics + 1)
        self._starts = column("I", header.topics + 1)
        self._postings = column("I", header.postings)
        self._names_at = at

    @classmethod
    def load(cls, buf: bytes | mmap) -> TopicIndex | None:
        """The index, or None if its bytes are not as they were written."""
        header = parse_index_header(buf[:INDEX_HEADER_BYTES])
        if header is None or header.file_bytes != len(buf):
            return None
        with memoryview(buf) as whole, whole[INDEX_HEADER_BYTES:] as body:
            if crc32(body) != header.body_crc:
                return None
        return cls(buf, header)

    def _name(self, i: int) -> bytes:
        at = self._names_at
        return self._buf[at + self._name_starts[i] : at + self._name_starts[i + 1]]

    def _search(self, name: bytes) -> int:
        """The first topic that is not less than `name`."""
        return bisect_left(range(self.header.topics), name, key=self._name)

    def ordinals(self, topic: bytes) -> Sequence[int]:
        i = self._search(topic)
        if i == self.header.topics or self._name(i) != topic:
            return ()
        return self._postings[self._starts[i] : self._starts[i + 1]]

    def prefix_topics(self, prefix: bytes) -> Iterator[bytes]:
        for i in range(self._search(prefix), self.header.topics):
            name = self._name(i)
            if not name.startswith(prefix):
                return
            yield name
