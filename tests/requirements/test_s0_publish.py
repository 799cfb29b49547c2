"""PUBLISH: in the log before the acknowledgement, once for everybody, retained where asked."""

from __future__ import annotations

import pytest
from stored import attach, attach_kept, copies, eventually, state_of, stored_messages, stored_payloads

from harness import RawClient
from tidegate.commands.log import open_segments
from tidegate.session import changes
from tidegate.wire import Properties, Publish

# ── S0.7: the log comes first ──


@pytest.mark.req("S0.7", "S1.24")
@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", [4, 5])
def test_at_the_acknowledgement_the_message_is_in_the_log_under_its_topic(start_broker, durability, qos, version):
    broker = start_broker(durability)
    pub = attach(broker, "p", version)
    for i in range(20):
        pub.publish(f"a/{i % 3}", b"%d" % i, qos, wait=qos == 1)
        if qos == 2:
            pub.receive()  # the PUBREC; the message is left unreleased
        record = stored_messages(broker.data)[-1]
        assert (record.position, record.run.payloads[record.at]) == (i, b"%d" % i)
        assert (record.run.topic, record.run.publisher, record.run.flags) == (b"a/%d" % (i % 3), b"p", qos)


@pytest.mark.req("S0.7")
@pytest.mark.parametrize("qos", [1, 2])
def test_what_was_acknowledged_is_there_after_a_kill(start_broker, qos):
    broker = start_broker("fsync")
    pub = attach(broker, "p")
    for i in range(50):
        pub.publish("a", b"%d" % i, qos)
    broker.kill()
    assert [int(p) for p in stored_payloads(broker.data, b"a")] == list(range(50))
    broker.start()
    sub = attach(broker, "s", 5)
    sub.subscribe("$replay/earliest/a", qos=1)
    assert [int(p) for p in sub.payloads(50)] == list(range(50))


@pytest.mark.req("S0.7")
def test_a_sealed_segment_names_its_topics(start_broker):
    broker = start_broker(log__segment_bytes=65536)
    pub = attach(broker, "p")
    for i in range(40):
        pub.publish(f"a/{i % 4}", b"x" * 4000, 1)

    def sealed():
        return [index for segment in open_segments(broker.data) if (index := segment.index()) is not None]

    index = eventually(sealed)[0]
    assert set(index.prefix_topics(b"")) == {b"a/0", b"a/1", b"a/2", b"a/3"}
    records = stored_messages(broker.data, b"a/2")
    assert [index.frame_at(r.position) in index.frames_for([b"a/2"]) for r in records[:3]] == [True] * 3


# ── S0.8: stored once ──


@pytest.mark.req("S0.8")
def test_a_message_is_stored_once_however_many_sessions_wait_for_it(broker):
    sessions = [f"s{i}" for i in range(30)]
    for name in sessions:
        sub = attach_kept(broker, name)
        sub.subscribe("a/#", qos=2 if name.endswith("0") else 1)
        sub.close()
    pub = attach(broker, "p")
    for i in range(20):
        pub.publish("a/b", b"<message %d>" % i + b"x" * 2000, 2)
    assert copies(broker.data, b"<message ") == 20
    for name in sessions:
        sub = attach_kept(broker, name)
        assert len(sub.payloads(20)) == 20
        sub.disconnect()
    assert copies(broker.data, b"<message ") == 20
    assert broker.stop() == 0  # a stop writes the state of all sessions
    assert copies(broker.data, b"<message ") == 20


@pytest.mark.req("S0.8")
def test_qos_0_is_kept_out_of_the_log_where_configured_and_still_delivered(start_broker):
    broker = start_broker(log__store_qos0=False)
    sub = attach(broker, "s")
    sub.subscribe("a", qos=1)
    pub = attach(broker, "p")
    pub.publish("a", b"fleeting", 0)
    pub.publish("a", b"kept", 1)
    assert sub.payloads(2) == [b"fleeting", b"kept"]
    assert stored_payloads(broker.data) == [b"kept"]
    assert copies(broker.data, b"fleeting") == 0


@pytest.mark.req("S0.8")
def test_qos_0_is_stored_unless_told_otherwise(broker):
    pub = attach(broker, "p")
    pub.publish("a", b"zero", 0)
    pub.publish("a", b"one", 1)
    assert stored_payloads(broker.data) == [b"zero", b"one"]


# ── S0.10: retained ──


def retained_log(broker) -> dict[bytes, bytes]:
    """What the retained log says, the last record of a topic winning."""
    found: dict[bytes, bytes] = {}
    for record in state_of(broker.data, changes.RETAINED, changes.UNRETAINED):
        if record[0] == changes.RETAINED:
            topic, payload, *_ = changes.read_retained(record)
            found[topic] = payload
        else:
            found.pop(changes.read_unretained(record), None)
    return found


def retained_now(broker, count: int) -> dict[bytes, bytes]:
    """What a new subscriber gets, and it is `count` messages."""
    with attach(broker, "reader", 5) as sub:
        sub.subscribe("#", qos=2)
        got = [sub.message() for _ in range(count)]
        sub.nothing()
        assert all(each.retain for each in got)
        return {each.topic: each.payload for each in got}


@pytest.mark.req("S0.10", "S1.24")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_retained_message_is_in_the_retained_log_and_the_latest_wins(broker, qos):
    pub = attach(broker, "p")
    pub.publish("a", b"first", qos, True)
    pub.publish("b", b"other", qos, True)
    pub.publish("a", b"latest", qos, True)
    pub.publish("c", b"not retained", 1)  # acknowledged: so the others are through as well
    assert retained_log(broker) == {b"a": b"latest", b"b": b"other"}
    assert retained_now(broker, 2) == {b"a": b"latest", b"b": b"other"}
    assert b"latest" in stored_payloads(broker.data, b"a")  # as any message


@pytest.mark.req("S0.10")
@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_an_empty_retained_payload_deletes_also_across_a_restart(start_broker, ending):
    broker = start_broker()
    pub = attach(broker, "p")
    for topic in ("a", "b"):
        pub.publish(topic, b"kept", 1, True)
    pub.publish("a", b"", 1, True)
    assert retained_log(broker) == {b"b": b"kept"}
    assert retained_now(broker, 1) == {b"b": b"kept"}
    getattr(broker, ending)()
    broker.start()
    assert retained_now(broker, 1) == {b"b": b"kept"}


@pytest.mark.req("S0.10")
def test_an_empty_retained_message_still_reaches_those_who_are_subscribed(client, unique):
    sub, pub = client(unique + "s"), client(unique + "p")
    sub.subscribe(unique, qos=1)
    pub.publish(unique, b"x", 1, True)
    pub.publish(unique, b"", 1, True)
    got = [sub.expect(Publish) for _ in range(2)]
    assert [(g.payload, g.retain) for g in got] == [(b"x", False), (b"", False)]


@pytest.mark.req("S0.10")
def test_a_retained_message_has_the_options_of_its_publish_after_a_restart(start_broker):
    broker = start_broker()
    pub = attach(broker, "p", 5)
    sent = Properties(content_type=b"t", user=((b"n", b"v"),), message_expiry=500)
    pub.publish("a", b"x", 1, True, properties=sent)
    broker.kill()
    broker.start()
    sub = RawClient(broker.port, 5)
    sub.connect("s")
    sub.subscribe("a", qos=2)
    got = sub.message()
    assert (got.retain, got.qos, got.properties.content_type, got.properties.user) == (True, 1, b"t", ((b"n", b"v"),))
    assert 490 <= got.properties.message_expiry <= 500
