"""Every packet that no client may send, thrown at a running broker: lengths, first packets, server packets, vectors."""

from __future__ import annotations

from collections import Counter

import pytest
import vectors
from attack_kit import MIB, REFUSED, Scene, closed_with, fate

from harness import BrokerProcess, RawClient
from tidegate.wire import Connack, peek_version

HUGE_LENGTH = b"\xff\xff\xff\x7f"  # 268,435,455
FIVE_BYTE_LENGTH = b"\xff\xff\xff\xff\x01"
CONNECT, PUBLISH, SUBSCRIBE = b"\x10", b"\x30", b"\x82"

# Types that only a server sends: refused for that, whatever they hold.
SERVER_PACKETS = {
    "CONNACK": b"\x20\x03\x00\x00\x00",
    "SUBACK": b"\x90\x04\x00\x01\x00\x00",
    "UNSUBACK": b"\xb0\x02\x00\x01",
    "PINGRESP": b"\xd0\x00",
}
SERVER_TYPES = {raw[0] >> 4 for raw in SERVER_PACKETS.values()}

Thrown = tuple[vectors.Invalid, int]


def throws() -> list[Thrown]:
    """Each vector with each version of its connection; a CONNECT brings its own version."""
    return [
        (vector, version)
        for vector in vectors.INVALID
        for version in versions_of(vector)
    ]


def versions_of(vector: vectors.Invalid) -> tuple[int, ...]:
    return (peek_version(vector.raw[2:]) or 4,) if vector in vectors.INVALID_CONNECTS else vector.versions


def expected_answer(vector: vectors.Invalid, version: int) -> int | None:
    if vector.raw[0] >> 4 in SERVER_TYPES:
        return 0x82 if version == 5 else None
    if version == 5 or (vector in vectors.INVALID_CONNECTS and vector.reason in (0x84, 0x85)):
        return vector.reason
    # An older CONNACK has no word for a malformed packet; "server unavailable" is for what is well-formed.
    return 0x88 if vector in vectors.INVALID_CONNECTS and vector.reason not in (0x81, 0x82) else None


def throw(port: int, vector: vectors.Invalid, version: int) -> int | None:
    """Send it where it belongs: the reason that came before the connection was closed."""
    with RawClient(port, version) as attacker:
        if vector not in vectors.INVALID_CONNECTS:
            attacker.connect("thrower")
            attacker.send_bytes(vector.raw)
            return fate(attacker)
        attacker.send_bytes(vector.raw)
        said = attacker.until_closed()
        assert all(isinstance(packet, Connack) for packet in said) and len(said) <= 1, said
        return said[0].reason if said and isinstance(said[0], Connack) else None


@pytest.mark.parametrize(
    ("vector", "version"),
    [
        pytest.param(v, version, id=f"{v.name}, v{version}", marks=[pytest.mark.attack(a) for a in v.attacks])
        for v, version in throws()
    ],
)
def test_a_packet_that_breaks_the_rules_ends_the_connection_with_its_reason(
    shared_broker: BrokerProcess, vector: vectors.Invalid, version: int
) -> None:
    assert throw(shared_broker.port, vector, version) == expected_answer(vector, version)


def counted_as(vector: vectors.Invalid) -> int:
    if vector.raw[0] >> 4 in SERVER_TYPES:
        return 0x82
    return 0x81 if vector.name == "3.x empty topic" else vector.reason  # nobody is told; it is just closed


@pytest.mark.attack("A7", "A8", "A10", "A12")
def test_every_broken_packet_is_counted_and_leaves_nothing_behind(scene: Scene) -> None:
    descriptors = scene.descriptors()
    expected: Counter[int] = Counter()
    for _ in range(3):
        for vector, version in throws():
            throw(scene.broker.port, vector, version)
            expected[counted_as(vector)] += 1

    def counted(values: dict[str, str]) -> bool:
        found: Counter[int] = Counter()
        for topic, value in values.items():
            if topic.startswith(REFUSED):
                found[int(topic[-2:], 16)] += int(value)
        return found == expected

    scene.observer.until(counted, f"counted as {expected}")
    scene.clients_back_to(connected=3, sessions=3)
    scene.descriptors_back_to(descriptors)


@pytest.mark.attack("A1")
@pytest.mark.req("S1.2")
@pytest.mark.parametrize("first_byte", [CONNECT, PUBLISH], ids=["CONNECT", "PUBLISH"])
def test_a_huge_length_before_authentication_takes_no_memory(scene: Scene, first_byte: bytes) -> None:
    before = scene.broker.rss_bytes()
    for _ in range(50):
        attacker = scene.open()
        attacker.send_bytes(first_byte + HUGE_LENGTH)
        assert attacker.until_closed() == []
    assert scene.broker.rss_bytes() - before < 16 * MIB
    scene.counted(REFUSED + "Refused 0x95", 50)


@pytest.mark.attack("A1")
def test_a_connect_that_is_announced_large_is_not_kept_while_it_trickles_in(scene: Scene) -> None:
    before = scene.broker.rss_bytes()
    attackers = [scene.open() for _ in range(100)]
    for attacker in attackers:
        attacker.send_bytes(CONNECT + b"\x80\x80\x10" + bytes(1000))  # 256 KiB, and the header on top of it
        assert attacker.until_closed() == []
    assert scene.broker.rss_bytes() - before < 16 * MIB
    scene.counted(REFUSED + "Refused 0x95", 100)


@pytest.mark.attack("A1")
def test_a_length_above_the_maximum_is_refused_before_the_packet_comes(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    attacker.send_bytes(PUBLISH + HUGE_LENGTH)
    closed_with(attacker, 0x95)
    scene.counted(REFUSED + "Refused 0x95", 1)


@pytest.mark.attack("A2")
@pytest.mark.req("S1.2")
@pytest.mark.parametrize("first", [t << 4 | f for t, f in [(0, 0), *((t, 0) for t in range(2, 16)), (6, 2), (8, 2)]])
def test_a_first_packet_that_is_not_connect_ends_the_connection(shared_broker: BrokerProcess, first: int) -> None:
    with RawClient(shared_broker.port) as attacker:
        attacker.send_bytes(bytes((first, 7)) + b"\x00\x01a\x00\x01a\x00")
        assert attacker.until_closed() == []


@pytest.mark.attack("A2")
def test_what_follows_a_wrong_first_packet_is_not_looked_at(scene: Scene) -> None:
    listener = scene.open("listener")
    listener.subscribe("#")
    attacker = scene.open()
    attacker.send_bytes(b"\xc0\x00" + vectors.connect(version=4) + vectors.publish(b"smuggled", version=4))
    assert attacker.until_closed() == []
    scene.counted(REFUSED + "ProtocolViolation 0x82", 1)
    assert {packet.topic for packet in drained(listener)} == {b"bystanders/talk"}


def drained(client: RawClient) -> list[vectors.Publish]:
    """What has come up to now; at least the bystanders' talk does."""
    packets = [client.expect(vectors.Publish)]
    while client.waiting:
        packets.append(client.expect(vectors.Publish))
    return packets


@pytest.mark.attack("A4")
@pytest.mark.parametrize("first_byte", [CONNECT, PUBLISH, SUBSCRIBE], ids=["CONNECT", "PUBLISH", "SUBSCRIBE"])
def test_a_remaining_length_of_five_bytes_before_connect_ends_the_connection(
    shared_broker: BrokerProcess, first_byte: bytes
) -> None:
    with RawClient(shared_broker.port) as attacker:
        attacker.send_bytes(first_byte + FIVE_BYTE_LENGTH)
        assert attacker.until_closed() == []


@pytest.mark.attack("A4")
def test_a_remaining_length_of_five_bytes_is_malformed_in_every_packet(scene: Scene, version: int) -> None:
    first_bytes = range(256)
    for first_byte in first_bytes:
        attacker = scene.open("attacker", version)
        attacker.send_bytes(bytes((first_byte,)) + FIVE_BYTE_LENGTH)
        closed_with(attacker, 0x81)
    scene.counted(REFUSED + "MalformedPacket 0x81", len(first_bytes))


@pytest.mark.attack("A7")
def test_a_client_that_sends_a_servers_packet_is_thrown_out(scene: Scene, version: int) -> None:
    for raw in SERVER_PACKETS.values():
        attacker = scene.open("attacker", version)
        attacker.send_bytes(raw)
        closed_with(attacker, 0x82)
    scene.counted(REFUSED + "ProtocolViolation 0x82", len(SERVER_PACKETS))
