"""Acknowledgements in both directions, packet by packet: PUBACK, PUBREC, PUBREL, PUBCOMP.

A promise follows its record: PUBREC and PUBREL, PUBREL and PUBCOMP each wait until what they say is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.errors import ProtocolViolation
from tidegate.session import changes
from tidegate.session.flights import Flight, Flights, State
from tidegate.session.link import Link
from tidegate.session.session import Session
from tidegate.wire import Puback, Pubcomp, Pubrec, Pubrel, Reason

if TYPE_CHECKING:
    from tidegate.broker.core import Broker


def pubacks(pids: list[bytes], reason: int) -> bytes:
    """PUBACKs for many packet ids at once."""
    if not reason:
        return b"\x40\x02" + b"\x40\x02".join(pids)
    end = bytes((reason,))
    return b"\x40\x03" + (end + b"\x40\x03").join(pids) + end


def on_puback(broker: Broker, link: Link, packet: Puback) -> None:
    session = _session(link)
    flights = session.in_flight()
    flight = flights.find(packet.packet_id)
    if flight is None:
        broker.counters.refused["PUBACK for nothing"] += 1
        return
    if flight.qos != 1:
        raise ProtocolViolation("PUBACK for a QoS 2 message")
    if packet.reason >= 0x80:
        broker.counters.dropped["refused by the client"] += 1
    finished(broker, link, flights, _alone(link, session, flight, packet.packet_id))


def _alone(link: Link, session: Session, flight: Flight, pid: int) -> Flight:
    """The flight of one message. If this connection has not brought it yet, for the client had it from the one
    before, it need not come again."""
    flights = session.in_flight()
    again = session.reader.resend
    if not again or flight not in again:
        return flights.isolate(flight, pid)
    link.on_wire += 1  # its end takes it off
    at, first, end = again.index(flight), flight.pid, flight.pid + flight.count
    alone = flights.isolate(flight, pid)
    again[at : at + 1] = [f for f in flights.queue if first <= f.pid < end and f is not alone]
    return alone


def on_pubrec(broker: Broker, link: Link, packet: Pubrec) -> None:
    session = _session(link)
    flights = session.in_flight()
    flight = flights.find(packet.packet_id)
    if flight is None:
        # [MQTT-4.3.3-4]: a PUBREL follows every PUBREC that is not an error.
        if packet.reason < 0x80:
            broker.send(link, Pubrel(packet.packet_id, Reason.PACKET_ID_NOT_FOUND if link.v5 else 0))
        return
    if flight.qos != 2:
        raise ProtocolViolation("PUBREC for a QoS 1 message")
    flight = _alone(link, session, flight, packet.packet_id)
    if packet.reason >= 0x80:
        broker.counters.dropped["refused by the client"] += 1
        finished(broker, link, flights, flight)
        return
    flight.state = State.RELEASED
    link.ack_seen_s = broker.now_s
    broker.change(_record(broker, session, flight))
    broker.hold(link, Pubrel(packet.packet_id))


def on_pubcomp(broker: Broker, link: Link, packet: Pubcomp) -> None:
    flights = _session(link).in_flight()
    flight = flights.find(packet.packet_id)
    if flight is None:
        broker.counters.refused["PUBCOMP for nothing"] += 1
        return
    if flight.state is not State.RELEASED:
        raise ProtocolViolation("PUBCOMP before PUBREC")
    finished(broker, link, flights, flight)


def on_pubrel(broker: Broker, link: Link, packet: Pubrel) -> None:
    session = _session(link)
    if session.inbound is None or packet.packet_id not in session.inbound:
        reason = Reason.PACKET_ID_NOT_FOUND if link.v5 else 0
        broker.hold(link, Pubcomp(packet.packet_id, reason))
        return
    if broker.run_changes:
        broker.settle()  # its beginning may be among them, and is written first
    session.inbound.discard(packet.packet_id)
    broker.change(changes.released(session.number, packet.packet_id))
    # Before the release is stored, the publisher must not use the id again: after a crash its new message would
    # be taken for the old one.
    broker.hold(link, Pubcomp(packet.packet_id))


def finished(broker: Broker, link: Link, flights: Flights, flight: Flight) -> None:
    """One message has been acknowledged to its end."""
    flights.finish(flight)
    link.on_wire = max(0, link.on_wire - 1)
    link.ack_seen_s = broker.now_s
    session = _session(link)
    if flight.qos == 2 or not flight.reader.number:
        broker.change(_record(broker, session, flight))
    if flight.reader.number:
        broker.moved.add(flight.reader)
        if flight.qos == 2 and flight.reader.session is None:
            # A group's position may stay below it, where another member owes an answer.
            flight.reader.skip = flight.reader.skip or set()
            flight.reader.skip.add(flight.base)
    if link.waiting or link.retained_streams:
        broker.unblock(link)


def _record(broker: Broker, session: Session, flight: Flight) -> bytes:
    reader = flight.reader
    floor = broker.dispatcher.floor_of(reader)
    return changes.flight(session.number, reader.number, flight.pid, flight.qos, flight.state, flight.base, floor)


def _session(link: Link) -> Session:
    assert link.session is not None
    return link.session
