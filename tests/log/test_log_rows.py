"""Rows: messages as columns are the same messages, however they are cut, and the disk sees the layout it always had."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_strategies import Message, messages, runs, simple_run, ticks

from tidegate.log.frame import check_body, decode_messages, encode_rows, frame_topics, parse_header
from tidegate.log.rows import NO_UUID, Rows, by_time
from tidegate.log.run import NO_EXPIRY, Run


def placed(tick: list[Run], base: int = 0, time_ms: int = 0) -> list[Run]:
    for run in tick:
        run.base, run.time_ms = base, time_ms
        base += run.count
    return tick


def rows_as_messages(rows: Rows) -> list[Message]:
    """As `messages`, read off the columns."""
    return [
        (
            rows.positions[i], rows.time_ms, rows.topics[i], rows.publishers[i], rows.tenants[i], rows.flags[i],
            rows.payloads[i],
            rows.properties[i] if rows.properties is not None else b"",
            rows.expiries[i] if rows.expiries is not None else NO_EXPIRY,
            rows.uuids[i] if rows.uuids is not None else NO_UUID,
        )
        for i in range(len(rows))
    ]  # fmt: skip


def in_step(rows: Rows) -> None:
    n = len(rows)
    columns = (rows.topics, rows.publishers, rows.tenants, rows.flags, rows.payloads)
    assert [len(column) for column in columns] == [n] * 5
    assert all(len(column) == n for column in (rows.properties, rows.expiries, rows.uuids) if column is not None)


@given(ticks, st.integers(0, 2**62), st.integers(0, 2**45))
def test_runs_as_rows_are_the_same_messages(tick: list[Run], base: int, time_ms: int) -> None:
    rows = Rows.of(placed(tick, base, time_ms))
    in_step(rows)
    assert rows_as_messages(rows) == messages(tick)
    assert rows.positions == range(base, base + len(rows))
    assert rows.cuts == [run.base - base for run in tick]


@given(ticks)
def test_rows_as_runs_are_the_runs_they_came_from(tick: list[Run]) -> None:
    back = list(Rows.of(placed(tick, 7, 8)).runs())
    assert messages(back) == messages(tick)
    assert [(run.topic, run.base, run.count) for run in back] == [(run.topic, run.base, run.count) for run in tick]


def test_without_rows_there_is_nothing() -> None:
    rows = Rows.of([])
    assert len(rows) == 0 and list(rows.runs()) == [] and by_time([]) == []


@given(ticks, st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_positions_may_have_gaps(tick: list[Run], gaps: list[int]) -> None:
    base = 0
    for run, gap in zip(tick, gaps, strict=False):
        run.base = base
        base += run.count + gap
    rows = Rows.of(tick)
    assert list(rows.positions) == [run.base + i for run in tick for i in range(run.count)]
    assert rows_as_messages(rows) == messages(tick)


@given(ticks, st.data())
def test_rows_may_be_taken_out_in_any_order(tick: list[Run], data: st.DataObject) -> None:
    rows = Rows.of(placed(tick, 10, 5))
    everything = rows_as_messages(rows)
    places: Sequence[int] = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    some = rows.take(places)
    in_step(some)
    assert rows_as_messages(some) == [everything[i] for i in places]


@given(ticks, st.data())
def test_a_range_of_rows_is_taken_out_like_a_list_of_them(tick: list[Run], data: st.DataObject) -> None:
    rows = Rows.of(placed(tick, 10, 5))
    first, after = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    places = range(first, after, data.draw(st.integers(1, 3)))
    some = rows.take(places)
    in_step(some)
    assert rows_as_messages(some) == rows_as_messages(rows.take(list(places)))
    assert list(some.positions) == [10 + i for i in places]


@pytest.mark.parametrize("places", [[0], range(1)])
def test_rows_that_have_no_positions_yet_can_be_taken_out(places: Sequence[int]) -> None:
    """What is kept out of the log is parted from the rest before that has any."""
    rows = Rows()
    rows.add(b"t", b"p", b"default", 0, b"x", b"", NO_EXPIRY)
    assert rows.take(places).payloads == [b"x"]


@given(st.lists(st.tuples(ticks, st.integers(1, 3)), max_size=5))
def test_what_was_read_is_one_object_for_each_tick(read: list[tuple[list[Run], int]]) -> None:
    time_ms = base = 0
    expected: list[list[Run]] = []
    for tick, later in read:
        time_ms += later
        expected.append(placed(tick, base, time_ms))
        base += sum(run.count for run in tick)
    found = by_time([run for tick in expected for run in tick])
    assert [rows_as_messages(rows) for rows in found] == [messages(tick) for tick in expected]


@given(st.lists(st.tuples(runs(), st.booleans()), min_size=1, max_size=8))
def test_one_message_at_a_time_makes_the_same_columns(added: list[tuple[Run, bool]]) -> None:
    rows = Rows(4)
    alone = [
        Run(
            run.topic, run.publisher, run.tenant, run.flags, run.payloads[:1],
            run.properties and run.properties[:1], run.expiries and run.expiries[:1],
        )
        for run, _ in added
    ]  # fmt: skip
    for run in alone:
        properties = run.properties[0] if run.properties else b""
        expiry = run.expiries[0] if run.expiries else NO_EXPIRY
        rows.add(run.topic, run.publisher, run.tenant, run.flags, run.payloads[0], properties, expiry)
    rows.positions = range(len(rows))
    in_step(rows)
    assert rows.cuts == list(range(len(rows)))
    assert rows_as_messages(rows) == messages(placed(alone, 0, 4))


# ── on disk ──


def by_hand(tick: list[Run], base: int, time_ms: int, writer: int, followed: bool) -> bytes:
    """A MESSAGES frame as the format's description has it, as plainly as can be."""

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % 8)

    def column(values: list[bytes]) -> bytes:
        offsets = [sum(map(len, values[:i])) for i in range(len(values) + 1)]
        return padded(struct.pack(f"<{len(offsets)}i", *offsets)) + padded(b"".join(values))

    names = [list(dict.fromkeys(getattr(run, name) for run in tick)) for name in ("topic", "publisher", "tenant")]
    table = [run.count for run in tick]
    for distinct, name in zip(names, ("topic", "publisher", "tenant"), strict=True):
        table += [distinct.index(getattr(run, name)) for run in tick]
    table += [run.flags for run in tick]
    dictionary = b"".join(map(column, names))
    rows = messages(tick)
    body = padded(struct.pack(f"<{len(table)}I", *table)) + dictionary + column([row[6] for row in rows])
    columns = 0
    if any(run.properties is not None for run in tick):
        columns |= 1
        body += column([row[7] for row in rows])
    if any(run.expiries is not None for run in tick):
        columns |= 2
        body += padded(struct.pack(f"<{len(rows)}I", *(row[8] for row in rows)))
    if any(run.uuids is not None for run in tick):
        columns |= 4
        body += b"".join(row[9] for row in rows)
    head = struct.pack(
        "<4sBBHIIqqIIIIIII", b"TGF1", 1, columns, followed, 64 + len(body), crc32(body), base, time_ms, len(rows),
        len(tick), *map(len, names), len(dictionary), writer,
    )  # fmt: skip
    return head + struct.pack("<I", crc32(head)) + body


@pytest.mark.req("S0.27")
@given(ticks, st.integers(0, 2**62), st.integers(0, 2**45), st.integers(0, 2**32 - 1), st.booleans())
def test_rows_are_stored_in_the_documented_layout(
    tick: list[Run], base: int, time_ms: int, writer: int, followed: bool
) -> None:
    rows = Rows.of(placed(tick, base, time_ms))
    frame, topics = encode_rows(rows, base, time_ms, writer, followed)
    assert frame == by_hand(tick, base, time_ms, writer, followed)
    assert list(topics) == list(dict.fromkeys(run.topic for run in tick)) == frame_topics(frame)
    header = parse_header(frame)
    assert header is not None and check_body(frame, 0, header) and header.followed == followed


@pytest.mark.parametrize("count", [1, 2, 255, 256, 700])
@pytest.mark.parametrize("alone", [False, True], ids=["in runs", "each alone"])
def test_many_rows_are_stored_in_the_same_layout_as_few(count: int, alone: bool) -> None:
    if alone:
        tick = [simple_run(b"t%d" % (i % 3), b"x" * (i % 70)) for i in range(count)]
    else:
        tick = [simple_run(b"t", *(b"x" * (i % 70) for i in range(count))), simple_run(b"u", b"y")]
    frame, _ = encode_rows(Rows.of(placed(tick, 5, 6)), 5, 6, 9)
    assert frame == by_hand(tick, 5, 6, 9, False)
    assert messages(decode_messages(frame)) == messages(tick)
