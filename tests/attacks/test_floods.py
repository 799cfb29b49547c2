"""Floods: ever new topics, retained messages without end, connections that come and go, one name from many sockets.

The ordinary run sends 200,000 topics and retained messages; with TORTURE=1 in the environment it is the full million.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from attack_kit import MIB, PATIENCE_S, REFUSED, Scene
from vectors import connect

from harness import Closed, RawClient
from packet_bytes import publish_bytes
from tidegate.wire import Connack, Disconnect, Pingreq, Pingresp, Properties, Puback, Publish

TORTURE = os.environ.get("TORTURE") == "1"
COUNT = 1_000_000 if TORTURE else 200_000
BATCH = 5_000

pytestmark = pytest.mark.timeout(900 if TORTURE else 180)


def publish_all(
    client: RawClient, topics: range, qos: int = 0, retain: bool = False, payload: bytes = b"x" * 16
) -> None:
    """One message on each topic; when this returns the broker has taken them all."""
    for start in range(topics.start, topics.stop, BATCH):
        numbers = range(start, min(topics.stop, start + BATCH))
        packets = [
            publish_bytes(b"attack/%d/of/%d" % (i % 1000, i), payload, qos, 1 + i % 65_000, retain, client.version)
            for i in numbers
        ]
        client.send_bytes(b"".join(packets))
        if qos:
            for _ in numbers:
                assert client.expect(Puback).reason in (0, 0x10)
    client.send(Pingreq())
    client.amid(Pingresp, PATIENCE_S * 5)


# ── topics ──


@pytest.mark.attack("A19")
@pytest.mark.req("S0.2", "S3.10")
def test_ever_new_topics_cost_no_memory_for_each(make_scene, version: int) -> None:
    scene: Scene = make_scene(log__tail_bytes=MIB, log__segment_bytes=4 * MIB)
    listener = scene.open("listener")
    listener.subscribe("attack/+/of/77777", "attack/none/#", "other/+")
    attacker = scene.open("attacker", version)
    publish_all(attacker, range(COUNT))  # fills what is bounded: ready-made routes, the indices of segments
    assert listener.message().topic == b"attack/777/of/77777"
    before = scene.broker.rss_bytes()
    publish_all(attacker, range(COUNT, 2 * COUNT))
    assert scene.broker.rss_bytes() - before < 64 * MIB
    publish_all(attacker, range(77_777, 77_778), qos=1)
    assert listener.message().topic == b"attack/777/of/77777"


@pytest.mark.attack("A19")
def test_a_subscriber_to_everything_gets_a_message_of_every_topic(make_scene) -> None:
    scene: Scene = make_scene(log__tail_bytes=4 * MIB)
    listener = scene.open("listener", 5)
    listener.subscribe("attack/#")
    count = COUNT // 4
    attacker = scene.open("attacker", 4)
    sender = threading.Thread(target=publish_all, args=(attacker, range(count)))
    sender.start()
    topics = [listener.expect(Publish).topic for _ in range(count)]
    sender.join()
    assert topics == [b"attack/%d/of/%d" % (i % 1000, i) for i in range(count)]


# ── retained messages ──


@pytest.mark.attack("A20")
@pytest.mark.req("S0.4", "S0.10")
def test_retained_messages_in_great_number_are_kept_and_handed_out(make_scene) -> None:
    scene: Scene = make_scene(log__tail_bytes=MIB, retained__messages_max=COUNT)
    attacker = scene.open("attacker", 4)
    before = scene.broker.rss_bytes()
    publish_all(attacker, range(COUNT), retain=True)
    assert (scene.broker.rss_bytes() - before) / COUNT < 1500
    reader = scene.open("reader")
    reader.subscribe("attack/7/#", "attack/+/of/123456")
    expected = {b"attack/7/of/%d" % i for i in range(7, COUNT, 1000)} | {b"attack/456/of/123456"}
    assert {reader.message().topic for _ in expected} == expected
    reader.nothing()


@pytest.mark.attack("A20")
@pytest.mark.req("S0.4")
def test_retained_messages_above_the_number_allowed_are_refused_but_delivered(make_scene, version: int) -> None:
    scene: Scene = make_scene(retained__messages_max=100)
    listener = scene.open("listener")
    listener.subscribe("attack/#", qos=1)
    attacker = scene.open("attacker", version)
    reasons = [attacker.publish(f"attack/{i}", b"x", 1, retain=True) for i in range(110)]
    assert reasons == [0] * 100 + [0x97 if version == 5 else 0] * 10
    for i in range(100 if version == 5 else 110):  # what is refused to a v5 client is refused altogether
        assert listener.message().topic == b"attack/%d" % i
    listener.nothing()
    assert attacker.publish("attack/5", b"new", 1, retain=True) == 0  # replacing needs no room
    attacker.publish("attack/6", b"", 1, retain=True)
    assert attacker.publish("attack/late", b"x", 1, retain=True) == 0  # and deleting makes some
    scene.counted(REFUSED + ("PUBLISH 0x97" if version == 5 else "retained"), 10)


@pytest.mark.attack("A20")
@pytest.mark.req("S0.4")
def test_retained_messages_of_the_maximal_size_stop_at_the_memory_allowed(make_scene) -> None:
    room = 64 * MIB
    scene: Scene = make_scene(retained__bytes_max=room, log__tail_bytes=MIB)
    attacker = scene.open("attacker", 5)
    payload = bytes(4 * MIB - 100)
    before = scene.broker.rss_bytes()
    reasons = [attacker.publish(f"attack/{i}", payload, 1, retain=True) for i in range(30)]
    assert reasons == [0x10] * 16 + [0x97] * 14 or reasons == [0x10] * 15 + [0x97] * 15
    assert scene.broker.rss_bytes() - before < room + 96 * MIB
    kept = reasons.count(0x10)
    reader = scene.open("reader")
    reader.subscribe("attack/#")
    assert {reader.message().topic for _ in range(kept)} == {b"attack/%d" % i for i in range(kept)}
    reader.nothing()
    scene.counted(REFUSED + "PUBLISH 0x97", 30 - kept)


@pytest.mark.attack("A20")
def test_a_reader_of_all_retained_messages_that_never_reads_takes_no_memory(make_scene) -> None:
    scene: Scene = make_scene(log__tail_bytes=MIB)
    publish_all(scene.open("friend"), range(20_000), retain=True, payload=bytes(2_000))
    before = scene.broker.rss_bytes()
    for i in range(20):
        scene.open(f"deaf-{i}", keep_alive=0).send_bytes(b"\x82\x0d\x00\x01\x00\x08attack/#\x01")
    scene.observer.afresh()
    assert scene.broker.rss_bytes() - before < 20 * 4 * MIB  # of 40 MB each


# ── connections ──


def come_and_go(
    port: int, client_id: bytes, version: int, ending: str, properties: bytes = b"", clean: int = 2
) -> None:
    raw = connect(clean, client_id=client_id, version=version, properties=properties)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.settimeout(PATIENCE_S)
        peer.sendall(raw)
        if ending == "half a CONNACK":
            peer.recv(2)
            return
        peer.recv(1000)
        if ending == "DISCONNECT":
            peer.sendall(b"\xe0\x00")
            peer.recv(1)


@pytest.mark.attack("A21")
@pytest.mark.req("S0.21")
def test_after_a_storm_of_connections_everything_is_as_before(scene: Scene, version: int) -> None:
    endings = ["DISCONNECT", "drop", "half a CONNACK"]

    def storm(count: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            visits = [
                pool.submit(come_and_go, scene.broker.port, b"storm-%d" % i, version, endings[i % 3])
                for i in range(count)
            ]
        for visit in visits:
            visit.result()

    descriptors = scene.descriptors()
    storm(500)
    before = scene.broker.rss_bytes()
    storm(3_000)
    scene.descriptors_back_to(descriptors)
    scene.clients_back_to(connected=3, sessions=3)
    assert scene.broker.rss_bytes() - before < 24 * MIB


@pytest.mark.attack("A21")
@pytest.mark.req("S0.19")
def test_a_persistent_session_that_comes_and_goes_for_ever_stays_one_session(scene: Scene, version: int) -> None:
    lasting = b"\x11\x00\x00\x02\x58" if version == 5 else b""

    def storm(count: int) -> None:
        for _ in range(count):
            come_and_go(scene.broker.port, b"lasting", version, "DISCONNECT", lasting, clean=0)

    descriptors = scene.descriptors()
    storm(300)
    before = scene.broker.rss_bytes()
    storm(3_000)
    assert scene.broker.rss_bytes() - before < 8 * MIB
    scene.descriptors_back_to(descriptors)
    scene.clients_back_to(connected=3, sessions=4)


@pytest.mark.attack("A21")
@pytest.mark.req("S1.4")
@pytest.mark.parametrize("lasting", [False, True], ids=["clean", "lasting"])
def test_of_50_sockets_with_one_client_id_exactly_one_stays(scene: Scene, version: int, lasting: bool) -> None:
    descriptors = scene.descriptors()
    properties = Properties(session_expiry=600 if lasting else 0) if version == 5 else Properties()
    rivals = [scene.open(None, version) for _ in range(50)]
    start = threading.Barrier(len(rivals))

    def claim(rival: RawClient) -> None:
        start.wait()
        assert rival.connect("the-one", clean=not lasting, properties=properties).reason == 0

    with ThreadPoolExecutor(len(rivals)) as pool:
        list(pool.map(claim, rivals))  # all have been let in, one after the other

    def stays(rival: RawClient) -> bool:
        try:
            rival.send(Pingreq())
            packet = rival.receive()
        except (Closed, ConnectionError):
            return False
        if isinstance(packet, Disconnect):
            assert packet.reason == 0x8E
            return False
        return isinstance(packet, Pingresp)

    left = [rival for rival in rivals if stays(rival)]
    assert len(left) == 1
    winner = left[0]
    winner.subscribe("attack/#", qos=1)
    scene.open("friend").publish("attack/a", b"to the one", 1)
    assert winner.message().payload == b"to the one"
    scene.clients_back_to(connected=5, sessions=5)
    scene.descriptors_back_to(descriptors + 2)


@pytest.mark.attack("A21")
def test_everyone_who_is_taken_over_from_is_told(scene: Scene) -> None:
    first = scene.open("the-one", 5)
    for _ in range(100):
        second = scene.open("the-one", 5)
        [said] = first.until_closed()
        assert isinstance(said, Disconnect) and said.reason == 0x8E
        first = second
    first.nothing()


@pytest.mark.attack("A21")
def test_more_connections_than_allowed_are_turned_away_and_counted(make_scene) -> None:
    scene: Scene = make_scene(listen__connections_max=20)
    descriptors = scene.descriptors()
    held = [scene.open(f"held-{i}") for i in range(17)]  # with the bystanders and the observer it is full
    for _ in range(200):
        with RawClient(scene.broker.port) as turned_away:
            assert turned_away.until_closed() == []
    scene.counted(REFUSED + "too many connections", 200)
    held[0].disconnect()
    scene.descriptors_back_to(descriptors + 16)
    assert scene.open("welcome").connack == Connack(False, 0)
