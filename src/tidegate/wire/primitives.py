"""The data types of MQTT (standard, section 1.5): numbers, variable byte integers, strings, binary data.

A reader takes the buffer and where to start, and returns the value and where the next one starts. It raises
`MalformedPacket` when the buffer ends too early. A writer raises `ValueError` when the value does not fit its
type: that would be a bug of ours, not a fault of the peer.
"""

from __future__ import annotations

from tidegate.errors import MalformedPacket, ProtocolViolation

from .reasons import Reason

VARINT_MAX = 268_435_455  # four bytes of seven bits
STRING_BYTES_MAX = 65_535


def read_varint(buf: bytes, pos: int) -> tuple[int, int]:
    """A variable byte integer of one to four bytes."""
    value = shift = 0
    size = len(buf)
    while pos < size:
        byte = buf[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if byte == 0 and shift:
                # [MQTT-1.5.5-1]: the value uses the fewest bytes that can hold it.
                raise MalformedPacket("variable byte integer is longer than its value needs")
            return value, pos
        shift += 7
        if shift == 28:
            raise MalformedPacket("variable byte integer of more than four bytes")
    raise MalformedPacket("variable byte integer is cut off")


def encode_varint(n: int) -> bytes:
    if 0 <= n < 0x80:
        return bytes((n,))
    if not 0 <= n <= VARINT_MAX:
        raise ValueError(f"{n} does not fit a variable byte integer")
    encoded = bytearray()
    while n >= 0x80:
        encoded.append(n & 0x7F | 0x80)
        n >>= 7
    encoded.append(n)
    return bytes(encoded)


def read_u8(buf: bytes, pos: int) -> tuple[int, int]:
    if pos >= len(buf):
        raise MalformedPacket("packet ends where a byte was expected")
    return buf[pos], pos + 1


def read_u16(buf: bytes, pos: int) -> tuple[int, int]:
    end = pos + 2
    if end > len(buf):
        raise MalformedPacket("packet ends inside a two-byte integer")
    return buf[pos] << 8 | buf[pos + 1], end


def read_u32(buf: bytes, pos: int) -> tuple[int, int]:
    end = pos + 4
    if end > len(buf):
        raise MalformedPacket("packet ends inside a four-byte integer")
    return int.from_bytes(buf[pos:end], "big"), end


def encode_u8(n: int) -> bytes:
    return _encode_unsigned(n, 1)


def encode_u16(n: int) -> bytes:
    return _encode_unsigned(n, 2)


def encode_u32(n: int) -> bytes:
    return _encode_unsigned(n, 4)


def _encode_unsigned(n: int, size: int) -> bytes:
    if not 0 <= n < 1 << 8 * size:
        raise ValueError(f"{n} does not fit {size} bytes")
    return n.to_bytes(size, "big")


def read_binary(buf: bytes, pos: int) -> tuple[bytes, int]:
    start = pos + 2
    if start > len(buf):
        raise MalformedPacket("packet ends inside the length of a field")
    end = start + (buf[pos] << 8 | buf[pos + 1])
    if end > len(buf):
        raise MalformedPacket("a field is longer than the packet")
    return buf[start:end], end


def read_utf8(buf: bytes, pos: int) -> tuple[bytes, int]:
    """A UTF-8 string, proved to be one, as its bytes."""
    text, pos = read_binary(buf, pos)
    if 0 in text:
        raise MalformedPacket("NUL in a UTF-8 string")  # [MQTT-1.5.4-2]
    check_utf8(text)
    return text, pos


def check_utf8(text: bytes) -> None:
    """Python's strict decoder refuses surrogates, overlong forms and code points above U+10FFFF, and
    does not strip a byte order mark. [MQTT-1.5.4-1], [MQTT-1.5.4-3]"""
    if not text.isascii():
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            raise MalformedPacket("a string is not UTF-8") from None


def read_topic_name(buf: bytes, pos: int) -> tuple[bytes, int]:
    """A topic to publish to: UTF-8 without wildcards. Whether it may be empty, the caller knows."""
    topic, pos = read_utf8(buf, pos)  # U+0000 makes the packet malformed, here as in any string [MQTT-4.7.3-2]
    if b"+" in topic or b"#" in topic:
        raise ProtocolViolation("wildcard in a topic name", Reason.TOPIC_NAME_INVALID)  # [MQTT-3.3.2-2]
    return topic, pos


def encode_binary(value: bytes) -> bytes:
    """Binary data or a UTF-8 string: both are a two-byte length and the bytes."""
    size = len(value)
    if size > STRING_BYTES_MAX:
        raise ValueError(f"a field of {size} bytes does not fit MQTT's {STRING_BYTES_MAX}")
    return size.to_bytes(2, "big") + value
