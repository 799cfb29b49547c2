"""Who gets a message and in which order: pushed to all, or to one of a group, as the log has it."""

from __future__ import annotations

import threading

import pytest
from observing import publish_all, user_properties
from stored import attach, attach_kept, stored_payloads

from harness import RawClient
from tidegate.wire import Pingreq, Properties, Puback, Publish, Pubrec, Pubrel

# ── order ──


@pytest.mark.req("S2.10")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_the_messages_of_one_producer_stay_in_order_over_all_its_topics(client, unique, qos):
    sub, pub = client(unique + "-s", 5), client(unique + "-p", 4)
    sub.subscribe(unique + "/#", qos=2)
    sent = [b"%d" % i for i in range(300)]
    for i, payload in enumerate(sent):
        pub.publish(f"{unique}/{i % 7}", payload, qos, wait=False)
    if qos == 2:
        for _ in sent:
            pub.send(Pubrel(pub.amid(Pubrec).packet_id))
    assert sub.payloads(300) == sent


@pytest.mark.req("S2.10")
def test_the_messages_of_one_producer_stay_in_order_although_it_reconnects_between_them(client, unique):
    sub = client(unique + "-s")
    sub.subscribe(unique, qos=1)
    sent = [b"%d" % i for i in range(60)]
    for start in range(0, 60, 20):
        pub = client(unique + "-p")
        for payload in sent[start : start + 20]:
            pub.publish(unique, payload, 1, wait=False)
        pub.disconnect()
    assert sub.payloads(60) == sent


@pytest.mark.req("S2.10", "S2.17")
def test_what_a_session_missed_comes_before_what_is_published_while_it_catches_up(start_broker):
    broker = start_broker(log__tail_bytes=65536, log__segment_bytes=65536)
    away = attach_kept(broker, "s")
    away.subscribe("a", qos=1)
    away.disconnect()
    pub = attach(broker, "p")
    publish_all(pub, (("a", b"%d" % i + b"." * 200) for i in range(2000)))
    sub = attach_kept(broker, "s")
    publish_all(pub, (("a", b"%d" % i + b"." * 200) for i in range(2000, 4000)))
    assert [int(payload.rstrip(b".")) for payload in sub.payloads(4000)] == list(range(4000))


@pytest.mark.req("S2.17")
def test_all_consumers_see_the_interleaving_of_producers_that_the_log_has(broker):
    subs = [attach(broker, f"s{i}", version) for i, version in enumerate((4, 5, 4))]
    for sub in subs:
        sub.subscribe("a/+", qos=1)
    pubs = [attach(broker, f"p{i}") for i in range(4)]

    def produce(number: int) -> None:
        for i in range(100):
            pubs[number].publish(f"a/{number}", b"%d %d" % (number, i), 1)

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_the_log = stored_payloads(broker.data)
    assert len(in_the_log) == 400
    assert [sub.payloads(400) for sub in subs] == [in_the_log] * 3


@pytest.mark.req("S2.17")
def test_a_consumer_that_goes_back_sees_the_same_order_with_rising_positions(client, unique):
    sub = client(unique + "-s", 4)
    sub.subscribe(unique + "/#", qos=1)
    pubs = [client(f"{unique}-p{i}") for i in range(3)]
    for i in range(90):
        pubs[i % 3].publish(f"{unique}/{i % 3}", b"%d" % i, i % 2, wait=False)
    live = sub.payloads(90)
    later = client(unique + "-l", 5)
    later.subscribe(f"$replay/earliest/{unique}/#", qos=1)
    again = [later.message() for _ in range(90)]
    assert [message.payload for message in again] == live
    positions = [int(user_properties(message)["tidegate-position"]) for message in again]
    assert positions == sorted(set(positions))


# ── reach ──


@pytest.mark.req("S2.12")
def test_the_broker_pushes_a_message_to_a_consumer_that_says_nothing(client, unique):
    sub, pub = client(unique + "-s"), client(unique + "-p")
    sub.subscribe(unique, qos=1)
    for i in range(3):
        pub.publish(unique, b"%d" % i)
        assert sub.expect(Publish).payload == b"%d" % i


@pytest.mark.req("S2.13")
def test_every_consumer_of_a_topic_gets_each_message_once(client, unique):
    subs = [client(f"{unique}-s{i}", (3, 4, 5)[i % 3]) for i in range(9)]
    for i, sub in enumerate(subs):
        sub.subscribe((unique + "/a", unique + "/+", unique + "/#")[i // 3], qos=i % 3)
    pub = client(unique + "-p")
    for i in range(20):
        pub.publish(unique + "/a", b"%d" % i, 1)
    for sub in subs:
        assert sub.payloads(20) == [b"%d" % i for i in range(20)]
        sub.nothing(0.05)


@pytest.mark.req("S2.14")
def test_each_message_reaches_exactly_one_consumer_of_a_group(client, unique):
    members = [client(f"{unique}-m{i}", 4 + i % 2) for i in range(4)]
    for member in members:
        member.subscribe(f"$share/g/{unique}/#", qos=1)
    pub = client(unique + "-p")
    for i in range(200):
        pub.publish(f"{unique}/{i % 3}", b"%d" % i, 1)
    got = [_all_that_came(member) for member in members]
    assert sorted(int(payload) for some in got for payload in some) == list(range(200))
    assert all(got)


@pytest.mark.req("S2.14", "S2.13")
def test_groups_and_single_consumers_of_one_topic_do_not_take_messages_from_each_other(client, unique):
    first = [client(f"{unique}-f{i}") for i in range(2)]
    second = [client(f"{unique}-g{i}") for i in range(2)]
    alone = client(unique + "-a")
    for group, members in (("f", first), ("g", second)):
        for member in members:
            member.subscribe(f"$share/{group}/{unique}", qos=1)
    alone.subscribe(unique, qos=1)
    pub = client(unique + "-p")
    for i in range(40):
        pub.publish(unique, b"%d" % i, 1)
    everything = list(range(40))
    assert [int(payload) for payload in alone.payloads(40)] == everything
    for members in (first, second):
        assert sorted(int(p) for member in members for p in _all_that_came(member)) == everything


@pytest.mark.req("S2.14")
def test_a_message_that_a_group_s_consumer_left_unacknowledged_goes_to_another_one(client, unique):
    going, staying = client(unique + "-g"), client(unique + "-t")
    going.subscribe(f"$share/g/{unique}", qos=1)
    pub = client(unique + "-p")
    pub.publish(unique, b"m", 1)
    assert going.message(acknowledge=False).payload == b"m"
    staying.subscribe(f"$share/g/{unique}", qos=1)
    going.close()
    assert staying.message().payload == b"m"


# ── from when on ──


@pytest.mark.req("S2.16")
@pytest.mark.parametrize("version", [4, 5])
def test_a_new_consumer_sees_only_what_comes_after_it_joined(client, unique, version):
    pub = client(unique + "-p")
    for _ in range(50):
        pub.publish(unique, b"before", 1)
    sub = client(unique + "-s", version)
    sub.subscribe(unique, qos=1)
    pub.publish(unique, b"after", 1)
    assert sub.message().payload == b"after"
    sub.nothing(0.1)


@pytest.mark.req("S2.16")
@pytest.mark.parametrize("how", ["still connected", "after a kill"])
def test_what_came_before_a_filter_is_not_delivered_because_the_session_is_older(broker, how):
    """A session that is behind reads on from its own position: each of its filters counts from when it was made."""
    narrow = Properties(session_expiry=60, receive_maximum=1)
    sub = attach_kept(broker, "s", properties=narrow)
    sub.subscribe("old", qos=1)
    pub = attach(broker, "p")
    publish_all(pub, [("old", b"1"), ("old", b"2"), ("new", b"before")], together=1)
    first = sub.message(acknowledge=False)  # the second waits for its acknowledgement
    sub.subscribe("new", qos=1)
    pub.publish("new", b"after", 1)
    if how == "after a kill":
        broker.kill()
        broker.start()
        sub = attach_kept(broker, "s", properties=narrow)
        first = sub.message(acknowledge=False)
    sub.send(Puback(first.packet_id))
    assert [first.payload, *sub.payloads(2)] == [b"1", b"2", b"after"]
    sub.nothing(0.1)


def _all_that_came(member: RawClient) -> list[bytes]:
    """Everything up to the answer to a ping, acknowledged."""
    got: list[bytes] = []
    member.send(Pingreq())
    while isinstance(packet := member.receive(), Publish):
        got.append(packet.payload)
        member.send(Puback(packet.packet_id))
    return got
