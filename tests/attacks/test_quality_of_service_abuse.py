"""QoS 2 messages that are never released, identifiers used again, and messages larger than their receiver takes."""

from __future__ import annotations

import pytest
from attack_kit import DROPPED, MIB, REFUSED, Scene, closed_with

from harness import RawClient
from packet_bytes import publish_bytes
from tidegate.wire import Disconnect, PacketStream, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel

RECEIVE_MAXIMUM = 50  # set for the scenes below


def pubrecs(client: RawClient, count: int) -> list[int]:
    return [client.amid(Pubrec).packet_id for _ in range(count)]


@pytest.mark.attack("A11")
def test_qos_2_messages_that_are_never_released_are_limited(make_scene, version: int) -> None:
    scene: Scene = make_scene(mqtt__receive_maximum=RECEIVE_MAXIMUM)
    attacker = scene.open("attacker", version)
    for pid in range(1, RECEIVE_MAXIMUM + 1):
        attacker.publish("attack/a", b"x", 2, packet_id=pid, wait=False)
    assert pubrecs(attacker, RECEIVE_MAXIMUM) == list(range(1, RECEIVE_MAXIMUM + 1))
    attacker.publish("attack/a", b"one too many", 2, packet_id=RECEIVE_MAXIMUM + 1, wait=False)
    closed_with(attacker, 0x93)
    scene.counted(REFUSED + "Refused 0x93", 1)


@pytest.mark.attack("A11")
def test_coming_back_does_not_make_room_for_more_unreleased_messages(make_scene, version: int) -> None:
    scene: Scene = make_scene(mqtt__receive_maximum=RECEIVE_MAXIMUM)
    stay = Properties(session_expiry=600) if version == 5 else Properties()
    attacker = scene.open("attacker", version, clean=False, properties=stay)
    for pid in range(1, RECEIVE_MAXIMUM + 1):
        attacker.publish("attack/a", b"x", 2, packet_id=pid, wait=False)
    pubrecs(attacker, RECEIVE_MAXIMUM)
    for _ in range(3):
        attacker = scene.open("attacker", version, clean=False, properties=stay)
        attacker.publish("attack/a", b"x", 2, packet_id=1000, wait=False)
        closed_with(attacker, 0x93)
    attacker = scene.open("attacker", version, clean=False, properties=stay)
    attacker.send(Pubrel(1))
    assert attacker.expect(Pubcomp).packet_id == 1
    assert attacker.publish("attack/a", b"x", 2, packet_id=1000) == (0x10 if version == 5 else 0)


@pytest.mark.attack("A11")
@pytest.mark.req("S1.24")
def test_the_same_unreleased_id_again_is_the_same_message(scene: Scene, version: int) -> None:
    listener = scene.open("listener")
    listener.subscribe("attack/#", qos=2)
    attacker = scene.open("attacker", version)
    for _ in range(500):
        attacker.publish("attack/a", b"once", 2, packet_id=7, dup=True, wait=False)
    assert pubrecs(attacker, 500) == [7] * 500
    attacker.send(Pubrel(7))
    assert attacker.expect(Pubcomp).packet_id == 7
    assert attacker.publish("attack/a", b"after the release", 2, packet_id=7) == 0
    assert listener.payloads(2) == [b"once", b"after the release"]
    listener.nothing()


@pytest.mark.attack("A11")
def test_releases_and_acknowledgements_for_nothing_are_harmless(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    pids = range(1, 2001)
    not_found = 0x92 if version == 5 else 0
    for packet in (Pubrel, Puback, Pubcomp, Pubrec):
        for pid in pids:
            attacker.send(packet(pid))
    for pid in pids:
        assert attacker.amid(Pubcomp) == Pubcomp(pid, not_found)
    for pid in pids:
        assert attacker.amid(Pubrel) == Pubrel(pid, not_found)
    attacker.nothing()
    scene.counted(REFUSED + "PUBACK for nothing", len(pids))
    scene.counted(REFUSED + "PUBCOMP for nothing", len(pids))


@pytest.mark.attack("A11")
@pytest.mark.parametrize("wrong", [Puback, Pubcomp])
def test_a_wrong_acknowledgement_of_a_qos_2_message_ends_the_connection(scene: Scene, version: int, wrong) -> None:
    attacker = scene.open("attacker", version)
    attacker.subscribe("attack/#", qos=2)
    attacker.publish("attack/a", b"x", 2)
    pid = attacker.message(acknowledge=False).packet_id
    attacker.send(wrong(pid))
    closed_with(attacker, 0x82)
    scene.counted(REFUSED + "ProtocolViolation 0x82", 1)


# ── the receiver's maximum packet size ──


@pytest.mark.attack("A16")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_larger_than_the_receiver_takes_is_left_out_and_counted(scene: Scene, qos: int) -> None:
    small = scene.open("small", 5, properties=Properties(maximum_packet_size=200))
    large = scene.open("large", 5)
    for listener in (small, large):
        listener.subscribe("attack/#", qos=qos)
    friend = scene.open("friend", 4)
    for i in range(10):
        friend.publish("attack/a", b"%d" % i + b"x" * (500 * (i % 2)), qos)
    assert [p[:1] for p in small.payloads(5)] == [b"0", b"2", b"4", b"6", b"8"]
    assert [p[:1] for p in large.payloads(10)] == [b"%d" % i for i in range(10)]
    small.nothing()
    scene.counted(DROPPED + "larger than the client takes", 5)


@pytest.mark.attack("A16")
def test_the_limit_counts_the_whole_packet(scene: Scene) -> None:
    packet = publish_bytes(b"attack/a", b"x" * 50, 1, version=5)
    exact = scene.open("exact", 5, properties=Properties(maximum_packet_size=len(packet)))
    one_less = scene.open("one-less", 5, properties=Properties(maximum_packet_size=len(packet) - 1))
    for listener in (exact, one_less):
        listener.subscribe("attack/#", qos=1)
    scene.open("friend").publish("attack/a", b"x" * 50, 1)
    assert exact.message().payload == b"x" * 50
    one_less.nothing()
    scene.counted(DROPPED + "larger than the client takes", 1)


@pytest.mark.attack("A16")
def test_retained_messages_obey_the_receivers_limit(scene: Scene) -> None:
    friend = scene.open("friend")
    for i in range(10):
        friend.publish(f"attack/{i}", b"x" * (500 * (i % 2) + 1), 1, retain=True)
    small = scene.open("small", 5, properties=Properties(maximum_packet_size=200))
    small.subscribe("attack/#", qos=1)
    assert {small.message().topic for _ in range(5)} == {b"attack/%d" % i for i in (0, 2, 4, 6, 8)}
    small.nothing()
    scene.counted(DROPPED + "larger than the client takes", 5)


@pytest.mark.attack("A16")
def test_what_was_in_flight_obeys_a_limit_that_came_later(scene: Scene) -> None:
    stay = {"clean": False, "properties": Properties(session_expiry=600)}
    sleeper = scene.open("sleeper", 5, **stay)
    sleeper.subscribe("attack/#", qos=1)
    friend = scene.open("friend")
    friend.publish("attack/a", b"large" + b"x" * 1000, 1)
    friend.publish("attack/a", b"small", 1)
    for _ in range(2):
        sleeper.message(acknowledge=False)
    sleeper.close()
    friend.publish("attack/a", b"larger" + b"x" * 1000, 1)
    friend.publish("attack/a", b"smaller", 1)
    limited = Properties(session_expiry=600, maximum_packet_size=200)
    sleeper = scene.open("sleeper", 5, clean=False, properties=limited)
    assert sleeper.payloads(2) == [b"small", b"smaller"]
    sleeper.nothing()
    scene.counted(DROPPED + "larger than the client takes", 2)


@pytest.mark.attack("A16")
def test_a_shared_message_too_large_for_one_member_does_not_block_the_group(scene: Scene) -> None:
    small = scene.open("small", 5, properties=Properties(maximum_packet_size=100))
    small.subscribe("$share/g/attack/#", qos=1)
    friend = scene.open("friend")
    for i in range(10):
        friend.publish("attack/a", b"%d" % i + b"x" * (500 * (i % 2)), 1)
    assert [p[:1] for p in small.payloads(5)] == [b"0", b"2", b"4", b"6", b"8"]
    small.nothing()
    scene.counted(DROPPED + "larger than the client takes", 5)


@pytest.mark.attack("A16")
def test_reasons_in_words_are_left_out_where_they_would_break_the_limit(scene: Scene) -> None:
    """[MQTT-3.4.2-2], [MQTT-3.9.2-1], [MQTT-3.14.2-3]: reason strings only as far as the packet limit allows."""
    tight = scene.open("tight", 5, properties=Properties(maximum_packet_size=40))
    tight.stream = PacketStream(40)  # raises at a larger packet
    for qos in (1, 2):
        assert tight.publish("$attack", b"x", qos) == 0x90
    assert tight.subscribe("$replay/x/attack/x", qos=1).reasons == (0x8F,)
    tight.send_bytes(b"\x20\x00")
    assert [type(p) for p in tight.until_closed()] == [Disconnect]


@pytest.mark.attack("A16")
def test_a_packet_above_the_brokers_own_limit_is_refused(make_scene, version: int) -> None:
    scene: Scene = make_scene(mqtt__packet_bytes_max=100_000)
    before = scene.broker.rss_bytes()
    for _ in range(20):
        attacker = scene.open("attacker", version)
        if version == 5:
            assert attacker.connack is not None
            assert attacker.connack.properties.maximum_packet_size == 100_000
        attacker.send_bytes(publish_bytes(b"attack/a", b"x" * 100_000, 1, version=version)[:60_000])
        closed_with(attacker, 0x95)
    assert scene.broker.rss_bytes() - before < 16 * MIB
    scene.counted(REFUSED + "Refused 0x95", 20)


@pytest.mark.attack("A16")
def test_a_packet_of_exactly_the_brokers_limit_is_taken(make_scene, version: int) -> None:
    scene: Scene = make_scene(mqtt__packet_bytes_max=100_000)
    client = scene.open("client", version)
    client.subscribe("attack/#")
    overhead = len(publish_bytes(b"attack/a", b"x" * 99_000, version=version)) - 99_000
    client.send_bytes(publish_bytes(b"attack/a", b"x" * (100_000 - overhead), version=version))
    assert len(client.expect(Publish).payload) == 100_000 - overhead
