"""What a session missed comes first and in order; its position follows its acknowledgements and survives restarts."""

from __future__ import annotations

import threading

import pytest
from stored import KEPT, attach, attach_kept, eventually, stored_session

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel


def publish_numbers(broker: BrokerProcess, first: int, end: int, qos: int = 1, padding: int = 0) -> None:
    """Publish numbers to `n`, in one stream, and wait for all acknowledgements."""
    pub = attach(broker, f"numbers from {first}")
    for i in range(first, end):
        pub.publish("n", b"%d " % i + b"x" * padding, qos, wait=False)
        if qos == 2:
            pub.expect(Pubrec)
            pub.send(Pubrel(pub._next_id))
            pub.expect(Pubcomp)
    if qos == 1:
        for _ in range(first, end):
            pub.expect(Puback)
    pub.disconnect()


def numbers(sub: RawClient, count: int) -> list[int]:
    return [int(sub.message().payload.split()[0]) for _ in range(count)]


def leave_subscribed(broker: BrokerProcess, qos: int, version: int = 5) -> None:
    sub = attach_kept(broker, "s", version)
    sub.subscribe("n", qos=qos)
    sub.disconnect()


# ── S0.12 ──

SMALL = {"log__tail_bytes": 65536, "log__segment_bytes": 65536, "log__retention_bytes": 1 << 30}


@pytest.mark.req("S0.12")
@pytest.mark.parametrize("settings", [{}, SMALL], ids=["from memory", "from disk"])
@pytest.mark.parametrize("window", [None, 7], ids=["wide window", "narrow window"])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_was_missed_comes_before_what_is_published_meanwhile(start_broker, settings, window, qos):
    broker = start_broker(**settings)
    leave_subscribed(broker, qos)
    publish_numbers(broker, 0, 300, qos, padding=500)
    meanwhile = threading.Thread(target=publish_numbers, args=(broker, 300, 400, qos, 500))
    meanwhile.start()
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=3600, receive_maximum=window))
    assert numbers(sub, 400) == list(range(400))
    meanwhile.join()


@pytest.mark.req("S0.12")
def test_a_client_whose_window_was_full_first_gets_what_it_missed(client, unique):
    sub = client(unique, 5, properties=Properties(receive_maximum=3))
    sub.subscribe(unique, qos=1)
    pub = client(unique + "p")
    for i in range(20):
        pub.publish(unique, b"%d" % i, 1)
    first = [sub.message(acknowledge=False) for _ in range(3)]
    sub.nothing()
    for publish in first:
        sub.send(Puback(publish.packet_id))
    pub.publish(unique, b"20", 1)
    rest = [int(sub.message().payload) for _ in range(18)]
    assert rest == list(range(3, 21))


@pytest.mark.req("S0.12", "S0.19")
def test_only_what_matches_and_was_missed_is_handed_over(start_broker):
    broker = start_broker(**SMALL)
    leave_subscribed(broker, 1)
    pub = attach(broker, "p")
    for i in range(500):
        pub.publish(f"other/{i % 50}", b"x" * 500, 1, wait=False)
        if i % 100 == 50:
            pub.publish("n", b"%d" % (i // 100), 1, wait=False)
    for _ in range(505):
        pub.expect(Puback)
    sub = attach_kept(broker, "s")
    assert numbers(sub, 5) == [0, 1, 2, 3, 4]
    sub.nothing()


# ── S0.13 ──


def position(broker: BrokerProcess, client_id: str = "s") -> int:
    facts = stored_session(broker.data, client_id)
    assert facts is not None
    return facts.position


@pytest.mark.req("S0.13")
@pytest.mark.parametrize("ending", ["drop", "kill", "stop"])
@pytest.mark.parametrize("version", [4, 5])
def test_what_was_acknowledged_is_not_sent_again_and_the_rest_is(start_broker, ending, version):
    broker = start_broker()
    sub = attach_kept(broker, "s", version)
    sub.subscribe("n", qos=1)
    publish_numbers(broker, 0, 10)
    got = [sub.message(acknowledge=False) for _ in range(10)]
    for publish in got[:4]:
        sub.send(Puback(publish.packet_id))
    eventually(lambda: position(broker) == 4)
    sub.close()
    if ending != "drop":
        getattr(broker, ending)()
        broker.start()
    sub = attach_kept(broker, "s", version)
    again = [sub.message() for _ in range(6)]
    assert [int(publish.payload) for publish in again] == [4, 5, 6, 7, 8, 9]
    if ending == "drop":
        assert all(publish.dup for publish in again)
        assert [p.packet_id for p in again] == [p.packet_id for p in got[4:]]
    eventually(lambda: position(broker) >= 10)  # after a kill positions go on beyond a gap


@pytest.mark.req("S0.13")
def test_without_any_acknowledgement_the_position_stays(start_broker):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("n", qos=1)
    publish_numbers(broker, 0, 10)
    for _ in range(10):
        sub.message(acknowledge=False)
    sub.disconnect()
    broker.stop()
    assert position(broker) == 0
    broker.start()
    assert numbers(attach_kept(broker, "s"), 10) == list(range(10))


@pytest.mark.req("S0.13")
def test_a_gap_in_the_acknowledgements_holds_the_position(start_broker):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("n", qos=1)
    publish_numbers(broker, 0, 6)
    got = [sub.message(acknowledge=False) for _ in range(6)]
    for i in (0, 1, 3, 4, 5):
        sub.send(Puback(got[i].packet_id))
    eventually(lambda: position(broker) == 2)
    broker.stop()
    assert position(broker) == 2
    broker.start()
    assert numbers(attach_kept(broker, "s"), 1) == [2]


@pytest.mark.req("S0.13")
@pytest.mark.parametrize("ending", ["drop", "kill", "stop"])
def test_a_qos_2_message_counts_from_its_pubrec_on_and_is_never_sent_twice(start_broker, ending):
    broker = start_broker("fsync")
    sub = attach_kept(broker, "s")
    sub.subscribe("n", qos=2)
    publish_numbers(broker, 0, 3, qos=2)
    got = [sub.message(acknowledge=False) for _ in range(3)]
    sub.send(Pubrec(got[0].packet_id))
    sub.expect(Pubrel)  # the PUBREC is stored
    sub.close()
    if ending != "drop":
        getattr(broker, ending)()
        broker.start()
    sub = attach_kept(broker, "s")
    back = [sub.receive() for _ in range(3)]
    assert {p.packet_id for p in back if isinstance(p, Pubrel)} == {got[0].packet_id}
    again = [p for p in back if isinstance(p, Publish)]
    assert [(p.payload, p.packet_id, p.dup) for p in again] == [(p.payload, p.packet_id, True) for p in got[1:]]


@pytest.mark.req("S0.13")
@pytest.mark.parametrize("ending", ["drop", "kill", "stop"])
def test_a_qos_0_message_counts_as_soon_as_it_is_written(start_broker, ending):
    broker = start_broker()
    sub = attach_kept(broker, "s")
    sub.subscribe("n", qos=0)
    sub.subscribe("one", qos=1)
    publish_numbers(broker, 0, 5)
    assert numbers(sub, 5) == [0, 1, 2, 3, 4]
    sub.close()
    if ending != "drop":
        getattr(broker, ending)()
        broker.start()
    sub = attach_kept(broker, "s")
    attach(broker, "p").publish("one", b"5", 1)
    assert numbers(sub, 1) == [5]


@pytest.mark.req("S0.13")
def test_a_session_that_is_away_keeps_its_position_over_many_restarts(start_broker):
    broker = start_broker("fsync")
    leave_subscribed(broker, 1, version=4)
    for i in range(4):
        publish_numbers(broker, 10 * i, 10 * (i + 1))
        broker.stop() if i % 2 else broker.kill()
        broker.start()
    sub = attach_kept(broker, "s", 4)
    assert sub.connack.session_present
    assert numbers(sub, 40) == list(range(40))


@pytest.mark.req("S0.13")
def test_each_session_has_a_position_of_its_own(broker):
    quick, slow = (attach_kept(broker, name, properties=KEPT) for name in ("quick", "slow"))
    for sub in (quick, slow):
        sub.subscribe("n", qos=1)
    publish_numbers(broker, 0, 10)
    assert numbers(quick, 10) == list(range(10))
    assert numbers(slow, 3) == [0, 1, 2]
    eventually(lambda: (position(broker, "quick"), position(broker, "slow")) == (10, 3))


@pytest.mark.req("S0.12")
@pytest.mark.parametrize("there", ["away", "connected"])
def test_messages_of_one_publisher_on_one_topic_keep_their_order_whatever_their_qos(start_broker, there):
    broker = start_broker("fsync")
    sub = attach_kept(broker, "s")
    sub.subscribe("n", qos=2)
    if there == "away":
        sub.disconnect()
    pub = attach(broker, "p", 5)
    for i in range(40):
        pub.publish("n", b"%d" % i, 2 if i % 4 == 0 else 1, packet_id=i + 1, wait=False)
    for _ in range(40):
        pub.receive()
    if there == "away":
        sub = attach_kept(broker, "s")
    assert [int(sub.amid(Publish).payload) for _ in range(40)] == list(range(40))
