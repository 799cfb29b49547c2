"""The contract of the log's port: what is appended is announced, stored, and keeps its position for ever."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from commitlog_clauses import (
    TICKS,
    appended,
    by_topic,
    ever_announced,
    everywhere,
    lasting,
    late,
    positions,
    without_positions,
    write,
)
from log_drivers import Announced, Driver, Message, Stored, many, partition_of

from tidegate.log.rows import Rows

# ── announcing ──


@everywhere
async def test_what_is_appended_is_announced_once_and_in_its_order_within_a_partition(log: Driver) -> None:
    await write(log)
    assert Counter(without_positions(log.announced())) == Counter(appended(log))
    homes = {message.topic: partition_of(message.position or 0) for message in log.announced()}
    for partition in log.partitions:
        its = [message for message in appended(log) if homes[message.topic] == partition]
        # Within a tick a partition may put topics in any order; the messages of a topic stay in theirs.
        assert by_topic(without_positions(log.announced(partition))) == by_topic(its)
        times = [message.time_ms for message in log.announced(partition)]
        assert times == sorted(times)


@everywhere
async def test_a_topic_is_always_in_the_same_partition(log: Driver) -> None:
    homes: dict[bytes, set[int]] = {}
    for start in range(2):
        await write(log, seed=start, start=1000 * start)
        for event in log.of(Announced):
            for message in event.messages:
                homes.setdefault(message.topic, set()).add(event.partition)
        await log.safe()
        await log.restart()
    assert homes
    assert all(len(partitions) == 1 for partitions in homes.values())
    assert set().union(*homes.values()) == set(log.partitions), "some partition is never used"


@everywhere
async def test_positions_increase_and_belong_to_the_partition_that_is_told(log: Driver) -> None:
    await write(log)
    for event in log.of(Announced):
        assert {partition_of(position) for position in positions(event.messages)} == {event.partition}
        assert len(positions(event.messages)) == len(event.messages) > 0
    for partition in log.partitions:
        given = positions(log.announced(partition))
        assert all(a < b for a, b in pairwise(given))


@everywhere
async def test_an_append_without_messages_announces_nothing_and_becomes_stored(log: Driver) -> None:
    ends = log.log.ends
    log.append(Rows(1), [b"a change"])
    log.append(Rows(2), [])
    await log.settle()
    await log.safe()
    assert log.announced() == []
    assert log.log.ends == ends


@everywhere
async def test_the_ends_are_behind_what_was_announced_last_also_while_it_is_told(log: Driver) -> None:
    opened = log.log.ends
    assert [partition_of(end) for end in opened] == list(log.partitions)
    await write(log)
    ends = list(opened)
    for event in log.of(Announced):
        assert positions(event.messages)[0] >= ends[event.partition]
        ends[event.partition] = positions(event.messages)[-1] + 1
        assert event.ends == tuple(ends)
    assert log.log.ends == tuple(ends)


@everywhere
async def test_the_floors_are_at_or_below_all_that_is_held(log: Driver) -> None:
    assert log.log.floors == log.log.ends
    await write(log)
    for partition in log.partitions:
        held = positions(await log.everything(partition))
        assert log.log.floors[partition] <= held[0]
        assert held[-1] < log.log.ends[partition]


@everywhere
async def test_tickets_grow(log: Driver) -> None:
    tickets = [log.append(many(n, n % 3), [b"c"] * (n % 2)) for n in range(6)]
    with log.full():
        tickets.append(log.append(many(50, 9)))
    tickets.append(log.append(many(60, 9)))
    assert all(a < b for a, b in pairwise([0, *tickets]))


# ── storing ──


@everywhere
async def test_what_is_stored_has_been_announced_before(log: Driver) -> None:
    known: Counter[Message] = Counter()
    random = Random(2)
    for n in range(TICKS):
        ticket = log.append(many(10 * n, 1 + n % 7, qos=n % 3), [b"c"] * (n % 2))
        if log.log.stored >= ticket:
            assert not Counter(appended(log)) - Counter(without_positions(log.announced()))
        if not random.randrange(3):
            await log.safe()
    await log.safe()
    for event in log.events:
        if isinstance(event, Announced):
            known.update(without_positions(event.messages))
        elif isinstance(event, Stored):
            owed = Counter(m for append in log.appends if append.ticket <= event.ticket for m in append.messages)
            assert not owed - known, f"stored {event.ticket} before {owed - known}"


@everywhere
async def test_stored_tickets_grow_and_never_pass_what_was_appended(log: Driver) -> None:
    last = 0
    for n in range(8):
        ticket = log.append(many(n, 1))
        assert log.log.stored <= ticket
        if n % 3 == 2:
            await log.safe()
        for event in log.of(Stored):
            assert event.ticket <= event.known <= ticket
    for event in log.of(Stored):
        assert event.ticket >= last
        last = event.ticket
    await log.safe()
    assert log.log.stored == log.appends[-1].ticket


@everywhere
async def test_where_the_append_itself_makes_it_safe_the_log_says_so_and_does_not_tell(log: Driver) -> None:
    for n in range(4):
        ticket = log.append(many(10 * n, 6), [b"c"])
        assert (log.log.stored == ticket) is log.stored_at_once
        assert log.log.unstored_bytes == 0 or not log.stored_at_once
        log.log.commit()
    await asyncio.sleep(0.02)
    await log.safe()
    assert bool(log.of(Stored)) is not log.stored_at_once
    assert log.log.unstored_bytes == 0


@late
async def test_commit_returns_at_once_and_tells_later(log: Driver) -> None:
    log.append(many(0, 3))
    events = len(log.events)
    log.log.commit()
    log.log.commit()
    assert len(log.events) == events
    assert log.log.stored == 0
    await log.safe()


@pytest.mark.parametrize("log", ["disk-fsync"], indirect=True)
async def test_commit_does_not_wait_for_the_disk(log: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, free = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def slow(fd: int) -> None:
        reached.set()
        assert free.wait(10)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    first = log.append(many(0, 6))
    log.log.commit()
    await log.until(reached.is_set)
    second = log.append(many(6, 6))  # appending goes on meanwhile
    log.log.commit()
    assert len(log.announced()) == 12
    assert log.log.unstored_bytes > 0
    assert log.log.stored == 0
    free.set()
    await log.until(lambda: log.log.stored >= first)
    await log.safe(second)
    assert [event.ticket for event in log.of(Stored)][:1] == [first]


@lasting
async def test_what_was_stored_is_there_after_a_crash(log: Driver) -> None:
    records = await write(log)
    await log.safe()
    expected = log.announced()
    log.append(many(900, 7), [b"not stored"])
    await log.crash()
    found = await log.holds()
    assert Counter(expected) <= Counter(found)
    assert log.records()[: len(records)] == records
    assert {m.payload for m in found} - {m.payload for m in expected} <= {b"%d" % n for n in range(900, 907)}


@lasting
async def test_closing_makes_everything_safe(log: Driver) -> None:
    records = await write(log)
    log.append(many(900, 7), [b"the last"])
    await log.settle()
    expected = log.announced()
    await log.restart()
    assert sorted(await log.holds()) == sorted(expected)
    assert log.records() == [*records, b"the last"]


@lasting
async def test_messages_and_changes_of_an_append_stand_or_fall_together(log: Driver) -> None:
    """Power fails at every moment that makes a difference: what is there is a beginning of what was appended, each
    append whole, and what was stored is part of it where the sync is what makes it so."""
    log.append(many(0, 3), [b"change 0"])
    await log.safe()
    for n in range(1, 6):
        its = [b"change %d" % n, b"more of %d" % n] if n != 3 else []
        log.append(many(100 * n, n % 4, time_ms=1000 + n), its)
    ways = [(without_positions(append.messages), append.changes) for append in log.appends]
    counts: set[int] = set()
    for after in log.torn():
        try:
            found = Counter(without_positions(await after.holds()))
            records = after.records()
            beginnings = [
                n
                for n in range(len(ways) + 1)
                if Counter(m for messages, _ in ways[:n] for m in messages) == found
                and [c for _, changes in ways[:n] for c in changes] == records
            ]
            assert beginnings, f"half an append: {found} with {records}"
            counts.update(beginnings)
        finally:
            after.close()
    assert len(ways) in counts
    if not log.stored_at_once:
        assert len(counts) >= 3


# ── positions mean one message for ever (I10) ──


@lasting
@pytest.mark.parametrize("clean", [True, False])
async def test_a_position_is_never_given_twice_whatever_starts_lie_between(log: Driver, clean: bool) -> None:
    for start in range(4):
        await write(log, ticks=3 * (start != 2), seed=start, start=100 * start)  # one start sees nothing happen
        for partition in log.partitions:
            assert log.log.ends[partition] > max(
                [p for p in ever_announced(log) if partition_of(p) == partition], default=-1
            )
        await (log.restart() if clean else log.crash())
    await write(log, seed=9, start=900)
    given = ever_announced(log)
    assert len(given) == len(set(given))


@lasting
async def test_after_power_failed_positions_go_on_behind_all_that_was_announced(log: Driver) -> None:
    log.append(many(0, 6))
    await log.safe()
    for n in range(1, 4):
        log.append(many(100 * n, n), [b"c"] * (n % 2))
    await log.settle()
    before = ever_announced(log)
    for after in log.torn():
        try:
            after.append(many(500, 9))
            await after.settle()
            given = positions(after.announced())
            assert len(given) == 9
            for partition in log.partitions:
                highest = max((p for p in before if partition_of(p) == partition), default=-1)
                assert all(p > highest for p in given if partition_of(p) == partition)
            assert not set(given) & set(before)
        finally:
            after.close()


@lasting
async def test_reading_goes_over_the_gap_that_a_crash_leaves(log: Driver) -> None:
    expected: list[Message] = []
    for start in range(3):
        log.append(many(100 * start, 8))
        await log.settle()
        await log.safe()
        expected += log.announced()
        await log.crash()
    assert sorted(await log.holds()) == sorted(expected)
    for partition in log.partitions:
        its = [m for m in expected if partition_of(m.position or 0) == partition]
        assert await log.everything(partition, bytes_max=1) == its
