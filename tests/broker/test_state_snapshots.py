"""What a start finds: the state from the log, from a snapshot and the log, and from a snapshot that was copied step by
step while clients went on, is the state that was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from simulated import Answerer, SimulatedBroker, SimulatedClient, SimulatedLog

from tidegate.broker import state
from tidegate.broker.core import Broker
from tidegate.delivery.group import Group
from tidegate.limits import PARTITION_SHIFT
from tidegate.session import changes
from tidegate.session.reader import Reader
from tidegate.wire import Disconnect, FilterRequest, Properties, Publish, Pubrel, Subscribe, Unsubscribe, Will

pytestmark = pytest.mark.timeout(900)  # for the long search, and for the shortest way to a failure

CLIENTS = ("a", "b", "c", "d", "clean")
TOPICS = (b"x", b"x/y", b"z")
FILTERS = (b"x", b"x/#", b"#", b"$share/g/#", b"$share/h/x", b"$replay/earliest/#")

clients = st.sampled_from(CLIENTS)
ACTIONS = st.one_of(
    st.tuples(st.just("connect"), clients),
    st.tuples(st.just("drop"), clients),
    st.tuples(st.just("disconnect"), clients),
    st.tuples(st.just("subscribe"), clients, st.sampled_from(FILTERS), st.integers(0, 2)),
    st.tuples(st.just("unsubscribe"), clients, st.sampled_from(FILTERS)),
    st.tuples(st.just("publish"), clients, st.sampled_from(TOPICS), st.integers(0, 2), st.booleans(), st.booleans()),
    st.tuples(st.just("release"), clients, st.integers(1, 5)),
    st.tuples(st.just("acknowledge"), clients, st.lists(st.integers(0, 3), min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["tick", "rest", "rest", "time", "time"])),
)
ANNOUNCE = st.tuples(st.just("announce"), st.integers(0, 2))


class Scene:
    """Clients that do as they are told, beside a broker."""

    def __init__(self, late: bool, partitions: int = 1) -> None:
        log = SimulatedLog(late=late, partitions=partitions)
        self.simulated = SimulatedBroker(log, inflight_max=5, ack_timeout_s=86400)
        self.answerers: dict[str, Answerer] = {}
        for name in CLIENTS[:3]:
            self.connect(name)
            self.subscribe(name, b"#" if name == "a" else b"$share/g/#", 2)

    def act(self, action: tuple[Any, ...]) -> None:
        kind, *arguments = action
        if kind in ("tick", "rest"):
            getattr(self.simulated, kind)()
        elif kind == "time":
            self.simulated.pass_time(0.1)
        elif kind == "announce":
            log, (partition,) = self.simulated.log, arguments
            if partition < log.partitions and log._unannounced[partition]:
                log.announce(partition)
        elif kind == "connect" or arguments[0] in self.answerers:
            getattr(self, kind)(*arguments)
        for answerer in self.answerers.values():
            answerer.look()

    def connect(self, name: str) -> None:
        client = SimulatedClient(self.simulated, 5)
        will = Will(b"x", name.encode(), 1, properties=Properties(will_delay=500)) if name in "bd" else None
        lasting = {} if name == "clean" else {"session_expiry": 5000}
        client.connect(name, clean=name == "clean", will=will, **lasting)
        self.answerers[name] = Answerer(client)
        self.simulated.tick()

    def drop(self, name: str) -> None:
        self.answerers.pop(name).client.drop()

    def disconnect(self, name: str) -> None:
        self.answerers.pop(name).client.send(Disconnect())

    def subscribe(self, name: str, pattern: bytes, qos: int) -> None:
        self.answerers[name].client.send(Subscribe(60, (FilterRequest(pattern, qos),)))

    def unsubscribe(self, name: str, pattern: bytes) -> None:
        self.answerers[name].client.send(Unsubscribe(61, (pattern,)))

    def publish(self, name: str, topic: bytes, qos: int, retain: bool, empty: bool) -> None:
        pid = self.answerers[name].client.next_packet_id() % 5 + 1
        payload = b"" if empty else b"payload"
        self.answerers[name].client.send(Publish(topic, payload, qos, retain, packet_id=pid if qos else 0))

    def release(self, name: str, pid: int) -> None:
        self.answerers[name].client.send(Pubrel(pid))

    def acknowledge(self, name: str, places: list[int]) -> None:
        self.answerers[name].acknowledge(places)

    def written_down(self) -> None:
        """Everything that is known is in the log."""
        self.simulated.rest()
        self.simulated.pass_time(0.1)
        self.simulated.rest()


def facts(broker: Broker) -> dict[str, Any]:
    """What must be the same after a start, whatever way it came about."""
    sessions = {}
    for session in broker.sessions:
        if not session.persistent:
            continue
        subscriptions = {
            name: (s.qos, s.since, s.sub_id, s.reader.number if s.reader else 0)
            for name, s in session.subscriptions.items()
        }
        begun = [
            (f.pid + i, f.qos, f.state, position, f.reader.number)
            for f in (session.flights or ())
            for i, position in enumerate(f.positions)
            if f.qos == 2 or not f.reader.number
        ]
        sessions[session.client_id] = (
            session.number, session.expiry_s, subscriptions, begun, session.inbound or set(), session.will,
        )  # fmt: skip
    groups = {
        group.key: (group.number, {(m.session.client_id, m.filter) for m in group.members if m.session.persistent})
        for group in broker.groups.all()
        if any(m.session.persistent for m in group.members)
    }
    return {
        "sessions": sessions,
        "groups": groups,
        "retained": {m.topic: m for m in broker.retaining.store.match(b"#", broker.now_ms)},
        "subscriptions": sum(len(s[2]) for s in sessions.values()),
    }


def readers(broker: Broker) -> dict[int, Reader]:
    found: dict[int, Reader] = {group.number: group for group in broker.groups.all()}
    for session in broker.sessions:
        if session.persistent:
            found[session.number] = session.reader
            for subscription in session.subscriptions.values():
                if subscription.reader is not None and not isinstance(subscription.reader, Group):
                    found[subscription.reader.number] = subscription.reader
    return found


def begun_with_qos_2(log: SimulatedLog) -> dict[int, set[int]]:
    """Reader → the positions of all messages it ever began to deliver with QoS 2."""
    found: dict[int, set[int]] = {}
    for entry in log.entries:
        for record in entry.changes:
            if record[0] == changes.FLIGHTS:
                _, reader, _, qos, _, positions = changes.read_flights(record)
                if reader and qos == 2:
                    found.setdefault(reader, set()).update(positions)
    return found


def same_after_a_start(scene: Scene, *, with_snapshot: bool) -> None:
    before = scene.simulated.broker
    log = scene.simulated.log
    again = SimulatedBroker(log.crashed(kept=len(log.entries)), inflight_max=5)
    if not with_snapshot:
        assert not log.has_snapshot
    after = again.broker
    assert facts(after) == facts(before)
    begun = begun_with_qos_2(log)
    was = readers(before)
    for number, reader in readers(after).items():
        for position, was_at in zip(
            after.delivery.positions(reader), before.delivery.positions(was[number]), strict=True
        ):
            assert position <= was_at, "a position has run ahead"
        repeated = {
            at
            for at in begun.get(number, ())
            if at >= reader.cursors[at >> PARTITION_SHIFT] and at not in (reader.skip or ())
        }
        assert not repeated, f"reader {number} would get {repeated} again with QoS 2"
    assert next(after.numbers) > max(was, default=0)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One session, group or retained message at a time."""
    monkeypatch.setattr(state, "SNAPSHOT_STEP", 1)


@pytest.mark.req("S0.3", "S0.4", "S4.1")
@examples(120)
@given(st.lists(ACTIONS | ANNOUNCE, max_size=40), st.booleans())
def test_the_log_gives_the_state_back(partitions, actions, late):
    scene = Scene(late, partitions)
    for action in actions:
        scene.act(action)
    scene.written_down()
    same_after_a_start(scene, with_snapshot=False)


@pytest.mark.req("S0.3", "S0.4", "S4.1")
@examples(200)
@given(st.lists(ACTIONS | ANNOUNCE, max_size=30), st.lists(ACTIONS | ANNOUNCE, max_size=40), st.booleans())
def test_a_snapshot_taken_amid_changes_and_the_log_after_it_give_the_state_back(partitions, earlier, during, late):
    scene = Scene(late, partitions)
    for action in earlier:
        scene.act(action)
    scene.simulated.snapshot()
    for action in during:
        scene.act(action)
        scene.simulated.pass_time(0)  # the next step of the snapshot
    for _ in range(40):
        scene.written_down()
    assert not scene.simulated.housekeeping.busy
    same_after_a_start(scene, with_snapshot=True)


@pytest.mark.attack("C2")
def test_a_snapshot_knows_nothing_that_the_log_does_not_hold_yet(partitions):
    """A QoS 2 message that was taken and not yet stored must not be known as taken after a crash."""
    simulated = SimulatedBroker(SimulatedLog(partitions=partitions))
    publisher = simulated.client("p", clean=False)
    simulated.snapshot()
    simulated.rest()
    publisher.send(Publish(b"t", b"once", 2, packet_id=1))
    for _ in range(5):
        simulated.pass_time(0.1)
        simulated.log.answer()
    simulated.crash()
    again = simulated.client("p", clean=False)
    again.send(Publish(b"t", b"once", 2, dup=True, packet_id=1))
    simulated.rest()
    assert [run.payloads[i] for _, run, i in simulated.log.messages()] == [b"once"]


