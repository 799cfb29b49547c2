"""Bytes ↔ packets of MQTT 3.1, 3.1.1 and 5.0, for both roles. Sans-I/O: no socket, clock or random source.

What belongs here: framing, the fields of every packet, and every rule of the standard that can be judged
from one packet alone. What does not: anything that needs the connection's history (which packet may come
when, topic aliases, packet ids in use), who may send which packet, and the syntax of topic filters
(`tidegate.router`).

May import: `tidegate.errors`, `tidegate.limits`. Every violation is a `PeerError` with its reason code.

    primitives   varints, strings, numbers
    properties   the property table, and who may carry what
    decode       bytes → packet
    encode       packet → bytes
    stream       cutting a byte stream into packets
    codec        the front door: re-exports the functions of the above
    packets      the dataclasses
    reasons      reason codes
"""

from .codec import (
    PacketStream,
    decode,
    encode,
    encode_message_properties,
    encode_properties,
    encode_property_block,
    encode_publish,
    encode_varint,
    more_filters_than,
    peek_packet_max,
    peek_version,
    read_properties,
    read_varint,
)
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
from .reasons import Reason, connack_code_v3, reason_of_connack_v3

__all__ = [
    "MQTT_3_1",
    "MQTT_3_1_1",
    "MQTT_5",
    "NO_PROPERTIES",
    "Ack",
    "Auth",
    "Connack",
    "Connect",
    "Disconnect",
    "FilterRequest",
    "Packet",
    "PacketStream",
    "Pingreq",
    "Pingresp",
    "Properties",
    "Puback",
    "Pubcomp",
    "Publish",
    "Pubrec",
    "Pubrel",
    "Reason",
    "Suback",
    "Subscribe",
    "Unsuback",
    "Unsubscribe",
    "Will",
    "connack_code_v3",
    "decode",
    "encode",
    "encode_message_properties",
    "encode_properties",
    "encode_property_block",
    "encode_publish",
    "encode_varint",
    "more_filters_than",
    "peek_packet_max",
    "peek_version",
    "read_properties",
    "read_varint",
    "reason_of_connack_v3",
]
