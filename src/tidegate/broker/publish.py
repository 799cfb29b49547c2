"""A PUBLISH the plain way, wills, and messages of the broker's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.errors import PeerError, ProtocolViolation, Refused
from tidegate.log.run import NO_EXPIRY, NOT_KEPT, RETAIN, Run
from tidegate.router import Retained
from tidegate.session import changes
from tidegate.session.link import Link
from tidegate.session.session import Session
from tidegate.wire import Puback, Publish, Pubrec, Reason

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

UTF8_PAYLOAD = 1


def on_publish(broker: Broker, link: Link, packet: Publish) -> None:
    session = link.session
    assert session is not None
    topic = _topic(link, packet)
    qos, pid = packet.qos, packet.packet_id
    if qos == 2:
        if session.inbound is not None and pid in session.inbound:
            # The message is stored already; only the PUBREC was lost [MQTT-4.3.3-10].
            broker.hold(link, Pubrec(pid))
            return
        if session.inbound is not None and len(session.inbound) >= broker.config.mqtt.receive_maximum:
            raise Refused("more unfinished QoS 2 messages than allowed", reason=Reason.RECEIVE_MAXIMUM_EXCEEDED)
    try:
        _check(broker, packet, topic)
        route = broker.table.routes.get(topic) or broker.table.resolve(topic)
    except PeerError as error:
        if isinstance(error, ProtocolViolation):
            raise
        _refuse(broker, link, packet, error)
        return
    expiry = packet.properties.message_expiry
    run = Run(
        topic,
        link.client_id,
        broker.tenant,
        qos | (RETAIN if packet.retain else 0),
        [packet.payload],
        [packet.passed_on] if packet.passed_on else None,
        None if expiry is None else [expiry],
    )
    run.route = route
    if packet.retain and not _retain(broker, run, len(packet.payload)):
        if link.v5 and qos:
            full = Refused("no room for another retained message", reason=Reason.QUOTA_EXCEEDED)
            _refuse(broker, link, packet, full)
            return
        # Others cannot be told. The message goes to subscribers all the same, it is only not retained.
        run.flags |= NOT_KEPT
        broker.counters.refused["retained"] += 1
    _collect(broker, run, len(packet.payload))
    if qos == 1:
        broker.acks.append((link, [pid.to_bytes(2, "big")], route.matched))
    elif qos == 2:
        if session.inbound is None:
            session.inbound = set()
        session.inbound.add(pid)
        broker.run_changes.append(changes.inbound(session.number, pid))
        broker.on_refusal.append(lambda: _take_back_qos2(broker, link, session, pid))
        reason = 0 if route.matched or not link.v5 else Reason.NO_MATCHING_SUBSCRIBERS
        broker.pubrecs.append((link, pid, reason))


def publish(
    broker: Broker,
    topic: bytes,
    payload: bytes,
    qos: int,
    retain: bool,
    publisher: bytes,
    properties: bytes = b"",
    expiry_s: int | None = None,
) -> None:
    """A message that no connection sends: a will."""
    route = broker.table.routes.get(topic) or broker.table.resolve(topic)
    flags = qos | (RETAIN if retain else 0)
    run = Run(
        topic,
        publisher,
        broker.tenant,
        flags,
        [payload],
        [properties] if properties else None,
        None if expiry_s is None else [expiry_s],
    )
    run.route = route
    if retain and not _retain(broker, run, len(payload)):
        run.flags |= NOT_KEPT
        broker.counters.refused["retained"] += 1
    _collect(broker, run, len(payload))
    broker.request_tick()


def _collect(broker: Broker, run: Run, payload_bytes: int) -> None:
    broker.runs.append(run)
    broker.pending += 1
    broker.pending_bytes += payload_bytes + len(run.topic) + 8


def _topic(link: Link, packet: Publish) -> bytes:
    alias = packet.properties.topic_alias
    if alias is None:
        return packet.topic
    if alias > link.aliases_in_max:
        raise Refused(f"topic alias {alias}, the maximum is {link.aliases_in_max}", reason=Reason.TOPIC_ALIAS_INVALID)
    if packet.topic:
        link.aliases_in[alias] = packet.topic
        return packet.topic
    topic = link.aliases_in.get(alias)
    if topic is None:
        raise ProtocolViolation(f"topic alias {alias} has not been set")
    return topic


def _check(broker: Broker, packet: Publish, topic: bytes) -> None:
    if topic.startswith(b"$"):
        raise Refused("topics that begin with $ belong to the broker", reason=Reason.TOPIC_NAME_INVALID)
    if packet.properties.payload_format == UTF8_PAYLOAD and broker.config.mqtt.check_payload_format:
        try:
            packet.payload.decode()
        except UnicodeDecodeError as error:
            raise Refused("the payload is not the UTF-8 it claims", reason=Reason.PAYLOAD_FORMAT_INVALID) from error


def _refuse(broker: Broker, link: Link, packet: Publish, error: PeerError) -> None:
    """A message that is not taken. MQTT 5 has words for it; an MQTT 3 client is acknowledged and must not retry."""
    broker.counters.refused[f"PUBLISH 0x{error.reason:02X}"] += 1
    broker.counters.dropped["refused"] += 1
    if not link.refused:
        # Once a connection: the counters have the rest, and nobody can fill the log with it.
        link.refused = True
        about = {"client": link.client_id, "reason": f"0x{error.reason:02X}", "why": str(error)}
        broker.report("publish.refused", about)
    reason = error.reason if link.v5 else 0
    if packet.qos == 1:
        broker.hold(link, Puback(packet.packet_id, reason, broker.why(link, error)))
    elif packet.qos == 2:
        broker.hold(link, Pubrec(packet.packet_id, reason, broker.why(link, error)))


def _take_back_qos2(broker: Broker, link: Link, session: Session, pid: int) -> None:
    if session.inbound is not None:
        session.inbound.discard(pid)
    if link.v5:
        broker.send(link, Pubrec(pid, Reason.QUOTA_EXCEEDED))
    else:
        broker.close(link, Reason.QUOTA_EXCEEDED)


def _retain(broker: Broker, run: Run, payload_bytes: int) -> bool:
    """Make the run's message the topic's retained one; False if there is no room for it."""
    store = broker.retained
    before = store.get(run.topic)
    expiry = run.expiries[0] if run.expiries is not None else NO_EXPIRY
    position = broker.next_position()
    message = Retained(
        run.topic,
        run.payloads[0],
        run.flags & 3,
        run.properties[0] if run.properties is not None else b"",
        None if expiry == NO_EXPIRY else broker.now_ms + expiry * 1000,
        broker.now_ms,
        position,
        run.publisher,
    )
    if store.put(message).refused:
        return False
    if payload_bytes:
        broker.run_changes.append(retained_record(message))
    else:
        broker.run_changes.append(changes.unretained(run.topic))

    def take_back() -> None:
        if before is None:
            store.delete(run.topic)
        else:
            store.put(before)

    broker.on_refusal.append(take_back)
    return True


def retained_record(message: Retained) -> bytes:
    return changes.retained(
        message.topic,
        message.payload,
        message.qos,
        message.properties,
        message.expires_at_ms,
        message.time_ms,
        message.position,
        message.publisher,
    )
