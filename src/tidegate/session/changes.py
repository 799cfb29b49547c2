"""State changes as records of the log: what must be known again after a restart.

Each record is absolute ("this is so now") and keyed, so that replaying a stretch of the log again, or on top of a
newer snapshot, ends in the same state. Layout, little endian; `str` is u16 length + bytes, `blob` u32 + bytes:

    0x01 SESSION    u32 number, u8 flags (1 connected), u8 version, u32 expiry_s, i64 away_since_ms,
                    i64 position, str client id, str tenant, u8 has_will [will]
           will     u8 qos, u8 retain, u32 delay_s, u32 expiry_s (0xFFFFFFFF none), str topic, blob payload,
                    blob properties
    0x02 GONE       u32 number
    0x03 SUBSCRIBED u32 number, u8 options (MQTT 5 subscription options), u32 subscription id, i64 since,
                    u32 reader (0: the session's own), str filter
    0x04 UNSUBSCRIBED  u32 number, str filter
    0x05 POSITIONS  repeated: u32 reader, i64 position
    0x06 INBOUND    u32 number, u16 packet id        a QoS 2 message of the client is stored, not yet released
    0x07 RELEASED   u32 number, u16 packet id        … and now it is
    0x08 FLIGHT     u32 number, u32 reader, u16 packet id, u8 qos, u8 state, i64 position, i64 floor
    0x09 RETAINED   u8 qos, i64 time_ms, i64 position, i64 expires_at_ms (-1 none), str topic, str publisher,
                    blob properties, blob payload
    0x0A UNRETAINED str topic
    0x0B GROUP      u32 reader, str name, str pattern
    0x0C DEAD       u8 reason, u32 attempts, i64 position (-1: it was never stored), i64 time_ms, u8 flags (bits 0 and 1
                    qos, bit 2 retain), str client, str tenant, str topic, str publisher, str detail,
                    blob properties, blob payload
    0x0D FLIGHTS    u32 number, u32 reader, u16 packet id, u8 qos, u8 state, i64 position, u32 count, u32 step
                    `count` messages at position, position + step, …, with packet ids that follow each other
    0x0E INBOUNDS   u32 number, repeated: u16 packet id   as INBOUND, for each
    0x0F RELEASES   u32 number, repeated: u16 packet id   as RELEASED, for each
    0x10 ACKED      u32 reader, repeated: i64 first, i64 after   all that is finished above the reader's position
    0x11 SINCE      u32 number, str filter, repeated: i64 since  of a subscription, in partitions 1, 2, …
    0x12 DUE        u32 number, str filter, repeated: i64 before  retained messages are still to be handed over for it:
                    those that lie before these positions, one per partition
    0x13 HANDED     u32 number, str filter                … and now they have been
    0x14 PASSED     u32 number, str filter, str topic     … up to this topic, in the order of `router/topic_order`

A position is `partition << 52 | offset`. INBOUND, RELEASED and FLIGHT are read, and no longer written.
A DEAD record is no state: it tells that a message was given up for a client, at `time_ms`. It carries the message,
which may be gone from the log by the time that somebody looks. A restart passes over it; the pipeline collects them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from tidegate.errors import CorruptLog
from tidegate.session.session import StoredWill

SESSION, GONE, SUBSCRIBED, UNSUBSCRIBED, POSITIONS = 1, 2, 3, 4, 5
INBOUND, RELEASED, FLIGHT, RETAINED, UNRETAINED, GROUP, DEAD = 6, 7, 8, 9, 10, 11, 12
FLIGHTS, INBOUNDS, RELEASES, ACKED, SINCE, DUE, HANDED, PASSED = 13, 14, 15, 16, 17, 18, 19, 20

CONNECTED = 1
NONE_U32 = 0xFFFFFFFF

_session = Struct("<BIBBIqq")
_will = Struct("<BBII")
_number = Struct("<BI")
_subscribed = Struct("<BIBIqI")
_position = Struct("<Iq")
_pid = Struct("<BIH")
_flight = Struct("<BIIHBBqq")
_flights = Struct("<BIIHBBqII")
_range = Struct("<qq")
_retained = Struct("<BBqqq")
_dead = Struct("<BBIqqB")


def _str(value: bytes) -> bytes:
    return len(value).to_bytes(2, "little") + value


def _blob(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


class Cursor:
    """Reads fields off a record in order."""

    __slots__ = ("at", "record")

    def __init__(self, record: bytes, at: int) -> None:
        self.record, self.at = record, at

    def _take(self, length_bytes: int) -> bytes:
        start = self.at + length_bytes
        end = start + int.from_bytes(self.record[self.at : start], "little")
        if end > len(self.record):
            raise CorruptLog("a state record is shorter than it says")
        self.at = end
        return self.record[start:end]

    def str(self) -> bytes:
        return self._take(2)

    def blob(self) -> bytes:
        return self._take(4)


def session(
    number: int,
    connected: bool,
    version: int,
    expiry_s: int,
    away_since_ms: int,
    position: int,
    client_id: bytes,
    tenant: bytes,
    will: StoredWill | None,
) -> bytes:
    head = _session.pack(SESSION, number, connected, version, expiry_s, away_since_ms, position)
    return head + _str(client_id) + _str(tenant) + _encode_will(will)


def read_session(
    record: bytes,
) -> tuple[int, bool, int, int, int, int, bytes, bytes, StoredWill | None]:
    _, number, flags, version, expiry_s, away_since_ms, position = _session.unpack_from(record)
    cursor = Cursor(record, _session.size)
    client_id, tenant = cursor.str(), cursor.str()
    connected = bool(flags & CONNECTED)
    return number, connected, version, expiry_s, away_since_ms, position, client_id, tenant, _read_will(cursor)


def _encode_will(will: StoredWill | None) -> bytes:
    if will is None:
        return b"\0"
    expiry = NONE_U32 if will.expiry_s is None else will.expiry_s
    head = b"\1" + _will.pack(will.qos, will.retain, will.delay_s, expiry)
    return head + _str(will.topic) + _blob(will.payload) + _blob(will.properties)


def _read_will(cursor: Cursor) -> StoredWill | None:
    if not cursor.record[cursor.at]:
        return None
    qos, retain, delay_s, expiry = _will.unpack_from(cursor.record, cursor.at + 1)
    cursor.at += 1 + _will.size
    topic, payload, properties = cursor.str(), cursor.blob(), cursor.blob()
    return StoredWill(topic, payload, qos, bool(retain), delay_s, None if expiry == NONE_U32 else expiry, properties)


def gone(number: int) -> bytes:
    return _number.pack(GONE, number)


def read_number(record: bytes) -> int:
    number: int = _number.unpack_from(record)[1]
    return number


def subscribed(number: int, options: int, sub_id: int, since: int, reader: int, filter: bytes) -> bytes:
    return _subscribed.pack(SUBSCRIBED, number, options, sub_id, since, reader) + _str(filter)


def read_subscribed(record: bytes) -> tuple[int, int, int, int, int, bytes]:
    _, number, options, sub_id, since, reader = _subscribed.unpack_from(record)
    return number, options, sub_id, since, reader, Cursor(record, _subscribed.size).str()


def unsubscribed(number: int, filter: bytes) -> bytes:
    return _number.pack(UNSUBSCRIBED, number) + _str(filter)


def read_unsubscribed(record: bytes) -> tuple[int, bytes]:
    return read_number(record), Cursor(record, _number.size).str()


def positions(pairs: Iterable[tuple[int, int]]) -> bytes:
    return bytes((POSITIONS,)) + b"".join([_position.pack(number, position) for number, position in pairs])


def read_positions(record: bytes) -> list[tuple[int, int]]:
    return list(_position.iter_unpack(record[1:]))


def inbounds(number: int, pids: Iterable[bytes]) -> bytes:
    """Packet ids as a packet carries them, most significant byte first; a record has them the other way."""
    return _number.pack(INBOUNDS, number) + _swapped(pids)


def releases(number: int, pids: Iterable[bytes]) -> bytes:
    return _number.pack(RELEASES, number) + _swapped(pids)


def _swapped(pids: Iterable[bytes]) -> bytes:
    ids = array("H", b"".join(pids))
    ids.byteswap()
    return ids.tobytes()


def read_pids(record: bytes) -> tuple[int, list[bytes]]:
    ids = array("H", record[_number.size :])
    return read_number(record), [pid.to_bytes(2, "big") for pid in ids]


def read_pid(record: bytes) -> tuple[int, int]:
    _, number, pid = _pid.unpack_from(record)
    return number, pid


def flights(number: int, reader: int, pid: int, qos: int, state: int, positions: range) -> bytes:
    return _flights.pack(
        FLIGHTS, number, reader, pid, qos, state, positions.start, len(positions), positions.step
    )


def read_flights(record: bytes) -> tuple[int, int, int, int, int, range]:
    _, number, reader, pid, qos, state, position, count, step = _flights.unpack_from(record)
    return number, reader, pid, qos, state, range(position, position + count * max(step, 1), max(step, 1))


def acked(reader: int, ranges: Iterable[tuple[int, int]]) -> bytes:
    return _number.pack(ACKED, reader) + b"".join([_range.pack(a, b) for a, b in ranges])


def read_acked(record: bytes) -> tuple[int, list[tuple[int, int]]]:
    return read_number(record), list(_range.iter_unpack(record[_number.size :]))


def since(number: int, filter: bytes, positions: Iterable[int]) -> bytes:
    return _number.pack(SINCE, number) + _str(filter) + b"".join([p.to_bytes(8, "little") for p in positions])


def read_filter_positions(record: bytes) -> tuple[int, bytes, list[int]]:
    """A SINCE or a DUE record."""
    cursor = Cursor(record, _number.size)
    filter = cursor.str()
    return read_number(record), filter, list(array("q", record[cursor.at :]))


def due(number: int, filter: bytes, before: Iterable[int]) -> bytes:
    return _number.pack(DUE, number) + _str(filter) + b"".join([p.to_bytes(8, "little") for p in before])


def handed(number: int, filter: bytes) -> bytes:
    return _number.pack(HANDED, number) + _str(filter)


def passed(number: int, filter: bytes, topic: bytes) -> bytes:
    return _number.pack(PASSED, number) + _str(filter) + _str(topic)


def read_passed(record: bytes) -> tuple[int, bytes, bytes]:
    cursor = Cursor(record, _number.size)
    return read_number(record), cursor.str(), cursor.str()


def read_flight(record: bytes) -> tuple[int, int, int, int, int, int, int]:
    _, number, reader, pid, qos, state, position, floor = _flight.unpack_from(record)
    return number, reader, pid, qos, state, position, floor


def retained(
    topic: bytes,
    payload: bytes,
    qos: int,
    properties: bytes,
    expires_at_ms: int | None,
    time_ms: int,
    position: int,
    publisher: bytes,
) -> bytes:
    expires = -1 if expires_at_ms is None else expires_at_ms
    head = _retained.pack(RETAINED, qos, time_ms, position, expires)
    return head + _str(topic) + _str(publisher) + _blob(properties) + _blob(payload)


def read_retained(record: bytes) -> tuple[bytes, bytes, int, bytes, int | None, int, int, bytes]:
    _, qos, time_ms, position, expires = _retained.unpack_from(record)
    cursor = Cursor(record, _retained.size)
    topic, publisher, properties, payload = cursor.str(), cursor.str(), cursor.blob(), cursor.blob()
    return topic, payload, qos, properties, None if expires < 0 else expires, time_ms, position, publisher


def unretained(topic: bytes) -> bytes:
    return bytes((UNRETAINED,)) + _str(topic)


def read_unretained(record: bytes) -> bytes:
    return Cursor(record, 1).str()


def group(reader: int, name: bytes, pattern: bytes) -> bytes:
    return _number.pack(GROUP, reader) + _str(name) + _str(pattern)


def read_group(record: bytes) -> tuple[int, bytes, bytes]:
    cursor = Cursor(record, _number.size)
    return read_number(record), cursor.str(), cursor.str()


class DeadReason(IntEnum):
    """Why a message was given up."""

    EXPIRED = 1  # its message expiry was over before the client took it
    TOO_LARGE = 2  # larger than the client takes
    DELIVERY_FAILED = 3  # sent as often as is allowed, and never acknowledged
    REJECTED = 4  # the client acknowledged it with an error
    LOST = 5  # no longer stored, or damaged, when its turn came


NEVER_STORED = -1
_DEAD_QOS, _DEAD_RETAIN = 3, 4


class Dead(NamedTuple):
    """A message that was given up for one client. `reason` is a plain number where it is none that we know."""

    reason: DeadReason | int
    attempts: int
    position: int
    time_ms: int
    qos: int
    retain: bool
    client: bytes
    tenant: bytes
    topic: bytes
    publisher: bytes
    detail: bytes
    properties: bytes
    payload: bytes

    @property
    def reason_name(self) -> str:
        return self.reason.name.lower() if isinstance(self.reason, DeadReason) else f"reason {self.reason}"


_DEAD_REASONS = {int(reason): reason for reason in DeadReason}


def dead(letter: Dead) -> bytes:
    flags = letter.qos | (_DEAD_RETAIN if letter.retain else 0)
    head = _dead.pack(DEAD, letter.reason, letter.attempts, letter.position, letter.time_ms, flags)
    names = (letter.client, letter.tenant, letter.topic, letter.publisher, letter.detail)
    return head + b"".join(map(_str, names)) + _blob(letter.properties) + _blob(letter.payload)


def read_dead(record: bytes) -> Dead:
    _, reason, attempts, position, time_ms, flags = _dead.unpack_from(record)
    cursor = Cursor(record, _dead.size)
    return Dead(
        _DEAD_REASONS.get(reason, reason),
        attempts,
        position,
        time_ms,
        flags & _DEAD_QOS,
        bool(flags & _DEAD_RETAIN),
        cursor.str(),
        cursor.str(),
        cursor.str(),
        cursor.str(),
        cursor.str(),
        cursor.blob(),
        cursor.blob(),
    )
