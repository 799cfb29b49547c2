"""The clients of the torture test: they follow the protocol to the letter and write down what they were told.

They live in processes of their own, so what they remember outlives every broker. A publisher notes each message that
was acknowledged; a subscriber notes each message that it would have handed to its application. Both keep their half of
the QoS state over broken connections: the same packet ids, DUP, PUBREL for what was received, each id at most once.

    python torture_clients.py publishers|subscribers --port P --seed N --journal FILE

Commands come as lines on standard input, answers go to standard output. `torture.py` drives it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tidegate.router import matches
from tidegate.wire import (
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    PacketStream,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    decode,
    encode,
)

RETRY_S = 0.02
SESSION_EXPIRY_S = 86_400
WINDOW = 40
DRAIN_S = 60.0
STALLED_S = 20.0  # nothing new for so long, and a reader will never get what it still waits for
HESITATION = 0.03
GRACE_S = 1.0  # for what should not come any more


@dataclass(frozen=True, slots=True)
class PublisherPlan:
    name: str
    version: int
    qos: int
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubscriberPlan:
    name: str
    version: int
    qos: int
    filters: tuple[str, ...]
    group: str = ""
    receive_maximum: int = 0
    hesitates_s: float = 0.0  # now and then it takes about so long to answer
    stays_s: float = 0.0  # about how long a connection lasts; 0: until the broker ends it
    away_s: float = 0.0  # … and how long it is away then


# Each topic has one QoS: the standard orders messages within a topic and QoS.
PUBLISHERS = (
    PublisherPlan("p1", 4, 1, ("t/1/a", "t/1/b")),
    PublisherPlan("p2", 5, 2, ("t/2/a", "t/2/b")),
    PublisherPlan("p3", 5, 1, ("t/1/a", "t/1/c")),
    PublisherPlan("p4", 4, 2, ("t/2/a", "t/2/c")),
)
SUBSCRIBERS = (
    SubscriberPlan("all-1", 4, 1, ("t/#",)),
    SubscriberPlan("all-2", 5, 2, ("t/#",)),
    SubscriberPlan("narrow", 5, 2, ("t/2/a", "t/+/b"), receive_maximum=5),
    SubscriberPlan("slow", 4, 2, ("t/+/a",), hesitates_s=0.04),
    SubscriberPlan("fickle", 4, 2, ("t/2/#",), stays_s=0.15, away_s=0.1),
    SubscriberPlan("away", 5, 2, ("t/#",), stays_s=0.4, away_s=3.0),
    SubscriberPlan("member-1", 5, 2, ("t/+/a", "t/+/c"), group="g"),
    SubscriberPlan("member-2", 5, 2, ("t/+/a", "t/+/c"), group="g", stays_s=0.3, away_s=0.3),
    SubscriberPlan("member-3", 4, 2, ("t/+/a", "t/+/c"), group="g", hesitates_s=0.02),
)


class Broken(Exception):
    """The connection ended."""


class Client:
    """Connects again and again until told to stop. Subclasses say what happens on a connection."""

    def __init__(self, name: str, version: int, port: int, seed: int) -> None:
        self.name, self.version, self.port = name, version, port
        self.random = random.Random(f"{seed} {name}")
        self.violations: list[str] = []
        self.stopping = False
        self.connected = asyncio.Event()
        self.trusted = False  # the broker has promised something that includes the session
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._stream = PacketStream(1 << 28)

    async def run(self) -> None:
        while not self.stopping:
            try:
                await self._open()
                self.connected.set()
                await self.converse()
            except (OSError, Broken, asyncio.IncompleteReadError):
                await asyncio.sleep(RETRY_S)
            finally:
                self.connected.clear()
                self.hang_up()

    async def converse(self) -> None:
        raise NotImplementedError

    def hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def send(self, *packets: Packet) -> None:
        if self._writer is None or self._writer.is_closing():
            raise Broken
        self._writer.write(b"".join(encode(packet, self.version) for packet in packets))

    async def receive(self) -> list[Packet]:
        assert self._reader is not None
        data = await self._reader.read(1 << 16)
        if not data:
            raise Broken
        packets = [decode(first, body, self.version, from_server=True) for first, body in self._stream.feed(data)]
        if any(isinstance(packet, Disconnect) for packet in packets):
            raise Broken
        return packets

    def properties(self) -> Properties:
        return Properties(session_expiry=SESSION_EXPIRY_S)

    async def _open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._stream = PacketStream(1 << 28)
        properties = self.properties() if self.version == 5 else Properties()
        self.send(Connect(self.version, self.name.encode(), False, 30, None, None, None, properties))
        packets: list[Packet] = []
        while not packets:
            packets = await self.receive()
        connack = packets[0]
        if not isinstance(connack, Connack) or connack.reason:
            raise Broken
        if self.trusted and not connack.session_present:
            self.violations.append("the session is gone")
        self.early = packets[1:]

    async def each(self) -> Packet:
        while not self.early:
            self.early = await self.receive()
        return self.early.pop(0)


@dataclass(slots=True)
class Sent:
    topic: str
    payload: str
    released: bool = False  # QoS 2: PUBREC came


class Publisher(Client):
    def __init__(self, plan: PublisherPlan, port: int, seed: int) -> None:
        super().__init__(plan.name, plan.version, port, seed)
        self.plan = plan
        self.unfinished: dict[int, Sent] = {}  # by packet id, in the order of sending
        self.acknowledged: list[tuple[str, str]] = []  # (topic, payload)
        self.sequences = dict.fromkeys(plan.topics, 0)
        self.next_id = 0
        self.finishing = False
        self.done = asyncio.Event()

    async def converse(self) -> None:
        for pid, sent in self.unfinished.items():
            self.send(Pubrel(pid) if sent.released else self._publish(pid, sent, dup=True))
        sender = asyncio.create_task(self._keep_sending())
        try:
            while True:
                self._take(await self.each())
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, Broken):
                await sender

    async def _keep_sending(self) -> None:
        while not self.finishing:
            for _ in range(self.random.choice((1, 1, 2, 5, 30))):
                if len(self.unfinished) < WINDOW:
                    self._next()
            await asyncio.sleep(self.random.expovariate(1 / 0.04))
        self._perhaps_done()

    def _next(self) -> None:
        self.next_id = self.next_id % 65535 + 1
        while self.next_id in self.unfinished:
            self.next_id = self.next_id % 65535 + 1
        topic = self.random.choice(self.plan.topics)
        self.sequences[topic] += 1
        sent = self.unfinished[self.next_id] = Sent(topic, f"{self.name} {topic} {self.sequences[topic]}")
        self.send(self._publish(self.next_id, sent, dup=False))

    def _publish(self, pid: int, sent: Sent, dup: bool) -> Publish:
        return Publish(sent.topic.encode(), sent.payload.encode(), self.plan.qos, False, dup, pid)

    def _take(self, packet: Packet) -> None:
        assert isinstance(packet, Puback | Pubrec | Pubcomp), packet
        sent = self.unfinished.get(packet.packet_id)
        if sent is None or (isinstance(packet, Puback) != (self.plan.qos == 1)):
            self.violations.append(f"{packet} answers nothing")
            return
        if packet.reason >= 0x80 and not isinstance(packet, Pubcomp):  # a PUBCOMP may say that it is over already
            self.violations.append(f"{sent.payload} was refused: {packet}")
        self.trusted = True
        if isinstance(packet, Pubrec):
            if not sent.released:
                sent.released = True
                self.acknowledged.append((sent.topic, sent.payload))
            self.send(Pubrel(packet.packet_id))
            return
        if isinstance(packet, Puback):
            self.acknowledged.append((sent.topic, sent.payload))
        elif not sent.released:
            self.violations.append(f"PUBCOMP before PUBREC for {sent.payload}")
        del self.unfinished[packet.packet_id]
        self._perhaps_done()

    def _perhaps_done(self) -> None:
        if self.finishing and not self.unfinished:
            self.done.set()


class Subscriber(Client):
    def __init__(self, plan: SubscriberPlan, port: int, seed: int) -> None:
        super().__init__(plan.name, plan.version, port, seed)
        self.plan = plan
        self.received: list[tuple[str, str, int, bool]] = []  # (topic, payload, QoS, DUP), handed to the application
        self.unreleased: dict[int, str] = {}  # QoS 2: packet id → what came with it
        self.subscribed = False
        self.staying = False  # from now on it does not go away any more

    def properties(self) -> Properties:
        return Properties(session_expiry=SESSION_EXPIRY_S, receive_maximum=self.plan.receive_maximum or None)

    async def converse(self) -> None:
        if not self.subscribed:
            prefix = f"$share/{self.plan.group}/" if self.plan.group else ""
            requests = tuple(FilterRequest((prefix + f).encode(), self.plan.qos) for f in self.plan.filters)
            self.send(Subscribe(1, requests))
        leaving: asyncio.Task[None] | None = None
        if self.plan.stays_s and not self.staying:
            leaving = asyncio.create_task(self._leave_after(self.random.expovariate(1 / self.plan.stays_s)))
        try:
            while True:
                packet = await self.each()
                if self.plan.hesitates_s and not self.staying and self.random.random() < HESITATION:
                    await asyncio.sleep(self.random.uniform(0, 2 * self.plan.hesitates_s))
                self._take(packet)
        finally:
            if leaving is not None:
                gone = leaving.done()
                leaving.cancel()
                if gone and not self.staying:
                    await asyncio.sleep(self.random.expovariate(1 / self.plan.away_s))

    async def _leave_after(self, stays_s: float) -> None:
        await asyncio.sleep(stays_s)
        if not self.staying and self.subscribed:
            if self.random.random() < 0.5:
                with contextlib.suppress(Broken):
                    self.send(Disconnect())
            self.hang_up()

    def _take(self, packet: Packet) -> None:
        match packet:
            case Suback():
                if any(reason >= 0x80 for reason in packet.reasons):
                    self.violations.append(f"refused: {packet}")
                self.subscribed = self.trusted = True
            case Publish(qos=2):
                self._take_qos2(packet)
            case Publish():
                self._note(packet)
                if packet.qos:
                    self.send(Puback(packet.packet_id))
            case Pubrel():
                # [MQTT-4.3.3-11]: answered also when nothing is known of it.
                self.unreleased.pop(packet.packet_id, None)
                self.send(Pubcomp(packet.packet_id))
            case _:
                self.violations.append(f"unexpected {packet}")

    def _take_qos2(self, packet: Publish) -> None:
        """[MQTT-4.3.3-10]: until PUBREL, the same id is the same message and is not handed on again."""
        payload = packet.payload.decode()
        known = self.unreleased.get(packet.packet_id)
        if known is None:
            self.unreleased[packet.packet_id] = payload
            self._note(packet)
        elif known != payload:
            self.violations.append(f"packet id {packet.packet_id} means {known} and then {payload}")
        self.send(Pubrec(packet.packet_id))

    def _note(self, packet: Publish) -> None:
        self.received.append((packet.topic.decode(), packet.payload.decode(), packet.qos, packet.dup))


class Observer(Client):
    """Sees positions: on each connection it replays from the last one it knows, and notes which message is where."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__("observer", 5, port, seed)
        self.places: dict[int, str] = {}
        self.session = 0

    async def _open(self) -> None:
        self.session += 1  # a new client id each time: nothing is kept for it
        self.name = f"observer-{self.session}"
        await super()._open()

    def properties(self) -> Properties:
        return Properties()

    async def converse(self) -> None:
        start = str(max(self.places)) if self.places else "earliest"
        self.send(Subscribe(1, (FilterRequest(f"$replay/{start}/t/#".encode(), 0),)))
        while True:
            packet = await self.each()
            if not isinstance(packet, Publish):
                continue
            place = dict(packet.properties.user).get(b"tidegate-position")
            if place is None:
                continue  # live: those have no position on them
            payload = packet.payload.decode()
            if self.places.setdefault(int(place), payload) != payload:
                self.violations.append(f"position {int(place)} was {self.places[int(place)]}, now {payload}")


# ── what the subscribers are owed ──


def owed(plan: SubscriberPlan, acknowledged: list[tuple[str, str]]) -> set[str]:
    """The payloads of acknowledged messages that a subscriber, or its group, must have got."""
    return {
        payload
        for topic, payload in acknowledged
        if any(matches(f.encode(), topic.encode()) for f in plan.filters)
    }


def parties(subscribers: list[Subscriber]) -> Iterator[list[Subscriber]]:
    """Subscribers that share their messages, together; the others alone."""
    groups: dict[str, list[Subscriber]] = {}
    for subscriber in subscribers:
        groups.setdefault(subscriber.plan.group or f"only {subscriber.name}", []).append(subscriber)
    yield from groups.values()


async def drained(subscribers: list[Subscriber], acknowledged: list[tuple[str, str]]) -> None:
    """Return when each party has what it is owed, or when nothing has come any more for a while."""
    waiting = [(party, owed(party[0].plan, acknowledged)) for party in parties(subscribers)]
    seen = dict.fromkeys(subscribers, 0)
    moved_s = asyncio.get_running_loop().time()
    while any(missing for _, missing in waiting) and asyncio.get_running_loop().time() - moved_s < STALLED_S:
        for party, missing in waiting:
            for each in party:
                if len(each.received) > seen[each]:
                    moved_s = asyncio.get_running_loop().time()
                missing.difference_update(payload for _, payload, _, _ in each.received[seen[each] :])
                seen[each] = len(each.received)
        await asyncio.sleep(RETRY_S)


# ── the two processes ──


async def run_publishers(port: int, seed: int, journal: Path, command: Callable[[], Awaitable[str]]) -> None:
    clients = [Publisher(plan, port, seed) for plan in PUBLISHERS]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    await command()  # finish
    for client in clients:
        client.finishing = True
        client._perhaps_done()
    try:
        async with asyncio.timeout(DRAIN_S):
            await asyncio.gather(*(client.done.wait() for client in clients))
    except TimeoutError:
        for client in clients:
            if client.unfinished:
                client.violations.append(f"never answered: {len(client.unfinished)} messages")
    for task in tasks:
        task.cancel()
    notes = [{"name": c.name, "acknowledged": c.acknowledged, "violations": c.violations} for c in clients]
    journal.write_text(json.dumps(notes))
    print("finished", flush=True)


async def run_subscribers(port: int, seed: int, journal: Path, command: Callable[[], Awaitable[str]]) -> None:
    clients = [Subscriber(plan, port, seed) for plan in SUBSCRIBERS]
    observer = Observer(port, seed)
    tasks = [asyncio.create_task(client.run()) for client in (*clients, observer)]
    while not all(client.subscribed for client in clients):
        await asyncio.sleep(RETRY_S)
    print("subscribed", flush=True)
    published = json.loads(Path(await command()).read_text())
    acknowledged = [(topic, payload) for each in published for topic, payload in each["acknowledged"]]
    for client in clients:
        client.staying = True
    await drained(clients, acknowledged)
    print("drained", flush=True)
    await command()  # the broker was restarted once more
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await asyncio.gather(*(client.connected.wait() for client in (*clients, observer)))
    await asyncio.sleep(GRACE_S)
    for task in tasks:
        task.cancel()
    notes = [{"name": c.name, "received": c.received, "violations": c.violations} for c in clients]
    seen = {"name": "observer", "places": observer.places, "violations": observer.violations}
    journal.write_text(json.dumps([*notes, seen]))
    print("finished", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("publishers", "subscribers"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    given = parser.parse_args()
    loop = asyncio.get_running_loop()

    async def command() -> str:
        return (await loop.run_in_executor(None, sys.stdin.readline)).strip()

    run = run_publishers if given.role == "publishers" else run_subscribers
    await run(given.port, given.seed, given.journal, command)


if __name__ == "__main__":
    asyncio.run(main())
