"""What the bytes mean: one frozen dataclass per control packet, the same for every protocol version.

Text on the wire (topics, filters, client ids, user names, reason strings …) stays `bytes`: it is compared,
hashed and sent on, hardly ever shown, and the decoder has already proved it to be UTF-8.

**What a broker hands on.** `passed_on` of a `Publish` or `Will` is the raw encoding, in the order of arrival,
of exactly the properties that a broker must forward unchanged: payload format, content type, response topic,
correlation data and user properties. [MQTT-3.3.2-4], [MQTT-3.3.2-15], [MQTT-3.3.2-16], [MQTT-3.3.2-17],
[MQTT-3.3.2-18], [MQTT-3.3.2-20]

The encoder's rule: when `passed_on` is not empty, it is sent as it is and those five fields of
`properties` are ignored; when it is empty, they are encoded from `properties`. The fields that are not
passed on (message expiry, topic alias, subscription identifiers; will delay) are always encoded from
`properties`.

For MQTT 3.x, the fields that do not exist there have their defaults after decoding and are left out when
encoding: a packet never has to be rewritten for the version of its receiver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

MQTT_3_1 = 3
MQTT_3_1_1 = 4
MQTT_5 = 5


@dataclass(frozen=True, slots=True, repr=False)
class Properties:
    """Every property of MQTT 5 (section 2.2.2.2). None, or () for the two that repeat, means absent.

    The repr shows those that are present; authentication data, a secret, only as being there.
    One-byte flags are `bool`; `payload_format` and `maximum_qos` are numbers that happen to be 0 or 1.
    """

    payload_format: int | None = None
    message_expiry: int | None = None
    content_type: bytes | None = None
    response_topic: bytes | None = None
    correlation_data: bytes | None = None
    subscription_ids: tuple[int, ...] = ()
    session_expiry: int | None = None
    assigned_client_id: bytes | None = None
    server_keep_alive: int | None = None
    auth_method: bytes | None = None
    auth_data: bytes | None = None
    request_problem_info: bool | None = None
    will_delay: int | None = None
    request_response_info: bool | None = None
    response_info: bytes | None = None
    server_reference: bytes | None = None
    reason_string: bytes | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int | None = None
    topic_alias: int | None = None
    maximum_qos: int | None = None
    retain_available: bool | None = None
    user: tuple[tuple[bytes, bytes], ...] = ()
    maximum_packet_size: int | None = None
    wildcard_available: bool | None = None
    subscription_ids_available: bool | None = None
    shared_available: bool | None = None

    def __repr__(self) -> str:
        shown = []
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value != ():
                shown.append(f"{name}=…" if name == "auth_data" else f"{name}={value!r}")
        return f"Properties({', '.join(shown)})"


NO_PROPERTIES = Properties()


@dataclass(frozen=True, slots=True)
class Will:
    topic: bytes
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: Properties = NO_PROPERTIES
    passed_on: bytes = b""


@dataclass(frozen=True, slots=True)
class Connect:
    """`clean_start` is called "clean session" in MQTT 3.x. The password is kept out of the repr."""

    version: int
    client_id: bytes
    clean_start: bool = True
    keep_alive: int = 0
    will: Will | None = None
    username: bytes | None = None
    password: bytes | None = field(default=None, repr=False)
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Connack:
    """`reason` is a reason of MQTT 5 for every version; the codec translates it for 3.x."""

    session_present: bool = False
    reason: int = 0
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Publish:
    """`packet_id` is 0 for QoS 0, which has none on the wire."""

    topic: bytes
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: Properties = NO_PROPERTIES
    passed_on: bytes = b""


@dataclass(frozen=True, slots=True)
class Puback:
    packet_id: int
    reason: int = 0
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pubrec:
    packet_id: int
    reason: int = 0
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pubrel:
    packet_id: int
    reason: int = 0
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pubcomp:
    packet_id: int
    reason: int = 0
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class FilterRequest:
    """One line of a SUBSCRIBE. The syntax of `filter` has not been judged yet: that is the router's."""

    filter: bytes
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


@dataclass(frozen=True, slots=True)
class Subscribe:
    packet_id: int
    filters: tuple[FilterRequest, ...]
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Suback:
    packet_id: int
    reasons: tuple[int, ...]
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    packet_id: int
    filters: tuple[bytes, ...]
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Unsuback:
    """`reasons` is () in MQTT 3.x, where an UNSUBACK only names the packet it answers."""

    packet_id: int
    reasons: tuple[int, ...] = ()
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pingreq:
    pass


@dataclass(frozen=True, slots=True)
class Pingresp:
    pass


@dataclass(frozen=True, slots=True)
class Disconnect:
    reason: int = 0
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Auth:
    """MQTT 5 only."""

    reason: int = 0
    properties: Properties = NO_PROPERTIES


Ack: TypeAlias = Puback | Pubrec | Pubrel | Pubcomp
Packet: TypeAlias = (
    Connect
    | Connack
    | Publish
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
