"""CONNECT: the order of its steps, sessions that are replaced, resumed and removed."""

from __future__ import annotations

import pytest
from stored import KEPT, attach, attach_kept, eventually, stored_messages, stored_session

from harness import Closed, RawClient
from tidegate.wire import Connack, Connect, Disconnect, Properties, Publish, Will

NO_SUBSCRIBERS = 0x10

# ── S0.17: the order ──

REFUSED = {
    "an authentication method that is not offered": {"properties": Properties(auth_method=b"SCRAM-SHA-1")},
    "a will to a topic of the broker": {"will": Will(b"$SYS/x", b"", 0, False)},
    "a will that is not what it claims": {"will": Will(b"w", b"\xff", 0, False, Properties(payload_format=1))},
}


@pytest.mark.req("S0.17")
@pytest.mark.parametrize("why", REFUSED)
def test_a_connection_that_is_refused_displaces_nobody(client, unique, why):
    here = client(unique, 5, clean=False, properties=KEPT)
    here.subscribe(unique + "/#", qos=1)
    intruder = client(None, 5)
    assert intruder.connect(unique, clean=True, **REFUSED[why]).reason >= 0x80
    assert intruder.until_closed() == []
    client(unique + "p").publish(unique + "/a", b"still here", 1)
    assert here.message().payload == b"still here"
    here.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S0.17")
def test_a_connection_that_is_refused_leaves_no_session(broker):
    intruder = RawClient(broker.port, 5)
    assert intruder.connect("nobody", properties=Properties(auth_method=b"x", session_expiry=100)).reason >= 0x80
    assert not attach_kept(broker, "nobody").connack.session_present


@pytest.mark.req("S0.17", "S1.5")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_connack_comes_first_and_then_the_missed_messages(client, unique, version):
    properties = KEPT if version == 5 else Properties()
    sub = client(unique, version, clean=False, properties=properties)
    sub.subscribe(unique + "/#", qos=2)
    sub.disconnect()
    pub = client(unique + "p")
    for i in range(3):
        pub.publish(f"{unique}/{i}", b"%d" % i, i % 2 + 1)
    back = client(None, version)
    back.send(Connect(version, unique.encode(), False, 60, None, None, None, properties))
    assert isinstance(back.receive(), Connack)
    assert sorted(back.payloads(3)) == [b"0", b"1", b"2"]


@pytest.mark.req("S0.17")
def test_the_client_id_is_claimed_before_the_session_is_looked_up(client, unique):
    """The old connection's session is not persistent: it ends with the claim, so there is none to be found."""
    old = client(unique, 5)
    old.subscribe(unique, qos=1)
    new = client(unique, 5, clean=False, properties=KEPT)
    assert not new.connack.session_present
    assert old.expect(Disconnect).reason == 0x8E
    with pytest.raises(Closed):
        old.receive()
    assert client(unique + "p", 5).publish(unique, b"", 1) == NO_SUBSCRIBERS


@pytest.mark.req("S0.17", "S0.19")
def test_a_claimed_session_goes_on_at_the_new_connection_with_what_was_unacknowledged(client, unique):
    old = client(unique, 5, clean=False, properties=KEPT)
    old.subscribe(unique, qos=1)
    client(unique + "p").publish(unique, b"x", 1)
    first = old.message(acknowledge=False)
    new = client(unique, 5, clean=False, properties=KEPT)
    assert new.connack.session_present
    again = new.message()
    assert (again.payload, again.packet_id, again.dup) == (b"x", first.packet_id, True)
    new.disconnect(properties=Properties(session_expiry=0))


# ── S0.18: a clean session replaces what was stored ──


@pytest.mark.req("S0.18")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("connected", [False, True], ids=["while it was away", "while it was connected"])
def test_a_clean_session_has_neither_the_subscriptions_nor_the_messages_of_the_old_one(
    client, unique, version, connected
):
    old = client(unique, 5, clean=False, properties=KEPT)
    old.subscribe(unique + "/#", qos=2)
    pub = client(unique + "p", 5)
    pub.publish(unique + "/a", b"in flight", 1)
    old.message(acknowledge=False)
    if not connected:
        old.disconnect()
    pub.publish(unique + "/a", b"missed", 1)
    new = client(unique, version, clean=True)
    assert not new.connack.session_present
    assert pub.publish(unique + "/a", b"after", 1) == NO_SUBSCRIBERS
    new.nothing()


@pytest.mark.req("S0.18")
@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_a_session_replaced_by_a_clean_one_does_not_return_with_a_restart(start_broker, ending):
    broker = start_broker()
    old = attach_kept(broker, "s")
    old.subscribe("a/#", qos=1)
    old.disconnect()
    attach(broker, "s", 5, clean=True, properties=KEPT).subscribe("b", qos=1)
    getattr(broker, ending)()
    broker.start()
    back = attach_kept(broker, "s")
    assert back.connack.session_present
    pub = attach(broker, "p", 5)
    assert pub.publish("a/x", b"", 1) == NO_SUBSCRIBERS
    assert pub.publish("b", b"", 1) == 0


# ── S0.19: a persistent one is resumed ──


@pytest.mark.req("S0.19", "S1.4")
@pytest.mark.parametrize("ending", ["disconnect", "drop", "kill", "stop"])
@pytest.mark.parametrize("version", [4, 5])
def test_a_persistent_session_gets_what_it_missed_and_keeps_its_subscriptions(start_broker, ending, version):
    broker = start_broker()
    sub = attach_kept(broker, "s", version)
    assert not sub.connack.session_present
    sub.subscribe("a/+", qos=1)
    sub.subscribe("b/#", qos=2)
    pub = attach(broker, "p")
    pub.publish("a/1", b"seen", 1)
    assert sub.message().payload == b"seen"
    if ending in ("kill", "stop"):
        eventually(lambda: stored_session(broker.data, "s").position == 1)
        pub.publish("b/0/0", b"missed 0", 2)
        sub.close()
        getattr(broker, ending)()
        broker.start()
        pub = attach(broker, "p")
    else:
        sub.disconnect() if ending == "disconnect" else sub.close()
        pub.publish("b/0/0", b"missed 0", 2)
    pub.publish("c", b"not for it", 1)
    pub.publish("a/1", b"missed 1", 1)
    sub = attach_kept(broker, "s", version)
    assert sub.connack.session_present
    assert sorted(sub.payloads(2)) == [b"missed 0", b"missed 1"]
    pub.publish("a/2", b"live", 1)
    pub.publish("b", b"live", 2)
    assert sub.payloads(2) == [b"live", b"live"]


@pytest.mark.req("S0.19")
def test_a_session_may_return_with_another_protocol_version(client, unique):
    sub = client(unique, 4, clean=False)
    sub.subscribe(unique + "/#", qos=1)
    sub.disconnect()
    client(unique + "p", 5).publish(unique + "/a", b"x", 1, properties=Properties(content_type=b"t"))
    sub = client(unique, 5, clean=False, properties=KEPT)
    got = sub.message()
    assert (got.payload, got.properties.content_type) == (b"x", b"t")
    sub.disconnect(properties=Properties(session_expiry=0))


# ── S0.21: others are removed ──

TRANSIENT = {
    "a clean 3.1.1 session": (4, Properties(), Properties()),
    "a 5.0 session that expires at once": (5, Properties(), Properties()),
    "a 5.0 session that gives up its expiry": (5, KEPT, Properties(session_expiry=0)),
}


@pytest.mark.req("S0.21")
@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_session_that_is_not_persistent_is_removed_at_disconnect(broker, kind):
    version, at_connect, at_disconnect = TRANSIENT[kind]
    sub = attach(broker, "s", version, properties=at_connect)
    sub.subscribe("a", qos=1)
    sub.disconnect(properties=at_disconnect)
    pub = attach(broker, "p", 5)
    assert pub.publish("a", b"missed", 1) == NO_SUBSCRIBERS
    assert stored_session(broker.data, "s") is None
    back = attach_kept(broker, "s")
    assert not back.connack.session_present
    back.subscribe("a", qos=1)
    back.nothing()


@pytest.mark.req("S0.21")
def test_a_session_that_is_not_persistent_is_removed_when_its_connection_breaks(broker):
    sub = attach(broker, "s", 5)
    sub.subscribe("a", qos=1)
    sub.close()
    pub = attach(broker, "p", 5)
    eventually(lambda: pub.publish("a", b"missed", 1) == NO_SUBSCRIBERS)
    assert stored_session(broker.data, "s") is None


@pytest.mark.req("S0.21")
def test_a_session_that_is_not_persistent_does_not_outlive_the_broker(start_broker):
    broker = start_broker()
    sub = attach(broker, "s", 4)
    sub.subscribe("a", qos=1)
    broker.kill()
    sub.close()
    broker.start()
    assert attach(broker, "p", 5).publish("a", b"missed", 1) == NO_SUBSCRIBERS
    assert not attach_kept(broker, "s", 4).connack.session_present


@pytest.mark.req("S0.21")
def test_what_was_published_while_nobody_was_there_is_no_debt_to_a_new_session(broker):
    attach(broker, "s", 5).disconnect()
    attach(broker, "p").publish("a", b"old", 1)
    back = attach(broker, "s", 5)
    back.subscribe("a", qos=1)
    attach(broker, "q").publish("a", b"new", 1)
    assert back.expect(Publish).payload == b"new"
    assert len(stored_messages(broker.data, b"a")) == 2
