"""No client, by any packets within the limits, makes another wait: a bystander that pings says so."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from heart_kit import (
    MIB,
    Bystander,
    Eaters,
    at_rest,
    attach,
    attach_kept,
    eventually,
    nobody_waits,
    publish_all,
    read_exactly,
    return_raw,
    short_packets,
    sync,
    take_all,
)

from harness import BrokerProcess, RawClient
from packet_bytes import acknowledgements, framed, publish_bytes, subscribe_bytes, unsubscribe_bytes, utf8

IN_FLIGHT = 8000
PUBACK, PUBREC, PUBREL, PUBCOMP = 0x40, 0x50, 0x62, 0x70
FILTERS = 10_000

Bystand = Callable[[BrokerProcess], Bystander]


# ── acknowledgements ──


def publish_qos_2(client: RawClient, topic: bytes, payloads: list[bytes]) -> None:
    """All of them at once, to their end."""
    pids = range(1, len(payloads) + 1)
    client.send_bytes(b"".join([publish_bytes(topic, p, 2, pid) for p, pid in zip(payloads, pids, strict=True)]))
    read_exactly(client.socket, 4 * len(payloads))
    client.send_bytes(acknowledgements(PUBREL, pids))
    read_exactly(client.socket, 4 * len(payloads))


def in_flight(subscriber: RawClient, publisher: RawClient, qos: int) -> list[int]:
    """So many messages under way to the subscriber: their packet ids."""
    payloads = [b"%08d" % i for i in range(IN_FLIGHT)]
    if qos == 1:
        publish_all(publisher, [(b"a", p) for p in payloads], 1, together=2000)
    else:
        for start in range(0, IN_FLIGHT, 2000):
            publish_qos_2(publisher, b"a", payloads[start : start + 2000])
    return take_all(subscriber, IN_FLIGHT, len(publish_bytes(b"a", payloads[0], qos)))


@pytest.mark.parametrize("order", ["in order", "in reverse", "odd, then even"])
@pytest.mark.parametrize("qos", [1, 2])
def test_8000_acknowledgements_in_any_order_make_nobody_wait(broker, bystand: Bystand, qos, order):
    """A packet id is found in constant time: a full window that is answered at once, PUBACK or PUBREC and PUBCOMP, in
    whatever order, is a few milliseconds' work."""
    subscriber, publisher = attach(broker, "subscriber"), attach(broker, "publisher")
    subscriber.subscribe("a", qos=qos)
    pids: list[int] = []

    def prepare() -> None:
        pids[:] = in_flight(subscriber, publisher, qos)
        if order == "in reverse":
            pids.reverse()
        elif order == "odd, then even":
            pids[:] = pids[1::2] + pids[::2]

    def work() -> None:
        if qos == 1:
            subscriber.send_bytes(acknowledgements(PUBACK, pids))
        else:
            subscriber.send_bytes(acknowledgements(PUBREC, pids))
            read_exactly(subscriber.socket, 4 * IN_FLIGHT)
            subscriber.send_bytes(acknowledgements(PUBCOMP, pids))
        sync(subscriber, 60)

    nobody_waits(bystand(broker), work, prepare)


def drain(session: socket.socket, count: int) -> int:
    """Take and acknowledge everything, as quickly as it comes: how many messages that were."""
    buffer, got, unreleased = bytearray(), 0, 0
    session.settimeout(30)
    while got < count or unreleased:
        data = session.recv(1 << 18)
        assert data, f"closed after {got} of {count}"
        buffer += data
        answers = []
        for packet in short_packets(buffer):
            kind = packet[0] & 0xF6
            if kind == 0x62:
                unreleased -= 1
                answers.append(b"\x70\x02" + packet[2:4])
                continue
            at = 4 + int.from_bytes(packet[2:4], "big")
            got += 1
            unreleased += kind == 0x34
            answers.append((b"\x50\x02" if kind == 0x34 else b"\x40\x02") + packet[at : at + 2])
        if answers:
            session.sendall(b"".join(answers))
    return got


def test_a_session_with_qos_1_and_2_mixed_drains_beside_others(broker, bystand: Bystand):
    """20,000 messages that a session missed, QoS 1 and 2 in turn, each acknowledged when it comes."""
    count = 20_000
    publisher = attach(broker, "publisher")

    def prepare() -> None:
        session = attach_kept(broker, "session", 4)
        session.subscribe("a", qos=2)
        session.disconnect()
        for _ in range(0, count, 2000):
            some = [publish_bytes(b"a", b"x" * 50, 1 + pid % 2, pid) for pid in range(1, 2001)]
            publisher.send_bytes(b"".join(some))
            read_exactly(publisher.socket, 4 * 2000)  # PUBACK or PUBREC
            publisher.send_bytes(acknowledgements(PUBREL, range(1, 2001, 2)))
            read_exactly(publisher.socket, 4 * 1000)

    def work() -> None:
        with return_raw(broker, "session") as session:
            assert drain(session, count) == count

    nobody_waits(bystand(broker), work, prepare)


# ── subscriptions ──

WILDCARDS = (b"s/%d/#", b"s/%d/+/y", b"+/%d/x/+")
KINDS: dict[str, Callable[[int], bytes]] = {
    "exact": lambda i: b"s/%d/x/y" % i,
    "wildcards": lambda i: WILDCARDS[i % 3] % i,
    "shared": lambda i: b"$share/g/s/%d/#" % i,
}


@pytest.mark.attack("A12")
@pytest.mark.parametrize("step", ["SUBSCRIBE", "UNSUBSCRIBE", "loss"])
@pytest.mark.parametrize(("kind", "topics"), [*((kind, 10_000) for kind in KINDS), ("wildcards", 500)])
def test_10000_filters_in_one_packet_make_nobody_wait(broker, bystand: Bystand, kind, topics, step):
    """Filters that come in one SUBSCRIBE, go in one UNSUBSCRIBE, or are lost with their connection: what they change
    in the index, and in ready-made routes of few or many topics, is done in steps."""
    filters = [KINDS[kind](i) for i in range(FILTERS)]
    matching = [(b"s/%d/x/y" % (i + FILTERS - topics), b"") for i in range(topics)]
    others = [(b"t/%d/z" % i, b"") for i in range(topics)]
    client: list[RawClient] = []

    def prepare() -> None:
        if client and step != "loss":
            client.pop().close()
            at_rest(broker)
        client[:] = [attach(broker, "client")]
        if step == "SUBSCRIBE":
            publish_all(attach(broker, "publisher"), matching, 0)
        else:
            ask(subscribe_bytes(filters, 1, 1))
            publish_all(attach(broker, "publisher"), others, 0)
        at_rest(broker)

    def ask(packet: bytes) -> None:
        client[0].send_bytes(packet)
        size = len(filters) + 5 if packet[0] == 0x82 else 4
        read_exactly(client[0].socket, size)

    def work() -> None:
        if step == "loss":
            client[0].close()
            at_rest(broker)
        else:
            ask(subscribe_bytes(filters, 1, 1) if step == "SUBSCRIBE" else unsubscribe_bytes(filters, 2))

    nobody_waits(bystand(broker), work, prepare)


@pytest.mark.attack("A12")
def test_a_returning_session_with_10000_filters_makes_nobody_wait(broker, bystand: Bystand):
    """The same filters again, when their session comes back and leaves."""
    filters = [KINDS["wildcards" if i % 2 else "exact"](i) for i in range(FILTERS)]
    session = attach_kept(broker, "session", 4)
    session.send_bytes(subscribe_bytes(filters, 1, 1))
    read_exactly(session.socket, len(filters) + 5)
    session.disconnect()
    publish_all(attach(broker, "publisher"), [(b"t/%d/z" % i, b"") for i in range(500)], 0)

    def work() -> None:
        for _ in range(3):
            attach_kept(broker, "session", 4).disconnect()

    nobody_waits(bystand(broker), work)


# ── retained messages ──


@pytest.mark.attack("A20")
@pytest.mark.parametrize("qos", [0, 1])
def test_60_subscribers_of_50000_retained_messages_make_nobody_wait(start_broker, bystand: Bystand, qos):
    """`#` over everything, by sixty clients at once: each gets its share of a tick, and so does everybody else."""
    broker: BrokerProcess = start_broker(log__tail_bytes=MIB)
    topics = [(b"kept/%d/%d" % (i % 100, i), b"x" * 20) for i in range(50_000)]
    publish_all(attach(broker, "publisher"), topics, 1, retain=True, together=2000)

    def work() -> None:
        clients = [attach(broker, f"client-{i}") for i in range(60)]
        for client in clients:
            client.send_bytes(subscribe_bytes([b"#"], 1, qos))
        eaters = Eaters([client.socket for client in clients])
        eaters.start()
        time.sleep(3)  # of what may go on for much longer
        eaters.stop()
        assert eaters.eaten > 100_000
        for client in clients:
            client.close()

    nobody_waits(bystand(broker), work, lambda: at_rest(broker))


@pytest.mark.attack("A20")
def test_a_resend_of_retained_messages_that_the_log_let_go_of_makes_nobody_wait(start_broker, bystand: Bystand):
    """A thousand retained messages and more in flight to a session that comes back, found again among ten thousand when
    the log has let go of them: each by its own name, not by a look through all."""
    broker: BrokerProcess = start_broker(
        log__segment_bytes=MIB // 2, log__tail_bytes=MIB // 2, log__retention_bytes=MIB, log__clean_interval_s=1
    )
    session = attach_kept(broker, "session", 4)
    publisher = attach(broker, "publisher")
    # One frame may hold many topics, or few: the log must let go of all of them for this test to mean something.
    publish_all(publisher, [(b"kept/%d" % i, b"x" * 20) for i in range(10_000)], 1, retain=True, together=2000)
    with_retained = set((broker.data / "log").glob("*.log"))
    publish_all(publisher, [(b"filler", bytes(1000))] * 2000, 1, together=100)
    session.send_bytes(subscribe_bytes([b"kept/+"], 1, 1))
    read_exactly(session.socket, 5 + 2000 * 20)  # some are under way; none is acknowledged
    session.close()
    publish_all(publisher, [(b"filler", bytes(1000))] * 6000, 1, together=100)
    eventually(
        lambda: not with_retained & set((broker.data / "log").glob("*.log")), 60, "the log does not let go of them"
    )

    def work() -> None:
        with return_raw(broker, "session") as again:
            eaters = Eaters([again])
            eaters.start()
            at_rest(broker, patience_s=5)
            eaters.stop()
        assert eaters.eaten >= 1000 * 30

    nobody_waits(bystand(broker), work, lambda: at_rest(broker))


# ── keeping house ──


def make_sessions(port: int, count: int, at_once: int = 100) -> None:
    """Sessions that are kept, each connected and left at once."""
    for start in range(0, count, at_once):
        peers = []
        for i in range(start, start + at_once):
            peer = socket.create_connection(("127.0.0.1", port))
            name = b"session-%d" % i
            peer.sendall(framed(0x10, utf8(b"MQTT") + b"\x04\x00\x00\x00" + utf8(name)) + b"\xe0\x00")
            peers.append(peer)
        for peer in peers:
            peer.settimeout(20)
            while peer.recv(100):
                pass
            peer.close()


def test_an_update_of_sys_with_50000_sessions_makes_nobody_wait(start_broker, bystand: Bystand):
    """Sessions are counted as they come and go, not one by one at every update; nor does anything else that happens
    each second look at all of them."""
    broker: BrokerProcess = start_broker(sys__interval_s=1)
    make_sessions(broker.port, 50_000)
    watcher = attach(broker, "watcher")
    watcher.subscribe("$SYS/broker/clients/total")
    eventually(lambda: int(watcher.message().payload) >= 50_000)

    def work() -> None:
        time.sleep(4)  # some updates

    nobody_waits(bystand(broker), work, lambda: at_rest(broker))


def test_retention_over_20000_topics_makes_nobody_wait(start_broker, bystand: Bystand):
    """Letting go of segments with many topics, while 500 sessions are away, is done in steps."""
    broker: BrokerProcess = start_broker(
        log__segment_bytes=2 * MIB,
        log__tail_bytes=MIB,
        log__retention_bytes=4 * MIB,
        log__hard_bytes=8 * MIB,
        log__clean_interval_s=1,
    )
    for i in range(500):
        away = attach_kept(broker, f"away-{i}")
        away.subscribe(f"+/{i}/of/#", qos=1)
        away.close()
    publisher = attach(broker, "publisher")

    def work() -> None:
        for start in range(0, 20_000, 1000):
            some = [(b"topic/%d/in/many" % i, bytes(1000)) for i in range(start, start + 1000)]
            publish_all(publisher, some, 1, together=100)
        time.sleep(3)  # in which there is much to let go of

    nobody_waits(bystand(broker), work, lambda: at_rest(broker))
