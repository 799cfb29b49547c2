"""A new connection: a state of its own, a deadline for its CONNECT, a session found or made, and the answer."""

from __future__ import annotations

import socket
import struct

import pytest
from stored import KEPT, attach, attach_kept, eventually, stored_payloads, stored_session

from harness import Closed, RawClient
from tidegate.wire import (
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Pingreq,
    Properties,
    Puback,
    Publish,
    Pubrel,
    Suback,
    Subscribe,
    Unsubscribe,
    encode,
)

# ── S1.1 ──


@pytest.mark.req("S1.1")
def test_half_a_packet_on_one_connection_is_nothing_to_another(client, unique):
    one, other = client(unique + "1"), client(unique + "2")
    sub = client(unique + "s")
    sub.subscribe(unique, qos=1)
    packet = encode(Publish(unique.encode(), b"in two parts", 1, False, False, 5), 4)
    one.send_bytes(packet[:7])
    assert other.publish(unique, b"whole", 1, packet_id=5) == 0
    assert sub.message().payload == b"whole"
    one.send_bytes(packet[7:])
    assert one.expect(Puback).packet_id == 5
    assert sub.message().payload == b"in two parts"


@pytest.mark.req("S1.1")
def test_packet_ids_and_aliases_and_versions_belong_to_their_connection(client, unique):
    sub = client(unique + "s", 5)
    sub.subscribe(unique + "/#", qos=2)
    a, b, old = client(unique + "a", 5), client(unique + "b", 5), client(unique + "o", 3)
    a.publish(unique + "/a", b"", 2, packet_id=1, wait=False, properties=Properties(topic_alias=1))
    b.publish(unique + "/b", b"", 2, packet_id=1, wait=False, properties=Properties(topic_alias=1))
    old.publish(unique + "/o", b"", 2, packet_id=1, wait=False)
    for raw in (a, b, old):
        assert raw.receive().packet_id == 1
    a.publish("", b"", 1, properties=Properties(topic_alias=1))
    b.publish("", b"", 1, properties=Properties(topic_alias=1))
    topics = sorted(sub.message().topic.decode().removeprefix(unique) for _ in range(5))
    assert topics == ["/a", "/a", "/b", "/b", "/o"]


@pytest.mark.req("S1.1")
def test_a_connection_that_breaks_the_rules_ends_alone(client, unique):
    good, bad = client(unique + "g", 5), client(unique + "b", 5)
    good.subscribe(unique)
    bad.send_bytes(b"\xf0\x03\x00\xff\xff")
    bad.until_closed()
    good.publish(unique, b"still here")
    assert good.message().payload == b"still here"


# ── S1.2 ──

TOO_EARLY = {
    "PUBLISH": lambda topic: Publish(topic, b"too early", 1, False, False, 1),
    "QoS 0 PUBLISH": lambda topic: Publish(topic, b"too early", 0),
    "retained PUBLISH": lambda topic: Publish(topic, b"too early", 1, True, False, 1),
    "SUBSCRIBE": lambda topic: Subscribe(1, (FilterRequest(topic, 1),)),
    "UNSUBSCRIBE": lambda topic: Unsubscribe(1, (topic,)),
    "PUBACK": lambda topic: Puback(1),
    "PUBREL": lambda topic: Pubrel(1),
    "PINGREQ": lambda topic: Pingreq(),
    "DISCONNECT": lambda topic: Disconnect(),
}


@pytest.mark.req("S1.2")
@pytest.mark.attack("A2")
@pytest.mark.parametrize("kind", TOO_EARLY)
def test_nothing_but_connect_is_accepted_first(client, unique, kind):
    watcher = client(unique + "w", 5)
    watcher.subscribe(unique, qos=1)
    early = client(None)
    early.send_bytes(encode(TOO_EARLY[kind](unique.encode()), 4) + encode(Connect(4, unique.encode()), 4))
    assert early.until_closed() == []
    watcher.publish(unique, b"the first that comes", 1)
    assert watcher.message().payload == b"the first that comes"


@pytest.mark.req("S1.2")
def test_what_follows_connect_in_the_same_bytes_is_accepted(client, unique):
    raw = client(None)
    connect = Connect(4, unique.encode(), True, 60)
    subscribe = Subscribe(1, (FilterRequest(unique.encode(), 0),))
    raw.send_bytes(b"".join(encode(p, 4) for p in (connect, subscribe, Publish(unique.encode(), b"at once", 0))))
    assert isinstance(raw.receive(), Connack)
    raw.amid(Suback)
    assert raw.message().payload == b"at once"


@pytest.mark.req("S1.2")
@pytest.mark.parametrize("first", [b"", encode(Connect(4, b"half"), 4)[:9]], ids=["silence", "half a CONNECT"])
def test_a_connection_that_does_not_register_in_time_is_closed(start_broker, first):
    broker = start_broker(listen__connect_timeout_s=1)
    registered = attach(broker, "registered")
    late = RawClient(broker.port)
    late.send_bytes(first)
    assert late.until_closed() == []
    registered.send(Pingreq())
    registered.receive()


@pytest.mark.req("S1.2")
def test_dripping_bytes_do_not_extend_the_deadline(start_broker):
    broker = start_broker(listen__connect_timeout_s=1)
    slow = RawClient(broker.port)
    data = encode(Connect(4, b"x" * 1000), 4)
    sent = 0
    with pytest.raises((ConnectionError, Closed)):
        for byte in data:
            slow.send_bytes(bytes((byte,)))
            sent += 1
            try:
                slow.receive(0.05)
            except TimeoutError:
                continue
    assert sent < len(data)


# ── S1.4, S1.5 ──


@pytest.mark.req("S1.4", "S1.5")
@pytest.mark.parametrize("version", [4, 5])
def test_a_session_is_created_once_and_found_ever_after(client, unique, version):
    properties = KEPT if version == 5 else Properties()
    found = []
    for _ in range(3):
        raw = client(unique, version, clean=False, properties=properties)
        found.append(raw.connack.session_present)
        raw.disconnect()
    assert found == [False, True, True]


@pytest.mark.req("S1.4")
def test_the_session_found_is_the_client_s_own(client, unique):
    for name in ("a", "b"):
        raw = client(unique + name, 5, clean=False, properties=KEPT)
        raw.subscribe(f"{unique}/{name}", qos=1)
        raw.disconnect()
    pub = client(unique + "p")
    for name in ("a", "b"):
        pub.publish(f"{unique}/{name}", name.encode(), 1)
    for name in ("b", "a"):
        raw = client(unique + name, 5, clean=False, properties=KEPT)
        assert raw.message().payload == name.encode()
        raw.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S1.5")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_every_accepted_connect_is_acknowledged_with_success(client, unique, version):
    raw = client(unique, version)
    assert (raw.connack.reason, raw.connack.session_present) == (0, False)


@pytest.mark.req("S1.5")
def test_the_acknowledgement_states_what_the_broker_offers_and_the_assigned_id(client):
    offers = client("", 5).connack.properties
    assert offers.assigned_client_id
    assert offers.receive_maximum >= 1
    assert offers.maximum_packet_size >= 1 << 20
    assert (offers.retain_available, offers.wildcard_available, offers.shared_available) == (True, True, True)


# ── S1.12 ──


def vanish(raw: RawClient) -> None:
    """Be gone with a reset, so that nothing more can be delivered to it."""
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.req("S1.12")
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_client_that_is_gone_before_its_suback_keeps_session_and_subscription(start_broker, durability):
    broker = start_broker(durability)
    raw = attach_kept(broker, "s")
    raw.send(Subscribe(1, (FilterRequest(b"a", 1),)))
    raw.socket.shutdown(socket.SHUT_WR)
    raw.until_closed()
    attach(broker, "p").publish("a", b"kept", 1)
    back = attach_kept(broker, "s")
    assert back.connack.session_present
    assert back.message().payload == b"kept"


@pytest.mark.req("S1.12")
def test_a_publisher_that_is_gone_before_its_puback_has_published(broker):
    raw = attach_kept(broker, "p")
    raw.publish("a", b"last words", 1, wait=False)
    raw.publish("a", b"very last words", 2, packet_id=7, wait=False)
    raw.socket.shutdown(socket.SHUT_WR)
    raw.until_closed()
    assert eventually(lambda: stored_payloads(broker.data, b"a")) == [b"last words", b"very last words"]
    back = attach_kept(broker, "p")
    assert back.connack.session_present
    back.publish("a", b"very last words", 2, packet_id=7, dup=True)  # its state is known: not stored again
    assert len(stored_payloads(broker.data, b"a")) == 2


@pytest.mark.req("S1.12")
def test_an_answer_that_finds_its_connection_gone_is_logged(start_broker):
    broker = start_broker("fsync")
    raw = attach_kept(broker, "leaver")
    packets = [Publish(b"a", b"x", 1, False, False, 1), Disconnect()]
    raw.send_bytes(b"".join(encode(packet, 5) for packet in packets))
    raw.until_closed()
    line = eventually(lambda: [line for line in broker.log().splitlines() if "answer.undeliverable" in line])[0]
    assert "client=leaver" in line
    assert attach_kept(broker, "leaver").connack.session_present


@pytest.mark.req("S1.12")
def test_messages_to_a_client_that_vanished_wait_for_it(broker):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    pub = attach(broker, "p")
    pub.publish("a", b"0", 1, wait=False)
    vanish(sub)
    for i in range(1, 20):
        pub.publish("a", b"%d" % i, 1, wait=False)
    for _ in range(20):
        pub.expect(Puback)
    assert sorted(int(p) for p in attach_kept(broker, "s").payloads(20)) == list(range(20))


@pytest.mark.req("S1.12")
def test_a_session_whose_client_does_not_return_expires(broker):
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=1))
    sub.subscribe("a", qos=1)
    vanish(sub)
    eventually(lambda: stored_session(broker.data, "s") is None)
    assert attach(broker, "p", 5).publish("a", b"", 1) == 0x10
    assert not attach_kept(broker, "s").connack.session_present
