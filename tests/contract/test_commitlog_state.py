"""The contract of the log's port: changes, snapshots, and what the log lets go of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commitlog_clauses import everywhere, lasting, on_disk, write
from log_drivers import Driver, many, messages_in

from tidegate.log.rows import Rows

# ── state ──


@lasting
async def test_the_state_is_all_changes_in_order(log: Driver) -> None:
    records: list[bytes] = []
    for start in range(3):
        records += await write(log, seed=start, start=1000 * start)
        await log.safe()
        await (log.crash() if start % 2 else log.restart())
        assert log.records() == records


def replayed(found: list[bytes], snapshot: list[bytes], before: list[bytes], after: list[bytes]) -> bool:
    """The snapshot's records, perhaps the last changes that it holds once more, and those since."""
    if found[: len(snapshot)] != snapshot or (after and found[-len(after) :] != after):
        return False
    again = found[len(snapshot) : len(found) - len(after)]
    return not again or before[-len(again) :] == again


@lasting
@pytest.mark.parametrize("clean", [True, False])
async def test_the_state_is_the_last_snapshot_and_all_changes_since_it_began(log: Driver, clean: bool) -> None:
    before = await write(log, seed=1)
    await log.safe()
    for generation in range(3):
        snapshot = log.log.snapshot()
        kept = [b"kept %d.%d" % (generation, n) for n in range(6)]
        snapshot.add(kept[:4])
        after = await write(log, seed=2 + generation, start=1000 * (generation + 1))
        snapshot.add(kept[4:])
        await log.safe()
        assert await log.committed(snapshot)
        after += await write(log, seed=7 + generation, start=1000 * (generation + 1) + 500)
        await log.safe()
        held = await log.holds()
        await (log.restart() if clean else log.crash())
        assert replayed(log.records(), kept, before, after), log.records()
        assert await log.holds() == held
        before = after


@lasting
async def test_changes_right_behind_a_snapshot_are_replayed_although_no_message_lies_between(log: Driver) -> None:
    """They share the snapshot's position."""
    log.append(many(0, 6), [b"before"])
    await log.safe()
    snapshot = log.log.snapshot()
    snapshot.add([b"kept"])
    log.append(Rows(2000), [b"meanwhile"])
    await log.safe()
    assert await log.committed(snapshot)
    log.append(Rows(2000), [b"since"])
    await log.safe()
    await log.crash()
    assert replayed(log.records(), [b"kept"], [b"before"], [b"meanwhile", b"since"]), log.records()


@lasting
async def test_a_snapshot_that_is_not_committed_leaves_no_trace(log: Driver) -> None:
    records = await write(log)
    aborted = log.log.snapshot()
    aborted.add([b"aborted"])
    aborted.abort()
    begun = log.log.snapshot()
    begun.add([b"begun"])
    await log.safe()
    await log.crash()
    assert log.records() == records


@lasting
async def test_the_state_does_not_need_messages_before_the_snapshots_floor(log: Driver) -> None:
    await write(log)
    await log.safe()
    assert log.log.snapshot_floor() <= log.log.ends[0]
    for _ in range(3):
        snapshot = log.log.snapshot()
        snapshot.add([b"kept"])
        assert await log.committed(snapshot)
        assert log.log.snapshot_floor() <= log.log.ends[0]
        log.append(many(0, 6))
        await log.settle()
        await log.safe()
    assert log.log.snapshot_floor() > 0


@everywhere
async def test_a_snapshot_says_later_whether_it_worked(log: Driver) -> None:
    log.append(many(0, 6), [b"c"])
    await log.safe()
    snapshot = log.log.snapshot()
    snapshot.add([b"kept"])
    assert await log.committed(snapshot)


@on_disk
async def test_a_snapshot_that_fails_says_so_and_the_state_is_as_before(
    log: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = await write(log)
    await log.safe()
    snapshot = log.log.snapshot()
    snapshot.add([b"kept"])
    with monkeypatch.context() as patched:
        replace = Path.replace

        def fail(path: Path, target: Any) -> Path:
            if path.name.endswith(".snapshot.tmp"):
                raise OSError(28, "No space left on device")
            return replace(path, target)

        patched.setattr(Path, "replace", fail)
        assert not await log.committed(snapshot)
    log.append(many(900, 1), [b"since"])
    await log.safe()
    await log.crash()
    assert log.records() == [*records, b"since"]


# ── keeping house ──


@on_disk
async def test_the_oldest_segments_go_and_the_floor_rises_to_what_is_left(log: Driver) -> None:
    for n in range(40):
        log.append(many(5 * n, 5, size=50))
    await log.safe()
    segments = log.log.segments()
    assert len(segments) > 4
    assert [s.base for s in segments] == sorted(s.base for s in segments)
    assert segments[-1].end == log.log.ends[0]
    for segment in segments:
        inside = {m.topic for m in log.announced() if segment.base <= (m.position or 0) < segment.end}
        assert set(log.log.topics(segment)) == inside
    log.log.drop(segments[:3])
    await log.until(lambda: log.log.floors[0] >= segments[3].base)
    assert log.log.floors == (segments[3].base,)
    left = [m for m in log.announced() if (m.position or 0) >= segments[3].base]
    assert await log.holds() == left
    read = await log.read(0, segments[3].base + 1)
    assert messages_in(read.runs) == left[:1], "it begins at the floor"
    log.log.drop(log.log.segments())
    end = log.log.ends[0]
    await log.crash()
    assert log.log.ends[0] >= end, "also a log that let everything go knows where it was"
