"""The bulk publisher against the real broker, and against one that answers as a test wants it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from scripted_broker import Dialogue, ScriptedBroker

from harness import BrokerProcess, RawClient
from tidegate.client.publisher import BulkPublisher
from tidegate.errors import BrokerRefused, BrokerUnreachable, PublishRefused
from tidegate.wire import Disconnect, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel, Reason


def subscriber(broker: BrokerProcess, filter: str, qos: int = 2) -> RawClient:
    client = RawClient(broker.port, 5)
    client.connect("subscriber")
    client.subscribe(filter, qos=qos, retain_as_published=True)
    return client


def numbered(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


@pytest.mark.req("P.2")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_all_messages_arrive_in_order(broker: BrokerProcess, qos: int) -> None:
    count = 10_000  # more than a window
    with subscriber(broker, "bulk/#", 1) as client:
        with BulkPublisher(port=broker.port, client_id="bulk") as publisher:
            publisher.publish([b"bulk/%d" % (i % 50) for i in range(count)], numbered(count), qos)
            publisher.flush()
            assert publisher.given == count
        messages = [client.message() for _ in range(count)]
    assert [message.payload for message in messages] == numbered(count)
    assert {message.qos for message in messages} == {min(qos, 1)}
    assert messages[49].topic == b"bulk/49"


def test_each_message_keeps_what_is_its_own(broker: BrokerProcess) -> None:
    """QoS, retain flag, properties and expiry may differ from message to message, and the order stays."""
    kinds = [0, 1, 2, 1, 1, 0, 2, 2, 0, 1]
    with subscriber(broker, "mixed") as client:
        with BulkPublisher(port=broker.port) as publisher:
            publisher.publish(
                [b"mixed"] * 10,
                [bytes([i, 0, 255]) for i in range(10)],
                kinds,
                retains=[i == 4 for i in range(10)],
                properties=[b"\x03\x00\x04text" if i % 2 else None for i in range(10)],
                expiries=[600 if i == 7 else None for i in range(10)],
            )
        messages = [client.message() for _ in range(10)]
    assert [message.payload for message in messages] == [bytes([i, 0, 255]) for i in range(10)]
    assert [message.qos for message in messages] == kinds
    assert [message.retain for message in messages] == [i == 4 for i in range(10)]
    assert [message.properties.content_type for message in messages] == [b"text" if i % 2 else None for i in range(10)]
    assert [message.properties.message_expiry is not None for message in messages] == [i == 7 for i in range(10)]


def test_packet_ids_go_round(broker: BrokerProcess) -> None:
    """Nobody subscribes here, so every PUBACK says so."""
    count, batch = 72_000, 24_000
    with BulkPublisher(port=broker.port) as publisher:
        for start in range(0, count, batch):
            publisher.publish([b"round"] * batch, numbered(count)[start : start + batch])
    with RawClient(broker.port, 5) as client:
        client.connect("reader")
        client.subscribe("$replay/earliest/round", qos=0)
        assert client.payloads(count) == numbered(count)


def test_a_large_message_passes_and_a_too_large_one_is_named(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(mqtt__packet_bytes_max=2_000_000)
    with subscriber(broker, "large") as client, BulkPublisher(port=broker.port) as publisher:
        publisher.publish([b"large"] * 4, [bytes(1_900_000)] * 4)
        publisher.flush()
        assert [len(payload) for payload in client.payloads(4)] == [1_900_000] * 4
        with pytest.raises(ValueError, match="message 5 to 'large' makes a packet of 2000014 bytes"):
            publisher.publish([b"large"] * 2, [b"small", bytes(2_000_000)])
        publisher.publish([b"large"], [b"the next call"])
        publisher.flush()
        assert client.payloads(1) == [b"the next call"]  # nothing of the call that was refused


def test_a_refused_message_is_named(broker: BrokerProcess) -> None:
    publisher = BulkPublisher(port=broker.port)
    publisher.publish([b"fine"] * 3, numbered(3))
    with pytest.raises(PublishRefused, match=r"refused message 4 to '\$mine/x': topic name invalid \(0x90") as caught:
        publisher.publish([b"fine", b"$mine/x", b"fine"], numbered(3))
        publisher.flush()
    assert (caught.value.number, caught.value.topic, caught.value.reason) == (4, b"$mine/x", 0x90)
    with pytest.raises(PublishRefused):  # what came after it is not known, so there is no going on
        publisher.publish([b"fine"], [b""])
    publisher.close()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BrokerUnreachable, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
        BulkPublisher(port=port)


def test_somebody_else_there() -> None:
    with (
        ScriptedBroker(lambda peer: peer.send_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as other,
        pytest.raises(BrokerUnreachable, match="did not answer as an MQTT 5 broker"),
    ):
        BulkPublisher(port=other.port)


def test_a_refused_connection() -> None:
    with (
        ScriptedBroker(lambda peer: peer.accept(Reason.NOT_AUTHORIZED)) as broker,
        pytest.raises(BrokerRefused, match=r"refused the connection: not authorized \(0x87\)") as caught,
    ):
        BulkPublisher(port=broker.port)
    assert caught.value.reason == 0x87


@pytest.mark.req("P.2")
@pytest.mark.attack("C11")
def test_a_killed_broker_that_comes_back_has_every_message(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    count, batch = 40_000, 2000
    killed = threading.Event()

    def kill_and_start() -> None:
        killed.wait()
        broker.kill()
        broker.start()

    other = threading.Thread(target=kill_and_start)
    other.start()
    with BulkPublisher(port=broker.port, client_id="bulk") as publisher:
        for start in range(0, count, batch):
            publisher.publish([b"t"] * batch, numbered(count)[start : start + batch])
            if start == 5 * batch:
                killed.set()
    other.join()
    with RawClient(broker.port, 5) as client:
        client.connect("reader")
        client.subscribe("$replay/earliest/t", qos=0)
        payloads = [client.message().payload]
        while payloads[-1] != b"%d" % (count - 1):
            payloads.append(client.message().payload)
    # At least once; and in order but for what was sent again, which repeats a stretch and goes on.
    assert list(dict.fromkeys(payloads)) == numbered(count)


def test_what_is_not_acknowledged_when_the_connection_breaks_comes_again_with_dup() -> None:
    def first(peer: Dialogue) -> None:
        peer.accept()
        messages = peer.publishes(6)
        assert not any(message.dup for message in messages)
        peer.send(*[Puback(message.packet_id) for message in messages[:4]])
        assert not peer.more_has_come()

    def second(peer: Dialogue) -> None:
        peer.accept()
        messages = peer.publishes(2)
        assert [(message.payload, message.dup) for message in messages] == [(b"4", True), (b"5", True)]
        peer.send(*[Puback(message.packet_id) for message in messages])
        peer.read_to_the_end()

    with ScriptedBroker(first, second) as broker, BulkPublisher(port=broker.port) as publisher:
        publisher.publish([b"t"] * 6, numbered(6))


def test_qos_2_messages_come_again_until_their_pubrec() -> None:
    def first(peer: Dialogue) -> None:
        peer.accept()
        messages = peer.publishes(3)
        peer.send(Pubrec(messages[0].packet_id), Pubrec(messages[1].packet_id))
        assert not peer.more_has_come()

    def second(peer: Dialogue) -> None:
        peer.accept()
        (message,) = peer.publishes(1)
        assert (message.payload, message.dup) == (b"2", True)
        peer.send(Pubrec(message.packet_id))
        assert peer.receive() == Pubrel(message.packet_id)  # and the connection breaks before its PUBCOMP

    def third(peer: Dialogue) -> None:
        peer.accept()
        (message,) = peer.publishes(1)
        assert (message.payload, message.qos) == (b"last", 1)
        peer.send(Puback(message.packet_id))
        peer.read_to_the_end()

    with ScriptedBroker(first, second, third) as broker, BulkPublisher(port=broker.port) as publisher:
        publisher.publish([b"t"] * 3, numbered(3), 2)
        publisher.publish([b"t"], [b"last"], 1)


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("qos", [1, 2])
def test_the_brokers_receive_maximum_is_kept(qos: int, window: int) -> None:
    count = 5 * window

    def script(peer: Dialogue) -> None:
        peer.accept(receive_maximum=window)
        seen: list[bytes] = []
        waiting: list[Publish] = []
        while len(seen) < count:
            while len(waiting) < window and len(seen) < count and peer.more_has_come():
                waiting += peer.publishes(1)
                seen.append(waiting[-1].payload)
            assert len(waiting) == min(window, count) or len(seen) == count
            assert not peer.more_has_come(0.05)
            for message in waiting:
                peer.send(Puback(message.packet_id) if qos == 1 else Pubrec(message.packet_id))
            if qos == 2:
                for message in waiting:
                    assert peer.receive() == Pubrel(message.packet_id)
                peer.send(*[Pubcomp(message.packet_id) for message in waiting])
            waiting.clear()
        assert seen == numbered(count)
        peer.read_to_the_end()

    with ScriptedBroker(script) as broker, BulkPublisher(port=broker.port) as publisher:
        publisher.publish([b"t"] * count, numbered(count), qos)


def test_acknowledgements_may_come_in_pieces_in_any_order_and_with_words() -> None:
    def script(peer: Dialogue) -> None:
        peer.accept()
        ids = [message.packet_id for message in peer.publishes(6)]
        peer.send(Puback(ids[2]), Puback(ids[0]))
        peer.send_bytes(b"\x40")
        assert not peer.more_has_come(0.05)
        peer.send_bytes(b"\x02" + ids[1].to_bytes(2, "big"))
        peer.send(Puback(ids[1]), Puback(ids[3], Reason.NO_MATCHING_SUBSCRIBERS, Properties(reason_string=b"hm")))
        peer.send(Puback(ids[5]), Puback(ids[4], Reason.NO_MATCHING_SUBSCRIBERS))
        peer.read_to_the_end()

    with ScriptedBroker(script) as broker, BulkPublisher(port=broker.port) as publisher:
        publisher.publish([b"t"] * 6, numbered(6))


def test_a_broker_that_says_goodbye_for_good_is_believed() -> None:
    def script(peer: Dialogue) -> None:
        peer.accept()
        peer.publishes(1)
        peer.send(Disconnect(Reason.SESSION_TAKEN_OVER))

    with ScriptedBroker(script) as broker:
        publisher = BulkPublisher(port=broker.port)
        with pytest.raises(BrokerRefused, match=r"closed the connection: session taken over \(0x8E\)"):
            publisher.publish([b"t"], [b""])
            publisher.flush()
        publisher.close()
        with pytest.raises(BrokerRefused):
            publisher.flush()


def test_a_broker_that_stops_for_a_while_is_waited_for() -> None:
    def first(peer: Dialogue) -> None:
        peer.accept()
        peer.publishes(1)
        peer.send(Disconnect(Reason.SERVER_SHUTTING_DOWN))

    def busy(peer: Dialogue) -> None:
        peer.accept(Reason.SERVER_BUSY)

    def last(peer: Dialogue) -> None:
        peer.accept()
        peer.send(Puback(peer.publishes(1)[0].packet_id))
        peer.read_to_the_end()

    with ScriptedBroker(first, busy, last) as broker, BulkPublisher(port=broker.port) as publisher:
        publisher.publish([b"t"], [b""])


@pytest.mark.parametrize("ending", ["gone", "silent"])
def test_patience_ends(ending: str) -> None:
    given_up = threading.Event()

    def script(peer: Dialogue) -> None:
        peer.accept()
        peer.publishes(3)
        if ending == "silent":
            given_up.wait(20)

    with ScriptedBroker(script) as broker:
        publisher = BulkPublisher(port=broker.port, patience_s=0.5)
        with pytest.raises(BrokerUnreachable, match=r"was not there for 0.5 s, 3 messages are not acknowledged"):
            publisher.publish([b"t"] * 3, numbered(3))
            publisher.flush()
        given_up.set()
        publisher.close()


def test_the_end_of_the_block_waits_for_acknowledgements_but_not_after_an_error() -> None:
    acknowledged_s: list[float] = []

    def slow(peer: Dialogue) -> None:
        peer.accept()
        message = peer.publishes(1)[0]
        assert not peer.more_has_come(0.1)
        acknowledged_s.append(time.monotonic())
        peer.send(Puback(message.packet_id))
        peer.read_to_the_end()

    with ScriptedBroker(slow) as broker:
        with BulkPublisher(port=broker.port) as publisher:
            publisher.publish([b"t"], [b""])
        assert time.monotonic() >= acknowledged_s[0]

    def never(peer: Dialogue) -> None:
        peer.accept()
        peer.read_to_the_end()

    with ScriptedBroker(never) as broker, pytest.raises(KeyError), BulkPublisher(port=broker.port) as publisher:
        publisher.publish([b"t"], [b""])
        raise KeyError


def test_a_closed_publisher_says_so(broker: BrokerProcess) -> None:
    publisher = BulkPublisher(port=broker.port)
    publisher.close()
    publisher.close()
    with pytest.raises(ValueError, match="the publisher is closed"):
        publisher.publish([b"t"], [b""])
