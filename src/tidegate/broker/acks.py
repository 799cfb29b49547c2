"""Acknowledgements in both directions: PUBACK, PUBREC, PUBREL, PUBCOMP.

They nearly always come in order and in bulk. Then the bytes received are compared with those expected for a flight, and
one range moves; an acknowledgement that comes alone, or out of order, is a range of one, found by its packet id.

A promise follows its record: PUBREC and PUBREL, PUBREL and PUBCOMP each wait until what they say is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.delivery.delivery import done_record
from tidegate.delivery.group import Group
from tidegate.delivery.outbox import recorded
from tidegate.delivery.tick import Kind
from tidegate.errors import ProtocolViolation
from tidegate.session import changes
from tidegate.session.flights import PIDS, PUBACKS, PUBCOMPS, PUBRECS, PUBRELS, RELEASED, SENT, Flight, Flights
from tidegate.session.link import Link
from tidegate.session.session import Session
from tidegate.session.skip import Skip
from tidegate.wire import Puback, Pubcomp, Pubrec, Pubrel, Reason

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

PUBACK, PUBREC, PUBREL, PUBCOMP = 0x40, 0x50, 0x62, 0x70

# Acknowledgements that are looked up one by one before it is asked whether others should have their turn.
LOOKS_MAX = 256

_EXPECTED = {PUBACK: PUBACKS, PUBREC: PUBRECS, PUBCOMP: PUBCOMPS}


def in_bulk(broker: Broker, link: Link, data: bytes, pos: int, end: int) -> int:
    """Take the plain acknowledgements that follow each other from `pos` on: where they end, else `pos`."""
    first = data[pos]
    session: Session = link.session  # type: ignore[assignment]
    began = pos
    if first == PUBREL:
        return _released(broker, link, session, data, pos, end)
    flights = session.flights
    if flights is None:
        return pos
    looks = 0
    releases: list[bytes] = []
    while end - pos >= 4 and data[pos + 1] == 2 and looks < LOOKS_MAX:
        looks += 1
        first = data[pos]
        expected = _EXPECTED.get(first)
        if expected is None:
            break
        pid = data[pos + 2] << 8 | data[pos + 3]
        found = flights.find(pid) if pid else None
        if found is None:
            break
        flight, at = found
        if first == PUBACK:
            if flight.qos != 1:
                break
        elif not _fits(first, flight):
            break
        count = len(flight.positions) - at
        if count > (end - pos) >> 2:
            count = (end - pos) >> 2
        if count > 1 and not data.startswith(expected[4 * pid : 4 * (pid + count)], pos):
            count = _common(data, pos, expected, pid, count)
        if first == PUBREC:
            releases.append(_received(broker, link, session, flight, at, count))
        else:
            finished(broker, link, session, flight, at, count)
        pos += 4 * count
    if releases:
        link.outbox.hold(b"".join(releases))
    broker.spent += looks
    if pos > began:
        broker.counters.messages_received += (pos - began) >> 2
        link.outbox.ack_seen_s = broker.now_s
        if link.outbox.waiting or session.due:
            broker.unblock(link.outbox)
    return pos


def _fits(first: int, flight: Flight) -> bool:
    """Whether this PUBREC or PUBCOMP is the next one for the flight."""
    return flight.qos == 2 and flight.state is (SENT if first == PUBREC else RELEASED)


def _common(data: bytes, pos: int, expected: bytes, pid: int, most: int) -> int:
    """How many acknowledgements from `pos` on are as expected: at least one, and not all."""
    low = 1
    while low < most - 1:
        middle = (low + most) >> 1
        if data.startswith(expected[4 * pid : 4 * (pid + middle)], pos):
            low = middle
        else:
            most = middle
    return low


def _received(broker: Broker, link: Link, session: Session, flight: Flight, at: int, count: int) -> bytes:
    """The client has QoS 2 messages: once that is stored, they are released, with these PUBRELs."""
    flights = session.in_flight()
    if session.reader.again is not None:
        _came_before(link, session, flight, at, count)
    flight = flights.cut(flight, at, count)
    flight.state = RELEASED
    pid = flight.pid
    if recorded(session, flight.reader):
        broker.change(changes.flights(session.number, flight.reader.number, pid, 2, RELEASED, flight.positions))
    broker.counters.messages_sent += count
    return PUBRELS[4 * pid : 4 * (pid + count)]


def finished(broker: Broker, link: Link, session: Session, flight: Flight, at: int, count: int) -> None:
    """Messages have been acknowledged to their end."""
    flights: Flights = session.flights  # type: ignore[assignment]
    reader = flight.reader
    qos = flight.qos
    if session.reader.again is not None:
        _came_before(link, session, flight, at, count)
    if (qos == 2 or not reader.number) and recorded(session, reader):
        broker.change(done_record(session, flight, at, count))
    done = flights.finish(flight, at, count)
    link.outbox.used -= count
    if reader.number:
        if reader.session is None or reader.session.expiry_s:
            broker.delivery.moved.add(reader)
        if qos == 2 and isinstance(reader, Group):
            # A group's position may stay below it, where another member owes an answer.
            reader.skip = reader.skip or Skip()
            for position in done:
                reader.skip.add(position, position + 1)


def _came_before(link: Link, session: Session, flight: Flight, at: int, count: int) -> None:
    """Messages that this connection has not brought yet, for the client had them from the one before, need not come
    again; they were not counted as being on their way."""
    reader = session.reader
    assert reader.again is not None
    if flight.state is SENT:
        first = flight.number + at
        link.outbox.used += max(0, min(first + count, reader.again_end) - max(first, reader.again))


def _released(broker: Broker, link: Link, session: Session, data: bytes, pos: int, end: int) -> int:
    """PUBRELs: the publisher lets go of its packet ids."""
    inbound = session.inbound
    pids: list[bytes] = []
    while end - pos >= 4 and data[pos] == PUBREL and data[pos + 1] == 2:
        pid = data[pos + 2 : pos + 4]
        if inbound is None or pid not in inbound:
            break
        inbound.discard(pid)
        pids.append(pid)
        pos += 4
    if pids:
        broker.counters.messages_received += len(pids)
        release(broker, link, session, pids)
    return pos


def release(broker: Broker, link: Link, session: Session, pids: list[bytes]) -> None:
    broker.settle()  # their beginning may be among what was collected, and is written first
    broker.storing.released(session, pids)
    tick = broker.post.tick
    tick.changes.append(changes.releases(session.number, pids))
    # Before the release is stored, the publisher must not use the id again: after a crash its new message would be
    # taken for the old one.
    tick.promise(Kind.PUBCOMP, link, pids)
    broker.request_tick()


# ── one at a time: with a reason, out of order, or for nothing ──


def on_puback(broker: Broker, link: Link, packet: Puback) -> None:
    session = _session(link)
    found = session.in_flight().find(packet.packet_id)
    if found is None:
        broker.counters.refused["PUBACK for nothing"] += 1
        return
    flight, at = found
    if flight.qos != 1:
        raise ProtocolViolation("PUBACK for a QoS 2 message")
    _one(broker, link, session, flight, at, packet.reason)


def on_pubrec(broker: Broker, link: Link, packet: Pubrec) -> None:
    session = _session(link)
    pid = packet.packet_id
    found = session.in_flight().find(pid)
    if found is None:
        # [MQTT-4.3.3-4]: a PUBREL follows every PUBREC that is not an error.
        if packet.reason < Reason.UNSPECIFIED_ERROR:
            broker.send(link, Pubrel(pid, Reason.PACKET_ID_NOT_FOUND if link.v5 else 0))
        return
    flight, at = found
    if flight.qos != 2:
        raise ProtocolViolation("PUBREC for a QoS 1 message")
    if packet.reason >= Reason.UNSPECIFIED_ERROR:
        _one(broker, link, session, flight, at, packet.reason)
    elif flight.state is RELEASED:
        link.outbox.hold(PUBRELS[4 * pid : 4 * pid + 4])  # as if it had been the first
    else:
        link.outbox.ack_seen_s = broker.now_s
        link.outbox.hold(_received(broker, link, session, flight, at, 1))


def on_pubcomp(broker: Broker, link: Link, packet: Pubcomp) -> None:
    session = _session(link)
    found = session.in_flight().find(packet.packet_id)
    if found is None:
        broker.counters.refused["PUBCOMP for nothing"] += 1
        return
    flight, at = found
    if flight.state is not RELEASED:
        raise ProtocolViolation("PUBCOMP before PUBREC")
    _one(broker, link, session, flight, at, 0)


def _one(broker: Broker, link: Link, session: Session, flight: Flight, at: int, reason: int) -> None:
    if reason >= Reason.UNSPECIFIED_ERROR:
        broker.counters.dropped["refused by the client"] += 1
    finished(broker, link, session, flight, at, 1)
    link.outbox.ack_seen_s = broker.now_s
    broker.unblock(link.outbox)


def on_pubrel(broker: Broker, link: Link, packet: Pubrel) -> None:
    session = _session(link)
    pid = PIDS[packet.packet_id]
    if session.inbound is None or pid not in session.inbound:
        broker.hold(link, Pubcomp(packet.packet_id, Reason.PACKET_ID_NOT_FOUND if link.v5 else 0))
        return
    session.inbound.discard(pid)
    release(broker, link, session, [pid])


def _session(link: Link) -> Session:
    assert link.session is not None
    return link.session
