"""Whatever is encoded decodes to itself, and whatever arrives is a packet or the peer's fault."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packet_strategies import PASSED_ON, Spoken, binaries, messages_v5, packet_ids, spoken, topics
from vectors import VALID

from tidegate.errors import MalformedPacket, PeerError
from tidegate.wire import (
    NO_PROPERTIES,
    Connect,
    Packet,
    PacketStream,
    Properties,
    Publish,
    Reason,
    connack_code_v3,
    decode,
    encode,
    encode_property_block,
    encode_publish,
    encode_varint,
    read_properties,
    read_varint,
    reason_of_connack_v3,
)
from tidegate.wire.properties import PUBLISH


def there_and_back(packet: Packet, version: int) -> Packet:
    [(first_byte, body)] = PacketStream(1 << 20).feed(encode(packet, version))
    return decode(first_byte, body, version, from_server=True)


def passed_on_of(properties: Properties) -> bytes:
    """What the decoder should hand on when the encoder wrote the fields in its own order."""
    handed = {name: getattr(properties, name) for name in (*PASSED_ON, "user")}
    return encode_property_block(Properties(**handed), PUBLISH)


def with_passed_on(packet: Packet) -> Packet:
    """The packet as the decoder makes it: with the raw bytes of what is passed on."""
    if isinstance(packet, Publish):
        return replace(packet, passed_on=passed_on_of(packet.properties))
    if isinstance(packet, Connect) and packet.will is not None:
        return replace(packet, will=replace(packet.will, passed_on=passed_on_of(packet.will.properties)))
    return packet


@given(spoken)
@settings(max_examples=600)
def test_every_packet_survives_the_wire(said: Spoken) -> None:
    heard = there_and_back(said.packet, said.version)
    assert heard == with_passed_on(said.packet)


@given(spoken)
def test_a_packet_that_was_decoded_survives_being_sent_on(said: Spoken) -> None:
    heard = there_and_back(said.packet, said.version)
    assert there_and_back(heard, said.version) == heard


@given(messages_v5.filter(lambda p: p.topic != b""))
def test_a_5_0_message_can_be_sent_to_a_3_1_1_subscriber(packet: Publish) -> None:
    assert there_and_back(packet, 4) == replace(packet, properties=NO_PROPERTIES)


@given(topics, binaries, st.integers(0, 2), st.booleans(), packet_ids, st.sampled_from([3, 4, 5]))
def test_the_publish_helper_does_what_encode_does(
    topic: bytes, payload: bytes, qos: int, retain: bool, packet_id: int, version: int
) -> None:
    block = b"\x01\x01\x26\x00\x01k\x00\x01v"
    dup = qos == 1
    fast = encode_publish(topic, payload, qos, retain, dup, packet_id, version, block)
    plain = Publish(topic, payload, qos, retain, dup, packet_id if qos else 0, passed_on=block)
    assert fast == encode(plain, version)


@given(st.integers(0, 255), st.binary(max_size=80), st.sampled_from([3, 4, 5]), st.booleans())
@settings(max_examples=1500)
def test_garbage_is_a_packet_or_the_peers_fault(
    first_byte: int, body: bytes, version: int, from_server: bool
) -> None:
    try:
        decode(first_byte, body, version, from_server=from_server)
    except PeerError as refusal:
        assert Reason(refusal.reason) >= 0x80


@given(st.data(), spoken)
@settings(max_examples=800)
def test_a_valid_packet_with_one_wrong_byte_is_a_packet_or_the_peers_fault(
    data: st.DataObject, said: Spoken
) -> None:
    [(first_byte, body)] = PacketStream(1 << 20).feed(encode(said.packet, said.version))
    damaged = bytearray(body)
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        heard = decode(first_byte, bytes(damaged), said.version)
    except PeerError as refusal:
        assert Reason(refusal.reason) >= 0x80
    else:
        version = heard.version if isinstance(heard, Connect) else said.version
        assert there_and_back(heard, version) == heard


@given(st.integers(0, 268_435_455))
@example(127)
@example(128)
@example(16_383)
@example(16_384)
@example(2_097_151)
@example(2_097_152)
@example(268_435_455)
def test_variable_byte_integers_round_trip(n: int) -> None:
    encoded = encode_varint(n)
    assert read_varint(b"\xff" + encoded + b"\xff", 1) == (n, 1 + len(encoded))
    assert len(encoded) == (1 if n < 1 << 7 else 2 if n < 1 << 14 else 3 if n < 1 << 21 else 4)


@pytest.mark.parametrize("n", [-1, 268_435_456])
def test_a_number_that_needs_more_than_four_bytes_is_not_encoded(n: int) -> None:
    with pytest.raises(ValueError, match="variable byte integer"):
        encode_varint(n)


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\xff\xff\xff", b"\x80\x80\x80\x80\x01", b"\x81\x00"])
def test_a_variable_byte_integer_that_is_cut_off_or_too_long_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedPacket):
        read_varint(raw, 0)


def test_properties_are_read_from_the_middle_of_a_packet() -> None:
    assert read_properties(b"zz\x02\x01\x01rest", 2, PUBLISH) == (
        Properties(payload_format=1),
        b"\x01\x01",
        5,
    )


def test_every_property_field_is_known_to_the_codec() -> None:
    from tidegate.wire.properties import _RULES

    assert {rule.field for rule in _RULES} == {field.name for field in fields(Properties)}
    assert len(_RULES) == 27


def test_every_3_x_return_code_survives_the_way_to_a_reason_and_back() -> None:
    for code in range(6):
        reason = reason_of_connack_v3(code)
        assert reason is not None
        assert connack_code_v3(reason) == code
    assert reason_of_connack_v3(6) is None


@pytest.mark.parametrize("reason", [r for r in Reason if r >= 0x80])
def test_every_failure_is_a_failure_to_a_3_x_client(reason: Reason) -> None:
    assert 1 <= connack_code_v3(reason) <= 5


def test_packets_are_immutable_and_have_no_dict() -> None:
    for vector in VALID:
        assert not hasattr(vector.packet, "__dict__")
        assert hash(vector.packet) == hash(vector.packet)
