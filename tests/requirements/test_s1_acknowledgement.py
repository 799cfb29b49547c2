"""Acknowledgements in both directions: what they mean to the publisher, and what a subscriber owes."""

from __future__ import annotations

import resource

import pytest
from stored import KEPT, attach, attach_kept, eventually, stored_payloads

from harness import RawClient
from tidegate.wire import Disconnect, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel

# ── S1.17, S1.19: to every matching subscription ──


@pytest.mark.req("S1.17", "S1.19")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_matching_subscription_gets_the_message_and_no_other_does(client, unique, qos):
    topic = f"{unique}/plant/7/temperature"
    matching = ["{}", "{}/plant/#", "+/plant/+/temperature", "{}/+/+/+"]
    filters = [each.format(topic if each == "{}" else unique) for each in matching]
    subs = [client(f"{unique}m{i}", 3 + i % 3) for i in range(len(filters))]
    for sub, filter in zip(subs, filters, strict=True):
        sub.subscribe(filter, qos=2)
    shared = [client(f"{unique}g{i}", 5) for i in range(2)]
    for sub in shared:
        sub.subscribe(f"$share/g/{unique}/#", qos=2)
    others = [client(f"{unique}o{i}", 4) for i in range(3)]
    for sub, filter in zip(others, (f"{topic}/x", f"{unique}/plant/+", f"{unique}/plant/7/humidity"), strict=True):
        sub.subscribe(filter, qos=2)
    client(unique + "p").publish(topic, b"21.5", qos)
    assert [(got := sub.message()).payload + b"%d" % got.qos for sub in subs] == [b"21.5%d" % qos] * len(subs)
    for sub in others:
        sub.nothing(0.05)
    assert shared[0].message().payload == b"21.5"  # one of the group
    shared[1].nothing(0.05)


@pytest.mark.req("S1.19")
def test_a_publisher_that_is_subscribed_gets_its_own_message(client, unique):
    raw = client(unique)
    raw.subscribe(unique, qos=1)
    raw.publish(unique, b"mine", 1)
    assert raw.message().payload == b"mine"


# ── S1.20: the window ──


@pytest.mark.req("S1.20")
@pytest.mark.parametrize("qos", [1, 2])
def test_no_more_is_sent_than_the_window_allows_until_the_client_acknowledges(client, unique, qos):
    sub = client(unique, 5, properties=Properties(receive_maximum=3))
    sub.subscribe(unique, qos=qos)
    pub = client(unique + "p")
    for i in range(10):
        pub.publish(unique, b"%d" % i, qos)
    got = [sub.message(acknowledge=False) for _ in range(3)]
    sub.nothing()
    for step in range(3):
        if qos == 1:
            sub.send(Puback(got[step].packet_id))
        else:
            sub.send(Pubrec(got[step].packet_id))
            sub.expect(Pubrel)
            sub.nothing(0.05)  # the window opens with the end of the exchange only
            sub.send(Pubcomp(got[step].packet_id))
        got.append(sub.message(acknowledge=False))
        sub.nothing(0.05)
    assert [int(publish.payload) for publish in got] == [0, 1, 2, 3, 4, 5]
    assert len({publish.packet_id for publish in got[-3:]}) == 3


@pytest.mark.req("S1.20")
def test_a_client_that_states_no_window_has_the_configured_one(start_broker):
    broker = start_broker(mqtt__inflight_max=4)
    sub = attach(broker, "s", 4)
    sub.subscribe("a", qos=1)
    pub = attach(broker, "p")
    for i in range(10):
        pub.publish("a", b"%d" % i, 1)
    got = [sub.message(acknowledge=False) for _ in range(4)]
    sub.nothing()
    for publish in got:
        sub.send(Puback(publish.packet_id))
    assert [int(p) for p in sub.payloads(6)] == [4, 5, 6, 7, 8, 9]


@pytest.mark.req("S1.20")
def test_qos_0_does_not_wait_for_acknowledgements(client, unique):
    sub = client(unique, 5, properties=Properties(receive_maximum=1))
    sub.subscribe(unique, qos=0)
    pub = client(unique + "p")
    for i in range(10):
        pub.publish(unique, b"%d" % i, 1)
    assert [int(p) for p in sub.payloads(10)] == list(range(10))


# ── S1.21: acknowledging nothing ──


@pytest.mark.req("S1.21", "S1.22")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_a_client_that_acknowledges_nothing_is_disconnected_and_its_session_kept(start_broker, version, qos):
    broker = start_broker(mqtt__ack_timeout_s=1)
    sub = attach_kept(broker, "s", version)
    sub.subscribe("a", qos=qos)
    attach(broker, "p").publish("a", b"x", qos)
    first = sub.message(acknowledge=False)
    rest = sub.until_closed()
    if version == 5:
        assert [packet.reason for packet in rest if isinstance(packet, Disconnect)] == [0x80]
    sub = attach_kept(broker, "s", version)
    assert sub.connack.session_present
    again = sub.message()
    assert (again.payload, again.packet_id, again.dup) == (b"x", first.packet_id, True)


@pytest.mark.req("S1.21")
def test_a_client_that_owes_nothing_or_acknowledges_slowly_stays(start_broker):
    broker = start_broker(mqtt__ack_timeout_s=1)
    idle = attach(broker, "idle")
    idle.subscribe("a", qos=1)
    lazy = attach(broker, "lazy", 5)
    lazy.subscribe("b", qos=1)
    stuck = attach_kept(broker, "stuck")
    stuck.subscribe("b", qos=1)
    pub = attach(broker, "p")
    for i in range(6):
        pub.publish("b", b"%d" % i, 1)
    got = [lazy.message(acknowledge=False) for _ in range(6)]
    for publish in got:
        with pytest.raises(TimeoutError):
            lazy.receive(0.5)  # six of these are three times what a client may be silent for
        lazy.send(Puback(publish.packet_id))
    stuck.until_closed()  # shows that the time-out was at work meanwhile
    pub.publish("a", b"x", 1)
    assert idle.message().payload == b"x"
    pub.publish("b", b"6", 1)
    assert lazy.message().payload == b"6"


# ── S1.22: again, or to another ──


@pytest.mark.req("S1.22")
@pytest.mark.parametrize("version", [4, 5])
def test_what_was_not_acknowledged_comes_again_before_anything_new(client, unique, version):
    properties = KEPT if version == 5 else Properties()
    sub = client(unique, version, clean=False, properties=properties)
    sub.subscribe(unique, qos=1)
    pub = client(unique + "p")
    for i in range(3):
        pub.publish(unique, b"%d" % i, 1)
    got = [sub.message(acknowledge=False) for _ in range(3)]
    sub.send(Puback(got[1].packet_id))
    sub.disconnect()
    pub.publish(unique, b"3", 1)
    sub = client(unique, version, clean=False, properties=properties)
    again = [sub.message() for _ in range(3)]
    assert [(int(p.payload), p.dup) for p in again] == [(0, True), (2, True), (3, False)]
    assert [p.packet_id for p in again[:2]] == [got[0].packet_id, got[2].packet_id]


def group_of_two(broker_clients: list[RawClient], filter: str) -> None:
    for member in broker_clients:
        member.subscribe(f"$share/g/{filter}", qos=1)


@pytest.mark.req("S1.22")
@pytest.mark.parametrize("ending", ["disconnect", "close", "unsubscribe"])
def test_what_a_member_of_a_group_had_not_acknowledged_goes_to_another_at_once(client, unique, ending):
    leaving, staying = members = [client(f"{unique}{i}", 5, properties=KEPT) for i in range(2)]
    group_of_two(members, unique)
    pub = client(unique + "p")
    for i in range(10):
        pub.publish(unique, b"%d" % i, 1)
    owed = [leaving.message(acknowledge=False).payload for _ in range(5)]
    kept = staying.payloads(5)
    leaving.unsubscribe(f"$share/g/{unique}") if ending == "unsubscribe" else getattr(leaving, ending)()
    assert staying.payloads(5) == owed
    assert sorted(int(p) for p in owed + kept) == list(range(10))
    staying.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S1.21", "S1.22")
def test_what_a_silent_member_of_a_group_had_not_acknowledged_goes_to_another(start_broker):
    broker = start_broker(mqtt__ack_timeout_s=1)
    silent, working = members = [attach_kept(broker, name) for name in ("silent", "working")]
    group_of_two(members, "a")
    pub = attach(broker, "p")
    for i in range(4):
        pub.publish("a", b"%d" % i, 1)
    got = working.payloads(2)
    silent.until_closed()
    got += working.payloads(2)
    assert sorted(got) == [b"0", b"1", b"2", b"3"]


# ── S1.24, S1.25: what the publisher is told ──


@pytest.mark.req("S1.24")
@pytest.mark.parametrize("qos", [1, 2])
def test_the_acknowledgement_says_whether_anybody_was_routed_to(client, unique, qos):
    pub, sub = client(unique + "p", 5), client(unique, 5)
    assert pub.publish(unique, b"", qos) == 0x10
    sub.subscribe(unique)
    assert pub.publish(unique, b"", qos) == 0


@pytest.mark.req("S1.24")
def test_every_message_of_a_burst_is_acknowledged_in_order_and_stored(broker):
    pub = attach(broker, "p")
    pub.send_bytes(b"".join(b"\x32\x07\x00\x01a" + pid.to_bytes(2, "big") + b"xy" for pid in range(1, 5001)))
    assert [pub.expect(Puback).packet_id for _ in range(5000)] == list(range(1, 5001))
    assert stored_payloads(broker.data) == [b"xy"] * 5000


REFUSED = {
    "a payload that is not what it claims": ("{}", b"\xff", Properties(payload_format=1), 0x99),
    "a topic of the broker": ("$SYS/{}", b"x", Properties(), 0x90),
    "a topic of too many levels": ("{}" + "/x" * 200, b"x", Properties(), 0x90),
}


@pytest.mark.req("S1.25")
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("why", REFUSED)
def test_a_message_that_is_not_taken_is_answered_with_the_reason(client, unique, why, qos):
    topic, payload, properties, reason = REFUSED[why]
    pub = client(unique, 5)
    pub.subscribe(unique + "/#", qos=2)
    pub.publish(topic.format(unique), payload, qos, properties=properties, wait=False)
    answer = pub.receive()
    assert isinstance(answer, Puback if qos == 1 else Pubrec)
    assert (answer.reason, bool(answer.properties.reason_string)) == (reason, True)
    pub.nothing(0.05)
    assert pub.publish(unique, b"and goes on", 1) == 0


@pytest.mark.req("S1.25")
@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_that_cannot_be_stored_is_refused(start_broker, qos):
    broker = start_broker()
    sub = attach(broker, "s", 5)
    sub.subscribe("a", qos=2)
    new, old = attach(broker, "p5", 5), attach(broker, "p4", 4)
    assert new.publish("a", b"before", qos) == 0
    limits = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
    size = max(path.stat().st_size for path in (broker.data / "log").iterdir())
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (size, limits[1]))  # files cannot grow: a full disk
    assert new.publish("x", b"refused", qos) == 0x97
    assert new.publish("a", b"refused", qos) == 0x97
    old.publish("a", b"refused", qos, wait=False)
    assert not [p for p in old.until_closed() if isinstance(p, Puback | Pubrec)]  # it keeps the message
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, limits)
    assert eventually(lambda: new.publish("a", b"after", qos) == 0)
    assert [got.payload for got in (sub.message(), sub.message())] == [b"before", b"after"]
    assert b"refused" not in stored_payloads(broker.data)


@pytest.mark.req("S1.25")
def test_a_3_1_1_client_is_acknowledged_and_the_refused_message_dropped(client, unique):
    pub = client(unique)
    pub.subscribe("$SYS/" + unique)
    assert pub.publish("$SYS/" + unique, b"x", 1) == 0
    pub.nothing()


@pytest.mark.req("S1.25")
def test_a_connection_is_never_left_without_an_answer_or_an_end(client, unique):
    raw = client(unique, 5)
    raw.send(Publish(unique.encode(), b"", 1, False, False, 1, Properties(topic_alias=60_000)))
    assert [packet.reason for packet in raw.until_closed()] == [0x94]
