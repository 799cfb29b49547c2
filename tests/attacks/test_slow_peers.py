"""Clients that do not read, or that send their bytes one at a time."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from attack_kit import MIB, PATIENCE_S, REFUSED, Scene, ask_until_ignored
from vectors import connect

from harness import RawClient
from packet_bytes import publish_bytes
from tidegate.wire import Connack, Pingreq, Pingresp, Puback

TAIL_BYTES = 4 * MIB  # what the scenes below keep of the log in memory
ROOM_BYTES = 64 * MIB  # for everything else that a flood of 200 MB may take

# With TORTURE=1 in the environment also by pings, of which it takes millions.
QUESTIONS = {"QoS 1": publish_bytes(b"a", b"", 1, 7)}
if os.environ.get("TORTURE") == "1":
    QUESTIONS["PINGREQ"] = b"\xc0\x00"


def deaf(scene: Scene, client_id: str, version: int = 4, keep_alive: int = 0) -> RawClient:
    """A client with a small receive buffer, so that not reading shows at once."""
    raw = scene.open(None, version)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(client_id, keep_alive=keep_alive)
    return raw


def flood(publisher: RawClient, total_bytes: int, payload_bytes: int, qos: int) -> int:
    """Publish so much, in order, reading the acknowledgements as they come: how many messages."""
    count = total_bytes // payload_bytes
    window = 500
    rest = bytes(payload_bytes - 10)
    for start in range(0, count, window):
        numbers = range(start, min(count, start + window))
        packets = [publish_bytes(b"attack/a", b"%010d" % i + rest, qos, 1 + i % 60000) for i in numbers]
        publisher.send_bytes(b"".join(packets))
        if qos:
            for _ in numbers:
                publisher.expect(Puback)
    publisher.send(Pingreq())
    publisher.expect(Pingresp)
    return count


@pytest.mark.attack("A17")
@pytest.mark.req("S3.2", "S3.10")
@pytest.mark.parametrize("payload_bytes", [1_000, 100_000])
@pytest.mark.parametrize("qos", [0, 1])
def test_200_mb_for_a_subscriber_that_never_reads_stay_out_of_memory(make_scene, qos: int, payload_bytes: int) -> None:
    scene: Scene = make_scene(log__tail_bytes=TAIL_BYTES)
    attacker = deaf(scene, "attacker")
    attacker.subscribe("attack/#", qos=qos)
    friend = scene.open("friend")
    flood(friend, 10_000_000, payload_bytes, qos)  # what is taken once for all
    before = scene.broker.rss_bytes()
    flood(friend, 200_000_000, payload_bytes, qos)
    assert scene.broker.rss_bytes() - before < ROOM_BYTES


@pytest.mark.attack("A17")
@pytest.mark.req("S1.20", "S3.10")
def test_qos_2_for_a_subscriber_that_never_reads_stays_out_of_memory(make_scene, version: int) -> None:
    scene: Scene = make_scene(log__tail_bytes=TAIL_BYTES)
    attacker = deaf(scene, "attacker", version)
    attacker.subscribe("attack/#", qos=2)
    friend = scene.open("friend")
    payload = bytes(1_000_000)
    for _ in range(10):
        friend.publish("attack/a", payload, 2)
    before = scene.broker.rss_bytes()
    for _ in range(150):
        friend.publish("attack/a", payload, 2)
    assert scene.broker.rss_bytes() - before < ROOM_BYTES


@pytest.mark.attack("A17")
@pytest.mark.req("S0.12")
def test_a_subscriber_that_reads_again_gets_everything_in_order(make_scene, version: int) -> None:
    scene: Scene = make_scene(log__tail_bytes=TAIL_BYTES)
    sleepy = scene.open("sleepy", version)
    sleepy.subscribe("attack/#", qos=1)
    count = flood(scene.open("friend"), 60_000_000, 5_000, 1)
    numbers = [int(sleepy.message().payload[:10]) for _ in range(count)]
    assert numbers == list(range(count))


@pytest.mark.attack("A17")
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_client_that_asks_and_never_reads_the_answers_is_ignored_after_a_while(make_scene, question: bytes) -> None:
    scene: Scene = make_scene(log__tail_bytes=TAIL_BYTES)
    attacker = deaf(scene, "attacker")
    before = scene.broker.rss_bytes()
    ask_until_ignored(scene, attacker, question)
    assert scene.broker.rss_bytes() - before < 2 * ROOM_BYTES
    scene.counted(REFUSED + "answers not read", 1)


@pytest.mark.attack("A17")
def test_a_client_that_reads_its_answers_at_last_gets_all_of_them_and_is_listened_to_again(scene: Scene) -> None:
    client = scene.open("client", keep_alive=0)
    question = publish_bytes(b"a", b"", 1, 7)
    sent = ask_until_ignored(scene, client, question)
    rest = question[sent % len(question) :] if sent % len(question) else b""
    threading.Thread(target=client.socket.sendall, args=(rest + b"\xc0\x00",), daemon=True).start()
    answers = b"\x40\x02\x00\x07" * -(-sent // len(question))
    client.socket.settimeout(PATIENCE_S)
    came = bytearray()
    while len(came) < len(answers) + len(b"\xd0\x00"):
        came += client.socket.recv(1 << 20)
    assert came.replace(b"\xd0\x00", b"", 1) == answers  # the pong may be ahead: acknowledgements wait for the log


@pytest.mark.attack("A17")
def test_a_client_that_never_reads_is_gone_when_its_keep_alive_is_over(make_scene) -> None:
    scene: Scene = make_scene(log__tail_bytes=TAIL_BYTES)
    descriptors = scene.descriptors()
    attacker = deaf(scene, "attacker", keep_alive=1)
    attacker.subscribe("attack/#")
    flood(scene.open("friend"), 20_000_000, 1_000, 0)
    scene.counted(REFUSED + "keep-alive", 1)
    scene.clients_back_to(connected=4, sessions=4)
    scene.descriptors_back_to(descriptors + 1)  # the friend's is left, though the attacker holds its end open


# ── byte by byte ──


def trickle(client: RawClient, data: bytes) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for i in range(len(data)):
        client.socket.send(data[i : i + 1])


@pytest.mark.attack("A18")
def test_a_publisher_that_sends_byte_by_byte_is_understood(scene: Scene, version: int) -> None:
    listener = scene.open("listener")
    listener.subscribe("attack/#", qos=2)
    slow = scene.open(None, version)
    trickle(slow, connect(client_id=b"slow", version=version))
    assert slow.expect(Connack).reason == 0
    payload = bytes(range(256)) * 4
    for qos in (0, 1):
        trickle(slow, publish_bytes(b"attack/a", payload, qos, version=version))
        assert listener.message().payload == payload
    slow.expect(Puback)
    trickle(slow, b"\xc0\x00")
    slow.expect(Pingresp)


@pytest.mark.attack("A18")
def test_many_byte_by_byte_publishers_hold_no_more_than_they_have_sent(scene: Scene) -> None:
    before = scene.broker.rss_bytes()
    slow = [scene.open(f"slow-{i}", keep_alive=0) for i in range(100)]
    packet = publish_bytes(b"attack/a", bytes(4_000_000))
    for client in slow:
        trickle(client, packet[:200])
    assert scene.broker.rss_bytes() - before < 16 * MIB
    for client in slow[:3]:
        client.send_bytes(packet[200:])
        client.send(Pingreq())
        client.expect(Pingresp)


@pytest.mark.attack("A18")
@pytest.mark.req("S1.2")
def test_a_connect_that_comes_too_slowly_is_given_up(make_scene) -> None:
    scene: Scene = make_scene(listen__connect_timeout_s=1)
    descriptors = scene.descriptors()
    slow = [scene.open() for _ in range(20)]
    packet = connect(client_id=b"x" * 500, version=4)
    deadline_s = time.monotonic() + PATIENCE_S
    left = set(slow)
    for i in range(len(packet) - 1):
        for client in list(left):
            try:
                client.socket.send(packet[i : i + 1])
            except ConnectionError:
                left.discard(client)
        if not left or time.monotonic() > deadline_s:
            break
        time.sleep(0.02)  # so slow are they
    assert not left
    scene.counted(REFUSED + "no CONNECT in time", 20)
    scene.descriptors_back_to(descriptors)
