"""Attacks from `tests/attacks`, and a bystander with a budget beside each: what happens there to the attacker and to
memory is looked at there, how long others wait is looked at here, alone on the machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from heart_kit import (
    MIB,
    PATIENCE_S,
    Bystander,
    Eaters,
    at_rest,
    attach,
    deaf,
    nobody_waits,
    publish_all,
    read_exactly,
    sync,
)

from harness import BrokerProcess, RawClient
from packet_bytes import acknowledgements, publish_bytes, subscribe_bytes, unsubscribe_bytes
from tidegate.wire import Suback

TOPICS = 30_000

Bystand = Callable[[BrokerProcess], Bystander]


def renewed(broker: BrokerProcess, clients: list[RawClient], client_id: str, version: int = 4) -> RawClient:
    """A new connection of this name in place of those that there were."""
    while clients:
        clients.pop().close()
    at_rest(broker)
    clients.append(attach(broker, client_id, version))
    return clients[0]


def send_in_pieces(client: RawClient, packets: list[bytes], together: int = 1000) -> None:
    """All of them, made before, and as quickly as they are taken; QoS 0."""
    for start in range(0, len(packets), together):
        client.send_bytes(b"".join(packets[start : start + together]))
    sync(client, 60)


# ── identifiers of QoS 2 ──


@pytest.mark.attack("A11")
@pytest.mark.parametrize("pids", ["each its own", "always the same"])
def test_qos_2_messages_that_are_never_released_make_nobody_wait(broker, bystand: Bystand, pids):
    count = 8000
    packets = [publish_bytes(b"a", b"x" * 20, 2, pid if pids == "each its own" else 7) for pid in range(1, count + 1)]
    attackers: list[RawClient] = []

    def work() -> None:
        attacker = attackers[0]
        for start in range(0, count, 2000):
            attacker.send_bytes(b"".join(packets[start : start + 2000]))
        read_exactly(attacker.socket, 4 * count)
        attacker.send_bytes(acknowledgements(0x62, range(count, 0, -1)))  # at last, from behind, some for nothing
        read_exactly(attacker.socket, 4 * count)

    nobody_waits(bystand(broker), work, lambda: renewed(broker, attackers, "attacker"))


# ── filters ──


@pytest.mark.attack("A12")
def test_a_storm_of_subscribe_and_unsubscribe_makes_nobody_wait(broker, bystand: Bystand):
    filters = [b"attack/%d/+/#" % i for i in range(2000)] + [b"$share/g/attack/%d" % i for i in range(500)]
    there, gone = subscribe_bytes(filters, 1, 1), unsubscribe_bytes(filters, 2)
    attacker = attach(broker, "attacker")

    def work() -> None:
        for _ in range(5):
            attacker.send_bytes(there + gone)
            read_exactly(attacker.socket, len(filters) + 5 + 4)

    nobody_waits(bystand(broker), work, lambda: at_rest(broker))


@pytest.mark.attack("A12")
def test_filters_beyond_what_a_session_may_hold_make_nobody_wait(broker, bystand: Bystand):
    """Two packets with as many as one may name: the second is refused filter by filter."""
    asked = subscribe_bytes([b"%06d" % i for i in range(10_000)])
    more = subscribe_bytes([b"%06d" % i for i in range(10_000, 20_000)])
    attackers: list[RawClient] = []

    def work() -> None:
        attackers[0].send_bytes(asked + more)
        assert set(attackers[0].amid(Suback, 60).reasons) == {0}
        assert set(attackers[0].amid(Suback, 60).reasons) == {0x80}

    nobody_waits(bystand(broker), work, lambda: renewed(broker, attackers, "attacker"))


# ── filters that make matching slow ──


@pytest.mark.attack("A13")
@pytest.mark.parametrize("version", [4, 5])
def test_filters_built_to_make_matching_slow_make_nobody_wait(broker, bystand: Bystand, version):
    """Two thousand that all match, and a hundred that are deep: subscribed to, and matched with topics that are new."""
    depth = 11
    mixed = [b"/".join(levels) + b"/#" for levels in itertools.product((b"a", b"+"), repeat=depth)]
    deep = [b"+/" * n + b"#" for n in range(12, 128)] + [b"/".join([b"+"] * n) for n in range(1, 129)]
    numbers = itertools.count()
    attackers: list[RawClient] = []
    friend = attach(broker, "friend")

    def work() -> None:
        attacker = attackers[0]
        attacker.send_bytes(subscribe_bytes(mixed + deep, version=version))
        assert set(attacker.amid(Suback, 60).reasons) == {0}
        topics = [b"/".join([b"a"] * depth) + b"/%d" % next(numbers) for _ in range(200)]
        topics += [b"/".join([b"a"] * 120) + b"/%d" % next(numbers) for _ in range(50)]
        topics += [b"b%d" % next(numbers) + b"/" * 127 for _ in range(50)]
        friend.send_bytes(b"".join([publish_bytes(topic, b"x") for topic in topics]))
        assert [attacker.message(60).topic for _ in topics] == topics

    nobody_waits(bystand(broker), work, lambda: renewed(broker, attackers, "attacker", version))


@pytest.mark.attack("A13")
def test_slow_filters_over_many_retained_messages_make_nobody_wait(broker, bystand: Bystand):
    kept = [(b"a/%d/b/%d/c" % (i % 100, i), b"x") for i in range(100_000)]
    publish_all(attach(broker, "friend"), kept, 0, retain=True, together=2000)
    hostile = [b"+/+/+/+/z", b"+/+/b/+/+/#", b"a/+/+/+/d", b"+/" * 100 + b"#", b"a/+/b/+/z"]
    kept_bytes = sum([len(publish_bytes(*each)) for each in kept])
    attackers: list[RawClient] = []

    def work() -> None:
        attacker = attackers[0]
        attacker.send_bytes(subscribe_bytes(hostile, 1) + subscribe_bytes([b"+/+/b/+/c"], 2))
        read_exactly(attacker.socket, 9 + 5 + 2 * kept_bytes)  # found by two of the six

    nobody_waits(bystand(broker), work, lambda: renewed(broker, attackers, "attacker"))


# ── subscribers that never read ──


@pytest.mark.attack("A17")
@pytest.mark.parametrize("qos", [0, 1])
def test_20_subscribers_that_never_read_make_nobody_wait(start_broker, bystand: Bystand, qos):
    broker: BrokerProcess = start_broker(log__tail_bytes=4 * MIB)
    friend = attach(broker, "friend")
    some = [(b"attack/a", bytes(2000))] * 10_000
    attackers: list[RawClient] = []

    def prepare() -> None:
        for attacker in attackers:
            attacker.close()
        attackers[:] = [deaf(broker, f"deaf-{i}") for i in range(20)]
        for attacker in attackers:
            attacker.subscribe("attack/#", qos=qos)
        at_rest(broker)

    nobody_waits(bystand(broker), lambda: publish_all(friend, some, 1, together=200), prepare)


# ── topics ──


@pytest.mark.attack("A19")
@pytest.mark.parametrize("listening", [False, True], ids=["nobody listens", "somebody listens to all"])
def test_ever_new_topics_make_nobody_wait(start_broker, bystand: Bystand, listening):
    broker: BrokerProcess = start_broker(log__tail_bytes=4 * MIB, log__segment_bytes=4 * MIB)
    listener, attacker = attach(broker, "listener"), attach(broker, "attacker")
    listener.subscribe("attack/#" if listening else "attack/+/of/none", "attack/none/#", "other/+")
    eaters = Eaters([listener.socket])
    eaters.start()
    numbers = itertools.count()
    packets: list[bytes] = []

    def prepare() -> None:
        some = itertools.islice(numbers, TOPICS)
        packets[:] = [publish_bytes(b"attack/%d/of/%d" % (i % 1000, i), b"x" * 16) for i in some]
        at_rest(broker)

    try:
        nobody_waits(bystand(broker), lambda: send_in_pieces(attacker, packets), prepare)
    finally:
        eaters.stop()
    assert (eaters.eaten >= sum(map(len, packets))) == listening


# ── retained messages ──


@pytest.mark.attack("A20")
def test_ever_new_retained_messages_make_nobody_wait(start_broker, bystand: Bystand):
    broker: BrokerProcess = start_broker(log__tail_bytes=MIB, retained__messages_max=TOPICS + TOPICS // 2)
    attacker = attach(broker, "attacker")
    numbers = itertools.count()
    packets: list[bytes] = []

    def prepare() -> None:  # from the second attempt on there is no room for all: also that is quick
        some = itertools.islice(numbers, TOPICS)
        packets[:] = [publish_bytes(b"kept/%d/of/%d" % (i % 1000, i), b"x" * 16, 0, 1, True) for i in some]
        at_rest(broker)

    nobody_waits(bystand(broker), lambda: send_in_pieces(attacker, packets), prepare)


@pytest.mark.attack("A20")
def test_retained_messages_of_the_maximal_size_make_nobody_wait(start_broker, bystand: Bystand):
    """Stored, replaced, and handed out to five at once."""
    broker: BrokerProcess = start_broker(retained__bytes_max=64 * MIB, log__tail_bytes=MIB)
    attacker = attach(broker, "attacker")
    packets = [publish_bytes(b"attack/%d" % i, bytes(4 * MIB - 100), 1, i + 1, True) for i in range(8)]
    readers: list[RawClient] = []

    def work() -> None:
        for packet in packets:
            attacker.send_bytes(packet)
            read_exactly(attacker.socket, 4, PATIENCE_S)
        for reader in readers:
            reader.send_bytes(subscribe_bytes([b"attack/#"]))
        eaters = Eaters([reader.socket for reader in readers])
        eaters.start()
        at_rest(broker)
        eaters.stop()
        assert eaters.eaten > len(readers) * sum(map(len, packets)) * 0.99

    def prepare() -> None:
        for reader in readers:
            reader.close()
        readers[:] = [attach(broker, f"reader-{i}") for i in range(5)]
        at_rest(broker)

    nobody_waits(bystand(broker), work, prepare)
