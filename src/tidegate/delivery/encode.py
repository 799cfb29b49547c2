"""Rows as PUBLISH packets: encoded once per kind of subscriber, shared by all of that kind.

A range of rows is encoded as, for QoS 0, one string of all its packets; for QoS 1 and 2 as a list that repeats
[head, packet id, tail] for every message. Handing it to a subscriber is then: put a slice of packet ids into every
third place, join, send. The list is shared: whoever sends it next overwrites the ids.

What makes two subscribers of one kind is the key: version, QoS and retain flag, and the encoded subscription
identifiers where there are any.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

from tidegate.log.rows import Rows
from tidegate.log.run import NO_EXPIRY
from tidegate.session.flights import PIDS
from tidegate.wire import encode_varint

Key = int | tuple[int, bytes]

V5_BIT = 16
DUP_BIT = 8
MESSAGE_EXPIRY = b"\x02"
USER_PROPERTY = b"\x26"
TOPIC_ALIAS = b"\x23"
SUBSCRIPTION_ID = b"\x0b"
NO_PID = b"\0\0"
NO_TOPIC = b"\0\0"  # of no bytes: the alias says which

_SHORT = 2048
_ALIKE_MIN = 8  # rows, for it to be worth a look whether they are alike
# How packets begin, by the low four bits of their first byte and their remaining length.
_STARTS: list[list[bytes]] = [
    [bytes((0x30 | low,)) + encode_varint(length) for length in range(_SHORT)] for low in range(16)
]
_VARINTS: list[bytes] = [encode_varint(length) for length in range(_SHORT)]


def key_of(v5: bool, qos: int, retain: bool, sub_ids: bytes) -> Key:
    key = (V5_BIT if v5 else 0) | qos << 1 | retain
    return (key, sub_ids) if sub_ids else key


def encode_sub_ids(ids: list[int]) -> bytes:
    return b"".join(SUBSCRIPTION_ID + encode_varint(i) for i in ids)


def pieces(rows: Rows, a: int, b: int, key: Key, elapsed_s: int = 0, *, dup: bool = False) -> list[bytes]:
    """Rows a … b-1 as [head, packet id, tail] each; the packet id is empty for QoS 0."""
    number, sub_ids = key if isinstance(key, tuple) else (key, b"")
    starts = _STARTS[number & 7 | (DUP_BIT if dup else 0)]
    qos = number & 6
    pid = NO_PID if qos else b""
    fixed = 4 if qos else 2
    made: list[bytes] = []
    push = made.extend
    bare = not number & V5_BIT or (rows.properties is None and rows.expiries is None)
    if b - a >= _ALIKE_MIN and bare and _alike(rows, a, b):
        # Readings of one device: the same head for all.
        topic, payloads = rows.topics[a], rows.payloads[a:b]
        block = with_length(sub_ids) if number & V5_BIT else b""
        length = fixed + len(topic) + len(block) + len(payloads[0])
        start = starts[length] if length < _SHORT else starts[0][:1] + encode_varint(length)
        made = [start + PIDS[len(topic)] + topic, pid, b""] * (b - a)
        made[2::3] = [block + payload for payload in payloads] if block else payloads
        return made
    if not number & V5_BIT:
        for topic, payload in zip(rows.topics[a:b], rows.payloads[a:b], strict=True):
            size = len(topic)
            length = fixed + size + len(payload)
            start = starts[length] if length < _SHORT else starts[0][:1] + encode_varint(length)
            push((start + PIDS[size] + topic, pid, payload))
        return made
    if rows.properties is None and rows.expiries is None:
        block = with_length(sub_ids)
        fixed += len(block)
        for topic, payload in zip(rows.topics[a:b], rows.payloads[a:b], strict=True):
            size = len(topic)
            length = fixed + size + len(payload)
            start = starts[length] if length < _SHORT else starts[0][:1] + encode_varint(length)
            push((start + PIDS[size] + topic, pid, block + payload))
        return made
    for row in range(a, b):
        topic = rows.topics[row]
        tail = with_length(block_of(rows, row, elapsed_s) + sub_ids) + rows.payloads[row]
        size = len(topic)
        length = fixed + size + len(tail)
        start = starts[length] if length < _SHORT else starts[0][:1] + encode_varint(length)
        push((start + PIDS[size] + topic, pid, tail))
    return made


def _alike(rows: Rows, a: int, b: int) -> bool:
    """Whether these rows have one topic, and payloads of one size."""
    topic, size = rows.topics[a], len(rows.payloads[a])
    if rows.topics[b - 1] is not topic or len(rows.payloads[b - 1]) != size:
        return False
    return rows.topics[a:b].count(topic) == b - a == list(map(len, rows.payloads[a:b])).count(size)


def aliased(rows: Rows, a: int, b: int, key: Key, aliases: dict[bytes, int], aliases_max: int) -> list[bytes]:
    """As `pieces`, for MQTT 5, with aliases for topics; those of topics that come for the first time are noted in
    `aliases`."""
    number, sub_ids = key if isinstance(key, tuple) else (key, b"")
    starts = _STARTS[number & 7]
    pid = NO_PID if number & 6 else b""
    bare = rows.properties is None and rows.expiries is None
    made: list[bytes] = []
    push = made.extend
    before: bytes | None = None
    name = alias = block = b""
    for row, (topic, payload) in enumerate(zip(rows.topics[a:b], rows.payloads[a:b], strict=True), a):
        if topic is not before:
            before = topic
            known = aliases.get(topic)
            if known is not None:
                name, alias = NO_TOPIC, TOPIC_ALIAS + PIDS[known]
            else:
                name, alias = PIDS[len(topic)] + topic, b""
                if len(aliases) < aliases_max:
                    aliases[topic] = len(aliases) + 1
                    alias = TOPIC_ALIAS + PIDS[len(aliases)]
                    before = None  # from the next message on it has no name
            block = with_length(alias + sub_ids)
        tail = (block if bare else with_length(alias + block_of(rows, row, 0) + sub_ids)) + payload
        length = len(name) + len(pid) + len(tail)
        start = starts[length] if length < _SHORT else starts[0][:1] + encode_varint(length)
        push((start + name, pid, tail))
    return made


def block_of(rows: Rows, row: int, elapsed_s: int) -> bytes:
    """A message's MQTT 5 properties for a receiver, with what is left of its expiry [MQTT-3.3.2-6]."""
    block = rows.properties[row] if rows.properties is not None else b""
    if rows.expiries is not None:
        expiry = rows.expiries[row]
        if expiry != NO_EXPIRY:
            block = expiry_property(max(0, expiry - elapsed_s)) + block
    return block


def expiry_property(expiry_s: int) -> bytes:
    return MESSAGE_EXPIRY + expiry_s.to_bytes(4, "big")


def packet(first: int, topic: bytes, pid: bytes, block: bytes | None, payload: bytes) -> tuple[bytes, bytes]:
    """One PUBLISH, before and after its packet id. `block`: its properties, None before MQTT 5."""
    tail = payload if block is None else with_length(block) + payload
    size = len(topic)
    length = 2 + size + len(pid) + len(tail)
    start = _STARTS[first & 15][length] if length < _SHORT else bytes((first,)) + encode_varint(length)
    return start + PIDS[size] + topic, tail


def with_length(block: bytes) -> bytes:
    size = len(block)
    return (_VARINTS[size] if size < _SHORT else encode_varint(size)) + block


def replay_block(time_ms: int, position: int) -> bytes:
    """When and where a replayed message was first stored, as MQTT 5 user properties."""
    return _replay_time(time_ms) + _user_property(b"tidegate-position", b"%d" % position)


@lru_cache(1024)  # messages of one tick share it
def _replay_time(time_ms: int) -> bytes:
    stamp = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return _user_property(b"tidegate-time", stamp.encode())


def _user_property(name: bytes, value: bytes) -> bytes:
    return USER_PROPERTY + len(name).to_bytes(2, "big") + name + len(value).to_bytes(2, "big") + value
