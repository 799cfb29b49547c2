"""Memory for clients that do not read: what waits for them waits in the log, for every kind of reader (I6)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from heart_kit import MIB, attach, attach_kept, deaf, grows_less_than, publish_all, read_exactly

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties

MOST = 40 * MIB
SMALL = {
    "log__tail_bytes": MIB,
    "log__segment_bytes": 32 * MIB,
    "mqtt__inflight_max": 65535,  # so that the window is not what limits
    "sys__interval_s": 0,
}
PAYLOAD = bytes(20_000)
DAY = Properties(session_expiry=86_400)


def fill(broker: BrokerProcess, total_bytes: int, payload: bytes = PAYLOAD, topics: int = 1) -> int:
    """Publish so much with QoS 1: how many messages."""
    count = total_bytes // len(payload)
    with attach(broker, "publisher") as publisher:
        together = max(1, min(2000, MIB // len(payload)))
        publish_all(publisher, ((b"a/%d" % (i % topics), payload) for i in range(count)), 1, together=together)
    return count


def warmed(start_broker: Callable[..., BrokerProcess]) -> BrokerProcess:
    """A broker that has done some work, so that what is taken once for all is taken."""
    broker = start_broker(**SMALL)
    fill(broker, 4_000_000)
    with attach(broker) as reader:
        reader.subscribe("$replay/earliest/#", qos=0)
        for _ in range(200):
            reader.message()
    return broker


def subscribe_deaf(client: RawClient, filter: bytes, qos: int) -> RawClient:
    """Subscribe without reading the answer. (Keep what is returned: the socket is closed with it.)"""
    properties = b"\0" if client.version == 5 else b""
    body = b"\0\1" + properties + len(filter).to_bytes(2, "big") + filter + bytes((qos,))
    client.send_bytes(b"\x82" + bytes((len(body),)) + body)
    return client


@pytest.mark.attack("A17")
@pytest.mark.req("S3.10")
@pytest.mark.parametrize(
    ("version", "qos", "payload_bytes"), [(4, 0, 1_000), (5, 0, 20_000), (4, 1, 20_000), (5, 1, 1_000)]
)
def test_a_replay_that_is_not_read_stays_in_the_log(start_broker, version, qos, payload_bytes):
    """`$replay/earliest/#` over 250 MB by a client that does not read its socket costs what fits into its send window,
    not the 250 MB."""
    broker = warmed(start_broker)
    fill(broker, 250_000_000, bytes(payload_bytes))
    before = broker.rss_bytes()
    present = subscribe_deaf(deaf(broker, "deaf", version), b"$replay/earliest/#", qos)
    grows_less_than(broker, before, MOST)
    present.close()


@pytest.mark.attack("A17")
@pytest.mark.req("S3.10")
@pytest.mark.parametrize("payload_bytes", [200, 20_000])
def test_a_replay_of_small_or_large_messages_of_many_topics_stays_in_the_log(start_broker, payload_bytes):
    """The same over ten thousand topics, where no two messages follow each other in one piece."""
    broker = warmed(start_broker)
    fill(broker, 20_000_000 if payload_bytes == 200 else 150_000_000, bytes(payload_bytes), 10_000)
    before = broker.rss_bytes()
    present = [subscribe_deaf(deaf(broker, f"deaf-{i}"), b"$replay/earliest/#", 0) for i in range(4)]
    grows_less_than(broker, before, MOST)
    assert len(present) == 4


@pytest.mark.attack("A17")
@pytest.mark.req("S3.10")
@pytest.mark.parametrize(
    ("version", "filter", "payload_bytes"),
    [(4, "a/#", 4_000), (5, "a/#", 20_000), (4, "$share/group/a/#", 20_000), (5, "$share/group/a/#", 4_000)],
)
def test_a_session_that_returns_and_does_not_read_costs_its_send_window(start_broker, version, filter, payload_bytes):
    """What a session missed, 150 MB, or what waits for a shared group, is read as fast as the client takes it."""
    broker = warmed(start_broker)
    session = attach_kept(broker, "session", version)
    session.subscribe(filter, qos=1)
    session.disconnect()
    fill(broker, 150_000_000, bytes(payload_bytes))
    before = broker.rss_bytes()
    returned = deaf(broker, "session", version, clean=False, properties=DAY if version == 5 else Properties())
    assert returned.connack is not None and returned.connack.session_present
    grows_less_than(broker, before, MOST)


@pytest.mark.attack("A17")
@pytest.mark.req("S3.10")
def test_a_resend_of_120_mb_to_a_client_that_does_not_read_costs_its_send_window(start_broker):
    """Messages in flight are sent again when their session is back, no faster than the client reads."""
    broker = warmed(start_broker)
    session = attach_kept(broker, "session", 4)
    session.subscribe("a/#", qos=1)
    count = 120_000_000 // len(PAYLOAD)
    publisher = attach(broker, "publisher")
    packet_bytes = 4 + 2 + 3 + 2 + len(PAYLOAD)
    for _ in range(count // 100):
        publish_all(publisher, [(b"a/0", PAYLOAD)] * 100, 1, together=50)
        read_exactly(session.socket, 100 * packet_bytes)  # read, and never acknowledged
    session.close()
    before = broker.rss_bytes()
    returned = deaf(broker, "session", 4, clean=False)
    assert returned.connack is not None and returned.connack.session_present
    grows_less_than(broker, before, MOST)


@pytest.mark.attack("A17")
@pytest.mark.req("S3.10")
@pytest.mark.parametrize("qos", [0, 1])
def test_large_retained_messages_for_clients_that_do_not_read_are_not_copied_for_each(start_broker, qos):
    """Ten subscribers of 120 MB of retained messages, none of which reads."""
    broker = start_broker(**SMALL)
    payload = bytes(100_000)
    with attach(broker, "publisher") as publisher:
        publish_all(publisher, ((b"kept/%d" % i, payload) for i in range(1200)), 1, retain=True, together=20)
    before = broker.rss_bytes()
    present = [subscribe_deaf(deaf(broker, f"deaf-{i}"), b"kept/#", qos) for i in range(10)]
    grows_less_than(broker, before, MOST)
    assert len(present) == 10
