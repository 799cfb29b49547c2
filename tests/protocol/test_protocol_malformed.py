"""What is no packet of MQTT ends the connection; a v5 client is told 0x81, a 3.x client nothing (4.13.1)."""

from __future__ import annotations

import pytest
from vectors import connect, publish, will

from harness import RawClient
from packet_bytes import framed
from tidegate.wire import Connack, Disconnect, FilterRequest, Pingreq, Pingresp, Reason, Subscribe, Unsubscribe


def told(raw: RawClient) -> list[int]:
    said = raw.until_closed(3.0)
    assert all(isinstance(packet, Disconnect) for packet in said), said
    return [packet.reason for packet in said if isinstance(packet, Disconnect)]


def malformed(version: int) -> list[int]:
    return [Reason.MALFORMED_PACKET] if version == 5 else []


# ── CONNECT ──


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("topic", [b"a/#", b"+", b"", b"a\x00b", b"\xff"])
def test_a_3x_connect_with_a_bad_will_topic_is_closed_without_an_answer(client, version, topic):
    """3.1.1: [MQTT-3.1.4-1]: no CONNACK; "server unavailable" would be a lie"""
    raw = client(version=version)
    raw.send_bytes(will(b"", topic, version))
    assert raw.until_closed() == []


@pytest.mark.parametrize(
    ("topic", "reason"),
    [
        (b"a/#", Reason.TOPIC_NAME_INVALID),
        (b"", Reason.PROTOCOL_ERROR),
        (b"a\x00b", Reason.MALFORMED_PACKET),
        (b"\xff", Reason.MALFORMED_PACKET),
    ],
)
def test_a_v5_connect_with_a_bad_will_topic_is_told_why(client, topic, reason):
    """[MQTT-3.1.4-1]: a CONNACK may come before the close"""
    raw = client(version=5)
    raw.send_bytes(will(b"", topic))
    assert raw.expect(Connack).reason == reason
    assert raw.until_closed() == []


@pytest.mark.parametrize("client_id", [b"a\x00b", b"\xff", b"\xed\xa0\x80"])
@pytest.mark.parametrize("version", [4, 5])
def test_a_client_id_that_is_no_string_of_mqtt_is_malformed(client, version, client_id):
    """[MQTT-3.1.3-4], [MQTT-1.5.4-1], [MQTT-1.5.4-2]"""
    raw = client(version=version)
    raw.send_bytes(connect(client_id=client_id, version=version))
    said = raw.until_closed()
    assert said == [] if version == 4 else [packet.reason for packet in said] == [Reason.MALFORMED_PACKET]


@pytest.mark.parametrize("first_byte", [0x11, 0x12, 0x14, 0x1F])
def test_a_31_client_may_set_what_31_leaves_unused_in_the_first_byte(client, unique, first_byte):
    """3.1, section 3.1: DUP, QoS and RETAIN are not used in CONNECT, nor in section 3.12, PINGREQ"""
    raw = client(version=3)
    packet = connect(client_id=unique.encode(), version=3)
    raw.send_bytes(bytes((first_byte,)) + packet[1:])
    assert raw.expect(Connack).reason == 0
    raw.send_bytes(b"\xc2\x00")
    raw.expect(Pingresp)


@pytest.mark.parametrize(
    ("flags", "rest"),
    [(0x14, b"\x00\x01w\x00\x03bye"), (0x16, b"\x00\x01w\x00\x00"), (0x1A, b""), (0x3A, b""), (0x03, b"")],
)
def test_a_31_client_may_send_every_connect_flag_that_31_allows(client, unique, flags, rest):
    """3.1, section 3.1: will QoS and will retain are disregarded without a will, bit 0 is unused"""
    raw = client(version=3)
    raw.send_bytes(connect(flags, rest, client_id=unique.encode(), version=3))
    assert raw.expect(Connack).reason == 0
    raw.send(Pingreq())
    raw.expect(Pingresp)


# ── strings ──


@pytest.mark.parametrize("topic", [b"a\x00b", b"\x00", b"a\x00/#", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80"])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [4, 5])
def test_a_topic_that_is_no_string_of_mqtt_is_malformed(client, unique, version, qos, topic):
    """[MQTT-3.3.2-1], [MQTT-1.5.4-1], [MQTT-1.5.4-2]"""
    raw = client(unique, version)
    raw.send_bytes(publish(topic, b"", 0x30 | qos << 1, b"\x00\x01" if qos else b"", version))
    assert told(raw) == malformed(version)


@pytest.mark.parametrize("filter", [b"a\x00b", b"\xff", b"$share/\x00/a", b"$share/g/\xff"])
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("first_byte", [0x82, 0xA2], ids=["SUBSCRIBE", "UNSUBSCRIBE"])
def test_a_filter_that_is_no_string_of_mqtt_is_malformed(client, unique, version, first_byte, filter):
    """[MQTT-3.8.3-1], [MQTT-3.10.3-1]"""
    raw = client(unique, version)
    block = b"\x00" if version == 5 else b""
    options = b"\x00" if first_byte == 0x82 else b""
    body = b"\x00\x01" + block + len(filter).to_bytes(2, "big") + filter + options
    raw.send_bytes(framed(first_byte, body))
    assert told(raw) == malformed(version)


# ── filters ──

MALFORMED_FILTERS = [
    b"$share/+/p",
    b"$share/g#/p",
    b"$share/g",
    b"$share/g/",
    b"$share//p",
    b"$share/g/a#",
    b"a/#/b",
    b"a+",
    b"a/b#",
    b"+a/b",
    b"##",
]


@pytest.mark.parametrize("filter", MALFORMED_FILTERS)
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_malformed_filter_in_a_subscribe_ends_the_connection(client, unique, version, filter):
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.8.2-1], [MQTT-4.8.2-2]"""
    raw = client(unique, version)
    raw.send(Subscribe(1, (FilterRequest(filter, 1),)))
    assert told(raw) == malformed(version)


@pytest.mark.parametrize("filter", MALFORMED_FILTERS)
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_malformed_filter_in_an_unsubscribe_ends_the_connection(client, unique, version, filter):
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.8.2-1], [MQTT-4.8.2-2]"""
    raw = client(unique, version)
    raw.send(Unsubscribe(1, (filter,)))
    assert told(raw) == malformed(version)


@pytest.mark.parametrize("version", [4, 5])
def test_of_a_subscribe_with_a_malformed_filter_nothing_is_done(client, lasting, unique, version):
    raw = lasting(unique, version)
    raw.send(Subscribe(1, (FilterRequest(f"{unique}/a".encode(), 1), FilterRequest(b"a/#/b", 1))))
    assert told(raw) == malformed(version)
    client(unique + "-p").publish(f"{unique}/a", b"for nobody", 1)
    lasting(unique, version).nothing()


def test_a_filter_that_only_this_broker_declines_is_declined_alone(client, unique):
    """3.9.3: 0x8F"""
    raw = client(unique, 5)
    deep = "/".join(["a"] * 200)
    declined = (deep, "$replay/yesterday/a", "$replay/earliest", "$share/g/$share/h/a", "$unknown/a")
    answer = raw.subscribe(unique, *declined)
    assert answer.reasons == (0, *[Reason.TOPIC_FILTER_INVALID] * len(declined))
    raw.nothing()


@pytest.mark.parametrize("version", [4, 5])
def test_what_was_never_subscribed_can_be_unsubscribed_however_odd(client, unique, version):
    """[MQTT-3.10.4-5]"""
    raw = client(unique, version)
    answer = raw.unsubscribe("/".join(["a"] * 200), "$replay/yesterday/a", "$unknown/a")
    assert answer.reasons == ((Reason.NO_SUBSCRIPTION_EXISTED,) * 3 if version == 5 else ())
    raw.nothing()


# ── lengths ──


@pytest.mark.parametrize("length", [b"\x80\x00", b"\x80\x80\x00", b"\x80\x80\x80\x00"])
@pytest.mark.parametrize("version", [4, 5])
def test_a_remaining_length_of_more_bytes_than_needed_is_malformed(client, unique, version, length):
    """[MQTT-1.5.5-1]"""
    raw = client(unique, version)
    raw.send_bytes(b"\xc0" + length)
    assert told(raw) == malformed(version)


@pytest.mark.parametrize("first_byte", [0x30, 0x32])
@pytest.mark.parametrize("version", [4, 5])
def test_so_it_is_in_a_publish(client, unique, version, first_byte):
    """[MQTT-1.5.5-1]"""
    raw = client(unique, version)
    packet = publish(unique.encode(), b"", first_byte, b"\x00\x01" if first_byte == 0x32 else b"", version)
    raw.send_bytes(packet[:1] + bytes((packet[1] | 0x80, 0)) + packet[2:])
    assert told(raw) == malformed(version)


def test_so_it_is_in_a_connect(client, unique):
    """[MQTT-1.5.5-1]"""
    raw = client(version=4)
    packet = connect(client_id=unique.encode(), version=4)
    raw.send_bytes(packet[:1] + bytes((packet[1] | 0x80, 0)) + packet[2:])
    assert raw.until_closed() == []
