"""mqtt.js against the broker."""

from __future__ import annotations

import pytest

MEGABYTE = "".join(chr(i * 7 % 256) for i in range(1 << 20))


def ready(peer, *filters, **options):
    """Waits for the CONNACK and subscribes."""
    connack = peer.wait("connect")
    if filters:
        peer.do("subscribe", filters=list(filters), options=options or {"qos": 2})
        peer.wait("subscribed")
    return connack


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_go_through_with_every_qos(mqttjs, unique, version, qos):
    sub, pub = mqttjs(unique + "-s", version), mqttjs(unique + "-p", version)
    ready(sub, unique + "/#")
    ready(pub)
    for i in range(5):
        pub.do("publish", topic=f"{unique}/{i}", payload=f"m{i}", options={"qos": qos})
    got = [sub.wait("message") for _ in range(5)]
    assert [(m["topic"], m["payload"], m["qos"]) for m in got] == [(f"{unique}/{i}", f"m{i}", qos) for i in range(5)]
    for _ in range(5):
        pub.wait("published")


@pytest.mark.req("S4.2")
@pytest.mark.parametrize("version", [4, 5])
def test_a_session_gets_what_it_missed(mqttjs, client, unique, version):
    session = {"clean": False}
    if version == 5:
        session["properties"] = {"sessionExpiryInterval": 600}
    sub = mqttjs(unique, version, **session)
    assert not ready(sub, unique)["sessionPresent"]
    sub.do("end")
    sub.wait("ended")
    pub = client(unique + "-p", 5)
    for payload in (b"one", b"two"):
        pub.publish(unique, payload, 1)
    again = mqttjs(unique, version, **session)
    assert again.wait("connect")["sessionPresent"]
    assert [again.wait("message")["payload"] for _ in range(2)] == ["one", "two"]
    again.do("end")
    again.wait("ended")
    client(unique)  # ends the session


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_dropped_client_leaves_its_will(mqttjs, unique, version):
    watcher = mqttjs(unique + "-w", 5)
    ready(watcher, unique + "/will")
    will = {"topic": unique + "/will", "payload": "gone", "qos": 1, "retain": False}
    if version == 5:
        will["properties"] = {"contentType": "text/plain", "userProperties": {"k": "v"}, "willDelayInterval": 0}
    dropping = mqttjs(unique, version, will=will)
    ready(dropping)
    dropping.do("drop")
    got = watcher.wait("message")
    assert (got["payload"], got["qos"]) == ("gone", 1)
    if version == 5:
        assert (got["properties"]["contentType"], got["properties"]["userProperties"]) == ("text/plain", {"k": "v"})


def test_retained_messages_and_retain_handling(mqttjs, client, unique):
    peer = mqttjs(unique)
    ready(peer)
    peer.do("publish", topic=unique, payload="kept", options={"qos": 1, "retain": True})
    peer.wait("published")
    peer.do("subscribe", filters=[unique], options={"qos": 1, "rh": 2, "rap": True})
    peer.wait("subscribed")
    peer.do("publish", topic=unique, payload="new", options={"qos": 1, "retain": True})
    got = peer.wait("message")
    assert (got["payload"], got["retain"]) == ("new", True)
    late = mqttjs(unique + "-late")
    ready(late, unique)
    assert late.wait("message")["payload"] == "new"
    client(unique + "-c").publish(unique, b"", 1, True)


def test_v5_properties_arrive(mqttjs, unique):
    sub, pub = mqttjs(unique + "-s"), mqttjs(unique + "-p")
    ready(sub, unique, qos=1, properties={"subscriptionIdentifier": 42})
    ready(pub)
    properties = {
        "payloadFormatIndicator": True,
        "messageExpiryInterval": 1000,
        "contentType": "text/plain",
        "responseTopic": "answer/here",
        "correlationData": "\x00\xff id",
        "userProperties": {"b": ["1", "3"], "a": "2"},
    }
    pub.do("publish", topic=unique, payload="text", options={"qos": 1, "properties": properties})
    got = sub.wait("message")["properties"]
    assert got.pop("subscriptionIdentifier") == 42
    assert got == properties


def test_a_request_gets_its_response(mqttjs, unique):
    """4.10: response topic and correlation data"""
    asking, answering = mqttjs(unique + "-q"), mqttjs(unique + "-a")
    ready(asking, unique + "/answers")
    ready(answering, unique + "/questions")
    asked = {"responseTopic": unique + "/answers", "correlationData": "q1"}
    asking.do("publish", topic=unique + "/questions", payload="?", options={"qos": 1, "properties": asked})
    question = answering.wait("message")["properties"]
    reply = {"correlationData": question["correlationData"]}
    answering.do("publish", topic=question["responseTopic"], payload="!", options={"qos": 1, "properties": reply})
    answer = asking.wait("message")
    assert (answer["payload"], answer["properties"]["correlationData"]) == ("!", "q1")


def test_topic_aliases_in_both_directions(mqttjs, unique):
    """mqtt.js assigns aliases by itself, up to what the CONNACK allows, and resolves those it is sent."""
    sub = mqttjs(unique + "-s", properties={"topicAliasMaximum": 3})
    pub = mqttjs(unique + "-p", autoAssignTopicAlias=True)
    ready(sub, unique + "/#")
    assert ready(pub)["properties"]["topicAliasMaximum"] > 0
    sent = [f"{unique}/{i % 5}" for i in range(20)]
    for topic in sent:
        pub.do("publish", topic=topic, payload=topic, options={"qos": 1})
    got = [sub.wait("message") for _ in sent]
    assert [(m["topic"], m["payload"]) for m in got] == [(t, t) for t in sent]


def test_shared_subscriptions_divide_the_messages(mqttjs, client, unique):
    subs = [mqttjs(f"{unique}-{i}", version) for i, version in enumerate((5, 4))]
    for sub in subs:
        ready(sub, f"$share/g/{unique}")
    pub = client(unique + "-p", 5)
    for i in range(10):
        pub.publish(unique, b"%d" % i, 1)
    received = [sub.wait("message")["payload"] for sub in subs for _ in range(5)]
    assert sorted(map(int, received)) == list(range(10))


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", [4, 5])
def test_going_back_in_time_by_filter(mqttjs, client, unique, version):
    pub = client(unique + "-p", 5)
    for payload in (b"one", b"two"):
        pub.publish(unique, payload, 1)
    sub = mqttjs(unique, version)
    ready(sub, f"$replay/earliest/{unique}")
    assert [sub.wait("message")["payload"] for _ in range(2)] == ["one", "two"]
    pub.publish(unique, b"three", 1)
    assert sub.wait("message")["payload"] == "three"


@pytest.mark.req("S3.12")
def test_going_back_in_time_by_user_property(mqttjs, client, unique):
    client(unique + "-p", 5).publish(unique, b"one", 1)
    sub = mqttjs(unique)
    ready(sub, unique, qos=1, properties={"userProperties": {"tidegate-from": "earliest"}})
    got = sub.wait("message")
    assert got["payload"] == "one"
    assert {"tidegate-position", "tidegate-time"} <= set(got["properties"]["userProperties"])


@pytest.mark.parametrize("version", [4, 5])
def test_a_megabyte_goes_through(mqttjs, unique, version):
    peer = mqttjs(unique, version)
    ready(peer, unique)
    peer.do("publish", topic=unique, payload=MEGABYTE, options={"qos": 1})
    assert peer.wait("message")["payload"] == MEGABYTE


def test_a_flood_within_the_receive_maximum_loses_nothing(mqttjs, unique):
    """mqtt.js holds publishes back at the CONNACK's receive maximum, and the broker at the CONNECT's."""
    sub = mqttjs(unique + "-s", properties={"receiveMaximum": 5})
    pub = mqttjs(unique + "-p")
    ready(sub, unique)
    ready(pub)
    for i in range(500):
        pub.do("publish", topic=unique, payload=str(i), options={"qos": 2})
    assert [int(sub.wait("message")["payload"]) for _ in range(500)] == list(range(500))


@pytest.mark.req("S4.1", "S4.2")
@pytest.mark.parametrize("version", [4, 5])
def test_a_client_reconnects_by_itself_after_a_crash_of_the_broker(mqttjs, start_broker, unique, version):
    broker = start_broker("fsync")
    session = {"clean": False, "reconnectPeriod": 100, "resubscribe": False}
    if version == 5:
        session["properties"] = {"sessionExpiryInterval": 600}
    peer = mqttjs(unique, version, broker.port, **session)
    ready(peer, unique)
    broker.kill()
    peer.wait("close")
    peer.do("publish", topic=unique, payload="kept by the client until the broker is back", options={"qos": 1})
    broker.start()
    assert peer.wait("connect")["sessionPresent"]
    assert peer.wait("message")["payload"].startswith("kept by the client")


def test_a_clean_stop_is_told(mqttjs, start_broker, unique):
    broker = start_broker("memory")
    peer = mqttjs(unique, 5, broker.port)
    ready(peer)
    broker.stop()
    assert peer.wait("disconnect")["reasonCode"] == 0x8B


def test_a_takeover_is_told(mqttjs, unique):
    first = mqttjs(unique)
    ready(first)
    ready(mqttjs(unique))
    assert first.wait("disconnect")["reasonCode"] == 0x8E
