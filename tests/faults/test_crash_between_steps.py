"""kill -9 between any two steps of QoS 1 and 2, on the way in and on the way out (C2, I4).

Each test stops at one step, kills the broker, starts it again, and goes on as the standard demands. In the end the
reader must have the message: once with QoS 2, at least once with QoS 1, and what is published afterwards too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import (
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
)

DAY = Properties(session_expiry=86_400)
LAST = b"last"


def join(broker: BrokerProcess, client_id: str, version: int, properties: Properties = DAY) -> RawClient:
    client = RawClient(broker.port, version)
    client.connect(client_id, clean=False, properties=properties if version == 5 else Properties())
    return client


def rejoin(broker: BrokerProcess, client_id: str, version: int, properties: Properties = DAY) -> RawClient:
    client = join(broker, client_id, version, properties)
    assert client.connack is not None and client.connack.session_present
    return client


def crash(broker: BrokerProcess) -> None:
    broker.kill()
    broker.start()


class HonestReader:
    """Hands a message on once per packet id until that is released, over as many connections as it takes."""

    def __init__(self, client_id: str = "reader", version: int = 4) -> None:
        self.client_id, self.version = client_id, version
        self.properties = DAY if version == 5 else Properties()
        self.unreleased: dict[int, bytes] = {}
        self.got: list[bytes] = []

    def subscribe(self, broker: BrokerProcess, *filters: str) -> None:
        self.client = join(broker, self.client_id, self.version, self.properties)
        self.client.subscribe(*filters, qos=2)

    def rejoin(self, broker: BrokerProcess) -> None:
        self.client = rejoin(broker, self.client_id, self.version, self.properties)

    def note(self, packet: Publish) -> None:
        if packet.qos == 2:
            known = self.unreleased.get(packet.packet_id)
            assert known in (None, packet.payload), "a packet id that is not released means another message"
            if known is not None:
                return
            self.unreleased[packet.packet_id] = packet.payload
        self.got.append(packet.payload)

    def take(self, packet: Packet) -> None:
        """One packet, and the answer to it."""
        match packet:
            case Publish():
                self.note(packet)
                if packet.qos:
                    self.client.send(Pubrec(packet.packet_id) if packet.qos == 2 else Puback(packet.packet_id))
            case Pubrel():
                self.unreleased.pop(packet.packet_id, None)
                self.client.send(Pubcomp(packet.packet_id))
            case _:
                raise AssertionError(f"unexpected {packet}")

    def read_to(self, last: bytes) -> None:
        while last not in self.got or self.unreleased:
            self.take(self.client.receive())

    def settle(self) -> None:
        """What was sent before this has been handled by the broker."""
        self.client.send(Pingreq())
        self.client.amid(Pingresp)


# ── from the publisher to the broker ──


def publish_until(step: str, client: RawClient, qos: int) -> None:
    """Publish with packet id 7 and stop after `step`."""
    client.publish("a/b", b"message", qos, packet_id=7, wait=False)
    if step == "PUBLISH sent":
        return
    if qos == 1:
        assert client.expect(Puback).packet_id == 7
        return
    client.expect(Pubrec)
    if step == "PUBREC received":
        return
    client.send(Pubrel(7))
    if step == "PUBREL sent":
        return
    client.expect(Pubcomp)


def finish_publishing(step: str, client: RawClient, qos: int) -> None:
    """What a publisher that stopped after `step` has to do on its next connection [MQTT-4.4.0-1]."""
    if step == "PUBLISH sent":
        client.publish("a/b", b"message", qos, packet_id=7, dup=True)
    elif step in ("PUBREC received", "PUBREL sent"):
        client.send(Pubrel(7))
        client.expect(Pubcomp)


@pytest.mark.req("S0.7")
@pytest.mark.attack("C2")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    ("qos", "step"),
    [
        (1, "PUBLISH sent"),
        (1, "PUBACK received"),
        (2, "PUBLISH sent"),
        (2, "PUBREC received"),
        (2, "PUBREL sent"),
        (2, "PUBCOMP received"),
    ],
)
def test_a_publisher_goes_on_after_a_crash_at_any_step(start_broker, version: int, qos: int, step: str):
    broker = start_broker("fsync")
    reader = HonestReader()
    reader.subscribe(broker, "a/#")
    reader.client.close()
    publish_until(step, join(broker, "publisher", version), qos)
    crash(broker)
    publisher = join(broker, "publisher", version)
    finish_publishing(step, publisher, qos)
    # The same packet id again, now free: a new message.
    publisher.publish("a/b", LAST, qos, packet_id=7)
    reader.rejoin(broker)
    reader.read_to(LAST)
    reader.client.nothing()
    times = Counter(reader.got)
    assert times[LAST] == 1
    assert times[b"message"] == 1 if qos == 2 else times[b"message"] >= 1


@pytest.mark.req("S0.7")
@pytest.mark.attack("C2")
@pytest.mark.parametrize("version", [4, 5])
def test_a_publish_whose_pubrec_was_lost_is_not_stored_twice(start_broker, version: int):
    broker = start_broker("fsync")
    reader = HonestReader()
    reader.subscribe(broker, "a/#")
    publish_until("PUBREC received", join(broker, "publisher", version), 2)
    for _ in range(2):
        crash(broker)
        publisher = rejoin(broker, "publisher", version)
        publisher.publish("a/b", b"message", 2, packet_id=7, dup=True, wait=False)
        publisher.expect(Pubrec)
    publisher.send(Pubrel(7))
    publisher.expect(Pubcomp)
    publisher.publish("a/b", LAST, 2)
    reader.rejoin(broker)
    reader.read_to(LAST)
    assert reader.got == [b"message", LAST]


# ── from the broker to the subscriber ──

READER_STEPS = [
    "PUBLISH received",
    "PUBREC sent",
    "PUBREC handled",
    "PUBREL received",
    "PUBCOMP sent",
    "PUBCOMP handled",
]


def read_until(step: str, reader: HonestReader) -> None:
    """Take part in the delivery of one QoS 2 message and stop after `step`."""
    reached = ""
    while reached != step:
        packet = reader.client.receive()
        if isinstance(packet, Publish):
            reader.note(packet)
            reached = "PUBLISH received"
            if reached != step:
                reader.client.send(Pubrec(packet.packet_id))
                reached = "PUBREC sent"
                if step == "PUBREC handled":
                    reader.settle()
                    return
        else:
            assert isinstance(packet, Pubrel), packet
            reader.unreleased.pop(packet.packet_id, None)
            reached = "PUBREL received"
            if reached != step:
                reader.client.send(Pubcomp(packet.packet_id))
                reached = "PUBCOMP sent"
                if step == "PUBCOMP handled":
                    reader.settle()
                    return


@pytest.mark.req("S4.1", "S4.5")
@pytest.mark.attack("C2")
@pytest.mark.parametrize("filter", ["a/#", "$share/g/a/#"])
@pytest.mark.parametrize("step", READER_STEPS)
def test_a_qos_2_message_reaches_its_reader_once_after_crashes_at_any_step(start_broker, step: str, filter: str):
    broker = start_broker("fsync")
    reader = HonestReader(version=5)
    reader.subscribe(broker, filter)
    join(broker, "publisher", 4).publish("a/b", b"message", 2)
    read_until(step, reader)
    crash(broker)
    reader.rejoin(broker)
    if not step.startswith("PUBCOMP"):
        packet = reader.client.receive()  # PUBLISH or PUBREL once more; the broker dies before it is answered
        if isinstance(packet, Publish):
            reader.note(packet)
        crash(broker)
        reader.rejoin(broker)
    join(broker, "publisher", 4).publish("a/b", LAST, 2)
    reader.read_to(LAST)
    reader.client.nothing()
    assert reader.got == [b"message", LAST]


@pytest.mark.req("S1.22")
@pytest.mark.attack("C2")
def test_a_message_in_flight_comes_again_with_its_packet_id_and_dup(start_broker):
    broker = start_broker("fsync")
    reader = HonestReader()
    reader.subscribe(broker, "a/#")
    join(broker, "publisher", 4).publish("a/b", b"message", 2)
    before = reader.client.expect(Publish)
    crash(broker)
    reader.rejoin(broker)
    again = reader.client.expect(Publish)
    assert (again.packet_id, again.payload, again.dup) == (before.packet_id, b"message", True)


@pytest.mark.req("S0.13", "S1.22")
@pytest.mark.attack("C2")
@pytest.mark.parametrize("filter", ["a/#", "$share/g/a/#"])
def test_a_qos_1_message_that_was_not_acknowledged_comes_again_after_each_crash(start_broker, filter: str):
    broker = start_broker("fsync")
    reader = HonestReader()
    reader.subscribe(broker, filter)
    join(broker, "publisher", 4).publish("a/b", b"message", 1)
    for _ in range(3):
        assert reader.client.expect(Publish).payload == b"message"
        crash(broker)
        reader.rejoin(broker)
    reader.read_to(b"message")


# ── QoS 1 and QoS 2 beside each other ──


def three_messages(broker: BrokerProcess) -> HonestReader:
    """A reader that was sent one (QoS 1), two and three (QoS 2), and has answered nothing."""
    reader = HonestReader()
    reader.subscribe(broker, "a/#")
    publisher = join(broker, "publisher", 4)
    for payload, qos in ((b"one", 1), (b"two", 2), (b"three", 2)):
        publisher.publish("a/b", payload, qos)
    return reader


def finish_qos2(reader: HonestReader, *wanted: bytes) -> None:
    """Complete the QoS 2 messages that are named; leave QoS 1 messages without an answer."""
    left = set(wanted)
    while left:
        packet = reader.client.receive()
        if isinstance(packet, Pubrel):
            left.discard(reader.unreleased[packet.packet_id])
            reader.take(packet)
        elif isinstance(packet, Publish) and packet.payload in wanted:
            reader.take(packet)
    reader.settle()


@pytest.mark.req("S0.13", "S4.5")
@pytest.mark.attack("C2")
def test_a_qos_2_message_behind_an_unanswered_qos_1_message_is_not_delivered_again(start_broker):
    """Its end is known although the reader's position stays before it, also when its packet id is used again."""
    broker = start_broker("fsync")
    reader = three_messages(broker)
    finish_qos2(reader, b"two", b"three")
    for round in range(3):
        crash(broker)
        reader.rejoin(broker)
        assert reader.client.expect(Publish).payload == b"one"  # never answered
        join(broker, "publisher", 4).publish("a/b", b"new %d" % round, 2)
        finish_qos2(reader, b"new %d" % round)
    crash(broker)
    reader.rejoin(broker)
    reader.read_to(b"one")
    reader.client.nothing()
    assert reader.got == [b"two", b"three", b"new 0", b"new 1", b"new 2", b"one"]


@pytest.mark.req("S4.5")
@pytest.mark.attack("C2")
def test_the_same_holds_over_clean_stops(start_broker):
    broker = start_broker("fsync")
    reader = three_messages(broker)
    finish_qos2(reader, b"two", b"three")
    for _ in range(3):
        assert broker.stop() == 0
        broker.start()
        reader.rejoin(broker)
        assert reader.client.expect(Publish).payload == b"one"
        join(broker, "publisher", 4).publish("elsewhere", b"", 1)  # the log goes on
    crash(broker)
    reader.rejoin(broker)
    reader.read_to(b"one")
    reader.client.nothing()
    assert reader.got == [b"two", b"three", b"one"]


@pytest.mark.req("S1.22")
@pytest.mark.attack("C2")
def test_a_qos_1_message_is_not_lost_behind_a_qos_2_message_that_was_in_flight(start_broker):
    """After a crash what was in flight with QoS 2 is sent first; its end must not carry the position past the rest."""
    broker = start_broker("fsync")
    reader = three_messages(broker)
    for _ in range(3):
        reader.client.expect(Publish)  # seen, and forgotten: this reader restarts as well
    crash(broker)
    reader.rejoin(broker)
    finish_qos2(reader, b"two")
    reader.unreleased.clear()
    reader.got.clear()
    crash(broker)
    reader.rejoin(broker)
    reader.read_to(b"one")
    assert reader.got == [b"three", b"one"]


@pytest.mark.attack("C2")
@pytest.mark.parametrize("end", [BrokerProcess.kill, BrokerProcess.stop], ids=["kill", "clean stop"])
def test_a_group_delivers_qos_2_once_while_a_member_owes_an_answer(
    start_broker, end: Callable[[BrokerProcess], None]
):
    """One member holds on to a QoS 1 message, the other finishes QoS 2 messages behind it."""
    broker = start_broker("fsync")
    members = [HonestReader(f"member-{i}") for i in range(2)]
    for member in members:
        member.subscribe(broker, "$share/g/a/#")
    publisher = join(broker, "publisher", 4)
    publisher.publish("a/b", b"held", 1)
    holder = next(m for m in members if _has_message(m))
    other = next(m for m in members if m is not holder)
    publisher.publish("a/b", b"two", 2)
    publisher.publish("a/b", b"three", 2)
    for member in (other, holder):
        while len(other.got) + len(holder.got) < 2 or member.unreleased:
            packet = _next(member)
            if packet is None:
                break
            if not (isinstance(packet, Publish) and packet.qos == 1):
                member.take(packet)
        member.settle()
    assert sorted(holder.got + other.got) == [b"three", b"two"]
    publisher.publish("elsewhere", b"", 1)  # the log goes on
    end(broker)
    broker.start()
    for member in members:
        member.rejoin(broker)
    publisher = join(broker, "publisher", 4)
    publisher.publish("a/b", LAST, 2)
    while LAST not in holder.got + other.got or b"held" not in holder.got + other.got:
        for member in members:
            packet = _next(member)
            if packet is not None:
                member.take(packet)
    times = Counter(holder.got + other.got)
    assert (times[b"two"], times[b"three"], times[LAST]) == (1, 1, 1)


@pytest.mark.req("S0.13")
@pytest.mark.attack("C2")
def test_a_member_that_finishes_qos_2_does_not_move_its_group_past_what_others_wait_for(start_broker):
    """The group's position is its own: a member's private subscription is far ahead of it."""
    broker = start_broker("fsync")
    member = HonestReader("member", 5)
    member.properties = Properties(session_expiry=86_400, receive_maximum=5)
    member.subscribe(broker, "$share/g/a/#", "private")
    member.client.close()
    publisher = join(broker, "publisher", 4)
    for i in range(50):
        publisher.publish("a/b", b"%d" % i, 2)
    member.rejoin(broker)
    member.note(member.client.expect(Publish))  # four more are on their way, the others wait
    crash(broker)
    member.rejoin(broker)
    # What the member had in flight waits for its window and may come after what the group hands out meanwhile.
    while len(set(member.got)) < 50 or member.unreleased:
        member.take(member.client.receive())
    member.client.nothing()
    assert sorted(member.got) == sorted(b"%d" % i for i in range(50))


def _next(reader: HonestReader) -> Packet | None:
    try:
        return reader.client.receive(0.2)
    except TimeoutError:
        return None


def _has_message(reader: HonestReader) -> bool:
    return isinstance(_next(reader), Publish)
