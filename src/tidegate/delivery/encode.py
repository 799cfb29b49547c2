"""Runs as PUBLISH packets: encoded once per kind of subscriber, shared by all of that kind.

A variant of a run is, for QoS 0, the bytes of all its packets in one string; for QoS 1 and 2 a list that
repeats [head, packet id, tail] for every message. Handing a run to a subscriber is then: put a slice of
packet ids into every third place, join, send. The list is shared: whoever sends it next overwrites the ids.

A variant's key is an integer made of version, QoS and retain flag, or a tuple of that and the encoded
subscription identifiers, where there are any.
"""

from __future__ import annotations

from tidegate.log.run import NO_EXPIRY, Run
from tidegate.wire import encode_varint

VariantKey = int | tuple[int, bytes]

V5_BIT = 8
MESSAGE_EXPIRY = b"\x02"
USER_PROPERTY = b"\x26"
TOPIC_ALIAS = b"\x23"
SUBSCRIPTION_ID = b"\x0b"


def variant_key(v5: bool, qos: int, retain: bool, sub_ids: bytes) -> VariantKey:
    key = (V5_BIT if v5 else 0) | qos << 1 | retain
    return (key, sub_ids) if sub_ids else key


# The keys that the fast path of a publisher fills in by itself, by (v5, QoS).
KEY_V4_QOS0 = variant_key(False, 0, False, b"")
KEY_V4_QOS1 = variant_key(False, 1, False, b"")
KEY_V5_QOS0 = variant_key(True, 0, False, b"")
KEY_V5_QOS1 = variant_key(True, 1, False, b"")


# How packets with QoS 0 and QoS 1 begin, by remaining length.
_STARTS = tuple([bytes((first,)) + encode_varint(length) for length in range(2048)] for first in (0x30, 0x32))


def lone(qos: int, head: bytes, pid: bytes, block: bytes, payload: bytes) -> bytes:
    """A message with QoS 0 or 1 that is a run of its own: `head` is the topic with its length, `block` the properties
    with theirs. Quickly made, so not kept as a variant."""
    length = len(head) + len(pid) + len(block) + len(payload)
    start = _STARTS[qos][length] if length < 2048 else bytes((0x30 | qos << 1,)) + encode_varint(length)
    return start + head + pid + block + payload


def encode_sub_ids(ids: list[int]) -> bytes:
    return b"".join(SUBSCRIPTION_ID + encode_varint(i) for i in ids)


def blob(run: Run, key: VariantKey) -> bytes:
    """The whole run as QoS 0 packets."""
    variants = run.variants
    if variants is None:
        variants = run.variants = {}
    made = variants.get(key)
    if made is None:
        made = variants[key] = b"".join(_parts(run, key))
    return made  # type: ignore[return-value]


def parts(run: Run, key: VariantKey) -> list[bytes]:
    """The run as QoS 1 or 2 packets with places for packet ids at 1, 4, 7 …"""
    variants = run.variants
    if variants is None:
        variants = run.variants = {}
    made = variants.get(key)
    if made is None:
        made = variants[key] = _parts(run, key)
    return made  # type: ignore[return-value]


def _parts(run: Run, key: VariantKey) -> list[bytes]:
    number, sub_ids = key if isinstance(key, tuple) else (key, b"")
    first = bytes((0x30 | number & 0b111,))
    qos = number >> 1 & 3
    topic = len(run.topic).to_bytes(2, "big") + run.topic
    fixed = len(topic) + (2 if qos else 0)
    made: list[bytes] = []
    heads: dict[int, bytes] = {}
    for index, payload in enumerate(run.payloads):
        tail = payload
        if number & V5_BIT:
            block = property_block(run, index, sub_ids, 0)
            tail = encode_varint(len(block)) + block + payload
        length = fixed + len(tail)
        head = heads.get(length)
        if head is None:
            head = heads[length] = first + encode_varint(length) + topic
        if qos:
            made += (head, b"\0\0", tail)
        else:
            made += (head, tail)
    return made


def property_block(run: Run, index: int, sub_ids: bytes, elapsed_s: int) -> bytes:
    """A message's MQTT 5 properties for a receiver, with what is left of its expiry [MQTT-3.3.2-6]."""
    block = run.properties[index] if run.properties is not None else b""
    if run.expiries is not None:
        expiry = run.expiries[index]
        if expiry != NO_EXPIRY:
            block = MESSAGE_EXPIRY + max(0, expiry - elapsed_s).to_bytes(4, "big") + block
    return block + sub_ids


def encode_one(
    run: Run,
    index: int,
    *,
    v5: bool,
    qos: int,
    retain: bool,
    dup: bool,
    pid: bytes,
    block: bytes,
    topic: bytes | None = None,
) -> bytes:
    """One message of a run, the plain way. `topic` replaces the run's where an alias stands for it."""
    name = run.topic if topic is None else topic
    tail = run.payloads[index]
    if v5:
        tail = encode_varint(len(block)) + block + tail
    if not qos:
        pid = b""
    length = 2 + len(name) + len(pid) + len(tail)
    first = 0x30 | dup << 3 | qos << 1 | retain
    return bytes((first,)) + encode_varint(length) + len(name).to_bytes(2, "big") + name + pid + tail
