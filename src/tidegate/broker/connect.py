"""CONNECT, DISCONNECT and everything between a connection and its session.

The order on connect is fixed (S0.17): authenticate, claim the client id, look the session up, CONNACK, then what was
missed. A connection that fails to authenticate displaces nobody.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate.broker import deadlines
from tidegate.delivery.gate import Job
from tidegate.delivery.tick import Kind
from tidegate.errors import PeerError, ProtocolViolation, Refused
from tidegate.limits import FILTERS_STEP
from tidegate.router import check_topic
from tidegate.session.flights import PUBRELS, State
from tidegate.session.link import Link, Phase
from tidegate.session.session import DEFAULT_TENANT, Session, StoredWill
from tidegate.wire import (
    NO_PROPERTIES,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Reason,
    Will,
    connack_code_v3,
    encode,
)

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

def on_connect(broker: Broker, link: Link, packet: Packet) -> None:
    assert isinstance(packet, Connect)
    link.version = packet.version
    link.v5 = packet.version == 5
    link.client_id = packet.client_id  # for the log line, should it be refused
    _authenticate(packet)
    _admit(broker, packet)
    will = _will(broker, packet.will) if packet.will is not None else None
    broker.settle()

    client_id = packet.client_id
    assigned = not client_id
    if assigned:
        client_id = b"tg-" + secrets.token_hex(12).encode()
    sessions = broker.sessions
    session = sessions.get(client_id)
    if session is not None and session.link is None:
        sessions.look_at_absent(session)  # a timer may not have got to it yet
        session = sessions.get(client_id)
    replaces = session is not None and packet.clean_start and session.persistent
    if replaces and not broker.storing.on:
        raise Refused("the log takes no changes at the moment", reason=Reason.QUOTA_EXCEEDED)
    if session is not None and session.link is not None:
        broker.counters.takeovers += 1
        broker.report("session.taken_over", {"client": client_id, "peer": link.peer})
        # The old connection's will is due now, unless the new one takes the session on before its delay is over.
        broker.close(session.link, Reason.SESSION_TAKEN_OVER, "taken over")
        session = sessions.get(client_id)  # a session that is not persistent ended with it
    if session is not None and packet.clean_start:
        sessions.end(session, "clean start")
        session = None
    broker.settle()  # wills that were due; who comes now finds them in the log
    present = session is not None
    expiry_s = _expiry(broker, packet)
    if session is None:
        if len(sessions) >= broker.config.mqtt.sessions_max:
            raise Refused("no room for another session", reason=Reason.QUOTA_EXCEEDED)
        session = Session(next(broker.numbers), client_id, DEFAULT_TENANT, expiry_s, list(broker.delivery.ends))
        sessions.add(session)
    broker.deadlines.returned(client_id)
    session.expiry_s = expiry_s
    session.will, session.will_at_s = will, 0.0
    session.expires_at_s = 0.0
    session.away_since_ms = 0
    _open(broker, link, packet, session, client_id)
    sessions.record(session)
    connack = _connack(broker, link, packet, session, present, assigned)
    data = _fitting(broker, link, connack)
    if data is None:
        return
    broker.counters.messages_sent += 1
    if replaces:
        link.outbox.hold(data)  # not before the end of the old session is stored; till then nothing else is heard

        def answered() -> None:
            link.greeted = True
            _resume(broker, link, session)
            broker.queue(link)

        broker.wait(link)
        broker.post.tick.promise(Kind.CALL, link, answered)
    else:
        link.outbox.put(data)
        link.greeted = True
        broker.request_tick()
        _resume(broker, link, session)


def _fitting(broker: Broker, link: Link, connack: Connack) -> bytes | None:
    """The CONNACK within what the client takes [MQTT-3.1.2-24]; None, and the connection is closed, if it cannot be."""
    data = encode(connack, link.version)
    limit = link.outbox.packet_max
    if not limit or len(data) <= limit:
        return data
    # What is so by default need not be said.
    told = replace(
        connack.properties,
        retain_available=None,
        wildcard_available=None,
        subscription_ids_available=None,
        shared_available=None,
    )
    connack = replace(connack, properties=told)
    return broker.fitting(link, connack) if len(encode(connack, 5)) > limit else encode(connack, 5)


def _authenticate(packet: Connect) -> None:
    # Enhanced authentication is not offered: the client is told so before anything is touched [MQTT-4.12.0-1].
    if packet.properties.auth_method is not None:
        raise Refused("enhanced authentication is not available", reason=Reason.BAD_AUTHENTICATION_METHOD)


def _admit(broker: Broker, packet: Connect) -> None:
    if broker.closing:
        raise Refused("the broker is shutting down", reason=Reason.SERVER_SHUTTING_DOWN)
    if broker.storing.behind:
        # Others may connect and leave faster than the disk stores that they did.
        raise Refused("the disk has to catch up first", reason=Reason.SERVER_BUSY)
    longest = broker.config.mqtt.client_id_bytes_max
    if len(packet.client_id) > longest:
        raise Refused(f"client id of more than {longest} bytes", reason=Reason.CLIENT_ID_NOT_VALID)


def _will(broker: Broker, will: Will) -> StoredWill:
    try:
        check_topic(will.topic)
        if will.topic.startswith(b"$"):
            raise Refused("topics that begin with $ belong to the broker", reason=Reason.TOPIC_NAME_INVALID)
        if will.topic.count(b"/") >= broker.config.mqtt.topic_levels_max:
            most = broker.config.mqtt.topic_levels_max
            raise Refused(f"topic has more than {most} levels", reason=Reason.TOPIC_NAME_INVALID)
    except PeerError as error:
        raise Refused(f"will: {error}", reason=Reason.TOPIC_NAME_INVALID) from error
    if will.properties.payload_format == 1 and broker.config.mqtt.check_payload_format:
        try:
            will.payload.decode()
        except UnicodeDecodeError as error:
            raise Refused("the will is not the UTF-8 it claims", reason=Reason.PAYLOAD_FORMAT_INVALID) from error
    return StoredWill(
        will.topic,
        will.payload,
        will.qos,
        will.retain,
        will.properties.will_delay or 0,
        will.properties.message_expiry,
        will.passed_on,
    )


def _expiry(broker: Broker, packet: Connect) -> int:
    longest = broker.config.mqtt.session_expiry_max_s
    if packet.version < 5:
        return 0 if packet.clean_start else longest
    return min(packet.properties.session_expiry or 0, longest)


def _open(broker: Broker, link: Link, packet: Connect, session: Session, client_id: bytes) -> None:
    config = broker.config.mqtt
    asked = packet.properties
    link.phase = Phase.OPEN
    link.client_id = client_id
    link.tenant = session.tenant
    link.routes = broker.table.routes
    link.session = session
    link.seen_s = link.connected_at_s = broker.now_s
    link.problem_info = asked.request_problem_info is not False
    link.aliases_in_max = config.topic_alias_maximum if link.v5 else 0
    link.outbox.open(
        session,
        window=min(asked.receive_maximum or (65535 if link.v5 else config.inflight_max), config.inflight_max),
        packet_max=asked.maximum_packet_size or 0,
        aliases_max=min(asked.topic_alias_maximum or 0, config.topic_alias_out_maximum),
        now_s=broker.now_s,
    )
    link.keep_alive_s = packet.keep_alive
    if link.v5 and config.keep_alive_max_s and not 0 < packet.keep_alive <= config.keep_alive_max_s:
        link.keep_alive_s = config.keep_alive_max_s
    session.link = link
    links = broker.sessions.links
    links.add(link)
    broker.counters.connects += 1
    broker.counters.clients_max = max(broker.counters.clients_max, len(links))
    deadlines.watch(broker, link)
    about = {"client": client_id, "peer": link.peer, "version": link.version, "keep_alive_s": link.keep_alive_s}
    broker.report("client.connected", about)


def _connack(
    broker: Broker, link: Link, packet: Connect, session: Session, present: bool, assigned: bool
) -> Connack:
    if not link.v5:
        return Connack(present and packet.version >= 4, 0, NO_PROPERTIES)
    config = broker.config.mqtt
    asked_expiry = packet.properties.session_expiry or 0
    return Connack(
        present,
        0,
        Properties(
            session_expiry=session.expiry_s if session.expiry_s != asked_expiry else None,
            receive_maximum=config.receive_maximum,
            maximum_packet_size=config.packet_bytes_max,
            assigned_client_id=session.client_id if assigned else None,
            topic_alias_maximum=config.topic_alias_maximum,
            server_keep_alive=link.keep_alive_s if link.keep_alive_s != packet.keep_alive else None,
            retain_available=True,
            wildcard_available=True,
            subscription_ids_available=True,
            shared_available=True,
        ),
    )


def _resume(broker: Broker, link: Link, session: Session) -> None:
    """Hand over what was in flight, then what was missed (S0.12, S0.19)."""
    if link.session is not session:
        return
    session.live_from = tuple(broker.delivery.ends)
    # What was in flight is known before anything else can be: the client may answer at once, and groups go on.
    reader, flights = session.reader, session.flights
    if flights is not None:
        for flight in flights:
            if flight.state is State.RELEASED:
                link.outbox.hold(PUBRELS[4 * flight.pid : 4 * (flight.pid + flight.count)])
                link.outbox.used += flight.count
            else:
                reader.again, reader.again_end = 0, flights.next_number
    job = _attach(broker, link, session)
    if next(job, None) is not None:
        broker.gate.add(job)


def _attach(broker: Broker, link: Link, session: Session) -> Job:
    """Routes lead to the session again, some filters at a time; then its readers go on."""
    for number, subscription in enumerate(list(session.subscriptions.values()), 1):
        broker.table.changed(subscription.pattern)
        if number % FILTERS_STEP == 0:
            yield FILTERS_STEP // 4
            if link.session is not session:
                return
    delivery = broker.delivery
    if session.reader.again is not None:
        delivery.resend(session.reader)
    else:
        delivery.attach(session.reader)
    for own in session.own_readers or ():
        delivery.attach(own)
    broker.groups.attend(session)
    broker.retaining.go_on(link)


# ── the smaller packets ──


def refuse(broker: Broker, link: Link, error: PeerError) -> None:
    """A CONNECT that is not accepted: a CONNACK with the reason, where the client can understand one."""
    # A 3.x client understands five reasons only; for the rest, and for what is not a CONNECT as it should be
    # [MQTT-3.1.4-1], the connection is just closed. So it is when the first packet is too large to be looked at.
    reason = error.reason
    silent = (Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR, Reason.PACKET_TOO_LARGE, Reason.TOPIC_NAME_INVALID)
    about = {"client": link.client_id, "peer": link.peer, "reason": f"0x{reason:02X}", "why": str(error)}
    broker.report("client.refused", about)
    if link.v5 or (connack_code_v3(reason) and reason not in silent):
        properties = Properties(reason_string=str(error).encode()) if link.v5 else NO_PROPERTIES
        limit = link.outbox.packet_max
        data = encode(Connack(False, reason, properties), link.version)
        if limit and len(data) > limit:
            data = encode(Connack(False, reason), link.version)  # [MQTT-3.2.2-19]
        if not limit or len(data) <= limit:
            link.outbox.put(data)
    broker.shut(link)


def on_second_connect(broker: Broker, link: Link, packet: Connect) -> None:
    raise ProtocolViolation("a second CONNECT")  # [MQTT-3.1.0-2]


def on_ping(broker: Broker, link: Link, packet: Pingreq) -> None:
    broker.send(link, Pingresp())


def on_disconnect(broker: Broker, link: Link, packet: Disconnect) -> None:
    session = link.session
    assert session is not None
    expiry_s = packet.properties.session_expiry
    if expiry_s is not None:
        if expiry_s and not session.expiry_s:
            raise ProtocolViolation("session expiry cannot be set at DISCONNECT if it was 0")  # [MQTT-3.14.2-2]
        session.expiry_s = min(expiry_s, broker.config.mqtt.session_expiry_max_s)
    # Only a normal disconnection takes the will back [MQTT-3.1.2-8], [MQTT-3.14.4-3].
    send_will = packet.reason != Reason.NORMAL_DISCONNECTION
    broker.sessions.leave(link, send_will=send_will, why="client disconnected", reason=packet.reason)
    broker.shut(link)


def on_auth(broker: Broker, link: Link, packet: Auth) -> None:
    raise ProtocolViolation("AUTH without an authentication method")
