"""What the first edition of the broker did wrong, one example each, held against the reference; nothing is forgiven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from forgiveness import TODAY
from packets import longer
from stage import Stage, payloads

from tidegate.wire import (
    Connect,
    Disconnect,
    FilterRequest,
    Properties,
    Publish,
    Subscribe,
    Unsubscribe,
    Will,
    encode,
)

FAULTS: set[str] = set()


def fault(name: str) -> Callable[[Any], Any]:
    """Marks an example of a fault that `forgiveness` names, or of one that only its own test knows."""

    def mark(test: Any) -> Any:
        FAULTS.add(name)
        return test

    return mark


@pytest.fixture
def stage() -> Stage:
    return Stage(topic_levels_max=8, receive_maximum=5)


@fault("a will's topic is too deep")
@pytest.mark.parametrize("version", [4, 5])
def test_a_will_whose_topic_is_too_deep_is_refused_at_connect(stage, version):
    stage.connect("c", version, will=Will(b"/" * 8, b"bye"))
    stage.agreement.settle()


@fault("a will without a word in 3.1.1 is refused with one")
@pytest.mark.parametrize("topic", [b"$SYS/x", b"a/+"])
def test_a_bad_will_of_an_old_client_just_ends_its_connection(stage, topic):
    stage.connect("c", 4, will=Will(topic, b"bye"))
    stage.agreement.settle()


@fault("retained are lost at a disconnect")
def test_retained_matches_that_wait_for_the_window_come_after_a_reconnection(stage):
    publisher = stage.connect("p", 4)
    stage.say(publisher, *(Publish(b"t/%d" % n, b"%d" % n, 1, retain=True, packet_id=n) for n in (1, 2, 3)))
    stage.agreement.settle()
    client = stage.connect("c", session_expiry=100, receive_maximum=1)
    stage.subscribe(client, b"t/+", 1)
    assert len(payloads(client)) == 1
    stage.agreement.lost(client)
    client = stage.connect("c", clean=False, session_expiry=100)
    stage.acknowledge(client)
    assert sorted(payloads(client)) == [b"1", b"2", b"3"]


@fault("retained come after the UNSUBACK")
def test_no_retained_message_comes_after_the_unsuback(stage):
    publisher = stage.connect("p", 4)
    stage.say(publisher, *(Publish(b"t/%d" % n, b"%d" % n, 1, retain=True, packet_id=n) for n in (1, 2, 3)))
    client = stage.connect("c", receive_maximum=1)
    stage.subscribe(client, b"t/+", 1)
    stage.say(client, Unsubscribe(2, (b"t/+",)))
    stage.acknowledge(client)


@fault("receive maximum holds for QoS 2 only")
@pytest.mark.parametrize("qos", [(1,), (1, 2)])
def test_more_publishes_at_once_than_the_receive_maximum_end_the_connection(stage, qos):
    client = stage.connect("c")
    stage.agreement.settle()
    stage.say(client, *(Publish(b"t", b"%d" % n, qos[n % len(qos)], packet_id=n) for n in range(1, 7)))
    stage.agreement.settle()


@fault("malformed filters are answered")
@pytest.mark.parametrize("filter", [b"a/#/b", b"a+", b"$share/+/p", b"$share/g", b"$share/g/", b"$share//a"])
@pytest.mark.parametrize("version", [4, 5])
def test_a_malformed_filter_ends_the_connection(stage, filter, version):
    client = stage.connect("c", version)
    stage.say(client, Subscribe(1, (FilterRequest(filter),)))
    stage.agreement.settle()


@fault("messages follow the DISCONNECT")
@pytest.mark.parametrize("qos", [0, 1])
def test_nothing_is_sent_after_a_disconnect(stage, qos):
    client = stage.connect("c")
    stage.subscribe(client, b"t", qos)
    stage.say(client, Publish(b"t", b"own", qos, packet_id=qos), Connect(5, b"c"))
    stage.agreement.settle()


@fault("refusals overtake acknowledgements")
@pytest.mark.parametrize("qos", [1, 2])
def test_acknowledgements_come_in_the_order_of_their_messages(stage, qos):
    """[MQTT-4.6.0-2], [MQTT-4.6.0-3]: the standard binds clients to it; a server that keeps to it as well surprises
    nobody."""
    client = stage.connect("c")
    stage.say(client, Publish(b"t", b"1", qos, packet_id=1), Publish(b"$t", b"2", qos, packet_id=2))
    stage.agreement.settle()


@fault("remaining lengths are handed on")
@pytest.mark.parametrize("qos", [0, 1])
def test_a_remaining_length_in_too_many_bytes_is_not_handed_on(stage, qos):
    client, publisher = stage.connect("c", 4), stage.connect("p", 4)
    stage.subscribe(client, b"t", qos)
    packets = [longer(encode(Publish(b"t", b"%d" % n, qos, packet_id=n if qos else 0), 4)) for n in (1, 2)]
    stage.agreement.feed(publisher, b"".join(packets))
    stage.agreement.settle()


@fault("NUL in a topic is called invalid instead of malformed")
def test_nul_in_a_topic_is_a_malformed_packet(stage):
    """[MQTT-1.5.4-2]. The codec's to judge, so the reference, which uses it, cannot know better."""
    client = stage.connect("c")
    stage.agreement.feed(client, b"\x30\x06\0\x03a\0b\0")
    stage.agreement.settle()
    assert [packet.reason for packet in client.transcript if isinstance(packet, Disconnect)] == [0x81]


@fault("a CONNACK passes the client's maximum")
@pytest.mark.parametrize(("largest", "method"), [(2, None), (10, None), (30, b"unknown")])
def test_a_connack_keeps_to_the_clients_maximum_packet_size(stage, largest, method):
    """[MQTT-3.1.2-24], [MQTT-3.2.2-19]. What cannot be said in so few bytes is not said."""
    client = stage.agreement.connect("c")
    properties = Properties(maximum_packet_size=largest, auth_method=method)
    stage.agreement.sut.feed(client.at_broker, encode(Connect(5, b"c", properties=properties), 5))
    stage.agreement.sut.settle()
    for written in stage.agreement.sut.written(client.at_broker, 5):
        assert written.size <= largest


@fault("a SUBACK or UNSUBACK passes the client's maximum")
@pytest.mark.parametrize("count", [100])
@pytest.mark.parametrize("kind", [Subscribe, Unsubscribe])
def test_answers_about_many_filters_keep_to_the_clients_maximum_packet_size(stage, count, kind):
    client = stage.connect("c", maximum_packet_size=60)
    stage.agreement.settle()
    filters = [b"t/%d" % n for n in range(count)]
    what = [FilterRequest(filter) for filter in filters] if kind is Subscribe else filters
    stage.agreement.sut.feed(client.at_broker, encode(kind(1, tuple(what)), 5))
    stage.agreement.sut.settle()
    for written in stage.agreement.sut.written(client.at_broker, 5):
        assert written.size <= 60


@fault("packet id 0 undoes its run")
@pytest.mark.parametrize("version", [4, 5])
def test_messages_before_one_with_packet_id_0_are_taken(stage, version):
    client, publisher = stage.connect("c", 4), stage.connect("p", version)
    stage.subscribe(client, b"t", 1)
    fine = encode(Publish(b"t", b"fine", 1, packet_id=1), version)
    stage.agreement.feed(publisher, fine + fine[:5] + b"\0\0" + fine[7:])
    stage.agreement.settle()


@fault("a member that subscribes again loses QoS 0")
@pytest.mark.parametrize("filter", [b"$share/g/t", b"$share/h/other"])
def test_a_member_of_a_group_that_subscribes_again_gets_what_was_sent_before(stage, filter):
    """The group was left alone, so it is behind when the second member comes, until its next turn."""
    first = stage.connect("first", session_expiry=100)
    stage.subscribe(first, b"$share/g/t")
    stage.agreement.lost(first)
    second = stage.connect("second")
    join, again = (Subscribe(1, (FilterRequest(f),)) for f in (b"$share/g/t", filter))
    stage.say(second, join, Publish(b"t", b"to the group"), again)
    stage.agreement.settle()


@fault("who takes over misses the old will")
@pytest.mark.parametrize("version", [4, 5])
def test_a_session_gets_the_will_of_the_connection_that_it_takes_over(stage, version):
    expiry = {"session_expiry": 100} if version == 5 else {}
    old = stage.connect("c", version, clean=False, will=Will(b"t", b"bye", 1), **expiry)
    stage.subscribe(old, b"t", 1)
    stage.connect("c", version, clean=False, **expiry)
    stage.agreement.settle()


def test_every_fault_that_is_forgiven_has_an_example():
    assert FAULTS >= TODAY
