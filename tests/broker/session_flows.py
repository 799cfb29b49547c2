"""Sessions and their QoS flows under everything that may happen to them, in any order: the rules.

Clients come, go, break off, subscribe, publish and acknowledge as they like; the log completes late; the broker
crashes and recovers, with what had not been stored lost. `session_model` says what must hold all the time; here is
what must hold after each step and at the end.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from session_model import Actor, Model
from simulated import SimulatedBroker, SimulatedLog

from tidegate.limits import PARTITION_SHIFT

PATTERNS = (b"t/a", b"t/+", b"#")
SHARED = b"t/+"
TOPICS = (b"t/a", b"t/b")
INFLIGHT_MAX = 4

PUBLISHERS = ("v3", "v5", "clean", "narrow")
WORKERS = ("w1", "w2", "w3")
SURROUNDINGS = ("tick", "tick", "tick", "store", "store", "answer", "answer", "rest")

names = st.sampled_from(PUBLISHERS + WORKERS)
patterns = st.sampled_from(PATTERNS)
qos_levels = st.integers(0, 2)
places = st.integers(0, 6)


class SessionFlows(RuleBasedStateMachine):
    """`place` picks one among those who can do what the rule says; nothing happens if there is none."""

    @initialize(
        late=st.booleans(),
        tail_bytes=st.sampled_from([1, 3000, 1 << 20]),
        partitions=st.sampled_from([1, 3]),
        present=st.lists(st.tuples(names, patterns, st.integers(1, 2)), min_size=2, max_size=5),
    )
    def begin(self, late: bool, tail_bytes: int, partitions: int, present: list[tuple[str, bytes, int]]) -> None:
        self.begin_on(SimulatedLog(late=late, partitions=partitions), Model, tail_bytes, present)

    def begin_on(
        self, log: SimulatedLog, model: type[Model], tail_bytes: int, present: list[tuple[str, bytes, int]]
    ) -> None:
        self.simulated = SimulatedBroker(
            log, inflight_max=INFLIGHT_MAX, ack_timeout_s=86400, tail_bytes=tail_bytes
        )
        self.model = model(
            self.simulated,
            [
                Actor("v3", 4, True, INFLIGHT_MAX),
                Actor("v5", 5, True, 3),
                Actor("narrow", 5, True, 1),
                Actor("clean", 4, False, INFLIGHT_MAX),
                Actor("w1", 5, True, 2, worker=True),
                Actor("w2", 4, True, INFLIGHT_MAX, worker=True),
                Actor("w3", 5, False, 2, worker=True),
            ],
        )
        for name, pattern, qos in present:
            self.come_and_subscribe(name, pattern, qos)

    def among(self, actors: list[Actor], place: int) -> Actor | None:
        self.model.step += 1
        return actors[place % len(actors)] if actors else None

    def greeted(self, *names: str) -> list[Actor]:
        found = [self.model.actors[name] for name in names or PUBLISHERS + WORKERS]
        return [actor for actor in found if actor.connected and actor.greeted]

    def connected(self) -> list[Actor]:
        return [actor for actor in self.model.actors.values() if actor.connected]

    # ── clients ──

    @rule(name=names)
    def connect(self, name: str) -> None:
        self.model.step += 1
        self.model.connect(self.model.actors[name])

    @rule(name=names, pattern=patterns, qos=qos_levels)
    def come_and_subscribe(self, name: str, pattern: bytes, qos: int) -> None:
        actor = self.come(name)
        self.model.subscribe(actor, _pattern(actor, pattern), qos)
        self.rest()

    def come(self, name: str) -> Actor:
        self.model.step += 1
        actor = self.model.actors[name]
        if not actor.connected:
            self.model.connect(actor)
        self.rest()
        return actor

    @rule(place=places, graceful=st.booleans(), unseen=st.booleans())
    def go(self, place: int, graceful: bool, unseen: bool) -> None:
        actor = self.among(self.connected(), place)
        if actor is None or actor.client is None:
            return
        if unseen:
            actor.client.link.closed = True  # the bytes of the last tick never arrive
            self.simulated.tick()
        if graceful:
            self.model.disconnect(actor)
        else:
            self.model.drop(actor)

    @rule(place=places, pattern=patterns, qos=qos_levels)
    def subscribe(self, place: int, pattern: bytes, qos: int) -> None:
        actor = self.among(self.greeted(), place)
        if actor is not None:
            self.model.subscribe(actor, _pattern(actor, pattern), qos)

    @rule(place=places, pattern=patterns)
    def unsubscribe(self, place: int, pattern: bytes) -> None:
        actor = self.among(self.greeted(), place)
        if actor is not None:
            self.model.unsubscribe(actor, _pattern(actor, pattern))

    @rule(place=places, topic=st.sampled_from(TOPICS), qos=qos_levels, count=st.integers(1, 5), hurry=st.booleans())
    def publish(self, place: int, topic: bytes, qos: int, count: int, hurry: bool) -> None:
        actor = self.among(self.greeted(*PUBLISHERS), place)
        if actor is not None:
            self.simulated.hurrying = hurry
            self.model.publish(actor, topic, qos, count)

    @rule(place=places, which=st.integers(0, 3), count=st.integers(1, 4))
    def acknowledge(self, place: int, which: int, count: int) -> None:
        actor = self.among([actor for actor in self.connected() if actor.owed], place)
        if actor is not None:
            self.model.acknowledge(actor, which, count)

    @rule(place=places, which=st.integers(0, 3))
    def acknowledge_late(self, place: int, which: int) -> None:
        actor = self.among([actor for actor in self.greeted(*PUBLISHERS) if actor.late], place)
        if actor is not None:
            self.model.acknowledge_late(actor, which)

    @rule(place=places, paused=st.booleans())
    def socket(self, place: int, paused: bool) -> None:
        actor = self.among(self.connected(), place)
        if actor is not None and actor.client is not None:
            if paused:
                actor.client.link.outbox.paused = True
            else:
                self.simulated.drain(actor.client.link)

    # ── the broker's surroundings ──

    @rule(what=st.lists(st.sampled_from(SURROUNDINGS), min_size=1, max_size=3))
    def surroundings(self, what: list[str]) -> None:
        for one in what:
            if one == "rest":
                self.rest()
            elif one == "tick":
                self.simulated.tick()
            else:
                getattr(self.simulated.log, one)()

    def rest(self) -> None:
        self.simulated.rest()
        self.model.look()

    @rule()
    def pass_time(self) -> None:
        self.simulated.pass_time(0.1)

    @rule()
    def snapshot(self) -> None:
        self.simulated.snapshot()

    @rule(kept=st.integers(0, 3))
    def crash(self, kept: int) -> None:
        self.model.step += 1
        self.model.crash(kept)

    # ── what must hold ──

    @invariant()
    def what_must_hold(self) -> None:
        if hasattr(self, "model"):
            self.model.look()
            self.no_position_passes_what_is_owed()
            self.packet_ids_are_used_once()

    def no_position_passes_what_is_owed(self) -> None:
        broker = self.simulated.broker
        owed = self.model.owed_to_sessions()
        if not owed:
            return
        where: dict[int, int] = {}
        for position, run, index in self.simulated.log.messages():
            where[int(run.payloads[index])] = position
        for name, number in owed:
            session = broker.sessions.get(name.encode())
            at = where[number]
            position = broker.delivery.positions(session.reader)[at >> PARTITION_SHIFT]
            # With QoS 2, the client's last word counts: it may still be on its way.
            assert position <= at, f"{name} has passed message {number}"

    def packet_ids_are_used_once(self) -> None:
        for session in self.simulated.broker.sessions:
            if session.flights is not None:
                used = [f.pid + i for f in session.flights for i in range(f.count)]
                assert len(used) == len(set(used))
                assert session.flights.unfinished == len(used)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.everyone_comes_and_takes_what_is_theirs()
            self.nothing_is_left_over()

    def everyone_comes_and_takes_what_is_theirs(self) -> None:
        model = self.model
        for actor in model.actors.values():
            if actor.client is None:
                model.connect(actor)
            else:
                self.simulated.drain(actor.client.link)
        for _ in range(1000):
            self.simulated.rest()
            model.look()
            owing = [actor for actor in model.actors.values() if actor.owed]
            if not owing and self.simulated.idle:
                break
            for actor in owing:
                model.acknowledge(actor, 0, len(actor.owed))
        assert not model.owed_to_sessions(), f"never delivered: {model.owed_to_sessions()}"
        assert not model.owed_to_group(), f"never delivered to the group: {model.owed_to_group()}"

    def nothing_is_left_over(self) -> None:
        for _ in range(3):
            self.simulated.pass_time(1)
            self.simulated.rest()
        self.model.look()
        broker = self.simulated.broker
        delivery = broker.delivery
        assert not broker.gate.jobs
        assert not broker.post.tick
        assert not broker.post.dirty
        assert broker.post.sending_bytes == 0
        assert broker.storing.idle
        assert not delivery.moved
        assert broker.gate.held_bytes == 0
        for group in broker.groups.all():
            assert group.live
            assert not group.redo
            assert delivery.positions(group) == broker.log.ends
        for session in broker.sessions:
            assert session.reader.live, session.reader
            assert session.reader.held is None
            assert session.reader.again is None
            assert not session.inbound
            assert not session.flights, list(session.flights)
            assert delivery.positions(session.reader) == broker.log.ends
            assert session.link is not None
            outbox = session.link.outbox
            assert outbox.used == 0, f"{session.client_id!r} has {outbox.used} on the wire"
            assert not outbox.waiting and not outbox.holding and not outbox.answers_bytes


def _pattern(actor: Actor, pattern: bytes) -> bytes:
    """Workers share one filter, so that they are one group."""
    return SHARED if actor.worker else pattern
