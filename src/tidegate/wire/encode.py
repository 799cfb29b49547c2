"""Packet → bytes.

The encoder trusts its caller: it lays out what it is given and leaves out what the version does not know.
It raises `ValueError` for what cannot be laid out at all (a field too long or out of range, a property in
a packet that cannot carry it): a bug of ours, never a peer's fault.
"""

from __future__ import annotations

from .packets import (
    MQTT_3_1,
    MQTT_3_1_1,
    MQTT_5,
    NO_PROPERTIES,
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from .primitives import encode_binary, encode_u8, encode_u16, encode_varint
from .properties import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    WILL,
    encode_message_properties,
    encode_properties,
    with_length,
)
from .reasons import connack_code_v3

_PROTOCOL_HEADS = {
    MQTT_3_1: b"\x00\x06MQIsdp\x03",
    MQTT_3_1_1: b"\x00\x04MQTT\x04",
    MQTT_5: b"\x00\x04MQTT\x05",
}
_PINGREQ = b"\xc0\x00"
_PINGRESP = b"\xd0\x00"


def encode(packet: Packet, version: int) -> bytes:
    """The whole packet, fixed header included. A `Connect` is encoded in the version that it names."""
    match packet:
        case Publish():
            return _encode_publish_packet(packet, version)
        case Puback():
            return _encode_ack(packet, PUBACK, 0x40, version)
        case Pubrec():
            return _encode_ack(packet, PUBREC, 0x50, version)
        case Pubrel():
            return _encode_ack(packet, PUBREL, 0x62, version)
        case Pubcomp():
            return _encode_ack(packet, PUBCOMP, 0x70, version)
        case Subscribe():
            return _encode_subscribe(packet, version)
        case Suback():
            return _encode_suback(packet, version)
        case Unsubscribe():
            return _encode_unsubscribe(packet, version)
        case Unsuback():
            return _encode_unsuback(packet, version)
        case Pingreq():
            return _PINGREQ
        case Pingresp():
            return _PINGRESP
        case Connect():
            return _encode_connect(packet)
        case Connack():
            return _encode_connack(packet, version)
        case Disconnect():
            return _encode_disconnect(packet, version)
        case Auth():
            return _encode_auth(packet, version)


def encode_publish(
    topic: bytes,
    payload: bytes,
    qos: int,
    retain: bool,
    dup: bool,
    packet_id: int,
    version: int,
    property_block: bytes = b"",
) -> bytes:
    """A PUBLISH from its parts. `property_block` is the raw properties without their length (5.0 only)."""
    head = encode_binary(topic)
    if qos:
        head += _encode_packet_id(packet_id)
    if version == MQTT_5:
        head += with_length(property_block)
    first_byte = 0x30 | qos << 1 | retain | dup << 3
    return b"%c%b%b%b" % (first_byte, encode_varint(len(head) + len(payload)), head, payload)


def _frame(first_byte: int, body: bytes) -> bytes:
    return b"%c%b%b" % (first_byte, encode_varint(len(body)), body)


def _encode_packet_id(packet_id: int) -> bytes:
    if not 0 < packet_id < 65_536:
        raise ValueError(f"packet identifier {packet_id} is not in 1…65535")
    return packet_id.to_bytes(2, "big")


def _encode_publish_packet(p: Publish, version: int) -> bytes:
    block = encode_message_properties(p.properties, p.passed_on, PUBLISH) if version == MQTT_5 else b""
    return encode_publish(p.topic, p.payload, p.qos, p.retain, p.dup, p.packet_id, version, block)


def _encode_ack(p: Ack, carrier: int, first_byte: int, version: int) -> bytes:
    body = _encode_packet_id(p.packet_id)
    # A 3.x acknowledgement cannot say why; a 5.0 one leaves out what has its default.
    if version == MQTT_5:
        if p.properties != NO_PROPERTIES:
            body += encode_u8(p.reason) + encode_properties(p.properties, carrier)
        elif p.reason:
            body += encode_u8(p.reason)
    return _frame(first_byte, body)


def _encode_connect(p: Connect) -> bytes:
    if p.version not in _PROTOCOL_HEADS:
        raise ValueError(f"protocol level {p.version} is not one of 3, 4, 5")
    v5 = p.version == MQTT_5
    flags = p.clean_start << 1 | (p.username is not None) << 7 | (p.password is not None) << 6
    if p.will is not None:
        flags |= 0x04 | p.will.qos << 3 | p.will.retain << 5
    parts = [_PROTOCOL_HEADS[p.version], encode_u8(flags), encode_u16(p.keep_alive)]
    if v5:
        parts.append(encode_properties(p.properties, CONNECT))
    parts.append(encode_binary(p.client_id))
    if p.will is not None:
        if v5:
            block = encode_message_properties(p.will.properties, p.will.passed_on, WILL)
            parts.append(with_length(block))
        parts += (encode_binary(p.will.topic), encode_binary(p.will.payload))
    if p.username is not None:
        parts.append(encode_binary(p.username))
    if p.password is not None:
        parts.append(encode_binary(p.password))
    return _frame(0x10, b"".join(parts))


def _encode_connack(p: Connack, version: int) -> bytes:
    # [MQTT-3.2.2-6]: a refusal never says session present; 3.1 has no such flag.
    session_present = p.session_present and p.reason == 0 and version != MQTT_3_1
    if version != MQTT_5:
        return _frame(0x20, bytes((session_present, connack_code_v3(p.reason))))
    body = bytes((session_present,)) + encode_u8(p.reason) + encode_properties(p.properties, CONNACK)
    return _frame(0x20, body)


def _encode_subscribe(p: Subscribe, version: int) -> bytes:
    parts = [_encode_packet_id(p.packet_id)]
    if version == MQTT_5:
        parts.append(encode_properties(p.properties, SUBSCRIBE))
    for request in p.filters:
        options = request.qos
        if version == MQTT_5:
            options |= request.no_local << 2 | request.retain_as_published << 3 | request.retain_handling << 4
        parts += (encode_binary(request.filter), encode_u8(options))
    return _frame(0x82, b"".join(parts))


def _encode_suback(p: Suback, version: int) -> bytes:
    if version == MQTT_5:
        body = encode_properties(p.properties, SUBACK) + bytes(p.reasons)
    else:
        body = bytes(min(reason, 0x80) for reason in p.reasons)  # 3.1.1 knows one failure only.
    return _frame(0x90, _encode_packet_id(p.packet_id) + body)


def _encode_unsubscribe(p: Unsubscribe, version: int) -> bytes:
    parts = [_encode_packet_id(p.packet_id)]
    if version == MQTT_5:
        parts.append(encode_properties(p.properties, UNSUBSCRIBE))
    parts += map(encode_binary, p.filters)
    return _frame(0xA2, b"".join(parts))


def _encode_unsuback(p: Unsuback, version: int) -> bytes:
    body = _encode_packet_id(p.packet_id)
    if version == MQTT_5:
        body += encode_properties(p.properties, UNSUBACK) + bytes(p.reasons)
    return _frame(0xB0, body)


def _encode_disconnect(p: Disconnect, version: int) -> bytes:
    if version != MQTT_5:
        return _frame(0xE0, b"")
    return _frame(0xE0, _reason_and_properties(p, DISCONNECT))


def _encode_auth(p: Auth, version: int) -> bytes:
    if version != MQTT_5:
        raise ValueError("AUTH exists in MQTT 5 only")
    return _frame(0xF0, _reason_and_properties(p, AUTH))


def _reason_and_properties(p: Disconnect | Auth, carrier: int) -> bytes:
    if p.properties != NO_PROPERTIES:
        return encode_u8(p.reason) + encode_properties(p.properties, carrier)
    return encode_u8(p.reason) if p.reason else b""
