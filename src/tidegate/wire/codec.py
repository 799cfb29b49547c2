"""The codec's front door: `decode`, `encode`, `encode_publish`, `PacketStream`."""

from __future__ import annotations

from .packets import Packet


def decode(first_byte: int, body: bytes, version: int) -> Packet:
    raise NotImplementedError


def encode(packet: Packet, version: int) -> bytes:
    raise NotImplementedError


def read_varint(buf: bytes, pos: int) -> tuple[int, int]:
    raise NotImplementedError


def encode_varint(n: int) -> bytes:
    raise NotImplementedError


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
    raise NotImplementedError


class PacketStream:
    def __init__(self, packet_bytes_max: int) -> None:
        raise NotImplementedError

    @property
    def pending_bytes(self) -> int:
        raise NotImplementedError

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        raise NotImplementedError
