"""Moments that are narrow in practice and wide here: between a message and its record, between two connections,
between a member's leaving and the next one's coming."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import SimulatedBroker, SimulatedClient, SimulatedLog

from packet_bytes import publish_bytes
from tidegate.limits import FANOUT_MAX
from tidegate.wire import (
    Connect,
    FilterRequest,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    encode,
)

KEPT: dict[str, Any] = {"clean": False, "session_expiry": 1000}


def subscribed(simulated: SimulatedBroker, name: str, pattern: bytes, qos: int, **connect: Any) -> SimulatedClient:
    client = simulated.client(name, 5, **{**KEPT, **connect})
    client.send(Subscribe(1, (FilterRequest(pattern, qos),)))
    simulated.rest()
    client.received()
    return client


def publish(simulated: SimulatedBroker, *messages: tuple[bytes, int], topic: bytes = b"t") -> None:
    """From a client of its own, stored; with a tail of one byte, only the last is then in memory."""
    publisher = simulated.client("publisher")
    for pid, (payload, qos) in enumerate(messages, 1):
        publisher.send(Publish(topic, payload, qos, packet_id=pid if qos else 0))
        simulated.rest()


def payloads(client: SimulatedClient) -> list[bytes]:
    return [packet.payload for packet in client.only(Publish)]


@pytest.fixture
def simulated(partitions: int) -> SimulatedBroker:
    return SimulatedBroker(SimulatedLog(partitions=partitions))


@pytest.fixture
def forgetful(partitions: int) -> SimulatedBroker:
    """Keeps hardly anything in memory."""
    return SimulatedBroker(SimulatedLog(partitions=partitions), tail_bytes=1)


# ── two crashes in a row ──


@pytest.mark.attack("C1")
@pytest.mark.req("S4.5")
def test_what_lies_before_a_qos_2_message_in_flight_is_still_to_be_read_after_a_crash(simulated):
    """After the first crash the session reads from its position on, while a QoS 2 message that it was sent before is in
    flight far above: what lies between is not finished, also for the second crash."""
    subscribed(simulated, "s", b"t", 2)
    publish(simulated, *((b"%d" % n, 1) for n in range(6)), (b"exactly once", 2))
    simulated.crash()
    sub = simulated.client("s", 5, **KEPT, receive_maximum=2)
    simulated.rest()
    got = sub.only(Publish)
    assert [message.payload for message in got] == [b"exactly once", b"0"]
    sub.send(Puback(got[1].packet_id))
    simulated.rest()
    assert payloads(sub) == [b"1"]
    simulated.pass_time(5)  # its position is written
    simulated.rest()
    simulated.crash()
    again = simulated.client("s", 5, **KEPT)
    simulated.rest()
    assert payloads(again) == [b"exactly once", b"1", b"2", b"3", b"4", b"5"]


# ── a promise follows its record ──


@pytest.mark.attack("C2")
def test_a_release_waits_for_its_record_also_on_a_new_connection(simulated):
    sub = subscribed(simulated, "s", b"t", 2)
    publish(simulated, (b"m", 2))
    (message,) = sub.only(Publish)
    sub.send(Pubrec(message.packet_id))
    sub.drop()
    again = SimulatedClient(simulated, 5)
    again.connect("s", **KEPT)
    simulated.tick()
    assert not again.only(Pubrel)
    simulated.rest()
    assert again.only(Pubrel) == [Pubrel(message.packet_id)]


@pytest.mark.attack("C2")
def test_a_qos_2_message_waits_for_its_packet_id_also_on_a_new_connection(simulated):
    sub = subscribed(simulated, "s", b"t", 2)
    simulated.client("publisher").send(Publish(b"t", b"m", 2, packet_id=1))
    simulated.tick()
    sub.drop()
    again = SimulatedClient(simulated, 5)
    again.connect("s", **KEPT)
    simulated.tick()
    simulated.tick()
    assert not payloads(again)
    simulated.rest()
    assert payloads(again) == [b"m"]


@pytest.mark.req("S2.10")
def test_nothing_overtakes_a_message_that_waits_for_the_log(simulated):
    sub = subscribed(simulated, "s", b"t", 2)
    publisher = simulated.client("publisher")
    for step in range(6):
        publisher.send(Publish(b"t", b"%d" % step, (2, 1, 0)[step % 3], packet_id=step + 1 if step % 3 < 2 else 0))
        simulated.tick()
        if step % 2:
            simulated.log.store()
    simulated.rest()
    assert payloads(sub) == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.attack("C2")
def test_a_release_in_the_same_tick_as_its_message_is_written_after_it(simulated):
    publisher = simulated.client("p", clean=False)
    publisher.send(Publish(b"t", b"1", 2, packet_id=7), Pubrel(7))
    simulated.rest()
    simulated.crash()
    again = simulated.client("p", clean=False)
    again.send(Publish(b"t", b"2", 2, packet_id=7))
    simulated.rest()
    assert [run.payloads[i] for _, run, i in simulated.log.messages()] == [b"1", b"2"]


# ── acknowledgements for what an earlier connection brought ──


@pytest.mark.req("S1.20")
@pytest.mark.attack("C9")
def test_a_late_acknowledgement_opens_no_window_twice(forgetful):
    simulated = forgetful
    subscribed(simulated, "s", b"t", 1, receive_maximum=2)
    publish(simulated, *((b"%d" % i, 1) for i in range(6)))
    again = SimulatedClient(simulated, 5)
    again.connect("s", **KEPT, receive_maximum=2)
    simulated.tick()
    again.send(Puback(1))  # it has not come again on this connection
    simulated.rest()
    assert payloads(again) == [b"1", b"2"]


@pytest.mark.attack("C9")
def test_a_late_acknowledgement_amid_others_leaves_the_others_to_come(simulated):
    subscribed(simulated, "s", b"t", 1, receive_maximum=3)
    publish(simulated, *((b"%d" % i, 1) for i in range(3)))
    again = SimulatedClient(simulated, 5)
    again.connect("s", **KEPT, receive_maximum=1)
    again.send(Puback(2))
    simulated.rest()
    seen = []
    while found := again.only(Publish):
        seen += [packet.payload for packet in found]
        again.send(*(Puback(packet.packet_id) for packet in found))
        simulated.rest()
    assert seen == [b"0", b"2"]


@pytest.mark.req("S1.20")
def test_what_comes_again_from_the_disk_stays_within_the_window(forgetful):
    simulated = forgetful
    member = subscribed(simulated, "s", b"$share/g/t", 2, receive_maximum=2)
    publish(simulated, *((b"%d" % i, 2) for i in range(6)))
    assert len(payloads(member)) == 2
    simulated.crash()
    again = simulated.client("s", 5, **KEPT, receive_maximum=2)
    assert len(payloads(again)) == 2


@pytest.mark.req("S1.20")
@pytest.mark.attack("C9")
@pytest.mark.parametrize("window", [2, 5, 100])
@pytest.mark.parametrize("tail_bytes", [1, 1 << 20])
def test_what_went_out_as_one_flight_comes_again_topic_by_topic_with_the_same_identifiers(
    partitions, tail_bytes, window
):
    simulated = SimulatedBroker(SimulatedLog(partitions=partitions), tail_bytes=tail_bytes)
    sub = subscribed(simulated, "s", b"#", 1)
    publisher = simulated.client("publisher")
    publisher.send(*(Publish(b"t/%d" % (i % 7), b"%d" % i, 1, packet_id=i + 1) for i in range(20)))
    simulated.rest()
    first = {packet.packet_id: (packet.topic, packet.payload) for packet in sub.only(Publish)}
    assert len(first) == 20 and len(list(simulated.broker.sessions.get(b"s").flights)) == partitions
    publish(simulated, (b"later", 1))  # with a tail of one byte, only this is then in memory
    sub.send(Puback(1), Puback(11))
    simulated.rest()
    sub.drop()
    again = SimulatedClient(simulated, 5)
    again.connect("s", **KEPT, receive_maximum=window)
    simulated.rest()
    seen = []
    while found := again.only(Publish):
        assert len(found) <= window
        seen += found
        again.send(*(Puback(packet.packet_id) for packet in found))
        simulated.rest()
    assert all(packet.dup for packet in seen)
    left = [payload for pid, (_, payload) in first.items() if pid not in (1, 11)]
    assert [packet.payload for packet in seen] == [*left, b"later"]
    assert partitions > 1 or left == [b"%d" % i for i in range(20) if i not in (0, 10)]
    assert all(first[packet.packet_id] == (packet.topic, packet.payload) for packet in seen[:-1])


def publish_at_once(simulated: SimulatedBroker, *topics: bytes) -> None:
    """One message to each topic, all in one write."""
    publisher = simulated.client("publisher")
    publisher.send(*(Publish(topic, b"%d" % i, 1, packet_id=i + 1) for i, topic in enumerate(topics)))
    simulated.rest()


@pytest.mark.req("S1.20", "S0.13")
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_messages_with_others_between_them_are_acknowledged_each_at_its_place(simulated, partitions, behind, crash):
    sub = subscribed(simulated, "s", b"a/#", 1)
    if behind:
        sub.drop()
    publish_at_once(simulated, b"a/0", b"b/1", b"a/2", b"b/3", b"a/4", b"b/5", b"a/6")
    if behind:
        sub = simulated.client("s", 5, **KEPT)
    first, second, *left = sub.only(Publish)
    sub.send(Puback(first.packet_id), Puback(second.packet_id))
    end_of_connection(simulated, sub, crash)
    assert payloads(simulated.client("s", 5, **KEPT)) == [message.payload for message in left]
    assert partitions > 1 or [message.payload for message in left] == [b"4", b"6"]


@pytest.mark.req("S1.20", "S0.13")
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("acknowledged", [0, 1])
@pytest.mark.parametrize("other", [b"$share/g/#", b"$replay/0/#"])
def test_messages_that_a_client_gets_twice_are_acknowledged_each_for_its_reader(simulated, other, acknowledged, crash):
    """Two readers of one client, whose packet ids alternate."""
    sub = simulated.client("s", 4, clean=False)
    sub.send(Subscribe(1, (FilterRequest(b"#", 1), FilterRequest(other, 1))))
    simulated.rest()
    sub.received()
    publish(simulated, *((b"%d" % i, 1) for i in range(4)))
    got = sub.only(Publish)
    assert [packet.payload for packet in got] == [b"0", b"0", b"1", b"1", b"2", b"2", b"3", b"3"]
    sub.send(*(Puback(packet.packet_id) for packet in got[acknowledged::2]))
    end_of_connection(simulated, sub, crash)
    assert payloads(simulated.client("s", 4, clean=False)) == [b"0", b"1", b"2", b"3"]


def end_of_connection(simulated: SimulatedBroker, client: SimulatedClient, crash: bool) -> None:
    simulated.rest()
    simulated.pass_time(1)  # positions are written
    simulated.rest()
    if crash:
        simulated.crash()
    else:
        client.drop()


# ── coming to and leaving a shared group ──


def share(simulated: SimulatedBroker, name: str, qos: int = 1, **connect: Any) -> SimulatedClient:
    return subscribed(simulated, name, b"$share/g/t", qos, **connect)


@pytest.mark.req("S1.20", "S1.22")
def test_what_a_client_was_sent_before_it_left_a_group_fills_its_window_until_it_answers(simulated):
    leaver = share(simulated, "leaver", receive_maximum=1)
    publish(simulated, (b"shared", 1))
    (message,) = leaver.only(Publish)
    leaver.send(Unsubscribe(2, (b"$share/g/t",)), Subscribe(3, (FilterRequest(b"t", 1),)))
    publish(simulated, (b"own", 1))
    assert payloads(leaver) == []
    leaver.send(Puback(message.packet_id))
    simulated.rest()
    assert payloads(leaver) == [b"own"]


@pytest.mark.req("S2.14", "S4.2")
def test_a_group_whose_last_present_member_unsubscribes_waits_for_the_absent_one(simulated):
    share(simulated, "absent").drop()
    present = share(simulated, "present")
    present.send(Unsubscribe(2, (b"$share/g/t",)))
    publish(simulated, (b"m", 1))
    assert payloads(simulated.client("absent", 5, **KEPT)) == [b"m"]


@pytest.mark.req("S1.22")
def test_what_came_back_to_a_group_waits_quietly_while_all_windows_are_full(forgetful):
    simulated = forgetful
    leaver, stayer = (share(simulated, name, receive_maximum=1) for name in ("leaver", "stayer"))
    publish(simulated, (b"1", 1), (b"2", 1), (b"3", 1))
    first, (second,) = payloads(leaver), stayer.only(Publish)
    leaver.drop()
    simulated.rest()  # comes to rest, instead of reading the log again and again
    assert payloads(stayer) == []
    stayer.send(Puback(second.packet_id))
    simulated.rest()
    assert payloads(stayer) == first


@pytest.mark.attack("C15")
@pytest.mark.parametrize("leaving", ["unsubscribes", "drops"])
def test_a_group_that_nobody_attends_holds_no_messages_in_memory(forgetful, leaving):
    simulated = forgetful
    members = [share(simulated, name, receive_maximum=1) for name in ("a", "b")]
    publish(simulated, *((b"%d" % i, 1) for i in range(9)))
    members[0].send(Puback(members[0].only(Publish)[0].packet_id))
    simulated.rest()
    assert simulated.broker.gate.held_bytes > 0
    for member in members:
        if leaving == "drops":
            member.drop()
        else:
            member.send(Unsubscribe(2, (b"$share/g/t",)))
    simulated.rest()
    assert simulated.broker.gate.held_bytes == 0


@pytest.mark.attack("C2")
def test_a_qos_2_message_begun_before_unsubscribing_is_finished_after_a_crash(simulated):
    """[MQTT-3.10.4-3]: its packet id stays in use until then."""
    leaver = share(simulated, "leaver", 2)
    publish(simulated, (b"begun", 2))
    (message,) = leaver.only(Publish)
    leaver.send(Unsubscribe(2, (b"$share/g/t",)))
    simulated.rest()
    simulated.crash()
    again = simulated.client("leaver", 5, **KEPT)
    (repeated,) = again.only(Publish)
    assert (repeated.packet_id, repeated.dup, repeated.payload) == (message.packet_id, True, b"begun")


@pytest.mark.attack("C2")
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_a_qos_2_message_of_a_member_that_is_gone_goes_to_nobody_after_a_crash(simulated, snapshot, finished):
    """[MQTT-4.8.2-5], also when the group reads again from before it, for another member owes an answer."""
    stayer = share(simulated, "stayer", 1)
    gone = share(simulated, "gone", 2, clean=True, session_expiry=0)
    publish(simulated, (b"owed", 1), (b"begun", 2))
    assert payloads(stayer) == [b"owed"]
    (message,) = gone.only(Publish)
    if finished:
        gone.send(Pubrec(message.packet_id))
        simulated.rest()
        gone.send(Pubcomp(message.packet_id))
    gone.drop()
    simulated.rest()
    if snapshot:
        simulated.snapshot()
        for _ in range(5):
            simulated.pass_time(0.1)
            simulated.rest()
        assert simulated.log.has_snapshot
    simulated.crash()
    assert payloads(simulated.client("stayer", 5, **KEPT)) == [b"owed"]


# ── within one tick ──


@pytest.mark.req("S2.12")
@pytest.mark.parametrize("limit", [{}, {"maximum_packet_size": 1_000_000}])
def test_a_group_whose_member_has_no_room_for_all_of_a_tick_gets_the_rest_later(simulated, limit):
    """Two kinds of messages in one tick, of which the first alone fill the member's socket."""
    member = subscribed(simulated, "m", b"$share/g/t/#", 1, **limit)
    publisher = simulated.client("p", 5)
    large = [publish_bytes(b"t/a", b"%02d" % i + bytes(60_000), 1, i + 1, version=5) for i in range(30)]
    small = [publish_bytes(b"t/a", b"small %d" % i, 1, 100 + i, retain=True, version=5) for i in range(3)]
    publisher.send_bytes(b"".join(large + small))
    got: list[bytes] = []
    for _ in range(40):
        simulated.rest()
        for packet in member.only(Publish):
            got.append(packet.payload)
            member.send(Puback(packet.packet_id))
    assert len(got) == 33 and {b"small 0", b"small 1", b"small 2"} <= set(got)


def test_hundreds_of_links_that_had_to_wait_are_read_one_after_the_other(simulated):
    """Each has packets beyond its share of a tick, and is read from again in the next: not one within the other."""
    clients = [simulated.client(f"c{i}") for i in range(700)]
    simulated.hurrying = True
    for client in clients:
        client.send_bytes(b"\xc0\x00" + publish_bytes(b"t", b"x"))
    assert sum(client.link.busy for client in clients) > 100
    simulated.rest()
    assert simulated.broker.counters.publishes_received == 700


# ── coming back with many filters ──


def returned_with(simulated: SimulatedBroker, filters: int, more: bytes, **connect: Any) -> SimulatedClient:
    """A session comes back to five messages that it did not acknowledge; `more` follows its CONNECT at once."""
    client = simulated.client("s", 5, **KEPT)
    client.send(Subscribe(1, tuple(FilterRequest(b"t/%d" % i, 1) for i in range(filters))))
    simulated.rest()
    publish(simulated, *((b"%d" % n, 1) for n in range(5)), topic=b"t/1")
    assert [packet.packet_id for packet in client.only(Publish)] == [1, 2, 3, 4, 5]
    client.drop()
    simulated.rest()
    again = SimulatedClient(simulated, 5)
    connecting = Connect(5, b"s", False, properties=Properties(session_expiry=1000, **connect))
    again.send_bytes(encode(connecting, 5) + more)
    simulated.rest()
    return again


@pytest.mark.parametrize("filters", [30, 100])
def test_acknowledgements_right_behind_a_connect_make_no_room_twice(simulated, filters):
    late = b"".join([encode(Puback(pid), 5) for pid in range(1, 6)])
    again = returned_with(simulated, filters, late, receive_maximum=3)
    assert again.link.outbox.used == 0
    again.received()
    publish(simulated, *((b"new %d" % n, 1) for n in range(10)), topic=b"t/1")
    assert len(payloads(again)) == 3


@pytest.mark.parametrize("filters", [30, 100])
def test_what_is_sent_while_filters_are_still_being_looked_at_is_not_sent_again(simulated, filters):
    replay = encode(Subscribe(2, (FilterRequest(b"$replay/earliest/t/1", 1),)), 5)
    again = returned_with(simulated, filters, replay)
    got = again.only(Publish)
    assert sorted(packet.packet_id for packet in got) == list(range(1, 11))
    assert [packet.packet_id for packet in got if packet.dup] == [1, 2, 3, 4, 5]
    for packet in got:
        again.send(Puback(packet.packet_id))
    simulated.rest()
    assert again.link.outbox.used == 0


# ── no room for anybody ──


def test_a_reader_that_had_no_room_because_of_others_goes_on_when_there_is_some(simulated):
    """Its socket took too little to have its share, and never so little that it was paused."""
    subscriber = subscribed(simulated, "s", b"t", 0)
    outbox = subscriber.link.outbox
    others = 300 << 20
    simulated.broker.post.sending_bytes += others
    subscriber.link.waiting_bytes = 100_000
    publish(simulated, (bytes(100_000), 0), *((b"%d" % n, 0) for n in range(5)))
    assert not outbox.paused and len(payloads(subscriber)) == 1
    simulated.broker.post.sending_bytes -= others
    subscriber.link.waiting_bytes = 0
    simulated.pass_time(1)
    simulated.rest()
    assert payloads(subscriber) == [b"0", b"1", b"2", b"3", b"4"]


# ── a snapshot, and what the log says after it ──


@pytest.mark.req("S4.5")
@pytest.mark.parametrize("soon", [True, False], ids=["at once", "later"])
def test_a_position_that_only_the_snapshot_knows_is_not_undone_by_an_older_one_in_the_log(
    simulated, monkeypatch, soon
):
    """While a snapshot is copied the session's position is written, moves on, and is copied as it then is. After a
    crash the older one comes last."""
    sub = subscribed(simulated, "s", b"t", 2)
    publish(simulated, *((b"%d" % n, 2) for n in range(10)))
    ids = [packet.packet_id for packet in sub.only(Publish)]
    for pid in ids:
        sub.send(Pubrec(pid))
    simulated.rest()
    for pid in ids[2:]:
        sub.send(Pubcomp(pid))
    simulated.rest()
    simulated.pass_time(1)
    simulated.rest()
    publish(simulated, (b"elsewhere", 1), topic=b"u")
    simulated.snapshot()
    sub.send(Pubcomp(ids[0]))
    simulated.housekeeping.write_positions()
    simulated.rest()
    sub.send(Pubcomp(ids[1]))
    monkeypatch.setattr("tidegate.broker.housekeeping.SESSIONS_PER_STEP", 0)  # so many others have moved as well
    while simulated.housekeeping.busy:
        simulated.housekeeping.often()
        simulated.rest()
    if not soon:
        monkeypatch.undo()
        simulated.pass_time(1)
        simulated.rest()
    simulated.crash()
    again = simulated.client("s", 5, **KEPT)
    simulated.rest()
    assert payloads(again) == []


# ── messages that are not stored ──


def test_a_message_that_is_not_stored_is_never_taken_for_the_next_one_that_is(partitions):
    """A group's member has no room for all of what it is dealt. What is left has no place in the log, and must not be
    handed out again by the place that another message gets."""
    simulated = SimulatedBroker(SimulatedLog(partitions=partitions), store_qos0=False)
    member = subscribed(simulated, "m", b"$share/g/t", 2, maximum_packet_size=1_000_000)
    publisher = simulated.client("p")
    publisher.send(*(Publish(b"t", b"%02d" % n + b"x" * 60_000) for n in range(30)))
    simulated.rest()
    got = len(payloads(member))
    assert 0 < got < 30
    assert simulated.broker.counters.dropped["not stored, reader behind"] == 30 - got
    publish(simulated, (b"exactly once", 2))
    assert payloads(member) == [b"exactly once"]


# ── acknowledged beyond a gap ──


@pytest.mark.req("S4.5")
@pytest.mark.parametrize("acknowledged", [range(1, 10), range(1, 9), range(5, 10), [9], [5], range(9)], ids=str)
def test_what_was_acknowledged_beyond_a_gap_does_not_come_again_after_a_crash(simulated, acknowledged):
    sub = subscribed(simulated, "s", b"t", 1)
    publish(simulated, *((b"%d" % n, 1) for n in range(10)))
    ids = [packet.packet_id for packet in sub.only(Publish)]
    for n in acknowledged:
        sub.send(Puback(ids[n]))
    simulated.rest()
    simulated.pass_time(1)
    simulated.rest()
    simulated.crash()
    again = simulated.client("s", 5, **KEPT)
    simulated.rest()
    assert payloads(again) == [b"%d" % n for n in range(10) if n not in acknowledged]


# ── retained messages that are being handed over ──


@pytest.mark.req("S0.31")
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("answered", [0, 1, 2, 5, 9])
def test_retained_messages_that_were_handed_over_do_not_come_again_after_a_crash(simulated, qos, snapshot, answered):
    publisher = simulated.client("publisher")
    topics = [b"r/%d" % n for n in (7, 3, 9, 1, 0, 5, 8, 2, 6, 4)]
    for n, topic in enumerate(topics, 1):
        publisher.send(Publish(topic, topic, qos, retain=True, packet_id=n))
        simulated.rest()
    narrow: dict[str, Any] = {**KEPT, "receive_maximum": 2}
    sub = simulated.client("s", 5, **narrow)
    sub.send(Subscribe(1, (FilterRequest(b"r/#", qos),)))
    simulated.rest()
    finished: list[bytes] = []  # acknowledged to its end
    begun: dict[int, bytes] = {}

    def answer() -> None:
        for packet in sub.received():
            if isinstance(packet, Publish):
                begun[packet.packet_id] = packet.payload
                sub.send((Puback if qos == 1 else Pubrec)(packet.packet_id))
                if qos == 1:
                    finished.append(begun.pop(packet.packet_id))
            elif isinstance(packet, Pubrel):
                sub.send(Pubcomp(packet.packet_id))
                finished.append(begun.pop(packet.packet_id))
        simulated.rest()

    for _ in range(answered):
        answer()
    if snapshot:
        publish(simulated, (b"elsewhere", 1), topic=b"u")
        simulated.snapshot()
        while simulated.housekeeping.busy:
            simulated.housekeeping.often()
            simulated.rest()
    simulated.crash()
    sub = simulated.client("s", 5, **narrow)
    for _ in range(40):
        answer()
    assert sorted(finished) == sorted(topics)
    simulated.crash()
    sub = simulated.client("s", 5, **narrow)
    assert sub.only(Publish) == []


# ── a message for very many ──


@pytest.mark.parametrize("qos", [0, 1])
def test_readers_beyond_those_that_are_served_at_once_get_everything_in_order(simulated, qos):
    """More subscribers than an announcement is handed to in one go, and messages of two kinds in one tick."""
    many = [subscribed(simulated, f"s{n}", b"t", qos) for n in range(FANOUT_MAX + 400)]
    simulated.client("p").send(
        Publish(b"t", b"1", 1, packet_id=1), Publish(b"t", b"2", 0), Publish(b"t", b"3", 1, packet_id=2)
    )
    simulated.tick()
    assert sum(bool(client.link.written) for client in many) < len(many)
    simulated.rest()
    assert all(payloads(client) == [b"1", b"2", b"3"] for client in many)
