"""What is over leaves nothing behind, seen in the blocks of memory that the interpreter has in use."""

from __future__ import annotations

import socket

import pytest
from heart_kit import DAY, MIB, FaultyBroker, attach, read_exactly

from harness import RawClient
from packet_bytes import framed, subscribe_bytes, unsubscribe_bytes, utf8

CYCLES = 2000


def come_and_go(port: int, client_id: bytes, version: int, times: int) -> None:
    """Connect a session that is kept, and disconnect, again and again."""
    if version == 5:
        body = utf8(b"MQTT") + b"\x05\x00\x00\x00" + b"\x05\x11\x00\x01\x51\x80" + utf8(client_id)
    else:
        body = utf8(b"MQTT") + b"\x04\x00\x00\x00" + utf8(client_id)
    packet = framed(0x10, body)
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(packet)
            assert peer.recv(1000)[0] == 0x20
            peer.sendall(b"\xe0\x00")
            while peer.recv(100):
                pass


@pytest.mark.attack("C15", "A21")
def test_a_session_that_comes_and_goes_leaves_no_timer_behind(start_faulty, version):
    """A disconnect sets a time for the session's end, and the next connect takes it back: two thousand of both leave
    the broker with what it had, not with a timer for each that waits for a day."""
    broker: FaultyBroker = start_faulty("os")
    come_and_go(broker.port, b"lasting", version, 300)
    before = broker.blocks()
    come_and_go(broker.port, b"lasting", version, CYCLES)
    left = broker.blocks() - before
    assert left < CYCLES // 2, f"{left} blocks are left of {CYCLES} connections"


def replay_and_leave(client: RawClient, times: int, together: int = 100) -> None:
    filters = [b"$replay/earliest/nothing/%d" % i for i in range(together)]
    for _ in range(times // together):
        client.send_bytes(subscribe_bytes(filters) + unsubscribe_bytes(filters))
        read_exactly(client.socket, 2 + 2 + together + 4)


@pytest.mark.attack("C15")
@pytest.mark.parametrize("how", ["unsubscribed", "left with the connection"])
def test_replay_subscriptions_leave_nothing_behind(start_faulty, how):
    """Twenty thousand `$replay` subscriptions, made and dropped by clean sessions."""
    broker: FaultyBroker = start_faulty("os")

    def some(times: int) -> None:
        if how == "unsubscribed":
            with attach(broker, "client") as client:
                replay_and_leave(client, times)
            return
        filters = [b"$replay/earliest/nothing/%d" % i for i in range(100)]
        for _ in range(times // 100):
            client = attach(broker, "client")
            client.send_bytes(subscribe_bytes(filters))
            read_exactly(client.socket, 2 + 2 + 100)
            client.disconnect()

    some(4000)
    before, rss = broker.blocks(), broker.rss_bytes()
    some(20_000)
    left = broker.blocks() - before
    assert left < 20_000, f"{left} blocks are left of 20000 subscriptions"
    assert broker.rss_bytes() - rss < 8 * MIB


@pytest.mark.attack("C15")
def test_sessions_that_end_with_replay_subscriptions_leave_nothing_behind(start_faulty):
    """The same with sessions that are kept, and then replaced by a clean start."""
    broker: FaultyBroker = start_faulty("os")
    filters = [b"$replay/earliest/nothing/%d" % i for i in range(50)]

    def some(times: int) -> None:
        for _ in range(times // 50):
            client = attach(broker, "client", 5, properties=DAY)
            client.subscribe(*[f.decode() for f in filters], qos=1)
            client.close()

    some(2000)
    before = broker.blocks()
    some(10_000)
    left = broker.blocks() - before
    assert left < 10_000, f"{left} blocks are left of 10000 subscriptions"
