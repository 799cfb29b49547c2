"""The properties of MQTT 5 (section 2.2.2): one table of who may carry what, read by decoder and encoder.

On the wire, a packet's properties are a variable byte integer, the length of what follows, and then, one
after the other, an identifier and its value. Here a *property block* is what follows the length.

All identifiers of the standard are below 128, so that the identifier, formally a variable byte integer, is
always one byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tidegate.errors import MalformedPacket, ProtocolViolation, Refused
from tidegate.limits import REPEATED_PROPERTIES_MAX

from .packets import NO_PROPERTIES, Properties
from .primitives import (
    encode_binary,
    encode_u8,
    encode_u16,
    encode_u32,
    encode_varint,
    read_binary,
    read_topic_name,
    read_u8,
    read_u16,
    read_u32,
    read_utf8,
    read_varint,
)
from .reasons import Reason

# Carriers of properties: the packet types of section 2.1.2, and 0, which no packet has, for the will.
WILL = 0
CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 1, 2, 3, 4, 5, 6, 7
SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT, AUTH = 8, 9, 10, 11, 12, 13, 14, 15


def _read_bit(buf: bytes, pos: int) -> tuple[int, int]:
    value, pos = read_u8(buf, pos)
    if value > 1:
        raise ProtocolViolation("a property that is 0 or 1 has another value")
    return value, pos


def _read_flag(buf: bytes, pos: int) -> tuple[bool, int]:
    value, pos = _read_bit(buf, pos)
    return value == 1, pos


def _read_nonzero(
    read: Callable[[bytes, int], tuple[int, int]], reason: int
) -> Callable[..., tuple[int, int]]:
    def read_nonzero(buf: bytes, pos: int) -> tuple[int, int]:
        value, pos = read(buf, pos)
        if value == 0:
            raise ProtocolViolation("a property that must not be 0 is 0", reason)
        return value, pos

    return read_nonzero


def _read_response_topic(buf: bytes, pos: int) -> tuple[bytes, int]:
    """[MQTT-3.3.2-13] UTF-8, [MQTT-3.3.2-14] without wildcards, [MQTT-4.7.3-1] not empty."""
    topic, pos = read_topic_name(buf, pos)
    if not topic:
        raise ProtocolViolation("empty response topic", Reason.TOPIC_NAME_INVALID)
    return topic, pos


def _read_pair(buf: bytes, pos: int) -> tuple[tuple[bytes, bytes], int]:
    """[MQTT-1.5.7-1]"""
    key, pos = read_utf8(buf, pos)
    value, pos = read_utf8(buf, pos)
    return (key, value), pos


def _encode_pair(pair: tuple[bytes, bytes]) -> bytes:
    return encode_binary(pair[0]) + encode_binary(pair[1])


_Reader = Callable[[bytes, int], tuple[Any, int]]
_Writer = Callable[[Any], bytes]

_BIT: tuple[_Reader, _Writer] = (_read_bit, encode_u8)
_FLAG: tuple[_Reader, _Writer] = (_read_flag, encode_u8)
_U16: tuple[_Reader, _Writer] = (read_u16, encode_u16)
_U32: tuple[_Reader, _Writer] = (read_u32, encode_u32)
_TEXT: tuple[_Reader, _Writer] = (read_utf8, encode_binary)
_BINARY: tuple[_Reader, _Writer] = (read_binary, encode_binary)
# Receive maximum and maximum packet size of 0 are protocol errors (3.1.2.11.3, 3.1.2.11.4), so is a
# subscription identifier of 0 (3.8.2.1.2); for a topic alias of 0 there is a code of its own (3.3.2.3.4).
_U16_NOT_0: tuple[_Reader, _Writer] = (_read_nonzero(read_u16, Reason.PROTOCOL_ERROR), encode_u16)
_U32_NOT_0: tuple[_Reader, _Writer] = (_read_nonzero(read_u32, Reason.PROTOCOL_ERROR), encode_u32)
_VARINT_NOT_0: tuple[_Reader, _Writer] = (_read_nonzero(read_varint, Reason.PROTOCOL_ERROR), encode_varint)
_ALIAS: tuple[_Reader, _Writer] = (_read_nonzero(read_u16, Reason.TOPIC_ALIAS_INVALID), encode_u16)
_RESPONSE_TOPIC: tuple[_Reader, _Writer] = (_read_response_topic, encode_binary)
_PAIR: tuple[_Reader, _Writer] = (_read_pair, _encode_pair)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line of table 2-4 of the standard."""

    identifier: int
    field: str
    read: _Reader
    write: _Writer
    carriers: int  # bit n is set: a carrier of type n may have this property
    repeats: bool
    passed_on: bool


def _rule(
    identifier: int, field: str, kind: tuple[_Reader, _Writer], *carriers: int, passed_on: bool = False
) -> _Rule:
    mask = sum(1 << carrier for carrier in carriers)
    repeats = field in ("subscription_ids", "user")
    return _Rule(identifier, field, *kind, mask, repeats, passed_on)


_ACKS = (PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK)

_RULES = (
    _rule(0x01, "payload_format", _BIT, PUBLISH, WILL, passed_on=True),
    _rule(0x02, "message_expiry", _U32, PUBLISH, WILL),
    _rule(0x03, "content_type", _TEXT, PUBLISH, WILL, passed_on=True),
    _rule(0x08, "response_topic", _RESPONSE_TOPIC, PUBLISH, WILL, passed_on=True),
    _rule(0x09, "correlation_data", _BINARY, PUBLISH, WILL, passed_on=True),
    _rule(0x0B, "subscription_ids", _VARINT_NOT_0, PUBLISH, SUBSCRIBE),
    _rule(0x11, "session_expiry", _U32, CONNECT, CONNACK, DISCONNECT),
    _rule(0x12, "assigned_client_id", _TEXT, CONNACK),
    _rule(0x13, "server_keep_alive", _U16, CONNACK),
    _rule(0x15, "auth_method", _TEXT, CONNECT, CONNACK, AUTH),
    _rule(0x16, "auth_data", _BINARY, CONNECT, CONNACK, AUTH),
    _rule(0x17, "request_problem_info", _FLAG, CONNECT),
    _rule(0x18, "will_delay", _U32, WILL),
    _rule(0x19, "request_response_info", _FLAG, CONNECT),
    _rule(0x1A, "response_info", _TEXT, CONNACK),
    _rule(0x1C, "server_reference", _TEXT, CONNACK, DISCONNECT),
    _rule(0x1F, "reason_string", _TEXT, CONNACK, *_ACKS, DISCONNECT, AUTH),
    _rule(0x21, "receive_maximum", _U16_NOT_0, CONNECT, CONNACK),
    _rule(0x22, "topic_alias_maximum", _U16, CONNECT, CONNACK),
    _rule(0x23, "topic_alias", _ALIAS, PUBLISH),
    _rule(0x24, "maximum_qos", _BIT, CONNACK),
    _rule(0x25, "retain_available", _FLAG, CONNACK),
    _rule(
        0x26,
        "user",
        _PAIR,
        *(CONNECT, CONNACK, PUBLISH, WILL, *_ACKS, SUBSCRIBE, UNSUBSCRIBE, DISCONNECT, AUTH),
        passed_on=True,
    ),
    _rule(0x27, "maximum_packet_size", _U32_NOT_0, CONNECT, CONNACK),
    _rule(0x28, "wildcard_available", _FLAG, CONNACK),
    _rule(0x29, "subscription_ids_available", _FLAG, CONNACK),
    _rule(0x2A, "shared_available", _FLAG, CONNACK),
)
_RULE_OF_IDENTIFIER: dict[int, _Rule] = {rule.identifier: rule for rule in _RULES}


def read_properties(
    buf: bytes, pos: int, carrier: int, *, from_server: bool = False
) -> tuple[Properties, bytes, int]:
    """The properties at `pos`, those of them that are passed on as raw bytes, and where the packet goes on.

    The raw bytes are gathered for PUBLISH and will only: nothing else of a packet is handed on. A client may send a
    property that repeats REPEATED_PROPERTIES_MAX times; a server may have added its own.
    """
    length, pos = read_varint(buf, pos)
    if length == 0:
        return NO_PROPERTIES, b"", pos
    end = pos + length
    if end > len(buf):
        raise MalformedPacket("the properties are longer than the packet")
    block = buf[pos:end]
    # [MQTT-3.3.2-17], [MQTT-3.3.2-18], [MQTT-3.1.3-10]: forwarded unaltered and in their order.
    keep_raw = carrier in (PUBLISH, WILL)
    raw: list[bytes] = []
    single: dict[str, Any] = {}
    repeated: dict[str, list[Any]] = {}
    at = 0
    while at < length:
        start = at
        rule = _RULE_OF_IDENTIFIER.get(block[at])
        if rule is None:
            raise MalformedPacket("unknown property")
        if not rule.carriers >> carrier & 1:
            raise MalformedPacket(f"property {rule.field} does not belong in this packet")
        value, at = rule.read(block, at + 1)
        if rule.repeats:
            values = repeated.setdefault(rule.field, [])
            values.append(value)
            if len(values) > REPEATED_PROPERTIES_MAX and not from_server:
                raise Refused(f"more than {REPEATED_PROPERTIES_MAX} {rule.field} properties", Reason.QUOTA_EXCEEDED)
        elif rule.field in single:
            raise ProtocolViolation(f"property {rule.field} given twice")
        else:
            single[rule.field] = value
        if keep_raw and rule.passed_on:
            raw.append(block[start:at])
    for field, values in repeated.items():
        single[field] = tuple(values)
    return Properties(**single), b"".join(raw), end


_values_of_all = attrgetter(*(rule.field for rule in _RULES))


def encode_property_block(properties: Properties, carrier: int) -> bytes:
    """The properties without their length. ValueError if `carrier` may not have one of them."""
    if properties is NO_PROPERTIES:
        return b""
    parts: list[bytes] = []
    for rule, value in zip(_RULES, _values_of_all(properties), strict=True):
        if value is None or value == ():
            continue
        if not rule.carriers >> carrier & 1:
            raise ValueError(f"property {rule.field} does not belong in a packet of type {carrier}")
        _append(parts, rule, value)
    return b"".join(parts)


def encode_properties(properties: Properties, carrier: int) -> bytes:
    """The properties with their length in front. [MQTT-2.2.2-1]: a length of 0 says that there are none."""
    return with_length(encode_property_block(properties, carrier))


def encode_message_properties(properties: Properties, passed_on: bytes, carrier: int) -> bytes:
    """The property block of a PUBLISH or will: `passed_on` as it is, or else the fields it would hold, and
    those of the fields that are not passed on which this carrier may have. All others are ignored, so that
    the properties of a will can serve for the PUBLISH that it becomes."""
    if properties is NO_PROPERTIES:
        return passed_on
    parts = [passed_on]
    for rule, value in zip(_RULES, _values_of_all(properties), strict=True):
        if value is None or value == () or not rule.carriers >> carrier & 1:
            continue
        if not (rule.passed_on and passed_on):
            _append(parts, rule, value)
    return b"".join(parts)


def _append(parts: list[bytes], rule: _Rule, value: Any) -> None:
    identifier = bytes((rule.identifier,))
    parts.extend(identifier + rule.write(one) for one in (value if rule.repeats else (value,)))


def with_length(block: bytes) -> bytes:
    return encode_varint(len(block)) + block if block else b"\x00"
