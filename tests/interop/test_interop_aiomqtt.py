"""aiomqtt against the broker."""

from __future__ import annotations

import asyncio
import contextlib

import aiomqtt
import pytest
from aiomqtt import ProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

VERSIONS = (ProtocolVersion.V31, ProtocolVersion.V311, ProtocolVersion.V5)
TIMEOUT_S = 20.0


def properties(kind: int, **values) -> Properties:
    made = Properties(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def lasting() -> Properties:
    return properties(PacketTypes.CONNECT, SessionExpiryInterval=600)


@pytest.fixture
def connect(shared_broker, unique):
    def make(name: str = "", version: ProtocolVersion = ProtocolVersion.V5, **options) -> aiomqtt.Client:
        return aiomqtt.Client(
            "127.0.0.1", shared_broker.port, identifier=unique + name, protocol=version, timeout=TIMEOUT_S, **options
        )

    return make


async def receive(client: aiomqtt.Client, count: int) -> list[aiomqtt.Message]:
    async with asyncio.timeout(TIMEOUT_S):
        got = []
        async for message in client.messages:
            got.append(message)
            if len(got) == count:
                break
        return got


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_messages_go_through_with_every_qos(connect, unique, version, qos):
    async with connect("-s", version) as sub, connect("-p", version) as pub:
        await sub.subscribe(unique + "/#", qos=2)
        for i in range(10):
            await pub.publish(f"{unique}/{i}", b"%d" % i, qos)
        got = await receive(sub, 10)
    assert [(str(m.topic), m.payload, m.qos) for m in got] == [(f"{unique}/{i}", b"%d" % i, qos) for i in range(10)]


@pytest.mark.req("S4.2")
@pytest.mark.parametrize("version", [ProtocolVersion.V311, ProtocolVersion.V5])
async def test_a_session_gets_what_it_missed(connect, client, unique, version):
    if version is ProtocolVersion.V5:
        session = {"clean_start": False, "properties": lasting()}
    else:
        session = {"clean_session": False}
    async with connect("-s", version, **session) as sub:
        await sub.subscribe(unique, qos=1)
    async with connect("-p") as pub:
        for payload in (b"one", b"two"):
            await pub.publish(unique, payload, 1)
    async with connect("-s", version, **session) as sub:
        assert [m.payload for m in await receive(sub, 2)] == [b"one", b"two"]
    client(unique + "-s")  # ends the session


@pytest.mark.req("S0.20")
async def test_a_client_that_disconnects_leaves_no_will_and_one_that_drops_does(connect, unique):
    async with connect("-w") as watcher:
        await watcher.subscribe(unique, qos=1)
        async with connect("-polite", will=aiomqtt.Will(unique, b"polite", 1)):
            pass
        rude = connect("-rude", will=aiomqtt.Will(unique, b"rude", 1))
        await rude.__aenter__()
        rude._client.socket().shutdown(2)
        assert (await receive(watcher, 1))[0].payload == b"rude"
        with contextlib.suppress(aiomqtt.MqttError):
            await rude.__aexit__(None, None, None)


async def test_v5_properties_arrive(connect, unique):
    async with connect("-s") as sub, connect("-p") as pub:
        await sub.subscribe(
            unique, options=SubscribeOptions(qos=1),
            properties=properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=7),
        )  # fmt: skip
        sent = properties(
            PacketTypes.PUBLISH, PayloadFormatIndicator=1, MessageExpiryInterval=1000, ContentType="text/plain",
            ResponseTopic="answer/here", CorrelationData=b"\x00\xff", UserProperty=[("b", "1"), ("a", "2"), ("b", "3")],
        )  # fmt: skip
        await pub.publish(unique, b"text", 1, properties=sent)
        got = (await receive(sub, 1))[0].properties.json()
    assert got.pop("SubscriptionIdentifier") == [7]
    assert got == sent.json()


async def test_shared_subscriptions_divide_the_messages(connect, unique):
    async with connect("-a") as one, connect("-b") as two, connect("-p") as pub:
        for sub in (one, two):
            await sub.subscribe(f"$share/g/{unique}", qos=1)
        for i in range(20):
            await pub.publish(unique, b"%d" % i, 1)
        received = await receive(one, 10) + await receive(two, 10)
    assert sorted(int(m.payload) for m in received) == list(range(20))


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", VERSIONS)
async def test_going_back_in_time(connect, unique, version):
    async with connect("-s", version) as sub, connect("-p") as pub:
        for i in range(3):
            await pub.publish(unique, b"%d" % i, 1)
        await sub.subscribe(f"$replay/earliest/{unique}", qos=1)
        await pub.publish(unique, b"3", 1)
        assert [m.payload for m in await receive(sub, 4)] == [b"0", b"1", b"2", b"3"]


async def test_many_topics_and_a_megabyte(connect, unique):
    async with connect("-s", max_queued_incoming_messages=0) as sub, connect("-p") as pub:
        await sub.subscribe(unique + "/+/value", qos=1)
        await asyncio.gather(*(pub.publish(f"{unique}/{i}/value", b"%d" % i, 1) for i in range(500)))
        assert {m.payload for m in await receive(sub, 500)} == {b"%d" % i for i in range(500)}
        await pub.publish(unique + "/large/value", bytes(1 << 20), 1)
        assert (await receive(sub, 1))[0].payload == bytes(1 << 20)


async def test_publishes_from_many_tasks_all_arrive(connect, unique):
    async with connect("-s") as sub, connect("-p", max_concurrent_outgoing_calls=200) as pub:
        await sub.subscribe(unique, qos=2)
        await asyncio.gather(*(pub.publish(unique, b"%d" % i, i % 3) for i in range(150)))
        assert {int(m.payload) for m in await receive(sub, 150)} == set(range(150))


async def test_a_refused_subscription_is_told(connect, unique):
    async with connect() as peer:
        granted = await peer.subscribe([("$unknown/a", SubscribeOptions(qos=1)), (unique, SubscribeOptions(qos=1))])
    assert [code.value for code in granted] == [0x8F, 1]
