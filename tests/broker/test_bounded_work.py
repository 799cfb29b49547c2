"""What one client asks for within the limits is done in pieces, and holds its share of memory: counted, not timed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from simulated import SimulatedBroker, SimulatedClient, SimulatedLink, SimulatedLog

from packet_bytes import publish_bytes
from tidegate.broker import housekeeping as housekeeping_module
from tidegate.broker import state
from tidegate.delivery import group as group_module
from tidegate.limits import (
    ANSWERS_UNREAD_BYTES_MAX,
    ANSWERS_UNREAD_S,
    ROUTES_BYTES_MAX,
    ROUTES_STEP,
    SEND_BYTES_MAX,
    SENDING_SHARE_BYTES,
    SNAPSHOT_RECORDS_STEP,
    SPENT_MAX,
)
from tidegate.log.segment import SegmentFacts
from tidegate.session.flights import Flights
from tidegate.session.link import Stop
from tidegate.session.reader import AWAY
from tidegate.wire import Connect, FilterRequest, Publish, Subscribe

FILTERS = 10_000


def subscribe(client: SimulatedClient, filters: list[bytes], qos: int = 1) -> None:
    for start in range(0, len(filters), 1000):
        some = filters[start : start + 1000]
        client.send(Subscribe(1, tuple(FilterRequest(filter, qos) for filter in some)))
        client.simulated.rest()
    client.received()


def test_what_a_session_wants_is_found_out_without_a_look_at_each_of_its_filters():
    simulated = SimulatedBroker(SimulatedLog(late=False))
    client = simulated.client("c", clean=False)
    subscribe(client, [b"+/%d/+/x" % i for i in range(1, FILTERS)] + [b"plain"])
    wanted = simulated.broker.delivery._wanted(client.link.session.reader)
    assert [wanted(topic) for topic in (b"a/77/b/x", b"a/b/c/d", b"plain", b"a/77/b")] == [True, False, True, False]
    wanted.begin()
    for i in range(100):
        assert not wanted(b"a/b/c/%d" % i)
    assert wanted.work < 1000
    assert wanted.prefixes == (b"",)


# ── answers that are not read ──


def ask_and_ask(client: SimulatedClient, times: int = 100) -> None:
    """Messages that are refused, each with a reason, to a socket that takes none of the answers."""
    for _ in range(times):
        if not client.link.throttled:
            client.send_bytes(publish_bytes(b"$a", b"", 1, 1, version=5) * 500)
        client.simulated.rest()


class FullLink(SimulatedLink):
    """A socket that takes nothing; like a transport, it says so when a good deal waits."""

    def write(self, data: bytes) -> int:
        super().write(data)
        self.outbox.paused = len(self.written) > SEND_BYTES_MAX // 2
        return len(self.written)

    def unsent(self) -> int:
        return len(self.written)


def full(simulated: SimulatedBroker, name: str, keep_alive: int = 0) -> SimulatedClient:
    client = SimulatedClient(simulated, 5)
    client.link = FullLink()
    simulated.broker.accept(client.link)
    client.send(Connect(5, name.encode(), True, keep_alive=keep_alive))
    simulated.rest()
    return client


def test_answers_that_a_client_does_not_read_are_bounded():
    simulated = SimulatedBroker(SimulatedLog(late=False))
    client = full(simulated, "c")
    ask_and_ask(client)
    assert client.link.stopped & Stop.ANSWERS_UNREAD
    assert len(client.link.written) < SEND_BYTES_MAX // 2 + ANSWERS_UNREAD_BYTES_MAX + 100_000
    assert simulated.broker.post.sending_bytes == len(client.link.written)
    client.link.written.clear()
    simulated.drain(client.link)
    assert not client.link.throttled


@pytest.mark.parametrize("keep_alive", [0, 20])
def test_a_client_that_never_reads_its_answers_is_cut(keep_alive):
    simulated = SimulatedBroker(SimulatedLog(late=False), ack_timeout_s=10)
    client = full(simulated, "c", keep_alive)
    ask_and_ask(client)
    seconds = 0
    while client.open and seconds < 2 * ANSWERS_UNREAD_S:
        simulated.pass_time(1)
        seconds += 1
    simulated.rest()
    assert client.link.closed and 1.5 * keep_alive <= seconds <= ANSWERS_UNREAD_S + 11
    assert simulated.broker.counters.refused["answers not read in time"] == 1
    assert not simulated.broker.post.sending_bytes


def test_a_client_that_reads_its_answers_slowly_is_not_cut():
    simulated = SimulatedBroker(SimulatedLog(late=False), ack_timeout_s=10)
    client = full(simulated, "c", 20)
    ask_and_ask(client)
    for _ in range(100):
        del client.link.written[:1000]
        simulated.pass_time(1)
    assert client.open


def test_what_all_clients_together_do_not_read_is_bounded(monkeypatch):
    monkeypatch.setattr("tidegate.delivery.outbox.SENDING_BYTES_MAX", 1 << 20)
    simulated = SimulatedBroker(SimulatedLog(late=False))
    clients = [full(simulated, f"c{i}") for i in range(12)]
    for client in clients:
        ask_and_ask(client, 30)
    assert simulated.broker.post.sending_bytes < (1 << 20) + 12 * 2 * SENDING_SHARE_BYTES
    for client in clients:
        client.link.written.clear()
        if client.link.outbox.paused:
            simulated.drain(client.link)
    simulated.pass_time(1)
    simulated.pass_time(1)
    assert not any(client.link.throttled for client in clients)


def test_messages_that_are_refused_wait_for_another_tick():
    simulated = SimulatedBroker(SimulatedLog(late=False))
    client = simulated.client("c", 5)
    client.received()
    client.send_bytes(publish_bytes(b"$a", b"", 1, 1, version=5) * 5000)
    simulated.tick()
    assert len(client.received()) < 2 * SPENT_MAX
    simulated.rest()


# ── routes ──


def test_the_topics_of_ready_routes_are_bounded_by_their_bytes():
    simulated = SimulatedBroker(SimulatedLog(late=False), tail_bytes=1)
    table = simulated.broker.table
    for i in range(4 * ROUTES_BYTES_MAX // 60_000):
        table.admit(b"%06d" % i + b"t" * 60_000)
        assert sum(map(len, table.routes)) == table.routes_bytes <= ROUTES_BYTES_MAX
    table.changed(next(iter(table.routes)))
    assert sum(map(len, table.routes)) == table.routes_bytes > 0


def test_a_reader_of_very_many_routes_leaves_without_a_look_at_each(monkeypatch):
    simulated = SimulatedBroker(SimulatedLog(late=False))
    client = simulated.client("c")
    subscribe(client, [b"#"], 0)
    table = simulated.broker.table
    for i in range(2 * ROUTES_STEP):
        table.admit(b"a/%d" % i)
    one_by_one: list[bytes] = []
    forget = table._forget
    monkeypatch.setattr(table, "_forget", lambda topics: (one_by_one.extend(topics), forget(topics)))
    client.drop()
    assert len(one_by_one) <= ROUTES_STEP
    assert not table.routes and not table._of_reader


@pytest.mark.parametrize("asleep", [False, True])
def test_new_topics_that_many_sessions_match_wait_for_another_tick(asleep):
    simulated = SimulatedBroker(SimulatedLog(late=False))
    for i in range(400):
        client = simulated.client(f"s{i}", clean=False)
        subscribe(client, [b"#"], 0)
        if asleep:
            client.drop()
    simulated.rest()
    publisher = simulated.client("p")
    publisher.send_bytes(b"".join(publish_bytes(b"n/%d" % i, b"") for i in range(1000)))
    assert len(simulated.broker.table.routes) < 100
    simulated.rest()
    assert len(simulated.broker.table.routes) == 1000


# ── a member of very many groups ──

GROUPS = 300


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """How often all flights of a session are gone through."""
    made: list[str] = []
    for name in ("of", "by_reader"):
        way = getattr(Flights, name)
        monkeypatch.setattr(Flights, name, lambda *args, way=way, name=name: (made.append(name), way(*args))[1])
    lowest = Flights.lowest

    def counted(self, reader, partitions=1, qos_max=2, begun=None):
        known = begun is not None and self in begun._asked
        if not known:
            made.append("lowest")
        return lowest(self, reader, partitions, qos_max, begun)

    monkeypatch.setattr(Flights, "lowest", counted)
    return made


def member_of_many(simulated: SimulatedBroker, *, clean: bool) -> SimulatedClient:
    """Each of its groups has a message in flight to it."""
    client = simulated.client("c", clean=clean)
    subscribe(client, [b"$share/g%d/t" % i for i in range(GROUPS)])
    simulated.client("p").send(Publish(b"t", b"x", 1, packet_id=1))
    simulated.rest()
    assert len(client.only(Publish)) == GROUPS
    return client


@pytest.mark.parametrize("clean", [True, False])
def test_a_member_of_many_groups_leaves_in_one_pass_of_its_flights(passes, clean):
    simulated = SimulatedBroker(SimulatedLog(late=False))
    client = member_of_many(simulated, clean=clean)
    groups = simulated.broker.groups.all()
    simulated.housekeeping.write_positions()
    passes.clear()
    client.drop()
    simulated.rest()
    assert len(passes) <= 5
    assert clean or sorted(len(group.redo) for group in groups) == [1] * GROUPS


def test_positions_of_many_groups_are_found_in_one_pass_of_a_members_flights(passes):
    simulated = SimulatedBroker(SimulatedLog(late=False))
    member_of_many(simulated, clean=False)
    simulated.broker.delivery.moved.update(simulated.broker.groups.all())
    passes.clear()
    simulated.housekeeping.write_positions()
    assert len(passes) <= 3
    assert {group.written for group in simulated.broker.groups.all()} == {(0,)}


# ── steps ──


def test_a_message_for_a_group_asks_no_more_members_than_it_needs(monkeypatch):
    simulated = SimulatedBroker(SimulatedLog(late=False))
    for i in range(100):
        subscribe(simulated.client(f"m{i}"), [b"$share/g/t"])
    asked: list[object] = []
    credit = group_module._credit
    monkeypatch.setattr(group_module, "_credit", lambda member, *how: (asked.append(member), credit(member, *how))[1])
    publisher = simulated.client("p")
    for i in range(3):
        publisher.send(Publish(b"t", b"x", 1, packet_id=1 + i))
        simulated.rest()
    assert len(asked) <= 6


def test_a_snapshot_takes_sessions_by_their_records():
    simulated = SimulatedBroker(SimulatedLog(late=False))
    for i in range(8):
        subscribe(simulated.client(f"c{i}", clean=False), [b"t/%d" % j for j in range(1000)])
    steps = [len(records) for records in state.all_records(simulated.broker)]
    assert max(steps) < 2 * SNAPSHOT_RECORDS_STEP
    assert sum(steps) >= 8000


def test_a_snapshot_takes_some_groups_at_a_time():
    simulated = SimulatedBroker(SimulatedLog(late=False))
    member_of_many(simulated, clean=False)
    assert 2 <= len(list(state.all_records(simulated.broker))) < 10


def test_retention_is_charged_by_the_subscriptions_it_looks_at(monkeypatch):
    simulated = SimulatedBroker(SimulatedLog(late=False))
    for i in range(100):
        subscribe(simulated.client(f"c{i}", clean=False), [b"#"])
    asked = 0
    positions = simulated.broker.delivery.positions

    def counted(*args):
        nonlocal asked
        asked += 1
        return positions(*args)

    monkeypatch.setattr(simulated.broker.delivery, "positions", counted)
    segment = SegmentFacts(1, None, 0, 0, 1, 1, 1, 1, True)
    monkeypatch.setattr(simulated.log, "segments", lambda: [segment])
    monkeypatch.setattr(simulated.log, "snapshot_floor", lambda: 1)
    monkeypatch.setattr(simulated.log, "topics", lambda _: iter([b"t/%d" % i for i in range(1000)]))
    monkeypatch.setattr(simulated.log, "drop", lambda _: None)
    monkeypatch.setattr(housekeeping_module, "plan", lambda *_, **__: SimpleNamespace(drop=[segment]))
    for reader in [session.reader for session in simulated.broker.sessions]:
        reader.enter(AWAY)
        reader.cursors = [1]
    worst = 0
    for _cost in simulated.housekeeping._trim_due():
        worst, asked = max(worst, asked), 0
    assert 1000 < worst < 4000


def test_retained_messages_for_known_topics_wait_for_another_tick():
    """Each is put away and has a record of its own: more than a message that is passed on."""
    simulated = SimulatedBroker(SimulatedLog(late=False))
    publisher = simulated.client("p")
    packets = b"".join(publish_bytes(b"t/%d" % i, b"x", retain=True) for i in range(2000))
    publisher.send_bytes(packets)
    simulated.rest()
    publisher.send_bytes(packets)
    assert len(simulated.broker.post.tick.rows) <= SPENT_MAX + 1
    simulated.rest()
    assert len(simulated.broker.retaining.store) == 2000
