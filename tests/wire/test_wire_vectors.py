"""Known bytes, both ways."""

from __future__ import annotations

from typing import Any

import pytest
from vectors import INVALID, VALID, Invalid, Valid

from tidegate.errors import MalformedPacket, PeerError
from tidegate.wire import Connect, PacketStream, Properties, Publish, Will, decode, encode, peek_version


def split(raw: bytes) -> tuple[int, bytes]:
    packets = PacketStream(1 << 20).feed(raw)
    assert len(packets) == 1, "a vector is exactly one packet"
    return packets[0]


def _valid_cases() -> list[Any]:
    return [pytest.param(v, version, id=f"{v.name} (v{version})") for v in VALID for version in v.versions]


def _invalid_cases() -> list[Any]:
    return [
        pytest.param(
            v,
            version,
            id=f"{v.name} (v{version})",
            marks=[pytest.mark.attack(*v.attacks)] if v.attacks else [],
        )
        for v in INVALID
        for version in v.versions
    ]


@pytest.mark.parametrize(("vector", "version"), _valid_cases())
def test_valid_bytes_decode_to_their_packet(vector: Valid, version: int) -> None:
    first_byte, body = split(vector.raw)
    assert decode(first_byte, body, version, from_server=vector.from_server) == vector.packet


@pytest.mark.parametrize(("vector", "version"), _valid_cases())
def test_the_packet_encodes_to_its_bytes(vector: Valid, version: int) -> None:
    raw = encode(vector.packet, version)
    if vector.canonical:
        assert raw == vector.raw
    first_byte, body = split(raw)
    assert decode(first_byte, body, version, from_server=vector.from_server) == vector.packet


@pytest.mark.parametrize(("vector", "version"), _invalid_cases())
def test_invalid_bytes_are_refused_with_their_reason(vector: Invalid, version: int) -> None:
    first_byte, body = split(vector.raw)
    with pytest.raises(PeerError) as refusal:
        decode(first_byte, body, version)
    assert refusal.value.reason == vector.reason


@pytest.mark.parametrize(("vector", "version"), _valid_cases())
def test_a_truncated_packet_is_never_mistaken_for_a_whole_one(vector: Valid, version: int) -> None:
    if not vector.canonical:
        return  # it may hold bytes that say nothing
    first_byte, body = split(vector.raw)
    for size in range(len(body)):
        try:
            packet = decode(first_byte, body[:size], version, from_server=vector.from_server)
        except PeerError:
            continue
        assert packet != vector.packet


def test_vectors_have_unique_names() -> None:
    names = [v.name for v in (*VALID, *INVALID)]
    assert len(names) == len(set(names))


def test_the_version_to_answer_in_is_known_from_a_connect_that_cannot_be_decoded() -> None:
    assert peek_version(b"\x00\x04MQTT\x05\xff") == 5
    assert peek_version(b"\x00\x04MQTT\x06") == 5
    assert peek_version(b"\x00\x04MQTT\x04") == 4
    assert peek_version(b"\x00\x04MQTT\x03") == 4
    assert peek_version(b"\x00\x06MQIsdp\x03") == 3
    assert peek_version(b"\x00\x04HTTP\x05") is None
    assert peek_version(b"\x00\x04MQTT") is None


def test_secrets_are_not_in_the_repr() -> None:
    shown = repr(
        Connect(5, b"x", username=b"ann", password=b"s3cret", properties=Properties(auth_data=b"t0ken"))
    )
    assert "s3cret" not in shown
    assert "t0ken" not in shown
    assert "ann" in shown


def test_what_is_passed_on_keeps_its_order_and_leaves_the_rest_out() -> None:
    user_1, user_2 = b"\x26\x00\x01z\x00\x011", b"\x26\x00\x01a\x00\x012"
    expiry, alias, form = b"\x02\x00\x00\x00\x09", b"\x23\x00\x03", b"\x01\x01"
    block = user_1 + expiry + form + alias + user_2
    packet = decode(0x30, b"\x00\x01t" + bytes((len(block),)) + block + b"p", 5)
    assert isinstance(packet, Publish)
    assert packet.passed_on == user_1 + form + user_2
    assert packet.properties == Properties(
        payload_format=1, message_expiry=9, topic_alias=3, user=((b"z", b"1"), (b"a", b"2"))
    )


def test_passed_on_bytes_win_over_the_fields_they_stand_for() -> None:
    properties = Properties(content_type=b"ignored", message_expiry=9)
    raw = encode(Publish(b"t", properties=properties, passed_on=b"\x01\x01"), 5)
    packet = decode(raw[0], raw[2:], 5)
    assert isinstance(packet, Publish)
    assert packet.properties == Properties(payload_format=1, message_expiry=9)


def test_without_passed_on_bytes_the_fields_are_encoded() -> None:
    properties = Properties(content_type=b"text/plain", user=((b"a", b"b"),))
    raw = encode(Publish(b"t", properties=properties), 5)
    packet = decode(raw[0], raw[2:], 5)
    assert isinstance(packet, Publish)
    assert packet.properties == properties


def test_a_wills_properties_serve_for_the_publish_it_becomes() -> None:
    will = Will(b"t", b"bye", properties=Properties(will_delay=5, message_expiry=7, content_type=b"c"))
    raw = encode(Publish(will.topic, will.payload, properties=will.properties), 5)
    packet = decode(raw[0], raw[2:], 5)
    assert isinstance(packet, Publish)
    assert packet.properties == Properties(message_expiry=7, content_type=b"c")


def test_a_property_in_a_packet_that_cannot_carry_it_is_a_bug_of_ours() -> None:
    with pytest.raises(ValueError, match="topic_alias"):
        encode(Connect(5, b"x", properties=Properties(topic_alias=1)), 5)


@pytest.mark.parametrize("packet_id", [0, 65_536, -1])
def test_a_packet_id_out_of_range_is_not_encoded(packet_id: int) -> None:
    with pytest.raises(ValueError, match="packet identifier"):
        encode(Publish(b"a", b"", 1, packet_id=packet_id), 4)


def test_a_topic_that_is_too_long_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="65536 bytes"):
        encode(Publish(b"a" * 65_536), 4)
    assert encode(Publish(b"a" * 65_535), 4)


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_client_id_may_fill_its_two_byte_length(version: int) -> None:
    """1.5.4; [MQTT-3.1.3-5] demands 23 bytes and allows more."""
    packet = Connect(version, b"n" * 65_535, True, 60)
    first_byte, body = split(encode(packet, version))
    assert decode(first_byte, body, 4) == packet


@pytest.mark.attack("A10")
def test_an_invalid_will_is_refused_the_same_way_every_time() -> None:
    raw = next(v.raw for v in INVALID if v.name == "will user property cut off")
    first_byte, body = split(raw)
    for _ in range(1000):
        with pytest.raises(MalformedPacket):
            decode(first_byte, body, 5)
