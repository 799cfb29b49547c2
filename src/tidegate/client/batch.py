"""Many messages at once as PUBLISH packets of MQTT 5.

Messages are kept in columns, and the packets of thousands are joined from six pieces each:

    first byte · remaining length · topic with its length · packet id · properties with their length · payload

Topics and property blocks repeat, so each distinct one is checked and laid out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import groupby
from typing import NamedTuple

from tidegate.errors import PeerError
from tidegate.limits import PACKET_IDS
from tidegate.wire import encode_varint, read_properties
from tidegate.wire.primitives import encode_binary, read_topic_name
from tidegate.wire.properties import PUBLISH, with_length

KNOWN_MAX = 100_000
"""Distinct topics, and property blocks, whose layout is remembered."""

NO_PROPERTIES = b"\0"
_EXPIRY = b"\x02"  # the identifier of the message expiry interval
_SHORT = 1 << 14  # remaining lengths below this are remembered
_SINGLE = [bytes((byte,)) for byte in range(256)]
_IS_QOS2 = bytes(first >> 1 & 3 == 2 for first in range(256))
_HAS_ID = bytes(first & 0x06 != 0 for first in range(256))
_DUP = bytes(first | 0x08 if first & 0x06 else first for first in range(256))
_IDS = [packet_id.to_bytes(2, "big") for packet_id in range(1, PACKET_IDS + 1)]


class Messages(NamedTuple):
    """One entry per message in each column."""

    numbers: Sequence[int]  # how many messages the publisher had been given before
    firsts: bytes  # the packet's first byte: type, DUP, QoS, retain
    heads: Sequence[bytes]  # the topic with its length
    blocks: Sequence[bytes]  # the properties with their length
    payloads: Sequence[bytes]
    sizes: Sequence[int]  # of the packet after its first byte and remaining length

    def cut(self, start: int, end: int) -> Messages:
        return Messages(
            self.numbers[start:end],
            self.firsts[start:end],
            self.heads[start:end],
            self.blocks[start:end],
            self.payloads[start:end],
            self.sizes[start:end],
        )

    def topic(self, i: int) -> bytes:
        return self.heads[i][2:]

    @property
    def is_qos2(self) -> bool:
        return self.firsts[0] >> 1 & 3 == 2

    def chunks(self, count_max: int) -> Iterator[Messages]:
        """Parts of up to `count_max`, also cut where QoS 2 begins or ends: its acknowledgements are others."""
        end = 0
        for _, group in groupby(self.firsts.translate(_IS_QOS2)):
            start, end = end, end + sum(1 for _ in group)
            for at in range(start, end, count_max):
                yield self.cut(at, min(at + count_max, end))

    def repeated(self) -> Messages:
        """To be sent again: those that are acknowledged, with DUP set. [MQTT-3.3.1-1]"""
        return self._replace(firsts=self.firsts.translate(_DUP))

    def acknowledged(self) -> Messages:
        """Those with QoS 1 and 2."""
        if self.firsts[0] & 0x06 and self.firsts.count(self.firsts[:1]) == len(self.firsts):
            return self
        kept = [i for i, first in enumerate(self.firsts) if first & 0x06]
        return Messages(
            [self.numbers[i] for i in kept],
            bytes(self.firsts[i] for i in kept),
            [self.heads[i] for i in kept],
            [self.blocks[i] for i in kept],
            [self.payloads[i] for i in kept],
            [self.sizes[i] for i in kept],
        )


class Layouts:
    """Lays messages out, and remembers how topics and properties were."""

    def __init__(self) -> None:
        self._heads: dict[bytes, bytes] = {}
        self._blocks: dict[bytes, bytes] = {}
        self._lengths: dict[int, bytes] = {}

    def messages(
        self,
        first_number: int,
        topics: Sequence[bytes],
        payloads: Sequence[bytes],
        qos: int | Sequence[int],
        retains: Sequence[bool] | None,
        properties: Sequence[bytes | None] | None,
        expiries: Sequence[int | None] | None,
        packet_bytes_max: int,
    ) -> Messages:
        """Raises ValueError for what the broker would not take, naming the message."""
        count = len(topics)
        numbers = range(first_number, first_number + count)
        for column in (payloads, retains, properties, expiries, None if isinstance(qos, int) else qos):
            if column is not None and len(column) != count:
                raise ValueError(f"{count} topics, but a column of {len(column)} entries")
        if isinstance(qos, int):
            if qos not in (0, 1, 2):
                raise ValueError(f"QoS {qos} is not one of 0, 1, 2")
            firsts = _SINGLE[0x30 | qos << 1] * count
        else:
            for number, one in zip(numbers, qos, strict=True):
                if one not in (0, 1, 2):
                    raise ValueError(f"message {number}: QoS {one} is not one of 0, 1, 2")
            firsts = bytes([0x30 | one << 1 for one in qos])
        if retains is not None:
            firsts = bytes([first | bool(retain) for first, retain in zip(firsts, retains, strict=True)])
        heads = self._heads_of(topics, numbers)
        blocks: Sequence[bytes] = [NO_PROPERTIES] * count
        if properties is not None or expiries is not None:
            blocks = self._blocks_of(properties or [None] * count, expiries or [None] * count, numbers)
        sizes = [
            len(head) + len(block) + len(payload) for head, block, payload in zip(heads, blocks, payloads, strict=True)
        ]
        with_id = firsts.translate(_HAS_ID)
        if 1 in with_id:
            sizes = [size + 2 * has_id for size, has_id in zip(sizes, with_id, strict=True)]
        messages = Messages(numbers, firsts, heads, blocks, payloads, sizes)
        if max(sizes) + 5 > packet_bytes_max:
            _refuse_large(messages, packet_bytes_max)
        return messages

    def _heads_of(self, topics: Sequence[bytes], numbers: range) -> list[bytes]:
        known = self._heads
        if len(known) > KNOWN_MAX:
            known.clear()
        heads = [known.get(topic) for topic in topics]
        if None in heads:
            for i, topic in enumerate(topics):
                if heads[i] is None:
                    heads[i] = known[topic] = _head(topic, numbers[i])
        return heads  # type: ignore[return-value]

    def _blocks_of(
        self, properties: Sequence[bytes | None], expiries: Sequence[int | None], numbers: range
    ) -> list[bytes]:
        known = self._blocks
        if len(known) > KNOWN_MAX:
            known.clear()
        blocks = []
        for number, block, expiry in zip(numbers, properties, expiries, strict=True):
            if block:
                if block not in known:
                    known[block] = _checked_block(block, number)
            else:
                block = b""
            if expiry is not None:
                if not 0 <= expiry < 1 << 32:
                    raise ValueError(f"message {number}: an expiry of {expiry} seconds does not fit MQTT's 4 bytes")
                block += _EXPIRY + expiry.to_bytes(4, "big")
                blocks.append(with_length(block))
            else:
                blocks.append(known[block] if block else NO_PROPERTIES)
        return blocks

    def encode(self, messages: Messages, first_id: int) -> bytes:
        """Their packets, with packet ids from `first_id` on for those that need one."""
        _, firsts, heads, blocks, payloads, sizes = messages
        count = len(firsts)
        if firsts.count(firsts[:1]) == count:
            types = [firsts[:1]] * count
            ids = _IDS[first_id - 1 : first_id - 1 + count] if firsts[0] & 0x06 else [b""] * count
        else:
            types = [_SINGLE[first] for first in firsts]
            following = iter(_IDS[first_id - 1 : first_id - 1 + count])
            ids = [next(following) if first & 0x06 else b"" for first in firsts]
        known = self._lengths
        lengths = [known.get(size) for size in sizes]
        if None in lengths:
            for i, size in enumerate(sizes):
                if lengths[i] is None:
                    lengths[i] = encoded = encode_varint(size)
                    if size < _SHORT:
                        known[size] = encoded
        parts: list[bytes] = [b""] * (6 * count)
        parts[0::6], parts[1::6], parts[2::6] = types, lengths, heads  # type: ignore[assignment]
        parts[3::6], parts[4::6], parts[5::6] = ids, blocks, payloads
        out = BytesIO()  # join would need a scratch array of eighty bytes a part
        out.writelines(parts)
        return out.getvalue()


def releases(first_id: int, count: int) -> bytes:
    """The PUBRELs of QoS 2 messages."""
    return b"\x62\x02" + b"\x62\x02".join(_IDS[first_id - 1 : first_id - 1 + count])


def answers(kind: int, reason: int = 0) -> bytes:
    """The acknowledgements of `kind` for all packet ids from 1 on, as a broker sends them that has nothing to add
    but `reason`: what arrives can be compared with a part of it."""
    head = bytes((kind, 3 if reason else 2))
    end = bytes((reason,)) if reason else b""
    return head + (end + head).join(_IDS) + end


def _refuse_large(messages: Messages, packet_bytes_max: int) -> None:
    for i, size in enumerate(messages.sizes):
        whole = 1 + len(encode_varint(size)) + size
        if whole > packet_bytes_max:
            raise ValueError(
                f"message {messages.numbers[i]} to {_shown(messages.topic(i))} makes a packet of {whole} bytes; "
                f"the broker takes {packet_bytes_max}"
            )


def _head(topic: bytes, number: int) -> bytes:
    try:
        head = encode_binary(topic)
        read_topic_name(head, 0)
    except (ValueError, PeerError) as error:
        raise ValueError(f"message {number}: cannot publish to {_shown(topic)}: {error}") from None
    if not topic:
        raise ValueError(f"message {number}: the topic is empty")
    return head


def _checked_block(block: bytes, number: int) -> bytes:
    whole = with_length(block)
    try:
        _, passed_on, _ = read_properties(whole, 0, PUBLISH)
    except PeerError as error:
        raise ValueError(f"message {number}: these are not the properties of a PUBLISH: {error}") from None
    if passed_on != block:
        raise ValueError(
            f"message {number}: its properties can be payload format, content type, response topic, correlation data "
            "and user properties; an expiry is given apart from them"
        )
    return whole


def _shown(topic: bytes) -> str:
    return repr(topic[:80].decode("utf-8", "backslashreplace"))
