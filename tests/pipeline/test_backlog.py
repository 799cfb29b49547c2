"""Backlog: what waits for absent sessions, by the rules of S4.4, however many filters and messages there are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from jobs_kit import archived, context_of, table
from log_writer import START_MS, LogWriter
from pyspark.sql import SparkSession

from harness import BrokerProcess, RawClient
from tidegate.log.run import NO_EXPIRY, Run
from tidegate.pipeline.jobs import Context, backlog
from tidegate.pipeline.schemas import TABLES
from tidegate.pipeline.state import Begun, Waiting, WaitingFilter, WaitingReader
from tidegate.router.filters import matches
from tidegate.session import changes
from tidegate.session.flights import State
from tidegate.session.skip import Skip
from tidegate.wire import Properties

NOW_MS = 1_800_000_000_000


def topic_of(rnd: random.Random) -> str:
    """Of few words, so that filters match; with empty levels and topics of the broker's own."""
    levels = [rnd.choice(["a", "b", "c", "", "$SYS", "é"]) for _ in range(rnd.randint(1, 5))]
    return "/".join(levels) or "a"


def filter_of(rnd: random.Random) -> str:
    levels = [rnd.choice(["a", "b", "", "+", "+", "$SYS", "é"]) for _ in range(rnd.randint(1, 5))]
    if rnd.random() < 0.4:
        levels[-1] = "#"
    return "/".join(levels) or "+"


@pytest.mark.req("P.4", "S4.12")
@pytest.mark.parametrize("seed", range(3))
def test_the_join_finds_what_the_plain_matcher_finds(spark: SparkSession, seed: int) -> None:
    rnd = random.Random(seed)
    topics = sorted({topic_of(rnd) for _ in range(400)})
    filters = sorted({filter_of(rnd) for _ in range(400)} | {"#", "+", "/", "+/+", "/#", "$SYS/#", "a/b/c/#"})
    named = spark.createDataFrame([("", topic) for topic in topics], "tenant string, topic string")
    wanted = spark.createDataFrame([("", filter) for filter in filters], "tenant string, filter string")
    found = {(row.filter, row.topic) for row in backlog.matches(named, wanted).collect()}
    assert found == {(g, t) for g in filters for t in topics if matches(g.encode(), t.encode())}
    assert len(found) > 1000


# ── the rules ──


def random_messages(rnd: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "position": 10 + 2 * i,
            "time": (NOW_MS - rnd.randint(0, 100_000)) * 1000,
            "tenant": rnd.choice(["", "", "other"]),
            "topic": topic_of(rnd),
            "publisher": rnd.choice(["p", "c1", "c2"]),
            "qos": rnd.randint(0, 2),
            "retain": False,
            "payload": b"",
            "expiry": rnd.choice([None, None, 0, 50, 100, 1000]),
        }
        for i in range(count)
    ]


def random_readers(rnd: random.Random, count: int) -> list[WaitingReader]:
    readers = []
    for number in range(1, count + 1):
        filters = [
            WaitingFilter(filter_of(rnd), rnd.randint(0, 900), rnd.random() < 0.2) for _ in range(rnd.randint(1, 4))
        ]
        if rnd.random() < 0.5:
            filters = [filter._replace(no_local=False) for filter in filters]
        finished = Skip()
        for _ in range(40 if rnd.random() < 0.3 else 0):
            first = rnd.randrange(10, 800, 2)
            finished.add(first, first + rnd.choice((1, 1, 4)))
        tenant = rnd.choice(["", "", "other"])
        # Some sessions have several readers: their own, and those of replays.
        readers.append(WaitingReader(number, f"c{number % 20}", tenant, filters, rnd.random() < 0.2, finished))
    seen: set[tuple[str, str]] = set()
    for reader in readers:
        reader.any_qos = reader.any_qos or (reader.client, reader.tenant) in seen
        seen.add((reader.client, reader.tenant))
    return readers


def naively(messages: list[dict[str, Any]], waiting: Waiting) -> dict[tuple[str, str, str], list[int]]:
    """(client, tenant, topic) → the positions to come."""
    alive = [
        m for m in messages if m["expiry"] is None or NOW_MS - m["time"] // 1000 <= m["expiry"] * 1000
    ]
    found: dict[tuple[str, str, str], list[int]] = {}
    for m in alive:
        for reader in waiting.readers:
            if reader.tenant != m["tenant"] or m["position"] in reader.finished or not (m["qos"] or reader.any_qos):
                continue
            if any(
                m["position"] >= each.floor
                and not (each.no_local and m["publisher"] == reader.client)
                and matches(each.filter.encode(), m["topic"].encode())
                for each in reader.filters
            ):
                found.setdefault((reader.client, reader.tenant, m["topic"]), []).append(m["position"])
        for begun in waiting.begun:
            if (begun.tenant, begun.position) == (m["tenant"], m["position"]):
                found.setdefault((begun.client, begun.tenant, m["topic"]), []).append(m["position"])
    return found


@pytest.mark.req("P.4", "S4.4")
@pytest.mark.parametrize("seed", range(2))
def test_what_waits_is_what_the_rules_say(spark: SparkSession, seed: int) -> None:
    rnd = random.Random(seed)
    messages = random_messages(rnd, 400)
    waiting = Waiting(
        random_readers(rnd, 60), [Begun("c3", "", 7, 10 + 2 * rnd.randrange(400)) for _ in range(5)]
    )
    frame = spark.createDataFrame(pa.Table.from_pylist(messages, schema=TABLES["messages"]))
    rows = backlog.backlog(frame, waiting, NOW_MS).collect()
    found = {
        (row.client, row.tenant, row.topic): (row.first_position, row.last_position, row.messages) for row in rows
    }
    assert len(found) == len(rows), "one row for a client and a topic"
    expected = naively(messages, waiting)
    assert len(expected) > 300
    assert found == {key: (min(at), max(at), len(at)) for key, at in expected.items()}


# ── from a log ──


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> Context:
    return context_of(spark, tmp_path)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    writer = LogWriter(tmp_path / "log")
    yield writer
    writer.close()


def session(number: int, name: str, position: int, *filters: str, connected: bool = False, qos: int = 1) -> list[bytes]:
    return [
        changes.session(number, connected, 5, 0xFFFFFFFF, START_MS, position, name.encode(), b"", None),
        *(changes.subscribed(number, qos, 0, 0, 0, filter.encode()) for filter in filters),
    ]


def waiting_rows(context: Context) -> list[tuple[Any, ...]]:
    return table(context, "backlog", "client", "topic", "first_position", "last_position", "messages")


@pytest.mark.req("P.4", "S4.4", "S4.13")
def test_the_table_is_written_anew_with_every_change(context: Context, writer: LogWriter) -> None:
    assert backlog.run(context) is None  # there is no lake yet
    writer.tick([], session(1, "a", 0, "t/#") + session(2, "b", 4, "t/1") + session(3, "clean", 0, "t/#", qos=0))
    writer.messages(10, topics=2)  # t/0 and t/1 in turns
    archived(context)
    batch = backlog.run(context)
    assert batch is not None and batch.rows == 3
    assert waiting_rows(context) == [("a", "t/0", 0, 8, 5), ("a", "t/1", 1, 9, 5), ("b", "t/1", 5, 9, 3)]
    assert backlog.run(context) is None, "nothing has changed"

    writer.tick([], [changes.positions([(1, 9)])])
    archived(context)
    assert backlog.run(context) is not None
    assert waiting_rows(context) == [("a", "t/1", 9, 9, 1), ("b", "t/1", 5, 9, 3)]

    writer.tick([], [changes.gone(1), *session(2, "b", 4, connected=True)])
    archived(context)
    assert backlog.run(context) is not None
    assert waiting_rows(context) == []
    assert backlog.run(context) is None


@pytest.mark.req("P.4", "S4.13")
def test_expired_messages_and_expired_sessions_are_not_waited_for(context: Context, writer: LogWriter) -> None:
    ended = changes.session(2, False, 5, 60, 1, 0, b"ended", b"", None)
    writer.tick([], [*session(1, "a", 0, "#"), ended, changes.subscribed(2, 1, 0, 0, 0, b"#")])
    never, long = NO_EXPIRY, 2**31
    writer.time_ms = 1_000_000_000_000  # long ago
    writer.tick([Run(b"t", b"p", b"", 1, [b"x"] * 3, None, [10, long, never], None)])
    archived(context)
    backlog.run(context)
    assert waiting_rows(context) == [("a", "t", 1, 2, 2)]


@pytest.mark.req("P.4")
def test_a_shared_group_has_one_backlog_unless_a_member_is_there(context: Context, writer: LogWriter) -> None:
    shared = "$share/g/t/#"
    group = [changes.group(9, b"g", b"t/#"), changes.positions([(9, 1)])]
    members = [changes.subscribed(number, 1, 0, 0, 9, shared.encode()) for number in (1, 2)]
    writer.tick([], session(1, "a", 0) + session(2, "b", 0) + group + members)
    writer.messages(4, topics=1)
    archived(context)
    backlog.run(context)
    assert waiting_rows(context) == [(shared, "t/0", 1, 3, 3)]
    writer.tick([], session(2, "b", 0, connected=True))
    archived(context)
    backlog.run(context)
    assert waiting_rows(context) == []


@pytest.mark.req("P.4", "S2.22")
def test_what_must_be_kept_is_the_first_that_a_session_may_still_need(context: Context, writer: LogWriter) -> None:
    writer.messages(10, topics=5)
    archived(context)
    assert backlog.needed_floor(context, 10) is None
    writer.tick([], session(1, "here", 2, "t/4", connected=True))
    assert backlog.needed_floor(context, 10) == 4, "also while it is connected"
    assert backlog.needed_floor(context, 4) is None
    writer.tick([], session(2, "other", 7, "t/#"))
    assert backlog.needed_floor(context, 10) == 4
    writer.tick([], [changes.positions([(1, 10)])])
    assert backlog.needed_floor(context, 10) == 7
    # A QoS 2 message that it has begun to take, of a group that has gone on since.
    writer.tick([], [changes.positions([(5, 10)]), changes.flights(2, 5, 1, 2, State.SENT, range(3, 4))])
    assert backlog.needed_floor(context, 10) == 3
    writer.tick([], [changes.flights(2, 5, 1, 2, State.DONE, range(3, 4)), changes.gone(2)])
    assert backlog.needed_floor(context, 10) is None
    writer.tick([], session(3, "zero", 0, "#", qos=0))
    assert backlog.needed_floor(context, 10) is None, "QoS 0 is owed to nobody"
    writer.tick([], [changes.subscribed(3, 0, 0, 0, 11, b"$replay/0/t/#"), changes.positions([(11, 6)])])
    assert backlog.needed_floor(context, 10) == 6, "but to who replays"


# ── with a broker ──


KEPT = Properties(session_expiry=3600)


def returning(broker: BrokerProcess, name: str) -> RawClient:
    client = RawClient(broker.port, 5)
    client.connect(name, clean=False, properties=KEPT)
    return client


@pytest.mark.req("P.4", "S4.2", "S4.4", "S4.5")
def test_each_session_gets_exactly_its_backlog_when_it_returns(
    start_broker: Callable[..., BrokerProcess], spark: SparkSession
) -> None:
    broker = start_broker()
    subscriptions: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "exact": [("plant/1/temp", {"qos": 1})],
        "wild": [("plant/+/temp", {"qos": 2}), ("plant/#", {"qos": 1})],
        "zero": [("plant/#", {"qos": 0})],
        "mixed": [("plant/1/#", {"qos": 0}), ("plant/2/#", {"qos": 1})],
        "narrow": [("other/#", {"qos": 1})],
        "gone": [("plant/#", {"qos": 1})],
        "selfish": [("plant/#", {"qos": 1, "no_local": True})],
        "replaying": [("$replay/earliest/plant/2/+", {"qos": 1})],
        "lagging": [("plant/#", {"qos": 1})],
    }
    publisher = RawClient(broker.port, 5)
    publisher.connect("publisher")
    for i in range(4):
        publisher.publish(f"plant/{i % 2 + 1}/temp", f"before {i}", qos=1)
    for name, filters in subscriptions.items():
        client = returning(broker, name)
        for filter, options in filters:
            client.subscribe(filter, **options)
        if name == "replaying":
            client.payloads(2)
        if name == "gone":
            client.unsubscribe("plant/#")
        if name == "lagging":  # it acknowledges the first of two
            for i in range(2):
                publisher.publish("plant/3/temp", f"seen {i}", qos=1)
            client.message()
            client.message(acknowledge=False)
        if name == "selfish":
            client.publish("plant/1/temp", "my own", qos=1)
        client.disconnect()
    for i in range(30):
        topic = ["plant/1/temp", "plant/2/temp", "plant/2/level/x", "plant", "elsewhere"][i % 5]
        publisher.publish(topic, f"missed {i}", qos=i % 3)
    publisher.publish("plant/1/temp", "", qos=1, retain=True)

    context = archived(context_of(spark, broker.data))
    backlog.run(context)
    promised: dict[str, dict[str, int]] = {}
    for client_id, topic, count in table(context, "backlog", "client", "topic", "messages"):
        promised.setdefault(client_id, {})[topic] = count
    assert set(promised) == {"exact", "wild", "mixed", "selfish", "replaying", "lagging"}
    for name in subscriptions:
        client = returning(broker, name)
        waiting = promised.get(name, {})
        got = Counter(client.message().topic.decode() for _ in range(sum(waiting.values())))
        assert got == waiting, name
        client.nothing()
        client.disconnect()
    assert table(context, "messages", "position")  # the lake has what the broker stored
    archived(context)
    backlog.run(context)
    assert table(context, "backlog") == [], "everything was acknowledged"
