"""The last will: a publish like any other, sent when a connection ends without a DISCONNECT."""

from __future__ import annotations

import os
import signal
import socket
import struct

import pytest
from stored import KEPT, attach, attach_kept, eventually, stored_payloads

from harness import Closed
from tidegate.wire import Connect, Disconnect, Properties, Will

NOW = Properties()


def will(
    topic: str, payload: bytes = b"dead", qos: int = 1, retain: bool = False, properties: Properties = NOW
) -> Will:
    return Will(topic.encode(), payload, qos, retain, properties)


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_broken_connection_sends_the_will(client, unique, version, qos):
    sub = client(unique + "s", 5)
    sub.subscribe(unique, qos=2)
    client(unique, version, will=will(unique, b"dead", qos)).close()
    got = sub.message()
    assert (got.topic.decode(), got.payload, got.qos, got.retain) == (unique, b"dead", qos, False)


def reset(raw):
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def with_will_reason(raw):
    raw.send(Disconnect(0x04))
    with pytest.raises(Closed):
        raw.receive()


ENDINGS = {
    "a reset": reset,
    "a protocol error": lambda raw: (raw.send(Connect(5, b"again")), raw.until_closed()),
    "bytes that are no packet": lambda raw: (raw.send_bytes(b"\x00\xff\xff\xff\xff"), raw.until_closed()),
    "half a packet": lambda raw: (raw.send_bytes(b"\x30\x7f\x00"), raw.close()),
    "DISCONNECT with will": with_will_reason,
}


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_will_is_sent_after(client, unique, ending):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    ENDINGS[ending](client(unique, 5, will=will(unique)))
    assert sub.message().payload == b"dead"


@pytest.mark.req("S0.20")
def test_silence_beyond_the_keep_alive_sends_the_will(client, unique):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    silent = client(unique, 5, will=will(unique), keep_alive=1)
    assert sub.message().payload == b"dead"
    assert silent.expect(Disconnect).reason == 0x8D


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", [4, 5])
def test_a_disconnect_takes_the_will_back(client, unique, version):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    client(unique, version, will=will(unique)).disconnect()
    sub.nothing()


@pytest.mark.req("S0.20")
def test_a_takeover_sends_the_will_of_the_connection_that_was_taken_over(client, unique):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    client(unique, 5, will=will(unique, b"of the first"))
    second = client(unique, 5, will=will(unique, b"of the second"))
    assert sub.message().payload == b"of the first"
    second.disconnect()
    sub.nothing()


# ── through the publish flow ──


@pytest.mark.req("S0.20")
def test_the_will_is_stored_and_retained_and_reaches_absent_sessions(start_broker):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("w", qos=1)
    sub.disconnect()
    attach(broker, "c", 5, will=will("w", b"dead", 1, retain=True)).close()
    eventually(lambda: stored_payloads(broker.data, b"w") == [b"dead"])
    sub = attach_kept(broker, "s")
    assert sub.message().payload == b"dead"
    late = attach(broker, "late")
    late.subscribe("w")
    assert (got := late.message()).payload == b"dead"
    assert got.retain


@pytest.mark.req("S0.20")
def test_the_will_carries_its_properties(client, unique):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    given = Properties(content_type=b"t", response_topic=b"r", correlation_data=b"\0c", user=((b"n", b"v"),))
    client(unique, 5, will=will(unique, properties=given)).close()
    got = sub.message().properties
    assert (got.content_type, got.response_topic, got.correlation_data) == (b"t", b"r", b"\0c")
    assert got.user == ((b"n", b"v"),)
    assert got.will_delay is None


# ── the delay ──


@pytest.mark.req("S0.20")
def test_a_delayed_will_is_not_sent_if_the_client_is_back_in_time(client, unique):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    delayed = will(unique, properties=Properties(will_delay=1))
    client(unique, 5, clean=False, properties=KEPT, will=delayed).close()
    back = client(unique, 5, clean=False, properties=KEPT)
    sub.nothing(2.5)
    back.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S0.20")
def test_a_delayed_will_is_sent_when_its_time_has_come(client, unique):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    delayed = will(unique, properties=Properties(will_delay=1))
    client(unique, 5, clean=False, properties=KEPT, will=delayed).close()
    assert sub.message().payload == b"dead"


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("ending", ["the session expires", "a clean start ends the session", "there is no session"])
def test_a_delayed_will_does_not_wait_beyond_the_session(client, unique, ending):
    sub = client(unique + "s", 5)
    sub.subscribe(unique)
    delayed = will(unique, properties=Properties(will_delay=3000))
    expiry_s = {"the session expires": 1, "a clean start ends the session": 3000, "there is no session": 0}[ending]
    client(unique, 5, properties=Properties(session_expiry=expiry_s), will=delayed).close()
    if ending.startswith("a clean start"):
        client(unique, 5, clean=True)
    assert sub.message().payload == b"dead"


# ── when the whole node dies ──


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("kept", [False, True], ids=["clean session", "persistent session"])
def test_the_wills_of_a_dead_node_s_clients_are_sent_when_it_is_back(start_broker, version, qos, kept):
    broker = start_broker("fsync")
    sub = attach_kept(broker, "s")
    sub.subscribe("w/#", qos=2)
    properties = KEPT if kept and version == 5 else Properties()
    left = will("w/c", b"dead", qos, qos == 1)
    connected = attach(broker, "c", version, clean=not kept, properties=properties, will=left)
    attach(broker, "d", version, will=will("w/d", b"left in peace")).disconnect()
    broker.kill()
    connected.close()
    broker.start()
    assert eventually(lambda: stored_payloads(broker.data)) == [b"dead"]
    if qos:  # QoS 0 is not owed to a session that was away
        assert attach_kept(broker, "s").message().payload == b"dead"
    if qos == 1:
        late = attach(broker, "late")
        late.subscribe("w/c")
        assert late.message().retain


@pytest.mark.req("S0.20")
def test_a_node_that_dies_twice_sends_a_will_once(start_broker):
    broker = start_broker("fsync")
    connected = attach_kept(broker, "c", will=will("w"))
    for _ in range(3):
        broker.kill()
        connected.close()
        broker.start()
        assert eventually(lambda: stored_payloads(broker.data)) == [b"dead"]


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_delayed_will_outlives_the_node_and_is_not_sent_if_the_client_is_back_in_time(start_broker, how):
    broker = start_broker("fsync")
    back = attach_kept(broker, "back", will=will("w", b"of one that returned", properties=Properties(will_delay=3000)))
    gone = attach_kept(broker, "gone", will=will("w", b"of one that stays away", properties=Properties(will_delay=1)))
    if how == signal.SIGTERM:
        broker.stop()
    else:
        os.kill(broker.pid, how)
        broker.process.wait()
    for raw in (back, gone):
        raw.until_closed()
    broker.start()
    attach_kept(broker, "back").disconnect()
    assert eventually(lambda: stored_payloads(broker.data)) == [b"of one that stays away"]


@pytest.mark.req("S0.20")
def test_a_will_that_was_sent_before_the_crash_is_not_sent_again(start_broker):
    broker = start_broker("fsync")
    attach_kept(broker, "c", will=will("w", b"once")).close()
    eventually(lambda: stored_payloads(broker.data) == [b"once"])
    attach(broker, "p").publish("x", b"marker", 1)
    broker.kill()
    broker.start()
    attach(broker, "p").publish("x", b"marker", 1)
    assert stored_payloads(broker.data, b"w") == [b"once"]
