"""The contract of the log's port: reading from a position, through filters, and from a time on."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from commitlog_clauses import appended, everywhere, lasting, positions, without_positions, write
from log_drivers import Driver, Message, many, messages_in, row

from tidegate.log.index import Wanted
from tidegate.log.rows import Rows
from tidegate.log.run import NOT_KEPT, RETAIN

# ── reading ──


@everywhere
async def test_a_read_brings_exactly_the_messages_of_its_range_in_order(log: Driver) -> None:
    await write(log, changes=True)
    for partition in log.partitions:
        whole = log.announced(partition)
        assert await log.everything(partition) == whole
        floor, after = log.log.floors[partition], log.log.ends[partition]
        places = sorted({floor, after, *positions(whole)})
        for a in places[::3]:
            for b in [place for place in places if place > a][::2]:
                read = await log.read(a, b)
                assert messages_in(read.runs) == [m for m in whole if a <= (m.position or 0) < b]
                assert (read.next_position, read.damaged) == (b, 0)


@everywhere
async def test_a_read_answers_later_and_once(log: Driver) -> None:
    log.append(many(0, 6))
    await log.settle()
    for partition in log.partitions:
        answers: list[Any] = []
        log.log.read(log.log.floors[partition], log.log.ends[partition], 1 << 20, None, answers.append)
        assert not answers
        await log.until(lambda answers=answers: bool(answers))
        await log.read(log.log.floors[partition], log.log.ends[partition])
        assert len(answers) == 1


@everywhere
async def test_a_read_is_told_on_the_loops_thread(log: Driver) -> None:
    log.append(many(0, 6))
    await log.settle()
    threads: list[int] = []
    log.log.read(log.log.floors[0], log.log.ends[0], 1 << 20, None, lambda read: threads.append(threading.get_ident()))
    await log.until(lambda: bool(threads))
    assert threads == [threading.get_ident()]


@everywhere
async def test_a_read_never_steps_over_what_is_still_to_come(log: Driver) -> None:
    log.append(many(0, 6))
    await log.settle()
    for partition in log.partitions:
        end = log.log.ends[partition]
        read = await log.read(log.log.floors[partition], end + 100)
        assert messages_in(read.runs) == log.announced(partition)
        assert read.next_position <= end
        read = await log.read(end, end + 100)
        assert (read.runs, read.next_position) == ([], end)


@pytest.mark.parametrize("log", ["simulated-partitions"], indirect=True)
async def test_what_is_not_announced_yet_is_not_read(log: Driver) -> None:
    opened = log.log.ends
    log.append(many(0, 9))
    for partition in log.partitions:
        read = await asyncio.wait_for(_read_alone(log, opened[partition], opened[partition] + 9), 5)
        assert (read.runs, read.next_position) == ([], opened[partition])


async def _read_alone(log: Driver, position: int, end: int) -> Any:
    answers: list[Any] = []
    log.log.read(position, end, 1 << 20, None, answers.append)
    log.log.answer()
    return answers[0]


@everywhere
@pytest.mark.parametrize("bytes_max", [1, 300, 3000])
async def test_a_read_stops_about_where_it_has_enough_and_goes_on_from_there(log: Driver, bytes_max: int) -> None:
    for n in range(20):
        log.append(many(2 * n, 2, topics=6, size=100))
    await log.settle()
    for partition in log.partitions:
        whole = log.announced(partition)
        position, end = log.log.floors[partition], log.log.ends[partition]
        found: list[Message] = []
        reads = 0
        while position < end:
            read = await log.read(position, end, bytes_max)
            its = messages_in(read.runs)
            assert its, "nothing, although there is something"
            # The last append may go beyond it: one is read as a whole.
            assert sum(len(m.payload) for m in its) < bytes_max + 2 * 104
            found += its
            position = read.next_position
            assert position > (its[-1].position or 0)
            reads += 1
        assert found == whole
        assert reads >= len(whole) * 100 / (bytes_max + 208)


@everywhere
async def test_a_read_brings_what_is_wanted_and_nothing_else(log: Driver) -> None:
    for n in range(60):
        log.append(many(3 * n, 3, topics=7))
    await log.settle()
    for wanted in (
        Wanted(frozenset({b"t/3"})),
        Wanted(frozenset({b"t/1", b"t/5", b"unknown"})),
        Wanted(frozenset(), (b"t/",), lambda topic: topic[-1] % 2 == 0),
        Wanted(frozenset({b"t/0"}), (b"t/1", b"t/2"), lambda topic: True),
        Wanted(frozenset({b"unknown"})),
    ):
        for partition in log.partitions:
            expected = [m for m in log.announced(partition) if wanted(m.topic)]
            assert await log.everything(partition, wanted=wanted) == expected
            assert await log.everything(partition, wanted=wanted, bytes_max=500) == expected


@everywhere
async def test_a_wanted_that_is_used_again_finds_what_came_since(log: Driver) -> None:
    wanted = Wanted(frozenset({b"t/3"}), (b"t/",), lambda topic: topic == b"t/4")
    at = list(log.log.floors)
    for n in range(6):
        for k in range(10):
            log.append(many(100 * n + 5 * k, 5))
        await log.settle()
        for partition in log.partitions:
            end = log.log.ends[partition]
            found: list[Message] = []
            while at[partition] < end:
                read = await log.read(at[partition], end, 1 << 20, wanted)
                found += messages_in(read.runs)
                at[partition] = read.next_position
            assert found == [m for m in log.announced(partition) if int(m.payload) >= 100 * n and wanted(m.topic)]


@everywhere
async def test_every_column_comes_back_as_it_went_in(log: Driver) -> None:
    ways = (
        {"qos": 0}, {"qos": 2}, {"flags": RETAIN}, {"flags": RETAIN | NOT_KEPT}, {"publisher": b""},
        {"publisher": "größe".encode()}, {"properties": b"\x01\x01"}, {"properties": b"\x26\x00\x01a\x00\x01b"},
        {"expiry": 0}, {"expiry": 60}, {"uuid": bytes(range(16))}, {"expiry": 5, "properties": b"x", "uuid": b"u" * 16},
    )  # fmt: skip
    sizes = (0, 1, 7, 8, 9, 300)
    n = 0
    for together in (1, 2, 5, len(ways)):
        for start in range(0, len(ways), together):
            rows = Rows(5000 + n)
            for way in ways[start : start + together]:
                row(rows, b"t/%d" % (n % 4), b"x" * sizes[n % len(sizes)], **way)  # type: ignore[arg-type]
                row(rows, b"t/%d" % (n % 4), b"%d" % n, **way)  # type: ignore[arg-type]
                n += 1
            log.append(rows)
    await log.settle()
    assert sorted(without_positions(log.announced())) == sorted(appended(log))
    for partition in log.partitions:
        assert await log.everything(partition) == log.announced(partition)
        for message in log.announced(partition)[::5]:
            read = await log.read(message.position or 0, (message.position or 0) + 1)
            assert messages_in(read.runs) == [message]


@everywhere
async def test_a_tick_of_very_many_messages_comes_back_whole(log: Driver) -> None:
    log.append(many(0, 3000, topics=40))
    await log.settle()
    await log.safe()
    assert sorted(await log.holds()) == sorted(log.announced())
    assert Counter(without_positions(log.announced())) == Counter(appended(log))


@everywhere
async def test_what_was_announced_does_not_change_when_more_is_appended(log: Driver) -> None:
    rows = many(0, 6)
    log.append(rows)
    await log.settle()
    before = log.announced()
    rows.payloads[0] = b"changed by its owner"
    log.append(many(6, 6))
    await log.settle()
    assert log.announced()[: len(before)] == before
    assert b"changed by its owner" not in {m.payload for m in await log.holds()}


# ── time ──


@everywhere
@pytest.mark.parametrize("times", [(10, 20, 20, 30, 50), (10, 40, 20, 30, 50, 45), (10, 10, 10)])
async def test_a_time_leads_to_the_first_message_that_is_not_older(log: Driver, times: tuple[int, ...]) -> None:
    for n, time_ms in enumerate(times):
        log.append(many(10 * n, 7, time_ms=time_ms), [b"c"] * (n % 2))
    await log.settle()
    for time_ms in (0, 9, 10, 11, 20, 21, 29, 35, 44, 46, 50, 51):
        found = await log.positions_at_time(time_ms)
        for partition in log.partitions:
            its = [m.position for m in log.announced(partition) if m.time_ms >= time_ms]
            assert found[partition] == (its[0] if its else log.log.ends[partition])


@everywhere
async def test_in_an_empty_log_every_time_is_at_the_end(log: Driver) -> None:
    assert await log.positions_at_time(0) == list(log.log.ends)


@lasting
async def test_a_time_is_found_again_after_a_start(log: Driver) -> None:
    for n in range(5):
        log.append(many(10 * n, 7, time_ms=100 * n))
    await log.settle()
    await log.safe()
    expected = [await log.positions_at_time(t) for t in (0, 100, 250, 400)]
    await log.crash()
    assert [await log.positions_at_time(t) for t in (0, 100, 250, 400)] == expected
    assert await log.positions_at_time(401) == list(log.log.ends)
