"""PUBLISH: the three flows, what is passed on, what expires, what is refused, what is retained."""

from __future__ import annotations

import time

import pytest

from harness import RawClient
from tidegate.wire import (
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Reason,
    encode_message_properties,
)


@pytest.fixture
def pair(client, unique):
    """A v5 publisher, and a v5 subscriber of everything below `unique`, of which there is nothing yet."""
    sub, pub = client(unique + "-sub", 5), client(unique + "-pub", 5)
    sub.subscribe(unique + "/#", qos=2)
    return pub, sub


# ── the flows ──


@pytest.mark.parametrize("version", [3, 4, 5])
def test_qos_1_is_answered_by_puback_and_qos_2_by_pubrec_and_pubcomp(client, unique, version):
    """[MQTT-3.3.4-1], [MQTT-4.3.2-4], [MQTT-4.3.3-8]"""
    pub = client(unique, version)
    client(unique + "-s", 5).subscribe(unique, qos=2)
    pub.send(Publish(unique.encode(), b"", 1, packet_id=300))
    assert pub.expect(Puback) == Puback(300)
    pub.send(Publish(unique.encode(), b"", 2, packet_id=301))
    assert pub.expect(Pubrec) == Pubrec(301)
    pub.send(Pubrel(301))
    assert pub.expect(Pubcomp) == Pubcomp(301)


@pytest.mark.parametrize("qos", [1, 2])
def test_a_publisher_hears_when_nobody_subscribed(client, unique, qos):
    """3.4.2.1, 3.5.2.1: 0x10"""
    assert client(unique, 5).publish(unique, b"", qos) == Reason.NO_MATCHING_SUBSCRIBERS


def test_an_absent_session_counts_as_a_subscriber(client, lasting, unique):
    away = lasting(unique + "-s")
    away.subscribe(unique, qos=1)
    away.close()
    assert client(unique, 5).publish(unique, b"", 1) == 0


@pytest.mark.parametrize("qos", [1, 2])
def test_a_v3_publisher_hears_no_reason(client, unique, qos):
    pub = client(unique, 4)
    pub.publish(unique, b"", qos, wait=False)
    assert pub.receive().reason == 0


def test_the_dup_flag_is_not_passed_on(pair, unique):
    """[MQTT-3.3.1-3]"""
    pub, sub = pair
    pub.publish(unique + "/t", b"m", 1, dup=True)
    assert not sub.message().dup


@pytest.mark.parametrize("sent", [0, 1, 2])
@pytest.mark.parametrize("granted", [0, 1, 2])
def test_the_delivery_has_the_lower_of_both_qos(client, unique, sent, granted):
    """[MQTT-3.8.4-8]"""
    sub = client(unique + "-s", 4)
    sub.subscribe(unique, qos=granted)
    client(unique, 5).publish(unique, b"m", sent)
    assert sub.message().qos == min(sent, granted)


@pytest.mark.req("S2.10", "S2.17")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_stay_in_order(pair, unique, qos):
    """[MQTT-4.6.0-5], [MQTT-4.6.0-6]"""
    pub, sub = pair
    for i in range(100):
        pub.publish(unique + "/t", b"%d" % i, qos)
    assert [int(p) for p in sub.payloads(100)] == list(range(100))


def test_an_empty_payload_is_a_message(pair, unique):
    """3.3.3"""
    pub, sub = pair
    pub.publish(unique + "/t", b"", 1)
    assert sub.message().payload == b""


def test_payloads_are_any_bytes(pair, unique):
    pub, sub = pair
    pub.publish(unique + "/t", bytes(range(256)), 1)
    assert sub.message().payload == bytes(range(256))


@pytest.mark.parametrize("topic", ["/", "//", "/a", "a/", "a b", "ünïcödé/☃", "\ufeffbom", "a/$b"])
def test_topics_are_used_as_they_are(client, unique, topic):
    """[MQTT-4.7.3-4], [MQTT-1.5.4-3]"""
    sub, pub = client(unique + "-s", 5), client(unique, 5)
    sub.subscribe(topic)
    pub.publish(topic, unique)
    assert sub.message() == Publish(topic.encode(), unique.encode())


# ── what is passed on unchanged ──

ALL_PASSED_ON = Properties(
    payload_format=1,
    content_type="application/sæmple".encode(),
    response_topic=b"answers/here",
    correlation_data=bytes(range(256)),
    user=((b"b", b"1"), (b"a", b"2"), (b"b", b"1"), (b"", b"")),
)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_properties_are_passed_on_unchanged(pair, unique, qos):
    """[MQTT-3.3.2-4], [MQTT-3.3.2-15], [MQTT-3.3.2-16], [MQTT-3.3.2-17], [MQTT-3.3.2-20]"""
    pub, sub = pair
    pub.publish(unique + "/t", b"text", qos, properties=ALL_PASSED_ON)
    assert sub.message().properties == ALL_PASSED_ON


def test_user_properties_keep_their_order_among_the_others(pair, unique):
    """[MQTT-3.3.2-18]"""
    pub, sub = pair
    block = b"".join(
        encode_message_properties(p, b"", 3)
        for p in (
            Properties(user=((b"z", b"1"),)),
            Properties(content_type=b"c"),
            Properties(user=((b"a", b"2"),)),
            Properties(payload_format=0),
            Properties(user=((b"z", b"0"),)),
        )
    )
    pub.send(Publish(f"{unique}/t".encode(), b"m", 0, passed_on=block))
    assert sub.message().passed_on == block


def test_properties_reach_those_who_were_away(client, lasting, unique):
    away = lasting(unique + "-s")
    away.subscribe(unique, qos=1)
    away.close()
    client(unique, 5).publish(unique, b"text", 1, properties=ALL_PASSED_ON)
    assert lasting(unique + "-s").message().properties == ALL_PASSED_ON


def test_properties_of_retained_messages_are_kept(client, retain, unique):
    retain(unique, b"text", properties=ALL_PASSED_ON)
    late = client(unique + "-s", 5)
    late.subscribe(unique, qos=1)
    assert late.message().properties == ALL_PASSED_ON


@pytest.mark.parametrize("version", [3, 4])
def test_a_v3_subscriber_gets_the_message_without_its_properties(client, unique, version):
    sub = client(unique + "-s", version)
    sub.subscribe(unique, qos=1)
    client(unique, 5).publish(unique, b"text", 1, properties=ALL_PASSED_ON)
    assert sub.message() == Publish(unique.encode(), b"text", 1, packet_id=1)


def test_the_publishers_topic_alias_is_not_passed_on(pair, unique):
    pub, sub = pair
    pub.publish(unique + "/t", b"m", properties=Properties(topic_alias=3))
    assert sub.message().properties.topic_alias is None


# ── payload format ──


@pytest.mark.parametrize("qos", [1, 2])
def test_a_payload_that_is_not_the_utf8_it_claims_is_refused(client, unique, qos):
    """3.3.2.3.2: 0x99"""
    pub = client(unique, 5)
    assert pub.publish(unique, b"\xff", qos, properties=Properties(payload_format=1)) == Reason.PAYLOAD_FORMAT_INVALID


def test_a_refused_payload_is_delivered_to_nobody(pair, unique):
    pub, sub = pair
    for qos in (0, 1, 2):
        pub.publish(unique + "/t", b"\xc3\x28", qos, properties=Properties(payload_format=1))
    pub.publish(unique + "/t", b"good", 1)
    assert sub.message().payload == b"good"


def test_a_refused_qos_2_message_leaves_its_id_free(pair, unique):
    """[MQTT-4.3.3-9]: a PUBREC of 0x80 or more ends the flow"""
    pub, sub = pair
    pub.publish(unique + "/t", b"\xff", 2, packet_id=8, properties=Properties(payload_format=1))
    pub.publish(unique + "/t", b"good", 2, packet_id=8)
    assert sub.message().payload == b"good"


def test_bytes_that_claim_nothing_are_not_looked_at(pair, unique):
    pub, sub = pair
    pub.publish(unique + "/t", b"\xff", 1, properties=Properties(payload_format=0))
    assert sub.message().payload == b"\xff"


def test_the_check_can_be_turned_off(start_broker):
    broker = start_broker("memory", mqtt__check_payload_format="false")
    with RawClient(broker.port, 5) as pub:
        pub.connect("p")
        pub.subscribe("t", qos=1)
        assert pub.publish("t", b"\xff", 1, properties=Properties(payload_format=1)) == 0


# ── reason strings ──


def test_refusals_come_with_a_reason_string(client, unique):
    """3.4.2.2.2"""
    pub = client(unique, 5)
    pub.publish(unique, b"\xff", 1, properties=Properties(payload_format=1), wait=False)
    assert b"UTF-8" in pub.expect(Puback).properties.reason_string


def test_who_does_not_want_problem_information_gets_none(client, unique):
    """[MQTT-3.1.2-29]"""
    pub = client(unique, 5, properties=Properties(request_problem_info=False))
    pub.publish(unique, b"\xff", 1, properties=Properties(payload_format=1), wait=False)
    assert pub.expect(Puback).properties == Properties()
    pub.publish(unique, b"\xff", 2, properties=Properties(payload_format=1), wait=False)
    assert pub.expect(Pubrec).properties == Properties()
    assert pub.subscribe("$replay/nowhen/a").properties == Properties()


def test_problem_information_does_not_touch_the_properties_of_messages(client, unique):
    """[MQTT-3.1.2-29] excepts PUBLISH"""
    sub = client(unique, 5, properties=Properties(request_problem_info=False))
    sub.subscribe(unique)
    client(unique + "-p", 5).publish(unique, b"text", properties=ALL_PASSED_ON)
    assert sub.message().properties == ALL_PASSED_ON


# ── message expiry (3.3.2.3.3) ──


def test_an_expiry_is_passed_on(pair, unique):
    """[MQTT-3.3.2-6]"""
    pub, sub = pair
    pub.publish(unique + "/t", b"m", 1, properties=Properties(message_expiry=1000))
    assert sub.message().properties.message_expiry == 1000


@pytest.mark.req("S4.13")
@pytest.mark.attack("C8")
def test_waiting_uses_up_the_expiry_and_in_the_end_the_message(client, lasting, retain, unique):
    """[MQTT-3.3.2-5], [MQTT-3.3.2-6]"""
    away = lasting(unique + "-s")
    away.subscribe(unique + "/t", qos=1)
    away.close()
    pub = client(unique, 5)
    pub.publish(unique + "/t", b"short", 1, properties=Properties(message_expiry=1))
    pub.publish(unique + "/t", b"long", 1, properties=Properties(message_expiry=1000))
    retain(unique + "/r/short", b"short", properties=Properties(message_expiry=1))
    retain(unique + "/r/long", b"long", properties=Properties(message_expiry=1000))
    time.sleep(1.3)
    got = lasting(unique + "-s").message()
    assert got.payload == b"long"
    assert 990 <= got.properties.message_expiry <= 999
    late = client(unique + "-late", 5)
    late.subscribe(unique + "/r/#", qos=1)
    got = late.message()
    assert got.payload == b"long"
    assert 990 <= got.properties.message_expiry <= 999
    late.nothing()


# ── retained messages (3.3.1.3) ──


@pytest.mark.req("S0.10", "S0.22")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_the_last_retained_message_is_sent_to_new_subscribers(client, retain, unique, version):
    """[MQTT-3.3.1-5]"""
    retain(unique, b"first")
    retain(unique, b"second")
    sub = client(unique + "-s", version)
    sub.subscribe(unique, qos=1)
    got = sub.message()
    assert (got.payload, got.retain, got.qos) == (b"second", True, 1)
    sub.nothing()


@pytest.mark.req("S0.10")
@pytest.mark.parametrize("version", [4, 5])
def test_an_empty_retained_message_removes_the_last(client, retain, unique, version):
    """[MQTT-3.3.1-6], [MQTT-3.3.1-7]"""
    retain(unique, b"kept")
    client(unique, version).publish(unique, b"", 1, True)
    late = client(unique + "-s", version)
    late.subscribe(unique, qos=1)
    late.nothing()


def test_a_message_that_is_not_retained_leaves_the_retained_one_alone(client, retain, unique):
    """[MQTT-3.3.1-8]"""
    retain(unique, b"kept")
    client(unique, 5).publish(unique, b"passing", 1)
    late = client(unique + "-s", 5)
    late.subscribe(unique, qos=1)
    assert late.message().payload == b"kept"


@pytest.mark.parametrize("sent", [0, 1, 2])
@pytest.mark.parametrize("granted", [0, 1, 2])
def test_retained_messages_come_with_the_lower_of_both_qos(client, retain, unique, sent, granted):
    retain(unique, b"kept", sent)
    sub = client(unique + "-s", 5)
    sub.subscribe(unique, qos=granted)
    assert sub.message().qos == min(sent, granted)


def test_retained_messages_survive_kill_9(start_broker):
    broker = start_broker("fsync")
    with RawClient(broker.port, 5) as pub:
        pub.connect("p")
        pub.publish("r", b"text", 1, True, properties=ALL_PASSED_ON)
        pub.publish("gone", b"x", 1, True)
        pub.publish("gone", b"", 1, True)
    broker.kill()
    broker.start()
    with RawClient(broker.port, 5) as sub:
        sub.connect("s")
        sub.subscribe("#", qos=1)
        got = sub.message()
        assert (got.topic, got.retain, got.properties) == (b"r", True, ALL_PASSED_ON)
        sub.nothing()


# ── topics of the broker's own ──


@pytest.mark.attack("A9")
@pytest.mark.parametrize("topic", ["$SYS/broker/uptime", "$share/g/a", "$replay/earliest/a", "$other"])
@pytest.mark.parametrize("qos", [1, 2])
def test_broker_topics_cannot_be_published_to(client, topic, unique, qos):
    """4.7.2: clients should not use them; the answer is 0x90."""
    pub = client(unique, 5)
    # One with properties and one without: they take different ways through the broker.
    assert pub.publish(topic, b"forged", qos, properties=Properties(content_type=b"x")) == Reason.TOPIC_NAME_INVALID
    assert pub.publish(topic, b"forged", qos) == Reason.TOPIC_NAME_INVALID


@pytest.mark.attack("A9")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1])
def test_nobody_sees_what_was_published_to_a_broker_topic(client, unique, version, qos):
    sub = client(unique + "-s", 5)
    topic = f"$SYS/forged/{unique}"
    sub.subscribe(topic, unique, qos=1)
    pub = client(unique, version)
    pub.publish(topic, b"forged", qos)
    pub.publish(unique, b"mark", 1)
    assert sub.message().payload == b"mark"
