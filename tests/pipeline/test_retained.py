"""The table of retained messages is what the broker itself keeps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from jobs_kit import Killed, archived, context_of, drain, kill_at_commit
from log_writer import LogWriter, run
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from pyspark.sql import SparkSession

from harness import BrokerProcess, RawClient
from tidegate.log.run import NOT_KEPT, RETAIN, Run
from tidegate.log.snapshot import SnapshotWriter
from tidegate.pipeline.jobs import Context, retained
from tidegate.pipeline.jobs.following import next_step
from tidegate.router import Retained, RetainedStore
from tidegate.session import changes
from tidegate.wire import Publish, Will

Kept = dict[str, tuple[Any, ...]]


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> Context:
    return context_of(spark, tmp_path)


def kept(context: Context, now: datetime | None = None) -> Kept:
    """Topic → payload, QoS, properties, publisher, position of the rows that have not expired; each topic once."""
    rows = context.lake.read(context.spark, "retained").collect()
    found: Kept = {}
    for row in rows:
        assert row.topic not in found
        expires_at = None if row.expires_at is None else row.expires_at.astimezone(UTC)
        if expires_at is None or expires_at > (now or datetime.now(UTC)):
            found[row.topic] = (bytes(row.payload), row.qos, bytes(row.properties or b""), row.publisher, row.position)
    return found


# ── against a broker ──


class Publisher:
    """A paho client that waits until the broker has taken what it publishes."""

    def __init__(self, port: int, name: str, version: int) -> None:
        self.v5 = version == paho.MQTTv5
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, name, protocol=version)
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def publish(self, topic: str, payload: bytes, qos: int = 1, expiry_s: int | None = None, **named: Any) -> None:
        properties = PahoProperties(PacketTypes.PUBLISH) if self.v5 else None
        if properties is not None and expiry_s is not None:
            properties.MessageExpiryInterval = expiry_s
        if properties is not None and named:
            properties.UserProperty = list(named.items())
        self.client.publish(topic, payload, qos, retain=True, properties=properties).wait_for_publish(20)

    def close(self) -> None:
        self.publish("last", b"", 1)  # all before it, QoS 0 too, has been taken when this is acknowledged
        self.client.disconnect()
        self.client.loop_stop()


def told(port: int) -> Kept:
    """What a fresh subscriber to everything is sent as retained; the publisher and position are not told."""
    found: Kept = {}
    with RawClient(port, 5) as client:
        client.connect("fresh")
        client.subscribe("#", qos=2)
        try:
            while True:
                message = client.message(timeout_s=0.7)
                assert message.retain and message.topic.decode() not in found
                found[message.topic.decode()] = (message.payload, message.qos, message.passed_on)
        except TimeoutError:
            return found


def same(context: Context, broker: BrokerProcess) -> Kept:
    drain(retained, archived(context))
    from_broker = told(broker.port)
    from_table = kept(context)
    assert {topic: row[:3] for topic, row in from_table.items()} == from_broker
    return from_table


@pytest.mark.req("P.5", "S0.10")
def test_the_table_is_what_a_new_subscriber_is_sent(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    broker = start_broker(data="data")
    context = context_of(spark, tmp_path / "data")
    three, five = (Publisher(broker.port, f"v{v}", v) for v in (paho.MQTTv311, paho.MQTTv5))
    for qos in range(3):
        three.publish(f"three/{qos}", b"old")
        three.publish(f"three/{qos}", b"new %d" % qos, qos)
        five.publish(f"five/{qos}", b"\xff\x00", qos, expiry_s=3600, unit="°C")
    three.publish("cleared", b"gone soon")
    three.publish("never/there", b"")
    five.publish("tiefe/grüße/🌊", "ü".encode())
    rows = same(context, broker)
    assert rows["three/2"][:4] == (b"new 2", 2, b"", f"v{paho.MQTTv311}") and "cleared" in rows and rows["five/2"][2]
    five.publish("cleared", b"", 0)
    three.publish("three/0", b"newest", 0)
    three.close()
    five.close()
    with RawClient(broker.port) as watcher, RawClient(broker.port) as dying:
        watcher.connect("watcher")
        watcher.subscribe("wills/#")
        dying.connect("dying", will=Will(b"wills/1", b"dead", 1, True))
        dying.close()
        assert watcher.expect(Publish).payload == b"dead"
    rows = same(context, broker)
    assert rows["wills/1"][:4] == (b"dead", 1, b"", "dying")
    assert "cleared" not in rows and rows["three/0"][0] == b"newest"

    broker.kill()
    broker.start()
    five = Publisher(broker.port, "again", paho.MQTTv5)
    five.publish("wills/1", b"", 2)
    five.publish("five/1", b"after the crash", 2)
    five.publish("short", b"gone by itself", expiry_s=1)
    five.close()
    while "short" in told(broker.port):
        time.sleep(0.1)
    rows = same(context, broker)
    assert rows["five/1"][0] == b"after the crash" and not {"wills/1", "short"} & set(rows)
    assert broker.stop() == 0


@pytest.mark.req("P.5")
def test_what_the_broker_has_no_room_to_keep_is_not_in_the_table(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    broker = start_broker(data="data", retained__messages_max=2)
    client = Publisher(broker.port, "many", paho.MQTTv311)
    for topic in ("a", "b", "c", "a"):
        client.publish(topic, topic.encode())
    client.close()
    context = context_of(spark, tmp_path / "data")
    assert set(same(context, broker)) == {"a", "b"}


# ── against the broker's own store, with a log and no broker ──


def stored(run: Run, store: RetainedStore, position: int, time_ms: int) -> None:
    expires = None if run.expiries is None else time_ms + run.expiries[0] * 1000
    store.put(Retained(run.topic, run.payloads[0], run.flags & 3, b"", expires, time_ms, position, run.publisher))


@pytest.mark.req("P.5")
def test_steps_of_any_size_end_in_the_same_table(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "next_step", partial(next_step, rows_max=1))
    chance = random.Random(5)
    writer = LogWriter(tmp_path / "log")
    store = RetainedStore(messages_max=1000, bytes_max=1 << 20)
    for part in range(4):
        for _ in range(50):
            flags = chance.choice([0, 1, 4, 5, 6])
            payload = chance.choice([b"", b"x", b"%d" % chance.randrange(100)])
            each = run(b"t/%d" % chance.randrange(12), payload, flags=flags, publisher=b"p%d" % part)
            if chance.random() < 0.3:
                each.expiries = [chance.randrange(60)]
            position = writer.tick([each])
            if flags & RETAIN:
                stored(each, store, position, writer.time_ms)
        archived(context)
    writer.tick([run(b"plain", b"x")])
    archived(context)
    assert len(drain(retained, context)) == 5
    found = kept(context, datetime.fromtimestamp(writer.time_ms / 1000, UTC))
    assert found == {
        message.topic.decode(): (message.payload, message.qos, b"", message.publisher.decode(), message.position)
        for message in store.match(b"#", writer.time_ms)
    }
    assert len(found) > 3
    # Nothing retained in the last step: only its progress was committed.
    assert context.lake.progress("retained", retained.NAME) == writer.log.end


@pytest.mark.req("P.5")
def test_what_has_expired_leaves_the_table(context: Context, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log")
    short = run(b"short", b"x", flags=RETAIN)
    short.expiries = [5]
    writer.tick([short])
    drain(retained, archived(context))
    assert context.lake.rows("retained") == 1
    writer.time_ms += 60_000
    writer.tick([run(b"other", b"y", flags=RETAIN)])
    drain(retained, archived(context))
    assert list(kept(context)) == ["other"] and context.lake.rows("retained") == 1


@pytest.mark.req("P.5")
def test_a_message_that_was_not_kept_does_not_replace_the_one_before(context: Context, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log")
    writer.tick([run(b"a", b"kept", flags=RETAIN), run(b"a", b"no room", flags=RETAIN | NOT_KEPT)])
    drain(retained, archived(context))
    assert kept(context)["a"][0] == b"kept"


@pytest.mark.req("P.5")
def test_tenants_have_topics_of_their_own(context: Context, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log")
    writer.tick([run(b"a", b"1", flags=4, tenant=b"x"), run(b"a", b"2", flags=4, tenant=b"y")])
    writer.tick([run(b"a", b"", flags=4, tenant=b"x")])
    drain(retained, archived(context))
    rows = context.lake.read(context.spark, "retained").collect()
    assert [(row.tenant, bytes(row.payload)) for row in rows] == [("y", b"2")]


@pytest.mark.req("P.5")
def test_what_the_log_no_longer_has_comes_from_the_snapshot(context: Context, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log")
    for _ in range(3):
        writer.tick([run(b"filler", b"x")])
    base = writer.tick([run(b"replaced", b"new", flags=4), run(b"cleared", b"", flags=4)])
    tenant = retained.TENANT.encode()
    base = writer.tick([run(b"mine", b"a", flags=4, tenant=tenant), run(b"gone", b"", flags=4, tenant=tenant)])
    snapshot = SnapshotWriter(tmp_path / "log", base)
    for topic, position in ((b"old", 1), (b"mine", 0), (b"gone", 0), (b"newer", base + 9)):
        snapshot.add([changes.retained(topic, b"before", 1, b"", None, 5000, position, b"p"), changes.gone(7)])
    snapshot.commit()
    drain(retained, archived(context))
    rows = context.lake.read(context.spark, "retained").where("tenant <> ''").collect()
    assert sorted((row.topic, bytes(row.payload), row.position) for row in rows) == [
        ("mine", b"a", base),
        ("newer", b"before", base + 9),
        ("old", b"before", 1),
    ]


@pytest.mark.req("P.5")
@pytest.mark.attack("C11")
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_table_is_right_whenever_the_driver_is_killed(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    writer = LogWriter(tmp_path / "log")
    writer.tick([run(b"a", b"1", flags=4), run(b"b", b"1", flags=4)])
    drain(retained, archived(context))
    writer.tick([run(b"a", b"2", flags=4), run(b"b", b"", flags=4)])
    archived(context)
    kill_at_commit(monkeypatch, "retained", when)
    with pytest.raises(Killed):
        retained.run(context)
    again = context_of(context.spark, context.data)
    assert {topic: row[0] for topic, row in kept(again).items()} == (
        {"a": b"1", "b": b"1"} if when == "before" else {"a": b"2"}
    )
    assert len(drain(retained, again)) == (1 if when == "before" else 0)
    assert {topic: row[0] for topic, row in kept(again).items()} == {"a": b"2"}
