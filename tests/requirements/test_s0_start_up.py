"""Start-up: what was stored is loaded before the first CONNECT is accepted, within its bounds."""

from __future__ import annotations

import socket
import time

import pytest
from stored import attach, attach_kept, stored_session

from harness import BrokerProcess, RawClient
from tidegate.wire import Connect, Properties, Publish

QUOTA = 0x97
SESSIONS = 500


def first_in(broker: BrokerProcess, version: int = 5) -> RawClient:
    """A connection opened at the first instant at which the port takes one, while the broker starts."""
    process = broker.spawn()
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return RawClient(broker.port, version)
        except ConnectionRefusedError:
            assert process.poll() is None, broker.log()
            assert time.monotonic() < deadline_s


@pytest.mark.req("S0.3")
@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_every_stored_session_is_known_to_the_first_connection(start_broker, ending):
    broker = start_broker()
    for i in range(SESSIONS):
        raw = attach_kept(broker, f"s{i}", 4 + i % 2)
        raw.subscribe(f"direct/{i}", f"many/{i}/+", qos=1)
        raw.close()
    getattr(broker, ending)()
    early = first_in(broker)
    early.connect("early")
    for i in range(SESSIONS):
        assert early.publish(f"direct/{i}", b"%d" % i, 1) == 0  # somebody is subscribed
    assert early.publish(f"many/{SESSIONS - 1}/x", b"x", 1) == 0
    for i in range(0, SESSIONS, 50):
        back = attach_kept(broker, f"s{i}", 4 + i % 2)
        assert back.connack.session_present
        assert back.message().payload == b"%d" % i


@pytest.mark.req("S0.3", "S1.4")
def test_a_stored_session_can_be_resumed_by_the_first_connection(start_broker):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    attach(broker, "p").publish("a", b"unacknowledged", 1)
    sub.message(acknowledge=False)
    broker.kill()
    early = first_in(broker)
    assert early.connect("s", clean=False, properties=Properties(session_expiry=3600)).session_present
    assert early.message().payload == b"unacknowledged"


@pytest.mark.req("S0.4")
@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_every_retained_message_is_there_for_the_first_connection(start_broker, ending):
    broker = start_broker()
    pub = attach(broker, "p")
    for i in range(1000):
        pub.publish(f"r/{i}", b"%d" % i, 1, True, wait=False)
    for _ in range(1000):
        pub.receive()
    getattr(broker, ending)()
    early = first_in(broker)
    early.connect("early")
    early.subscribe("r/+", qos=1)
    got = [early.message() for _ in range(1000)]
    assert all(each.retain for each in got)
    assert {each.topic: each.payload for each in got} == {b"r/%d" % i: b"%d" % i for i in range(1000)}


# ── bounds ──


def retained_count(broker: BrokerProcess) -> int:
    """How many retained messages a new subscriber gets."""
    with attach(broker, "counter", 5) as sub:
        sub.subscribe("r/#")
        sub.socket.settimeout(10)
        count = 0
        while True:
            try:
                assert sub.expect(Publish, 0.5).retain
            except TimeoutError:
                return count
            count += 1


@pytest.mark.req("S0.4", "S1.25")
@pytest.mark.parametrize(
    "bound", [{"retained__messages_max": 10}, {"retained__bytes_max": 10 * 1400}], ids=["number", "memory"]
)
def test_retained_messages_stay_within_their_bound_and_the_publisher_is_told(start_broker, bound):
    broker = start_broker(sys__interval_s=0, **bound)
    pub = attach(broker, "p", 5)
    reasons = [pub.publish(f"r/{i}", b"x" * 1000, 1, True) for i in range(20)]
    taken = len([reason for reason in reasons if reason < 0x80])
    assert 5 <= taken <= 10
    assert set(reasons[taken:]) == {QUOTA}
    assert retained_count(broker) == taken
    pub.publish("r/0", b"", 1, True)
    assert pub.publish("r/new", b"x" * 1000, 1, True) < 0x80  # there is room again


@pytest.mark.req("S0.4")
def test_a_bound_that_was_lowered_holds_after_the_restart_and_the_rest_is_counted(start_broker):
    broker = start_broker()
    pub = attach(broker, "p")
    for i in range(20):
        pub.publish(f"r/{i}", b"x", 1, True)
    broker.stop()
    broker.settings = {"retained__messages_max": 5, "sys__interval_s": 0}
    broker.start()
    assert retained_count(broker) == 5
    assert "retained.dropped" in broker.log()


@pytest.mark.req("S0.4")
def test_the_broker_s_own_topics_take_no_room_from_the_users_retained_messages(start_broker):
    broker = start_broker(retained__messages_max=3)
    pub = attach(broker, "p", 5)
    assert [pub.publish(f"r/{i}", b"x", 1, True) < 0x80 for i in range(4)] == [True, True, True, False]


@pytest.mark.attack("A13")
@pytest.mark.parametrize("levels", [1, 2])
def test_the_bound_on_topic_levels_is_for_users_topics_and_not_for_the_broker_s_own(start_broker, levels):
    broker = start_broker(mqtt__topic_levels_max=levels)
    client = attach(broker, "c", 5)
    topic = "/".join("abc"[:levels])
    assert client.publish(topic, b"x", 1) < 0x80
    assert client.publish(topic + "/more", b"x", 1) == 0x90
    if levels == 2:
        client.subscribe("$SYS/#")
        assert client.message().topic.startswith(b"$SYS/broker/")


# ── what a start leaves as it was ──


@pytest.mark.req("S0.3", "S0.13")
def test_starting_and_stopping_changes_nothing_for_a_session_that_is_away(start_broker):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("a", "$share/g/b", qos=1)
    sub.disconnect()
    pub = attach(broker, "p")
    for i in range(5):
        pub.publish("ab"[i % 2], b"%d" % i, 1)
    before = stored_session(broker.data, "s")
    for _ in range(3):
        broker.stop()
        broker.start()
    assert stored_session(broker.data, "s") == before
    assert sorted(attach_kept(broker, "s").payloads(5)) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.req("S0.3")
def test_a_connection_that_comes_during_the_start_is_not_answered_from_half_a_state(start_broker):
    """The port is closed, not silent, while the broker loads: clients can try elsewhere or again."""
    broker = start_broker()
    broker.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", broker.port))
    early = first_in(broker)
    early.send(Connect(5, b"early"))
    assert early.receive().reason == 0
