"""A segment cut or flipped anywhere: the rest is served, the loss is told, nothing is invented."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_strategies import Message, messages, simple_run, tick

from message_frames import encode_messages
from tidegate.log.files import SegmentedLog
from tidegate.log.frame import CHANGES, WRITER, Run, decode_changes, decode_messages
from tidegate.log.recovery import POSITION_GAP, Damage, Examined, examine
from tidegate.log.segment import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    Status,
    encode_segment_header,
    parse_segment_header,
    scan,
    segment_name,
)

BASE = 500


def forged(position: int) -> bytes:
    """A frame as a client might publish it, to be found by a reader that lost its way."""
    return encode_messages([simple_run(b"forged", b"never sent")], position, 1, writer=WRITER ^ 1)


def small_segment() -> tuple[bytes, list[tuple[int, int, list[Message], list[bytes]]]]:
    """A segment and its frames: (offset, end, messages, records)."""
    content = encode_segment_header(SegmentHeader(1, BASE, 0, WRITER))
    frames = []
    position = BASE
    for runs, records in (
        ([simple_run(b"a", b"1", b"22")], []),
        ([simple_run(b"b", forged(BASE + 50))], [b"record-1"]),
        ([], [b"record-2", b"record-3"]),
        ([simple_run(b"a", b"333"), simple_run(b"c", b"", b"4")], []),
        ([simple_run(b"a", b"5")], [b"record-4"]),
    ):
        raw, position, entries = tick(runs, records, position, 10)
        ends = [*(entry[0] for entry in entries[1:]), len(raw)]
        for (offset, _, _, topics), end in zip(entries, ends, strict=True):
            at = len(content)
            frames.append(
                (
                    at + offset, at + end, messages(runs) if topics is not None else [],
                    records if topics is None else [],
                )
            )  # fmt: skip
        content += raw
    return content, frames


CONTENT, FRAMES = small_segment()
ROWS = [row for frame in FRAMES for row in frame[2]]


def served(content: bytes, found: Examined) -> tuple[list[Message], list[bytes]]:
    index = found.index
    rows = [row for at in index.offsets for row in messages(decode_messages(content, at))]
    return rows, [record for at in index.changes_offsets for record in decode_changes(content, at)]


def expected(
    undamaged: list[tuple[int, int, list[Message], list[bytes]]],
) -> tuple[list[Message], list[bytes]]:
    return [row for f in undamaged for row in f[2]], [record for f in undamaged for record in f[3]]


@pytest.mark.attack("C4")
def test_a_cut_at_every_byte_loses_what_was_behind_it_only() -> None:
    for cut in range(len(CONTENT)):
        content = CONTENT[:cut]
        found = examine(content, "x", 1, last=True)
        assert served(content, found) == expected([f for f in FRAMES if f[1] <= cut])
        whole = cut == SEGMENT_HEADER_BYTES or any(f[1] == cut for f in FRAMES)
        assert bool(found.damages) != whole
        if cut >= SEGMENT_HEADER_BYTES:
            assert found.keep_bytes == max([SEGMENT_HEADER_BYTES, *(f[1] for f in FRAMES if f[1] <= cut)])


@pytest.mark.attack("C4")
@pytest.mark.parametrize("last", [True, False])
def test_any_flipped_bit_loses_its_frame_only(last: bool) -> None:
    for at, bit in itertools.product(range(len(CONTENT)), range(8)):
        damaged = bytearray(CONTENT)
        damaged[at] ^= 1 << bit
        content = bytes(damaged)
        found = examine(content, "x", 1, last=last)
        hit = [f for f in FRAMES if f[0] <= at < f[1]]
        assert served(content, found) == expected([f for f in FRAMES if f not in hit])
        assert found.damages
        assert sum(lost for _, lost in found.index.damages) == (
            0 if last and hit == FRAMES[-1:] else sum(len(f[2]) for f in hit)
        )
        torn = last and hit == FRAMES[-1:]
        assert found.keep_bytes == (FRAMES[-1][0] if torn else len(CONTENT))


@pytest.mark.attack("C4")
def test_a_page_of_zeros_anywhere_loses_the_frames_in_it_only() -> None:
    for start, size in itertools.product(range(SEGMENT_HEADER_BYTES, len(CONTENT), 8), (8, 64, 256)):
        content = CONTENT[:start] + bytes(len(CONTENT[start : start + size])) + CONTENT[start + size :]
        rows, records = served(content, examine(content, "x", 1, last=True))
        untouched = [f for f in FRAMES if content[f[0] : f[1]] == CONTENT[f[0] : f[1]]]
        assert (rows, records) == expected(untouched)


@given(st.binary(max_size=600), st.booleans())
@pytest.mark.attack("C4")
def test_no_bytes_whatever_make_it_raise(raw: bytes, after_header: bool) -> None:
    content = (CONTENT[:SEGMENT_HEADER_BYTES] if after_header else b"") + raw
    found = examine(content, "x", 1, last=True, base=BASE)
    assert served(content, found) == ([], [])
    assert found.damages or len(content) == SEGMENT_HEADER_BYTES


@given(st.lists(st.tuples(st.integers(0, len(CONTENT) - 1), st.binary(min_size=1, max_size=90)), max_size=5))
def test_nothing_is_invented_from_overwritten_bytes(writes: list[tuple[int, bytes]]) -> None:
    damaged = bytearray(CONTENT)
    for at, raw in writes:
        damaged[at : at + len(raw)] = raw[: len(CONTENT) - at]
    content = bytes(damaged)
    rows, records = served(content, examine(content, "x", 1, last=True))
    assert set(rows) <= set(ROWS)
    assert set(records) <= {record for f in FRAMES for record in f[3]}
    position = -1
    for row in rows:
        assert row[0] > position
        position = row[0]


def test_a_frame_in_a_payload_is_not_ours_even_if_its_envelope_is_lost() -> None:
    carrier = FRAMES[1]
    content = CONTENT[: carrier[0]] + bytes(64) + CONTENT[carrier[0] + 64 :]
    assert [item.status for item in scan(content, 64, WRITER)].count(Status.HEADER) == 1
    rows, _ = served(content, examine(content, "x", 1, last=False))
    assert b"forged" not in [row[2] for row in rows]


def test_a_frame_that_repeats_positions_is_not_valid() -> None:
    again = CONTENT + CONTENT[FRAMES[0][0] : FRAMES[0][1]]
    rows, _ = served(again, examine(again, "x", 1, last=False))
    assert rows == ROWS


def test_a_segment_header_round_trips_and_refuses_damage() -> None:
    header = SegmentHeader(7, 1 << 40, 123456789, secrets.randbits(32))
    raw = encode_segment_header(header)
    assert parse_segment_header(raw) == header
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        assert parse_segment_header(bytes(damaged)) is None
        assert parse_segment_header(raw[:at]) is None


# The same through the disk -------------------------------------------------------------------------


def reopened(folder: Path, content: bytes) -> tuple[list[Message], list[bytes], int, list[Damage], int]:
    """Rows, records, lost messages, report and end of a log whose only segment has these bytes."""
    for path in folder.iterdir():
        path.unlink()
    (folder / segment_name(1)).write_bytes(content)
    log = SegmentedLog.open(folder)
    try:
        runs: list[Run] = []
        lost = 0
        position = 0
        while position < log.end:
            read = log.read(position, bytes_max=1, wanted=None, end=log.end)
            assert read.next_position > position
            runs += read.runs
            lost += read.damaged
            position = read.next_position
        records = [record for records in log.changes_from(0) for record in records]
        assert list(log.verify()) == [] or log.report
        return messages(runs), records, lost, log.report, log.end
    finally:
        log.close(clean=False)


@pytest.mark.attack("C4")
@pytest.mark.req("S4.1")
def test_a_log_opens_after_a_cut_at_every_byte(tmp_path: Path) -> None:
    for cut in range(len(CONTENT) + 1):
        rows, records, _, report, end = reopened(tmp_path, CONTENT[:cut])
        assert (rows, records) == expected([f for f in FRAMES if f[1] <= cut])
        assert bool(report) != (cut == SEGMENT_HEADER_BYTES or any(f[1] == cut for f in FRAMES))
        known = rows[-1][0] + 1 if rows else 0
        assert end >= known + POSITION_GAP


@pytest.mark.attack("C4")
def test_a_log_opens_after_a_flip_at_every_byte(tmp_path: Path) -> None:
    for at in range(len(CONTENT)):
        damaged = bytearray(CONTENT)
        damaged[at] ^= 0x10
        rows, records, lost, report, end = reopened(tmp_path, bytes(damaged))
        hit = [f for f in FRAMES if f[0] <= at < f[1]]
        assert (rows, records) == expected([f for f in FRAMES if f not in hit])
        assert report
        assert lost == (0 if hit == FRAMES[-1:] else sum(len(f[2]) for f in hit))
        assert end >= ROWS[-1][0] + POSITION_GAP


def test_the_small_segment_ends_with_changes() -> None:
    """What the tests above assume of their example."""
    assert FRAMES[-1][3] == [b"record-4"]
    assert next(iter(scan(CONTENT, FRAMES[-1][0], WRITER))).header.kind == CHANGES  # type: ignore[union-attr]
