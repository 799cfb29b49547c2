"""Traffic by the minute: each message is counted once, and a minute of a publisher on a topic is one row."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs_kit import Killed, archived, context_of, drain, kill_at_commit, table
from log_writer import START_MS, LogWriter, run
from pyspark.sql import SparkSession

from tidegate.pipeline.jobs import Context, traffic
from tidegate.pipeline.jobs.following import next_step
from tidegate.pipeline.lake import LakeFile

MINUTE_MS = 60_000


class Counted(LogWriter):
    """A log whose messages are summed up the plain way as they are written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.expected: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0, 0, 2**63, -1])

    def publish(self, topic: str, *payloads: bytes, flags: int = 0, publisher: str = "p", tenant: str = "") -> None:
        runs = [run(topic.encode(), *payloads, flags=flags, publisher=publisher.encode(), tenant=tenant.encode())]
        base = self.tick(runs)
        minute = datetime.fromtimestamp(self.time_ms // MINUTE_MS * 60, UTC)
        sums = self.expected[minute, tenant, topic, publisher]
        sums[0] += len(payloads)
        sums[1] += sum(map(len, payloads))
        sums[2 + (flags & 3)] += len(payloads)
        sums[5] += len(payloads) if flags & 4 else 0
        sums[6] = min(sums[6], base)
        sums[7] = max(sums[7], base + len(payloads) - 1)

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(((*key, *sums) for key, sums in self.expected.items()), key=repr)


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> Context:
    return context_of(spark, tmp_path)


@pytest.fixture
def writer(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "log")


def rows(context: Context) -> list[tuple[Any, ...]]:
    found = table(context, traffic.TABLE)
    return sorted(((row[0].astimezone(UTC), *row[1:]) for row in found), key=repr)


@pytest.mark.req("P.9", "P.11")
def test_steps_of_any_size_end_in_the_sums_of_all_messages(
    context: Context, writer: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traffic.run(context) is None
    chance = random.Random(9)
    for _ in range(4):
        for _ in range(40):
            payloads = [bytes(chance.randrange(30)) for _ in range(chance.randrange(1, 5))]
            flags = chance.choice([0, 1, 2, 4, 5, 6])
            names = chance.choice("ab"), chance.choice(["p", "q"]), chance.choice(["", "acme"])
            writer.publish(names[0], *payloads, flags=flags, publisher=names[1], tenant=names[2])
            writer.time_ms += chance.randrange(4000)
        writer.time_ms -= 90_000  # the clock is set back: minutes that were counted already get more
        archived(context)
    monkeypatch.setattr(traffic, "next_step", partial(next_step, rows_max=1))  # one file at a time
    batches = drain(traffic, context)
    assert len(batches) == len(context.lake.files("messages")) == 4
    assert [batch.lag_rows for batch in batches] == [
        sum(each.rows for each in batches[done + 1 :]) for done in range(len(batches))
    ]
    assert rows(context) == writer.rows()
    writer.publish("a", b"last")
    archived(context)
    assert [batch.rows for batch in drain(traffic, context)] == [1]
    assert rows(context) == writer.rows()


@pytest.mark.req("P.9")
@pytest.mark.attack("C11")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_message_is_counted_once_whenever_the_driver_is_killed(
    context: Context, writer: Counted, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    writer.publish("a", b"1", b"22")
    archived(context)
    drain(traffic, context)
    writer.publish("a", b"333")
    archived(context)
    kill_at_commit(monkeypatch, traffic.TABLE, when)
    with pytest.raises(Killed):
        traffic.run(context)
    again = context_of(context.spark, context.data)
    assert len(drain(traffic, again)) == (1 if when == "before" else 0)
    assert rows(again) == writer.rows()


@pytest.mark.req("P.9")
def test_only_files_with_the_minutes_of_a_step_are_written_again(
    context: Context, writer: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "FILE_ROWS", 2)
    kept: set[str] = set()
    for hour in range(3):
        writer.time_ms = START_MS + hour * 60 * MINUTE_MS
        for topic in "abc":
            writer.publish(topic, b"x")
            writer.time_ms += MINUTE_MS
        drain(traffic, archived(context))
        paths = {file.path for file in context.lake.files(traffic.TABLE)}
        assert kept <= paths
        kept = paths
    writer.time_ms = START_MS + 60 * MINUTE_MS  # more for the second hour
    writer.publish("a", b"y")
    drain(traffic, archived(context))
    left = kept & {file.path for file in context.lake.files(traffic.TABLE)}
    assert len(left) == len(kept) - 1
    assert rows(context) == writer.rows()


@pytest.mark.req("P.9")
def test_few_rows_make_one_file_however_rarely_they_come(context: Context, writer: Counted) -> None:
    for _ in range(3):
        writer.publish("a", b"x")
        writer.time_ms += 10 * MINUTE_MS
        drain(traffic, archived(context))
    assert len(context.lake.files(traffic.TABLE)) == 1
    assert rows(context) == writer.rows()


def file(name: str, low: int, high: int, rows: int) -> LakeFile:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return LakeFile(
        name, rows, 1, {"minute": start + timedelta(minutes=low)}, {"minute": start + timedelta(minutes=high)}
    )


@pytest.mark.req("P.9")
@pytest.mark.parametrize(
    ("minutes", "found"),
    [([0], "a"), ([9], "a"), ([10], "b"), ([15], ""), ([21], "c"), ([5, 30], "ac"), ([5, 25], "a"), ([], "")],
)
def test_a_step_replaces_what_may_hold_its_minutes(minutes: list[int], found: str) -> None:
    full = traffic.FILE_ROWS
    files = [file("a", 0, 9, full), file("b", 10, 14, full), file("c", 20, 24, full), file("c", 26, 40, full)]
    start = datetime(2026, 1, 1, tzinfo=UTC)
    wanted = [start + timedelta(minutes=each) for each in minutes]
    assert "".join(each.path for each in traffic.to_replace(files, wanted)) == found
    small = file("n", 50, 50, full - 1)
    assert "".join(each.path for each in traffic.to_replace([*files, small], wanted)) == found + "n"
