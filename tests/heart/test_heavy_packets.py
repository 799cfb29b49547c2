"""Packets that are within the limits and yet mean much work: a bystander that pings does not notice."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from heart_kit import Bystander, attach, attach_kept, nobody_waits, publish_all, read_exactly, return_raw, sync
from test_bystanders import Eaters, at_rest

from harness import BrokerProcess, RawClient
from packet_bytes import framed, publish_bytes, subscribe_bytes, unsubscribe_bytes, utf8, varint

Bystand = Callable[[BrokerProcess], Bystander]

PACKET_BYTES_MAX = 4 << 20
TOPICS = 300
OVERLAPPING = 8192


def pour(client: RawClient, data: bytes) -> None:
    """Send it all, also to somebody who closes the connection meanwhile."""
    client.socket.settimeout(10)
    try:
        client.socket.sendall(data)
        while client.socket.recv(1 << 16):
            pass
    except OSError:
        pass


# ── a packet of the largest size ──


def filled(first: Callable[[int], bytes], unit_bytes: int) -> list[bytes]:
    return [first(i) for i in range(PACKET_BYTES_MAX // unit_bytes - 20)]


@pytest.mark.attack("A12")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("kind", ["SUBSCRIBE", "UNSUBSCRIBE"])
def test_a_packet_full_of_filters_makes_nobody_wait(broker, bystand: Bystand, kind, version):
    """Half a million filters in a packet: more than a session may hold, which is seen without making them."""
    if kind == "SUBSCRIBE":
        packet = subscribe_bytes(filled(lambda i: b"%06d" % i, 9), version=version)
    else:
        packet = unsubscribe_bytes(filled(lambda i: b"%06d" % i, 8), version=version)
    nobody_waits(bystand(broker), lambda: pour(attach(broker, "client", version), packet))


def with_properties(first: int, before: bytes, properties: bytes, after: bytes = b"") -> bytes:
    return framed(first, before + varint(len(properties)) + properties + after)


def user_properties(count: int) -> bytes:
    return b"\x26\x00\x01k\x00\x01v" * count


MANY = user_properties(PACKET_BYTES_MAX // 7 - 10)
PACKETS_WITH_MANY = {
    "PUBLISH": with_properties(0x30, utf8(b"a"), MANY),
    "PUBACK": with_properties(0x40, b"\x00\x01\x00", MANY),
    "SUBSCRIBE": with_properties(0x82, b"\x00\x01", MANY, utf8(b"a") + b"\x00"),
    "subscription identifiers": with_properties(0x82, b"\x00\x01", b"\x0b\x01" * 2_000_000, utf8(b"a") + b"\x00"),
    "DISCONNECT": with_properties(0xE0, b"\x00", MANY),
}


@pytest.mark.parametrize("kind", PACKETS_WITH_MANY)
def test_a_packet_full_of_properties_makes_nobody_wait(broker, bystand: Bystand, kind):
    """Hundreds of thousands of properties in a packet are refused when there are more than it may have."""
    nobody_waits(bystand(broker), lambda: pour(attach(broker, "client", 5), PACKETS_WITH_MANY[kind]))


def test_a_connect_full_of_properties_makes_nobody_wait(broker, bystand: Bystand):
    some = user_properties(30_000)
    connect = with_properties(0x10, utf8(b"MQTT") + b"\x05\x02\x00\x00", some, utf8(b"client"))
    nobody_waits(bystand(broker), lambda: pour(RawClient(broker.port, 5), connect))


def test_messages_with_as_many_properties_as_they_may_have_make_nobody_wait(broker, bystand: Bystand):
    """A thousand user properties on each of many messages that come at once: some of them in each tick."""
    publisher = attach(broker, "publisher", 5)
    packet = with_properties(0x30, utf8(b"a"), user_properties(1000), b"x")

    def work() -> None:
        publisher.send_bytes(packet * 300)
        sync(publisher, 60)

    nobody_waits(bystand(broker), work)


# ── topics that many filters match ──


def overlapping(count: int) -> Iterator[bytes]:
    """Filters that all match t/1/1/1/1/1/1/1/1/1/1/1/1/<anything>."""
    for i in range(count):
        levels = [b"+" if i >> bit & 1 else b"1" for bit in range(13)]
        yield b"t/" + b"/".join(levels[:12]) + (b"/#" if i >> 12 else b"/+")


def subscribe_overlapping(client: RawClient) -> None:
    client.send_bytes(subscribe_bytes(overlapping(OVERLAPPING), 1, 1))
    read_exactly(client.socket, OVERLAPPING + 5)


@pytest.mark.attack("A13")
def test_new_topics_that_thousands_of_filters_match_make_nobody_wait(broker, bystand: Bystand):
    """Each of these topics is matched by 8,192 filters, which takes milliseconds: some topics in each tick."""
    subscribe_overlapping(attach(broker, "subscriber"))
    publisher = attach(broker, "publisher")
    rounds = iter(range(10))

    def work() -> None:
        now = next(rounds)
        topics = [b"t/" + b"1/" * 12 + b"%d-%d" % (now, i) for i in range(TOPICS)]
        publisher.send_bytes(b"".join([publish_bytes(topic, b"x") for topic in topics]))
        sync(publisher, 60)

    nobody_waits(bystand(broker), work)


@pytest.mark.attack("A13")
def test_a_session_that_missed_topics_that_thousands_of_its_filters_match_makes_nobody_wait(broker, bystand: Bystand):
    session = attach_kept(broker, "session", 4)
    subscribe_overlapping(session)
    session.disconnect()
    topics = [(b"t/" + b"1/" * 12 + b"%d" % i, b"x") for i in range(TOPICS)]
    publish_all(attach(broker, "publisher"), topics, 1)

    def work() -> None:
        with return_raw(broker, "session") as again:
            read_exactly(again, 4 + TOPICS * (2 + 2 + 27 + 2 + 1))

    nobody_waits(bystand(broker), work, lambda: at_rest(broker))


# ── a message for thousands ──


@pytest.mark.parametrize("qos", [0, 1])
def test_messages_for_10000_shared_groups_make_nobody_wait(broker, bystand: Bystand, qos):
    """One client is in all of them, and gets each message ten thousand times."""
    member = attach(broker, "member")
    member.send_bytes(subscribe_bytes([b"$share/g%d/a" % i for i in range(10_000)], 1, qos))
    read_exactly(member.socket, 10_000 + 5)
    publisher = attach(broker, "publisher")
    eaters = Eaters([member.socket])
    eaters.start()

    def work() -> None:
        publisher.send_bytes(publish_bytes(b"a", b"x", qos) * 50)
        sync(publisher, 60)
        time.sleep(1)

    nobody_waits(bystand(broker), work)
    eaters.stop()
    assert eaters.eaten > 1000


@pytest.mark.parametrize("qos", [0, 1])
def test_messages_for_3000_subscribers_make_nobody_wait(broker, bystand: Bystand, qos):
    subscribers: list[socket.socket] = []
    for i in range(3000):
        peer = socket.create_connection(("127.0.0.1", broker.port))
        peer.sendall(framed(0x10, utf8(b"MQTT") + b"\x04\x02\x00\x00" + utf8(b"s%d" % i)))
        peer.sendall(subscribe_bytes([b"a"], 1, qos))
        subscribers.append(peer)
    for peer in subscribers:
        read_exactly(peer, 4 + 5)
    publisher = attach(broker, "publisher")
    eaters = Eaters(subscribers)
    eaters.start()

    def work() -> None:
        publisher.send_bytes(publish_bytes(b"a", b"x", qos) * 20)
        sync(publisher, 60)
        time.sleep(1)

    nobody_waits(bystand(broker), work, lambda: at_rest(broker))
    eaters.stop()
    assert eaters.eaten > 3000 * 20 * 5
    for peer in subscribers:
        peer.close()
