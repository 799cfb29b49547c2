"""Acknowledgements right before a close, and packet ids that are all in use (C9, C10)."""

from __future__ import annotations

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Disconnect, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel, encode

DAY = Properties(session_expiry=86_400)
PACKET_IDS = 65_535


def session_on(broker: BrokerProcess, client_id: str, version: int = 5) -> RawClient:
    client = RawClient(broker.port, version)
    client.connect(client_id, clean=False, properties=DAY if version == 5 else Properties())
    return client


# ── C9 ──


@pytest.mark.attack("C9")
@pytest.mark.req("S0.13", "S4.5")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("goodbye", [b"", encode(Disconnect(), 4)], ids=["close", "DISCONNECT"])
def test_a_puback_sent_right_before_the_close_counts(shared_broker, unique, version: int, goodbye: bytes):
    reader = session_on(shared_broker, unique, version)
    reader.subscribe(unique + "/#", qos=1)
    publisher = RawClient(shared_broker.port, 4)
    publisher.connect()
    for i in range(20):
        publisher.publish(unique + "/a", b"%d" % i, 1)
        got = reader.expect(Publish)
        assert got.payload == b"%d" % i  # and not one that was acknowledged before
        reader.send_bytes(encode(Puback(got.packet_id), version) + goodbye)
        reader.close()
        reader = session_on(shared_broker, unique, version)
    reader.nothing()


@pytest.mark.attack("C9")
@pytest.mark.req("S0.13", "S4.5")
def test_a_bulk_of_pubacks_sent_right_before_the_close_counts(shared_broker, unique):
    reader = session_on(shared_broker, unique)
    reader.subscribe(unique, qos=1)
    publisher = RawClient(shared_broker.port, 4)
    publisher.connect()
    for i in range(500):
        publisher.publish(unique, b"%d" % i, 1, wait=False)
    got = [reader.expect(Publish) for _ in range(500)]
    reader.send_bytes(b"".join(encode(Puback(message.packet_id), 5) for message in got[:400]))
    reader.close()
    reader = session_on(shared_broker, unique)
    again = reader.expect(Publish)
    assert (again.payload, again.packet_id, again.dup) == (b"400", got[400].packet_id, True)
    reader.send(Puback(again.packet_id))
    assert [reader.message().payload for _ in range(99)] == [b"%d" % i for i in range(401, 500)]


@pytest.mark.attack("C9")
@pytest.mark.req("S0.13", "S4.5")
def test_a_pubrec_and_a_pubcomp_sent_right_before_the_close_count(shared_broker, unique):
    reader = session_on(shared_broker, unique)
    reader.subscribe(unique, qos=2)
    publisher = RawClient(shared_broker.port, 4)
    publisher.connect()
    publisher.publish(unique, b"message", 2)
    pid = reader.expect(Publish).packet_id
    reader.send(Pubrec(pid))
    reader.close()
    reader = session_on(shared_broker, unique)
    assert reader.expect(Pubrel).packet_id == pid  # not the message again
    reader.send(Pubcomp(pid))
    reader.close()
    session_on(shared_broker, unique).nothing()


# ── C10 ──


@pytest.fixture
def wide_broker(start_broker) -> BrokerProcess:
    """Lets a client have as many messages in flight as there are packet ids."""
    return start_broker(mqtt__inflight_max=PACKET_IDS, mqtt__ack_timeout_s=600)


def fill_all_ids(broker: BrokerProcess, extra: int) -> tuple[RawClient, RawClient, list[Publish]]:
    """A reader that acknowledges nothing until every id is in use, with `extra` messages waiting behind."""
    reader = RawClient(broker.port, 5)
    reader.connect("reader", clean=False, properties=Properties(session_expiry=3600, receive_maximum=PACKET_IDS))
    reader.subscribe("a", qos=1)
    publisher = RawClient(broker.port, 4)
    publisher.connect("publisher")
    for first in range(0, PACKET_IDS + extra, 5000):
        some = range(first, min(first + 5000, PACKET_IDS + extra))
        publisher.send_bytes(
            b"".join(encode(Publish(b"a", b"%d" % i, 1, packet_id=i % 60_000 + 1), 4) for i in some)
        )
        for _ in some:
            publisher.expect(Puback)
    got = [reader.expect(Publish) for _ in range(PACKET_IDS)]
    reader.nothing()
    return reader, publisher, got


@pytest.mark.attack("C10")
@pytest.mark.req("S1.20")
def test_when_all_packet_ids_are_in_use_messages_wait_and_lose_nothing(wide_broker):
    reader, publisher, got = fill_all_ids(wide_broker, extra=200)
    assert {message.packet_id for message in got} == set(range(1, PACKET_IDS + 1))
    other = RawClient(wide_broker.port, 4)
    other.connect("other")
    other.subscribe("b", qos=1)
    publisher.publish("b", b"others notice nothing", 1)
    assert other.message().payload == b"others notice nothing"
    in_use = {message.packet_id for message in got}
    for message in got[:50]:
        reader.send(Puback(message.packet_id))
        in_use.discard(message.packet_id)
        following = reader.expect(Publish)
        assert following.packet_id not in in_use
        in_use.add(following.packet_id)
        got.append(following)
    for message in got[50:]:
        reader.send(Puback(message.packet_id))
    got += [reader.message() for _ in range(150)]
    assert [int(message.payload) for message in got] == list(range(PACKET_IDS + 200))


@pytest.mark.attack("C10")
def test_an_id_that_is_free_in_the_middle_does_not_displace_one_in_use(wide_broker):
    reader, _, got = fill_all_ids(wide_broker, extra=10)
    in_use = {message.packet_id for message in got}
    for message in (got[30_000], got[40_000]):  # out of order, as no client should
        reader.send(Puback(message.packet_id))
        in_use.discard(message.packet_id)
    for message in got[:5]:
        reader.send(Puback(message.packet_id))
        in_use.discard(message.packet_id)
    for _ in range(5):
        following = reader.expect(Publish)
        assert following.packet_id not in in_use
        in_use.add(following.packet_id)
    assert wide_broker.alive


@pytest.mark.attack("C10")
def test_messages_in_flight_with_all_ids_come_again_in_order_after_a_broken_connection(wide_broker):
    reader, _, got = fill_all_ids(wide_broker, extra=5)
    reader.close()
    reader = RawClient(wide_broker.port, 5)
    properties = Properties(session_expiry=3600, receive_maximum=PACKET_IDS)
    assert reader.connect("reader", clean=False, properties=properties).session_present
    again = [reader.expect(Publish) for _ in range(PACKET_IDS)]
    assert [(m.packet_id, m.payload) for m in again] == [(m.packet_id, m.payload) for m in got]
    reader.send_bytes(b"".join(encode(Puback(message.packet_id), 5) for message in again))
    assert [int(reader.message().payload) for _ in range(5)] == list(range(PACKET_IDS, PACKET_IDS + 5))
