"""`format("tidegate")` as a sink: every row becomes a message, at least once, in its partition's order."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.subscribeoptions import SubscribeOptions
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from harness import BrokerProcess, RawClient
from tidegate.errors import ConfigError
from tidegate.pipeline.sink import Publication

Received = SimpleQueue[paho.MQTTMessage]


@pytest.fixture
def subscribe(broker: BrokerProcess) -> Iterator[Callable[[str], Received]]:
    """Subscribes with paho; the messages come in the queue."""
    clients: list[paho.Client] = []

    def start(filter: str) -> Received:
        received: Received = SimpleQueue()
        subscribed = threading.Event()
        client = paho.Client(CallbackAPIVersion.VERSION2, f"paho-{len(clients)}", protocol=MQTTProtocolVersion.MQTTv5)
        client.on_message = lambda _client, _data, message: received.put(message)
        client.on_subscribe = lambda *_: subscribed.set()
        client.connect("127.0.0.1", broker.port)
        client.loop_start()
        clients.append(client)
        client.subscribe(filter, options=SubscribeOptions(qos=2, retainAsPublished=True))
        assert subscribed.wait(20)
        return received

    yield start
    for client in clients:
        client.disconnect()
        client.loop_stop()


def publish(frame: DataFrame, broker: BrokerProcess, **options: object) -> None:
    given = {name: str(value) for name, value in options.items()}
    frame.write.format("tidegate").option("port", broker.port).options(**given).mode("append").save()


def take(received: Received, count: int) -> list[paho.MQTTMessage]:
    return [received.get(timeout=30) for _ in range(count)]


@pytest.mark.req("P.2")
def test_rows_reach_a_subscriber_with_all_that_they_say(
    spark: SparkSession, broker: BrokerProcess, subscribe: Callable[[str], Received]
) -> None:
    received = subscribe("#")
    rows = [
        ("a/1", bytearray(range(256)), 0, False, None, None),
        ("a/gr\u00fcn", bytearray(), 1, True, None, bytearray(b"\x03\x00\x04text")),
        ("a/3", bytearray(b"x"), 2, None, 600, None),
        ("a/4", bytearray(b"y"), None, False, None, None),
    ]
    schema = "topic string, payload binary, qos int, retain boolean, expiry long, properties binary"
    publish(spark.createDataFrame(rows, schema).coalesce(1), broker)
    messages = take(received, 4)
    assert [message.topic for message in messages] == [row[0] for row in rows]
    assert [message.payload for message in messages] == [bytes(row[1]) for row in rows]
    assert [message.qos for message in messages] == [0, 1, 2, 1]  # 1 is the default
    assert [message.retain for message in messages] == [False, True, False, False]
    assert messages[1].properties.ContentType == "text"
    assert 0 < messages[2].properties.MessageExpiryInterval <= 600


@pytest.mark.req("P.2")
def test_a_partition_keeps_its_order(
    spark: SparkSession, broker: BrokerProcess, subscribe: Callable[[str], Received]
) -> None:
    received = subscribe("numbers/#")
    count = 20_000
    frame = spark.range(count, numPartitions=2).selectExpr(
        "concat('numbers/', spark_partition_id()) as topic", "cast(id as string) as payload"
    )
    publish(frame, broker, qos=1)
    found: dict[str, list[int]] = {}
    for message in take(received, count):
        found.setdefault(message.topic, []).append(int(message.payload))
    assert found == {"numbers/0": list(range(10_000)), "numbers/1": list(range(10_000, 20_000))}


@pytest.mark.req("P.2")
def test_what_is_written_can_be_read_back_and_written_again(spark: SparkSession, broker: BrokerProcess) -> None:
    rows = [(f"t/{i % 3}", bytearray(b"%d" % i), i % 2, 60 + i) for i in range(500)]
    publish(spark.createDataFrame(rows, "topic string, payload binary, qos byte, expiry int"), broker, clientId="jobs")
    read = spark.read.format("tidegate").option("filter", "t/+").load(str(broker.data))
    found = {(row.topic, bytes(row.payload), row.qos, row.expiry) for row in read.collect()}
    assert found == {(topic, bytes(payload), qos, expiry) for topic, payload, qos, expiry in rows}
    assert {row.publisher for row in read.select("publisher").distinct().collect()} == {"jobs-0", "jobs-1"}
    # The log's own columns (position, time …) are the broker's to give.
    again = read.selectExpr("* except (topic)", "concat('again/', topic) as topic")
    publish(again, broker)
    twice = spark.read.format("tidegate").option("filter", "again/#").load(str(broker.data))
    assert twice.count() == 500
    assert twice.selectExpr("min(position)").first()[0] > read.selectExpr("max(position)").first()[0]  # type: ignore[index]


@pytest.mark.req("P.2")
def test_one_topic_for_all_rows_and_text_as_payload(
    spark: SparkSession, broker: BrokerProcess, subscribe: Callable[[str], Received]
) -> None:
    received = subscribe("const/+")
    publish(spark.createDataFrame([("h\u00e9llo",)], "payload string"), broker, topic="const/1", qos=2)
    (message,) = take(received, 1)
    assert (message.topic, message.payload, message.qos) == ("const/1", "h\u00e9llo".encode(), 2)


@pytest.mark.req("P.2")
def test_a_stream_through_spark_back_to_the_broker(
    spark: SparkSession, broker: BrokerProcess, subscribe: Callable[[str], Received], tmp_path: Path
) -> None:
    """Celsius in, Fahrenheit out; stopped and started again in between."""
    received = subscribe("f/#")
    with RawClient(broker.port, 5) as client:
        client.connect("thermometer")
        for start in (0, 100):
            for degrees in range(start, start + 100):
                client.publish(f"c/{degrees % 4}", str(degrees), qos=1)
            stream = spark.readStream.format("tidegate").option("filter", "c/+").load(str(broker.data))
            converted = stream.selectExpr(
                "replace(topic, 'c/', 'f/') as topic", "cast(cast(payload as string) * 9 / 5 + 32 as string) as payload"
            )
            query = (
                converted.writeStream.format("tidegate")
                .option("port", broker.port)
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(100)
    messages = take(received, 200)
    assert sorted(float(message.payload) for message in messages) == [c * 9 / 5 + 32 for c in range(200)]
    publishers = spark.read.format("tidegate").option("filter", "f/#").load(str(broker.data))
    names = {row.publisher for row in publishers.select("publisher").distinct().collect()}
    assert all(name.startswith("spark-") for name in names)
    assert len({name.rsplit("-", 1)[0] for name in names}) == 1  # the query keeps its name


@pytest.mark.req("P.2")
@pytest.mark.attack("C11")
def test_a_broker_that_is_killed_meanwhile_gets_every_row(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess]
) -> None:
    broker = start_broker()
    count = 100_000
    done = threading.Event()

    def kill_and_start() -> None:
        log = broker.data / "log"
        while not done.is_set() and sum(each.stat().st_size for each in log.glob("*.log")) < 200_000:
            time.sleep(0.005)
        broker.kill()
        broker.start()

    other = threading.Thread(target=kill_and_start)
    other.start()
    try:
        frame = spark.range(count, numPartitions=1).selectExpr("'t' as topic", "cast(id as string) as payload")
        publish(frame, broker)
    finally:
        done.set()
        other.join()
    read = spark.read.format("tidegate").option("filter", "t").load(str(broker.data))
    ids = read.selectExpr("cast(cast(payload as string) as long) as id").distinct()
    assert (ids.count(), ids.selectExpr("min(id)", "max(id)").first()) == (count, (0, count - 1))
    before, after = read.where("position < 1L << 32").count(), read.where("position >= 1L << 32").count()
    assert before and after  # it was in the middle


@pytest.mark.parametrize(
    ("topics", "told"),
    [
        (["a", None], "partition 0, counted from row 0: message 1: its topic is null"),
        (["a", "b", "c/+"], "message 2: cannot publish to 'c/.': wildcard in a topic name"),
        ([""], "message 0: the topic is empty"),
        (["ok", "$SYS/mine"], r"refused message 1 to '.SYS/mine': topic name invalid"),
    ],
)
def test_a_row_that_cannot_be_published_is_named(
    spark: SparkSession, broker: BrokerProcess, topics: list[str | None], told: str
) -> None:
    rows = [(topic, "x") for topic in topics]
    frame = spark.createDataFrame(rows, "topic string, payload string").coalesce(1)
    with pytest.raises(PySparkException, match=told):
        publish(frame, broker)


def test_a_null_payload_and_a_wrong_qos_are_named(spark: SparkSession, broker: BrokerProcess) -> None:
    with pytest.raises(PySparkException, match="message 1: its payload is null"):
        publish(spark.createDataFrame([("a", "x"), ("a", None)], "topic string, payload string").coalesce(1), broker)
    with pytest.raises(PySparkException, match="message 1: QoS 7 is not one of 0, 1, 2"):
        rows = [("a", "x", 1), ("a", "y", 7)]
        publish(spark.createDataFrame(rows, "topic string, payload string, qos int").coalesce(1), broker)


def test_nobody_there_is_told(spark: SparkSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    frame = spark.createDataFrame([("a", "x")], "topic string, payload string")
    with pytest.raises(PySparkException, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
        frame.write.format("tidegate").option("port", port).mode("append").save()


def test_spark_tells_what_cannot_be_written_before_it_runs(spark: SparkSession, broker: BrokerProcess) -> None:
    frame = spark.createDataFrame([("a", 1)], "topic string, payload int")
    with pytest.raises(PySparkException, match=r"column payload: is int .string or binary"):
        publish(frame, broker)
    with pytest.raises(PySparkException, match="mode: what was published cannot be overwritten"):
        frame.selectExpr("topic", "'x' as payload").write.format("tidegate").mode("overwrite").save()


@pytest.mark.parametrize(
    ("schema", "options", "told"),
    [
        ("payload string", {}, "column topic: is missing .a column topic, or the option topic"),
        ("topic string", {}, "column payload: is missing"),
        ("topic string, payload binary", {"topic": "x"}, "option topic: the rows have a column topic as well"),
        ("payload binary", {"topic": "x/#"}, "option topic: 'x/#': the topic contains a wildcard"),
        ("topic string, payload binary, qos string", {}, "column qos: is string .byte or short or integer or long"),
        ("topic string, payload binary, retain int", {}, "column retain: is int .boolean"),
        ("topic string, payload binary, retian boolean", {}, "column retian: cannot be published .known are topic"),
        ("topic string, payload binary, properties string", {}, "column properties: is string .binary"),
        ("topic string, payload binary", {"qos": "3"}, "option qos: '3' is not allowed .a number from 0 to 2"),
        ("topic string, payload binary", {"port": "mqtt"}, "option port: 'mqtt' is not allowed"),
        ("topic string, payload binary", {"hots": "x"}, "option hots: there is no such option"),
    ],
)
def test_wrong_columns_and_options_are_told(schema: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Publication.of(options, StructType.fromDDL(schema), overwrite=False)
