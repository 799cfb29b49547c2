"""SUBSCRIBE and UNSUBSCRIBE: the index and the session log, then the answer, then the retained messages."""

from __future__ import annotations

import pytest
from stored import KEPT, attach, attach_kept, state_of, stored_session

from tidegate.session import changes
from tidegate.wire import FilterRequest, Properties, Puback, Publish, Pubrec, Suback, Subscribe, Unsuback, encode

NO_SUBSCRIBERS = 0x10

KINDS = {
    "a clean 3.1.1 session": (4, True, Properties()),
    "a persistent 3.1.1 session": (4, False, Properties()),
    "a 5.0 session that expires at once": (5, True, Properties()),
    "a persistent 5.0 session": (5, True, KEPT),
}


def subscribed_in_log(broker, filter: bytes) -> list[int]:
    """The QoS of each record about a filter."""
    found = (changes.read_subscribed(record) for record in state_of(broker.data, changes.SUBSCRIBED))
    return [options & 3 for _, options, *_, name in found if name == filter]


@pytest.mark.req("S0.22", "S1.9", "S1.10", "S1.11")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_at_suback_the_subscription_is_in_the_index_and_in_the_session_log(start_broker, kind, durability):
    version, clean, properties = KINDS[kind]
    broker = start_broker(durability)
    pub = attach(broker, "p", 5)
    sub = attach(broker, "s", version, clean=clean, properties=properties)
    for i, filter in enumerate(("a/b", "a/+", "c/#", "$share/g/d")):
        topic = ("a/b", "a/x", "c", "d")[i]
        assert pub.publish(topic, b"before", 1) in (0, NO_SUBSCRIBERS)
        sub.subscribe(filter, qos=1)
        assert subscribed_in_log(broker, filter.encode()) == [1]
        assert pub.publish(topic, b"after", 1) == 0
    facts = stored_session(broker.data, "s")
    assert facts.subscriptions == ["a/b", "a/+", "c/#", "$share/g/d"]
    assert facts.persistent == kind.startswith("a persistent")


@pytest.mark.req("S1.9", "S1.11", "S0.22")
def test_whatever_is_published_after_the_suback_arrives(client, unique):
    pub, sub = client(unique + "p", 5), client(unique + "s", 5)
    for i in range(100):
        sub.subscribe(f"{unique}/{i}/+")
        pub.publish(f"{unique}/{i}/x", b"%d" % i)
        assert sub.message().payload == b"%d" % i


@pytest.mark.req("S1.10", "S0.22")
def test_suback_answers_each_filter_in_order(client, unique):
    sub = client(unique, 5)
    requests = tuple(
        FilterRequest(filter, qos)
        for filter, qos in ((b"a", 2), (b"$replay/nowhen/x", 1), (b"b/+", 0), (b"$unknown/x", 1), (b"c/#", 1))
    )
    sub.send(Subscribe(9, requests))
    answer = sub.expect(Suback)
    assert (answer.packet_id, answer.reasons) == (9, (2, 0x8F, 0, 0x8F, 1))
    sub.publish("b/x", b"the valid ones hold")
    assert sub.message().payload == b"the valid ones hold"


@pytest.mark.req("S0.22")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("kept", [False, True], ids=["clean", "persistent"])
def test_suback_comes_first_and_then_the_retained_messages(client, unique, version, kept):
    pub = client(unique + "p")
    for i in range(5):
        pub.publish(f"{unique}/{i}", b"%d" % i, 1, True)
    sub = client(unique, version, clean=not kept, properties=KEPT if version == 5 and kept else Properties())
    sub.send(Subscribe(1, (FilterRequest(f"{unique}/+".encode(), 1),)))
    assert isinstance(sub.receive(), Suback)
    got = [sub.message() for _ in range(5)]
    assert all(isinstance(each, Publish) and each.retain for each in got)
    assert sorted(each.payload for each in got) == [b"%d" % i for i in range(5)]
    for i in range(5):
        pub.publish(f"{unique}/{i}", b"", 1, True)


@pytest.mark.req("S0.22", "S1.8")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_retained_message_published_after_the_subscription_comes_once_as_itself(client, unique, qos):
    raw = client(unique, 5)
    name = unique.encode()
    packets = [Subscribe(1, (FilterRequest(name, 2),)), Publish(name, b"x", qos, True, False, 9 if qos else 0)]
    raw.send_bytes(b"".join(encode(packet, 5) for packet in packets))
    got = raw.amid(Publish)
    assert (got.payload, got.retain) == (b"x", False)
    raw.amid(Suback)
    if qos:
        raw.amid(Puback if qos == 1 else Pubrec)
    raw.nothing()
    raw.publish(unique, b"", 1, True)


@pytest.mark.req("S0.22")
@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_a_subscription_holds_after_a_restart_with_its_options(start_broker, ending):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1, no_local=True, retain_as_published=True, properties=Properties(subscription_ids=(5,)))
    getattr(broker, ending)()
    broker.start()
    sub = attach_kept(broker, "s")
    sub.publish("a/own", b"not to itself", 1)
    attach(broker, "p").publish("a/x", b"x", 2, True)
    got = sub.message()
    assert (got.payload, got.qos, got.retain, got.properties.subscription_ids) == (b"x", 1, True, (5,))


# ── S0.24 ──


@pytest.mark.req("S0.24")
@pytest.mark.parametrize("kind", KINDS)
def test_at_unsuback_the_subscription_is_out_of_the_index_and_the_session_log(broker, kind):
    version, clean, properties = KINDS[kind]
    pub = attach(broker, "p", 5)
    sub = attach(broker, "s", version, clean=clean, properties=properties)
    sub.subscribe("a/b", "a/+", "c", qos=1)
    sub.unsubscribe("a/+")
    gone = [changes.read_unsubscribed(record)[1] for record in state_of(broker.data, changes.UNSUBSCRIBED)]
    assert gone == [b"a/+"]
    assert stored_session(broker.data, "s").subscriptions == ["a/b", "c"]
    assert pub.publish("a/x", b"", 1) == NO_SUBSCRIBERS
    assert pub.publish("a/b", b"the others stay", 1) == 0
    assert sub.message().payload == b"the others stay"


@pytest.mark.req("S0.24")
def test_unsuback_says_which_filters_there_were(client, unique):
    sub = client(unique, 5)
    sub.subscribe(unique + "/a", unique + "/#")
    assert sub.unsubscribe(unique + "/a", unique + "/b", unique + "/#").reasons == (0, 0x11, 0)


@pytest.mark.req("S0.24")
@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_an_unsubscription_holds_after_a_restart(start_broker, ending):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("a", "b", qos=1)
    sub.unsubscribe("a")
    getattr(broker, ending)()
    broker.start()
    pub = attach(broker, "p", 5)
    assert pub.publish("a", b"", 1) == NO_SUBSCRIBERS
    assert pub.publish("b", b"", 1) == 0


@pytest.mark.req("S0.24")
def test_nothing_arrives_after_the_unsuback_not_even_what_was_missed(client, unique):
    pub = client(unique + "p")
    sub = client(unique, 5, clean=False, properties=Properties(session_expiry=3600, receive_maximum=2))
    sub.subscribe(unique, qos=1)
    for i in range(10):
        pub.publish(unique, b"%d" % i, 1)
    got = [sub.message(acknowledge=False) for _ in range(2)]  # the window is full: eight wait in the log
    sub.unsubscribe(unique)
    for each in got:
        sub.send(Puback(each.packet_id))
    sub.nothing()
    sub.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S0.24", "S1.8")
def test_a_filter_subscribed_to_again_after_an_unsubscription_begins_anew(client, unique):
    pub, sub = client(unique + "p"), client(unique, 5)
    sub.subscribe(unique, qos=1)
    assert isinstance(sub.unsubscribe(unique), Unsuback)
    pub.publish(unique, b"between", 1)
    sub.subscribe(unique, qos=1)
    pub.publish(unique, b"after", 1)
    assert sub.message().payload == b"after"
