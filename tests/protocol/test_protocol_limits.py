"""What either side may ask of the other: receive maximum, maximum packet size, topic aliases."""

from __future__ import annotations

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import (
    Disconnect,
    FilterRequest,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Reason,
    Suback,
    Subscribe,
    encode,
)


@pytest.fixture(scope="module")
def narrow_broker(tmp_path_factory):
    """Takes three unfinished messages, packets of 1000 bytes and two aliases."""
    folder = tmp_path_factory.mktemp("narrow") / "data"
    settings = {"mqtt__receive_maximum": 3, "mqtt__packet_bytes_max": 1000, "mqtt__topic_alias_maximum": 2}
    with BrokerProcess(folder, "memory", **settings) as broker:
        yield broker


@pytest.fixture
def narrow(narrow_broker, unique):
    with RawClient(narrow_broker.port, 5) as raw:
        raw.connect(unique)
        yield raw


def closing_reason(raw: RawClient) -> list[int]:
    return [p.reason for p in raw.until_closed() if isinstance(p, Disconnect)]


# ── receive maximum (3.1.2.11.3, 3.2.2.3.3) ──


@pytest.mark.req("S1.20")
@pytest.mark.parametrize("qos", [1, 2])
def test_no_more_than_the_clients_receive_maximum_is_sent(client, unique, qos):
    """[MQTT-3.3.4-9]"""
    sub = client(unique + "-s", 5, properties=Properties(receive_maximum=3))
    sub.subscribe(unique, qos=2)
    pub = client(unique, 5)
    for i in range(10):
        pub.publish(unique, b"%d" % i, qos)
    got = [sub.message(acknowledge=False) for _ in range(3)]
    sub.nothing()
    for message in got:
        _finish(sub, message)
    assert [m.payload for m in got] + sub.payloads(7) == [b"%d" % i for i in range(10)]


def _finish(sub: RawClient, message: Publish) -> None:
    if message.qos == 1:
        sub.send(Puback(message.packet_id))
    else:
        sub.send(Pubrec(message.packet_id))
        sub.amid(Pubrel)
        sub.send(Pubcomp(message.packet_id))


def test_pubrec_does_not_open_the_window_but_pubcomp_does(client, unique):
    """[MQTT-4.9.0-2], 4.9: the send quota grows with PUBACK, PUBCOMP or a PUBREC of 0x80 or more."""
    sub = client(unique + "-s", 5, properties=Properties(receive_maximum=1))
    sub.subscribe(unique, qos=2)
    pub = client(unique, 5)
    pub.publish(unique, b"one", 2)
    pub.publish(unique, b"two", 2)
    pid = sub.message(acknowledge=False).packet_id
    sub.send(Pubrec(pid))
    sub.expect(Pubrel)
    sub.nothing()
    sub.send(Pubcomp(pid))
    assert sub.message().payload == b"two"


def test_a_pubrec_with_an_error_opens_the_window(client, unique):
    """4.9"""
    sub = client(unique + "-s", 5, properties=Properties(receive_maximum=1))
    sub.subscribe(unique, qos=2)
    pub = client(unique, 5)
    pub.publish(unique, b"one", 2)
    pub.publish(unique, b"two", 2)
    sub.send(Pubrec(sub.message(acknowledge=False).packet_id, Reason.QUOTA_EXCEEDED))
    assert sub.message().payload == b"two"


def test_a_full_window_does_not_hold_qos_0_and_pings(client, unique):
    """[MQTT-4.9.0-3]: the other packets go on."""
    sub = client(unique + "-s", 5, properties=Properties(receive_maximum=1))
    sub.subscribe(unique, qos=1)
    client(unique, 5).publish(unique, b"one", 1)
    sub.message(acknowledge=False)
    assert sub.subscribe(unique + "/more").reasons == (0,)
    sub.nothing()


def test_the_window_holds_for_retained_messages(client, retain, unique):
    """[MQTT-3.3.4-9]"""
    for i in range(5):
        retain(f"{unique}/{i}")
    sub = client(unique + "-s", 5, properties=Properties(receive_maximum=2))
    sub.subscribe(unique + "/#", qos=1)
    got = [sub.message(acknowledge=False) for _ in range(2)]
    sub.nothing()
    for message in got:
        _finish(sub, message)
    assert len({m.topic for m in got} | {sub.message().topic for _ in range(3)}) == 5


def test_the_window_holds_for_what_is_sent_again(client, lasting, unique):
    """[MQTT-3.3.4-9]: a new connection, a new receive maximum"""
    sub = lasting(unique + "-s")
    sub.subscribe(unique, qos=1)
    pub = client(unique, 5)
    for i in range(6):
        pub.publish(unique, b"%d" % i, 1)
    for _ in range(6):
        sub.message(acknowledge=False)
    sub.close()
    sub = lasting(unique + "-s", properties=Properties(session_expiry=600, receive_maximum=2))
    got = [sub.message(acknowledge=False) for _ in range(2)]
    sub.nothing()
    for message in got:
        _finish(sub, message)
    assert [m.payload for m in got] + sub.payloads(4) == [b"%d" % i for i in range(6)]


@pytest.mark.attack("A11")
def test_a_client_beyond_the_brokers_receive_maximum_is_disconnected(narrow, unique):
    """3.3.4: 0x93"""
    for pid in range(1, 5):
        narrow.send(Publish(unique.encode(), b"", 2, packet_id=pid))
    assert closing_reason(narrow) == [Reason.RECEIVE_MAXIMUM_EXCEEDED]


def test_a_client_within_it_may_go_on_for_ever(narrow, unique):
    for _ in range(4):
        pids = [narrow.packet_id() for _ in range(3)]
        for pid in pids:
            narrow.send(Publish(unique.encode(), b"", 2, packet_id=pid))
        for pid in pids:
            narrow.amid(Pubrec)
            narrow.send(Pubrel(pid))
        for _ in pids:
            narrow.amid(Pubcomp)


# ── maximum packet size (3.1.2.11.4, 3.2.2.3.6) ──


@pytest.mark.attack("A16")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_larger_than_the_client_takes_is_left_out(client, unique, qos):
    """[MQTT-3.1.2-24], [MQTT-3.1.2-25]"""
    sub = client(unique + "-s", 5, properties=Properties(maximum_packet_size=100))
    sub.subscribe(unique, qos=2)
    pub = client(unique, 5)
    pub.publish(unique, b"x" * 100, qos)
    pub.publish(unique, b"small", qos)
    assert sub.message().payload == b"small"


@pytest.mark.attack("A16")
def test_the_limit_is_the_whole_packet_to_the_byte(client, unique):
    """3.1.2.11.4: the total number of bytes in a packet"""
    topic = unique.encode()
    fits = Publish(topic, b"f" * 50, 0)
    sub = client(unique + "-s", 5, properties=Properties(maximum_packet_size=len(encode(fits, 5))))
    sub.subscribe(unique)
    pub = client(unique, 5)
    pub.publish(unique, b"x" * 51)
    pub.publish(unique, fits.payload)
    assert sub.message().payload == fits.payload


@pytest.mark.attack("A16")
def test_a_message_left_out_does_not_come_back(client, lasting, unique):
    """[MQTT-3.1.2-25]: as if it had been sent"""
    small = Properties(session_expiry=600, maximum_packet_size=100)
    sub = lasting(unique + "-s", properties=small)
    sub.subscribe(unique, qos=1)
    pub = client(unique, 5)
    pub.publish(unique, b"x" * 200, 1)
    pub.publish(unique, b"small", 1)
    sub.message()
    sub.close()
    lasting(unique + "-s").nothing()


@pytest.mark.attack("A16")
def test_the_limit_holds_for_what_was_missed_and_what_is_sent_again(client, lasting, unique):
    """[MQTT-3.1.2-24]: a new connection, a new limit"""
    sub = lasting(unique + "-s")
    sub.subscribe(unique, qos=1)
    pub = client(unique, 5)
    pub.publish(unique, b"x" * 200, 1)
    sub.message(acknowledge=False)
    sub.close()
    pub.publish(unique, b"y" * 200, 1)
    pub.publish(unique, b"small", 1)
    sub = lasting(unique + "-s", properties=Properties(session_expiry=600, maximum_packet_size=100))
    assert sub.message().payload == b"small"


@pytest.mark.attack("A16")
def test_the_limit_holds_for_retained_messages(client, retain, unique):
    retain(unique + "/large", b"x" * 200)
    retain(unique + "/small", b"small")
    sub = client(unique + "-s", 5, properties=Properties(maximum_packet_size=100))
    sub.subscribe(unique + "/#", qos=1)
    assert sub.message().payload == b"small"
    sub.nothing()


@pytest.mark.attack("A16")
def test_a_reason_string_that_does_not_fit_is_left_out(client, unique):
    """[MQTT-3.4.2-2], [MQTT-3.9.2-1]"""
    raw = client(unique, 5, properties=Properties(maximum_packet_size=45))
    raw.send(Publish(unique.encode(), b"\xff", 1, packet_id=1, properties=Properties(payload_format=1)))
    refused = raw.expect(Puback)
    assert len(encode(refused, 5)) <= 45
    raw.publish(unique, b"\xff", 2, properties=Properties(payload_format=1), wait=False)
    assert len(encode(raw.expect(Pubrec), 5)) <= 45
    suback = raw.subscribe("$replay/nowhen/" + "b" * 60)
    assert len(encode(suback, 5)) <= 45


def test_a_packet_larger_than_the_broker_takes_is_refused(narrow, unique):
    """[MQTT-3.2.2-15]; 0x95"""
    narrow.publish(unique, b"x" * 1000)
    assert closing_reason(narrow) == [Reason.PACKET_TOO_LARGE]


def test_a_packet_of_exactly_the_limit_is_taken(narrow, unique):
    head = len(encode(Publish(unique.encode(), b"x" * 900, 1, packet_id=1), 5)) - 900
    narrow.publish(unique, b"x" * (1000 - head), 1)


def test_a_packet_announced_too_large_is_refused_before_it_comes(narrow):
    narrow.send_bytes(b"\x30\xff\xff\xff\x7f")
    assert closing_reason(narrow) == [Reason.PACKET_TOO_LARGE]


@pytest.mark.attack("A4")
@pytest.mark.parametrize("version", [4, 5])
def test_a_remaining_length_of_five_bytes_is_malformed(client, unique, version):
    """[MQTT-1.5.5-1], 2.1.4"""
    raw = client(unique, version)
    raw.send_bytes(b"\x30\xff\xff\xff\xff\x01")
    assert closing_reason(raw) == ([Reason.MALFORMED_PACKET] if version == 5 else [])


# ── topic aliases from the client (3.3.2.3.4) ──


def test_an_alias_stands_for_its_topic(client, unique):
    sub, pub = client(unique + "-s", 5), client(unique, 5)
    sub.subscribe(unique + "/#", qos=2)
    for qos in (0, 1, 2):
        pub.publish(f"{unique}/{qos}", b"named", qos, properties=Properties(topic_alias=qos + 1))
        pub.publish("", b"aliased", qos, properties=Properties(topic_alias=qos + 1))
    got = sorted((m.topic.decode(), m.payload) for m in (sub.message() for _ in range(6)))
    assert got == sorted((f"{unique}/{q}", p) for q in range(3) for p in (b"named", b"aliased"))


def test_an_alias_can_be_given_to_another_topic(client, unique):
    sub, pub = client(unique + "-s", 5), client(unique, 5)
    sub.subscribe(unique + "/#")
    for topic in ("/a", "", "/b", ""):
        pub.publish(unique + topic if topic else "", b"", properties=Properties(topic_alias=1))
    assert [sub.message().topic[-1:] for _ in range(4)] == [b"a", b"a", b"b", b"b"]


def test_a_topic_may_have_several_aliases(client, unique):
    sub, pub = client(unique + "-s", 5), client(unique, 5)
    sub.subscribe(unique)
    for alias in (1, 2):
        pub.publish(unique, b"", properties=Properties(topic_alias=alias))
        pub.publish("", b"", properties=Properties(topic_alias=alias))
    assert {sub.message().topic for _ in range(4)} == {unique.encode()}


def test_the_highest_alias_announced_is_allowed(narrow, unique):
    """[MQTT-3.3.2-9]"""
    narrow.subscribe(unique)
    narrow.publish(unique, b"m", properties=Properties(topic_alias=2))
    assert narrow.message().payload == b"m"


@pytest.mark.parametrize("alias", [3, 65535])
def test_an_alias_above_the_maximum_is_invalid(narrow, unique, alias):
    """[MQTT-3.3.2-9]; 0x94"""
    narrow.publish(unique, b"m", properties=Properties(topic_alias=alias))
    assert closing_reason(narrow) == [Reason.TOPIC_ALIAS_INVALID]


def test_an_alias_of_0_is_invalid(client, unique):
    """[MQTT-3.3.2-8]; 0x94"""
    raw = client(unique, 5)
    raw.send_bytes(bytes.fromhex("30 08 0001 74 03 230000 78"))
    assert closing_reason(raw) == [Reason.TOPIC_ALIAS_INVALID]


def test_an_alias_that_was_never_set_is_a_protocol_error(client, unique):
    """3.3.2.3.4; 0x82"""
    raw = client(unique, 5)
    raw.publish("", b"m", properties=Properties(topic_alias=7))
    assert closing_reason(raw) == [Reason.PROTOCOL_ERROR]


def test_aliases_end_with_the_connection(lasting, unique):
    """[MQTT-3.3.2-7]"""
    lasting(unique).publish(unique, b"m", 1, properties=Properties(topic_alias=1))
    again = lasting(unique)
    again.publish("", b"m", properties=Properties(topic_alias=1))
    assert closing_reason(again) == [Reason.PROTOCOL_ERROR]


def test_aliases_of_one_client_mean_nothing_to_another(client, unique):
    """3.3.2.3.4: a mapping lives in its connection only"""
    client(unique, 5).publish(unique, b"m", 1, properties=Properties(topic_alias=1))
    other = client(unique + "-o", 5)
    other.publish("", b"m", properties=Properties(topic_alias=1))
    assert closing_reason(other) == [Reason.PROTOCOL_ERROR]


# ── topic aliases towards the client ──


def resolved(messages: list[Publish], maximum: int) -> list[bytes]:
    """The topics of what a client received, as it would resolve the aliases."""
    known: dict[int, bytes] = {}
    topics = []
    for message in messages:
        alias = message.properties.topic_alias
        if alias is not None:
            assert 1 <= alias <= maximum  # [MQTT-3.1.2-26]
            if message.topic:
                known[alias] = message.topic
        topics.append(message.topic or known[alias])
    return topics


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_client_that_allows_aliases_can_resolve_every_topic(client, unique, qos):
    """[MQTT-3.1.2-26], [MQTT-3.3.2-11], [MQTT-3.3.2-12]"""
    sub = client(unique + "-s", 5, properties=Properties(topic_alias_maximum=2))
    sub.subscribe(unique + "/#", qos=2)
    pub = client(unique, 5)
    sent = [f"{unique}/{i % 4}" for i in range(12)]
    for topic in sent:
        pub.publish(topic, b"m", qos)
    assert resolved([sub.message() for _ in sent], 2) == [t.encode() for t in sent]


def test_aliases_are_put_to_use(client, unique):
    sub = client(unique + "-s", 5, properties=Properties(topic_alias_maximum=2))
    sub.subscribe(unique, qos=1)
    pub = client(unique, 5)
    for _ in range(3):
        pub.publish(unique, b"m", 1)
    assert [sub.message().topic for _ in range(3)] == [unique.encode(), b"", b""]


@pytest.mark.parametrize("properties", [Properties(), Properties(topic_alias_maximum=0)])
def test_a_client_that_allows_none_gets_none(client, unique, properties):
    """[MQTT-3.1.2-27]"""
    sub = client(unique + "-s", 5, properties=properties)
    sub.subscribe(unique)
    pub = client(unique, 5)
    for _ in range(3):
        pub.publish(unique, b"m")
    assert [sub.message().properties.topic_alias for _ in range(3)] == [None] * 3


def test_what_is_sent_again_can_be_resolved_on_the_new_connection(client, lasting, unique):
    """[MQTT-3.3.2-7]"""
    aliased = Properties(session_expiry=600, topic_alias_maximum=2)
    sub = lasting(unique + "-s", properties=aliased)
    sub.subscribe(unique, qos=1)
    pub = client(unique, 5)
    for _ in range(3):
        pub.publish(unique, b"m", 1)
        sub.message(acknowledge=False)
    sub.close()
    again = lasting(unique + "-s", properties=aliased)
    assert resolved([again.message() for _ in range(3)], 2) == [unique.encode()] * 3


# ── answers that carry many codes ──


@pytest.mark.attack("A12")
def test_thousands_of_filters_get_an_answer_each(client, unique):
    raw = client(unique, 5)
    requests = tuple(FilterRequest(f"{unique}/{i}".encode(), 1) for i in range(3000))
    raw.send(Subscribe(5, requests))
    assert raw.expect(Suback).reasons == (1,) * 3000
