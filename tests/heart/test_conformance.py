"""Where other people's suites found the broker to differ from the standard."""

from __future__ import annotations

import time

import pytest
from heart_kit import attach, attach_kept, sync

from harness import Closed, RawClient
from packet_bytes import framed, publish_bytes, utf8
from tidegate.wire import (
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Properties,
    Publish,
    Subscribe,
    Unsubscribe,
    Will,
    encode,
)
from tidegate.wire import FilterRequest as Filter

TOPIC_NAME_INVALID = 0x90

# ── the client's Maximum Packet Size ──


class Measured(RawClient):
    """A v5 client that says what it takes, and knows the sizes of the packets that it got."""

    def __init__(self, port: int, most: int) -> None:
        super().__init__(port, 5, timeout_s=5)
        self.most = most
        self.raw = bytearray()

    def read_all(self) -> list[bytes]:
        """Every packet up to the end of the connection, or until nothing more comes behind the answer to a ping."""
        try:
            while True:
                self.socket.settimeout(0.3 if b"\xd0\x00" in self.raw else 5)
                data = self.socket.recv(1 << 16)
                if not data:
                    break
                self.raw += data
        except ConnectionError:
            pass
        except TimeoutError:
            assert b"\xd0\x00" in self.raw, "neither an answer nor an end"
        packets = []
        while len(self.raw) > 1:
            size, shift, at = 0, 0, 1
            while True:
                size |= (self.raw[at] & 0x7F) << shift
                shift, at = shift + 7, at + 1
                if not self.raw[at - 1] & 0x80:
                    break
            packets.append(bytes(self.raw[: at + size]))
            del self.raw[: at + size]
        return packets

    def takes_only_what_fits(self, packets: list[bytes]) -> None:
        too_large = [packet for packet in packets if len(packet) > self.most]
        assert not too_large, f"{len(too_large[0])} bytes for a client that takes {self.most}: {too_large[0]!r}"


def limited(most: int, **more: object) -> Properties:
    return Properties(maximum_packet_size=most, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("client_id", [b"client", b""], ids=["named", "to be named"])
@pytest.mark.parametrize("most", [2, 5, 12, 15, 16, 20, 25, 30, 40])
def test_a_connack_never_exceeds_what_the_client_takes(shared_broker, most, client_id):
    """[MQTT-3.1.2-24]: a CONNACK that cannot be made small enough is not sent; the connection is closed instead."""
    client = Measured(shared_broker.port, most)
    client.send(Connect(5, client_id, True, 0, properties=limited(most)))
    client.send(Pingreq())
    packets = client.read_all()
    client.takes_only_what_fits(packets)
    assert not packets or packets[0][0] == 0x20
    if most == 2:
        assert not packets, "there is no CONNACK of two bytes"


@pytest.mark.parametrize("most", [2, 5, 30])
def test_a_refusal_leaves_its_reason_string_out_where_it_does_not_fit(shared_broker, most):
    """[MQTT-3.2.2-19]: the reason string is dropped if the CONNACK would exceed what the client takes."""
    client = Measured(shared_broker.port, most)
    will = Will(b"a/#/b", b"wildcards are not for topics", 0)
    client.send(Connect(5, b"client", True, 0, will, properties=limited(most)))
    packets = client.read_all()
    client.takes_only_what_fits(packets)
    if most >= 5:
        (connack,) = packets
        assert connack[:1] + connack[3:4] == bytes((0x20, TOPIC_NAME_INVALID))
    else:
        assert not packets


@pytest.mark.parametrize("what", ["SUBACK", "UNSUBACK"])
def test_an_answer_to_many_filters_never_exceeds_what_the_client_takes(shared_broker, unique, what):
    """[MQTT-3.1.2-24]: a hundred reason codes do not fit in fifty bytes, so they are not sent; the client is not left
    in the dark either: the connection ends, in words that fit."""
    client = Measured(shared_broker.port, 50)
    client.connect(unique, properties=limited(50))
    filters = [f"{unique}/{i}".encode() for i in range(100)]
    if what == "SUBACK":
        client.send(Subscribe(1, tuple(Filter(f, 0) for f in filters)))
    else:
        for start in range(0, 100, 20):
            client.send(Subscribe(1, tuple(Filter(f, 0) for f in filters[start : start + 20])))
        client.send(Unsubscribe(2, tuple(filters)))
    client.send(Pingreq())
    packets = client.read_all()
    client.takes_only_what_fits(packets)
    client.socket.settimeout(5)
    client.raw.clear()
    try:
        client.send(Pingreq())
        assert b"\xd0\x00" not in client.read_all(), "the connection goes on without an answer"
    except ConnectionError:
        pass


@pytest.mark.parametrize("most", [40, 60])
def test_a_suback_leaves_its_reason_string_out_where_it_does_not_fit(shared_broker, unique, most):
    """[MQTT-3.9.2-1]: the reasons are sent without the words, for accepted and refused filters together."""
    client = Measured(shared_broker.port, most)
    client.connect(unique, properties=limited(most))
    client.send(Subscribe(1, (Filter(unique.encode(), 0), Filter(b"$unknown/topic/of/the/broker", 0))))
    client.send(Pingreq())
    packets = client.read_all()
    client.takes_only_what_fits(packets)
    assert any(packet[0] == 0x90 for packet in packets), packets


# ── the end of a session ──


def test_a_session_is_gone_as_soon_as_its_expiry_has_passed(broker):
    """A session ends when its expiry interval has passed [MQTT-4.1.0-2], not when somebody gets to look: twenty tries,
    spread over a second, each back 1.05 s after it left with an expiry of 1 s."""
    second = Properties(session_expiry=1)
    left_s: dict[str, float] = {}
    for i in range(20):
        name = f"client-{i}"
        client = attach_kept(broker, name, properties=second)
        client.subscribe("a", qos=1)
        client.disconnect()
        left_s[name] = time.monotonic()
        time.sleep(0.05)  # spread over a second
    late = []
    for name, when_s in left_s.items():
        time.sleep(max(0.0, when_s + 1.05 - time.monotonic()))
        connack = attach_kept(broker, name, properties=second).connack
        assert connack is not None
        if connack.session_present:
            late.append(name)
    assert not late, f"{len(late)} of 20 sessions were still there"


def test_a_session_is_there_until_its_expiry_has_passed(broker):
    """(And not a moment sooner.)"""
    properties = Properties(session_expiry=2)
    attach_kept(broker, "client", properties=properties).disconnect()
    time.sleep(1.2)  # a good part of it
    connack = attach_kept(broker, "client", properties=properties).connack
    assert connack is not None and connack.session_present


# ── topic aliases ──


@pytest.mark.parametrize("how", ["live", "from the log"])
def test_no_topic_alias_is_used_for_qos_2(shared_broker, unique, how):
    """A QoS 2 message may be sent again on another connection, where an alias means nothing: it carries its topic."""
    properties = Properties(session_expiry=60, topic_alias_maximum=10)
    client = attach(shared_broker, unique, 5, properties=properties)
    client.subscribe(unique, qos=2)
    if how == "from the log":
        client.disconnect()
    publisher = attach(shared_broker, unique + "-publisher")
    for _ in range(5):
        publisher.publish(unique, b"x", 2)
    if how == "from the log":
        client = attach(shared_broker, unique, 5, clean=False, properties=properties)
    for _ in range(5):
        message = client.message()
        assert (message.qos, message.topic, message.properties.topic_alias) == (2, unique.encode(), None)
    attach(shared_broker, unique, 5).close()


# ── refusals ──


def test_a_3_1_1_connect_with_a_bad_will_topic_is_closed_without_a_connack(shared_broker):
    """[MQTT-3.1.4-1]: a CONNECT that breaks the rules is closed; CONNACK 3 would say that the server is not there."""
    client = RawClient(shared_broker.port, 4, timeout_s=5)
    client.send_bytes(encode(Connect(4, b"client", True, 0, Will(b"a/#", b"x", 0)), 4))
    assert client.until_closed() == []


def test_a_3_1_connect_with_flags_of_a_will_that_has_retain_off_and_qos_2_is_taken(shared_broker, unique):
    """A 3.1 client with flags 0x14 (a will with QoS 2) is admitted, as other brokers do."""
    client = RawClient(shared_broker.port, 3, timeout_s=5)
    body = utf8(b"MQIsdp") + b"\x03\x14\x00\x00" + utf8(unique.encode()) + utf8(b"will") + utf8(b"gone")
    client.send_bytes(framed(0x10, body))
    assert client.expect(Connack).reason == 0
    client.disconnect()
    attach(shared_broker, unique, 3).close()


@pytest.mark.attack("A8")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_topic_with_nul_is_malformed(shared_broker, qos):
    """[MQTT-1.5.4-2]: U+0000 makes the packet malformed, 0x81; it is not just a name that is not allowed (0x90)."""
    client = attach(shared_broker, "", 5)
    client.send_bytes(publish_bytes(b"a\0b", b"x", qos, 1, version=5))
    (said,) = client.until_closed(5)
    assert isinstance(said, Disconnect) and said.reason == 0x81


def test_the_last_word_reaches_a_client_that_is_still_sending(start_broker):
    """DISCONNECT with its reason arrives although more bytes were on their way to the broker: the connection is shut
    down and drained, not reset. Ten clients, each with half a megabyte behind the packet that ends it."""
    broker = start_broker(mqtt__receive_maximum=10)
    lost = 0
    for i in range(10):
        client = attach(broker, f"client-{i}", 5)
        packets = [publish_bytes(b"a", b"x" * 1000, 2, pid, version=5) for pid in range(1, 500)]
        try:
            client.send_bytes(b"".join(packets))
        except ConnectionError:
            pass
        try:
            said = [p for p in iter_until_closed(client) if isinstance(p, Disconnect)]
        except ConnectionError:
            said = []
        if not said:
            lost += 1
        else:
            assert said[0].reason == 0x93
    assert not lost, f"{lost} of 10 were reset without a word"


def iter_until_closed(client: RawClient) -> list[object]:
    packets: list[object] = []
    try:
        while True:
            packets.append(client.receive(5))
    except Closed:
        return packets


@pytest.mark.attack("A12")
@pytest.mark.parametrize("wrong", [b"$share/+/p", b"$share/g", b"$share/g/", b"a/#/b", b"$share//p"])
def test_a_malformed_filter_ends_the_connection(shared_broker, unique, wrong):
    """[MQTT-4.8.2-1], [MQTT-4.8.2-2], [MQTT-4.7.1-1]: a filter that is none is a protocol error or a malformed packet,
    which ends the connection (0x81, 0x82 or 0x8F); its neighbours in the packet are not subscribed either."""
    client = attach(shared_broker, unique, 5)
    client.send(Subscribe(1, (Filter(unique.encode(), 0), Filter(wrong, 0))))
    try:
        said = client.until_closed(3)
    except TimeoutError:
        raise AssertionError("the connection goes on") from None
    assert isinstance(said[-1], Disconnect) and said[-1].reason in (0x81, 0x82, 0x8F)


def test_a_client_that_behaves_is_answered_as_ever(shared_broker, unique):
    """(A control for the tests above: with no limit and good filters everything is answered.)"""
    client = attach(shared_broker, unique, 5)
    assert client.subscribe(unique).reasons == (0,)
    client.publish(unique, b"x")
    assert client.expect(Publish).payload == b"x"
    sync(client)
    client.send(Pingreq())
    client.expect(Pingresp)
