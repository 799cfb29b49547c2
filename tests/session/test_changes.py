"""State records: what is written is what is read, and damage is told, never taken for something else."""

from __future__ import annotations

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
    written(changes.inbound, changes.read_pid, u32, u16),
    written(changes.released, changes.read_pid, u32, u16),
    written(changes.flight, changes.read_flight, u32, u32, u16, qos, st.integers(1, 3), position, position),
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
    except (CorruptLog, StructError, IndexError):
        return
    assert data[0] == changes.POSITIONS
    assert found[0] == values[0][: len(found[0])]


def test_every_kind_has_its_own_first_byte():
    kinds = [
        changes.SESSION, changes.GONE, changes.SUBSCRIBED, changes.UNSUBSCRIBED, changes.POSITIONS, changes.INBOUND,
        changes.RELEASED, changes.FLIGHT, changes.RETAINED, changes.UNRETAINED, changes.GROUP,
        changes.DEAD,
    ]  # fmt: skip
    assert sorted(set(kinds)) == list(range(1, 13))


def test_the_layout_is_the_documented_one():
    """Other programs read these bytes: a change here is a change of the format."""
    assert changes.gone(0x01020304) == bytes.fromhex("02 04030201")
    assert changes.inbound(1, 0x0203) == bytes.fromhex("06 01000000 0302")
    assert changes.positions([(1, 2)]) == bytes.fromhex("05 01000000 0200000000000000")
    assert changes.subscribed(1, 0x0D, 7, 9, 2, b"a/b") == bytes.fromhex(
        "03 01000000 0D 07000000 0900000000000000 02000000 0300 612f62"
    )
    assert changes.flight(1, 2, 3, 2, 1, 4, 5) == bytes.fromhex(
        "08 01000000 02000000 0300 02 01 0400000000000000 0500000000000000"
    )
    assert changes.unretained(b"t") == bytes.fromhex("0a 0100 74")
    assert changes.group(3, b"g", b"#") == bytes.fromhex("0b 03000000 0100 67 0100 23")
    letter = changes.Dead(changes.DeadReason.REJECTED, 2, 3, 4, 1, True, b"c", b"", b"t", b"p", b"why", b"", b"x")
    assert changes.dead(letter) == bytes.fromhex(
        "0c 04 02000000 0300000000000000 0400000000000000 05 0100 63 0000 0100 74 0100 70 0300 776879"
        "00000000 01000000 78"
    )
