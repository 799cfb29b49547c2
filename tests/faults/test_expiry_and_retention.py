"""What time takes away: a sender's state, messages, segments (C3, C7, C8). Nobody is blocked or left in the dark."""

from __future__ import annotations

import json
import time

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel, Will

DAY = Properties(session_expiry=86_400)
ID_NOT_FOUND = 0x92


def session_on(broker: BrokerProcess, client_id: str, properties: Properties = DAY) -> RawClient:
    client = RawClient(broker.port, 5)
    client.connect(client_id, clean=False, properties=properties)
    return client


def publisher_on(broker: BrokerProcess) -> RawClient:
    client = RawClient(broker.port, 5)
    client.connect("publisher")
    return client


# ── C3: a duplicate after the sender's state expired ──


def forgotten_sender(broker: BrokerProcess, reader: RawClient) -> RawClient:
    """A client that published with QoS 2 and packet id 7, got its PUBREC, and was away until its session ended.

    Its will, which is due at the session's end, tells when that was."""
    reader.subscribe("a/#", qos=2)
    sender = RawClient(broker.port, 5)
    will = Will(b"a/will", b"ended", 1, properties=Properties(will_delay=3600))
    sender.connect("sender", clean=False, will=will, properties=Properties(session_expiry=1))
    sender.publish("a/b", b"message", 2, packet_id=7, wait=False)
    sender.expect(Pubrec)
    assert reader.message().payload == b"message"
    sender.close()
    assert reader.message().payload == b"ended"
    sender = RawClient(broker.port, 5)
    connack = sender.connect("sender", clean=False, properties=Properties(session_expiry=1))
    assert not connack.session_present  # which tells the sender that nothing is known of id 7
    return sender


@pytest.mark.attack("C3")
def test_a_release_of_a_forgotten_message_is_answered_and_delivers_nothing(broker: BrokerProcess):
    reader = session_on(broker, "reader")
    sender = forgotten_sender(broker, reader)
    sender.send(Pubrel(7))
    answer = sender.expect(Pubcomp)
    assert (answer.packet_id, answer.reason) == (7, ID_NOT_FOUND)
    reader.nothing()


@pytest.mark.attack("C3")
def test_a_duplicate_of_a_forgotten_message_is_a_new_message_with_a_whole_flow(broker: BrokerProcess):
    reader = session_on(broker, "reader")
    sender = forgotten_sender(broker, reader)
    sender.publish("a/b", b"message", 2, packet_id=7, dup=True)  # up to PUBCOMP
    again = reader.message()
    assert (again.payload, again.dup) == (b"message", False)  # DUP is each leg's own [MQTT-3.3.1-3]
    sender.publish("a/b", b"message", 2, packet_id=7)
    assert reader.message().payload == b"message"
    reader.nothing()


@pytest.mark.attack("C3")
def test_a_state_that_expired_while_the_broker_was_down_is_forgotten_too(broker: BrokerProcess):
    sender = session_on(broker, "sender", Properties(session_expiry=1))
    sender.publish("a/b", b"message", 2, packet_id=7, wait=False)
    sender.expect(Pubrec)
    sender.disconnect()
    broker.kill()
    time.sleep(1.1)
    broker.start()
    sender = RawClient(broker.port, 5)
    assert not sender.connect("sender", clean=False).session_present
    sender.send(Pubrel(7))
    assert sender.expect(Pubcomp).reason == ID_NOT_FOUND


@pytest.mark.attack("C3")
def test_a_reader_whose_session_expired_in_the_middle_of_a_message_starts_anew(broker: BrokerProcess):
    """What it says about the old message is answered, and changes nothing for the new session."""
    watcher = session_on(broker, "watcher")
    watcher.subscribe("will", qos=1)
    reader = RawClient(broker.port, 5)
    will = Will(b"will", b"ended", 1, properties=Properties(will_delay=3600))
    reader.connect("reader", clean=False, will=will, properties=Properties(session_expiry=1))
    reader.subscribe("a", qos=2)
    publisher_on(broker).publish("a", b"message", 2)
    pid = reader.expect(Publish).packet_id
    reader.close()
    assert watcher.message().payload == b"ended"
    reader = RawClient(broker.port, 5)
    assert not reader.connect("reader", clean=False).session_present
    reader.send(Pubrec(pid))
    assert reader.expect(Pubrel).reason == ID_NOT_FOUND
    reader.send(Pubcomp(pid))
    reader.send(Puback(pid))
    reader.nothing()
    reader.subscribe("a", qos=2)
    publisher_on(broker).publish("a", b"new", 2)
    assert reader.message().payload == b"new"


# ── C8: expired messages in front of live ones ──


def publish_expiring(broker: BrokerProcess, count: int) -> float:
    """Messages that live for a second: when they are over."""
    publisher = publisher_on(broker)
    for i in range(count):
        publisher.publish("a/b", b"expired %d" % i, 1, properties=Properties(message_expiry=1))
    over_s = time.monotonic() + 1.2
    for i in range(5):
        publisher.publish("a/b", b"live %d" % i, 1)
    return over_s


def sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


LIVE = [b"live %d" % i for i in range(5)]


@pytest.mark.attack("C8")
@pytest.mark.req("S4.13")
@pytest.mark.parametrize("filter", ["a/#", "$share/g/a/#", "$replay/earliest/a/#"])
@pytest.mark.parametrize("restart", [False, True], ids=["same run", "after kill -9"])
def test_a_session_that_was_away_gets_what_is_alive_behind_expired_messages(start_broker, filter: str, restart: bool):
    broker = start_broker()
    narrow = Properties(session_expiry=86_400, receive_maximum=2)
    reader = session_on(broker, "reader", narrow)
    reader.subscribe(filter, qos=1)
    reader.disconnect()
    over_s = publish_expiring(broker, 300)
    if restart:
        broker.kill()
        broker.start()
    sleep_until(over_s)
    reader = session_on(broker, "reader", narrow)
    assert [reader.message().payload for _ in range(5)] == LIVE
    reader.nothing()


@pytest.mark.attack("C8")
@pytest.mark.req("S4.13")
def test_a_reader_with_a_full_window_goes_on_behind_messages_that_expired_meanwhile(broker: BrokerProcess):
    reader = session_on(broker, "reader", Properties(session_expiry=86_400, receive_maximum=1))
    reader.subscribe("a/#", qos=1)
    publisher_on(broker).publish("a/b", b"first", 1)
    first = reader.expect(Publish)
    sleep_until(publish_expiring(broker, 300))
    reader.nothing()
    reader.send(Puback(first.packet_id))
    assert [reader.message().payload for _ in range(5)] == LIVE


# ── C7: a reader behind retention ──

SMALL = {
    "log__segment_bytes": 65536,
    "log__tail_bytes": 65536,
    "log__retention_bytes": 1 << 20,
    "log__hard_bytes": 1 << 20,
    "sys__interval_s": 1,
}
COUNT = 3000


def until_logged(broker: BrokerProcess, event: str) -> list[str]:
    for _ in range(600):
        lines = [line for line in broker.log().splitlines() if event in line]
        if lines:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"{event} never came: {broker.log()[-1000:]}")


@pytest.fixture
def overrun(start_broker) -> BrokerProcess:
    """Three megabytes for an absent session, in a log that may hold one; two sessions that want none of it."""
    broker = start_broker(**SMALL)
    for client_id, filters in (
        ("needy", ["a/#", "$SYS/clients/needy/notice"]),
        ("modest", ["b/#", "$SYS/clients/modest/notice"]),
        ("member", ["$share/g/b/#", "$SYS/clients/member/notice"]),
    ):
        session = session_on(broker, client_id)
        session.subscribe(*filters, qos=1)
        session.disconnect()
    publisher = publisher_on(broker)
    for first in range(0, COUNT, 20):  # in small portions, or they would make few and large segments
        for i in range(first, first + 20):
            publisher.publish("a/b", b"%05d" % i + b"x" * 1000, 1, wait=False)
        for _ in range(20):
            publisher.expect(Puback)
    for _ in range(2):  # a clean stop leaves a snapshot; with two, the log is not needed for the state any more
        broker.stop()
        broker.start()
        publisher_on(broker).publish("c", b"", 1)
    until_logged(broker, "log.trimmed")
    return broker


@pytest.mark.attack("C7")
@pytest.mark.req("S3.14", "S4.13")
def test_a_reader_behind_retention_is_told_what_it_lost_and_gets_the_rest_in_order(overrun: BrokerProcess):
    assert until_logged(overrun, "log.promise_broken")
    needy = session_on(overrun, "needy")
    got: list[Publish] = []
    while not got or not got[-1].payload.startswith(b"%05d" % (COUNT - 1)):
        got.append(needy.message())
    notices = [json.loads(m.payload) for m in got if m.topic.startswith(b"$SYS")]
    numbers = [int(m.payload[:5]) for m in got if m.topic == b"a/b"]
    assert numbers == list(range(numbers[0], COUNT)) and numbers[0] > 0
    (notice,) = notices
    assert notice["event"] == "overrun" and notice["lost_before"] - notice["lost_from"] >= numbers[0]
    (line,) = until_logged(overrun, "reader.overrun")
    assert "needy" in line
    watcher = session_on(overrun, "watcher")
    watcher.subscribe("$SYS/broker/dropped/overrun by retention")
    assert watcher.message().payload == b"1"


@pytest.mark.attack("C7")
@pytest.mark.req("S3.14")
def test_a_reader_that_wanted_nothing_of_what_went_is_told_of_no_loss(overrun: BrokerProcess):
    publisher_on(overrun).publish("b/c", b"for both", 1)
    for client_id in ("modest", "member"):
        session = session_on(overrun, client_id)
        assert session.message().payload == b"for both"
        session.nothing()
        session.disconnect()
    assert "reader.overrun" not in overrun.log()


@pytest.mark.attack("C7")
def test_a_replay_from_the_earliest_begins_at_what_is_left(overrun: BrokerProcess):
    reader = session_on(overrun, "historian", Properties())
    reader.subscribe("$replay/earliest/a/#", qos=1)
    first = int(reader.message().payload[:5])
    assert 0 < first < COUNT
    assert [int(reader.message().payload[:5]) for _ in range(first + 1, COUNT)] == list(range(first + 1, COUNT))
