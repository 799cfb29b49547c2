"""The DISCONNECT that says why arrives, whatever the client is still sending when the broker closes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import (
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Reason,
    Subscribe,
    decode,
    encode,
)

FLOOD_BYTES = 3 << 20
WAIT_S = 20.0


def last_word(raw: RawClient) -> Packet:
    """The last packet before an orderly end. A reset is none: it may have overtaken something."""
    packets: list[tuple[int, bytes]] = []
    raw.socket.settimeout(WAIT_S)
    while data := raw.socket.recv(1 << 18):
        packets = raw.stream.feed(data) or packets
    return decode(*packets[-1], 5, from_server=True)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)


def sockets(broker: BrokerProcess) -> int:
    links = []
    for entry in Path(f"/proc/{broker.pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    return sum(link.startswith("socket:") for link in links)


def pings(size: int) -> bytes:
    return encode(Pingreq(), 5) * (size // 2)


def publishes_beyond(receive_maximum: int) -> bytes:
    return b"".join(encode(Publish(b"t", b"", 2, packet_id=i), 5) for i in range(1, receive_maximum + 1_000))


@pytest.mark.parametrize(
    ("violation", "reason"),
    [
        (lambda: b"\x00\x00", Reason.MALFORMED_PACKET),
        (lambda: encode(Connect(5, b"again"), 5), Reason.PROTOCOL_ERROR),
        (lambda: publishes_beyond(8_192), Reason.RECEIVE_MAXIMUM_EXCEEDED),
    ],
    ids=["0x81", "0x82", "0x93"],
)
def test_a_client_that_floods_and_violates_is_told_why_every_time(client, unique, violation, reason):
    """[MQTT-4.13.1-1], 3.14"""
    bytes_sent = violation() + pings(FLOOD_BYTES)
    for i in range(50):
        raw = client(f"{unique}-{i}", 5)
        raw.socket.sendall(bytes_sent)
        last = last_word(raw)
        assert isinstance(last, Disconnect)
        assert last.reason == reason
        raw.close()


def test_a_client_that_is_not_listened_to_is_told_why_when_it_listens_again(client, unique):
    """3.14: it asks without reading answers until the broker reads no more of it, and then another takes its place."""
    deaf, other = client(unique, 5), client(unique + "-other", 5)
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    # The answer explains what may stand there, so it is far longer than the question: 300 bytes.
    questions = encode(Subscribe(1, (FilterRequest(b"$replay/nowhen/a"),)), 5) * 1_000
    for _ in range(60):
        deaf.send_bytes(questions)
        other.send(Pingreq())
        other.expect(Pingresp)
    client(unique, 5)
    last = last_word(deaf)
    assert isinstance(last, Disconnect)
    assert last.reason == Reason.SESSION_TAKEN_OVER


def test_a_client_that_sends_for_ever_is_cut_off(client, unique):
    raw = client(unique, 5)
    raw.send_bytes(b"\x00\x00")
    began_s = time.monotonic()
    block = pings(1 << 20)
    sent = 0
    with pytest.raises(ConnectionError):
        while time.monotonic() < began_s + WAIT_S:
            sent += raw.socket.send(block)
    assert sent < 64 << 20


def test_clients_that_never_close_are_cut_off_and_leave_nothing_behind(broker):
    before = sockets(broker)
    stubborn = [RawClient(broker.port, 5) for _ in range(20)]
    for number, raw in enumerate(stubborn):
        raw.connect(f"stubborn-{number}")
        raw.send_bytes(b"\x00\x00")
        assert [type(packet) for packet in raw.until_closed()] == [Disconnect]
    until(lambda: sockets(broker) == before)
    for raw in stubborn:
        raw.close()


def test_clients_that_never_close_do_not_hold_up_the_end_of_the_broker(start_broker):
    broker = start_broker("memory")
    stubborn = [RawClient(broker.port, 5) for _ in range(20)]
    for number, raw in enumerate(stubborn):
        raw.connect(f"stubborn-{number}")
    began_s = time.monotonic()
    assert broker.stop() == 0
    assert time.monotonic() - began_s < 4.0
    for raw in stubborn:
        assert [packet.reason for packet in raw.until_closed()] == [Reason.SERVER_SHUTTING_DOWN]
        raw.close()


def test_a_flooding_client_is_told_that_the_broker_ends(start_broker):
    broker = start_broker("memory")
    raw = RawClient(broker.port, 5)
    raw.connect("c")
    raw.socket.sendall(pings(1 << 16))
    assert broker.stop() == 0
    last = last_word(raw)
    assert isinstance(last, Disconnect)
    assert last.reason == Reason.SERVER_SHUTTING_DOWN
    raw.close()
