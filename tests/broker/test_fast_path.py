"""The fast ways in and out do what the plain ways do: the same log, the same packets to everyone, the same answers.

Each example drives two brokers with the same bytes in the same chunks. One takes every short cut; of the other, one
is closed: every packet is decoded in full, or every message is handed over by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from simulated import Answerer, SimulatedBroker, SimulatedLog

from tidegate.session import changes
from tidegate.wire import (
    NO_PROPERTIES,
    FilterRequest,
    Pingreq,
    Properties,
    Puback,
    Publish,
    Pubrel,
    Subscribe,
    Unsubscribe,
    encode,
)

pytestmark = pytest.mark.timeout(900)  # for the long search, and for the shortest way to a failure

TOPICS = (b"a", b"a/b", b"c", "ä/€".encode())
FILTERS = (b"a", b"a/#", b"+/b", b"#", b"c", "ä/+".encode())
# Where the remaining length of a packet takes another byte, and where the fast path gives up.
REMAINING_LENGTHS = (0, 1, 126, 127, 128, 129, 16382, 16383, 16384, 16385)


@dataclass(frozen=True)
class Kind:
    """A kind of subscriber."""

    version: int
    qos: int
    filter: bytes
    window: int | None
    options: dict[str, bool]
    sub_id: int
    aliases: int
    packet_max: int | None
    prefix: bytes
    persistent: bool


@dataclass(frozen=True)
class Step:
    """What happens in a tick: bytes of one publisher, cut at places; then acknowledgements of one subscriber."""

    publisher: int
    packets: list[Any]
    cuts: list[int]
    tick_between: bool
    acknowledge: list[tuple[int, list[int]]] = field(default_factory=list)
    store: bool = True
    hurrying: bool = False


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    version = draw(st.sampled_from([3, 4, 4, 5, 5]))
    v5 = version == 5
    prefix = draw(st.sampled_from([b"", b"", b"", b"$share/g/", b"$replay/earliest/"]))
    options = {
        "no_local": v5 and not prefix.startswith(b"$share") and draw(st.booleans()),
        "retain_as_published": v5 and draw(st.booleans()),
    }
    return Kind(
        version,
        draw(st.integers(0, 2)),
        draw(st.sampled_from(FILTERS)),
        draw(st.sampled_from([None, 1, 3])) if v5 else None,
        options,
        draw(st.sampled_from([0, 1, 200])) if v5 else 0,
        draw(st.sampled_from([0, 0, 1])) if v5 else 0,
        draw(st.sampled_from([None, None, 120])) if v5 else None,
        prefix,
        draw(st.booleans()),
    )


@st.composite
def publishes(draw: st.DrawFn, v5: bool) -> Publish:
    qos = draw(st.sampled_from([0, 0, 0, 1, 1, 1, 2]))
    topic = draw(st.sampled_from(TOPICS))
    properties = NO_PROPERTIES
    if v5 and draw(st.integers(0, 3)) == 0:
        properties = Properties(
            user=((b"k", b"v"),),
            content_type=draw(st.sampled_from([None, b"text"])),
            message_expiry=draw(st.sampled_from([None, 0, 60])),
        )
    length = draw(st.sampled_from(REMAINING_LENGTHS) | st.integers(0, 40))
    overhead = 2 + len(topic) + (2 if qos else 0) + v5
    payload = bytes([draw(st.integers(0, 255))]) * max(0, length - overhead)
    return Publish(
        topic,
        payload,
        qos,
        retain=draw(st.integers(0, 5)) == 0,
        dup=bool(qos) and draw(st.integers(0, 5)) == 0,
        packet_id=draw(st.integers(1, 12)) if qos else 0,
        properties=properties,
    )


@st.composite
def others(draw: st.DrawFn, v5: bool) -> Any:
    pid = draw(st.integers(1, 12))
    pattern, no_local = draw(st.sampled_from(FILTERS)), v5 and draw(st.booleans())
    request = FilterRequest(pattern, draw(st.integers(0, 2)), no_local=no_local)
    return draw(
        st.sampled_from(
            [Pingreq(), Pubrel(pid), Puback(pid), Subscribe(pid, (request,)), Unsubscribe(pid, (request.filter,))]
        )
    )


@st.composite
def packet_runs(draw: st.DrawFn, v5: bool) -> list[Any]:
    packets: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 5)) == 0:
            packets.append(draw(others(v5)))
        else:
            packets += [draw(publishes(v5))] * draw(st.sampled_from([1, 1, 2, 5, 12]))
    return packets


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[Kind], list[Step]]:
    versions = draw(st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=2))
    subscribers = draw(st.lists(kinds(), min_size=1, max_size=4))
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        publisher = draw(st.integers(0, len(versions) - 1))
        steps.append(
            Step(
                publisher,
                draw(packet_runs(versions[publisher] == 5)),
                draw(st.lists(st.integers(0, 2000) | st.integers(0, 40000), max_size=4)),
                draw(st.booleans()),
                draw(
                    st.lists(
                        st.tuples(
                            st.integers(0, len(subscribers) - 1), st.lists(st.integers(0, 20), max_size=6)
                        ),
                        max_size=3,
                    )
                ),
                draw(st.booleans()),
                draw(st.booleans()),
            )
        )
    return versions, subscribers, steps


def carry_out(
    plan: tuple[list[int], list[Kind], list[Step]], *, fast: bool, simple: bool
) -> tuple[SimulatedBroker, list[Any]]:
    versions, wanted, steps = plan
    simulated = SimulatedBroker(SimulatedLog(late=True), fast=fast)
    publishers = [Answerer(simulated.client(f"p{i}", version)) for i, version in enumerate(versions)]
    subscribers = []
    for i, kind in enumerate(wanted):
        asked: dict[str, Any] = {}
        if kind.version == 5:
            asked = {
                "receive_maximum": kind.window,
                "topic_alias_maximum": kind.aliases,
                "maximum_packet_size": kind.packet_max,
                "session_expiry": 1000 if kind.persistent else None,
            }
        client = simulated.client(f"s{i}", kind.version, clean=not kind.persistent or kind.version == 5, **asked)
        request = FilterRequest(kind.prefix + kind.filter, kind.qos, **kind.options)
        told = Properties(subscription_ids=(kind.sub_id,)) if kind.sub_id else NO_PROPERTIES
        client.send(Subscribe(1, (request,), told))
        subscribers.append(Answerer(client))
    everyone = publishers + subscribers
    if not simple:
        for one in everyone:
            one.client.link.simple = False  # every message gets a look of its own
        for session in simulated.broker.sessions.values():
            simulated.broker.table.session_changed(session)
    simulated.rest()
    for step in steps:
        client = publishers[step.publisher].client
        simulated.hurrying = step.hurrying
        data = b"".join(encode(packet, client.version) for packet in step.packets)
        places = [0, *sorted({cut % (len(data) + 1) for cut in step.cuts}), len(data)]
        for start, end in pairwise(places):
            client.send_bytes(data[start:end])
            if step.tick_between:
                simulated.tick()
        simulated.tick()
        if step.store:
            simulated.rest()
        for one in everyone:
            one.look()
        for who, which in step.acknowledge:
            subscribers[who].acknowledge(which)
        simulated.tick()
    simulated.rest()
    for one in everyone:
        one.look()
    while any(one.owed for one in everyone):
        for one in everyone:
            one.acknowledge([0] * len(one.owed))
        simulated.rest()
        for one in everyone:
            one.look()
    return simulated, everyone


def log_contents(log: SimulatedLog) -> list[Any]:
    found: list[Any] = []
    for position, run, i in log.messages():
        properties = run.properties[i] if run.properties is not None else b""
        expiry = run.expiries[i] if run.expiries is not None else None
        found.append((position, run.topic, run.publisher, run.flags, run.payloads[i], properties, expiry, run.time_ms))
    return found


def state_changes(log: SimulatedLog) -> list[bytes]:
    return [record for entry in log.entries for record in entry.changes if record[0] != changes.POSITIONS]


def same(plan: Any, **slow: bool) -> None:
    quick, at_quick = carry_out(plan, fast=True, simple=True)
    plain, at_plain = carry_out(plan, **slow)
    assert log_contents(quick.log) == log_contents(plain.log)
    assert state_changes(quick.log) == state_changes(plain.log)
    for one, other in zip(at_quick, at_plain, strict=True):
        assert one.transcript == other.transcript
        assert one.client.open == other.client.open
    assert quick.broker.counters.publishes_received == plain.broker.counters.publishes_received
    assert quick.broker.counters.publishes_sent == plain.broker.counters.publishes_sent
    assert quick.broker.counters.messages_received == plain.broker.counters.messages_received
    assert quick.broker.counters.dropped == plain.broker.counters.dropped


@pytest.mark.req("S0.7", "S3.5", "S3.6")
@examples(250)
@given(plans())
def test_packets_taken_in_one_sweep_end_as_packets_decoded_one_by_one(plan):
    same(plan, fast=False, simple=True)


@pytest.mark.req("S1.17", "S3.4", "S3.5", "S3.6")
@examples(250)
@given(plans())
def test_runs_handed_over_whole_arrive_as_messages_handed_over_singly(plan):
    same(plan, fast=True, simple=False)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, int, bytes]:
    """Publishes of one topic and nearly one length, as one piece: what the block comparison must not be fooled by."""
    version = draw(st.sampled_from([4, 5]))
    qos = draw(st.sampled_from([0, 1]))
    length = draw(st.sampled_from([0, 1, 8, 64, 120, 200]))
    data = bytearray()
    for number in range(draw(st.integers(6, 40))):
        odd = draw(st.integers(0, 30))
        topic = b"a/c" if odd == 0 else b"a/b"
        size = length + (1 if odd == 1 else 0)
        properties = Properties(user=((b"k", b"v"),)) if odd == 2 and version == 5 else NO_PROPERTIES
        # Payloads that look like packets themselves.
        payload = (encode(Publish(b"a/b", b"zz", 0), version) * size)[:size] if odd == 3 else b"p" * size
        packet = Publish(topic, payload, qos, packet_id=number + 1 if qos else 0, properties=properties)
        data += encode(packet, version)
    return version, qos, bytes(data)


@examples(300)
@given(blocks())
def test_blocks_of_equal_publishes_end_as_packets_decoded_one_by_one(block):
    version, qos, data = block
    seen = []
    for fast in (True, False):
        simulated = SimulatedBroker(fast=fast)
        sub, pub = simulated.client("s", version), simulated.client("p", version)
        sub.send(Subscribe(1, (FilterRequest(b"#", qos),)))
        simulated.rest()
        pub.send_bytes(data)
        simulated.rest()
        seen.append((log_contents(simulated.log), sub.received(), pub.received()))
    assert seen[0] == seen[1]


@pytest.mark.attack("A18")
@pytest.mark.parametrize("version", [4, 5])
def test_byte_by_byte_is_the_same_as_in_one_piece(version):
    packets = [
        Publish(b"a", b"x" * length, qos, packet_id=pid if qos else 0)
        for pid, (length, qos) in enumerate([(0, 0), (120, 1), (125, 0), (130, 1), (3, 2), (0, 1)], 1)
    ]
    seen = []
    for size in (1, 1 << 20):
        simulated = SimulatedBroker()
        sub, pub = simulated.client("s", version), simulated.client("p", version)
        sub.send(Subscribe(1, (FilterRequest(b"#", 2),)))
        simulated.rest()
        data = b"".join(encode(packet, version) for packet in packets)
        for at in range(0, len(data), size):
            pub.send_bytes(data[at : at + size])
        simulated.rest()
        seen.append((log_contents(simulated.log), sub.received(), pub.received()))
    assert seen[0] == seen[1]
