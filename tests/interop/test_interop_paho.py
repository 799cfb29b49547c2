"""paho-mqtt against the broker: MQTT 3.1, 3.1.1 and 5."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

VERSIONS = (paho.MQTTv31, paho.MQTTv311, paho.MQTTv5)
TIMEOUT_S = 20.0


def properties(kind: int, **values: Any) -> Properties:
    made = Properties(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def lasting() -> Properties:
    return properties(PacketTypes.CONNECT, SessionExpiryInterval=600)


class Peer:
    """A paho client with its network thread; what it is told becomes queues."""

    def __init__(self, port: int, client_id: str, version: int, *, clean: bool = True, **options: Any) -> None:
        self.v5 = version == paho.MQTTv5
        session = {} if self.v5 else {"clean_session": clean}
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id, protocol=version, **session)
        self.connected: queue.Queue[Any] = queue.Queue()
        self.disconnected: queue.Queue[Any] = queue.Queue()
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.granted: queue.Queue[Any] = queue.Queue()
        self.unsubscribed: queue.Queue[Any] = queue.Queue()
        self.published: queue.Queue[Any] = queue.Queue()
        self.client.on_connect = lambda c, u, flags, reason, props: self.connected.put((flags, reason, props))
        self.client.on_disconnect = lambda c, u, flags, reason, props: self.disconnected.put(reason)
        self.client.on_message = lambda c, u, message: self.messages.put(message)
        self.client.on_subscribe = lambda c, u, mid, reasons, props: self.granted.put(reasons)
        self.client.on_unsubscribe = lambda c, u, mid, reasons, props: self.unsubscribed.put(reasons)
        self.client.on_publish = lambda c, u, mid, reason, props: self.published.put(reason)
        if will := options.pop("will", None):
            self.client.will_set(**will)
        start = {"clean_start": clean, **options} if self.v5 else options
        self.client.reconnect_delay_set(1, 1)
        self.client.connect("127.0.0.1", port, **start)
        self.client.loop_start()
        self.flags, self.reason, self.told = self.connected.get(timeout=TIMEOUT_S)

    def subscribe(self, *arguments: Any, **options: Any) -> list[int]:
        self.client.subscribe(*arguments, **options)
        return [reason.value for reason in self.granted.get(timeout=TIMEOUT_S)]

    def publish(self, topic: str, payload: bytes | str, qos: int = 1, **options: Any) -> None:
        """Returns when the flow is over."""
        self.client.publish(topic, payload, qos, **options).wait_for_publish(TIMEOUT_S)

    def message(self) -> paho.MQTTMessage:
        return self.messages.get(timeout=TIMEOUT_S)

    def payloads(self, count: int) -> list[bytes]:
        return [self.message().payload for _ in range(count)]

    def drop(self) -> None:
        """End the connection without a DISCONNECT, for good."""
        self.client.loop_stop()
        self.client.socket().close()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def peer(shared_broker) -> Iterator[Callable[..., Peer]]:
    """Connects paho clients; disconnects them with the test."""
    started: list[Peer] = []

    def connect(client_id: str, version: int = paho.MQTTv5, *, port: int = 0, **options: Any) -> Peer:
        started.append(Peer(port or shared_broker.port, client_id, version, **options))
        return started[-1]

    yield connect
    for one in started:
        one.close()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_go_through_with_every_qos(peer, unique, version, qos):
    sub, pub = peer(unique + "-s", version), peer(unique + "-p", version)
    assert sub.subscribe(unique + "/#", 2) == [2]
    for i in range(10):
        pub.publish(f"{unique}/{i}", b"%d" % i, qos)
    got = [sub.message() for _ in range(10)]
    assert [(m.topic, m.payload, m.qos) for m in got] == [(f"{unique}/{i}", b"%d" % i, qos) for i in range(10)]


@pytest.mark.parametrize("publisher", VERSIONS)
@pytest.mark.parametrize("subscriber", VERSIONS)
def test_versions_mix(peer, unique, publisher, subscriber):
    sub = peer(unique + "-s", subscriber)
    sub.subscribe(unique, 2)
    peer(unique + "-p", publisher).publish(unique, "hello", 2)
    assert sub.message().payload == b"hello"


@pytest.mark.req("S4.2")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_gets_what_it_missed(peer, client, unique, version):
    session = {"clean": False, **({"properties": lasting()} if version == paho.MQTTv5 else {})}
    sub = peer(unique, version, **session)
    sub.subscribe(unique + "/+", 2)
    sub.close()
    pub = peer(unique + "-p")
    for i in range(20):
        pub.publish(f"{unique}/{i % 3}", b"%d" % i, 2)
    again = peer(unique, version, **session)
    assert [int(p) for p in again.payloads(20)] == list(range(20))
    assert again.flags.session_present == (version != paho.MQTTv31)  # 3.1 has no such flag
    again.close()
    client(unique)  # ends the session


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_dropped_client_leaves_its_will(peer, unique, version):
    watcher = peer(unique + "-w")
    watcher.subscribe(unique, 1)
    peer(unique, version, will={"topic": unique, "payload": "gone", "qos": 1}).drop()
    assert watcher.message().payload == b"gone"


def test_a_delayed_will_comes_with_its_properties(peer, client, unique):
    watcher = peer(unique + "-w")
    watcher.subscribe(unique, 1)
    sent = properties(PacketTypes.WILLMESSAGE, WillDelayInterval=1, ContentType="text/plain", UserProperty=[("k", "v")])
    will = {"topic": unique, "payload": "gone", "qos": 1, "properties": sent}
    peer(unique, clean=True, properties=lasting(), will=will).drop()
    got = watcher.message().properties
    assert (got.ContentType, got.UserProperty) == ("text/plain", [("k", "v")])
    client(unique)  # ends the session


@pytest.mark.parametrize("version", VERSIONS)
def test_retained_messages_stay_and_are_removed(peer, unique, version):
    pub, sub = peer(unique + "-p", version), peer(unique + "-s", version)
    pub.publish(unique + "/r", "kept", 1, retain=True)
    sub.subscribe(unique + "/#", 1)
    got = sub.message()
    assert (got.payload, got.retain) == (b"kept", True)
    pub.publish(unique + "/r", b"", 1, retain=True)
    late = peer(unique + "-l", version)
    late.subscribe(unique + "/#", 1)
    pub.publish(unique + "/live", "live", 1)
    assert late.message().payload == b"live"


def test_v5_properties_arrive(peer, unique):
    sub, pub = peer(unique + "-s"), peer(unique + "-p")
    sub.subscribe(
        unique, options=SubscribeOptions(qos=1), properties=properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=9)
    )
    sent = properties(
        PacketTypes.PUBLISH, PayloadFormatIndicator=1, MessageExpiryInterval=1000, ContentType="text/plain",
        ResponseTopic="answer/here", CorrelationData=b"\x00\xff", UserProperty=[("b", "1"), ("a", "2"), ("b", "3")],
    )  # fmt: skip
    pub.publish(unique, "text", 1, properties=sent)
    got = sub.message().properties.json()
    assert got.pop("SubscriptionIdentifier") == [9]
    assert got == sent.json()


def test_subscription_options_hold(peer, unique):
    both = peer(unique)
    options = SubscribeOptions(qos=1, noLocal=True, retainAsPublished=True, retainHandling=2)
    pub = peer(unique + "-p")
    pub.publish(unique, "old", 1, retain=True)
    both.subscribe(unique, options=options)
    both.publish(unique, "own", 1)
    pub.publish(unique, "new", 1, retain=True)
    got = both.message()
    assert (got.payload, got.retain) == (b"new", True)
    pub.publish(unique, b"", 1, retain=True)


def test_topic_aliases_stand_for_topics(peer, unique):
    sub, pub = peer(unique + "-s"), peer(unique + "-p")
    assert pub.told.TopicAliasMaximum > 0
    sub.subscribe(unique, 1)
    alias = properties(PacketTypes.PUBLISH, TopicAlias=1)
    pub.publish(unique, "named", 1, properties=alias)
    pub.publish("", "aliased", 1, properties=alias)
    assert [(m.topic, m.payload) for m in (sub.message(), sub.message())] == [(unique, b"named"), (unique, b"aliased")]


@pytest.mark.parametrize("version", VERSIONS)
def test_shared_subscriptions_divide_the_messages(peer, unique, version):
    subs = [peer(f"{unique}-{i}", version) for i in range(2)]
    for sub in subs:
        sub.subscribe(f"$share/g/{unique}", 1)
    pub = peer(unique + "-p")
    for i in range(20):
        pub.publish(unique, b"%d" % i, 1)
    assert sorted(int(p) for sub in subs for p in sub.payloads(10)) == list(range(20))


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", VERSIONS)
def test_any_client_can_go_back_in_time(peer, unique, version):
    pub = peer(unique + "-p")
    for i in range(5):
        pub.publish(f"{unique}/{i}", b"%d" % i, i % 3)
    sub = peer(unique + "-s", version)
    sub.subscribe(f"$replay/earliest/{unique}/#", 2)
    pub.publish(unique + "/live", b"5", 1)
    assert sorted(int(p) for p in sub.payloads(6)) == list(range(6))


@pytest.mark.req("S3.12")
def test_a_replay_can_begin_at_a_position_seen_before(peer, unique):
    pub, first = peer(unique + "-p"), peer(unique + "-a")
    for i in range(5):
        pub.publish(unique, b"%d" % i, 1)
    first.subscribe(f"$replay/earliest/{unique}", 1)
    positions = [dict(first.message().properties.UserProperty)["tidegate-position"] for _ in range(5)]
    second = peer(unique + "-b")
    second.subscribe(f"$replay/{positions[3]}/{unique}", 1)
    assert second.payloads(2) == [b"3", b"4"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_megabyte_goes_through(peer, unique, version):
    both = peer(unique, version)
    both.subscribe(unique, 2)
    payload = bytes(i * 7 % 256 for i in range(1 << 20))
    both.publish(unique, payload, 2)
    assert both.message().payload == payload


def test_many_topics(peer, unique):
    sub, pub = peer(unique + "-s"), peer(unique + "-p")
    sub.subscribe(unique + "/+/+/value", 1)
    sent = [f"{unique}/{i % 50}/{i}/value" for i in range(2000)]
    for topic in sent:
        pub.client.publish(topic, topic, 1)
    got = [sub.message() for _ in sent]
    assert [m.topic for m in got] == sent
    assert all(m.topic.encode() == m.payload for m in got)


@pytest.mark.req("S4.1", "S4.2")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_reconnects_by_itself_after_a_crash_of_the_broker(peer, start_broker, version):
    broker = start_broker("fsync")
    session = {"clean": False, **({"properties": lasting()} if version == paho.MQTTv5 else {})}
    both = peer("c", version, port=broker.port, **session)
    both.subscribe("t", 2)
    both.publish("t", "before", 2)
    assert both.message().payload == b"before"
    broker.kill()
    both.disconnected.get(timeout=TIMEOUT_S)
    both.client.publish("t", "kept by the client", 2)
    broker.start()
    both.connected.get(timeout=TIMEOUT_S)
    assert both.message().payload == b"kept by the client"


def test_reasons_reach_the_client(peer, unique):
    both = peer(unique)
    assert both.subscribe([("$unknown/a", SubscribeOptions(qos=1)), (unique, SubscribeOptions(qos=1))]) == [0x8F, 1]
    both.client.unsubscribe([unique, unique + "/never"])
    assert [r.value for r in both.unsubscribed.get(timeout=TIMEOUT_S)] == [0, 0x11]
    both.client.publish(unique, "to nobody", 1)
    assert both.published.get(timeout=TIMEOUT_S).value == 0x10


def test_a_takeover_is_told(peer, unique):
    first = peer(unique)
    second = peer(unique)
    assert first.disconnected.get(timeout=TIMEOUT_S).value == 0x8E
    first.client.loop_stop()
    second.close()


def test_a_name_is_assigned(peer):
    assert peer("").told.AssignedClientIdentifier
