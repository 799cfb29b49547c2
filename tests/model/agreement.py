"""Whether the broker under test does what the reference broker does.

Both get the same bytes. Then whatever the broker writes is held against the reference: each packet must be one that the
reference has to send, and when everything has come to rest nothing may be missing.

What is open, here and nowhere else:
- packet ids towards clients: any that is not in use;
- when: messages wait for a window, answers wait for the log, and what a client sends after a packet that takes its
  time waits for that; everything is there when the broker rests;
- the order between different publishers or topics, and between what a session gets as subscriber, as replay, as
  retained message and as member of a shared group; likewise between answers of different kinds, and between SUBACKs;
- when a PUBREL comes that answers a PUBREC for nothing;
- which member of a shared group gets a message, and DUP on what may have been on its way to another one;
- what still waits when a subscription changes: it may come as it was owed, as it would be now, or, after an
  unsubscription, not at all (section 3.10.4);
- what is sent again may have the retain flag and the identifiers of the subscriptions that there are now;
- answers that were due when a connection ended: a part of them from the beginning may have been given, or none;
- reason strings, and saying in a CONNACK what holds by default;
- topic aliases towards clients, within what they allow;
- `tidegate-time` and `tidegate-position` on what a replay gets as it happens.

On a log with partitions nothing more is open. Messages of one topic are of one partition, so what has an order keeps
it; and a message is published when its partition announces it, which the driver tells (`announced`) and the reference
waits for: what a subscription covers, what is retained, who was there for QoS 0 and where a replay begins to be live
are then as exact as with one. What the publisher is told does not wait for that: whether there are subscribers is
known when the message comes, and an answer when all of it is stored. Of one publisher and topic, messages must be
announced as they came.

What is not compared there: refusals and crashes, of which the reference knows nothing (`tests/contract` has them), and
replays that begin at a position or a time, which are scenes in `tests/contract/test_broker_on_partitions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from driver import SystemUnderTest, Written
from reference import Answer, Form, Link, Message, Owed, Reference, Session, largest, matches, smallest

from tidegate.wire import (
    NO_PROPERTIES,
    Connack,
    Disconnect,
    Packet,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Unsuback,
    connack_code_v3,
    reason_of_connack_v3,
)

REPLAYED = (b"tidegate-time", b"tidegate-position")


class Client:
    """One connection at both brokers, and what its client knows."""

    def __init__(self, name: str, at_broker: Any) -> None:
        self.name = name
        self.at_broker = at_broker
        self.link = Link()
        self.greeted = False
        self.finished = False  # the DISCONNECT has come
        self.gone = False  # the client itself broke the connection, and hears nothing more
        self.aliases: dict[int, bytes] = {}
        self.to_acknowledge: list[Packet] = []  # what the client owes for what it got, in that order
        self.transcript: list[Packet] = []  # all it got, aliases resolved
        self.fed = bytearray()  # all it has sent
        self.read = 0  # … of which so much has been read


class Agreement:
    def __init__(self, sut: SystemUnderTest, reference: Reference, *, began_ms: int = 1_000_000) -> None:
        self.sut = sut
        self.reference = reference
        self.began_ms = began_ms  # the broker's wall clock when the reference's is 0
        self.clients: list[Client] = []

    # ── what happens to both ──

    def connect(self, name: str) -> Client:
        client = Client(name, self.sut.connect())
        self.clients.append(client)
        return client

    def feed(self, client: Client, data: bytes) -> None:
        self.sut.feed(client.at_broker, data)
        client.fed += data
        self.look(client)

    def lost(self, client: Client) -> None:
        self.sut.lost(client.at_broker)
        self.reference.lost(client.link)
        client.gone = True
        self.look()

    def tick(self) -> None:
        self.sut.tick()
        self.look()

    def store(self) -> None:
        self.sut.store()
        self.look()

    def announce(self, partition: int) -> None:
        self.sut.announce(partition)
        self.look()

    def settle(self) -> None:
        for _ in self.sut.settle():
            self.look()
        for client in self.clients:
            self._nothing_is_missing(client)
        for group in self.reference.groups.values():
            self._nothing_waits_in_vain(group)
        self.clients = [client for client in self.clients if not client.link.closed]

    def advance(self, seconds: float) -> None:
        """Time stands still while anything is under way, so that both know when it happened."""
        self.settle()
        self.sut.advance(seconds)
        self.reference.advance(seconds)
        self.look()

    def look(self, fed: Client | None = None) -> None:
        """What the broker has written since the last look must be what it may write. `fed` has just been: what others
        had to wait with comes after that."""
        for told in self.sut.announced():  # before anything that was read since, for that is when it happens
            self.reference.announced(told.publisher, told.topic, told.payload)
        for client in sorted(self.clients, key=lambda client: client is not fed):
            read = len(client.fed) - self.sut.unread(client.at_broker)
            if read > client.read:
                self.reference.receive(client.link, bytes(client.fed[client.read : read]))
                client.read = read
        for client in self.clients:
            for written in self.sut.written(client.at_broker, client.link.version):
                try:
                    self._see(client, written)
                except AssertionError as error:
                    raise AssertionError(f"{client.name}: {error}\n  in {written.packet}") from None
            if self.sut.closed(client.at_broker):
                assert client.link.closed, f"{client.name}: closed for no reason"

    # ── packet by packet ──

    def _see(self, client: Client, written: Written) -> None:
        packet, link = written.packet, client.link
        overlooked = self.reference.forgiven
        minimal = written.minimal or "remaining lengths are handed on" in overlooked
        assert minimal, "a remaining length in too many bytes"  # [MQTT-1.5.5-1]
        assert not link.packet_max or written.size <= link.packet_max, "larger than the client takes"  # [MQTT-3.1.2-24]
        if client.finished and isinstance(packet, Publish) and "messages follow the DISCONNECT" in overlooked:
            return
        assert not client.finished, "something after the DISCONNECT"  # [MQTT-3.14.4-1]
        assert client.greeted or isinstance(packet, Connack), "something before the CONNACK"
        match packet:
            case Connack():
                self._connack(client, packet)
            case Publish():
                packet = self._resolved(client, packet)
                if not link.closed:  # else nobody is going to acknowledge it
                    self._publish(client, packet)
            case Disconnect():
                assert packet.reason in link.farewell, f"expected one of {link.farewell} as the last word"
                client.finished = True
            case Pingresp():
                assert link.answers.get(Pingresp), "nobody asked"
                link.answers[Pingresp].pop(0)
            case Pubrel() if packet.packet_id in link.releases:
                link.releases.discard(packet.packet_id)
                client.to_acknowledge.append(Pubcomp(packet.packet_id))
            case Puback() | Pubrec() | Pubrel() | Pubcomp() | Suback() | Unsuback():
                self._answer(client, packet)
            case _:
                raise AssertionError("not a packet that a server sends")
        client.transcript.append(packet)

    def _connack(self, client: Client, packet: Connack) -> None:
        expected = client.link.answers.get(Connack)
        assert expected, "no CONNACK was due"
        want: Connack = expected.pop(0)
        told = replace(
            packet.properties,
            reason_string=None,
            assigned_client_id=packet.properties.assigned_client_id and b"?",
            retain_available=packet.properties.retain_available is False or None,
            wildcard_available=packet.properties.wildcard_available is False or None,
            subscription_ids_available=packet.properties.subscription_ids_available is False or None,
            shared_available=packet.properties.shared_available is False or None,
        )
        reason = want.reason if client.link.v5 else reason_of_connack_v3(connack_code_v3(want.reason))
        assert (packet.session_present, packet.reason, told) == (want.session_present, reason, want.properties), (
            f"expected {want}"
        )
        client.greeted = True

    def _answer(self, client: Client, packet: Any) -> None:
        link, kind = client.link, type(packet)
        waiting = link.answers.get(kind, [])
        assert waiting, "not due"
        codes = packet.reasons if kind in (Suback, Unsuback) else (packet.reason,)
        place = 0
        if kind in (Suback, Unsuback):
            place = next((i for i, a in enumerate(waiting) if a.packet_id == packet.packet_id), 0)
        elif kind is Pubrel or "refusals overtake acknowledgements" in self.reference.forgiven:
            early = [i for i, a in enumerate(waiting) if a.nothing_stored and _is(a, packet.packet_id, codes)]
            place = early[0] if early and not _is(waiting[0], packet.packet_id, codes) else 0
        want: Answer = waiting.pop(place)
        assert _is(want, packet.packet_id, codes), f"expected {want}"
        finished = kind in (Puback, Pubcomp) or (kind is Pubrec and codes[0] >= 0x80)
        entry = (Puback if kind is Puback else Pubcomp, packet.packet_id)
        if finished and entry in link.unfinished:
            link.unfinished.remove(entry)
        if kind is Pubrec and codes[0] < 0x80:
            client.to_acknowledge.append(Pubrel(packet.packet_id))
        elif kind is Pubrel:
            client.to_acknowledge.append(Pubcomp(packet.packet_id))
        elif kind is Unsuback and link.session and "retained come after the UNSUBACK" not in self.reference.forgiven:
            link.session.owed = [owed for owed in link.session.owed if not owed.revoked]  # [MQTT-3.10.4-2]

    # ── messages ──

    def _resolved(self, client: Client, packet: Publish) -> Publish:
        alias = packet.properties.topic_alias
        if alias is None:
            return packet
        assert alias <= client.link.aliases_out_max, "a topic alias above the client's maximum"  # [MQTT-3.1.2-26]
        if packet.topic:
            client.aliases[alias] = packet.topic
        assert alias in client.aliases, "a topic alias that was never set"
        return replace(packet, topic=client.aliases[alias], properties=replace(packet.properties, topic_alias=None))

    def _publish(self, client: Client, packet: Publish) -> None:
        link, session = client.link, client.link.session
        assert session is not None
        assert bool(packet.packet_id) == bool(packet.qos)
        flight = session.flights.get(packet.packet_id)
        if flight is not None:
            self._again(link, session, packet)
        else:
            owed, form, streams = self._find(link, session, packet)
            assert owed.tried or not packet.dup, "DUP on a message that was not sent before"  # [MQTT-3.3.1-3]
            # What was given to another member before need not be in order (I3).
            exempt = any(s[0] == "handed on" or (s[0] == "group" and owed.tried) for s in streams)
            session.order.came(owed, streams, exempt=exempt)
            self.reference.sent(session, owed, form, packet.packet_id)
        if packet.qos:
            here = sum(flight.here for flight in session.flights.values())
            assert here <= link.window, f"{here} on their way to a client that takes {link.window}"  # [MQTT-3.3.4-9]
            client.to_acknowledge.append((Puback if packet.qos == 1 else Pubrec)(packet.packet_id))

    def _again(self, link: Link, session: Session, packet: Publish) -> None:
        """Sent on an earlier connection and not acknowledged: the same with the same id, in the same order
        [MQTT-4.4.0-1], [MQTT-4.6.0-1]."""
        flight = session.flights[packet.packet_id]
        assert not flight.here and not flight.released, f"packet id {packet.packet_id} is in use"
        assert packet.dup, "sent again without DUP"  # [MQTT-3.3.1-1]
        flight.owed.tried = True
        forms = [form for form in self._forms_again(session, flight.owed, flight.form) if form.qos == flight.form.qos]
        same = any(self._is_it(link, packet, flight.owed, form) for form in forms)
        assert same, f"expected {flight.owed.message} again, in one of {forms}"
        sent_before = list(session.flights).index(packet.packet_id)
        for other in list(session.flights.values())[sent_before + 1 :]:
            assert not other.again, "sent again in another order"
        flight.here = flight.again = True

    def _forms_again(self, session: Session, owed: Owed, *more: Form) -> list[Form]:
        """With the QoS that it had, and with flag and identifiers as they were or as they would be now."""
        forms, about = [*owed.forms, *more], owed.message
        group = self.reference.groups.get(owed.stream[1:]) if owed.stream[0] == "group" else None
        there = {s.stream for s in session.subscriptions.values()}
        if group is not None:
            now = group.members.get(session.client_id, [])[-1:]
        elif all(s[0] == "replay" and s in there for s in session.order.streams.get(about.number, {owed.stream})):
            now = []  # its own subscription: another would have begun anew
        else:
            now = [s for s in session.subscriptions.values() if s.kind == "plain" and matches(s.pattern, about.topic)]
        flags = {form.retain for form in forms} | {False, about.retain and any(s.retain_as_published for s in now)}
        identifiers = {form.ids for form in forms} | {(), tuple(sorted(s.identifier for s in now if s.identifier))}
        levels = {form.qos for form in forms}
        return [Form(qos, flag, ids) for qos in levels for flag in flags for ids in identifiers]

    def _find(self, link: Link, session: Session, packet: Publish) -> tuple[Owed, Form, set[tuple[Any, ...]]]:
        """The message that this is, and whose it may be. Where several streams bring the same: rather one in order,
        rather the next of its stream, rather one that has to come than one that may."""
        offers = list(self._offers(session, packet.dup))
        found: list[tuple[tuple[Any, ...], Owed, Form]] = []
        for owed, form in offers:
            fits = not link.packet_max or smallest(link, owed, form) <= link.packet_max
            if fits and self._is_it(link, packet, owed, form):
                number = owed.message.number
                late = session.order.late(owed)
                before = [o.certain for o, _ in offers if o.stream == owed.stream and o.message.number < number]
                found.append(((late, sum(before), not owed.certain, len(before), number), owed, form))
        nearly = [owed for owed, _ in offers if owed.message.payload == packet.payload]
        assert found, f"not owed; expected {nearly or [owed for owed, _ in offers][:5]}"
        _, owed, form = min(found, key=lambda entry: entry[0])
        same = {other.stream for _, other, _ in found if other.message is owed.message}
        return owed, form, same

    def _offers(self, session: Session, dup: bool) -> Iterator[tuple[Owed, Form]]:
        for owed in session.owed:
            for form in self._forms_again(session, owed) if dup and owed.tried else owed.forms:
                yield owed, form
        for group in self.reference.groups.values():
            for owed in group.owed:
                for form in self.reference.member_forms(group, session, owed.message):
                    yield owed, form

    def _is_it(self, link: Link, packet: Publish, owed: Owed, form: Form) -> bool:
        about = owed.message
        if (packet.topic, packet.payload) != (about.topic, about.payload):
            return False
        if (packet.qos, packet.retain) != (form.qos, form.retain):
            return False
        if about.expires(self.reference.now_s) and not owed.tried:
            return False
        if not link.v5:
            return packet.properties == NO_PROPERTIES
        told = packet.properties
        user = told.user
        if owed.stream[0] == "replay" and [name for name, _ in user[-2:]] == list(REPLAYED):
            if user[-2][1] != self._stamp(about):
                return False
            told = replace(told, user=user[:-2])
        elif owed.stream[0] == "replay" and about.number < owed.stream[2]:
            return False  # from before the subscription: it says when
        left_s = None
        if about.expiry_s is not None:
            left_s = max(0, about.expiry_s - int(self.reference.now_s - about.at_s + 1e-6))  # [MQTT-3.3.2-6]
        want = replace(about.properties, message_expiry=left_s, subscription_ids=form.ids)
        return replace(told, subscription_ids=tuple(sorted(told.subscription_ids))) == want

    def _stamp(self, message: Message) -> bytes:
        at = datetime.fromtimestamp(int(self.began_ms + message.at_s * 1000) / 1000, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()

    # ── when everything has come to rest ──

    def _nothing_is_missing(self, client: Client) -> None:
        link, session = client.link, client.link.session
        if client.gone:
            return
        if link.closed:
            assert self.sut.closed(client.at_broker), f"{client.name}: should have been closed"
            told = client.finished or not client.greeted or not link.farewell or 0 < link.packet_max < 4
            assert told, f"{client.name}: never got its DISCONNECT with {link.farewell}"
            refusal = link.answers.get(Connack)
            assert link.greeted or not refusal, f"{client.name}: never got {refusal}"
            return
        missing = {kind.__name__: waiting for kind, waiting in link.answers.items() if waiting}
        assert not missing, f"{client.name}: never got {missing}"
        assert not link.releases, f"{client.name}: never got the PUBREL for {link.releases}"
        if session is None:
            return
        room = link.window - sum(flight.here or flight.released for flight in session.flights.values())
        for packet_id, flight in list(session.flights.items()):
            if not flight.here and not flight.released:
                if 0 < link.packet_max < largest(link, flight.owed, flight.form):
                    del session.flights[packet_id]  # the client takes less now, and will not get it
                else:
                    assert room <= 0, f"{client.name}: never got {flight} again"
        for owed in session.owed:
            if any(0 < link.packet_max < largest(link, owed, form) for form in owed.forms):
                owed.certain = False
        session.owed = [owed for owed in session.owed if not owed.message.expires(self.reference.now_s) or owed.tried]
        overdue = [o for o in session.owed if o.certain and not o.message.may_expire(self.reference.now_s)]
        if room > 0:
            assert not overdue, f"{client.name}: never got {overdue}"
            session.owed = []  # what did not have to come has had its chance

    def _nothing_waits_in_vain(self, group: Any) -> None:
        overdue = [o for o in group.owed if o.certain and not o.message.may_expire(self.reference.now_s)]
        for name, options in group.members.items():
            session = self.reference.sessions[name]
            link = session.link
            if link is None:
                continue
            room = link.window - sum(flight.here or flight.released for flight in session.flights.values())
            assert not overdue or not (room > 0 or options[-1].qos == 0), f"{name!r} has room, but never got {overdue}"


def _is(answer: Answer, packet_id: int, codes: tuple[int, ...]) -> bool:
    return answer.packet_id == packet_id and (codes == answer.codes or codes == (answer.or_codes or answer.codes))

