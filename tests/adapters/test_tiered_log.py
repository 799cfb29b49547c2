"""One log of two parts: whatever is archived and dropped while somebody reads, no message is missing or comes twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lake_tools import TestLake
from tidegate.adapters.embedded.archive import LakeArchive
from tidegate.adapters.embedded.tiered import TieredLog
from tidegate.log.files import SegmentedLog
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.recovery import POSITION_GAP
from tidegate.log.rows import Rows
from tidegate.log.run import Run

SEGMENT_BYTES = 4096


class Tiered:
    """The log as a broker has it, with small segments and a lake that the test fills."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.lake = TestLake(data)
        self.written: list[tuple[int, bytes, int]] = []  # (position, payload, time)
        self.open()

    def open(self) -> None:
        store = SegmentedLog.open(self.data / "log", segment_bytes=SEGMENT_BYTES)
        loop = asyncio.get_running_loop()
        self.reports: list[tuple[str, Any]] = []
        self.archive = LakeArchive(
            self.data, lambda: store.end, loop=loop, report=lambda event, fields: self.reports.append((event, fields))
        )
        self.archive.open()
        self.store = store
        self.log = TieredLog(store, self.archive, wait_for_disk=False, loop=loop, on_failure=self.fail)

    @property
    def end(self) -> int:
        (end,) = self.log.ends
        return end

    def fail(self, error: Exception) -> None:
        raise error

    def append(self, ticks: int = 100) -> None:
        """Three runs a tick, of different topics, a millisecond apart."""
        for _ in range(ticks):
            time_ms = 1_000_000 + len(self.written)
            runs = [
                Run(b"t/%d" % topic, b"p", b"default", 1, [b"%d.%d" % (len(self.written), i) for i in range(2)])
                for topic in random.Random(len(self.written)).sample(range(10), 3)
            ]
            rows = Rows.of(runs)
            self.log.append(rows, [], time_ms)
            self.written += [(at, payload, time_ms) for at, payload in zip(rows.positions, rows.payloads, strict=True)]

    async def archived(self, segments: int | None = None) -> None:
        """Archive, and let the broker know."""
        self.lake.archive(segments=segments, rows_per_file=97)
        self.archive.poll()
        while self.archive._looking or self.archive._refreshing:
            await asyncio.sleep(0.001)

    def drop(self, segments: int) -> None:
        self.store.drop(self.store.segments()[:segments])

    async def read(self, position: int, end: int, bytes_max: int = 2000, wanted: Wanted | None = None) -> Read:
        done: asyncio.Future[Read] = asyncio.get_running_loop().create_future()
        self.log.read(position, end, bytes_max, wanted, done.set_result)
        return await done

    async def everything(self, position: int, wanted: Wanted | None = None) -> list[tuple[int, bytes, int]]:
        found: list[tuple[int, bytes, int]] = []
        while position < self.end:
            read = await self.read(position, self.end, wanted=wanted)
            assert read.damaged == 0
            found += messages(read.runs)
            position = read.next_position
        return found


def messages(runs: list[Run]) -> list[tuple[int, bytes, int]]:
    return [(run.base + i, run.payloads[i], run.time_ms) for run in runs for i in range(run.count)]


@pytest.fixture
async def tiered(tmp_path: Path) -> Any:
    made = Tiered(tmp_path)
    yield made
    made.log.close()


@pytest.mark.req("P.10")
async def test_the_log_begins_where_the_lake_begins(tiered: Tiered):
    tiered.append()
    await tiered.archived()
    tiered.drop(5)
    assert tiered.log.seam > 0
    assert tiered.log.floors[0] == 0
    assert await tiered.everything(0) == tiered.written


@pytest.mark.req("P.10")
async def test_a_read_never_crosses_the_seam(tiered: Tiered):
    tiered.append()
    await tiered.archived()
    tiered.drop(5)
    seam = tiered.log.seam
    below = await tiered.read(0, tiered.end, 1 << 30)
    while below.next_position < seam:
        below = await tiered.read(below.next_position, tiered.end, 1 << 30)
    assert below.next_position == seam
    assert messages(below.runs)[-1][0] == seam - 1
    above = await tiered.read(seam, tiered.end, 1 << 30)
    assert messages(above.runs)[0][0] == seam


async def test_a_lake_that_does_not_reach_up_to_the_log_is_not_used(tiered: Tiered):
    """As when somebody ran the broker for a while without its pipeline's note."""
    tiered.append()
    await tiered.archived(segments=3)
    tiered.drop(5)
    assert tiered.log.floors[0] == tiered.log.seam > 0
    assert (await tiered.read(tiered.log.floors[0], tiered.end)).runs[0].base == tiered.log.seam


@pytest.mark.req("P.10")
async def test_a_lake_reaches_up_to_a_log_that_went_on_far_away_after_a_crash(tmp_path: Path):
    tiered = Tiered(tmp_path)
    tiered.append()
    tiered.store.sync()
    tiered.store.close(clean=False)
    tiered.open()
    tiered.append()
    (after,) = [s.sequence for s in tiered.store.segments() if s.base == tiered.written[600][0]]
    await tiered.archived(segments=after - 1)
    tiered.drop(after - 1)
    assert tiered.log.seam == tiered.written[600][0] > POSITION_GAP > tiered.lake.position
    assert tiered.log.floors[0] == 0
    assert await tiered.everything(0) == tiered.written
    tiered.log.close()


@pytest.mark.req("P.10")
@pytest.mark.parametrize("seed", range(5))
async def test_readers_miss_nothing_while_segments_are_archived_and_dropped_under_them(tiered: Tiered, seed: int):
    chance = random.Random(seed)
    tiered.append()
    await tiered.archived(segments=2)
    wanted = Wanted(frozenset([b"t/3"]), (b"t/",), lambda topic: topic in (b"t/3", b"t/5", b"t/7"))
    readers: list[tuple[Wanted | None, list[int], list[tuple[int, bytes, int]]]] = [
        (choice, [0], []) for choice in (None, wanted, None)
    ]
    for _ in range(60):
        reads = []
        for choice, at, found in readers:
            if at[0] < tiered.end:
                reads.append((at, found, tiered.read(at[0], tiered.end, chance.randrange(1, 6000), choice)))
        going = [asyncio.ensure_future(read) for _, _, read in reads]
        await asyncio.sleep(0)  # they are under way
        match chance.randrange(4):
            case 0:
                tiered.append(20)
            case 1:
                await tiered.archived(segments=chance.randrange(1, 6))
            case 2:
                due = [s for s in tiered.store.segments()[:-1] if s.sequence < tiered.lake.segment]
                tiered.store.drop(due)
        for (at, found, _), read in zip(reads, going, strict=True):
            result = await read
            assert result.damaged == 0
            found += messages(result.runs)
            at[0] = result.next_position
    for choice, at, found in readers:
        found += await tiered.everything(at[0], choice)
    everything = tiered.written
    topics = dict(topics_of(tiered))
    assert tiered.log.seam > 0
    assert readers[0][2] == everything and readers[2][2] == everything
    assert readers[1][2] == [row for row in everything if topics[row[0]] in (b"t/3", b"t/5", b"t/7")]


def topics_of(tiered: Tiered) -> Iterator[tuple[int, bytes]]:
    """By the rule of `append`."""
    for index in range(0, len(tiered.written), 6):
        chosen = random.Random(index).sample(range(10), 3)
        for i in range(6):
            yield tiered.written[index + i][0], b"t/%d" % chosen[i // 2]


@pytest.mark.req("P.10")
async def test_what_was_dropped_between_the_question_and_the_read_is_read_from_the_lake(tiered: Tiered, monkeypatch):
    tiered.append()
    await tiered.archived()
    read = tiered.store.read

    def drop_first(*arguments: Any, **more: Any) -> Read:
        tiered.drop(5)
        return read(*arguments, **more)

    monkeypatch.setattr(tiered.store, "read", drop_first)
    found = await tiered.read(0, tiered.end)
    assert tiered.log.seam > 0
    assert messages(found.runs)[0][0] == 0


@pytest.mark.req("S3.12", "P.10")
async def test_every_time_is_found_at_its_first_message_on_both_sides_of_the_seam(tiered: Tiered):
    tiered.append(60)
    await tiered.archived(segments=2)
    await tiered.archived()  # of which the list of files does not tell yet
    tiered.drop(4)
    found_in_lake = 0
    for time_ms in range(999_990, 1_000_400, 3):
        expected = next((position for position, _, at in tiered.written if at >= time_ms), tiered.end)
        later: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        (position,), exact = tiered.log.positions_at_time(time_ms, later.set_result)
        if not exact:
            assert position <= expected  # not behind it, for whoever cannot wait
            (position,) = await later
            found_in_lake += 1
        assert position == expected
    assert 10 < found_in_lake < 130


async def test_a_lake_that_does_not_answer_holds_up_nobody_else(tiered: Tiered):
    """A file that never opens stands for a file system that hangs."""
    import os

    tiered.append()
    await tiered.archived()
    tiered.drop(5)
    for path in tiered.lake.files():
        path.unlink()
        os.mkfifo(path)
    stuck = asyncio.ensure_future(tiered.read(0, tiered.end))
    await asyncio.sleep(0)
    tiered.append(10)
    seam = tiered.log.seam
    assert await tiered.everything(seam) == [row for row in tiered.written if row[0] >= seam]
    assert not stuck.done()
    writing = [os.open(path, os.O_RDWR) for path in tiered.lake.files()]  # let it go
    for fd in writing:
        os.close(fd)
    stuck.cancel()
