"""Bytes → packet.

`decode` is given a packet's first byte and its body (what follows the remaining length) and judges everything
that can be judged from this one packet. Clause numbers are those of MQTT 5 unless "3.1.1" is said.

What MQTT 3.1 allows and its successors forbid is allowed to 3.1 clients only:
- any value in the flags of the first byte that are unused there: all four of CONNECT, PUBACK, PUBREC, PUBCOMP,
  PINGREQ and DISCONNECT, DUP and RETAIN of PUBREL, SUBSCRIBE and UNSUBSCRIBE (3.1, sections 2.1 and 3);
- a user name or password that its flag promises but the packet does not hold (3.1, section 3.1);
- any value in the CONNECT flags that are unused there.

The 3.1 limit of 23 characters for client ids is not enforced: brokers have long ignored it and clients
rely on that. An empty one is refused, because 3.1 knows no broker-made client ids.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.errors import MalformedPacket, PeerError, ProtocolViolation, Refused

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
    FilterRequest,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from .primitives import read_binary, read_topic_name, read_u8, read_u16, read_utf8, read_varint
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
    read_properties,
)
from .reasons import Reason, reason_of_connack_v3

# Which reasons which packet may carry (table 2-6 of the standard). [MQTT-3.2.2-8], [MQTT-3.4.2-1],
# [MQTT-3.5.2-1], [MQTT-3.6.2-1], [MQTT-3.7.2-1], [MQTT-3.9.3-2], [MQTT-3.11.3-2],
# [MQTT-3.14.2-1], [MQTT-3.15.2-1]
_PUBLISH_ANSWERS = frozenset(b"\x00\x10\x80\x83\x87\x90\x91\x97\x99")
_RELEASE_ANSWERS = frozenset(b"\x00\x92")
_REASONS: dict[int, frozenset[int]] = {
    CONNACK: frozenset((0, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F)),
    PUBACK: _PUBLISH_ANSWERS,
    PUBREC: _PUBLISH_ANSWERS,
    PUBREL: _RELEASE_ANSWERS,
    PUBCOMP: _RELEASE_ANSWERS,
    SUBACK: frozenset(b"\x00\x01\x02\x80\x83\x87\x8f\x91\x97\x9e\xa1\xa2"),
    UNSUBACK: frozenset(b"\x00\x11\x80\x83\x87\x8f\x91"),
    DISCONNECT: frozenset(
        (0, 4, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8C, 0x91), *range(0x93, 0xA3))
    ),
    AUTH: frozenset(b"\x00\x18\x19"),
}
_SUBACK_REASONS_V3 = frozenset(b"\x00\x01\x02\x80")


def decode(first_byte: int, body: bytes, version: int, *, from_server: bool = False) -> Packet:
    """The packet, or `MalformedPacket` / `ProtocolViolation` / `Refused` with the reason code to answer with.

    `version` is the connection's protocol level; it is ignored for CONNECT, which brings its own.
    `from_server` says whose bytes these are: the same PUBLISH may carry subscription identifiers from a
    server only. Packets that only one side may send are decoded whoever sent them; refusing them is the
    session's.
    """
    return _DECODERS[first_byte >> 4](first_byte & 0x0F, body, version, from_server)


def peek_version(body: bytes) -> int | None:
    """The version in which to answer a CONNECT that `decode` refused, or None when it can read no answer.

    A protocol level that is too new is answered in the newest version, so that the client can read why.
    """
    if body.startswith(b"\x00\x06MQIsdp") and len(body) > 8:
        return MQTT_3_1
    if body.startswith(b"\x00\x04MQTT") and len(body) > 6:
        return MQTT_3_1_1 if body[6] < MQTT_5 else MQTT_5
    return None


def peek_packet_max(body: bytes) -> int:
    """The largest packet that the sender of a CONNECT takes, whatever else is wrong with it; 0 for any."""
    if peek_version(body) != MQTT_5:
        return 0
    try:
        return read_properties(body, 10, CONNECT)[0].maximum_packet_size or 0
    except PeerError:
        return 0


def more_filters_than(limit: int, body: bytes, version: int, options: int) -> bool:
    """Whether a SUBSCRIBE (with a byte of options for each) or UNSUBSCRIBE names more filters: found out without making
    anything of them, and without looking at more."""
    shortest = 3 + options
    if len(body) <= 2 + shortest * limit:
        return False
    pos = 2
    if version == MQTT_5:
        size, pos = read_varint(body, pos)
        pos += size
    end = len(body) - 1
    for _ in range(limit):
        if pos >= end:
            return False
        pos += 2 + (body[pos] << 8 | body[pos + 1]) + options
    return pos < end


def _require_flags(flags: int, expected: int, version: int) -> None:
    # In 3.1 these are no reserved bits but unused ones, and old clients do send them set. Only the QoS of 1 that it
    # asks of PUBREL, SUBSCRIBE and UNSUBSCRIBE means something.
    used = 0x0F if version != MQTT_3_1 else 0x06 if expected else 0
    if flags & used != expected:
        raise MalformedPacket("reserved bits of the first byte are set wrongly")  # [MQTT-2.1.3-1]


def _require_end(body: bytes, pos: int) -> None:
    if pos != len(body):
        raise MalformedPacket("bytes left over at the end of the packet")


def _read_packet_id(body: bytes, pos: int) -> tuple[int, int]:
    packet_id, pos = read_u16(body, pos)
    if packet_id == 0:
        raise ProtocolViolation("packet identifier is 0")  # [MQTT-2.2.1-3], [MQTT-2.2.1-4]
    return packet_id, pos


def _check_reason(reason: int, carrier: int) -> None:
    if reason not in _REASONS[carrier]:
        raise ProtocolViolation(f"reason code 0x{reason:02x} does not belong in this packet")


def _decode_reserved(flags: int, body: bytes, version: int, from_server: bool) -> Packet:
    raise MalformedPacket("packet type 0 is reserved")


def _decode_connect(flags: int, body: bytes, version: int, from_server: bool) -> Connect:
    name, pos = read_binary(body, 0)
    version, pos = read_u8(body, pos)
    # [MQTT-3.1.2-1], [MQTT-3.1.2-2]
    if (name, version) not in ((b"MQTT", MQTT_5), (b"MQTT", MQTT_3_1_1), (b"MQIsdp", MQTT_3_1)):
        raise Refused("protocol name or level is not supported", Reason.UNSUPPORTED_PROTOCOL_VERSION)
    _require_flags(flags, 0, version)
    connect_flags, pos = read_u8(body, pos)
    _check_connect_flags(connect_flags, version)
    keep_alive, pos = read_u16(body, pos)
    properties = NO_PROPERTIES
    if version == MQTT_5:
        properties, _, pos = read_properties(body, pos, CONNECT)
        if properties.auth_data is not None and properties.auth_method is None:
            raise ProtocolViolation("authentication data without a method")  # 3.1.2.11.10
    # [MQTT-3.1.3-1]: client id, will, user name, password, in this order.
    client_id, pos = read_utf8(body, pos)  # [MQTT-3.1.3-3], [MQTT-3.1.3-4]
    clean_start = bool(connect_flags & 0x02)
    # 5.0 lets the broker name any client [MQTT-3.1.3-6], 3.1.1 only a clean one (3.1.1: [MQTT-3.1.3-8]).
    if not client_id and (version == MQTT_3_1 or (version == MQTT_3_1_1 and not clean_start)):
        raise ProtocolViolation("empty client identifier", Reason.CLIENT_ID_NOT_VALID)
    will = None
    if connect_flags & 0x04:
        will, pos = _read_will(connect_flags, body, pos, version)
    username = password = None
    lenient = version == MQTT_3_1
    if connect_flags & 0x80 and not (lenient and pos == len(body)):
        username, pos = read_utf8(body, pos)  # [MQTT-3.1.2-17], [MQTT-3.1.3-12]
    if connect_flags & 0x40 and not (lenient and pos == len(body)):
        password, pos = read_binary(body, pos)  # [MQTT-3.1.2-19]
    _require_end(body, pos)
    return Connect(version, client_id, clean_start, keep_alive, will, username, password, properties)


def _check_connect_flags(flags: int, version: int) -> None:
    if version != MQTT_3_1:
        if flags & 0x01:
            raise MalformedPacket("reserved CONNECT flag is set")  # [MQTT-3.1.2-3]
        if not flags & 0x04 and flags & 0x38:
            raise MalformedPacket(
                "will QoS or will retain without a will"
            )  # [MQTT-3.1.2-11], [MQTT-3.1.2-13]
    if flags & 0x04 and flags & 0x18 == 0x18:
        raise MalformedPacket("will QoS 3")  # [MQTT-3.1.2-12]
    if version != MQTT_5 and flags & 0xC0 == 0x40:
        raise MalformedPacket("password without a user name")  # 3.1.1: [MQTT-3.1.2-22]


def _read_will(connect_flags: int, body: bytes, pos: int, version: int) -> tuple[Will, int]:
    """[MQTT-3.1.2-9]"""
    properties, passed_on = NO_PROPERTIES, b""
    if version == MQTT_5:
        properties, passed_on, pos = read_properties(body, pos, WILL)
    topic, pos = read_utf8(body, pos)  # [MQTT-3.1.3-11], [MQTT-4.7.3-2]
    if not topic:
        raise ProtocolViolation("empty will topic")  # [MQTT-4.7.3-1]; there is no alias for it (3.3.2.1)
    if b"+" in topic or b"#" in topic:  # [MQTT-3.3.2-2]
        # No return code of 3.x says so: a CONNECT that breaks the format is not answered (3.1.1: [MQTT-3.1.4-1]).
        reason = Reason.TOPIC_NAME_INVALID if version == MQTT_5 else Reason.PROTOCOL_ERROR
        raise ProtocolViolation("wildcard in the will topic", reason)
    payload, pos = read_binary(body, pos)
    qos, retain = connect_flags >> 3 & 3, bool(connect_flags & 0x20)
    return Will(topic, payload, qos, retain, properties, passed_on), pos


def _decode_connack(flags: int, body: bytes, version: int, from_server: bool) -> Connack:
    _require_flags(flags, 0, version)
    acknowledge_flags, pos = read_u8(body, 0)
    code, pos = read_u8(body, pos)
    properties = NO_PROPERTIES
    if version == MQTT_5:
        _check_reason(code, CONNACK)
        reason: int | None = code
        properties, _, pos = read_properties(body, pos, CONNACK)
    else:
        reason = reason_of_connack_v3(code)
    if reason is None:
        raise MalformedPacket("reserved CONNACK return code")
    _require_end(body, pos)
    if version == MQTT_3_1:
        acknowledge_flags = 0  # 3.1 has no session present flag: the byte is unused.
    if acknowledge_flags > 1:
        raise MalformedPacket("reserved CONNACK flags are set")  # [MQTT-3.2.2-1]
    if acknowledge_flags and reason:
        raise ProtocolViolation("session present in a refusal")  # [MQTT-3.2.2-6]
    return Connack(acknowledge_flags == 1, reason, properties)


def _decode_publish(flags: int, body: bytes, version: int, from_server: bool) -> Publish:
    qos = flags >> 1 & 3
    dup = flags & 0x08 != 0
    if qos == 3:
        raise MalformedPacket("QoS 3")  # [MQTT-3.3.1-4]
    if dup and qos == 0:
        raise MalformedPacket("DUP with QoS 0")  # [MQTT-3.3.1-2]
    topic, pos = read_topic_name(body, 0)  # [MQTT-3.3.2-1]
    packet_id = 0
    if qos:
        packet_id, pos = _read_packet_id(body, pos)  # [MQTT-2.2.1-2]
    properties, passed_on = NO_PROPERTIES, b""
    if version == MQTT_5:
        properties, passed_on, pos = read_properties(body, pos, PUBLISH, from_server=from_server)
        if properties.subscription_ids and not from_server:
            raise ProtocolViolation("subscription identifier in a client's PUBLISH")  # [MQTT-3.3.4-6]
        if not topic and properties.topic_alias is None:
            raise ProtocolViolation("neither topic nor topic alias")  # 3.3.2.1
    elif not topic:
        raise ProtocolViolation("empty topic", Reason.TOPIC_NAME_INVALID)  # [MQTT-4.7.3-1]
    return Publish(topic, body[pos:], qos, flags & 0x01 != 0, dup, packet_id, properties, passed_on)


def _read_ack(body: bytes, version: int, carrier: int) -> tuple[int, int, Properties]:
    """The four publish acknowledgements. In 5.0, reason and properties may both be missing, or the latter."""
    packet_id, pos = _read_packet_id(body, 0)
    if version != MQTT_5 or pos == len(body):
        _require_end(body, pos)
        return packet_id, 0, NO_PROPERTIES
    reason = body[pos]
    pos += 1
    _check_reason(reason, carrier)
    properties = NO_PROPERTIES
    if pos < len(body):
        properties, _, pos = read_properties(body, pos, carrier)
        _require_end(body, pos)
    return packet_id, reason, properties


def _decode_puback(flags: int, body: bytes, version: int, from_server: bool) -> Ack:
    _require_flags(flags, 0, version)
    return Puback(*_read_ack(body, version, PUBACK))


def _decode_pubrec(flags: int, body: bytes, version: int, from_server: bool) -> Ack:
    _require_flags(flags, 0, version)
    return Pubrec(*_read_ack(body, version, PUBREC))


def _decode_pubrel(flags: int, body: bytes, version: int, from_server: bool) -> Ack:
    _require_flags(flags, 0x02, version)  # [MQTT-3.6.1-1]
    return Pubrel(*_read_ack(body, version, PUBREL))


def _decode_pubcomp(flags: int, body: bytes, version: int, from_server: bool) -> Ack:
    _require_flags(flags, 0, version)
    return Pubcomp(*_read_ack(body, version, PUBCOMP))


def _decode_subscribe(flags: int, body: bytes, version: int, from_server: bool) -> Subscribe:
    _require_flags(flags, 0x02, version)  # [MQTT-3.8.1-1]
    packet_id, pos = _read_packet_id(body, 0)
    properties = NO_PROPERTIES
    if version == MQTT_5:
        properties, _, pos = read_properties(body, pos, SUBSCRIBE)
        if len(properties.subscription_ids) > 1:
            raise ProtocolViolation("more than one subscription identifier in a SUBSCRIBE")  # 3.8.2.1.2
    filters: list[FilterRequest] = []
    while pos < len(body):
        topic_filter, pos = _read_filter(body, pos)
        options, pos = read_u8(body, pos)
        filters.append(_filter_request(topic_filter, options, version))
    if not filters:
        raise ProtocolViolation("SUBSCRIBE without a filter")  # [MQTT-3.8.3-2]
    return Subscribe(packet_id, tuple(filters), properties)


def _read_filter(body: bytes, pos: int) -> tuple[bytes, int]:
    topic_filter, pos = read_utf8(body, pos)  # [MQTT-3.8.3-1], [MQTT-3.10.3-1]
    if not topic_filter:
        raise MalformedPacket("empty topic filter")  # [MQTT-4.7.3-1]
    return topic_filter, pos


def _filter_request(topic_filter: bytes, options: int, version: int) -> FilterRequest:
    if version != MQTT_5:
        if options > 2:
            raise MalformedPacket("reserved bits or QoS 3 in a SUBSCRIBE")  # 3.1.1: [MQTT-3-8.3-4]
        return FilterRequest(topic_filter, options)
    if options & 0xC0:
        raise MalformedPacket("reserved subscription options are set")  # [MQTT-3.8.3-5]
    qos, retain_handling = options & 3, options >> 4 & 3
    no_local = options & 0x04 != 0
    if qos == 3 or retain_handling == 3:
        raise ProtocolViolation("QoS or retain handling of 3 in a SUBSCRIBE")  # 3.8.3.1
    if no_local and topic_filter.startswith(b"$share/"):
        raise ProtocolViolation("no local on a shared subscription")  # [MQTT-3.8.3-4]
    return FilterRequest(topic_filter, qos, no_local, options & 0x08 != 0, retain_handling)


def _decode_suback(flags: int, body: bytes, version: int, from_server: bool) -> Suback:
    _require_flags(flags, 0, version)
    packet_id, pos = _read_packet_id(body, 0)
    properties, allowed = NO_PROPERTIES, _SUBACK_REASONS_V3
    if version == MQTT_5:
        properties, _, pos = read_properties(body, pos, SUBACK)
        allowed = _REASONS[SUBACK]
    reasons = tuple(body[pos:])
    if not reasons:
        raise ProtocolViolation("SUBACK without a reason code")
    if not allowed.issuperset(reasons):
        raise ProtocolViolation("reason code does not belong in a SUBACK")
    return Suback(packet_id, reasons, properties)


def _decode_unsubscribe(flags: int, body: bytes, version: int, from_server: bool) -> Unsubscribe:
    _require_flags(flags, 0x02, version)  # [MQTT-3.10.1-1]
    packet_id, pos = _read_packet_id(body, 0)
    properties = NO_PROPERTIES
    if version == MQTT_5:
        properties, _, pos = read_properties(body, pos, UNSUBSCRIBE)
    filters: list[bytes] = []
    while pos < len(body):
        topic_filter, pos = _read_filter(body, pos)
        filters.append(topic_filter)
    if not filters:
        raise ProtocolViolation("UNSUBSCRIBE without a filter")  # [MQTT-3.10.3-2]
    return Unsubscribe(packet_id, tuple(filters), properties)


def _decode_unsuback(flags: int, body: bytes, version: int, from_server: bool) -> Unsuback:
    _require_flags(flags, 0, version)
    packet_id, pos = _read_packet_id(body, 0)
    if version != MQTT_5:
        _require_end(body, pos)
        return Unsuback(packet_id)
    properties, _, pos = read_properties(body, pos, UNSUBACK)
    reasons = tuple(body[pos:])
    if not reasons:
        raise ProtocolViolation("UNSUBACK without a reason code")
    if not _REASONS[UNSUBACK].issuperset(reasons):
        raise ProtocolViolation("reason code does not belong in an UNSUBACK")
    return Unsuback(packet_id, reasons, properties)


def _decode_pingreq(flags: int, body: bytes, version: int, from_server: bool) -> Pingreq:
    _require_flags(flags, 0, version)
    _require_end(body, 0)
    return Pingreq()


def _decode_pingresp(flags: int, body: bytes, version: int, from_server: bool) -> Pingresp:
    _require_flags(flags, 0, version)
    _require_end(body, 0)
    return Pingresp()


def _decode_disconnect(flags: int, body: bytes, version: int, from_server: bool) -> Disconnect:
    _require_flags(flags, 0, version)  # [MQTT-3.14.1-1]
    if version != MQTT_5:
        _require_end(body, 0)
    if not body:
        return Disconnect()
    reason = body[0]
    _check_reason(reason, DISCONNECT)
    properties = NO_PROPERTIES
    if len(body) > 1:
        properties, _, pos = read_properties(body, 1, DISCONNECT)
        _require_end(body, pos)
    return Disconnect(reason, properties)


def _decode_auth(flags: int, body: bytes, version: int, from_server: bool) -> Auth:
    _require_flags(flags, 0, version)  # [MQTT-3.15.1-1]
    if version != MQTT_5:
        raise MalformedPacket("packet type 15 is reserved before MQTT 5")
    if not body:
        return Auth()  # 3.15.2.1: success without properties may be left out altogether.
    reason = body[0]
    _check_reason(reason, AUTH)
    properties, _, pos = read_properties(body, 1, AUTH)
    _require_end(body, pos)
    if properties.auth_method is None:
        raise ProtocolViolation("AUTH without an authentication method")  # 3.15.2.2.2
    return Auth(reason, properties)


_DECODERS: tuple[Callable[[int, bytes, int, bool], Packet], ...] = (
    _decode_reserved,
    _decode_connect,
    _decode_connack,
    _decode_publish,
    _decode_puback,
    _decode_pubrec,
    _decode_pubrel,
    _decode_pubcomp,
    _decode_subscribe,
    _decode_suback,
    _decode_unsubscribe,
    _decode_unsuback,
    _decode_pingreq,
    _decode_pingresp,
    _decode_disconnect,
    _decode_auth,
)
