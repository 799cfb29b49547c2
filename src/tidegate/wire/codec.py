"""The codec's front door: the functions that other packages call, wherever in this one they are written."""

from __future__ import annotations

from .decode import decode, more_filters_than, peek_packet_max, peek_version
from .encode import encode, encode_publish
from .primitives import encode_varint, read_varint
from .properties import (
    encode_message_properties,
    encode_properties,
    encode_property_block,
    read_properties,
)
from .stream import PacketStream

__all__ = [
    "PacketStream",
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
]
