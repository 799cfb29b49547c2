"""What clients see when the log takes nothing, told at once or later; and what is left when there is room again."""

from __future__ import annotations

from collections import Counter

import pytest
from partitioned import PARTITIONS, PartitionedLog
from simulated import SimulatedBroker, SimulatedClient, SimulatedLog

from tidegate.session import changes
from tidegate.wire import (
    Disconnect,
    FilterRequest,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsubscribe,
)

TOPICS = (b"t/a", b"t/b", b"t/c")  # one for each partition
LATE = pytest.mark.parametrize("told", ["at once", "later"])


@pytest.fixture
def simulated() -> SimulatedBroker:
    return SimulatedBroker(PartitionedLog())


def refuse(simulated: SimulatedBroker, told: str) -> None:
    """What has been sent is not taken by the log."""
    log = simulated.log
    assert isinstance(log, PartitionedLog)
    if told == "at once":
        log.refusing = True
        simulated.tick()
    else:
        simulated.tick()
        assert log.refusable()
        log.refuse(100)
        log.refusing = True
    simulated.tick()


def room(simulated: SimulatedBroker) -> None:
    simulated.log.refusing = False
    simulated.pass_time(1)
    simulated.rest()


def payloads(client: SimulatedClient) -> list[bytes]:
    return [packet.payload for packet in client.only(Publish)]


def stored(simulated: SimulatedBroker) -> Counter[bytes]:
    return Counter(run.payloads[i] for _, run, i in simulated.log.messages(safe=True))


def subscriber(simulated: SimulatedBroker, name: str = "s", qos: int = 0, **connect: object) -> SimulatedClient:
    client = simulated.client(name, 5, **connect)
    client.send(Subscribe(1, (FilterRequest(b"#", qos),)))
    simulated.rest()
    client.received()
    return client


@LATE
@pytest.mark.parametrize(("qos", "answer"), [(1, Puback), (2, Pubrec)])
def test_mqtt_5_publishers_are_told_that_there_is_no_room(simulated, told, qos, answer):
    sub = subscriber(simulated)
    publisher = simulated.client("p", 5)
    publisher.received()
    publisher.send(*(Publish(topic, b"refused", qos, packet_id=n) for n, topic in enumerate(TOPICS, 1)))
    refuse(simulated, told)
    assert [(type(p), p.packet_id, p.reason) for p in publisher.received()] == [(answer, n, 0x97) for n in (1, 2, 3)]
    room(simulated)
    assert publisher.open
    assert payloads(sub) == []
    publisher.send(*(Publish(topic, b"taken", qos, packet_id=n) for n, topic in enumerate(TOPICS, 1)))
    simulated.rest()
    assert [(type(p), p.reason) for p in publisher.received()] == [(answer, 0)] * 3
    assert stored(simulated) == {b"taken": 3}
    assert payloads(sub) == [b"taken"] * 3


@LATE
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("topics", [TOPICS[:1], TOPICS[:1] * 2, TOPICS])
@pytest.mark.parametrize("apart", [False, True])
def test_mqtt_3_publishers_are_closed_and_nothing_that_they_send_again_is_lost(simulated, told, qos, topics, apart):
    """A PUBREC for a message that the log does not hold would lose it: its client lets go of it."""
    sub = subscriber(simulated)
    publisher = simulated.client("p", 4, clean=False)
    publisher.received()
    sent = [Publish(topic, b"%d" % n, qos, packet_id=n) for n, topic in enumerate(topics, 1)]
    for packets in [[packet] for packet in sent] if apart else [sent]:
        publisher.send(*packets)
    refuse(simulated, told)
    assert publisher.received() == []
    assert not publisher.open
    assert publisher.link.closed
    room(simulated)
    again = simulated.client("p", 4, clean=False)
    again.received()
    again.send(*(Publish(p.topic, p.payload, p.qos, dup=True, packet_id=p.packet_id) for p in sent))
    simulated.rest()
    assert [packet.packet_id for packet in again.only(Puback if qos == 1 else Pubrec)] == [p.packet_id for p in sent]
    assert stored(simulated) == Counter(p.payload for p in sent)
    assert Counter(payloads(sub)) == Counter(p.payload for p in sent)


@LATE
def test_a_refused_message_that_its_client_sends_again_after_it_went_away_is_stored(simulated, told):
    publisher = simulated.client("p", 5, clean=False, session_expiry=1000)
    publisher.received()
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=1))
    simulated.tick()
    if told == "later":
        publisher.drop()  # before it can be told
        simulated.tick()
        simulated.log.refuse(100)
        simulated.tick()
    else:
        simulated.log.refusing = True
        publisher.send(Publish(b"t/a", b"y", 2, packet_id=2))
        publisher.drop()
        simulated.tick()
    room(simulated)
    again = simulated.client("p", 5, clean=False, session_expiry=1000)
    again.received()
    again.send(Publish(b"t/a", b"x", 2, dup=True, packet_id=1), Publish(b"t/a", b"y", 2, dup=True, packet_id=2))
    simulated.rest()
    assert [packet.packet_id for packet in again.only(Pubrec)] == [1, 2]
    assert stored(simulated) == {b"x": 1, b"y": 1}


@LATE
@pytest.mark.parametrize("restart", [False, True])
def test_a_packet_id_that_was_refused_is_free_for_another_message(simulated, told, restart):
    """Also after a restart: what was written down once there was room must not know of it."""
    publisher = simulated.client("p", 5, clean=False, session_expiry=1000)
    publisher.received()
    publisher.send(Publish(b"t/a", b"refused", 2, packet_id=7))
    refuse(simulated, told)
    assert [packet.reason for packet in publisher.only(Pubrec)] == [0x97]
    room(simulated)
    if restart:
        publisher.drop()
        simulated.rest()
        simulated.crash()
        publisher = simulated.client("p", 5, clean=False, session_expiry=1000)
        publisher.received()
    publisher.send(Publish(b"t/a", b"another", 2, packet_id=7))
    simulated.rest()
    assert [packet.reason < 0x80 for packet in publisher.only(Pubrec)] == [True]
    assert stored(simulated) == {b"another": 1}


def test_a_log_that_refuses_is_not_asked_to_store_without_end(simulated):
    """Nothing has been appended since the last sync; what was refused waits for room, not for the disk."""
    publisher = simulated.client("p", 5, clean=False, session_expiry=1000)
    simulated.log.refusing = True
    publisher.send(Subscribe(1, (FilterRequest(b"#", 1),)))
    simulated.rest()  # it comes to rest, that is


def test_a_full_disk_is_not_synced_over_and_over():
    log = SimulatedLog()
    simulated = SimulatedBroker(log)
    publisher = simulated.client("p", 4, clean=False)
    log.refusing = True
    publisher.send(Subscribe(1, (FilterRequest(b"#", 1),)))
    simulated.tick()
    syncs = 0
    while log._requested is not None and syncs < 100:
        log.store()
        syncs += 1
    assert syncs < 3


@LATE
def test_what_was_promised_with_a_refused_change_is_answered_when_there_is_room(simulated, told):
    sub = simulated.client("s", 5, clean=False, session_expiry=1000)
    sub.received()
    sub.send(Subscribe(1, (FilterRequest(b"#", 1),)))
    refuse(simulated, told)
    assert [p for p in sub.received() if isinstance(p, Suback) and p.reasons[0] < 0x80] == []
    room(simulated)
    simulated.crash()
    again = simulated.client("s", 5, clean=False, session_expiry=1000)
    assert again.connack().session_present


def test_changes_that_are_refused_late_are_written_in_their_order():
    """The log refuses an append, and with it what was appended after it."""
    simulated = SimulatedBroker(PartitionedLog())
    log = simulated.log
    assert isinstance(log, PartitionedLog)
    sub = simulated.client("s", 5, clean=False, session_expiry=1000)
    sub.send(Subscribe(1, (FilterRequest(b"t/a", 1),)))
    simulated.tick()
    sub.send(Unsubscribe(2, (b"t/a",)))
    simulated.tick()
    assert len(log.refusable()) == 2
    log.refuse(2)
    room(simulated)
    simulated.crash()
    publisher = simulated.client("p", 5)
    publisher.send(Publish(b"t/a", b"x", 1, packet_id=1))
    again = simulated.client("s", 5, clean=False, session_expiry=1000)
    simulated.rest()
    assert payloads(again) == []


@LATE
def test_a_release_that_is_refused_is_answered_when_there_is_room(simulated, told):
    publisher = simulated.client("p", 5)
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=1))
    simulated.rest()
    publisher.received()
    publisher.send(Pubrel(1))
    refuse(simulated, told)
    room(simulated)
    assert [type(packet).__name__ for packet in publisher.received()] == ["Pubcomp"]
    assert stored(simulated) == {b"x": 1}


@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_who_is_told_of_a_message_is_not_told_of_another_that_was_refused(simulated, partition):
    sub = subscriber(simulated)
    publisher = simulated.client("p", 5)
    publisher.received()
    for n, topic in enumerate(TOPICS, 1):
        publisher.send(Publish(topic, topic, 1, packet_id=n))
        simulated.tick()
    for other in range(PARTITIONS):
        if other != partition:
            simulated.log.announce(other)
    before = payloads(sub)
    assert len(before) == 0  # not written before the tick
    simulated.log.refuse(100)
    room(simulated)
    got = payloads(sub)
    answers = publisher.only(Puback)
    assert {topic for topic in TOPICS if topic in got} == {TOPICS[p.packet_id - 1] for p in answers if not p.reason}
    assert sorted(p.packet_id for p in answers) == [1, 2, 3]
    assert not any(isinstance(packet, Disconnect) for packet in publisher.received())


@LATE
@pytest.mark.parametrize("filter", [b"#", b"$share/g/#", b"$replay/0/#"])
def test_who_unsubscribes_while_the_log_refuses_is_not_subscribed_after_a_restart(simulated, told, filter):
    sub = simulated.client("s", 5, clean=False, session_expiry=1000)
    sub.send(Subscribe(1, (FilterRequest(filter, 1),)))
    simulated.rest()
    if told == "at once":
        simulated.log.refusing = True
        publisher = simulated.client("p", 4)
        publisher.send(Publish(b"t/a", b"refused", 1, packet_id=1))
        simulated.rest()  # now it is known that there is no room
        sub.send(Unsubscribe(2, (filter,)))
        simulated.rest()
    else:
        sub.send(Unsubscribe(2, (filter,)))
        refuse(simulated, told)
    room(simulated)
    assert [type(packet).__name__ for packet in sub.received()][-1] == "Unsuback"
    simulated.crash()
    again = simulated.client("s", 5, clean=False, session_expiry=1000)
    publisher = simulated.client("p", 4)
    publisher.send(Publish(b"t/a", b"x", 1, packet_id=1))
    simulated.rest()
    assert payloads(again) == []


@LATE
@pytest.mark.parametrize("steps", [1, 2])
def test_qos_2_that_a_client_takes_while_the_log_refuses_does_not_come_again_after_a_restart(simulated, told, steps):
    sub = subscriber(simulated, qos=2, clean=False, session_expiry=1000)
    publisher = simulated.client("p", 5)
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=1))
    simulated.rest()
    (message,) = sub.only(Publish)
    answers = [Pubrec(message.packet_id), Pubcomp(message.packet_id)][:steps]
    if told == "at once":
        simulated.log.refusing = True
        publisher.send(Publish(b"t/b", b"refused", 1, packet_id=2))
        simulated.rest()
    for answer in answers:
        sub.send(answer)
        simulated.tick()
    if told == "later":
        refuse(simulated, told)
    room(simulated)
    sub.drop()
    simulated.rest()
    simulated.crash()
    again = simulated.client("s", 5, clean=False, session_expiry=1000)
    simulated.rest()
    assert payloads(again) == []


@LATE
def test_a_session_that_ends_while_the_log_refuses_is_gone_after_a_restart(simulated, told):
    sub = subscriber(simulated, qos=1, clean=False, session_expiry=1000)
    if told == "at once":
        simulated.log.refusing = True
        simulated.client("p", 5).send(Publish(b"t/b", b"refused", 1, packet_id=2))
        simulated.rest()
    sub.send(Disconnect(0, Properties(session_expiry=0)))
    if told == "later":
        refuse(simulated, told)
    simulated.rest()
    room(simulated)
    simulated.crash()
    again = simulated.client("s", 5, clean=False, session_expiry=1000)
    assert not again.connack().session_present


def test_a_message_sent_again_is_not_refused_when_the_first_was_stored(simulated):
    """Its client would take it for lost and send it as another: twice, with QoS 2."""
    sub = subscriber(simulated)
    publisher = simulated.client("p", 4, clean=False)
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=1))
    simulated.rest()
    publisher.drop()  # before it has seen the PUBREC
    simulated.log.refusing = True
    for _ in range(2):
        again = simulated.client("p", 4, clean=False)
        again.send(Publish(b"t/a", b"x", 2, dup=True, packet_id=1))
        simulated.rest()
        room(simulated)
    assert stored(simulated) == {b"x": 1}
    assert payloads(sub) == [b"x"]


def test_what_is_written_when_there_is_room_does_not_know_of_messages_that_are_not(simulated):
    """A session is written as it is, while a message of it is still to be appended."""
    publisher = simulated.client("p", 5, clean=False, session_expiry=1000)
    simulated.log.refusing = True
    publisher.send(Publish(b"t/a", b"refused", 1, packet_id=1))
    simulated.rest()
    publisher.send(Disconnect())
    publisher = SimulatedClient(simulated, 5)
    publisher.connect("p", clean=False, session_expiry=1000)
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=2))
    simulated.log.refusing = False
    simulated.pass_time(1)
    simulated.crash(kept=100)
    again = simulated.client("p", 5, clean=False, session_expiry=1000)
    again.send(Publish(b"t/a", b"x", 2, dup=True, packet_id=2))
    simulated.rest()
    assert [packet.reason < 0x80 for packet in again.only(Pubrec)] == [True]
    assert stored(simulated) == {b"x": 1}


BEHIND = (
    Pubrec(9),
    Pubrel(9),
    Pubcomp(9),
    Puback(9),
    Subscribe(9, (FilterRequest(b"#", 1),)),
    Unsubscribe(9, (b"x",)),
    Publish(b"t/b", b"y", 2, packet_id=9),
    Publish(b"t/b", b"y"),
)


@pytest.mark.parametrize(
    "settling", [Pubrel(8), Subscribe(8, (FilterRequest(b"t/a", 1),))], ids=["Pubrel", "Subscribe"]
)
@pytest.mark.parametrize("behind", BEHIND, ids=lambda packet: type(packet).__name__)
def test_a_client_that_is_closed_in_the_midst_of_what_it_sent_harms_nobody(simulated, settling, behind):
    """A message, something that settles it, and something behind that, all in one piece: at the second the log refuses,
    and the connection is closed."""
    publisher = simulated.client("p", 4, clean=False)
    publisher.send(Publish(b"t/a", b"before", 2, packet_id=8))
    simulated.rest()
    simulated.log.refusing = True
    first = Publish(b"t/a", b"x", 1, packet_id=1)
    publisher.send(first, settling, behind, behind)
    simulated.tick()
    assert not publisher.open
    room(simulated)
    assert stored(simulated) == {b"before": 1}
    again = simulated.client("p", 4, clean=False)
    again.received()
    again.send(first)
    simulated.rest()
    assert [packet.packet_id for packet in again.only(Puback)] == [1]


@pytest.mark.parametrize("partitions", [1, PARTITIONS])
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("qos", "answer"), [(1, Puback), (2, Pubrec)])
def test_a_retained_message_that_was_taken_is_not_refused_because_its_record_is(partitions, version, qos, answer):
    """The record that its topic retains it is written behind it. The message is in the log and has been delivered: its
    publisher waits for the record, but must not be told to send it again."""
    simulated = SimulatedBroker(PartitionedLog(partitions=partitions))
    sub = subscriber(simulated)
    publisher = simulated.client("p", version, clean=False)
    publisher.received()
    message = Publish(b"t/a", b"x", qos, retain=True, packet_id=1)
    publisher.send(message)
    append = simulated.log.append

    def once(*what):
        ticket = append(*what)
        simulated.log.refusing = True
        return ticket

    simulated.log.append = once
    simulated.tick()
    del simulated.log.append
    simulated.rest()
    assert publisher.received() == []
    room(simulated)
    if not publisher.open:
        publisher = simulated.client("p", version, clean=False)
        publisher.received()
        publisher.send(message)
        simulated.rest()
    assert [(type(p), p.reason) for p in publisher.received()] == [(answer, 0)]
    assert stored(simulated) == {b"x": 1}
    assert payloads(sub) == [b"x"]


def full(simulated: SimulatedBroker) -> None:
    """The disk is full, and the broker knows."""
    simulated.log.refusing = True
    simulated.broker.change(changes.positions(()))
    simulated.rest()
    assert not simulated.broker.storing.on


def test_a_session_that_ends_while_there_is_no_room_does_not_come_back(simulated):
    """It was stored, came back to stay only as long as its connection, and went."""
    device = simulated.client("d", 5, clean=False, session_expiry=3600)
    device.send(Subscribe(1, (FilterRequest(b"t/a", 2), FilterRequest(b"$share/g/t/a", 1))))
    simulated.rest()
    device.drop()
    simulated.rest()
    full(simulated)
    device = simulated.client("d", 5, clean=False)
    assert device.connack().session_present
    device.send(Disconnect())
    simulated.rest()
    room(simulated)
    simulated.crash()
    assert b"d" not in simulated.broker.sessions
    assert not simulated.client("d", 5, clean=False, session_expiry=3600).connack().session_present


def test_a_connection_that_comes_and_goes_while_there_is_no_room_leaves_nothing_to_write(simulated):
    full(simulated)
    before = len(simulated.broker.storing._unwritten)
    for n in range(100):
        simulated.client(f"d{n}", 5).send(Disconnect())
    simulated.rest()
    assert not simulated.broker.storing._unnoted
    assert len(simulated.broker.storing._unwritten) == before


def test_a_group_whose_end_is_written_before_its_members_are_is_left_by_them(simulated):
    device = simulated.client("d", 5, clean=False, session_expiry=3600)
    device.send(Subscribe(1, (FilterRequest(b"$share/g/t/a", 1),)))
    simulated.rest()
    (group,) = simulated.broker.groups.all()
    simulated.broker.change(changes.gone(group.number))
    simulated.rest()
    simulated.crash()
    assert simulated.broker.sessions.get(b"d").subscriptions == {}
    assert simulated.broker.groups.members == 0
    assert len(simulated.broker.table.index) == 0


# ── however long it lasts ──


def kept_back(simulated: SimulatedBroker) -> int:
    """How much waits for the log to take it."""
    storing = simulated.broker.storing
    waiting = (storing._unwritten, storing._waiting, storing._unnoted, storing._taken_back, storing._unreleased)
    return sum(map(len, waiting))


def test_a_publisher_that_is_refused_again_and_again_costs_nothing(simulated):
    publisher = simulated.client("p", 5)
    full(simulated)
    before = kept_back(simulated)
    for n in range(200):
        publisher.send(Publish(b"t/a", b"x", 2, packet_id=n + 1))
        simulated.tick()
    assert [packet.reason for packet in publisher.only(Pubrec)] == [0x97] * 200
    assert kept_back(simulated) == before


def test_who_sends_a_message_again_and_again_is_not_listened_to_any_more(simulated):
    publisher = simulated.client("p", 4)
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=7))
    simulated.rest()
    publisher.received()
    full(simulated)
    before = kept_back(simulated)
    sent = 0
    while not publisher.link.throttled:
        publisher.send(*[Publish(b"t/a", b"x", 2, dup=True, packet_id=7)] * 100)
        simulated.tick()
        sent += 100
        assert sent < 50_000
    assert kept_back(simulated) <= before + sent
    room(simulated)
    assert [packet.packet_id for packet in publisher.only(Pubrec)] == [7] * sent
    assert not publisher.link.throttled
    publisher.send(Publish(b"t/a", b"x", 2, dup=True, packet_id=7))
    simulated.rest()
    assert [packet.packet_id for packet in publisher.only(Pubrec)] == [7]
    assert stored(simulated) == {b"x": 1}


def test_who_comes_again_and_again_for_one_answer_leaves_none_behind(simulated):
    publisher = simulated.client("p", 4, clean=False)
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=7))
    simulated.rest()
    full(simulated)
    for _ in range(100):
        publisher = simulated.client("p", 4, clean=False)
        publisher.send(Publish(b"t/a", b"x", 2, dup=True, packet_id=7))
        simulated.tick()
    simulated.pass_time(1)
    assert len(simulated.broker.storing._waiting) <= 1


@pytest.mark.parametrize("qos", [1, 2])
def test_retained_messages_for_a_session_that_ends_with_its_connection_need_no_record(simulated, qos):
    client = simulated.client("p", 4)
    client.send(Publish(b"t/a", b"x", 1, retain=True, packet_id=7))
    simulated.rest()
    full(simulated)
    before = kept_back(simulated)
    for _ in range(50):
        client.send(Subscribe(1, (FilterRequest(b"t/a", qos),)))
        simulated.rest()
        for packet in client.only(Publish):
            client.send(Puback(packet.packet_id))
    simulated.rest()
    assert kept_back(simulated) <= before + 1  # the session itself


def test_clients_whose_messages_were_refused_are_forgotten_with_their_sessions(simulated):
    simulated.log.refusing = True
    for n in range(50):
        publisher = simulated.client(f"p{n}", 4)
        publisher.send(Publish(b"t/a", b"x", 2, packet_id=1))
        simulated.rest()
    simulated.pass_time(1)
    before = kept_back(simulated)
    for _ in range(50):
        simulated.pass_time(1)
    assert kept_back(simulated) <= before
    assert not simulated.broker.storing._taken_back


def test_what_was_refused_late_and_written_down_meanwhile_is_released_once(simulated):
    publisher = simulated.client("p", 5, clean=False, session_expiry=1000)
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=1))
    refuse(simulated, "later")
    simulated.pass_time(1)
    before = kept_back(simulated)
    for _ in range(50):
        simulated.pass_time(1)
    assert kept_back(simulated) == before
    room(simulated)
    simulated.crash()
    assert not simulated.broker.sessions.get(b"p").inbound


@pytest.mark.parametrize("received", [False, True])
def test_nobody_is_blamed_for_not_acknowledging_what_waits_for_room(simulated, received):
    """A message whose packet id is not stored has not left; nor has the PUBREL behind a PUBREC that is not."""
    timeout_s = simulated.config.mqtt.ack_timeout_s
    sub = subscriber(simulated, qos=2, clean=False, session_expiry=1000)
    if not received:
        sub.drop()
    publisher = simulated.client("p")
    publisher.send(Publish(b"t/a", b"x", 2, packet_id=1))
    simulated.rest()
    full(simulated)
    if received:
        (message,) = sub.only(Publish)
        sub.send(Pubrec(message.packet_id))
    else:
        sub = simulated.client("s", 5, clean=False, session_expiry=1000)
        assert payloads(sub) == []
    for _ in range(3 * timeout_s - 1):
        simulated.pass_time(1)
        simulated.rest()
    assert sub.open
    assert sub.only(Pubrel if received else Publish) == []
    room(simulated)
    assert len(sub.only(Pubrel if received else Publish)) == 1
    for _ in range(timeout_s - 2):
        simulated.pass_time(1)
        simulated.rest()
    assert sub.open
    for _ in range(5):
        simulated.pass_time(1)
        simulated.rest()
    assert not sub.open  # now it is its turn


def test_there_is_room_again_only_when_something_was_written(simulated):
    """Nothing waits to be written. An append of nothing needs no room, and tells nothing."""
    publisher = simulated.client("p", 5)
    log = simulated.log
    append = log.append

    def only_nothing(rows, records, time_ms):
        log.refusing = bool(rows.payloads or records)
        return append(rows, records, time_ms)

    log.append = only_nothing
    publisher.send(Publish(b"t/a", b"x", 1, packet_id=1))
    simulated.rest()
    for _ in range(3):
        simulated.pass_time(1)
        simulated.rest()
    assert [event for event, _ in simulated.reports if event.startswith("log.")] == ["log.refused"]
    assert kept_back(simulated) == 0
    del log.append
    room(simulated)
    assert [event for event, _ in simulated.reports if event.startswith("log.")] == ["log.refused", "log.accepted"]
