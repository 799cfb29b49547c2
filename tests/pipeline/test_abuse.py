"""Clients that do too much of something in a minute are found, each once, and nobody else is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from jobs_kit import Killed, archived, context_of, drain, kill_at_commit, table
from log_writer import LogWriter, run
from pyspark.sql import SparkSession

from harness import BrokerProcess, RawClient
from tidegate.config import Pipeline
from tidegate.pipeline.jobs import Context, abuse, traffic
from tidegate.session import changes

MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS
LIMITS = Pipeline(abuse_topics_max=5, abuse_subscribes_max=5, abuse_connects_max=3)


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> Context:
    return context_of(spark, tmp_path, pipeline=LIMITS)


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path / "log")


def judge(context: Context) -> None:
    drain(traffic, archived(context))
    drain(abuse, context)


def found(context: Context) -> list[tuple[Any, ...]]:
    return table(context, abuse.TABLE, "tenant", "client", "rule", "observed", "limit")


def tick(writer: LogWriter, runs: Iterable[Any] = (), records: Iterable[bytes] = (), after_ms: int = 0) -> None:
    """Everything at one moment, a whole number of minutes after the last."""
    writer.time_ms = (writer.time_ms // MINUTE_MS + 1) * MINUTE_MS + after_ms
    writer.tick(list(runs), list(records))


def topics(publisher: str, names: Iterable[object], tenant: str = "") -> list[Any]:
    return [run(f"t/{n}".encode(), b"x", publisher=publisher.encode(), tenant=tenant.encode()) for n in names]


def connected(number: int, client: str, tenant: str = "") -> bytes:
    return changes.session(number, True, 4, 0, 0, 0, client.encode(), tenant.encode(), None)


def subscribed(number: int, names: Iterable[object]) -> list[bytes]:
    return [changes.subscribed(number, 1, 0, 0, 0, f"f/{n}".encode()) for n in names]


def test_clients_of_a_broker_that_do_too_much_are_found(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    broker = start_broker(data="data")
    context = context_of(spark, tmp_path / "data", pipeline=LIMITS)
    # More than twice the limit: at least one minute has too much, wherever it ends.
    with RawClient(broker.port) as flooder, RawClient(broker.port, 5) as greedy, RawClient(broker.port) as modest:
        flooder.connect("flooder")
        greedy.connect("greedy")
        modest.connect("modest")
        modest.subscribe("a", "b", "c")
        for n in range(12):
            flooder.publish(f"new/{n}", b"x", 1)
            greedy.subscribe(f"filter/{n}/#")
            modest.publish(f"few/{n % 4}", b"x", 1)
        for _ in range(8):
            with RawClient(broker.port) as hopper:
                hopper.connect("hopper")
    judge(context)
    wrong = {("flooder", "topics"), ("greedy", "subscribes"), ("hopper", "connects")}
    rows = table(context, abuse.TABLE)
    assert {(row[4], row[5]) for row in rows} == wrong
    told = abuse.newest_verdicts(context.lake, 100)
    assert {(each["client"], each["rule"]) for each in told} == wrong and len(told) == len(rows)
    for each in told:
        start, end = (datetime.fromisoformat(each[name]) for name in ("window_start", "window_end"))
        assert end - start == timedelta(minutes=1) and start.second == 0
        assert datetime.fromisoformat(each["time"]) > start
        assert each["tenant"] == "default" and each["observed"] > each["limit"] > 0
    assert len(abuse.newest_verdicts(context.lake, 2)) == 2


def test_only_topics_that_nobody_knew_count_and_only_for_the_first_to_use_them(
    context: Context, writer: LogWriter
) -> None:
    tick(writer, topics("gateway", range(5)))
    for _ in range(3):
        tick(writer, topics("gateway", range(5)) + topics("other", ["mine"]))  # as busy as ever, with nothing new
    judge(context)
    assert found(context) == []
    # Uses as many as it likes of what others made; and the second on a topic has not made it.
    tick(writer, topics("reader", range(5)) + topics("first", range(10, 15)) + topics("reader", range(10, 15)))
    judge(context)
    assert found(context) == []
    # Another tenant's topics are others.
    tick(writer, topics("reader", [*range(4), 20, 21]) + topics("stranger", range(6), tenant="acme"))
    judge(context)
    assert found(context) == [("acme", "stranger", "topics", 6, 5)]


def test_a_topic_is_new_again_when_nobody_used_it_for_a_day(context: Context, writer: LogWriter) -> None:
    tick(writer, topics("a", range(4)))
    tick(writer, topics("a", range(4, 8)))
    judge(context)
    tick(writer, topics("b", range(4)))
    writer.time_ms += DAY_MS - MINUTE_MS
    tick(writer, topics("c", range(8)))  # of half of them a day has passed since, but not of the other half
    judge(context)
    assert found(context) == []
    writer.time_ms += DAY_MS
    tick(writer, topics("d", range(8)))
    judge(context)
    assert found(context) == [("", "d", "topics", 8, 5)]


def test_a_minute_is_judged_with_all_that_belongs_to_it_and_once(context: Context, writer: LogWriter) -> None:
    writer.time_ms = writer.time_ms // MINUTE_MS * MINUTE_MS
    for part in range(3):
        names = range(4 * part, 4 * part + 4)
        writer.tick(topics("slow", names), [connected(part, "slow"), connected(part, "slow"), *subscribed(part, names)])
        judge(context)
        assert found(context) == (
            []
            if part == 0
            else [("", "slow", "connects", 4, 3), ("", "slow", "subscribes", 8, 5), ("", "slow", "topics", 8, 5)]
        )


def test_subscriptions_count_for_whose_session_it_was(context: Context, writer: LogWriter) -> None:
    tick(writer, records=[connected(1, "before")])
    tick(writer, records=[changes.gone(1), connected(1, "early", "acme"), connected(2, "bystander")])
    tick(writer, topics("x", [0]))
    judge(context)
    tick(writer, records=[*subscribed(1, range(6)), *subscribed(2, range(5))])
    judge(context)
    assert found(context) == [("acme", "early", "subscribes", 6, 5)]
    # The number goes to another session. Neither made too many of its own.
    tick(writer, records=[*subscribed(1, range(4)), changes.gone(1), connected(1, "late"), *subscribed(1, range(4))])
    # Too many before and after it connects again; and of a session that nobody knows.
    again = [*subscribed(2, range(6)), connected(2, "bystander"), *subscribed(2, range(7)), *subscribed(9, range(6))]
    tick(writer, records=again)
    judge(context)
    assert found(context) == [("", "bystander", "subscribes", 13, 5), ("acme", "early", "subscribes", 6, 5)]


def test_nothing_is_judged_before_traffic_has_counted_it(context: Context, writer: LogWriter) -> None:
    tick(writer, topics("flooder", range(9)))
    archived(context)
    assert abuse.run(context) is None
    drain(traffic, context)
    assert [batch.reached for batch in drain(abuse, context)] == [9]
    assert found(context) == [("", "flooder", "topics", 9, 5)]


@pytest.mark.attack("C11")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_verdict_is_given_once_whenever_the_driver_is_killed(
    context: Context, writer: LogWriter, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    tick(writer, topics("flooder", range(9)), [connected(1, "hopper")] * 4)
    drain(traffic, archived(context))
    kill_at_commit(monkeypatch, abuse.TABLE, when)
    with pytest.raises(Killed):
        abuse.run(context)
    again = context_of(context.spark, context.data, pipeline=LIMITS)
    drain(abuse, again)
    assert found(again) == [("", "flooder", "topics", 9, 5), ("", "hopper", "connects", 4, 3)]
