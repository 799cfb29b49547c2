"""Shared subscriptions (4.8.2): strategies, absent members, what becomes of messages in flight."""

from __future__ import annotations

from collections import Counter

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties, Puback, Pubcomp, Pubrec, Pubrel, Reason

STRATEGIES = ("round_robin", "random", "sticky", "hash_publisher", "hash_topic")


@pytest.fixture(scope="module")
def brokers(tmp_path_factory):
    """One broker for each strategy."""
    started = {}
    for strategy in STRATEGIES:
        folder = tmp_path_factory.mktemp(strategy) / "data"
        started[strategy] = BrokerProcess(folder, "memory", mqtt__shared_strategy=strategy).start()
    yield started
    for broker in started.values():
        broker.stop()


@pytest.fixture
def connect(brokers, unique):
    """Opens v5 clients on the broker of a strategy."""
    opened: list[RawClient] = []

    def open_client(strategy: str, name: str) -> RawClient:
        raw = RawClient(brokers[strategy].port, 5)
        opened.append(raw)
        raw.connect(f"{unique}-{name}")
        return raw

    yield open_client
    for raw in opened:
        raw.close()


def members(connect, strategy: str, unique: str, count: int = 3) -> list[RawClient]:
    group = [connect(strategy, f"member-{i}") for i in range(count)]
    for member in group:
        member.subscribe(f"$share/g/{unique}/#", qos=1)
    return group


def drain(raw: RawClient, end: bytes) -> list[bytes]:
    """Everything up to the message on the member's own topic, which was published last."""
    got = []
    while (message := raw.message()).topic != end:
        got.append(message.payload)
    return got


def shares(group: list[RawClient], publish: RawClient, unique: str) -> list[list[bytes]]:
    """What each member has received so far."""
    received = []
    for number, member in enumerate(group):
        end = f"{unique}-end/{number}"
        member.subscribe(end, qos=1)
        publish.publish(end, b"", 1)
        received.append(drain(member, end.encode()))
        member.unsubscribe(end)
    return received


# ── strategies ──


@pytest.mark.req("S2.14")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_goes_to_one_member(connect, unique, strategy, qos):
    """4.8.2: to one of the subscribing sessions"""
    group, pub = members(connect, strategy, unique), connect(strategy, "p")
    for i in range(30):
        pub.publish(f"{unique}/{i % 5}", b"%d" % i, qos)
    received = shares(group, pub, unique)
    assert sorted(int(p) for share in received for p in share) == list(range(30))


def test_round_robin_gives_everyone_the_same(connect, unique):
    group, pub = members(connect, "round_robin", unique), connect("round_robin", "p")
    for i in range(30):
        pub.publish(unique + "/t", b"%d" % i, 1)
    assert [len(share) for share in shares(group, pub, unique)] == [10, 10, 10]


def test_random_gives_everyone_some(connect, unique):
    group, pub = members(connect, "random", unique), connect("random", "p")
    for i in range(200):
        pub.publish(unique + "/t", b"%d" % i, 1)
    counts = [len(share) for share in shares(group, pub, unique)]
    assert sum(counts) == 200
    assert all(30 < count < 110 for count in counts)


def test_sticky_stays_with_one_member_until_it_leaves(connect, unique):
    group, pub = members(connect, "sticky", unique), connect("sticky", "p")
    for i in range(20):
        pub.publish(f"{unique}/{i}", b"%d" % i, 1)
    received = shares(group, pub, unique)
    favourite = max(range(3), key=lambda i: len(received[i]))
    assert sorted(map(len, received)) == [0, 0, 20]
    group.pop(favourite).disconnect()
    for i in range(20):
        pub.publish(f"{unique}/{i}", b"%d" % i, 1)
    assert sorted(map(len, shares(group, pub, unique))) == [0, 20]


def test_hash_of_publisher_keeps_a_publisher_with_one_member(connect, unique):
    group = members(connect, "hash_publisher", unique)
    publishers = [connect("hash_publisher", f"p{i}") for i in range(12)]
    for number, pub in enumerate(publishers):
        for i in range(5):
            pub.publish(f"{unique}/{i}", b"%d" % number, 1)
    received = shares(group, publishers[0], unique)
    homes = Counter(payload for share in received for payload in set(share))
    assert set(homes.values()) == {1}
    assert sum(bool(share) for share in received) > 1


def test_hash_of_topic_keeps_a_topic_with_one_member(connect, unique):
    group = members(connect, "hash_topic", unique)
    publishers = [connect("hash_topic", f"p{i}") for i in range(3)]
    for pub in publishers:
        for topic in range(12):
            pub.publish(f"{unique}/{topic}", b"%d" % topic, 1)
    received = shares(group, publishers[0], unique)
    homes = Counter(payload for share in received for payload in set(share))
    assert set(homes.values()) == {1}
    assert sum(bool(share) for share in received) > 1


@pytest.mark.req("S2.14")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_absent_members_are_skipped(connect, brokers, unique, strategy):
    """4.8.2: a session that is away need not be chosen"""
    away = RawClient(brokers[strategy].port, 5)
    away.connect(unique + "-away", properties=Properties(session_expiry=600))
    away.subscribe(f"$share/g/{unique}/#", qos=1)
    there = connect(strategy, "there")
    there.subscribe(f"$share/g/{unique}/#", qos=1)
    pub = connect(strategy, "p")
    away.close()
    for i in range(20):
        pub.publish(f"{unique}/{i}", b"%d" % i, 1)
    assert len(shares([there], pub, unique)[0]) == 20


# ── several groups, several kinds ──


@pytest.mark.req("S1.17", "S1.19", "S2.13")
def test_every_group_gets_every_message_and_so_do_plain_subscribers(client, unique):
    """4.8.2"""
    filters = [f"$share/one/{unique}", f"$share/two/{unique}", unique]
    subs = [client(f"{unique}-{i}", 5) for i in range(3)]
    for sub, filter in zip(subs, filters, strict=True):
        sub.subscribe(filter, qos=1)
    client(unique + "-p").publish(unique, b"m", 1)
    assert [sub.message().payload for sub in subs] == [b"m"] * 3


@pytest.mark.attack("A14")
def test_a_client_with_shared_and_plain_subscriptions_gets_both(client, unique):
    """4.8.2: the plain one is a subscription of its own"""
    sub = client(unique, 5)
    assert sub.subscribe(unique, f"$share/g/{unique}", qos=1).reasons == (1, 1)
    client(unique + "-p").publish(unique, b"m", 1)
    assert sub.payloads(2) == [b"m", b"m"]
    assert sub.unsubscribe(f"$share/g/{unique}").reasons == (0,)
    client(unique + "-q").publish(unique, b"n", 1)
    assert sub.message().payload == b"n"
    sub.nothing()


def test_groups_of_one_name_and_different_filters_are_different_groups(client, unique):
    """4.8.2: identified by share name and filter together"""
    subs = [client(f"{unique}-{i}", 5) for i in range(2)]
    subs[0].subscribe(f"$share/g/{unique}/+", qos=1)
    subs[1].subscribe(f"$share/g/{unique}/#", qos=1)
    client(unique + "-p").publish(unique + "/t", b"m", 1)
    assert [sub.message().payload for sub in subs] == [b"m", b"m"]


@pytest.mark.parametrize("version", [3, 4])
def test_v3_clients_may_share_too(client, unique, version):
    subs = [client(f"{unique}-{i}", version) for i in range(2)]
    for sub in subs:
        sub.subscribe(f"$share/g/{unique}", qos=1)
    pub = client(unique + "-p")
    for payload in (b"1", b"2"):
        pub.publish(unique, payload, 1)
    assert sorted(sub.message().payload for sub in subs) == [b"1", b"2"]


def test_each_member_has_its_own_qos_and_identifier(client, unique):
    """[MQTT-4.8.2-3]"""
    subs = [client(f"{unique}-{i}", 5) for i in range(3)]
    for qos, sub in enumerate(subs):
        sub.subscribe(f"$share/g/{unique}", qos=qos, properties=Properties(subscription_ids=(qos + 1,)))
    pub = client(unique + "-p")
    for _ in range(3):
        pub.publish(unique, b"m", 2)
    got = [sub.message() for sub in subs]
    assert [(m.qos, m.properties.subscription_ids) for m in got] == [(0, (1,)), (1, (2,)), (2, (3,))]


def test_retained_messages_are_not_sent_to_shared_subscriptions(client, retain, unique):
    """4.8.2, 3.8.4"""
    retain(unique)
    sub = client(unique, 5)
    sub.subscribe(f"$share/g/{unique}", qos=1)
    sub.nothing()


# ── messages in flight ──


@pytest.fixture
def half_done(client, lasting, unique):
    """Makes a group of two, the first of which has got a message and not acknowledged it; the other is new."""

    def make(qos: int) -> tuple[RawClient, RawClient, int]:
        first, pub = lasting(unique + "-first"), client(unique + "-p", 5)
        first.subscribe(f"$share/g/{unique}", qos=2)
        pub.publish(unique, b"m", qos)
        pid = first.message(acknowledge=False).packet_id
        second = client(unique + "-second", 5)
        second.subscribe(f"$share/g/{unique}", qos=2)
        return first, second, pid

    return make


@pytest.mark.req("S1.22")
@pytest.mark.parametrize("leave", ["drops", "disconnects", "unsubscribes"])
def test_qos_1_of_a_member_that_leaves_is_handed_on(half_done, unique, leave):
    """4.8.2 allows it at once for QoS 1"""
    first, second, _ = half_done(1)
    if leave == "drops":
        first.close()
    elif leave == "disconnects":
        first.disconnect()
    else:
        first.unsubscribe(f"$share/g/{unique}")
    assert second.message().payload == b"m"


def test_what_was_handed_on_does_not_come_to_the_first_again(half_done, lasting, unique):
    first, second, _ = half_done(1)
    first.close()
    second.message()
    lasting(unique + "-first").nothing()


def test_qos_2_stays_with_its_member(half_done, lasting, unique):
    """[MQTT-4.8.2-4]"""
    first, second, pid = half_done(2)
    first.close()
    second.nothing()
    again = lasting(unique + "-first").message()
    assert (again.packet_id, again.dup, again.payload) == (pid, True, b"m")


def test_qos_2_goes_to_nobody_when_the_members_session_ends(half_done):
    """[MQTT-4.8.2-5]"""
    first, second, _ = half_done(2)
    first.disconnect(properties=Properties(session_expiry=0))
    second.nothing()


def test_a_qos_2_flow_that_was_released_is_finished_by_its_member(half_done, lasting, unique):
    """[MQTT-4.8.2-4]"""
    first, second, pid = half_done(2)
    first.send(Pubrec(pid))
    first.expect(Pubrel)
    first.close()
    again = lasting(unique + "-first")
    assert again.expect(Pubrel).packet_id == pid
    again.send(Pubcomp(pid))
    second.nothing()


@pytest.mark.parametrize(("qos", "refusal"), [(1, Puback), (2, Pubrec)])
def test_a_message_that_a_member_refuses_goes_to_nobody_else(half_done, qos, refusal):
    """[MQTT-4.8.2-6]"""
    first, second, pid = half_done(qos)
    first.send(refusal(pid, Reason.UNSPECIFIED_ERROR))
    first.close()
    second.nothing()


@pytest.mark.req("S4.2", "S2.14")
def test_what_comes_while_all_are_away_waits_for_the_first_to_return(client, lasting, unique):
    for name in ("-a", "-b"):
        member = lasting(unique + name)
        member.subscribe(f"$share/g/{unique}", qos=1)
    lasting(unique + "-a").close()
    lasting(unique + "-b").close()
    pub = client(unique + "-p", 5)
    for i in range(10):
        assert pub.publish(unique, b"%d" % i, 1) == 0
    assert [int(p) for p in lasting(unique + "-b").payloads(10)] == list(range(10))


def test_a_member_with_a_full_window_is_passed_over(client, unique):
    narrow = client(unique + "-n", 5, properties=Properties(receive_maximum=1))
    wide = client(unique + "-w", 5)
    for sub in (narrow, wide):
        sub.subscribe(f"$share/g/{unique}", qos=1)
    pub = client(unique + "-p", 5)
    for i in range(10):
        pub.publish(unique, b"%d" % i, 1)
    assert narrow.message(acknowledge=False).payload == b"0"
    assert [int(p) for p in wide.payloads(9)] == list(range(1, 10))


def test_the_last_member_takes_the_group_with_it(client, unique):
    """4.8.2: a shared subscription exists as long as it has subscribers"""
    sub, pub = client(unique, 5), client(unique + "-p", 5)
    sub.subscribe(f"$share/g/{unique}", qos=1)
    sub.unsubscribe(f"$share/g/{unique}")
    assert pub.publish(unique, b"to nobody", 1) == Reason.NO_MATCHING_SUBSCRIBERS
    sub.subscribe(f"$share/g/{unique}", qos=1)
    sub.nothing()
