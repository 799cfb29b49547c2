"""What clients may expect of the broker, told from their side alone.

An `Actor` is a client that keeps to the standard, with its memory across connections; a `Model` has several of them
around one simulated broker and knows what is owed to whom. It raises at the first thing that must not be:

- an acknowledgement for a message that a crash could still take (I1)
- a second delivery with QoS 2 (I4), or with QoS 0
- a message out of its publisher's order (I3)
- more unacknowledged messages than the client takes, or a packet id that is still in use
- a message nobody asked for, or one that two members of a shared group got without need
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulated import SimulatedBroker, SimulatedClient

from tidegate.router import matches
from tidegate.wire import (
    Connack,
    Disconnect,
    FilterRequest,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)

GROUP = b"$share/g/"


@dataclass
class Message:
    number: int
    publisher: str
    topic: bytes
    qos: int
    disruptions: int = 0  # of the group, when it was sent
    sent: list[int] = field(default_factory=list)  # the steps in which it was sent, more than once if repeated
    acknowledged: bool = False


@dataclass
class Interest:
    """One filter of a client over time."""

    qos: int
    since: int
    until: int | None = None
    certain: bool = False  # the SUBACK has come
    changed: int = 0  # when it got another QoS


@dataclass
class Outgoing:
    message: Message
    released: bool = False


class Actor:
    def __init__(self, name: str, version: int, persistent: bool, window: int, worker: bool = False) -> None:
        self.name, self.version, self.persistent, self.window = name, version, persistent, window
        self.worker = worker  # has shared subscriptions only
        self.client: SimulatedClient | None = None
        self.greeted = False
        # What a client remembers from connection to connection.
        self.incoming: dict[int, bytes] = {}  # QoS 2 messages that have not been released
        self.releasing: dict[int, bytes] = {}  # … and those that were, before their last answer
        self.outgoing: dict[int, Outgoing] = {}
        self.late: dict[int, bytes] = {}  # messages of the connection before that it has not acknowledged
        # What belongs to this connection.
        self.wire: dict[int, bytes] = {}
        self.owed: list[Packet] = []
        self.crossed: set[int] = set()  # what it acknowledged late may be on its way again already
        self.asked: dict[int, tuple[str, bytes]] = {}
        # What it has seen.
        self.interests: dict[bytes, list[Interest]] = {}
        self.delivered: dict[int, list[int]] = {}  # number → the QoS of each delivery
        self.newest: dict[tuple[str, bytes, int | None], int] = {}

    @property
    def connected(self) -> bool:
        return self.client is not None

    def free_id(self) -> int:
        return next(i for i in range(1, 65536) if i not in self.outgoing and i not in self.asked)


class Model:
    def __init__(self, simulated: SimulatedBroker, actors: list[Actor]) -> None:
        self.simulated = simulated
        self.actors = {actor.name: actor for actor in actors}
        self.step = 0
        self.stored_step = 0  # everything up to this step is safe
        self.crash_step = 0
        self.messages: list[Message] = []
        self.candidates: set[tuple[str, int]] = set()  # (subscriber, message); owed once it is acknowledged
        self.group_candidates: set[int] = set()
        self.disruptions = 0  # of the group: a member left, or the broker crashed

    # ── what is owed ──

    def owed_to_sessions(self) -> set[tuple[str, int]]:
        return {(name, n) for name, n in self.candidates if self.messages[n].acknowledged}

    def owed_to_group(self) -> set[int]:
        return {n for n in self.group_candidates if self.messages[n].acknowledged}

    def members(self) -> list[Actor]:
        return [a for a in self.actors.values() if a.worker and any(_open(i) for i in a.interests.values())]

    def _forgive(self, actor: Actor, pattern: bytes | None = None) -> None:
        """The broker owes the client nothing any more, of one filter or at all."""
        for owed in [o for o in self.candidates if o[0] == actor.name]:
            if pattern is None or matches(pattern, self.messages[owed[1]].topic):
                self.candidates.discard(owed)

    def _member_left(self, session_ended: bool) -> None:
        self.disruptions += 1
        if not any(_certain(i) for a in self.members() for i in a.interests.values()):
            self.group_candidates.clear()
        elif session_ended:
            # QoS 2 messages that it had begun end with its session [MQTT-4.8.2-5].
            self.group_candidates = {n for n in self.group_candidates if self.messages[n].qos < 2}

    # ── connections ──

    def connect(self, actor: Actor) -> None:
        if actor.connected:
            self._lost(actor)
        client = SimulatedClient(self.simulated, actor.version)
        actor.client, actor.greeted = client, False
        asked: dict[str, int] = {}
        if actor.version == 5:
            asked = {"receive_maximum": actor.window}
            if actor.persistent:
                asked["session_expiry"] = 1000
        client.connect(actor.name, clean=not actor.persistent, **asked)

    def drop(self, actor: Actor) -> None:
        assert actor.client is not None
        actor.client.drop()
        self._lost(actor)

    def disconnect(self, actor: Actor) -> None:
        assert actor.client is not None
        actor.client.send(Disconnect())
        self._lost(actor)

    def _lost(self, actor: Actor) -> None:
        actor.client = None
        actor.late = {pid: payload for pid, payload in actor.wire.items() if pid not in actor.releasing}
        actor.wire, actor.owed, actor.asked, actor.crossed = {}, [], {}, set()
        if not actor.persistent:
            self._ended(actor)
        if actor.worker:
            self._member_left(not actor.persistent)

    def _ended(self, actor: Actor) -> None:
        """The session is over, as far as the client can tell."""
        for history in actor.interests.values():
            if _open(history):
                history[-1].until = self.step
        self._forgive(actor)
        actor.late = {}

    def crash(self, kept: int) -> None:
        for actor in self.actors.values():
            if actor.client is not None:
                self._lost(actor)
            actor.late = {}
            for history in actor.interests.values():
                last = history[-1]
                if not last.certain:
                    last.until = last.until  # may or may not be there: never owed, never forbidden
                if last.until is not None and last.until > self.stored_step and actor.persistent:
                    last.until, last.certain = None, False  # its end may have been lost
        self.crash_step = self.step
        self.disruptions += 1
        if any(not a.persistent for a in self.actors.values() if a.worker):
            self._member_left(session_ended=True)
        self.simulated.crash(kept)
        safe = {int(run.payloads[i]) for _, run, i in self.simulated.log.messages()}
        lost = [m for m in self.messages if m.acknowledged and m.qos and m.number not in safe]
        assert not lost, f"acknowledged and lost in the crash: {lost}"

    # ── what clients do ──

    def subscribe(self, actor: Actor, pattern: bytes, qos: int) -> None:
        assert actor.client is not None
        pid = actor.free_id()
        actor.asked[pid] = ("subscribe", pattern)
        history = actor.interests.setdefault(pattern, [])
        if _open(history):
            if qos < history[-1].qos:
                self._forgive(actor, pattern)
            if qos != history[-1].qos:
                history[-1].certain &= qos < history[-1].qos
                history[-1].qos, history[-1].changed = qos, self.step
        else:
            history.append(Interest(qos, self.step))
        if actor.worker and not qos:
            self.group_candidates.clear()  # whatever goes to this member counts as done
        name = GROUP + pattern if actor.worker else pattern
        actor.client.send(Subscribe(pid, (FilterRequest(name, qos),)))

    def unsubscribe(self, actor: Actor, pattern: bytes) -> None:
        assert actor.client is not None
        pid = actor.free_id()
        actor.asked[pid] = ("unsubscribe", pattern)
        history = actor.interests.get(pattern, [])
        if _open(history):
            history[-1].until, history[-1].certain = self.step, False
        self._forgive(actor, pattern)
        if actor.worker:
            self._member_left(session_ended=False)
        actor.client.send(Unsubscribe(pid, (GROUP + pattern if actor.worker else pattern,)))

    def publish(self, actor: Actor, topic: bytes, qos: int, count: int) -> None:
        assert actor.client is not None
        packets: list[Packet] = []
        for _ in range(count):
            message = Message(len(self.messages), actor.name, topic, qos, self.disruptions)
            self.messages.append(message)
            pid = actor.free_id() if qos else 0
            if qos:
                actor.outgoing[pid] = Outgoing(message)
            packets.append(self._send(message, pid))
            for other in self.actors.values():
                history = [h for p, h in other.interests.items() if matches(p, topic) and _certain(h) and h[-1].qos]
                if not qos or not history:
                    continue
                if other.worker:
                    # A member whose last SUBSCRIBE may have been lost in a crash may have asked for QoS 0.
                    asked = [h for member in self.members() for h in member.interests.values() if _open(h)]
                    if all(h[-1].qos and h[-1].certain for h in asked):
                        self.group_candidates.add(message.number)
                elif other.persistent:
                    self.candidates.add((other.name, message.number))
        actor.client.send(*packets)

    def _send(self, message: Message, pid: int, dup: bool = False) -> Publish:
        message.sent.append(self.step)
        return Publish(message.topic, b"%d" % message.number, message.qos, dup=dup, packet_id=pid)

    def acknowledge(self, actor: Actor, place: int, count: int) -> None:
        """Send what the client owes, from a place on, in one piece."""
        assert actor.client is not None
        packets = [actor.owed.pop(place % len(actor.owed)) for _ in range(min(count, len(actor.owed)))]
        for packet in packets:
            assert isinstance(packet, Puback | Pubrec | Pubrel | Pubcomp)
            if isinstance(packet, Puback | Pubcomp):
                on_wire = actor.wire.pop(packet.packet_id, None)
                if isinstance(packet, Pubcomp):
                    on_wire = actor.releasing.pop(packet.packet_id, on_wire)
                self._finished(actor, on_wire)
        actor.client.send(*packets)

    def acknowledge_late(self, actor: Actor, place: int) -> None:
        """A message of the connection before, that has not come again yet."""
        assert actor.client is not None
        pid = sorted(actor.late)[place % len(actor.late)]
        payload = actor.late.pop(pid)
        if pid in actor.wire or pid in actor.releasing:
            return
        actor.crossed.add(pid)
        if pid in actor.incoming:
            actor.client.send(Pubrec(pid))
        else:
            self._finished(actor, payload)
            actor.client.send(Puback(pid))

    def _finished(self, actor: Actor, payload: bytes | None) -> None:
        if payload is None:
            return
        if actor.worker:
            self.group_candidates.discard(int(payload))
        else:
            self.candidates.discard((actor.name, int(payload)))

    # ── what clients see ──

    def look(self) -> None:
        for actor in self.actors.values():
            if actor.client is not None:
                for packet in actor.client.received():
                    self._see(actor, packet)
        if self.simulated.idle and self.simulated.log.stored == len(self.simulated.log.entries):
            self.stored_step = self.step

    def _see(self, actor: Actor, packet: Packet) -> None:
        match packet:
            case Connack():
                self._greeted(actor, packet)
            case Suback():
                _, pattern = actor.asked.pop(packet.packet_id)
                assert packet.reasons[0] < 0x80
                history = actor.interests[pattern]
                # Unless it answers an earlier request than the one that counts now.
                if _open(history) and ("subscribe", pattern) not in actor.asked.values():
                    history[-1].certain = True
            case Unsuback():
                actor.asked.pop(packet.packet_id)
            case Puback() | Pubrec():
                outgoing = actor.outgoing[packet.packet_id]
                self._promised(outgoing.message)
                if isinstance(packet, Pubrec):
                    outgoing.released = True
                    actor.owed.append(Pubrel(packet.packet_id))
                else:
                    del actor.outgoing[packet.packet_id]
            case Pubcomp():
                assert actor.outgoing.pop(packet.packet_id).released
            case Publish():
                self._received(actor, packet)
            case Pubrel():
                if packet.packet_id in actor.incoming:
                    actor.releasing[packet.packet_id] = actor.incoming.pop(packet.packet_id)
                actor.owed.append(Pubcomp(packet.packet_id))
            case _:
                raise AssertionError(f"{actor.name} got {packet}")

    def _greeted(self, actor: Actor, packet: Connack) -> None:
        assert packet.reason == 0
        assert actor.client is not None
        actor.greeted = True
        if not packet.session_present:
            kept = [p for p, h in actor.interests.items() if _certain(h)]
            assert not (actor.persistent and kept), f"{actor.name} lost its session with {kept}"
            self._ended(actor)
            actor.incoming, actor.outgoing, actor.releasing = {}, {}, {}
            return
        again: list[Packet] = []
        for pid, outgoing in actor.outgoing.items():
            if outgoing.released:
                again.append(Pubrel(pid))
            else:
                again.append(self._send(outgoing.message, pid, dup=True))
        if again:
            actor.client.send(*again)

    def _promised(self, message: Message) -> None:
        if not message.acknowledged:
            stored = {int(run.payloads[i]) for _, run, i in self.simulated.log.messages(safe=True)}
            assert message.number in stored, f"{message} was acknowledged before it was stored"
            message.acknowledged = True

    def _received(self, actor: Actor, packet: Publish) -> None:
        number = int(packet.payload)
        message = self.messages[number]
        assert (packet.topic, packet.retain) == (message.topic, False)
        assert packet.qos <= message.qos
        assert actor.greeted, "a message before the CONNACK"
        if packet.dup and packet.packet_id in actor.crossed:
            return
        if packet.qos:
            pid = packet.packet_id
            assert pid not in actor.wire, f"{actor.name} got packet id {pid} while it owes {actor.wire[pid]!r} for it"
            actor.wire[pid] = packet.payload
            assert len(actor.wire) <= actor.window, f"{actor.name} got {len(actor.wire)} of {actor.window} at a time"
            actor.owed.append((Puback if packet.qos == 1 else Pubrec)(pid))
            if packet.qos == 2:
                if pid in actor.incoming:
                    assert actor.incoming[pid] == packet.payload, f"packet id {pid} was not released yet"
                    return
                actor.incoming[pid] = packet.payload
        self._check_interest(actor, message)
        if actor.worker:
            self._check_group(actor, message, packet.qos)
        else:
            self._check_order(actor, message, packet.qos)
        before = actor.delivered.setdefault(number, [])
        assert packet.qos != 2 or 2 not in before, f"{actor.name} got {message} twice with QoS 2"
        assert message.qos or not before, f"{actor.name} got {message} twice"
        before.append(packet.qos)

    def _check_interest(self, actor: Actor, message: Message) -> None:
        for pattern, history in actor.interests.items():
            if matches(pattern, message.topic):
                for interest in history:
                    until = self.step if interest.until is None else interest.until
                    # On a log with partitions a message is there when it is announced, which may be later.
                    since = 0 if self.simulated.log.partitions > 1 else interest.since
                    if actor.worker or any(since <= step <= until for step in message.sent):
                        return
        raise AssertionError(f"{actor.name} never asked for {message}: {actor.interests}")

    def _check_order(self, actor: Actor, message: Message, qos: int) -> None:
        """First deliveries come in order. After a crash that holds for each QoS by itself, as in the standard
        [MQTT-4.6.0-6]: QoS 2 messages that were begun come first, then what has to be read again."""
        if message.number in actor.delivered or len(message.sent) > 1:
            return
        if any(h[-1].changed > message.sent[0] for p, h in actor.interests.items() if matches(p, message.topic)):
            return  # what was sent when it had another QoS, and not owed, may be owed again after a crash
        for of in (qos, None):
            key = message.publisher, message.topic, of
            newest = actor.newest.get(key, -1)
            if of is not None or message.sent[0] > self.crash_step:
                assert newest < message.number, f"{actor.name} got {message.number} after {newest} of {key}"
            actor.newest[key] = max(newest, message.number)

    def _check_group(self, actor: Actor, message: Message, qos: int) -> None:
        others = [a for a in self.actors.values() if a.worker and message.number in a.delivered]
        if message.qos == 2 and qos == 2:
            begun = [a.name for a in others if 2 in a.delivered[message.number]]
            assert not begun, f"{message} went to {begun[0]} and to {actor.name}"
        elif others and len(message.sent) == 1:
            went = f"{message} went to {others[0].name} and for no reason to {actor.name}"
            assert message.disruptions < self.disruptions, went
        if not qos:
            self.group_candidates.discard(message.number)  # this member answers nothing


def _open(history: list[Interest]) -> bool:
    return bool(history) and history[-1].until is None


def _certain(history: list[Interest]) -> bool:
    return _open(history) and history[-1].certain
