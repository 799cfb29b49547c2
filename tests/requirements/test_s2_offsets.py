"""A consumer's place in the log: registered, moved by acknowledgements alone; and the log without files."""

from __future__ import annotations

import pytest
from observing import publish_all, sys_values
from stored import attach, attach_kept, eventually, stored_session

from harness import BrokerProcess, RawClient
from tidegate.wire import NO_PROPERTIES, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel

# ── registering ──


@pytest.mark.req("S2.15")
def test_a_consumer_is_registered_with_its_filters_and_a_position(broker):
    publish_all(attach(broker, "p"), [("earlier", b"")] * 7)
    attach_kept(broker, "s").subscribe("a/+", "b", qos=1)
    facts = stored_session(broker.data, "s")
    assert facts is not None
    assert (facts.subscriptions, facts.position) == (["a/+", "b"], 7)


@pytest.mark.req("S2.15", "S2.18")
def test_the_position_of_a_consumer_moves_behind_what_it_acknowledged(broker):
    sub, pub = attach_kept(broker, "s"), attach(broker, "p")
    sub.subscribe("a", qos=1)
    publish_all(pub, [("a", b"%d" % i) for i in range(10)])
    first = [sub.message(acknowledge=False) for _ in range(10)]
    for message in first[:4]:
        sub.send(Puback(message.packet_id))
    eventually(lambda: _position(broker, "s") == 4)
    for message in first[4:]:
        sub.send(Puback(message.packet_id))
    eventually(lambda: _position(broker, "s") == 10)


@pytest.mark.req("S2.15")
def test_a_consumer_s_place_in_one_topic_is_not_moved_by_what_it_acknowledges_in_another(broker):
    sub, pub = attach_kept(broker, "s"), attach(broker, "p")
    sub.subscribe("slow", "quick", qos=1)
    publish_all(pub, [("slow" if i % 2 else "quick", b"%d" % i) for i in range(20)])
    for _ in range(20):
        message = sub.message(acknowledge=False)
        if message.topic == b"quick":
            sub.send(Puback(message.packet_id))
    sub.disconnect()
    back = attach_kept(broker, "s")
    again = [back.message() for _ in range(10)]
    assert [(message.topic, int(message.payload)) for message in again] == [(b"slow", i) for i in range(1, 20, 2)]
    back.nothing(0.1)


@pytest.mark.req("S2.15")
def test_two_consumers_of_one_topic_have_places_of_their_own(broker):
    ahead, behind, pub = attach_kept(broker, "ahead"), attach_kept(broker, "behind"), attach(broker, "p")
    for sub in (ahead, behind):
        sub.subscribe("a", qos=1)
    publish_all(pub, [("a", b"%d" % i) for i in range(10)])
    assert len(ahead.payloads(10)) == 10
    assert len(behind.payloads(3)) == 3
    eventually(lambda: (_position(broker, "ahead"), _position(broker, "behind")) == (10, 3))


# ── acknowledgement ──


@pytest.mark.req("S2.18")
@pytest.mark.parametrize("version", [4, 5])
def test_what_a_consumer_read_and_did_not_acknowledge_comes_again_and_says_so(client, unique, version):
    properties = Properties(session_expiry=60) if version == 5 else NO_PROPERTIES
    sub = client(unique, version, clean=False, properties=properties)
    sub.subscribe(unique, qos=1)
    publish_all(client(unique + "-p"), [(unique, b"%d" % i) for i in range(6)])
    assert sub.payloads(2) == [b"0", b"1"]
    unfinished = [sub.message(acknowledge=False) for _ in range(4)]
    sub.send(Puback(unfinished[2].packet_id))  # out of order
    sub.disconnect()
    back = client(unique, version, clean=False, properties=properties)
    again = [back.message() for _ in range(3)]
    assert [(m.payload, m.dup, m.packet_id) for m in again] == [
        (unfinished[i].payload, True, unfinished[i].packet_id) for i in (0, 1, 3)
    ]
    back.nothing(0.1)


@pytest.mark.req("S2.18")
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_what_a_consumer_did_not_acknowledge_comes_again_after_the_broker_s_end(broker, how):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    publish_all(attach(broker, "p"), [("a", b"%d" % i) for i in range(6)])
    assert len(sub.payloads(3)) == 3
    sub.message(acknowledge=False)
    eventually(lambda: _position(broker, "s") == 3)
    getattr(broker, how)()
    broker.start()
    back = attach_kept(broker, "s")
    assert back.payloads(3) == [b"3", b"4", b"5"]
    back.nothing(0.1)


@pytest.mark.req("S2.18")
def test_a_qos_2_message_is_passed_by_only_when_its_exchange_is_complete(broker):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=2)
    pub = attach(broker, "p")
    pub.publish("a", b"m", 2)
    message = sub.expect(Publish)
    sub.send(Pubrec(message.packet_id))
    sub.expect(Pubrel)
    pub.publish("other", b"", 1)  # something behind it, so that the position could move
    assert _position(broker, "s") == 0
    sub.send(Pubcomp(message.packet_id))
    eventually(lambda: _position(broker, "s") > 0)


# ── without files ──


@pytest.mark.req("S2.27")
def test_in_memory_nothing_is_written_to_the_data_folder(start_broker):
    broker = start_broker("memory")
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=2)
    attach(broker, "p").publish("a", b"m", 2)
    assert sub.message().payload == b"m"
    assert not [path for path in broker.data.rglob("*") if path.is_file()]


@pytest.mark.req("S2.27")
def test_in_memory_an_absent_session_gets_what_it_missed_from_beyond_the_tail(start_broker):
    broker = start_broker("memory", log__tail_bytes=65536)
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    pub = attach(broker, "p")
    publish_all(pub, [(f"a/{i % 5}", b"%d" % i + b"." * 100) for i in range(3000)])
    back = attach_kept(broker, "s")
    assert [int(payload.rstrip(b".")) for payload in back.payloads(3000)] == list(range(3000))


@pytest.mark.req("S2.27", "S3.12")
def test_in_memory_a_consumer_can_go_back(start_broker):
    broker = start_broker("memory")
    publish_all(attach(broker, "p"), [("a", b"%d" % i) for i in range(10)])
    sub = attach(broker, "s")
    sub.subscribe("$replay/4/a", qos=1)
    assert sub.payloads(6) == [b"%d" % i for i in range(4, 10)]


@pytest.mark.req("S2.27")
def test_in_memory_the_log_stays_within_its_size(start_broker):
    broker = start_broker("memory", log__tail_bytes=65536, log__memory_bytes=1 << 20, sys__interval_s=1)
    publish_all(attach(broker, "p"), [("a", b"." * 1000)] * 5000)
    assert int(sys_values(broker)["store/messages/bytes"]) <= 1 << 20


@pytest.mark.req("S2.27")
def test_what_was_in_memory_only_is_gone_after_a_restart(start_broker):
    broker = start_broker("memory")
    attach_kept(broker, "s").subscribe("a", qos=1)
    attach(broker, "p").publish("a", b"m", 1, retain=True)
    broker.stop()
    broker.start()
    back = attach_kept(broker, "s")
    assert back.connack is not None and not back.connack.session_present
    back.subscribe("#", qos=1)
    back.nothing(0.1)


@pytest.mark.req("S2.27", "S4.14")
def test_the_log_is_on_disk_unless_the_user_says_otherwise(tmp_path):
    with _Unasked(tmp_path / "data") as broker, RawClient(broker.port) as pub:
        pub.connect("p")
        pub.publish("a", b"on disk", 1)
        assert any(b"on disk" in path.read_bytes() for path in (tmp_path / "data" / "log").iterdir())


class _Unasked(BrokerProcess):
    """A broker that is told nothing about durability."""

    def arguments(self) -> list[str]:
        return ["--data", str(self.data), "--port", str(self.port)]


def _position(broker: BrokerProcess, client_id: str) -> int:
    facts = stored_session(broker.data, client_id)
    assert facts is not None
    return facts.position
