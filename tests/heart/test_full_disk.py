"""While the disk is full: nothing piles up, what needs no record needs no disk, and it ends by itself."""

from __future__ import annotations

import socket
import time

import pytest
from heart_kit import ATTEMPTS, DAY, FaultyBroker, NoRoom, attach, attach_kept, eventually

from harness import BrokerProcess
from packet_bytes import framed, utf8
from tidegate.wire import Publish

CONNECTS = 1500
PART = 100
RATIO = 3.0
WILL = bytes(12_000)  # so that what is encoded anew shows


def connects(port: int, names: list[bytes]) -> None:
    """Connect each in turn as a session that is kept, with a will, wait for the answer, whatever it is, and leave."""
    for name in names:
        kept = b"\x05\x11\x00\x01\x51\x80"
        body = utf8(b"MQTT") + b"\x05\x04\x00\x00" + kept + utf8(name) + b"\0" + utf8(b"will") + utf8(WILL)
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.settimeout(20)
            peer.sendall(framed(0x10, body))
            assert peer.recv(1000)[0] == 0x20
            peer.sendall(b"\xe0\x00")
            while peer.recv(100):
                pass


def taken_s(port: int, names: list[bytes]) -> list[float]:
    """How long each part of them took."""
    parts = []
    for start in range(0, len(names), PART):
        began_s = time.monotonic()
        connects(port, names[start : start + PART])
        parts.append(time.monotonic() - began_s)
    return parts


@pytest.mark.parametrize("who", ["one session", "ever new sessions"])
def test_connects_do_not_become_slower_the_longer_the_disk_is_full(start_broker, who):
    """State changes that cannot be written are kept within bounds and not encoded anew each tick: the last of 1,500
    connects are answered as quickly as the first. (Accepted or refused: but answered.)"""
    broker: BrokerProcess = start_broker("fsync")
    seen: list[str] = []
    for attempt in range(ATTEMPTS):
        names = [b"one" if who == "one session" else b"%d-%d" % (attempt, i) for i in range(CONNECTS)]
        with NoRoom(broker):
            connects(broker.port, names[:20])
            parts = taken_s(broker.port, names)
        if min(parts[-3:]) <= RATIO * max(parts[:2]):
            return
        seen.append(", ".join(f"{part:.2f} s" for part in parts))
        if min(parts[-3:]) > 2 * RATIO * max(parts[:2]):
            break  # no noise does that
        eventually(lambda: attach(broker, "after", 5).publish("a", b"x", 1) < 0x80)
    raise AssertionError(f"each {PART} connects took longer:\n" + "\n".join(seen))


def test_connects_while_the_disk_is_full_do_not_pile_up(start_faulty):
    """A session that comes and goes changes one record: how often it does leaves nothing in memory."""
    broker: FaultyBroker = start_faulty("fsync")
    attach_kept(broker, "one").disconnect()
    with NoRoom(broker):
        connects(broker.port, [b"one"] * 200)
        before = broker.blocks()
        connects(broker.port, [b"one"] * 1000)
        left = broker.blocks() - before
    assert left < 1000, f"{left} blocks are left of 1000 connections"


def test_monitoring_goes_on_while_the_disk_is_full(start_broker, version):
    """A clean session's subscription needs no record, so it needs no disk: `$SYS` is there when it is needed most."""
    broker: BrokerProcess = start_broker("fsync", sys__interval_s=1)
    with NoRoom(broker):
        watcher = attach(broker, "watcher", version)
        assert watcher.subscribe("$SYS/#").reasons == (0,)
        uptimes = set()
        while len(uptimes) < 3:
            message = watcher.amid(Publish)
            if message.topic == b"$SYS/broker/uptime":
                uptimes.add(message.payload)


@pytest.mark.attack("C5")
def test_a_clean_session_subscribes_and_unsubscribes_while_the_disk_is_full(start_broker, version):
    """The same for plain topics; when there is room again, messages come, without anybody's doing."""
    broker: BrokerProcess = start_broker("fsync")
    with NoRoom(broker):
        client = attach(broker, "client", version)
        assert client.subscribe("a/#", "b", qos=1).reasons == (1, 1)
        client.unsubscribe("b")
    publisher = attach(broker, "publisher", 5)
    eventually(lambda: publisher.publish("a/b", b"room again", 1) < 0x80)
    assert client.message().payload == b"room again"
    client.nothing()


@pytest.mark.attack("C5")
def test_what_needs_a_record_is_answered_in_the_end(start_broker):
    """A kept session's subscription is refused or waits, but is not forgotten; afterwards it works."""
    broker: BrokerProcess = start_broker("fsync")
    client = attach_kept(broker, "client")
    client.subscribe("before", qos=1)
    with NoRoom(broker):
        publisher = attach(broker, "publisher", 5)
        assert publisher.publish("before", bytes(5000), 1) == 0x97
    eventually(lambda: publisher.publish("before", b"room again", 1) < 0x80)
    assert client.message().payload == b"room again"
    assert client.subscribe("after", qos=1).reasons == (1,)
    client.disconnect()
    publisher.publish("after", b"while away", 1)
    broker.kill()
    broker.start()
    client = attach_kept(broker, "client", properties=DAY)
    assert client.message().payload == b"while away"


def test_a_full_disk_is_reported_as_more_than_news(start_broker):
    """'No space left' is a warning or an error in the log, not an INFO line among others."""
    broker: BrokerProcess = start_broker("fsync")
    with NoRoom(broker):
        lines = eventually(lambda: [line for line in broker.log().splitlines() if "log.refused" in line])
    assert any(level in lines[0] for level in ("WARNING", "ERROR", "CRITICAL")), lines[0]
