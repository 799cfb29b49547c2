"""The contract of the log's port: what is refused leaves nothing behind."""

from __future__ import annotations

import os

import pytest
from commitlog_clauses import ever_announced, lasting, on_disk, without_positions, write
from log_drivers import Driver, Refused, many

from tidegate.adapters.embedded.commitlog import EARLY_ROWS_MAX
from tidegate.errors import DiskFull
from tidegate.log.rows import Rows

REFUSED = {
    "more messages than are announced early": lambda: (many(500, EARLY_ROWS_MAX + 1), []),
    "with QoS 2": lambda: (many(500, 1, qos=2), []),
    "with changes": lambda: (many(500, 1), [b"refused"]),
    "changes alone": lambda: (Rows(1000), [b"refused"]),
}
EARLY = {
    "one message": lambda: (many(500, 1, qos=0), []),
    "a few messages": lambda: (many(500, EARLY_ROWS_MAX, qos=1), []),
}


@lasting
@pytest.mark.parametrize("taken_bytes", [0, 1, 70])
@pytest.mark.parametrize("what", REFUSED)
async def test_of_what_is_refused_nothing_is_announced_and_nothing_is_read_back(
    log: Driver, what: str, taken_bytes: int
) -> None:
    records = await write(log)
    await log.safe()
    held, ends, announced = await log.holds(), log.log.ends, len(log.announced())
    with log.full(taken_bytes):
        ticket = log.append(*REFUSED[what]())
        await log.settle()
    assert [event.ticket for event in log.of(Refused)] == [ticket]
    assert isinstance(log.of(Refused)[0].why, DiskFull)
    assert len(log.announced()) == announced
    assert log.log.ends == ends
    assert await log.holds() == held
    await log.restart()
    assert await log.holds() == held
    assert log.records() == records


@lasting
@pytest.mark.parametrize("what", EARLY)
async def test_few_messages_may_be_announced_and_refused_but_are_never_read_back(log: Driver, what: str) -> None:
    """The embedded log announces ticks of up to EARLY_ROWS_MAX QoS 0/1 messages without changes before it writes
    them: who got them got them, and their publishers are refused. All other logs announce nothing of them."""
    await write(log)
    await log.safe()
    held, before = await log.holds(), len(log.announced())
    with log.full():
        ticket = log.append(*EARLY[what]())
        await log.settle()
    assert [event.ticket for event in log.of(Refused)] == [ticket]
    early = log.announced()[before:]
    assert len(early) <= log.early_rows_max
    assert without_positions(early) in ([], log.appends[-1].messages)
    assert await log.everything_known() == held
    log.append(many(600, 3))
    await log.settle()
    await log.safe()
    assert not {m.payload for m in await log.holds()} & {m.payload for m in early}


@lasting
@pytest.mark.parametrize("between", ["nothing", "restart", "crash"])
@pytest.mark.parametrize("what", [*REFUSED, *EARLY])
async def test_after_a_refusal_the_next_append_works_and_reuses_no_position(
    log: Driver, what: str, between: str
) -> None:
    await write(log)
    await log.safe()
    held = await log.holds()
    with log.full():
        log.append(*{**REFUSED, **EARLY}[what]())
        log.append(*{**REFUSED, **EARLY}[what]())
        await log.settle()
    assert len(log.of(Refused)) == 2
    if between != "nothing":
        await (log.restart() if between == "restart" else log.crash())
    log.append(many(600, 3), [b"after"])
    log.append(many(603, 1))
    log.append(Rows(1000), [b"at last"])
    await log.settle()
    await log.safe()
    given = ever_announced(log)
    assert len(given) == len(set(given)), "a position was given twice"
    assert {m.payload for m in await log.holds()} == {m.payload for m in held} | {b"%d" % n for n in range(600, 604)}
    await log.crash()
    assert log.records()[-2:] == [b"after", b"at last"]
    assert {m.payload for m in await log.holds()} == {m.payload for m in held} | {b"%d" % n for n in range(600, 604)}


@lasting
@pytest.mark.parametrize("what", [*REFUSED, *EARLY])
async def test_changes_after_a_refusal_a_snapshot_and_a_stop_are_not_lost(log: Driver, what: str) -> None:
    """The snapshot is named by the log's end, which an early announcement has moved."""
    records = await write(log)
    await log.safe()
    with log.full():
        log.append(*{**REFUSED, **EARLY}[what]())
        log.append(*{**REFUSED, **EARLY}[what]())
        await log.settle()
    snapshot = log.log.snapshot()
    snapshot.add(records)
    assert await log.committed(snapshot)
    await log.restart()
    log.append(many(600, 1), [b"after"])
    await log.safe()
    await log.crash()
    assert log.records()[-1:] == [b"after"]


@lasting
async def test_a_refusal_says_nothing_about_what_was_taken_before(log: Driver) -> None:
    taken = log.append(many(0, 6), [b"taken"])
    with log.full():
        refused = log.append(many(100, 6), [b"refused"])
    later = log.append(many(200, 6), [b"taken too"])
    await log.safe(taken)
    await log.safe(later)
    assert [event.ticket for event in log.of(Refused)] == [refused]
    await log.crash()
    assert {m.payload for m in await log.holds()} == {b"%d" % n for n in (*range(6), *range(200, 206))}
    assert log.records() == [b"taken", b"taken too"]


@lasting
async def test_who_reads_while_the_log_refuses_reads_on(log: Driver) -> None:
    await write(log)
    await log.safe()
    held = await log.holds()
    with log.full():
        log.append(many(500, 9))
        assert await log.holds() == held


@on_disk
async def test_a_write_that_cannot_be_undone_ends_appending(log: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(many(0, 6))

    def fail(fd: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched, log.full(10):
        patched.setattr(os, "ftruncate", fail)
        refused = log.append(many(6, 6))
    again = log.append(many(12, 6))
    assert [event.ticket for event in log.of(Refused)] == [refused, again]
    assert len(log.announced()) == 6
