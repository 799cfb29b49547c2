"""State records: what is written is what is read, and damage is told, never taken for something else."""

from __future__ import annotations

import struct
from struct import error as StructError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import CorruptLog
from tidegate.session import changes
from tidegate.session.session import StoredWill

u16, u32 = st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF)
i64 = st.integers(-(2**63), 2**63 - 1)
position = st.integers(0, 2**63 - 1)
text = st.binary(max_size=40) | st.binary(min_size=300, max_size=400)
blob = st.binary(max_size=60) | st.just(b"x" * 70_000)
qos = st.integers(0, 2)
wills = st.builds(
    StoredWill, text, blob, qos, st.booleans(), u32, st.none() | st.integers(0, 0xFFFFFFFE), st.binary(max_size=30)
)

pids = st.lists(st.binary(min_size=2, max_size=2), max_size=6)
ranges = st.builds(
    lambda first, count, step: range(first, first + count * step, step),
    st.integers(0, 2**62), st.integers(1, 2**20), st.integers(1, 2**20),
)  # fmt: skip


# Kinds that are no longer written, and must be read for ever.


def inbound(number: int, pid: int) -> bytes:
    return struct.pack("<BIH", 6, number, pid)


def released(number: int, pid: int) -> bytes:
    return struct.pack("<BIH", 7, number, pid)


def flight(number: int, reader: int, pid: int, qos: int, state: int, position: int, floor: int) -> bytes:
    return struct.pack("<BIIHBBqq", 8, number, reader, pid, qos, state, position, floor)


Record = tuple[bytes, Any, Any]  # the record, its reader, what it must read


def written(kind: Any, reader: Any, *fields: Any) -> st.SearchStrategy[Record]:
    return st.tuples(*fields).map(lambda values: (kind(*values), reader, values))


RECORDS = st.one_of(
    written(
        changes.session, changes.read_session, u32, st.booleans(), st.integers(0, 255), u32, i64, position, text, text,
        st.none() | wills,
    ),
    written(lambda n: changes.gone(n), lambda r: (changes.read_number(r),), u32),
    written(changes.subscribed, changes.read_subscribed, u32, st.integers(0, 255), u32, position, u32, text),
    written(changes.unsubscribed, changes.read_unsubscribed, u32, text),
    written(
        changes.positions, lambda r: (changes.read_positions(r),), st.lists(st.tuples(u32, position), max_size=5)
    ),
    written(changes.inbounds, changes.read_pids, u32, pids),
    written(changes.releases, changes.read_pids, u32, pids),
    written(changes.flights, changes.read_flights, u32, u32, u16, qos, st.integers(1, 3), ranges),
    written(changes.acked, changes.read_acked, u32, st.lists(st.tuples(position, position), max_size=5)),
    written(changes.since, changes.read_filter_positions, u32, text, st.lists(position, max_size=4)),
    written(changes.due, changes.read_filter_positions, u32, text, st.lists(position, max_size=4)),
    written(changes.handed, changes.read_unsubscribed, u32, text),
    written(changes.passed, changes.read_passed, u32, text, text),
    written(inbound, changes.read_pid, u32, u16),
    written(released, changes.read_pid, u32, u16),
    written(flight, changes.read_flight, u32, u32, u16, qos, st.integers(1, 3), position, position),
    written(
        changes.retained, changes.read_retained, text, blob, qos, st.binary(max_size=30), st.none() | position, i64,
        i64, text,
    ),
    written(changes.unretained, lambda r: (changes.read_unretained(r),), text),
    written(changes.group, changes.read_group, u32, text, text),
    written(
        lambda *values: changes.dead(changes.Dead(*values)), lambda r: tuple(changes.read_dead(r)),
        st.sampled_from(list(changes.DeadReason)) | st.integers(100, 255), u32, i64, i64, qos, st.booleans(),
        text, text, text, text, text, blob, blob,
    ),
)  # fmt: skip


# Kinds that end in a list without a length.
LISTS = (changes.POSITIONS, changes.INBOUNDS, changes.RELEASES, changes.ACKED, changes.SINCE, changes.DUE)


@pytest.mark.req("S0.27")
@given(RECORDS)
def test_a_record_reads_as_it_was_written(record: Record):
    data, read, values = record
    assert read(data) == values


@pytest.mark.attack("C4")
@given(RECORDS, st.floats(0, 1, exclude_max=True))
def test_a_record_that_was_cut_is_refused_or_misses_whole_entries(record: Record, where: float):
    data, read, values = record
    cut = data[: int(len(data) * where)]
    try:
        found = read(cut)
    except (CorruptLog, StructError, IndexError, ValueError):
        return
    assert data[0] in LISTS
    assert found[:-1] == values[:-1]
    assert found[-1] == values[-1][: len(found[-1])]


def test_every_kind_has_its_own_first_byte():
    kinds = [
        changes.SESSION, changes.GONE, changes.SUBSCRIBED, changes.UNSUBSCRIBED, changes.POSITIONS, changes.INBOUND,
        changes.RELEASED, changes.FLIGHT, changes.RETAINED, changes.UNRETAINED, changes.GROUP,
        changes.DEAD, changes.FLIGHTS, changes.INBOUNDS, changes.RELEASES, changes.ACKED, changes.SINCE, changes.DUE,
        changes.HANDED, changes.PASSED,
    ]  # fmt: skip
    assert sorted(set(kinds)) == list(range(1, 21))


def test_the_layout_is_the_documented_one():
    """Other programs read these bytes: a change here is a change of the format."""
    assert changes.gone(0x01020304) == bytes.fromhex("02 04030201")
    assert changes.inbounds(1, [b"\2\3", b"\4\5"]) == bytes.fromhex("0e 01000000 0302 0504")
    assert changes.releases(1, [b"\2\3"]) == bytes.fromhex("0f 01000000 0302")
    assert changes.positions([(1, 2)]) == bytes.fromhex("05 01000000 0200000000000000")
    assert changes.subscribed(1, 0x0D, 7, 9, 2, b"a/b") == bytes.fromhex(
        "03 01000000 0D 07000000 0900000000000000 02000000 0300 612f62"
    )
    assert changes.flights(1, 2, 3, 2, 1, range(4, 10, 2)) == bytes.fromhex(
        "0d 01000000 02000000 0300 02 01 0400000000000000 03000000 02000000"
    )
    assert changes.acked(2, [(3, 4), (5, 6)]) == bytes.fromhex(
        "10 02000000 0300000000000000 0400000000000000 0500000000000000 0600000000000000"
    )
    assert changes.since(1, b"a", [7]) == bytes.fromhex("11 01000000 0100 61 0700000000000000")
    assert changes.due(1, b"a", [7, 8]) == bytes.fromhex("12 01000000 0100 61 0700000000000000 0800000000000000")
    assert changes.handed(1, b"a") == bytes.fromhex("13 01000000 0100 61")
    assert changes.unretained(b"t") == bytes.fromhex("0a 0100 74")
    assert changes.group(3, b"g", b"#") == bytes.fromhex("0b 03000000 0100 67 0100 23")
    letter = changes.Dead(changes.DeadReason.REJECTED, 2, 3, 4, 1, True, b"c", b"", b"t", b"p", b"why", b"", b"x")
    assert changes.dead(letter) == bytes.fromhex(
        "0c 04 02000000 0300000000000000 0400000000000000 05 0100 63 0000 0100 74 0100 70 0300 776879"
        "00000000 01000000 78"
    )


@pytest.mark.req("S0.27")
def test_what_older_versions_wrote_is_still_read():
    assert changes.read_pid(bytes.fromhex("06 01000000 0302")) == (1, 0x0203)
    assert changes.read_pid(bytes.fromhex("07 01000000 0302")) == (1, 0x0203)
    assert changes.read_flight(
        bytes.fromhex("08 01000000 02000000 0300 02 01 0400000000000000 0500000000000000")
    ) == (1, 2, 3, 2, 1, 4, 5)


def test_a_flight_of_one_message_may_have_been_written_without_a_step():
    record = bytes.fromhex("0d 01000000 02000000 0300 02 01 0400000000000000 01000000 00000000")
    assert changes.read_flights(record) == (1, 2, 3, 2, 1, range(4, 5))
