"""Cutting a byte stream into packets.

byte 1     type and flags           ┐
byte 2…5   remaining length, varint ┘ fixed header
then       as many bytes as it says: the body
"""

from __future__ import annotations

from tidegate.errors import MalformedPacket, PeerError, Refused

from .reasons import Reason


class PacketStream:
    """Turns chunks, cut anywhere, into (first byte, body) pairs. Judges the length only, not the content.

    A fault never hides the packets in front of it, wherever the stream was cut: when a chunk holds both,
    `feed` returns the packets, and the *next* call raises the fault, `feed(b"")` included. A caller that
    wants to know at once looks at `fault` when it has worked through the packets. After a fault nothing is
    buffered any more and every call raises it again: framing is lost for good.

    Memory: at most one unfinished packet is kept, so `pending_bytes` stays below `packet_bytes_max`; space is
    taken as bytes arrive, never because a length announces them.
    """

    __slots__ = ("_buffer", "_fault", "_needed_bytes", "_packet_bytes_max")

    def __init__(self, packet_bytes_max: int) -> None:
        self._packet_bytes_max = packet_bytes_max
        self._buffer = bytearray()
        # How long the buffer must get before there is any use in looking at it again. This keeps a packet
        # that comes byte by byte linear.
        self._needed_bytes = 2
        self._fault: PeerError | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of the unfinished packet that are held here."""
        return len(self._buffer)

    @property
    def fault(self) -> PeerError | None:
        """What the next `feed` will raise."""
        return self._fault

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        if self._fault is not None:
            raise self._fault
        buffer = self._buffer
        if not buffer:
            packets, pos = self._split(data)
            if self._fault is None and pos < len(data):
                buffer += memoryview(data)[pos:]
        else:
            buffer += data
            if len(buffer) < self._needed_bytes:
                return []
            packets, pos = self._split(buffer)
            del buffer[:pos]
        if self._fault is not None:
            buffer.clear()
            if not packets:
                raise self._fault
        return packets

    def _split(self, buf: bytes | bytearray) -> tuple[list[tuple[int, bytes]], int]:
        """The whole packets at the front of `buf` and where they end. Sets `_needed_bytes` or `_fault`."""
        packets: list[tuple[int, bytes]] = []
        size = len(buf)
        start = 0
        while True:
            pos = start + 1
            remaining = shift = 0
            while pos < size:
                byte = buf[pos]
                pos += 1
                remaining |= (byte & 0x7F) << shift
                if byte < 0x80:
                    if byte == 0 and shift:
                        # [MQTT-1.5.5-1]. 3.x does not say so but lists, in table 2.4, one form for each length.
                        self._fault = MalformedPacket("remaining length is longer than its value needs")
                        return packets, start
                    break
                shift += 7
                if shift == 28:
                    self._fault = MalformedPacket("remaining length of more than four bytes")
                    return packets, start
            else:
                self._needed_bytes = max(2, size - start + 1)
                return packets, start
            end = pos + remaining
            if end - start > self._packet_bytes_max:
                # Told by the header alone, before any of the body is kept. [MQTT-3.1.2-24]
                message = f"packet of {end - start} bytes is above the maximum of {self._packet_bytes_max}"
                self._fault = Refused(message, Reason.PACKET_TOO_LARGE)
                return packets, start
            if end > size:
                self._needed_bytes = end - start
                return packets, start
            packets.append((buf[start], bytes(buf[pos:end])))
            start = end
