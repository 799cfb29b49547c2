"""Watching one client: what it sends and what it is sent, on `$SYS/clients/<client id>/trace`.

A client is traced as long as somebody subscribes to just that topic; wildcards see what others asked for, and begin
nothing. Others pay for it with one look at their CONNECT. What is told are the packets that came and that left, however
the network cut them; messages about traces are not told, or two who watch each other would never come to an end. Of a
password it is told that there is one, of a payload its length.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tidegate.broker import notices
from tidegate.errors import PeerError
from tidegate.router import has_wildcard
from tidegate.session.link import Link, Phase
from tidegate.session.session import Subscription
from tidegate.wire import Connack, Connect, Packet, PacketStream, Publish, Subscribe, Unsubscribe, decode

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

TRACE = b"/trace"
PACKET_BYTES_MAX = 268_435_460
CONNECT_PACKET = 1
VERSIONS = {3: "3.1", 4: "3.1.1", 5: "5"}

# A trace is for reading: longer texts are cut, longer lists end with how many more there were.
TEXT_CHARS_MAX = 256
FILTERS_MAX = 20


class Trace:
    """How far the packets of a link that is watched, or may turn out to be, have been told."""

    __slots__ = ("came_bytes", "number", "told_bytes")

    def __init__(self) -> None:
        self.came_bytes = 0
        self.told_bytes = -PACKET_BYTES_MAX  # whatever waits to be complete is still to be told
        self.number = 0  # of the packet told last, so that a reader sees where some are missing


def topic_of(client_id: bytes) -> bytes:
    return notices.CLIENTS + notices.safe(client_id) + TRACE


# ── who is watched ──


def watched(broker: Broker, subscription: Subscription) -> None:
    """A filter was subscribed to: it may be for traces."""
    topic = subscription.pattern
    if _is_trace(topic) and not has_wildcard(topic):
        broker.tracers.setdefault(topic, set()).add((subscription.session.number, subscription.filter))
        _look(broker, topic)


def unwatched(broker: Broker, subscription: Subscription) -> None:
    watchers = broker.tracers.get(subscription.pattern)
    if watchers is not None:
        watchers.discard((subscription.session.number, subscription.filter))
        if not watchers:
            del broker.tracers[subscription.pattern]
            _look(broker, subscription.pattern)


def _is_trace(topic: bytes) -> bool:
    return topic.startswith(notices.CLIENTS) and topic.endswith(TRACE)


def _look(broker: Broker, topic: bytes) -> None:
    """Begin or end the trace of a client that is connected."""
    session = broker.sessions.get(notices.unsafe(topic[len(notices.CLIENTS) : -len(TRACE)]))
    if session is not None and session.link is not None:
        link = session.link
        link.trace = (link.trace or Trace()) if topic in broker.tracers else None


# ── what is told ──


def coming(link: Link, size: int) -> None:
    """So many bytes have come. Whose they are a new link tells with its CONNECT."""
    if link.trace is None and link.phase is Phase.NEW:
        link.trace = Trace()
    if link.trace is not None:
        link.trace.came_bytes += size


def received(broker: Broker, link: Link, data: bytes) -> None:
    """A buffer that begins with a packet, and ends with what came last. Packets that wait for their turn are in more
    than one."""
    broker.look_at_clock()  # the time that the broker goes by is that of its last tick
    trace = link.trace
    untold = max(0, trace.told_bytes - (trace.came_bytes - len(data)))
    stream = PacketStream(PACKET_BYTES_MAX)
    version = link.version
    try:
        packets = stream.feed(data[untold:])
        if link.phase is Phase.NEW:
            if not packets:
                return
            connect = _connect(*packets[0])
            if connect is None or topic_of(connect.client_id) not in broker.tracers:
                link.trace = None
                return
            link.client_id, version = connect.client_id, connect.version
        for first, body in packets:
            _tell(broker, link, "in", decode(first, body, version))
        if stream.fault is not None:
            raise stream.fault
    except PeerError as error:
        _publish(broker, link, {"direction": "in", "packet": "wrong", "why": str(error)})
    trace.told_bytes = trace.came_bytes - stream.pending_bytes


def _connect(first: int, body: bytes) -> Connect | None:
    if first >> 4 != CONNECT_PACKET:
        return None
    try:
        packet = decode(first, body, 4)
    except PeerError:
        return None  # nobody can say whose it is
    return packet if isinstance(packet, Connect) else None


def sent(broker: Broker, link: Link, out: list[bytes]) -> None:
    """What leaves for a link: whole packets."""
    try:
        for first, body in PacketStream(PACKET_BYTES_MAX).feed(b"".join(out)):
            packet = decode(first, body, link.version, from_server=True)
            if not isinstance(packet, Publish) or not _is_trace(_topic(link, packet)):
                _tell(broker, link, "out", packet)
    except PeerError as error:
        _publish(broker, link, {"direction": "out", "packet": "wrong", "why": str(error)})


def _topic(link: Link, packet: Publish) -> bytes:
    """The topic of a message that leaves, by its alias if it has no other."""
    if packet.topic:
        return packet.topic
    aliases: dict[bytes, int] = link.outbox.aliases
    return next((topic for topic, alias in aliases.items() if alias == packet.properties.topic_alias), b"")


def _tell(broker: Broker, link: Link, direction: str, packet: Packet) -> None:
    about: dict[str, object] = {"direction": direction, "packet": type(packet).__name__.upper()}
    match packet:
        case Publish():
            about["topic"] = _text(packet.topic)
            if packet.properties.topic_alias:
                about["alias"] = packet.properties.topic_alias
            about |= {"qos": packet.qos, "retain": packet.retain, "dup": packet.dup}
            if packet.qos:
                about["packet_id"] = packet.packet_id
            about["bytes"] = len(packet.payload)
        case Connect():
            about |= {"protocol": VERSIONS[packet.version], "clean_start": packet.clean_start}
            about["keep_alive_s"] = packet.keep_alive
            if packet.will is not None:
                about["will"] = _text(packet.will.topic)
            if packet.username is not None:
                about["user"] = _text(packet.username)
            if packet.password is not None:
                about["password"] = "given"
        case Connack():
            about |= {"session_present": packet.session_present, "reason": packet.reason}
        case _:
            for name in ("packet_id", "reason", "reasons"):
                if hasattr(packet, name):
                    about[name] = getattr(packet, name)
    if isinstance(packet, Subscribe):
        about["filters"] = [_text(request.filter) for request in packet.filters[:FILTERS_MAX]]
        about["qos"] = [request.qos for request in packet.filters[:FILTERS_MAX]]
    elif isinstance(packet, Unsubscribe):
        about["filters"] = [_text(filter) for filter in packet.filters[:FILTERS_MAX]]
    if isinstance(packet, Subscribe | Unsubscribe) and len(packet.filters) > FILTERS_MAX:
        about["more_filters"] = len(packet.filters) - FILTERS_MAX
    why = getattr(packet, "properties", None) and packet.properties.reason_string  # type: ignore[union-attr]
    if why:
        about["why"] = _text(why)
    _publish(broker, link, about)


def _text(text: bytes) -> str:
    found = text.decode("utf-8", "backslashreplace")
    return found if len(found) <= TEXT_CHARS_MAX else found[: TEXT_CHARS_MAX - 1] + "…"


def _publish(broker: Broker, link: Link, about: dict[str, object]) -> None:
    link.trace.number += 1
    at = datetime.fromtimestamp(broker.now_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    told = {"at": at, "number": link.trace.number, **about}
    notices.publish_unstored(broker, topic_of(link.client_id), json.dumps(told).encode(), even_behind=True)
