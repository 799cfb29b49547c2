"""Rules of the protocol that hold whatever way a packet takes: the same answer, the same messages, the same end."""

from __future__ import annotations

import pytest
from heart_kit import FaultyBroker, attach, attach_kept, eventually, publish_all, sync

from harness import BrokerProcess, RawClient
from packet_bytes import framed, publish_bytes, subscribe_bytes, unsubscribe_bytes, utf8
from tidegate.wire import Connack, Disconnect, Packet, Pingreq, Pingresp, Properties, Puback, Publish, Unsuback, encode
from tidegate.wire.packets import Connect

MALFORMED, PROTOCOL_ERROR, RECEIVE_MAXIMUM_EXCEEDED = 0x81, 0x82, 0x93


def ends_with(client: RawClient, reason: int) -> list[Packet]:
    """The connection ends, for a v5 client with a DISCONNECT that says why: what came before."""
    try:
        said = client.until_closed(3)
    except TimeoutError:
        raise AssertionError("the connection goes on") from None
    if client.version < 5:
        return said
    assert said and isinstance(said[-1], Disconnect), f"expected a DISCONNECT at the end, got {said[-1:]}"
    assert said[-1].reason == reason
    return said[:-1]


def only(listener: RawClient, *payloads: bytes) -> None:
    """The listener gets these and nothing else."""
    got: list[bytes] = []
    try:
        while len(got) < len(payloads):
            got.append(listener.message(3).payload)
    except TimeoutError:
        pass
    assert got == list(payloads)
    listener.nothing(0.1)


# ── after DISCONNECT ──


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("before", [0, 2], ids=["alone", "behind publishes"])
def test_a_publish_behind_a_disconnect_in_the_same_segment_does_not_happen(shared_broker, unique, version, qos, before):
    """DISCONNECT is the last packet of a connection [MQTT-3.14.4-1]: what follows is not processed."""
    listener = attach(shared_broker, unique + "-listener")
    listener.subscribe(unique, qos=2)
    client = attach(shared_broker, unique, version)
    valid = b"".join(publish_bytes(unique.encode(), b"before", qos, i + 1, version=version) for i in range(before))
    late = b"".join(publish_bytes(unique.encode(), b"late", qos, i + 11, version=version) for i in range(20))
    client.send_bytes(valid + b"\xe0\x00" + late)
    client.until_closed()
    only(listener, *[b"before"] * before)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_publish_behind_a_packet_that_ends_the_connection_does_not_happen(shared_broker, unique, version, qos):
    """The same for what follows a packet that is refused: nothing behind it is looked at."""
    listener = attach(shared_broker, unique + "-listener")
    listener.subscribe(unique, qos=2)
    client = attach(shared_broker, unique, version)
    late = b"".join(publish_bytes(unique.encode(), b"late", qos, i + 11, version=version) for i in range(20))
    client.send_bytes(framed(0x60, b"\0\1") + late)  # PUBREL with wrong flags
    ends_with(client, MALFORMED)
    only(listener)


# ── remaining length ──


def overlong(packet: bytes, by: int) -> bytes:
    """The same packet with its remaining length in `by` more bytes than it takes."""
    size = packet[1]
    assert size < 0x80
    return packet[:1] + bytes((size | 0x80,)) + b"\x80" * (by - 1) + b"\0" + packet[2:]


@pytest.mark.parametrize("by", [1, 2])
@pytest.mark.parametrize("place", ["first", "within a run"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_remaining_length_in_more_bytes_than_needed_goes_to_nobody(shared_broker, unique, version, qos, place, by):
    """The length must be in the fewest bytes [MQTT-1.5.5-1]: such a packet ends the connection, and its bytes are
    never handed on, though the ones before it are."""
    listener = attach(shared_broker, unique + "-listener")
    listener.subscribe(unique, qos=0)
    client = attach(shared_broker, unique, version)
    count = 10 if place == "within a run" else 0
    packets = [publish_bytes(unique.encode(), b"good", qos, i + 1, version=version) for i in range(count)]
    packets.append(overlong(publish_bytes(unique.encode(), b"long", qos, 50, version=version), by))
    packets += [publish_bytes(unique.encode(), b"late", qos, 60 + i, version=version) for i in range(count)]
    client.send_bytes(b"".join(packets))
    ends_with(client, MALFORMED)
    only(listener, *[b"good"] * count)


def test_an_overlong_remaining_length_of_other_packets_is_malformed_too(broker):
    """Not only PUBLISH: PINGREQ, PUBACK and SUBSCRIBE as well [MQTT-1.5.5-1]."""
    for packet in (b"\xc0\x00", b"\x40\x02\x00\x01", framed(0x82, b"\0\1\0" + utf8(b"a") + b"\0")):
        client = attach(broker, "client", 5)
        client.send_bytes(overlong(packet, 1))
        ends_with(client, MALFORMED)


# ── UNSUBSCRIBE ──


@pytest.mark.parametrize("qos", [0, 1])
def test_no_retained_message_comes_after_unsuback(broker, qos):
    """UNSUBACK ends a subscription: nothing new is sent for it, retained messages included [MQTT-3.10.4-2]."""
    publish_all(attach(broker, "publisher"), [(b"kept/%d" % i, b"x") for i in range(5000)], 1, retain=True)
    client = attach(broker, "client")
    client.send_bytes(subscribe_bytes([b"kept/#"], 1, qos) + unsubscribe_bytes([b"kept/#"], 2))
    client.send(Pingreq())
    came: list[Packet] = []
    while sum(isinstance(packet, Unsuback | Pingresp) for packet in came) < 2:
        came.append(client.receive())
    sync(client)
    came += client.waiting
    over = next(i for i, packet in enumerate(came) if isinstance(packet, Unsuback))
    late = [packet for packet in came[over:] if isinstance(packet, Publish)]
    assert not late, f"{len(late)} retained messages after UNSUBACK"


@pytest.mark.parametrize("qos", [0, 1])
def test_no_retained_message_comes_after_an_unsuback_in_the_middle_of_them(broker, qos):
    """The same when some have come already, and the rest waits for the window or the next turn."""
    publish_all(attach(broker, "publisher"), [(b"kept/%d" % i, b"x") for i in range(5000)], 1, retain=True)
    window = Properties(receive_maximum=100)
    client = attach(broker, "client", 5, properties=window)
    client.subscribe("kept/#", qos=qos)
    first = client.amid(Publish)
    client.unsubscribe("kept/#")
    came = [packet for packet in client.waiting if isinstance(packet, Publish)]
    client.waiting.clear()
    if qos:
        for packet in (first, *came):
            client.send(Puback(packet.packet_id))
    client.nothing()


# ── packet id 0 ──


@pytest.mark.parametrize("topics", ["one topic", "many topics"])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_came_before_a_packet_id_of_0_is_stored_and_delivered(shared_broker, unique, version, qos, topics):
    """A packet id of 0 is a protocol error [MQTT-2.2.1-2] that ends the connection. What came before it in the same
    segment was valid: it is stored and delivered, whatever else stood there; what comes behind it is not."""
    listener = attach(shared_broker, unique + "-listener", 5)
    listener.subscribe(unique + "/#", qos=2)
    client = attach(shared_broker, unique, version)
    levels = [b"/b"] * 21 if topics == "one topic" else [b"/%d" % i for i in range(21)]
    names = [unique.encode() + level for level in levels]
    pids = [*range(1, 11), 0, *range(11, 21)]
    packets = [publish_bytes(t, b"%02d" % pid, qos, pid, version=version) for t, pid in zip(names, pids, strict=True)]
    client.send_bytes(b"".join(packets))
    ends_with(client, PROTOCOL_ERROR)
    only(listener, *[b"%02d" % i for i in range(1, 11)])
    historian = attach(shared_broker, unique + "-historian")
    historian.subscribe(f"$replay/earliest/{unique}/#", qos=1)
    only(historian, *[b"%02d" % i for i in range(1, 11)])


# ── CONNACK ──


@pytest.mark.req("S0.18")
def test_the_connack_of_a_clean_start_waits_until_the_end_of_the_old_session_is_stored(start_faulty, version):
    """CONNACK says that there is no session any more: so it must be stored that the old one has ended, or after a
    crash it would be back."""
    broker: FaultyBroker = start_faulty("fsync")
    old = attach_kept(broker, "client", version)
    old.subscribe("a", qos=1)
    old.disconnect()
    client = RawClient(broker.port, version)
    with broker.syncs_held():
        client.send_bytes(encode(Connect(version, b"client", True, 0), version))
        with pytest.raises(TimeoutError):
            answer = client.receive(0.5)
            raise AssertionError(f"answered before it was stored: {answer}")
    assert client.expect(Connack).reason == 0
    broker.kill()
    broker.start()
    again = attach_kept(broker, "client", version)
    # The clean session of 3.1.1 and of v5 without an expiry ended with its connection.
    assert again.connack is not None and not again.connack.session_present


# ── receive maximum ──


@pytest.mark.parametrize("qos", [1, 2])
def test_more_publishes_than_the_receive_maximum_end_the_connection(start_faulty, qos):
    """A client may have only so many unacknowledged publishes under way as the CONNACK said, QoS 1 as well as 2
    [MQTT-3.3.4-9]; the one above ends the connection with 0x93."""
    broker: FaultyBroker = start_faulty("fsync", mqtt__receive_maximum=10)
    client = attach(broker, "client", 5)
    assert client.connack is not None and client.connack.properties.receive_maximum == 10
    with broker.syncs_held():
        client.send_bytes(b"".join(publish_bytes(b"a", b"x", qos, i, version=5) for i in range(1, 11)))
        client.nothing(0.1)
        client.send_bytes(publish_bytes(b"a", b"x", qos, 11, version=5))
        ends_with(client, RECEIVE_MAXIMUM_EXCEEDED)


def test_acknowledged_publishes_make_room_for_more(start_faulty):
    """The receive maximum counts what is unacknowledged: a client that waits can go on for ever."""
    broker: FaultyBroker = start_faulty("fsync", mqtt__receive_maximum=10)
    client = attach(broker, "client", 5)
    for _ in range(5):
        client.send_bytes(b"".join(publish_bytes(b"a", b"x", 1, i, version=5) for i in range(1, 11)))
        for _ in range(10):
            client.expect(Puback)
    client.nothing(0.1)


# ── retained messages and sessions that come back ──


@pytest.mark.req("S0.31")
@pytest.mark.parametrize("how", ["reconnect", "stop", "kill"])
def test_retained_messages_not_yet_handed_over_come_when_the_session_returns(start_broker, how):
    """A retained message that was due at SUBSCRIBE is owed like any other: when the session leaves with some of them
    outstanding, it gets them when it is back, also after a restart."""
    broker: BrokerProcess = start_broker("fsync")
    topics = {b"kept/%d" % i for i in range(50)}
    publish_all(attach(broker, "publisher"), [(topic, b"x") for topic in sorted(topics)], 1, retain=True)
    narrow = Properties(session_expiry=86_400, receive_maximum=5)
    client = attach_kept(broker, "client", properties=narrow)
    client.subscribe("kept/#", qos=1)
    got = {client.message().topic for _ in range(10)}
    sync(client)
    client.disconnect()
    if how != "reconnect":
        getattr(broker, how)()
        broker.start()
    client = attach_kept(broker, "client", properties=narrow)
    assert client.connack is not None and client.connack.session_present
    try:
        while got != topics:
            message = client.message(5)
            assert message.retain
            got.add(message.topic)
    except TimeoutError:
        raise AssertionError(f"{len(topics - got)} of {len(topics)} retained messages never came") from None
    client.nothing()


@pytest.mark.req("S0.31")
def test_what_was_unsubscribed_meanwhile_is_not_handed_over(start_broker):
    """Retained messages that are owed go with the subscription that they are owed to."""
    broker: BrokerProcess = start_broker()
    publish_all(attach(broker, "publisher"), [(b"kept/%d" % i, b"x") for i in range(50)], 1, retain=True)
    narrow = Properties(session_expiry=86_400, receive_maximum=5)
    client = attach_kept(broker, "client", properties=narrow)
    client.subscribe("kept/#", qos=1)
    first = [client.message(acknowledge=False) for _ in range(5)]
    client.unsubscribe("kept/#")
    client.disconnect()
    client = attach_kept(broker, "client", properties=narrow)
    again = [client.message().topic for _ in first]  # were under way, and are finished [MQTT-3.10.4-3]
    assert again == [message.topic for message in first]
    client.nothing()


# ── numbers ──


def stored(broker: BrokerProcess) -> int:
    with attach(broker) as watcher:
        watcher.subscribe("$SYS/broker/messages/stored")
        return int(watcher.message().payload)


def test_messages_stored_counts_messages_also_after_a_crash(start_broker):
    """`$SYS/broker/messages/stored` is a number of messages, not of positions, which jump at a crash."""
    broker: BrokerProcess = start_broker(sys__interval_s=1)
    for so_far in (0, 1000):
        publish_all(attach(broker, "publisher"), [(b"a", b"x")] * 1000)
        if not so_far:
            broker.kill()
            broker.start()
    eventually(lambda: stored(broker) != 1000, what="no update")
    assert stored(broker) == 2000
