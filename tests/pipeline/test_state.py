"""State records as rows of the lake, and the state as it is told beside a running broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_writer import LogWriter, run

from harness import BrokerProcess, RawClient
from tidegate.log.snapshot import SnapshotWriter
from tidegate.pipeline.schemas import TABLES
from tidegate.pipeline.state import DeadRow, SessionRow, change_rows, stored_state
from tidegate.session import changes
from tidegate.session.changes import Dead, DeadReason
from tidegate.wire import Properties

LETTER = Dead(
    DeadReason.TOO_LARGE, 3, 17, 1_700_000_000_123, 2, True, b"c", b"t", b"a/b", b"p", b"9 bytes", b"\x01\x00", b"\xff"
)


# INBOUND, RELEASED and FLIGHT, which older versions wrote.
OLD_BOOKKEEPING = (
    bytes.fromhex("06 01000000 0300"),
    bytes.fromhex("07 01000000 0300"),
    bytes.fromhex("08 01000000 01000000 0300 02 01 0900000000000000 0900000000000000"),
)


def rows_of(*records: bytes) -> list[dict[str, object]]:
    rows, dead, unreadable = change_rows(list(records), 7, 1000, 99)
    assert (dead, unreadable) == ([], [])
    return [{k: v for k, v in row._asdict().items() if v is not None} for row in rows]


def test_rows_have_the_columns_of_their_tables() -> None:
    assert list(SessionRow._fields) == TABLES["sessions"].names
    assert list(DeadRow._fields) == TABLES["dead_letters"].names


@pytest.mark.req("P.3", "S0.27")
def test_every_change_of_a_session_is_a_row() -> None:
    common = {"place": 7, "time": 1_000_000, "position": 99}
    session = {"number": 1, "client": "ä", "tenant": "t", "expiry_s": 60}
    found = rows_of(
        changes.session(1, True, 5, 60, 0, 42, "ä".encode(), b"t", None),
        changes.subscribed(1, 0b0101, 9, 40, 0, b"a/+"),
        changes.subscribed(1, 2, 0, 41, 3, b"$replay/earliest/a"),
        changes.unsubscribed(1, b"a/+"),
        changes.session(1, False, 0, 60, 900, 43, "ä".encode(), b"t", None),
        changes.group(4, b"g", b"x/#"),
        changes.gone(1),
    )
    assert found == [
        common | {"ordinal": i} | fields
        for i, fields in enumerate(
            (
                session | {"kind": "connected", "version": 5, "at": 42},
                {"kind": "subscribed", "number": 1, "filter": "a/+", "qos": 1, "since": 40},
                {"kind": "subscribed", "number": 1, "filter": "$replay/earliest/a", "qos": 2, "since": 41, "reader": 3},
                {"kind": "unsubscribed", "number": 1, "filter": "a/+"},
                session | {"kind": "away", "version": 0, "at": 43},
                {"kind": "group", "reader": 4, "filter": "$share/g/x/#"},
                {"kind": "gone", "number": 1},
            )
        )
    ]


def test_of_positions_the_last_of_each_reader_is_a_row_and_bookkeeping_is_none() -> None:
    found = rows_of(
        changes.positions([(1, 10), (2, 5)]),
        changes.inbounds(1, [b"\0\3"]),
        changes.flights(1, 1, 3, 2, 1, range(9, 10)),
        changes.acked(1, [(11, 12)]),
        changes.since(1, b"a", [5]),
        changes.due(1, b"a", [5]),
        changes.handed(1, b"a"),
        changes.retained(b"t", b"x", 1, b"", None, 0, 0, b"p"),
        changes.unretained(b"t"),
        changes.releases(1, [b"\0\3"]),
        *OLD_BOOKKEEPING,
        changes.gone(8),
        changes.positions([(1, 12)]),
    )
    assert [(row["kind"], row.get("reader"), row.get("at")) for row in found] == [
        ("gone", None, None),
        ("position", 1, 12),
        ("position", 2, 5),
    ]
    assert [row["ordinal"] for row in found] == [0, 1, 2]


@pytest.mark.req("P.7")
def test_a_message_that_was_given_up_is_a_row_with_its_reason() -> None:
    unknown = changes.dead(LETTER._replace(reason=200, attempts=2**32 - 1, properties=b"", qos=1, retain=False))
    _, dead, unreadable = change_rows([changes.dead(LETTER), unknown], 7, 1000, 99)
    assert not unreadable
    assert dead[0]._asdict() == {
        "place": 7, "ordinal": 0, "time": 1_700_000_000_123_000, "reason": "too_large", "detail": "9 bytes",
        "attempts": 3, "client": "c", "tenant": "t", "position": 17, "topic": "a/b", "publisher": "p", "qos": 2,
        "retain": True, "payload": b"\xff", "properties": b"\x01\x00",
    }  # fmt: skip
    assert (dead[1].reason, dead[1].attempts, dead[1].properties) == ("reason 200", 2**31 - 1, None)


@pytest.mark.req("P.11")
def test_what_cannot_be_read_goes_to_quarantine_and_the_rest_is_read() -> None:
    cut = [changes.gone(1)[:-1], changes.group(1, b"g", b"x")[:-2]]
    broken = [b"", b"\xeejunk", *cut, changes.unsubscribed(1, b"\xff")]
    rows, dead, unreadable = change_rows([*broken, changes.gone(2)], 7, 1000, 99)
    assert [row.number for row in rows] == [2]
    assert not dead
    assert [each.raw for each in unreadable] == broken
    assert unreadable[1][:2] == ("unknown record", "kind 238")


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_no_bytes_whatever_make_it_fail(records: list[bytes]) -> None:
    change_rows(records, 1, 1, 1)


# ── beside a broker ──


@pytest.mark.req("P.4", "S4.6")
def test_the_state_beside_a_running_broker(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    away = RawClient(broker.port, 5)
    away.connect("away", properties=Properties(session_expiry=3600))
    away.subscribe("a/#", qos=1)
    away.subscribe("$share/g/b", qos=2, no_local=False)
    away.subscribe("own", qos=1, no_local=True)
    away.unsubscribe("own")
    away.disconnect()
    here = RawClient(broker.port)
    here.connect("here", clean=False)
    here.subscribe("a/#", qos=1)
    assert here.publish("a/b", "x", qos=1) == 0
    for _ in range(2):  # as it is, and after a clean stop, from a snapshot
        state = stored_state(broker.data / "log")
        found = {session.client_id: session for session in state.sessions.values()}
        assert set(found) == {b"away", b"here"}
        session = found[b"away"]
        assert (session.connected, session.persistent, session.expiry_s) == (False, True, 3600)
        assert not session.expired(session.away_since_ms + 3_599_999)
        assert session.expired(session.away_since_ms + 3_600_000)
        kept = {filter: (s.qos, s.since, s.reader > 0) for filter, s in session.subscriptions.items()}
        assert kept == {b"a/#": (1, 0, False), b"$share/g/b": (2, 0, True)}
        assert state.position(session) == 0
        assert not state.unreadable
        broker.stop()
        broker.start()


@pytest.mark.req("P.4")
def test_the_snapshot_comes_first_and_only_the_changes_since_after_it(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, segment_bytes=200)
    writer.tick([run(b"t", b"0")], [changes.session(1, False, 4, 60, 0, 0, b"old", b"", None)])
    writer.tick([run(b"t", b"1")], [changes.session(2, False, 4, 60, 0, 0, b"kept", b"", None)])
    snapshot = SnapshotWriter(tmp_path, writer.log.end)
    snapshot.add([changes.session(2, False, 4, 60, 0, 1, b"kept", b"", None)])
    snapshot.commit()
    for i in range(20):  # over many segments, with and without an index
        writer.tick([run(b"t", b"2")], [changes.positions([(2, 2 + i)])])
    state = stored_state(tmp_path)
    assert [(s.client_id, state.position(s)) for s in state.sessions.values()] == [(b"kept", 21)]
    writer.close()
    for index in tmp_path.glob("*.index"):
        index.unlink()
    assert stored_state(tmp_path).positions == state.positions
    assert stored_state(tmp_path / "nothing").sessions == {}


@pytest.mark.attack("C4")
def test_a_damaged_snapshot_is_made_up_for_by_the_log(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.tick([run(b"t", b"0")], [changes.session(1, False, 4, 60, 0, 0, b"a", b"", None)])
    snapshot = SnapshotWriter(tmp_path, writer.log.end)
    snapshot.add([changes.session(1, False, 4, 60, 0, 1, b"a", b"", None)])
    snapshot.commit()
    writer.close()
    (file,) = tmp_path.glob("*.snapshot")
    content = bytearray(file.read_bytes())
    content[64 + 70] ^= 1
    file.write_bytes(content)
    assert [s.client_id for s in stored_state(tmp_path).sessions.values()] == [b"a"]
