"""Sessions and their QoS flows under everything that may happen to them, in any order.

Clients come, go, break off, subscribe, publish and acknowledge as they like; the log completes late; the broker
crashes and recovers, with what had not been stored lost. `session_model` says what must hold all the time; here is
what must hold after each step and at the end.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis_profiles import examples
from session_model import Actor, Model
from simulated import SimulatedBroker, SimulatedLog

from tidegate.session.flights import State

PATTERNS = (b"t/a", b"t/+", b"#")
SHARED = b"t/+"
TOPICS = (b"t/a", b"t/b")
INFLIGHT_MAX = 4

names = st.sampled_from(["v3", "v5", "clean", "narrow"])
workers = st.sampled_from(["w1", "w2", "w3"])
anyone = names | workers


class SessionFlows(RuleBasedStateMachine):
    @initialize(late=st.booleans(), tail_bytes=st.sampled_from([1, 3000, 1 << 20]), fast=st.booleans())
    def begin(self, late: bool, tail_bytes: int, fast: bool) -> None:
        log = SimulatedLog(late=late)
        self.simulated = SimulatedBroker(
            log, fast=fast, inflight_max=INFLIGHT_MAX, ack_timeout_s=86400, tail_bytes=tail_bytes
        )
        self.model = Model(
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

    def actor(self, name: str) -> Actor:
        self.model.step += 1
        return self.model.actors[name]

    def pattern(self, name: str, pattern: bytes) -> bytes:
        """Workers share one filter, so that they are one group."""
        return SHARED if self.model.actors[name].worker else pattern

    def is_open(self, name: str) -> bool:
        actor = self.actor(name)
        return actor.connected and actor.greeted

    # ── clients ──

    @rule(name=anyone)
    def connect(self, name: str) -> None:
        self.model.connect(self.actor(name))

    @rule(name=anyone, pattern=st.sampled_from(PATTERNS), qos=st.integers(0, 2))
    def come_and_subscribe(self, name: str, pattern: bytes, qos: int) -> None:
        """Most stories begin like this."""
        actor = self.actor(name)
        if not actor.connected:
            self.model.connect(actor)
        self.rest()
        self.model.subscribe(actor, self.pattern(name, pattern), qos)
        self.rest()

    @rule(name=anyone, graceful=st.booleans(), unseen=st.booleans())
    def go(self, name: str, graceful: bool, unseen: bool) -> None:
        actor = self.actor(name)
        if actor.client is None:
            return
        if unseen:
            actor.client.link.closed = True  # the bytes of the last tick never arrive
            self.simulated.tick()
        if graceful:
            self.model.disconnect(actor)
        else:
            self.model.drop(actor)

    @rule(name=anyone, pattern=st.sampled_from(PATTERNS), qos=st.integers(0, 2))
    def subscribe(self, name: str, pattern: bytes, qos: int) -> None:
        if self.is_open(name):
            self.model.subscribe(self.actor(name), self.pattern(name, pattern), qos)

    @rule(name=anyone, pattern=st.sampled_from(PATTERNS))
    def unsubscribe(self, name: str, pattern: bytes) -> None:
        if self.is_open(name):
            self.model.unsubscribe(self.actor(name), self.pattern(name, pattern))

    @rule(
        name=names, topic=st.sampled_from(TOPICS), qos=st.integers(0, 2), count=st.integers(1, 5), hurry=st.booleans()
    )
    def publish(self, name: str, topic: bytes, qos: int, count: int, hurry: bool) -> None:
        if self.is_open(name):
            self.simulated.hurrying = hurry
            self.model.publish(self.actor(name), topic, qos, count)

    @rule(name=anyone, place=st.integers(0, 3), count=st.integers(1, 4))
    def acknowledge(self, name: str, place: int, count: int) -> None:
        actor = self.actor(name)
        if actor.connected and actor.owed:
            self.model.acknowledge(actor, place, count)

    @rule(name=names, place=st.integers(0, 3))
    def acknowledge_late(self, name: str, place: int) -> None:
        if self.is_open(name) and self.actor(name).late:
            self.model.acknowledge_late(self.actor(name), place)

    @rule(name=anyone, paused=st.booleans())
    def socket(self, name: str, paused: bool) -> None:
        actor = self.actor(name)
        if actor.client is not None:
            if paused:
                actor.client.link.paused = True
            else:
                self.simulated.drain(actor.client.link)

    # ── the broker's surroundings ──

    @rule()
    def tick(self) -> None:
        self.simulated.tick()

    @rule()
    def store(self) -> None:
        self.simulated.log.store()

    @rule()
    def answer(self) -> None:
        self.simulated.log.answer()

    @rule()
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
    def clients_see_nothing_wrong(self) -> None:
        if hasattr(self, "model"):
            self.model.look()

    @invariant()
    def no_position_passes_what_is_owed(self) -> None:
        if not hasattr(self, "model"):
            return
        broker = self.simulated.broker
        owed = self.model.owed_to_sessions()
        if not owed:
            return
        where: dict[int, int] = {}
        for position, run, index in self.simulated.log.messages():
            where[int(run.payloads[index])] = position
        for name, number in owed:
            session = broker.sessions[name.encode()]
            position = broker.dispatcher.position(session.reader)
            # With QoS 2, the client's last word counts: it may still be on its way.
            assert position <= where[number], f"{name} has passed message {number}"

    @invariant()
    def packet_ids_are_used_once(self) -> None:
        if not hasattr(self, "model"):
            return
        for session in self.simulated.broker.sessions.values():
            if session.flights is not None:
                queue = session.flights.queue
                used = [f.pid + i for f in queue if f.state is not State.DONE for i in range(f.count)]
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
        dispatcher = broker.dispatcher
        assert not dispatcher.behind
        assert not dispatcher.held
        assert not dispatcher.changes
        assert not dispatcher.dirty
        assert not broker.runs
        assert not broker.delivered
        assert not broker.unstored
        assert not broker.moved
        assert not broker.on_refusal
        assert broker.catch_up.held_bytes == 0
        for group in broker.groups.values():
            assert group.live
            assert not group.redo
            assert dispatcher.position(group) == broker.log.end
        for session in broker.sessions.values():
            assert session.reader.live, session.reader
            assert session.reader.held is None
            assert not session.reader.resend
            assert not session.inbound
            assert session.flights is None or not session.flights.queue, session.flights.queue
            assert dispatcher.position(session.reader) == broker.log.end
            assert session.link is not None
            assert session.link.on_wire == 0, f"{session.client_id!r} has {session.link.on_wire} on the wire"
            assert not session.link.waiting


@pytest.mark.req("S0.12", "S0.13", "S1.20", "S1.22", "S2.10", "S2.14", "S2.18", "S4.1", "S4.5")
@pytest.mark.attack("C2")
def test_sessions_keep_their_promises_whatever_happens():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(SessionFlows, settings=examples(150, stateful_step_count=40))
