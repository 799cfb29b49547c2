"""SUBSCRIBE and UNSUBSCRIBE: answers, options, identifiers, overlaps."""

from __future__ import annotations

import pytest

from tidegate.wire import (
    Disconnect,
    FilterRequest,
    Properties,
    Puback,
    Pubrec,
    Reason,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)

# ── SUBACK and UNSUBACK ──


@pytest.mark.parametrize("version", [3, 4, 5])
def test_every_filter_gets_its_answer_in_order(client, unique, version):
    """[MQTT-3.8.4-1], [MQTT-3.8.4-2], [MQTT-3.8.4-6], [MQTT-3.8.4-7]"""
    raw = client(unique, version)
    raw.send(Subscribe(1234, tuple(FilterRequest(f"{unique}/{q}".encode(), q) for q in (2, 0, 1))))
    assert raw.expect(Suback) == Suback(1234, (2, 0, 1))


@pytest.mark.req("S1.9", "S1.10", "S1.11")
@pytest.mark.attack("A12")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("invalid", ["$unknown/a", "$replay/nowhen/a", "a/" * 200 + "a"])
def test_a_refused_filter_among_others_is_the_only_one_refused(client, unique, version, invalid):
    """[MQTT-3.8.4-5]"""
    raw = client(unique, version)
    suback = raw.subscribe(unique + "/a", invalid, unique + "/b", qos=1)
    assert suback.reasons == (1, Reason.TOPIC_FILTER_INVALID if version == 5 else 0x80, 1)
    pub = client(unique + "-p", 5)
    pub.publish(unique + "/a", b"a", 1)
    pub.publish(unique + "/b", b"b", 1)
    assert raw.payloads(2) == [b"a", b"b"]


MALFORMED = ["", "a/#/b", "a#", "a+", "+a/b", "##", "a/b+/c", "a\0b", "a\udc80b"]
MALFORMED_SHARED = ["$share/g", "$share/g/", "$share//a", "$share/+/a", "$share/g#/a", "$share/g/a#"]


@pytest.mark.req("S1.9", "S1.10", "S1.11")
@pytest.mark.attack("A12", "A14")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("packet", ["SUBSCRIBE", "UNSUBSCRIBE"])
@pytest.mark.parametrize("invalid", [*MALFORMED, *MALFORMED_SHARED])
def test_a_malformed_filter_ends_the_connection_and_none_beside_it_is_in_force(
    client, unique, version, packet, invalid
):
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.7.3-1], [MQTT-4.7.3-2], [MQTT-4.8.2-1], [MQTT-4.8.2-2]"""
    raw = client(unique, version)
    filters = [unique.encode(), invalid.encode(errors="surrogateescape")]
    if packet == "SUBSCRIBE":
        raw.send(Subscribe(1, tuple(FilterRequest(filter, 1) for filter in filters)))
    else:
        raw.send(Unsubscribe(1, tuple(filters)))
    told = raw.until_closed()
    if version == 5:
        assert [(type(p), p.reason, bool(p.properties.reason_string)) for p in told] == [(Disconnect, 0x81, True)]
    else:
        assert told == []
    assert client(unique + "-p", 5).publish(unique, b"", 1) == Reason.NO_MATCHING_SUBSCRIBERS


def test_a_refused_filter_comes_with_a_reason_string(client, unique):
    """3.9.2.1.2"""
    assert client(unique, 5).subscribe("$replay/nowhen/a").properties.reason_string


@pytest.mark.attack("A9")
def test_unknown_broker_topics_cannot_be_subscribed_to(client, unique):
    assert client(unique, 5).subscribe("$unknown/a", "$SYS/#").reasons == (Reason.TOPIC_FILTER_INVALID, 0)


@pytest.mark.req("S0.24")
def test_unsuback_tells_which_subscriptions_there_were(client, unique):
    """[MQTT-3.10.4-4], [MQTT-3.10.4-5], [MQTT-3.10.4-6], [MQTT-3.11.3-1]"""
    raw = client(unique, 5)
    raw.subscribe(unique + "/a", f"$share/g/{unique}")
    raw.send(
        Unsubscribe(99, (f"{unique}/a".encode(), f"{unique}/b".encode(), f"$share/g/{unique}".encode(), b"$unknown/a"))
    )
    answer = raw.expect(Unsuback)
    none = Reason.NO_SUBSCRIPTION_EXISTED
    assert (answer.packet_id, answer.reasons) == (99, (0, none, 0, none))


@pytest.mark.parametrize("version", [3, 4])
def test_v3_unsuback_comes_for_what_was_never_subscribed(client, unique, version):
    """3.1.1: [MQTT-3.10.4-5]"""
    raw = client(unique, version)
    assert raw.unsubscribe(unique + "/never") == Unsuback(1)


@pytest.mark.req("S0.24", "S0.2")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_after_unsuback_nothing_more_comes(client, unique, version):
    """[MQTT-3.10.4-2]"""
    sub, pub = client(unique, version), client(unique + "-p")
    sub.subscribe(unique, qos=1)
    pub.publish(unique, b"one", 1)
    sub.message()
    sub.unsubscribe(unique)
    pub.publish(unique, b"two", 1)
    sub.nothing()


def test_filters_are_unsubscribed_character_by_character(client, unique):
    """[MQTT-3.10.4-1]"""
    sub = client(unique, 5)
    sub.subscribe(unique + "/#")
    assert sub.unsubscribe(unique + "/+", unique).reasons == (Reason.NO_SUBSCRIPTION_EXISTED,) * 2
    client(unique + "-p").publish(unique + "/x", b"still", 1)
    assert sub.message().payload == b"still"


def test_unsubscribing_finishes_what_is_in_flight(client, unique):
    """[MQTT-3.10.4-3]"""
    sub, pub = client(unique, 5), client(unique + "-p")
    sub.subscribe(unique, qos=2)
    pub.publish(unique, b"m", 2)
    pid = sub.message(acknowledge=False).packet_id
    sub.unsubscribe(unique)
    sub.send(Pubrec(pid))
    assert sub.receive().packet_id == pid


# ── subscribing again ──


@pytest.mark.req("S1.8")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_subscribing_again_replaces_the_options(client, unique, version):
    """[MQTT-3.8.4-3]"""
    sub, pub = client(unique, version), client(unique + "-p")
    sub.subscribe(unique, qos=2)
    sub.subscribe(unique, qos=0)
    pub.publish(unique, b"m", 2)
    assert sub.message().qos == 0
    sub.nothing()


def test_subscribing_again_replaces_the_identifier(client, unique):
    """[MQTT-3.8.4-3]"""
    sub = client(unique, 5)
    for number in (1, 2):
        sub.subscribe(unique, properties=Properties(subscription_ids=(number,)))
    client(unique + "-p").publish(unique, b"m")
    assert sub.message().properties.subscription_ids == (2,)
    sub.subscribe(unique)
    client(unique + "-q").publish(unique, b"m")
    assert sub.message().properties.subscription_ids == ()


def test_subscribing_again_loses_nothing(client, lasting, unique):
    """[MQTT-3.8.4-3]: messages must not be lost by the replacement"""
    sub = lasting(unique)
    sub.subscribe(unique, qos=1)
    sub.close()
    pub = client(unique + "-p")
    pub.publish(unique, b"before", 1)
    sub = lasting(unique)
    sub.subscribe(unique, qos=1)
    pub.publish(unique, b"after", 1)
    assert sub.payloads(2) == [b"before", b"after"]


# ── overlapping subscriptions ──


@pytest.mark.req("S1.8")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_overlapping_subscriptions_deliver_once_with_the_highest_qos(client, unique, version):
    """[MQTT-3.3.4-2]"""
    sub = client(unique, version)
    sub.subscribe(unique + "/#", qos=0)
    sub.subscribe(unique + "/+", qos=2)
    sub.subscribe(unique + "/a", qos=1)
    client(unique + "-p").publish(unique + "/a", b"m", 2)
    assert sub.message().qos == 2
    sub.nothing()


def test_the_highest_qos_does_not_lift_the_messages_own(client, unique):
    sub = client(unique, 5)
    sub.subscribe(unique + "/#", qos=0)
    sub.subscribe(unique + "/+", qos=2)
    client(unique + "-p").publish(unique + "/a", b"m", 1)
    assert sub.message().qos == 1


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_carries_the_identifiers_of_all_that_match(client, unique, qos):
    """[MQTT-3.3.4-3], [MQTT-3.3.4-4], [MQTT-3.3.4-5]"""
    sub = client(unique, 5)
    for number, filter in ((268_435_455, "/#"), (7, "/+"), (8, "/other")):
        sub.subscribe(unique + filter, qos=qos, properties=Properties(subscription_ids=(number,)))
    sub.subscribe(unique + "/a", qos=qos)
    client(unique + "-p").publish(unique + "/a", b"m", qos)
    assert sorted(sub.message().properties.subscription_ids) == [7, 268_435_455]
    sub.nothing()


def test_an_identifier_used_twice_is_carried_twice(client, unique):
    """3.3.4: "the PUBLISH packet will carry multiple identical Subscription Identifiers\""""
    sub = client(unique, 5)
    sub.subscribe(unique + "/#", unique + "/+", properties=Properties(subscription_ids=(5,)))
    client(unique + "-p").publish(unique + "/a", b"m")
    assert sub.message().properties.subscription_ids == (5, 5)


def test_one_identifier_stands_for_all_filters_of_its_packet(client, unique):
    """3.8.2.1.2"""
    sub, pub = client(unique, 5), client(unique + "-p")
    sub.subscribe(unique + "/a", unique + "/b", properties=Properties(subscription_ids=(5,)))
    pub.publish(unique + "/a")
    pub.publish(unique + "/b")
    assert [sub.message().properties.subscription_ids for _ in range(2)] == [(5,), (5,)]


def test_identifiers_come_with_retained_missed_and_resent_messages(client, lasting, retain, unique):
    """[MQTT-3.3.4-3]"""
    retain(unique + "/r")
    sub = lasting(unique)
    sub.subscribe(unique + "/#", qos=1, properties=Properties(subscription_ids=(9,)))
    assert sub.message().properties.subscription_ids == (9,)
    pub = client(unique + "-p")
    pub.publish(unique + "/t", b"in flight", 1)
    assert sub.message(acknowledge=False).properties.subscription_ids == (9,)
    sub.close()
    pub.publish(unique + "/t", b"missed", 1)
    again = lasting(unique)
    got = [again.message() for _ in range(2)]
    assert [(m.payload, m.properties.subscription_ids) for m in got] == [(b"in flight", (9,)), (b"missed", (9,))]


def test_identifiers_survive_a_takeover_by_an_older_version(client, lasting, unique):
    sub = lasting(unique)
    sub.subscribe(unique, qos=1, properties=Properties(subscription_ids=(9,)))
    sub.close()
    lasting(unique, 4).close()
    sub = lasting(unique)
    client(unique + "-p").publish(unique, b"m", 1)
    assert sub.message().properties.subscription_ids == (9,)


# ── no-local (3.8.3.1) ──


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_no_local_keeps_ones_own_messages_away(client, unique, qos):
    """[MQTT-3.8.3-3]"""
    raw, other = client(unique, 5), client(unique + "-o", 5)
    raw.subscribe(unique, qos=2, no_local=True)
    raw.publish(unique, b"own", qos)
    other.publish(unique, b"other", qos)
    assert raw.message().payload == b"other"


@pytest.mark.parametrize("version", [3, 4, 5])
def test_without_it_ones_own_messages_come(client, unique, version):
    raw = client(unique, version)
    raw.subscribe(unique)
    raw.publish(unique, b"own")
    assert raw.message().payload == b"own"


def test_an_overlapping_subscription_without_no_local_delivers_ones_own(client, unique):
    raw = client(unique, 5)
    raw.subscribe(unique + "/+", qos=2, no_local=True, properties=Properties(subscription_ids=(1,)))
    raw.subscribe(unique + "/#", qos=1, properties=Properties(subscription_ids=(2,)))
    raw.publish(unique + "/a", b"own", 2)
    got = raw.message()
    assert (got.qos, got.properties.subscription_ids) == (1, (2,))


def test_no_local_holds_for_what_was_missed(lasting, unique):
    """[MQTT-3.8.3-3]: the client id is the publisher's, whatever the connection"""
    sub = lasting(unique)
    sub.subscribe(unique, qos=1, no_local=True)
    sub.publish(unique, b"own", 1)
    sub.close()
    lasting(unique).nothing()


# ── retain as published, retain handling (3.8.3.1) ──


@pytest.mark.parametrize("version", [3, 4, 5])
def test_live_messages_come_without_the_retain_flag(client, retain, unique, version):
    """[MQTT-3.3.1-12]; 3.1.1: [MQTT-3.3.1-9]"""
    sub = client(unique, version)
    sub.subscribe(unique, qos=1)
    retain(unique)
    assert not sub.message().retain


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_retain_as_published_keeps_the_flag_as_it_was(client, retain, unique, qos):
    """[MQTT-3.3.1-13]"""
    sub = client(unique, 5)
    sub.subscribe(unique, qos=qos, retain_as_published=True)
    retain(unique, b"kept", qos)
    client(unique + "-p", 5).publish(unique, b"passing", qos)
    assert [(m.payload, m.retain) for m in (sub.message(), sub.message())] == [(b"kept", True), (b"passing", False)]


def test_retain_as_published_holds_for_what_was_missed(client, lasting, retain, unique):
    sub = lasting(unique)
    sub.subscribe(unique, qos=1, retain_as_published=True)
    sub.close()
    retain(unique)
    assert lasting(unique).message().retain


def test_what_was_missed_comes_without_the_flag_otherwise(client, lasting, retain, unique):
    sub = lasting(unique)
    sub.subscribe(unique, qos=1)
    sub.close()
    retain(unique)
    assert not lasting(unique).message().retain


def test_retain_handling_0_sends_retained_messages_every_time(client, retain, unique):
    """[MQTT-3.3.1-9], [MQTT-3.8.4-4]"""
    retain(unique)
    sub = client(unique, 5)
    for _ in range(2):
        sub.subscribe(unique, retain_handling=0)
        assert sub.message().retain


@pytest.mark.parametrize("version", [3, 4])
def test_v3_subscribing_again_sends_them_again(client, retain, unique, version):
    """3.1.1: [MQTT-3.8.4-3]"""
    retain(unique)
    sub = client(unique, version)
    for _ in range(2):
        sub.subscribe(unique)
        assert sub.message().retain


def test_retain_handling_1_sends_them_to_a_new_subscription_only(client, retain, unique):
    """[MQTT-3.3.1-10]"""
    retain(unique)
    sub = client(unique, 5)
    sub.subscribe(unique, retain_handling=1)
    assert sub.message().retain
    sub.subscribe(unique, retain_handling=1)
    sub.nothing()
    sub.unsubscribe(unique)
    sub.subscribe(unique, retain_handling=1)
    assert sub.message().retain


def test_retain_handling_1_counts_the_subscription_of_a_resumed_session(lasting, retain, unique):
    """[MQTT-3.3.1-10]"""
    retain(unique)
    sub = lasting(unique)
    sub.subscribe(unique, retain_handling=1)
    sub.message()
    sub.close()
    sub = lasting(unique)
    sub.subscribe(unique, retain_handling=1)
    sub.nothing()


def test_retain_handling_2_sends_none(client, retain, unique):
    """[MQTT-3.3.1-11]"""
    retain(unique)
    sub = client(unique, 5)
    sub.subscribe(unique, retain_handling=2)
    sub.nothing()
    retain(unique, b"new")
    assert sub.message().payload == b"new"


@pytest.mark.req("S0.22")
def test_suback_comes_before_retained_messages(client, retain, unique):
    retain(unique)
    sub = client(unique, 5)
    sub.send(Subscribe(1, (FilterRequest(unique.encode()),)))
    assert isinstance(sub.receive(), Suback)
    assert sub.message().retain


# ── wildcards and the topics of the broker ──


@pytest.mark.attack("A9")
@pytest.mark.parametrize("filter", ["#", "+/broker/uptime", "+/#"])
def test_wildcards_do_not_reach_broker_topics(client, unique, filter):
    """[MQTT-4.7.2-1]"""
    sub, all_sys = client(unique, 5), client(unique + "-sys", 5)
    sub.subscribe(filter)
    all_sys.subscribe("$SYS/broker/uptime")
    assert all_sys.message(15).topic == b"$SYS/broker/uptime"
    sub.send(Subscribe(77, (FilterRequest(unique.encode()),)))
    while not isinstance(packet := sub.receive(), Suback):
        assert not packet.topic.startswith(b"$")


def test_hash_matches_the_parent_and_plus_matches_empty_levels(client, unique):
    """4.7.1.2, 4.7.1.3"""
    sub, pub = client(unique, 5), client(unique + "-p", 5)
    sub.subscribe(unique + "/a/#", unique + "/+/b")
    for topic in ("/a", "/a/x/y", "//b", "/b", "/c/b/d"):
        pub.publish(unique + topic, topic)
    pub.publish(unique + "/a", b"end")
    assert sub.payloads(4) == [b"/a", b"/a/x/y", b"//b", b"end"]


def test_a_client_may_refuse_a_message_and_gets_the_next(client, unique):
    """3.4.2.1: PUBACK with a reason of 0x80 or more ends the flow"""
    sub, pub = client(unique, 5, properties=Properties(receive_maximum=1)), client(unique + "-p", 5)
    sub.subscribe(unique, qos=1)
    pub.publish(unique, b"one", 1)
    pub.publish(unique, b"two", 1)
    sub.send(Puback(sub.message(acknowledge=False).packet_id, Reason.UNSPECIFIED_ERROR))
    assert sub.message().payload == b"two"
