"""CONNECT, DISCONNECT and everything between a connection and its session.

The order on connect is fixed (S0.17): authenticate, claim the client id, look the session up, CONNACK, then what was
missed. A connection that fails to authenticate displaces nobody.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from tidegate.broker import groups, timers
from tidegate.broker.publish import publish
from tidegate.errors import PeerError, ProtocolViolation, Refused
from tidegate.limits import CLIENT_ID_BYTES_MAX
from tidegate.router import check_topic
from tidegate.session import changes
from tidegate.session.flights import State
from tidegate.session.link import Link, Phase
from tidegate.session.session import NEVER, Reader, Session, StoredWill
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
    Pubrel,
    Reason,
    Will,
    connack_code_v3,
    encode,
)

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# Whose readers are those of sessions that have ended.
NOBODY = Session(0, b"", b"", 0, 0)


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
    session = broker.sessions.get(client_id)
    if session is not None and session.link is not None:
        broker.counters.takeovers += 1
        # The old connection's will is due now, unless the new one takes the session on before its delay is over.
        broker.close(session.link, Reason.SESSION_TAKEN_OVER)
        session = broker.sessions.get(client_id)  # a session that is not persistent ended with it
    if session is not None and packet.clean_start:
        remove(broker, session)
        session = None
    present = session is not None
    expiry_s = _expiry(broker, packet)
    if session is None:
        if len(broker.sessions) >= broker.config.mqtt.sessions_max:
            raise Refused("no room for another session", reason=Reason.QUOTA_EXCEEDED)
        session = Session(next(broker.numbers), client_id, broker.tenant, expiry_s, broker.log.end)
        broker.sessions[client_id] = session
    session.expiry_s = expiry_s
    session.will, session.will_at_s = will, 0.0
    session.expires_at_s = 0.0
    session.away_since_ms = 0
    _open(broker, link, packet, session, client_id)
    record(broker, session, connected=True)
    connack = _connack(broker, link, packet, session, present, assigned)
    if link.packet_max and len(encode(connack, link.version)) > link.packet_max:
        # What is so by default need not be said [MQTT-3.1.2-24].
        told = replace(
            connack.properties,
            retain_available=None,
            wildcard_available=None,
            subscription_ids_available=None,
            shared_available=None,
        )
        connack = replace(connack, properties=told)
    broker.send(link, connack)
    _resume(broker, link, session)


def _authenticate(packet: Connect) -> None:
    # Enhanced authentication is not offered: the client is told so before anything is touched [MQTT-4.12.0-1].
    if packet.properties.auth_method is not None:
        raise Refused("enhanced authentication is not available", reason=Reason.BAD_AUTHENTICATION_METHOD)


def _admit(broker: Broker, packet: Connect) -> None:
    if broker.closing:
        raise Refused("the broker is shutting down", reason=Reason.SERVER_SHUTTING_DOWN)
    if len(packet.client_id) > CLIENT_ID_BYTES_MAX:
        raise Refused(
            f"client id of more than {CLIENT_ID_BYTES_MAX} bytes", reason=Reason.CLIENT_ID_NOT_VALID
        )


def _will(broker: Broker, will: Will) -> StoredWill:
    try:
        check_topic(will.topic)
        if will.topic.startswith(b"$"):
            raise Refused("topics that begin with $ belong to the broker", reason=Reason.TOPIC_NAME_INVALID)
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
    link.session = session
    link.seen_s = link.connected_at_s = link.ack_seen_s = broker.now_s
    link.problem_info = asked.request_problem_info is not False
    link.window = min(asked.receive_maximum or (65535 if link.v5 else config.inflight_max), config.inflight_max)
    link.packet_max = asked.maximum_packet_size or 0
    link.aliases_in_max = config.topic_alias_maximum if link.v5 else 0
    link.aliases_out_max = min(asked.topic_alias_maximum or 0, config.topic_alias_out_maximum)
    link.simple = not link.packet_max and not link.aliases_out_max
    link.keep_alive_s = packet.keep_alive
    if link.v5 and config.keep_alive_max_s and not 0 < packet.keep_alive <= config.keep_alive_max_s:
        link.keep_alive_s = config.keep_alive_max_s
    session.link = link
    broker.links.add(link)
    broker.counters.connects += 1
    broker.counters.clients_max = max(broker.counters.clients_max, len(broker.links))
    timers.watch(broker, link)


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
    dispatcher = broker.dispatcher
    session.live_from = broker.log.end
    again = []
    if session.flights is not None:
        for flight in session.flights.queue:
            if flight.state is State.RELEASED:
                broker.hold(link, Pubrel(flight.pid))
                link.on_wire += flight.count
            elif flight.state is State.SENT:
                again.append(flight)
    for reader in readers(session):
        reader.live = reader.blocked = False
        reader.targets = None
    session.reader.resend = again or None
    if not again and session.reader.cursor >= broker.log.end:
        session.reader.live = True
    broker.table.session_changed(session)
    for reader in readers(session):
        dispatcher.queue(reader)
    groups.attend(broker, session)


def readers(session: Session) -> list[Reader]:
    """The session's own readers: the main one, and those of its $replay subscriptions."""
    own = [session.reader]
    own += [s.reader for s in session.subscriptions.values() if s.reader is not None and s.reader.session is session]
    return own


# ── the end of a connection ──


def leave(broker: Broker, link: Link, *, send_will: bool) -> None:
    """Part a connection from its session: the session stays, or ends with it."""
    broker.links.discard(link)
    broker.throttled.discard(link)
    session, link.session = link.session, None
    if session is None or session.link is not link:
        return
    broker.settle()
    end = broker.log.end
    for reader in readers(session):
        if reader.live:
            reader.cursor = end
        reader.live = reader.blocked = False
        if reader.subscription is not None:
            broker.moved.add(reader)
        broker.catch_up.release(reader)
    link.waiting.clear()
    link.retained_streams = None
    session.link = None
    groups.absent(broker, session)
    broker.table.session_changed(session)
    session.away_since_ms = broker.now_ms
    if not send_will:
        session.will = None
    persistent = session.persistent
    if session.will is not None:
        delay_s = min(session.will.delay_s, session.expiry_s)
        if delay_s:
            session.will_at_s = broker.now_s + delay_s
        else:
            send_will_of(broker, session)
    if not persistent:
        remove(broker, session)
        return
    session.expires_at_s = broker.now_s + session.expiry_s if session.expiry_s != NEVER else 0.0
    session.rest()
    record(broker, session, connected=False)
    timers.watch_absent(broker, session)


def send_will_of(broker: Broker, session: Session) -> None:
    will, session.will, session.will_at_s = session.will, None, 0.0
    if will is None:
        return
    broker.counters.wills_sent += 1
    publish(
        broker, will.topic, will.payload, will.qos, will.retain, session.client_id, will.properties, will.expiry_s
    )
    if broker.sessions.get(session.client_id) is session:
        record(broker, session, connected=session.link is not None)


def remove(broker: Broker, session: Session) -> None:
    """End a session: its subscriptions, its flights, its name. A will still pending is sent now [MQTT-3.1.3-9]."""
    if session.will is not None and session.link is None:
        send_will_of(broker, session)
    broker.settle()
    for subscription in session.subscriptions.values():
        broker.table.unsubscribe(subscription)
        groups.left(broker, subscription)
    for reader in readers(session):
        broker.moved.discard(reader)
        reader.session = NOBODY  # no circle is left for the garbage collector, which seldom looks
    session.subscriptions = {}
    del broker.sessions[session.client_id]
    broker.change(changes.gone(session.number))


def record(broker: Broker, session: Session, connected: bool) -> None:
    link = session.link
    broker.change(
        changes.session(
            session.number,
            connected,
            link.version if link is not None else 0,
            session.expiry_s,
            session.away_since_ms,
            broker.dispatcher.position(session.reader),
            session.client_id,
            session.tenant,
            session.will,
        )
    )


# ── the smaller packets ──


def refuse(broker: Broker, link: Link, reason: int, why: str) -> None:
    """A CONNECT that is not accepted: a CONNACK with the reason, where the client can understand one."""
    # A 3.x client understands five reasons only; for the rest the connection is just closed. So it is when the
    # first packet is too large to be looked at: it may not even be a CONNECT.
    silent = (Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR, Reason.PACKET_TOO_LARGE)
    if link.v5 or (connack_code_v3(reason) and reason not in silent):
        properties = Properties(reason_string=why.encode()) if link.v5 else NO_PROPERTIES
        broker.dispatcher.send(link, encode(Connack(False, reason, properties), link.version))
    broker.links.discard(link)
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
    leave(broker, link, send_will=packet.reason != Reason.NORMAL_DISCONNECTION)
    broker.shut(link)


def on_auth(broker: Broker, link: Link, packet: Auth) -> None:
    raise ProtocolViolation("AUTH without an authentication method")
