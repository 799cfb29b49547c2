"""Time that passes for reasons that are not the client's: a machine that pauses, a broker that does not listen."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from heart_kit import MIB, FaultyBroker, attach, attach_kept, eventually, read_exactly

from harness import BrokerProcess, Closed, RawClient
from packet_bytes import acknowledgements, publish_bytes, subscribe_bytes, unsubscribe_bytes
from tidegate.wire import Connack, Connect, Pingreq, Pingresp, Publish

PAUSE_S = 6.0
KEEP_ALIVE_S = 2


def heard(client: RawClient, pings: int) -> bool:
    """Every ping of the client is answered."""
    try:
        for _ in range(pings):
            client.expect(Pingresp)
    except (Closed, ConnectionError, AssertionError):
        return False
    return True


def alive(client: RawClient) -> bool:
    """The client's connection stands: the broker answers, and has not said goodbye."""
    try:
        client.send(Pingreq())
    except ConnectionError:
        return False
    return heard(client, 1)


def test_nobody_is_cut_after_a_pause_of_the_machine_through_which_all_kept_pinging(broker: BrokerProcess):
    """What a client sent in time counts, although it is read late: reads that have arrived are taken before deadlines
    are judged. The broker stands still for three keep-alives; the clients' pings lie in their sockets."""
    clients = [attach(broker, f"client-{i}", 4 + i % 2, keep_alive=KEEP_ALIVE_S) for i in range(20)]
    clients[0].subscribe("a")
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        sent = 0
        began_s = time.monotonic()
        while time.monotonic() - began_s < PAUSE_S:
            for client in clients:
                client.send(Pingreq())
            sent += 1
            time.sleep(0.5)  # well within the keep-alive
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    cut = sum(not heard(client, sent) or not alive(client) for client in clients)
    assert not cut, f"{cut} of {len(clients)} clients were cut"
    clients[1].publish("a", b"as before", 1)
    assert clients[0].expect(Publish).payload == b"as before"


def test_a_client_that_was_silent_before_the_pause_is_still_cut(broker: BrokerProcess):
    """The pause excuses nobody who sends nothing at all."""
    silent = attach(broker, "silent", 5, keep_alive=1)
    os.kill(broker.pid, signal.SIGSTOP)
    time.sleep(2)  # longer than one and a half keep-alives
    os.kill(broker.pid, signal.SIGCONT)
    silent.until_closed(10)


@pytest.mark.parametrize("qos", [1, 2])
def test_a_publisher_that_the_broker_does_not_read_from_is_not_cut(start_faulty, qos):
    """The disk does not keep up, so the broker stops reading from the publisher. Whatever that sends cannot be seen:
    its keep-alive does not run meanwhile. When the disk is back everything is acknowledged."""
    broker: FaultyBroker = start_faulty("fsync", mqtt__keep_alive_max_s=0)
    publisher = attach(broker, "publisher", keep_alive=1)
    payload = bytes(100_000)
    count = 1500  # 150 MB, twice what may wait for the disk
    sent = 0

    def send() -> None:
        nonlocal sent
        try:
            for i in range(count):
                publisher.socket.sendall(publish_bytes(b"a", payload, qos, i + 1))
                sent += 1
        except OSError:
            pass  # cut

    publisher.socket.settimeout(60)
    sender = threading.Thread(target=send, daemon=True)
    with broker.syncs_held():
        sender.start()
        seen = -1
        while seen != sent:  # until it stands still for longer than any hiccup
            seen = sent
            time.sleep(0.5)
        assert seen < count, "the broker took everything: nothing was throttled"
        time.sleep(4)  # more than twice the one and a half seconds after which silence is the end
        assert sender.is_alive() and sent == seen, f"cut after {sent} of {count} messages"
    answers = read_exactly(publisher.socket, 4 * count)
    first = b"\x40\x02" if qos == 1 else b"\x50\x02"
    assert answers == b"".join(first + i.to_bytes(2, "big") for i in range(1, count + 1))
    sender.join()


def test_memory_stays_bounded_while_the_disk_does_not_keep_up(start_faulty):
    """Ten publishers against a disk that does not answer: they are made to wait, the broker holds a bounded part."""
    broker: FaultyBroker = start_faulty("fsync", log__tail_bytes=MIB)
    publishers = [attach(broker, f"publisher-{i}") for i in range(10)]
    before = broker.rss_bytes()
    packet = b"".join(publish_bytes(b"a", bytes(50_000), 1, i + 1) for i in range(20))
    with broker.syncs_held():
        taken = 0

        def pour(publisher: RawClient) -> None:
            nonlocal taken
            try:
                while taken < 400 * MIB:
                    publisher.socket.sendall(packet)
                    taken += len(packet)
            except OSError:
                pass

        threads = [threading.Thread(target=pour, args=(p,), daemon=True) for p in publishers]
        for publisher, thread in zip(publishers, threads, strict=True):
            publisher.socket.settimeout(60)
            thread.start()
        seen = -1
        while seen != taken:
            seen = taken
            time.sleep(0.7)
        assert taken < 300 * MIB
        assert broker.rss_bytes() - before < 160 * MIB
        for publisher in publishers:
            publisher.close()
    eventually(lambda: served(broker))


def pushed(client: RawClient, data: bytes) -> int:
    client.socket.sendall(data)
    return len(data)


def served(broker: BrokerProcess) -> bool:
    """Somebody new connects and publishes; till the disk has caught up, the broker is too busy for that."""
    late = RawClient(broker.port, 5)
    late.send(Connect(5, b"late"))
    return not late.expect(Connack).reason and late.publish("b", b"x", 1) == 0x10


def churn_filters(broker: BrokerProcess) -> Callable[[], int]:
    session = attach_kept(broker, "churn", 4)
    filters = [b"churn/%d/" % i + b"x" * 1000 for i in range(200)]
    packets = subscribe_bytes(filters, 1, 1) + unsubscribe_bytes(filters, 2)
    session.socket.settimeout(3)
    return lambda: pushed(session, packets * 4)


def churn_releases(broker: BrokerProcess) -> Callable[[], int]:
    session = attach_kept(broker, "churn", 5)
    packets = acknowledgements(0x62, range(1, 60_000))
    session.socket.settimeout(3)
    return lambda: pushed(session, packets)


@pytest.mark.parametrize("churn", [churn_filters, churn_releases])
def test_memory_stays_bounded_while_the_disk_does_not_keep_up_with_changes(start_faulty, churn):
    """The same for a client that publishes nothing: what it changes, and its answers, wait for the disk too."""
    broker: FaultyBroker = start_faulty("fsync", log__tail_bytes=MIB)
    pour = churn(broker)
    bystander = attach(broker, "bystander")
    before = broker.rss_bytes()
    with broker.syncs_held():
        taken, deadline_s = 0, time.monotonic() + 20
        try:
            while taken < 400 * MIB and time.monotonic() < deadline_s:
                taken += pour()
        except TimeoutError:
            pass  # it is not read from any more
        assert taken < 300 * MIB
        assert broker.rss_bytes() - before < 160 * MIB
        bystander.send(Pingreq())
        bystander.expect(Pingresp)
    eventually(lambda: served(broker))


def test_connections_that_come_and_go_wait_while_the_disk_does_not_keep_up(start_faulty):
    """Each leaves a record: when too many wait for the disk, others are told to come back later."""
    broker: FaultyBroker = start_faulty("fsync", log__tail_bytes=MIB)
    pour = churn_filters(broker)
    with broker.syncs_held():
        with pytest.raises(TimeoutError):
            for _ in range(10_000):
                pour()
        late = RawClient(broker.port, 5)
        late.send(Connect(5, b"late"))
        assert late.expect(Connack).reason == 0x89
    eventually(lambda: served(broker))
