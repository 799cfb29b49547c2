"""A reference broker, written for obvious correctness: plain dicts and lists, one packet at a time, no batching.

It follows MQTT 3.1.1 and 5 (clause numbers are those of MQTT 5) and the product's documented rules (docs/guide.md),
and shares nothing with the broker but the codec. It is a broker as far as the standard decides what happens:

    receive(link, bytes), lost(link), advance(seconds)     what clients do, and time
    link.answers      the answers that a link gets, kind by kind, in order
    link.farewell     the reasons one of which its DISCONNECT gives
    session.owed      the messages that a session is to get, with the forms in which each may come
    group.owed        those of which one member of a shared group gets each
    session.flights   what a session was sent and has not finished, by packet id

What the standard leaves open (packet ids, when, in which order between different publishers) it leaves open too:
`agreement` tells it what the broker under test chose (`sent`), and checks that it could.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tidegate.errors import MalformedPacket, PeerError, ProtocolViolation, Refused
from tidegate.wire import (
    NO_PROPERTIES,
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
    connack_code_v3,
    decode,
    encode_property_block,
    peek_version,
)

CONNECT_BYTES_MAX = 256 << 10
NEVER = 0xFFFFFFFF
MAIN = ("main",)
PASSED_ON = ("payload_format", "content_type", "response_topic", "correlation_data", "user")


@dataclass(frozen=True)
class Settings:
    """What the broker under test is told to do, as its configuration names it."""

    receive_maximum: int = 8192
    inflight_max: int = 8192
    topic_alias_maximum: int = 64
    packet_bytes_max: int = 4 << 20
    session_expiry_max_s: int = 30 * 86400
    topic_levels_max: int = 128
    check_payload_format: bool = True


# ── what there is ──


@dataclass(frozen=True)
class Message:
    number: int  # in the order in which messages were published
    publisher: bytes
    topic: bytes
    payload: bytes
    qos: int
    retain: bool
    properties: Properties  # those that are passed on
    expiry_s: int | None
    at_s: float

    def expires(self, now_s: float) -> bool:
        """Whether it must not be sent any more [MQTT-3.3.2-5]. At the very instant it may or may not."""
        return self.expiry_s is not None and now_s - self.at_s > self.expiry_s

    def may_expire(self, now_s: float) -> bool:
        return self.expiry_s is not None and now_s - self.at_s >= self.expiry_s


@dataclass(frozen=True)
class Form:
    """How a message is put for a subscriber."""

    qos: int
    retain: bool
    ids: tuple[int, ...]  # subscription identifiers, sorted


@dataclass
class Subscription:
    filter: bytes  # as the client wrote it
    kind: str  # plain, shared, replay
    group: bytes
    pattern: bytes
    qos: int
    no_local: bool
    retain_as_published: bool
    identifier: int
    since: int  # messages from this number on belong to it
    stream: tuple[Any, ...]


@dataclass
class Owed:
    message: Message
    forms: list[Form]
    stream: tuple[Any, ...]  # messages of one stream, publisher and topic come in order
    certain: bool = True  # else it may come or not
    tried: bool = False  # it may have been on its way before: DUP is open
    revoked: bool = False  # unsubscribed: it may come until the UNSUBACK


@dataclass
class Flight:
    owed: Owed
    form: Form
    here: bool = True  # sent on this connection
    again: bool = False  # … and on an earlier one
    released: bool = False  # QoS 2: the client's PUBREC has come
    handed_on: bool = False  # others of the shared group get it as well


@dataclass
class Answer:
    packet_id: int
    codes: tuple[int, ...]
    or_codes: tuple[int, ...] = ()  # as good as `codes`, where the standard has two words
    nothing_stored: bool = False  # for a message that was refused, is there already, or is not known


class Link:
    def __init__(self) -> None:
        self.version = 4
        self.buffer = bytearray()
        self.session: Session | None = None
        self.greeted = False  # a CONNECT was accepted
        self.began = 0  # messages from this number on were published while it was there
        self.closed = False
        self.farewell: tuple[int, ...] = ()  # reasons of which the DISCONNECT gives one; () if none is due
        self.answers: dict[type, list[Any]] = {}
        self.releases: set[int] = set()  # packet ids whose PUBREL is sent again, in any order
        self.unfinished: list[tuple[type, int]] = []  # inbound QoS 1 and 2 of this connection, till their last answer
        self.aliases: dict[int, bytes] = {}
        self.window = 0
        self.packet_max = 0
        self.aliases_out_max = 0

    @property
    def v5(self) -> bool:
        return self.version == 5

    def answer(self, kind: type, what: Any) -> None:
        self.answers.setdefault(kind, []).append(what)


class Order:
    """In which order a session gets messages, as far as what it gets tells. The same message may be owed by several
    streams, and does not say which of them brings it."""

    def __init__(self) -> None:
        self.newest: dict[tuple[Any, ...], int] = {}  # the number last taken for a stream's, by publisher and topic
        self.certain: dict[tuple[Any, ...], int] = {}  # … of those that can be no other stream's
        self.streams: dict[int, set[tuple[Any, ...]]] = {}  # who may have brought a message
        self.bringing: dict[tuple[bytes, bytes], set[tuple[Any, ...]]] = {}  # by publisher and topic: all of these
        self.lines: dict[tuple[bytes, bytes], list[int]] = {}  # the last of each line that what came can be parted into

    def late(self, owed: Owed) -> bool:
        about = owed.message
        return about.number < self.newest.get((owed.stream, about.publisher, about.topic), -1)

    def came(self, owed: Owed, streams: set[tuple[Any, ...]], *, exempt: bool) -> None:
        """One message came, by one of these streams; `owed` is the likeliest. Each stream's messages of a publisher and
        topic come in order [MQTT-4.6.0-6]: so those that can be of one stream only do, and all of them together can be
        parted into as many rising lines as there are streams."""
        about = owed.message
        number, key = about.number, (about.publisher, about.topic)
        may = self.streams.setdefault(number, set())
        may |= streams
        bringing = self.bringing.setdefault(key, set())
        bringing |= may
        if exempt:
            return
        self.newest[owed.stream, *key] = number
        if len(may) == 1:
            newest = self.certain.get((owed.stream, *key), -1)
            assert number > newest, f"message {number} after {newest}"
            self.certain[owed.stream, *key] = number
        lines = self.lines.setdefault(key, [])
        before = [last for last in lines if last < number]
        if before:
            lines.remove(max(before))
        lines.append(number)
        assert len(lines) <= len(bringing), f"message {number} after {sorted(lines)}, by {len(bringing)} streams"


class Session:
    def __init__(self, client_id: bytes) -> None:
        self.client_id = client_id
        self.link: Link | None = None
        self.expiry_s = 0
        self.expires_at_s = 0.0
        self.will: Will | None = None
        self.will_at_s = 0.0
        self.subscriptions: dict[bytes, Subscription] = {}
        self.owed: list[Owed] = []
        self.flights: dict[int, Flight] = {}
        self.inbound: set[int] = set()  # QoS 2 packet ids received and not released
        self.order = Order()


class Group:
    def __init__(self, name: bytes, pattern: bytes) -> None:
        self.stream = ("group", name, pattern)
        self.members: dict[bytes, list[Subscription]] = {}  # the options each member has had, the latest last
        self.owed: list[Owed] = []


# ── topics ──


def matches(pattern: bytes, topic: bytes) -> bool:
    """Section 4.7."""
    if topic[:1] == b"$" and pattern[:1] in (b"+", b"#"):
        return False  # [MQTT-4.7.2-1]
    wanted, levels = pattern.split(b"/"), topic.split(b"/")
    if wanted[-1] == b"#":
        wanted.pop()
        if len(levels) < len(wanted):
            return False  # what remains may be no level at all: `sport/#` matches `sport`
    elif len(levels) != len(wanted):
        return False
    return all(want in (b"+", level) for want, level in zip(wanted, levels, strict=False))


def malformed(pattern: bytes) -> bool:
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2]: wildcards are whole levels, and `#` is the last."""
    levels = pattern.split(b"/")
    return any(
        (b"+" in level and level != b"+") or (b"#" in level and (level != b"#" or place < len(levels) - 1))
        for place, level in enumerate(levels)
    )


def first_packet(buffer: bytes, limit: int) -> tuple[int, bytes, int] | None:
    """The first byte, the body and the size of the packet at the front, None if it is not complete."""
    length = shift = 0
    for at in range(1, 5):
        if at >= len(buffer):
            return None
        length |= (buffer[at] & 0x7F) << shift
        shift += 7
        if buffer[at] < 0x80:
            if at > 1 and not buffer[at]:
                raise MalformedPacket("remaining length in more bytes than needed")  # [MQTT-1.5.5-1]
            size = at + 1 + length
            if size > limit:
                raise Refused("the packet is too large", reason=0x95)
            return (buffer[0], bytes(buffer[at + 1 : size]), size) if len(buffer) >= size else None
    raise MalformedPacket("remaining length of more than four bytes")


# ── the broker ──


class Reference:
    def __init__(
        self, settings: Settings | None = None, forgiven: frozenset[str] = frozenset(), *, prompt: bool = True
    ) -> None:
        """`forgiven` names what the broker under test is known to do wrong (`forgiveness`). Unless it is `prompt`, a
        message that is taken is published when that is `announced`."""
        self.settings = settings or Settings()
        self.forgiven = forgiven
        self.prompt = prompt
        self.unannounced: list[Message] = []
        self.now_s = 0.0
        self.log: list[Message] = []
        self.retained: dict[bytes, Message] = {}
        self.sessions: dict[bytes, Session] = {}
        self.groups: dict[tuple[bytes, bytes], Group] = {}
        self._names = itertools.count(1)

    # ── what clients do ──

    def receive(self, link: Link, data: bytes) -> None:
        link.buffer += data
        while not link.closed:
            try:
                found = first_packet(link.buffer, self.settings.packet_bytes_max if link.greeted else CONNECT_BYTES_MAX)
                if found is None:
                    return
                first, body, size = found
                del link.buffer[:size]
                self._packet(link, first, body)
            except PeerError as error:
                self._fault(link, error.reason)

    def lost(self, link: Link) -> None:
        """The connection broke."""
        if not link.closed:
            self._leave(link, send_will=True)

    def advance(self, seconds: float) -> None:
        """Time passes, and whatever is due at its end happens then: wills are sent, and sessions end by themselves, at
        full seconds."""
        self.now_s += seconds
        for session in list(self.sessions.values()):
            self._look_at(session, int(self.now_s))

    def _look_at(self, session: Session, now_s: float) -> None:
        if session.link is None:
            if session.will is not None and session.will_at_s <= now_s:
                self._send_will(session)
            if session.expiry_s != NEVER and session.expires_at_s <= now_s:
                self._end(session)  # [MQTT-4.1.0-2]

    def sent(self, session: Session, owed: Owed, form: Form, packet_id: int) -> None:
        """The broker under test chose to send this now."""
        for place in (session.owed, *(group.owed for group in self.groups.values())):
            place[:] = [other for other in place if other is not owed]
        if form.qos:
            session.flights[packet_id] = Flight(owed, form)

    def _fault(self, link: Link, *reasons: int) -> None:
        """A violation ends the connection; an MQTT 5 client is told why [MQTT-4.13.1-1]."""
        if not link.greeted:
            # 3.1.1 closes without a word, but for the reasons that its CONNACK has [MQTT-3.1.4-1], [MQTT-3.1.4-5].
            wordy = "a will without a word in 3.1.1 is refused with one" in self.forgiven and reasons[0] in (0x90, 0x99)
            if link.v5 or wordy or connack_code_v3(reasons[0]) in (1, 2, 4, 5):
                link.answer(Connack, Connack(False, reasons[0]))
            link.closed = True
            return
        link.farewell = reasons if link.v5 else ()
        self._leave(link, send_will=True)

    def _packet(self, link: Link, first: int, body: bytes) -> None:
        kind = first >> 4
        if not link.greeted:
            if kind != 1:
                raise ProtocolViolation("the first packet must be CONNECT")  # [MQTT-3.1.0-1]
            link.version = peek_version(body) or 4
            packet = decode(first, body, 4)
            assert isinstance(packet, Connect)
            link.version = packet.version
            self._connect(link, packet)
            return
        if kind in (1, 2, 9, 11, 13):
            raise ProtocolViolation("not a packet that a client may send now")  # [MQTT-3.1.0-2]
        packet = decode(first, body, link.version)
        match packet:
            case Publish():
                self._publish(link, packet)
            case Puback():
                self._puback(link, packet)
            case Pubrec():
                self._pubrec(link, packet)
            case Pubrel():
                self._pubrel(link, packet)
            case Pubcomp():
                self._pubcomp(link, packet)
            case Subscribe():
                self._subscribe(link, packet)
            case Unsubscribe():
                self._unsubscribe(link, packet)
            case Pingreq():
                link.answer(Pingresp, Pingresp())
            case Disconnect():
                self._disconnect(link, packet)
            case Auth():
                raise ProtocolViolation("AUTH without an authentication method")

    # ── connections and sessions ──

    def _connect(self, link: Link, packet: Connect) -> None:
        asked, settings = packet.properties, self.settings
        if asked.auth_method is not None:
            raise Refused("no enhanced authentication", reason=0x8C)
        if packet.will is not None:
            self._check_will(link, packet.will)
        client_id = packet.client_id or b"assigned %d" % next(self._names)
        session = self.sessions.get(client_id)
        if session is not None:
            self._look_at(session, self.now_s)  # whoever comes back finds nothing that is over
            session = self.sessions.get(client_id)
        if session is not None and session.link is not None:
            old = session.link
            old.farewell = (0x8E,) if old.v5 else ()
            before = len(self.log)
            self._leave(old, send_will=True)  # [MQTT-3.1.4-3]
            session = self.sessions.get(client_id)
            if session is not None and len(self.log) > before:
                self._will_of_the_taken_over(session, self.log[-1])
        if session is not None and packet.clean_start:
            self._end(session)  # [MQTT-3.1.2-4]
            session = None
        present = session is not None
        if session is None:
            session = self.sessions[client_id] = Session(client_id)
        longest = settings.session_expiry_max_s
        if link.v5:
            session.expiry_s = min(asked.session_expiry or 0, longest)
        else:
            session.expiry_s = 0 if packet.clean_start else longest
        session.will, session.will_at_s = packet.will, 0.0
        session.link, link.session, link.greeted, link.began = link, session, True, len(self.log)
        link.window = min(asked.receive_maximum or 65535, settings.inflight_max)
        link.packet_max = asked.maximum_packet_size or 0
        link.aliases_out_max = asked.topic_alias_maximum or 0
        told = NO_PROPERTIES
        if link.v5:
            told = Properties(
                session_expiry=session.expiry_s if session.expiry_s != (asked.session_expiry or 0) else None,
                receive_maximum=settings.receive_maximum,
                maximum_packet_size=settings.packet_bytes_max,
                assigned_client_id=None if packet.client_id else b"?",
                topic_alias_maximum=settings.topic_alias_maximum,
            )
        link.answer(Connack, Connack(present and packet.version > 3, 0, told))
        for packet_id, flight in session.flights.items():
            flight.here = flight.again = False  # to be sent again [MQTT-4.4.0-1]
            if flight.released:
                link.releases.add(packet_id)

    def _check_will(self, link: Link, will: Will) -> None:
        # 0x90 has no word in a 3.1.1 CONNACK: such a connection is just closed.
        if will.topic.startswith(b"$") or self._too_deep(will.topic):
            raise Refused("no such will", reason=0x90)
        if will.properties.payload_format == 1 and not _is_utf8(will.payload):
            raise Refused("not the UTF-8 it claims", reason=0x99)

    def _too_deep(self, topic: bytes) -> bool:
        return topic.count(b"/") >= self.settings.topic_levels_max

    def _disconnect(self, link: Link, packet: Disconnect) -> None:
        assert link.session is not None
        expiry_s = packet.properties.session_expiry
        if expiry_s is not None:
            if expiry_s and not link.session.expiry_s:
                raise ProtocolViolation("session expiry was 0")  # [MQTT-3.14.2-2]
            link.session.expiry_s = min(expiry_s, self.settings.session_expiry_max_s)
        self._leave(link, send_will=packet.reason != 0)  # [MQTT-3.14.4-3]

    def _leave(self, link: Link, send_will: bool) -> None:
        link.closed = True
        session = link.session
        if session is None or session.link is not link:
            return
        for owed in session.owed:
            owed.tried = True
            if any(form.qos == 0 for form in owed.forms):
                # QoS 0 is for those who are there. A replay goes on where it was, wherever that is; so does what is
                # retained, for a subscription that may bring more than QoS 0.
                owed.certain = False
            if any(largest(link, owed, form) > link.packet_max > 0 for form in owed.forms):
                owed.certain = False  # may have been passed by
        session.owed = [
            owed
            for owed in session.owed
            if owed.stream[0] in ("replay", "retained") or not owed.forms or any(form.qos for form in owed.forms)
        ]
        if "retained are lost at a disconnect" in self.forgiven:
            for owed in session.owed:
                owed.certain = owed.certain and owed.stream[0] != "retained"
        session.link = None
        for group in list(self.groups.values()):
            if session.client_id in group.members:
                self._absent_from(group, session)
        session.flights = {p: f for p, f in session.flights.items() if not f.handed_on}
        if not send_will:
            session.will = None
        if session.will is not None:
            delay_s = min(session.will.properties.will_delay or 0, session.expiry_s)
            session.will_at_s = self.now_s + delay_s
            if not delay_s:
                self._send_will(session)
        session.expires_at_s = self.now_s + session.expiry_s
        if not session.expiry_s:
            self._end(session)

    def _will_of_the_taken_over(self, session: Session, message: Message) -> None:
        """A will and the connection that replaces its own are of one moment: with QoS 0 the session may get it as if it
        had been there, or not."""
        if "who takes over misses the old will" in self.forgiven:
            for owed in session.owed:
                owed.certain = owed.certain and owed.message is not message
        plain = [s for s in session.subscriptions.values() if s.kind == "plain" and matches(s.pattern, message.topic)]
        form = self._form(session, plain, message)
        if form is not None and not form.qos:
            session.owed.append(Owed(message, [form], MAIN, certain=False))
        for group in self.groups.values():
            if session.client_id in group.members and matches(group.stream[2], message.topic) and not message.qos:
                waiting = any(owed.message is message for owed in group.owed)
                group.owed += [] if waiting else [Owed(message, [], group.stream, certain=False)]

    def _send_will(self, session: Session) -> None:
        will, session.will = session.will, None
        if will is not None:
            about = will.properties
            self._accept(
                session.client_id, will.topic, will.payload, will.qos, will.retain, about, about.message_expiry
            )

    def _end(self, session: Session) -> None:
        """[MQTT-3.1.3-9]: a will that still waits is sent when its session ends."""
        self._send_will(session)
        for subscription in session.subscriptions.values():
            if subscription.kind == "shared":
                self._leaves_group(session, subscription, here=False)
        del self.sessions[session.client_id]

    # ── publishing ──

    def _publish(self, link: Link, packet: Publish) -> None:
        session = link.session
        assert session is not None
        topic = self._topic(link, packet)
        kind: type = Puback if packet.qos == 1 else Pubrec
        if packet.qos == 2 and packet.packet_id in session.inbound:
            # The message is there already [MQTT-4.3.3-10]; whether somebody wanted it may be said again or not.
            repeated = (0x10,) if link.v5 else ()
            link.answer(Pubrec, Answer(packet.packet_id, (0,), repeated, nothing_stored=True))
            return
        if packet.qos:
            self._check_receive_maximum(link, packet)
        refusal = 0
        if topic.startswith(b"$") or self._too_deep(topic):
            refusal = 0x90
        elif packet.properties.payload_format == 1 and self.settings.check_payload_format:
            refusal = 0 if _is_utf8(packet.payload) else 0x99
        if refusal:
            if packet.qos:
                link.unfinished.pop()  # dealt with
                code = refusal if link.v5 else 0  # an MQTT 3 client is acknowledged, and must not try again
                link.answer(kind, Answer(packet.packet_id, (code,), nothing_stored=True))
            return
        wanted = self._accept(
            session.client_id,
            topic,
            packet.payload,
            packet.qos,
            packet.retain,
            packet.properties,
            packet.properties.message_expiry,
        )
        if packet.qos:
            self._answer(link, kind, packet.packet_id, 0 if wanted or not link.v5 else 0x10)
        if packet.qos == 2:
            session.inbound.add(packet.packet_id)

    def _answer(self, link: Link, kind: type, packet_id: int, code: int) -> None:
        link.answer(kind, Answer(packet_id, (code,)))

    def _topic(self, link: Link, packet: Publish) -> bytes:
        alias = packet.properties.topic_alias
        if alias is None:
            return packet.topic
        if alias > self.settings.topic_alias_maximum:
            raise Refused("topic alias too large", reason=0x94)  # [MQTT-3.2.2-18]
        if packet.topic:
            link.aliases[alias] = packet.topic
        elif alias not in link.aliases:
            raise ProtocolViolation("topic alias not set")
        return link.aliases[alias]

    def _check_receive_maximum(self, link: Link, packet: Publish) -> None:
        """[MQTT-3.3.4-7]: more publishes on their way than allowed. An MQTT 3 client was never told of a limit; of
        QoS 2, which costs memory, no session may have more, its earlier connections included."""
        session = link.session
        assert session is not None
        unfinished = len(session.inbound) if packet.qos == 2 else 0
        if link.v5 and "receive maximum holds for QoS 2 only" not in self.forgiven:
            unfinished = max(unfinished, len(link.unfinished))
        if unfinished >= self.settings.receive_maximum:
            raise Refused("too many unfinished messages", reason=0x93)
        link.unfinished.append((Puback if packet.qos == 1 else Pubcomp, packet.packet_id))

    def _accept(
        self,
        publisher: bytes,
        topic: bytes,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: Properties,
        expiry_s: int | None,
    ) -> bool:
        """A message is taken. Returns whether anybody has subscribed to it."""
        passed_on = Properties(**{name: getattr(properties, name) for name in PASSED_ON})
        message = Message(-1, publisher, topic, payload, qos, retain, passed_on, expiry_s, self.now_s)
        filters = [s.pattern for session in self.sessions.values() for s in session.subscriptions.values()]
        if self.prompt:
            self._distribute(message)
        else:
            self.unannounced.append(message)
        return any(matches(pattern, topic) for pattern in filters)

    def announced(self, publisher: bytes, topic: bytes, payload: bytes) -> None:
        """Of one publisher and topic, what was taken first is announced first."""
        found = [message for message in self.unannounced if (message.publisher, message.topic) == (publisher, topic)]
        assert found and found[0].payload == payload, f"announced: {payload!r}, expected one of {found[:1]}"
        self.unannounced = [message for message in self.unannounced if message is not found[0]]
        self._distribute(found[0])

    def _distribute(self, message: Message) -> None:
        topic, qos = message.topic, message.qos
        message = replace(message, number=len(self.log))
        self.log.append(message)
        if message.retain:
            self._retain(message)
        for session in self.sessions.values():
            found = [s for s in session.subscriptions.values() if matches(s.pattern, topic)]
            plain = [s for s in found if s.kind == "plain"]
            form = self._form(session, plain, message)
            if form is not None and (form.qos or session.link is not None):
                session.owed.append(Owed(message, [form], MAIN))
            elif form is None and plain:
                # Not wanted, being the client's own; that may change while it waits behind others (`_reconsider`).
                session.owed.append(Owed(message, [], MAIN, certain=False))
            for subscription in found:
                if subscription.kind == "replay":
                    self._replay(session, subscription, message)
        for group in self.groups.values():
            if matches(group.stream[2], topic) and (qos or self._attended(group)):
                certain = self._attended(group) or self._waits(group)
                group.owed.append(Owed(message, [], group.stream, certain=certain))

    def _retain(self, message: Message) -> None:
        if message.payload:
            self.retained[message.topic] = message
        else:
            self.retained.pop(message.topic, None)  # [MQTT-3.3.1-6]
        for session in self.sessions.values():
            for owed in session.owed:
                if owed.stream[0] == "retained" and owed.message.topic == message.topic:
                    owed.certain = False  # no longer what is retained

    def _form(self, session: Session, subscriptions: list[Subscription], message: Message) -> Form | None:
        """One copy for all subscriptions that overlap: the highest QoS [MQTT-3.3.4-2], all identifiers
        [MQTT-3.3.4-3], [MQTT-3.3.4-4]; none for a client's own message where it does not want it [MQTT-3.8.3-3]."""
        wanting = [s for s in subscriptions if not (s.no_local and message.publisher == session.client_id)]
        if not wanting:
            return None
        return Form(
            min(message.qos, max(s.qos for s in wanting)),
            message.retain and any(s.retain_as_published for s in wanting),
            tuple(sorted(s.identifier for s in wanting if s.identifier)),
        )

    def _replay(self, session: Session, subscription: Subscription, message: Message) -> None:
        form = self._form(session, [subscription], message)
        if form is not None:
            session.owed.append(Owed(message, [form], subscription.stream))

    # ── acknowledgements ──

    def _puback(self, link: Link, packet: Puback) -> None:
        assert link.session is not None
        flight = link.session.flights.get(packet.packet_id)
        if flight is None:
            return
        if flight.form.qos != 1:
            raise ProtocolViolation("PUBACK for a QoS 2 message")
        del link.session.flights[packet.packet_id]

    def _pubrec(self, link: Link, packet: Pubrec) -> None:
        assert link.session is not None
        flight = link.session.flights.get(packet.packet_id)
        if flight is None:
            if packet.reason < 0x80:
                link.answer(Pubrel, Answer(packet.packet_id, (0x92 if link.v5 else 0,), nothing_stored=True))
            return
        if flight.form.qos != 2:
            raise ProtocolViolation("PUBREC for a QoS 1 message")
        if packet.reason >= 0x80:
            del link.session.flights[packet.packet_id]  # [MQTT-4.3.3-4]
            return
        flight.released = True
        self._answer(link, Pubrel, packet.packet_id, 0)

    def _pubrel(self, link: Link, packet: Pubrel) -> None:
        assert link.session is not None
        known = packet.packet_id in link.session.inbound
        link.session.inbound.discard(packet.packet_id)
        self._answer(link, Pubcomp, packet.packet_id, 0 if known or not link.v5 else 0x92)

    def _pubcomp(self, link: Link, packet: Pubcomp) -> None:
        assert link.session is not None
        flight = link.session.flights.get(packet.packet_id)
        if flight is None:
            return
        if not flight.released:
            raise ProtocolViolation("PUBCOMP before PUBREC")
        del link.session.flights[packet.packet_id]
        link.releases.discard(packet.packet_id)

    # ── subscriptions ──

    def _subscribe(self, link: Link, packet: Subscribe) -> None:
        session = link.session
        assert session is not None
        identifier = packet.properties.subscription_ids[0] if packet.properties.subscription_ids else 0
        start = next((value for name, value in packet.properties.user if name == b"tidegate-from"), b"")
        if "malformed filters are answered" not in self.forgiven:
            for request in packet.filters:
                if self._is_malformed(request.filter):
                    self._fault(link, 0x81, 0x82)
                    return
        codes = tuple([self._subscribe_one(session, request, identifier, start) for request in packet.filters])
        if not link.v5:
            codes = tuple(min(code, 0x80) for code in codes)
        link.answer(Suback, Answer(packet.packet_id, codes))

    def _is_malformed(self, filter: bytes) -> bool:
        if filter.startswith(b"$share/"):
            _, group, pattern = (*filter.split(b"/", 2), b"")[:3]
            return not group or b"+" in group or b"#" in group or not pattern or malformed(pattern)  # [MQTT-4.8.2-2]
        if filter.startswith(b"$replay/"):
            return False
        return malformed(filter)

    def _subscribe_one(self, session: Session, request: FilterRequest, identifier: int, start: bytes) -> int:
        """The SUBACK's code for one filter."""
        filter = request.filter
        kind, group, pattern = "plain", b"", filter
        if filter.startswith(b"$share/"):
            _, group, pattern = (*filter.split(b"/", 2), b"")[:3]
            kind = "shared"
        elif filter.startswith(b"$replay/"):
            _, start, pattern = (*filter.split(b"/", 2), b"")[:3]
            kind = "replay"
        elif start:
            kind = "replay"
        if self._is_malformed(filter) or not pattern or malformed(pattern) or self._too_deep(pattern):
            return 0x8F
        if pattern.startswith(b"$") and pattern.split(b"/")[0] != b"$SYS":
            return 0x8F
        if kind == "replay" and start != b"earliest" and not re.fullmatch(rb"@?[0-9]+", start):
            return 0x8F
        before = session.subscriptions.get(filter)
        here = len(self.log)
        since = before.since if before is not None and before.kind == kind == "plain" else here
        replay = ("replay", filter, here, next(self._names))
        stream = MAIN if kind == "plain" else ("group", group, pattern) if kind == "shared" else replay
        subscription = Subscription(
            filter,
            kind,
            group,
            pattern,
            request.qos,
            request.no_local,
            request.retain_as_published,
            identifier,
            since,
            stream,
        )
        if before is not None and before.kind == "shared" != kind:
            self._leaves_group(session, before, here=True)
        session.subscriptions[filter] = subscription  # replaced, if there was one [MQTT-3.8.4-3]
        for owed in session.owed:
            if owed.stream[:2] in (("replay", filter), ("retained", filter)):
                owed.certain = False  # begun anew
        self._reconsider(session)
        if kind == "replay":
            for message in self.log:
                if matches(pattern, message.topic):
                    self._replay(session, subscription, message)
        elif kind == "shared":
            found = self.groups.setdefault((group, pattern), Group(group, pattern))
            found.members.setdefault(session.client_id, []).append(subscription)
            if "a member that subscribes again loses QoS 0" in self.forgiven:
                for own in [group for group in self.groups.values() if session.client_id in group.members]:
                    for owed in own.owed:
                        owed.certain = owed.certain and owed.message.qos > 0
        elif request.retain_handling == 0 or (request.retain_handling == 1 and before is None):
            self._owe_retained(session, subscription)  # [MQTT-3.3.1-9], [MQTT-3.3.1-10]
        return request.qos

    def _owe_retained(self, session: Session, subscription: Subscription) -> None:
        for message in self.retained.values():
            if matches(subscription.pattern, message.topic) and not message.expires(self.now_s):
                ids = (subscription.identifier,) if subscription.identifier else ()
                form = Form(min(message.qos, subscription.qos), True, ids)  # [MQTT-3.3.1-8]
                # Whether no-local holds for what one has retained oneself, the standard does not say.
                open_ = subscription.no_local and message.publisher == session.client_id
                stream = ("retained", subscription.filter, next(self._names))
                session.owed.append(Owed(message, [form], stream, certain=not open_))

    def _unsubscribe(self, link: Link, packet: Unsubscribe) -> None:
        session = link.session
        assert session is not None
        codes = []
        for filter in packet.filters:
            gone = session.subscriptions.pop(filter, None)
            codes.append(0 if gone is not None else 0x11)
            if gone is not None and gone.kind == "shared":
                self._leaves_group(session, gone, here=True)
            for owed in session.owed:
                if owed.stream[:2] in (("replay", filter), ("retained", filter)):
                    owed.certain, owed.revoked = False, True
        self._reconsider(session)
        link.answer(Unsuback, Answer(packet.packet_id, tuple(codes) if link.v5 else ()))

    def _reconsider(self, session: Session) -> None:
        """Subscriptions have changed: what still waits may come as it was owed, or as it would be now."""
        plain = [s for s in session.subscriptions.values() if s.kind == "plain"]
        for owed in session.owed:
            if owed.stream == MAIN:
                about = owed.message
                now = [s for s in plain if s.since <= about.number and matches(s.pattern, about.topic)]
                form = self._form(session, now, about)
                if form is None:
                    owed.certain = False  # may still come: it was buffered (section 3.10.4)
                elif form not in owed.forms:
                    owed.forms.append(form)
                    if not form.qos and session.link is not None and about.number < session.link.began:
                        owed.certain = False  # QoS 0 now, and from when the client was not there

    # ── shared groups ──

    def _attended(self, group: Group) -> bool:
        return any(self.sessions[name].link is not None for name in group.members)

    def _waits(self, group: Group) -> bool:
        """Whether anything is kept for it while nobody is there: not if all its members take QoS 0 only."""
        return any(options[-1].qos for options in group.members.values())

    def _unattended(self, group: Group) -> None:
        group.owed = [owed for owed in group.owed if owed.message.qos]
        for owed in group.owed:
            owed.certain = owed.certain and self._waits(group)

    def member_forms(self, group: Group, session: Session, message: Message) -> Iterator[Form]:
        for subscription in reversed(group.members.get(session.client_id, [])):
            form = self._form(session, [replace(subscription, no_local=False)], message)
            assert form is not None
            yield form

    def _open_for_others(self, group: Group, session: Session) -> None:
        """Of what a member that goes may have been given unseen, QoS 0 is lost and QoS 2 stays with it; QoS 1 goes
        to others."""
        for owed in group.owed:
            owed.tried = True
            if any(form.qos != 1 for form in self.member_forms(group, session, owed.message)):
                owed.certain = False

    def _absent_from(self, group: Group, session: Session) -> None:
        """A member is away: what it has not acknowledged with QoS 1 goes to others."""
        self._open_for_others(group, session)
        for packet_id, flight in list(session.flights.items()):
            if flight.owed.stream == group.stream and flight.form.qos == 1:
                if not flight.handed_on:
                    group.owed.append(replace(flight.owed, forms=[], certain=True, tried=True))
                del session.flights[packet_id]
        if not self._attended(group):
            self._unattended(group)

    def _leaves_group(self, session: Session, subscription: Subscription, here: bool) -> None:
        """It unsubscribed, or its session ended; the last one takes the group with it."""
        key = (subscription.group, subscription.pattern)
        group = self.groups[key]
        self._open_for_others(group, session)
        for owed in group.owed if here else ():
            forms = list(self.member_forms(group, session, owed.message))
            session.owed.append(replace(owed, forms=forms, certain=False, stream=("handed on",)))
        for flight in session.flights.values():
            if flight.owed.stream == group.stream and flight.form.qos == 1 and not flight.handed_on:
                flight.handed_on = True
                group.owed.append(replace(flight.owed, forms=[], certain=True, tried=True))
        del group.members[session.client_id]
        if not group.members:
            del self.groups[key]
        elif not self._attended(group):
            self._unattended(group)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


# ── how large a message may be on a link: aliases, and what a replay adds, leave some room ──


def smallest(link: Link, owed: Owed, form: Form) -> int:
    message = owed.message
    topic = min(len(message.topic), 3) if link.aliases_out_max else len(message.topic)
    return 2 + 2 + topic + 2 * bool(form.qos) + link.v5 * (1 + _properties_bytes(message, form)) + len(message.payload)


def largest(link: Link, owed: Owed, form: Form) -> int:
    message = owed.message
    added = 3 * bool(link.aliases_out_max) + (100 if owed.stream[0] == "replay" else 0)
    properties = link.v5 * (4 + _properties_bytes(message, form) + added)
    return 5 + 2 + len(message.topic) + 2 + properties + len(message.payload)


def _properties_bytes(message: Message, form: Form) -> int:
    about = replace(message.properties, message_expiry=message.expiry_s, subscription_ids=form.ids)
    return len(encode_property_block(about, 3))
