"""The broker on a log of three partitions that answer late, out of order between them, and now and then not at all.

Scripted scenes first, then searches: `partitioned` has the rules, `partitioned_stories` random sequences from a seed.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from hypothesis_profiles import TORTURE, examples
from partitioned import PARTITIONS, TOPICS, PartitionedFlows, PartitionedLog
from partitioned_stories import PartitionedStories
from simulated import Answerer, SimulatedBroker, SimulatedClient

from tidegate.wire import FilterRequest, Puback, Publish, Pubrec, Subscribe, Unsubscribe

STORIES = 300
STEPS = 60
CHAPTERS = 120 if TORTURE else 4


@pytest.fixture
def simulated() -> SimulatedBroker:
    return SimulatedBroker(PartitionedLog(), inflight_max=100)


def home(topic: bytes) -> int:
    """The partition of a topic in the simulated log."""
    return sum(topic) % PARTITIONS


A, B, C = sorted(TOPICS[:3], key=home)  # a topic of each partition, in their order


def subscriber(simulated: SimulatedBroker, *filters: bytes, name: str = "s", qos: int = 1) -> SimulatedClient:
    client = simulated.client(name, 5, clean=False, session_expiry=1000)
    client.send(*(Subscribe(n, (FilterRequest(filter, qos),)) for n, filter in enumerate(filters or (b"#",), 1)))
    simulated.rest()
    client.received()
    return client


def returned(simulated: SimulatedBroker, name: str = "s") -> SimulatedClient:
    return simulated.client(name, 5, clean=False, session_expiry=1000)


def publish(client: SimulatedClient, *messages: tuple[bytes, bytes], qos: int = 1, retain: bool = False) -> None:
    client.send(
        *(
            Publish(topic, payload, qos, retain=retain, packet_id=client.next_packet_id() if qos else 0)
            for topic, payload in messages
        )
    )


def payloads(client: SimulatedClient) -> list[bytes]:
    return [packet.payload for packet in client.only(Publish)]


# ── scenes ──


def test_what_a_partition_announces_is_delivered_whatever_the_others_do(simulated):
    sub, publisher = subscriber(simulated, qos=0), simulated.client("p", 5)
    publish(publisher, (A, b"1"), (B, b"2"), (C, b"3"), (A, b"4"))
    simulated.tick()
    got: list[bytes] = []
    for partition in (2, 0, 1):
        simulated.log.announce(partition)
        simulated.broker.flush()
        got += payloads(sub)
    assert got == [b"3", b"1", b"4", b"2"]


@pytest.mark.parametrize(("qos", "answer"), [(1, Puback), (2, Pubrec)])
def test_nothing_is_acknowledged_before_every_partition_has_stored_it(simulated, qos, answer):
    subscriber(simulated)
    publisher = simulated.client("p", 5)
    publisher.received()
    publish(publisher, (A, b"1"), (B, b"2"), (C, b"3"), qos=qos)
    simulated.tick()
    for partition in range(PARTITIONS):
        simulated.log.announce(partition)
        simulated.tick()
        assert publisher.received() == []
    simulated.log.store()
    simulated.tick()
    assert [type(packet) for packet in publisher.received()] == [answer] * 3


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("refused", ["nothing", "within the call", "later"])
@pytest.mark.parametrize(("qos", "answer"), [(1, Puback), (2, Pubrec)])
def test_what_waits_for_the_record_of_a_retained_message_is_not_overtaken(qos, answer, refused, prompt):
    """[MQTT-4.6.0-2], [MQTT-4.6.0-3]: the record is appended behind messages that came after its own."""
    simulated = SimulatedBroker(PartitionedLog(prompt=prompt))
    subscriber(simulated)
    publisher = simulated.client("p", 5)
    publisher.received()
    publish(publisher, (A, b"1"), qos=qos, retain=True)
    simulated.tick()
    publish(publisher, (B, b"2"), qos=qos)
    publish(publisher, (A, b"3"), qos=qos)
    simulated.broker.settle()
    simulated.log.refusing = refused == "within the call"
    simulated.log.store()
    assert publisher.received() == []
    if refused == "later":
        simulated.log.refuse(1)
    simulated.rest()
    simulated.log.refusing = False
    simulated.pass_time(1)
    simulated.rest()
    assert publisher.received() == [answer(1), answer(2), answer(3)]
    assert simulated.broker.storing.idle
    simulated.crash()
    late = simulated.client("late", 5)
    late.send(Subscribe(1, (FilterRequest(b"#", 1),)))
    simulated.rest()
    assert payloads(late) == [b"1"]


@pytest.mark.parametrize("crash", [False, True])
def test_a_reader_has_a_position_in_each_partition(simulated, crash):
    """What it acknowledged of one does not come again; what it did not of another does."""
    sub, publisher = subscriber(simulated), simulated.client("p", 5)
    publish(publisher, (A, b"1"), (B, b"2"), (C, b"3"))
    simulated.rest()
    for packet in sub.only(Publish):
        if packet.payload in (b"1", b"3"):
            sub.send(Puback(packet.packet_id))
    simulated.pass_time(1)
    simulated.rest()
    sub.drop()
    simulated.rest()
    if crash:
        simulated.crash()
    assert payloads(returned(simulated)) == [b"2"]


def test_what_comes_back_while_a_client_is_away_waits_for_it(simulated):
    sub, publisher = subscriber(simulated), simulated.client("p", 5)
    publish(publisher, (A, b"1"), (B, b"2"), (C, b"3"))
    simulated.tick()
    simulated.log.announce(home(B))
    simulated.tick()
    assert payloads(sub) == [b"2"]
    sub.drop()
    simulated.rest()
    assert sorted(payloads(returned(simulated))) == [b"1", b"2", b"3"]


def test_a_message_that_was_under_way_when_its_filter_went_does_not_come(simulated):
    sub, publisher = subscriber(simulated), simulated.client("p", 5)
    publish(publisher, (A, b"1"), (B, b"2"), qos=1)
    simulated.tick()
    simulated.log.announce(home(A))
    simulated.tick()
    sub.send(Unsubscribe(9, (b"#",)))
    simulated.rest()
    assert payloads(sub) == [b"1"]
    sub.send(Subscribe(10, (FilterRequest(b"#", 1),)))
    simulated.rest()
    assert payloads(sub) == []


def test_a_narrow_window_takes_from_all_partitions_in_turn(simulated):
    sub = simulated.client("s", 5, clean=False, session_expiry=1000, receive_maximum=1)
    sub.send(Subscribe(1, (FilterRequest(b"#", 1),)))
    simulated.rest()
    sub.received()
    publisher = simulated.client("p", 5)
    sent = [(topic, b"%s %d" % (topic, n)) for n in range(5) for topic in TOPICS]
    publish(publisher, *sent)
    answers, got = Answerer(sub), []
    for _ in range(100):
        simulated.rest()
        answers.look()
        assert len(answers.owed) <= 1
        answers.acknowledge([0])
    got = [packet.payload for packet in answers.transcript]
    assert Counter(got) == Counter(payload for _, payload in sent)
    for topic in TOPICS:
        assert [p for p in got if p.startswith(topic)] == [payload for t, payload in sent if t == topic]


@pytest.mark.parametrize("crash", [False, True])
def test_a_group_gets_each_message_of_each_partition_once(simulated, crash):
    workers = [subscriber(simulated, b"$share/g/#", name=name) for name in ("w1", "w2")]
    publisher = simulated.client("p", 5)
    got: Counter[bytes] = Counter()
    for n in range(6):
        publish(publisher, *((topic, b"%s%d" % (topic, n)) for topic in TOPICS))
        simulated.tick()
        simulated.log.announce(n % PARTITIONS)
        simulated.tick()
        if n == 3:
            simulated.rest()
            for worker in workers:
                packets = worker.only(Publish)
                got.update(packet.payload for packet in packets)
                worker.send(*(Puback(packet.packet_id) for packet in packets))
            simulated.pass_time(1)
            simulated.rest()
            if crash:
                for worker in workers:
                    worker.drop()
                simulated.rest()
                simulated.crash()
                workers = [returned(simulated, name) for name in ("w1", "w2")]
                publisher = simulated.client("p", 5)
    simulated.rest()
    for worker in workers:
        got.update(payloads(worker))
    assert got == Counter(b"%s%d" % (topic, n) for topic in TOPICS for n in range(6))


def test_a_replay_goes_through_every_partition_and_then_stays_live(simulated):
    publisher = simulated.client("p", 5)
    publish(publisher, *((topic, b"%s %d" % (topic, n)) for n in range(3) for topic in TOPICS))
    simulated.rest()
    publish(publisher, (A, A + b" 3"), (B, B + b" 3"))
    simulated.tick()
    simulated.log.announce(home(B))
    sub = simulated.client("s", 5)
    sub.received()
    sub.send(Subscribe(1, (FilterRequest(b"$replay/earliest/#", 1),)))
    simulated.tick()
    publish(publisher, (C, C + b" 3"))
    simulated.rest()
    got = payloads(sub)
    expected = [b"%s %d" % (topic, n) for topic in TOPICS for n in range(4 if topic in (A, B, C) else 3)]
    assert Counter(got) == Counter(expected)
    for topic in TOPICS:
        assert [p for p in got if p.startswith(topic)] == [p for p in expected if p.startswith(topic)]


def test_a_replay_from_a_position_begins_there_and_at_the_end_of_the_other_partitions(simulated):
    publisher, sub = simulated.client("p", 5), simulated.client("s", 5)
    publish(publisher, *((topic, b"%s %d" % (topic, n)) for n in range(4) for topic in (A, B, C)))
    simulated.rest()
    places = {run.payloads[i]: position for position, run, i in simulated.log.messages()}
    publish(publisher, (A, A + b" 4"), (B, B + b" 4"), (C, C + b" 4"))
    simulated.tick()
    simulated.log.announce(home(C))
    sub.received()
    sub.send(Subscribe(1, (FilterRequest(b"$replay/%d/#" % places[B + b" 2"], 1),)))
    simulated.rest()
    got = payloads(sub)
    assert sorted(got) == sorted([B + b" 2", B + b" 3", B + b" 4", A + b" 4"])
    assert [payload for payload in got if payload.startswith(B)] == [B + b" 2", B + b" 3", B + b" 4"]


@pytest.mark.parametrize("crash", [False, True])
def test_a_replay_from_a_time_begins_then_in_every_partition(simulated, crash):
    publisher, sub = simulated.client("p", 5), returned(simulated)
    for n, topics in enumerate([(A, B, C), (A, C), (C, B), (A, B)]):
        simulated.pass_time(10)
        publish(publisher, *((topic, b"%s %d" % (topic, n)) for topic in topics))
        simulated.rest()
    sub.send(Subscribe(1, (FilterRequest(b"$replay/@1030/#", 1),)))  # when the third pair came
    expected = sorted([C + b" 2", B + b" 2", A + b" 3", B + b" 3"])
    simulated.rest()
    assert sorted(payloads(sub)) == expected
    sub.drop()
    if crash:
        simulated.rest()
        simulated.crash()
    assert sorted(payloads(returned(simulated))) == expected


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("topic", [A, B, C])
def test_a_retained_message_reaches_who_subscribes_meanwhile_once(simulated, topic, announced):
    publisher = simulated.client("p", 5)
    publish(publisher, (topic, b"old"), retain=True)
    simulated.rest()
    publish(publisher, (topic, b"new"), retain=True)
    simulated.tick()
    if announced:
        simulated.log.announce(home(topic))
    sub = simulated.client("s", 5)
    sub.received()
    sub.send(Subscribe(1, (FilterRequest(b"#", 1),)))
    simulated.rest()
    got = payloads(sub)
    assert got[-1] == b"new"
    assert Counter(got) <= Counter([b"old", b"new"])
    late = simulated.client("late", 5)
    late.received()
    late.send(Subscribe(1, (FilterRequest(b"#", 1),)))
    simulated.rest()
    assert payloads(late) == [b"new"]


@pytest.mark.parametrize("topic", [A, B, C])
def test_what_is_retained_while_earlier_ones_are_handed_over_comes_as_itself_only(simulated, topic):
    """Each partition has its own end of what was there before the subscription."""
    publisher = simulated.client("p", 5)
    others = [other for other in (A, B, C) if other != topic]
    publish(publisher, *((other, b"old") for other in others), retain=True)
    simulated.rest()
    sub = simulated.client("s", 5, receive_maximum=1)
    sub.received()
    sub.send(Subscribe(1, (FilterRequest(b"full", 1),)))
    simulated.rest()
    publish(publisher, (b"full", b""))
    simulated.rest()
    sub.send(Subscribe(2, (FilterRequest(b"t/#", 1),)))
    simulated.rest()
    publish(publisher, (topic, b"new"), retain=True)
    simulated.rest()
    answers = Answerer(sub)
    for _ in range(8):
        simulated.rest()
        answers.look()
        answers.acknowledge([0])
    got = [(packet.topic, packet.retain) for packet in answers.transcript if isinstance(packet, Publish)]
    assert sorted(got) == sorted([(b"full", False), *((other, True) for other in others), (topic, False)])


def test_what_joins_a_flight_that_is_sent_again_is_not_sent_again_with_it():
    """A member of a group returns, and before all of its old messages are out gets a new one right behind them."""
    everyone = [("w2", b"t/+", 2), ("clean", b"t/a", 2), ("narrow", b"t/a", 2), ("v3", b"t/a", 2), ("w3", b"#", 1)]
    story = [
        ("begin", {"tail_bytes": 3000, "present": everyone}),
        ("go", {"place": 4, "graceful": False, "unseen": False}),
        ("publish", {"place": 3, "topics": [b"t/d", b"t/d", b"t/b"], "qos": 1, "count": 2, "hurry": False}),
        ("go", {"place": 1, "graceful": True, "unseen": True}),
        ("publish", {"place": 5, "topics": [b"t/b"], "qos": 2, "count": 3, "hurry": False}),
        ("subscribe", {"place": 0, "pattern": b"t/+", "qos": 1}),
        ("surroundings", {"what": ["rest"]}),
        ("acknowledge", {"place": 2, "which": 0, "count": 3}),
        ("connect", {"name": "w2"}),
    ]
    error = PartitionedStories().play(story)
    if error is not None:
        raise error


# ── searches ──


@given(st.randoms(use_true_random=False), st.integers(0, 3))
@examples(150)
def test_of_retained_messages_the_last_acknowledged_one_or_a_later_is_there_after_a_crash(random: Random, kept: int):
    simulated = SimulatedBroker(PartitionedLog())
    publisher = simulated.client("p", 5, receive_maximum=100)
    publisher.received()
    topics: dict[int, bytes] = {}  # by packet id, which is also the payload
    refused: set[int] = set()
    acknowledged: set[int] = set()
    for _ in range(25):
        _stir(simulated, random)
        if random.random() < 0.6:
            pid = publisher.next_packet_id()
            topics[pid] = random.choice(TOPICS)
            publisher.send(Publish(topics[pid], b"%d" % pid, 1, retain=True, packet_id=pid))
        for packet in publisher.only(Puback):
            (acknowledged if packet.reason < 0x80 else refused).add(packet.packet_id)
    simulated.crash(kept)
    simulated.log.refusing = False
    sub = simulated.client("s", 5)
    sub.received()
    sub.send(Subscribe(1, (FilterRequest(b"#", 0),)))
    simulated.rest()
    got = {packet.topic: int(packet.payload) for packet in sub.only(Publish) if packet.retain}
    for topic in TOPICS:
        newest = max((pid for pid in acknowledged if topics[pid] == topic), default=0)
        assert got.get(topic, 0) >= newest
        assert got.get(topic, 0) not in refused
        assert topics.get(got.get(topic, -1), topic) == topic


@given(st.randoms(use_true_random=False), st.booleans())
@examples(150)
def test_a_replay_finds_all_that_was_taken_in_order_and_nothing_else(random: Random, crash: bool):
    simulated = SimulatedBroker(PartitionedLog(), tail_bytes=random.choice((1, 3000, 1 << 20)), inflight_max=1000)
    publisher = simulated.client("p", 5)
    publisher.received()
    answers: dict[int, int] = {}
    sent: dict[int, bytes] = {}
    sub: SimulatedClient | None = None
    begin = random.randrange(25)
    got: list[Publish] = []
    for n in range(25):
        _stir(simulated, random)
        for _ in range(random.randrange(4)):
            pid = publisher.next_packet_id()
            sent[pid] = random.choice(TOPICS)
            publisher.send(Publish(sent[pid], b"%d" % pid, 1, packet_id=pid))
        if n == begin and not crash:
            sub = SimulatedClient(simulated, 5)
            sub.connect("s")
            sub.send(Subscribe(1, (FilterRequest(b"$replay/earliest/#", 0),)))
        answers |= {packet.packet_id: packet.reason for packet in publisher.only(Puback)}
        got += sub.only(Publish) if sub is not None else []
    simulated.log.refusing = False
    simulated.pass_time(1)
    simulated.rest()
    answers |= {packet.packet_id: packet.reason for packet in publisher.only(Puback)}
    assert answers.keys() == sent.keys(), "some publisher never got an answer"
    if crash:
        simulated.crash()
    if sub is None:
        sub = simulated.client("s", 5)
        sub.received()
        sub.send(Subscribe(1, (FilterRequest(b"$replay/earliest/#", 0),)))
    simulated.rest()
    got += sub.only(Publish)
    for topic in TOPICS:
        taken = [pid for pid, where in sent.items() if where == topic and answers[pid] < 0x80]
        assert [int(packet.payload) for packet in got if packet.topic == topic] == taken


def _stir(simulated: SimulatedBroker, random: Random) -> None:
    """Something happens around the broker, or nothing."""
    log: Any = simulated.log
    for _ in range(random.randrange(4)):
        what = random.choice(("tick", "tick", "announce", "announce", "store", "answer", "time", "refuse", "full"))
        if what == "tick":
            simulated.tick()
        elif what == "announce":
            partition = random.randrange(PARTITIONS)
            if log._unannounced[partition]:
                log.announce(partition)
        elif what == "time":
            log.refusing = False
            simulated.pass_time(0.1)
        elif what == "refuse":
            log.refuse(random.randint(1, 2))
        elif what == "full":
            log.refusing = random.random() < 0.3
        else:
            getattr(log, what)()


@pytest.mark.timeout(900)  # for looking for the shortest way to a failure
def test_sessions_keep_their_promises_whatever_partitions_do():
    run_state_machine_as_test(PartitionedFlows, settings=examples(150, stateful_step_count=40))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chapter", range(CHAPTERS))
def test_sessions_keep_their_promises_in_every_story(chapter):
    PartitionedStories().must_go_well(range(chapter * STORIES, (chapter + 1) * STORIES), STEPS)
