"""Reason codes of MQTT 5 (standard, section 2.4) and their translation for 3.x clients.

Inside the broker a reason is always a number of MQTT 5; only CONNACK has codes of its own in MQTT 3
(`connack_code_v3`). A 3.1.1 SUBACK failure is 0x80 whatever the reason; other 3.x acknowledgements carry
none.
"""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Below 0x80: the operation succeeded. From 0x80 on: it failed.

    Three names share the value 0, as in the standard: `SUCCESS` is the member, the others are its aliases.
    """

    SUCCESS = 0x00
    NORMAL_DISCONNECTION = 0x00
    GRANTED_QOS_0 = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    REAUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_ID_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_ID_IN_USE = 0x91
    PACKET_ID_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


# Section 3.2.2.3 of MQTT 3.1.1: 1 protocol version, 2 identifier rejected, 3 server unavailable,
# 4 bad user name or password, 5 not authorised.
_CONNACK_V3: dict[int, int] = {
    Reason.SUCCESS: 0,
    Reason.UNSUPPORTED_PROTOCOL_VERSION: 1,
    Reason.CLIENT_ID_NOT_VALID: 2,
    Reason.BAD_USER_NAME_OR_PASSWORD: 4,
    Reason.BAD_AUTHENTICATION_METHOD: 4,
    Reason.NOT_AUTHORIZED: 5,
    Reason.BANNED: 5,
}
_SERVER_UNAVAILABLE_V3 = 3

# The way back, for the client role: what a 3.x return code means in the numbers of MQTT 5.
_REASON_OF_CONNACK_V3: tuple[int, ...] = (
    Reason.SUCCESS,
    Reason.UNSUPPORTED_PROTOCOL_VERSION,
    Reason.CLIENT_ID_NOT_VALID,
    Reason.SERVER_UNAVAILABLE,
    Reason.BAD_USER_NAME_OR_PASSWORD,
    Reason.NOT_AUTHORIZED,
)


def connack_code_v3(reason: int) -> int:
    """The CONNACK return code (0–5) that tells a 3.x client what `reason` tells a 5.0 client.

    Every failure without a counterpart is "server unavailable", the code that says least about the cause.
    """
    return _CONNACK_V3.get(reason, _SERVER_UNAVAILABLE_V3)


def reason_of_connack_v3(code: int) -> int | None:
    """The MQTT 5 reason of a 3.x return code, or None for a reserved code (6–255)."""
    return _REASON_OF_CONNACK_V3[code] if code < len(_REASON_OF_CONNACK_V3) else None
