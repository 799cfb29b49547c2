"""What the bytes of a segment still hold, and what was lost. Decides only; `files` acts on it.

A write that a crash cut off leaves a tail of bytes without a valid frame behind them. Such a tail is
cut away, in the last segment only, and only if nothing valid follows; so are messages whose state changes,
written with them, are not all there. Everything else that is damaged stays where it is, is stepped over and is
reported. No bytes whatever make this raise.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from tidegate.log.frame import MESSAGES, Buffer, FrameHeader, frame_topics, parse_header
from tidegate.log.index import IndexBuilder
from tidegate.log.segment import (
    SEGMENT_HEADER_BYTES,
    Scanned,
    SegmentHeader,
    Status,
    parse_segment_header,
    scan,
)

POSITION_GAP = 2**32
"""How far the next position jumps after an unclean stop: more than could have been given out and lost."""


class Damage(NamedTuple):
    """Bytes that could not be served. Messages `first_position` … `last_position` were among them at
    most; `last_position` is lower than `first_position` if no message was, None if it is unknown."""

    segment: str
    offset: int
    bytes: int
    first_position: int
    last_position: int | None
    reason: str


@dataclass(slots=True)
class Examined:
    """A segment's bytes after examination. `header` None: nothing in it can be served."""

    header: SegmentHeader | None
    keep_bytes: int  # the file's length after the torn tail is cut
    end: int  # the position after the last message that is known of
    index: IndexBuilder
    damages: list[Damage]


def examine(
    buf: Buffer, name: str, sequence: int, *, last: bool, base: int = 0, next_base: int | None = None
) -> Examined:
    """Examine a segment. `last`: its torn tail may be cut. `base` is the position it cannot begin
    below, `next_base` where the next segment begins."""
    index = IndexBuilder()
    header = parse_segment_header(buf[:SEGMENT_HEADER_BYTES])
    damages: list[Damage] = []
    if header is None or header.sequence != sequence:
        first = parse_header(buf, SEGMENT_HEADER_BYTES)
        if first is None:
            whole = Damage(name, 0, len(buf), base, _last_before(next_base, base), _why_unreadable(len(buf)))
            return Examined(None, len(buf), base, index, [whole])
        header = SegmentHeader(sequence, first.base, first.time_ms, first.writer)
        damages.append(
            Damage(name, 0, SEGMENT_HEADER_BYTES, first.base, first.base - 1, "the segment's header is damaged")
        )
    position = header.base
    pending: list[Scanned] = []  # damage since the last valid frame
    held: tuple[Scanned, FrameHeader, list[bytes]] | None = None  # messages whose changes are still to come
    for item in scan(buf, SEGMENT_HEADER_BYTES, header.writer, position):
        if item.status is not Status.VALID or item.header is None:
            pending.append(item)
            continue
        try:
            topics = frame_topics(buf, item.offset)
        except (ValueError, struct.error):  # checksums are right, but no writer of ours made it
            pending.append(item._replace(status=Status.BODY))
            continue
        if held is not None:
            position = _add(index, held[0].offset, *held[1:])
            held = None
        damages += _told(pending, name, position, item.header.base, index)
        pending = []
        if item.header.followed:
            held = item, item.header, topics
        else:
            position = _add(index, item.offset, item.header, topics)
    if held is not None and last:
        pending.insert(0, held[0])  # the write was torn between the two: neither happened
    elif held is not None:
        position = _add(index, held[0].offset, *held[1:])
    keep = len(buf)
    if pending and last:
        keep = pending[0].offset
        damages.append(_torn(pending, name, position, len(buf)))
    else:
        damages += _told(pending, name, position, next_base, index)
        position = max([position] + [item.header.end for item in pending if item.header is not None])
    return Examined(header, keep, position, index, damages)


def _add(index: IndexBuilder, offset: int, header: FrameHeader, topics: list[bytes]) -> int:
    if header.kind == MESSAGES:
        index.add(offset, header.base, header.count, topics, header.length, header.time_ms)
    else:
        index.add_changes(offset, header.base, header.length)
    return header.end


def _told(pending: list[Scanned], name: str, position: int, next_base: int | None, index: IndexBuilder) -> list[Damage]:
    """The damage between a valid frame that ends at `position` and the next, which begins at
    `next_base`; messages lost are noted in the index for readers that pass."""
    damages = []
    for i, item in enumerate(pending):
        if item.header is not None:
            first, after = item.header.base, item.header.end
            last: int | None = after - 1
        else:
            following = [later.header.base for later in pending[i + 1 :] if later.header is not None]
            first = after = position
            last = _last_before(following[0] if following else next_base, position)
            if last is not None:
                after = max(last + 1, position)
        if after > first:
            index.damages.append((first, (after - first) % POSITION_GAP))
        position = max(position, after)
        damages.append(Damage(name, item.offset, item.size, first, last, item.status.value))
    return damages


def _torn(pending: list[Scanned], name: str, position: int, size: int) -> Damage:
    known = [item.header.end for item in pending if item.header is not None]
    last = known[-1] - 1 if known and pending[-1].header is not None else None
    offset = pending[0].offset
    return Damage(name, offset, size - offset, position, last, f"torn tail: {pending[0].status.value}")


def _last_before(next_base: int | None, first: int) -> int | None:
    """The last position that can have been lost before `next_base`. Beyond a jump it is unknown."""
    if next_base is None or next_base - first >= POSITION_GAP:
        return None
    return next_base - 1


def _why_unreadable(size: int) -> str:
    if size == 0:
        return "the segment is empty"
    if size < SEGMENT_HEADER_BYTES:
        return "the segment ends within its header"
    return "not a segment, or its header and first frame are damaged"
