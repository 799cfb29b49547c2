"""What waits for absent sessions, as it is told beside the broker, is what the broker sends them when they return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from simulated import Answerer, SimulatedBroker, SimulatedClient, SimulatedLog
from test_state_snapshots import ACTIONS, CLIENTS, FILTERS, TOPICS, Scene

from tidegate.log.run import QOS_MASK
from tidegate.pipeline.state import Waiting, WaitingReader, absent_readers, waiting_readers
from tidegate.router.filters import matches
from tidegate.session import changes
from tidegate.session.stored import StoredState
from tidegate.wire import Publish, Pubrel

pytestmark = pytest.mark.timeout(900)

Message = tuple[int, bytes, int, bytes, bytes]  # position, topic, qos, publisher, payload


persistent = st.sampled_from(CLIENTS[:4])
SUBSCRIBE = st.tuples(st.just("subscribe"), persistent, st.sampled_from(FILTERS), st.integers(0, 2))
PUBLISH = st.tuples(
    st.just("publish"),
    st.sampled_from(CLIENTS),
    st.sampled_from(TOPICS),
    st.integers(0, 2),
    st.booleans(),
    st.just(False),
)
LEAVE = st.tuples(st.sampled_from(["drop", "disconnect"]), persistent)


def parts(action: st.SearchStrategy[tuple[object, ...]], most: int) -> st.SearchStrategy[list[tuple[object, ...]]]:
    return st.lists(action, max_size=most)


# Sessions that subscribe, get and acknowledge some of it, leave, and miss some more; and anything between.
STORIES = st.tuples(
    st.just([("connect", "d"), ("connect", "clean")]),
    parts(SUBSCRIBE, 5),
    parts(PUBLISH | ACTIONS, 12),
    parts(LEAVE, 3),
    parts(PUBLISH | ACTIONS, 12),
).map(lambda found: [action for part in found for action in part])


class Story(Scene):
    """A scene in which each message has a content of its own."""

    published = 0

    def subscribe(self, name: str, pattern: bytes, qos: int) -> None:
        # A group whose members all asked for QoS 0 is promised nothing (S4.4), and gets what there is all the same.
        super().subscribe(name, pattern, max(qos, 1) if pattern.startswith(b"$share/") else qos)

    def publish(self, name: str, topic: bytes, qos: int, retain: bool, empty: bool) -> None:
        self.published += 1
        pid = self.answerers[name].client.next_packet_id() % 5 + 1
        content = b"%d" % self.published
        if qos == 2:
            self.answerers[name].client.send(Pubrel(pid))  # else the broker would take it for the one before
        # Not retained: what is due of that comes to a session by another rule (S0.31), which the lake does not know.
        self.answerers[name].client.send(Publish(topic, content, qos, False, packet_id=pid if qos else 0))


def told(actions: list[tuple[object, ...]]) -> SimulatedBroker:
    """The broker after a story and a crash: everybody is away."""
    story = Story(late=False)
    for action in actions:
        story.act(action)
    story.written_down()
    log = story.simulated.log
    after = SimulatedBroker(log.crashed(kept=len(log.entries)), inflight_max=5)
    after.rest()
    return after


def messages_in(simulated: SimulatedBroker) -> list[Message]:
    return [
        (position, run.topic, run.flags & QOS_MASK, run.publisher, run.payloads[i])
        for position, run, i in simulated.log.messages()
    ]


def owed(reader: WaitingReader, messages: list[Message]) -> Iterator[bytes]:
    for position, topic, qos, publisher, payload in messages:
        if position in reader.finished or not (qos or reader.any_qos):
            continue
        for filter in reader.filters:
            own = filter.no_local and publisher == reader.client.encode()
            if not own and position >= filter.floor and matches(filter.filter.encode(), topic):
                yield payload
                break


def expected(waiting: Waiting, messages: list[Message]) -> dict[str, Counter[bytes]]:
    """Client or group → what is to come to it."""
    contents = {position: payload for position, _, _, _, payload in messages}
    found: dict[str, Counter[bytes]] = {}
    for reader in waiting.readers:
        found.setdefault(reader.client, Counter()).update(owed(reader, messages))
    for begun in waiting.begun:
        found.setdefault(begun.client, Counter())[contents[begun.position]] += 1
    return found


def received_by_all(simulated: SimulatedBroker) -> dict[str, Counter[bytes]]:
    """Everybody returns, one after the other, and acknowledges all there is."""
    answerers = {}
    for name in CLIENTS:
        if name.encode() not in simulated.broker.sessions:
            continue
        client = SimulatedClient(simulated, 5)
        client.connect(name, clean=False, session_expiry=5000)
        answerers[name] = Answerer(client)
        for _ in range(1000):
            simulated.rest()
            for answerer in answerers.values():
                answerer.look()
            owing = [answerer for answerer in answerers.values() if answerer.owed]
            if not owing:
                break
            for answerer in owing:
                answerer.acknowledge([0] * len(answerer.owed))
    return {
        name: Counter(packet.payload for packet in answerer.transcript if isinstance(packet, Publish))
        for name, answerer in answerers.items()
    }


@pytest.mark.req("P.4", "S4.4", "S4.5")
@examples(300)
@given(STORIES)
def test_what_waits_for_a_session_is_what_it_gets_when_it_returns(actions):
    simulated = told(actions)
    state = StoredState(simulated.log.state())
    assert not state.unreadable
    promised = expected(absent_readers(state, simulated.broker.now_ms), messages_in(simulated))
    received = received_by_all(simulated)
    of_groups = sum((promised.pop(name) for name in list(promised) if name.startswith("$share/")), Counter())
    shared: Counter[bytes] = Counter()
    for name, found in received.items():
        own = promised.pop(name, Counter())
        assert own <= found, f"{name} was promised more than it got"
        shared += found - own
    assert shared == of_groups, "the members of a group share what is for it"
    assert not any(promised.values())


@pytest.mark.req("P.4", "P.6")
@examples(100)
@given(STORIES)
def test_nothing_that_a_session_gets_lies_below_the_floor(actions):
    simulated = told(actions)
    waiting = waiting_readers(StoredState(simulated.log.state()))
    positions = {payload: position for position, _, _, _, payload in messages_in(simulated)}
    received = received_by_all(simulated)
    lowest = [positions[payload] for found in received.values() for payload in found]
    if lowest:
        assert waiting.floor is not None and waiting.floor <= min(lowest)


@pytest.mark.req("P.4")
@examples(60)
@given(STORIES, st.lists(ACTIONS, max_size=30))
def test_the_state_told_beside_the_broker_is_the_one_that_it_recovers(earlier, during):
    story = Story(late=False)
    for action in earlier:
        story.act(action)
    story.simulated.snapshot()
    for action in during:
        story.act(action)
        story.simulated.pass_time(0)
    for _ in range(40):
        story.written_down()
    simulated = story.simulated
    state = StoredState(simulated.log.state())
    kept = {s.client_id: s for s in state.sessions.values() if s.persistent}
    broker = simulated.broker
    assert set(kept) == {s.client_id for s in broker.sessions if s.persistent}
    for name, session in kept.items():
        live = broker.sessions.get(name)
        assert (session.connected, session.expiry_s) == (live.link is not None, live.expiry_s)
        found = {filter: (s.qos, s.since, s.reader) for filter, s in session.subscriptions.items()}
        assert found == {
            filter: (s.qos, s.since[0], s.reader.number if s.reader else 0) for filter, s in live.subscriptions.items()
        }
        assert state.positions[session.number] <= broker.delivery.positions(live.reader)[0]


@pytest.mark.req("P.7")
def test_a_message_that_was_given_up_is_no_state():
    log = SimulatedLog(late=False)
    letter = changes.Dead(changes.DeadReason.EXPIRED, 1, 0, 0, 1, False, b"a", b"", b"t", b"p", b"", b"", b"x")
    log.append([], [changes.session(1, False, 5, 60, 1_000_000, 0, b"a", b"", None), changes.dead(letter)], 0)
    assert SimulatedBroker(log).start().sessions == 1  # and all records were understood
    assert len(StoredState(log.state()).sessions) == 1
