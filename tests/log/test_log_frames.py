"""Frames: what is encoded comes back, and what is damaged is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_strategies import messages, runs, simple_run, ticks

from message_frames import encode_messages
from tidegate.log.frame import (
    HEADER_BYTES,
    check_body,
    decode_changes,
    decode_messages,
    encode_changes,
    frame_entries,
    frame_topics,
    parse_header,
)
from tidegate.log.run import Run


@given(ticks, st.integers(0, 2**62), st.integers(0, 2**45))
@pytest.mark.req("S0.27")
def test_messages_come_back_as_they_were(tick: list[Run], base: int, time_ms: int) -> None:
    frame = encode_messages(tick, base, time_ms)
    expected = messages(tick)
    assert [row[0] for row in expected] == list(range(base, base + len(expected)))
    assert messages(decode_messages(frame)) == expected
    header = parse_header(frame)
    assert header is not None and header.length == len(frame) and len(frame) % 8 == 0
    assert (header.base, header.end, header.time_ms) == (base, base + len(expected), time_ms)
    assert check_body(frame, 0, header)
    assert set(frame_topics(frame)) == {run.topic for run in tick}


@given(ticks, st.sets(st.sampled_from([b"a", b"a/b", b"b"])), st.integers(0, 25), st.binary(max_size=40))
def test_only_what_is_wanted_is_decoded(tick: list[Run], topics: set[bytes], skip: int, before: bytes) -> None:
    frame = before + encode_messages(tick, 100, 5)
    found = decode_messages(frame, len(before), topics.__contains__, 100 + skip)
    assert messages(found) == [row for row in messages(tick) if row[2] in topics and row[0] >= 100 + skip]


@pytest.mark.parametrize("count", [1, 2, 255, 256, 3000])
def test_small_and_large_runs_have_the_same_layout(count: int) -> None:
    run = simple_run(b"t", *(b"x" * (i % 70) for i in range(count)))
    alone = encode_messages([run], 7, 8)
    assert messages(decode_messages(alone)) == messages([run])
    header = parse_header(alone)
    assert header is not None and check_body(alone, 0, header)
    other = simple_run(b"u", b"y")  # goes the way of many runs
    together = encode_messages([run, other], 7, 8)
    assert messages(decode_messages(together)) == messages([run, other])
    assert messages(decode_messages(together, 0, b"t".__eq__)) == messages(decode_messages(alone))


@pytest.mark.parametrize("count", [33, 40, 16383, 16384])
@pytest.mark.parametrize("size", [0, 1, 100, 70_000])
@pytest.mark.parametrize("odd", [None, 20])
def test_messages_of_one_size_have_the_same_layout(count: int, size: int, odd: int | None) -> None:
    if count * size > 1 << 28:
        count = 33
    payloads = [b"%d" % (i % 10) * size for i in range(count)]
    if odd is not None:
        payloads[odd] += b"!"
    run = simple_run(b"t", *payloads)
    frame = encode_messages([run], 7, 8)
    assert messages(decode_messages(frame)) == messages([run])
    header = parse_header(frame)
    assert header is not None and check_body(frame, 0, header)


@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(0, 2**62))
def test_changes_come_back_as_they_were(records: list[bytes], base: int) -> None:
    frame = encode_changes(records, base, 1)
    assert decode_changes(frame) == records
    header = parse_header(frame)
    assert header is not None and header.end == base and check_body(frame, 0, header)


@given(runs(), st.integers(0, 7), st.data())
def test_no_flipped_bit_goes_unnoticed(run: Run, bit: int, data: st.DataObject) -> None:
    frame = bytearray(encode_messages([run], 3, 4))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << bit
    header = parse_header(bytes(frame))
    if at < HEADER_BYTES:
        assert header is None
    else:
        assert header is not None and not check_body(bytes(frame), 0, header)


@given(st.binary(max_size=200), st.integers(-5, 250))
def test_any_bytes_may_be_asked_for_a_header(raw: bytes, offset: int) -> None:
    assert parse_header(raw, max(offset, 0)) is None


def test_entries_describe_each_frame() -> None:
    run = simple_run(b"a/b", b"1", b"2")
    frames = encode_messages([run], 10, 1) + encode_changes([b"r"], 12, 1)
    first, second = frame_entries(frames)
    assert first == (0, 10, 2, [b"a/b"])
    assert second[1:] == (12, 1, None)
