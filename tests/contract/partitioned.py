"""The broker's sessions on a log with partitions on other machines: each answers in its own time, and now and then the
log takes nothing, which it says at once or later.

    PartitionedLog      the simulated log with three partitions, and refusals that come late
    PartitionedModel    what clients may expect, refusals included
    PartitionedFlows    the rules of `session_flows` and those that only such a log has

What `session_model` raises at is raised at here; and a message whose publisher was refused must never arrive.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from session_flows import PUBLISHERS, SHARED, SessionFlows, names, patterns, places, qos_levels
from session_model import Actor, Model
from simulated import SimulatedBroker, SimulatedLog

from tidegate.errors import DiskFull
from tidegate.session.link import Phase
from tidegate.wire import Disconnect, Packet, Puback, Publish, Pubrec, Reason, Suback

PARTITIONS = 3
TOPICS = (b"t/a", b"t/b", b"t/c", b"t/d")


class PartitionedLog(SimulatedLog):
    def __init__(self, *, late: bool = True, partitions: int = PARTITIONS, prompt: bool = False) -> None:
        super().__init__(late=late, partitions=partitions, prompt=prompt)

    def crashed(self, kept: int = 0) -> PartitionedLog:
        after = super().crashed(kept)
        after.__class__ = PartitionedLog
        assert isinstance(after, PartitionedLog)
        return after

    def refusable(self) -> list[int]:
        """The newest appends of which nothing has been announced, and that are not stored: their tickets."""
        waiting: dict[int, int] = {}
        for queue in self._unannounced:
            for ticket, rows in queue:
                waiting[ticket] = waiting.get(ticket, 0) + len(rows)
        found: list[int] = []
        for entry in reversed(self.entries):
            whole = waiting.get(entry.ticket, 0) == sum(run.count for run in entry.runs)
            if entry.ticket <= self.stored or not whole:
                break
            found.append(entry.ticket)
        return found[::-1]

    def refuse(self, count: int) -> None:
        """The newest appends, up to `count`, were not taken after all; it is told in their order."""
        for ticket in self.refusable()[-count:]:
            self.refuse_one(ticket)

    def refuse_one(self, ticket: int) -> None:
        self.entries = [entry for entry in self.entries if entry.ticket != ticket]
        for queue in self._unannounced:
            queue[:] = [waiting for waiting in queue if waiting[0] != ticket]
        self.listener.refused(ticket, DiskFull("no room"))


class PartitionedModel(Model):
    def __init__(self, simulated: SimulatedBroker, actors: list[Actor]) -> None:
        super().__init__(simulated, actors)
        self.refused: set[int] = set()  # messages whose publisher was told so
        self.before: dict[tuple[str, int], tuple[int, bool] | None] = {}  # what a SUBSCRIBE that waits would replace

    def subscribe(self, actor: Actor, pattern: bytes, qos: int) -> None:
        history = actor.interests.get(pattern, [])
        there = history[-1] if history and history[-1].until is None else None
        self.before[actor.name, actor.free_id()] = None if there is None else (there.qos, there.certain)
        super().subscribe(actor, pattern, qos)

    def look(self) -> None:
        stored_step = self.stored_step
        super().look()
        self.stored_step = stored_step
        for actor in self.actors.values():
            if actor.client is not None and actor.client.link.phase is Phase.CLOSED:
                assert actor.version == 4, f"{actor.name} was not told why its connection ended"
                assert actor.outgoing, f"{actor.name} was closed for nothing"
                self._lost(actor)
        storing = self.simulated.broker.storing
        entries = self.simulated.log.entries
        all_stored = not entries or self.simulated.log.stored >= entries[-1].ticket
        if self.simulated.idle and all_stored and storing.on and storing.idle:
            self.stored_step = self.step

    def _see(self, actor: Actor, packet: Packet) -> None:
        match packet:
            case Puback() | Pubrec() if packet.reason >= 0x80:
                assert packet.reason == Reason.QUOTA_EXCEEDED
                self._refused(actor.outgoing.pop(packet.packet_id).message.number)
            case Suback() if packet.reasons[0] >= 0x80:
                self._not_subscribed(actor, packet)
            case Disconnect():
                raise AssertionError(f"{actor.name} was disconnected: {packet}")
            case Publish():
                number = int(packet.payload)
                assert number not in self.refused or packet.dup, f"{actor.name} got {number}, which was refused"
                super()._see(actor, packet)
            case _:
                super()._see(actor, packet)

    def _refused(self, number: int) -> None:
        message = self.messages[number]
        if len(message.sent) == 1 or message.qos == 2:
            self.refused.add(number)
        self.candidates = {owed for owed in self.candidates if owed[1] != number or message.acknowledged}

    def _not_subscribed(self, actor: Actor, packet: Suback) -> None:
        """All is as it was before; what was sent meanwhile is not owed for certain."""
        assert packet.reasons[0] == (Reason.QUOTA_EXCEEDED if actor.version == 5 else 0x80)
        _, pattern = actor.asked.pop(packet.packet_id)
        last = actor.interests[pattern][-1]
        before = self.before.pop((actor.name, packet.packet_id))
        self._forgive(actor, pattern)
        if before is None:
            last.until, last.certain = self.step, False
        else:
            last.qos, last.certain = before[0], False


class PartitionedFlows(SessionFlows):
    model: PartitionedModel

    @initialize(
        tail_bytes=st.sampled_from([1, 3000, 1 << 20]),
        present=st.lists(st.tuples(names, patterns, st.integers(1, 2)), min_size=2, max_size=5),
    )
    def begin(self, tail_bytes: int, present: list[tuple[str, bytes, int]]) -> None:
        self.begin_on(PartitionedLog(), PartitionedModel, tail_bytes, present)

    @rule(name=names, pattern=patterns, qos=qos_levels)
    def come_and_subscribe(self, name: str, pattern: bytes, qos: int) -> None:
        """What a client sends again when it comes may be refused, and the client closed."""
        actor = self.come(name)
        if actor.connected:
            self.model.subscribe(actor, SHARED if actor.worker else pattern, qos)
            self.rest()

    @property
    def log(self) -> PartitionedLog:
        assert isinstance(self.simulated.log, PartitionedLog)
        return self.simulated.log

    @rule(
        place=places,
        topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=4),
        qos=qos_levels,
        count=st.integers(1, 3),
        hurry=st.booleans(),
    )
    def publish(self, place: int, topics: list[bytes], qos: int, count: int, hurry: bool) -> None:  # type: ignore[override]
        """One client, several topics, so that a tick goes to several partitions."""
        actor = self.among(self.greeted(*PUBLISHERS), place)
        self.simulated.hurrying = hurry
        for topic in topics:
            if actor is not None and actor.connected and actor.greeted:
                self.model.publish(actor, topic, qos, count)

    @rule(partition=st.integers(0, PARTITIONS - 1), times=st.integers(1, 3))
    def announce(self, partition: int, times: int) -> None:
        """A partition comes back, whatever the others do."""
        for _ in range(times):
            if self.log._unannounced[partition]:
                self.log.announce(partition)

    @rule()
    def no_room(self) -> None:
        self.log.refusing = True

    @rule()
    def room(self) -> None:
        self.log.refusing = False
        self.simulated.pass_time(1)

    @rule(count=st.integers(1, 3))
    def refuse(self, count: int) -> None:
        """What was handed over was not taken after all."""
        self.log.refuse(count)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.room()
            self.rest()
            self.room()
            self.rest()
            self.what_must_hold()
        super().teardown()
