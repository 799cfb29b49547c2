"""Whatever clients send, and however it is cut, the broker does what a naive broker does.

`reference` is that broker, `packets` makes the scripts, `play` plays them, `driver` is the broker under test,
`agreement` says what must be equal and what is open, `forgiveness` what is known to be wrong today.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from agreement import REPLAYED, Client
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from packets import Acknowledge, Around, Come, Cuts, Script, Send, Step, cuts, on_partitions, scripts
from play import Play

from tidegate.wire import Connack, Disconnect, Publish

pytestmark = pytest.mark.timeout(7200)  # for the long search, and for the shortest way to a failure


@examples(400)
@given(scripts())
def test_the_broker_does_what_the_reference_does(script):
    Play(script).run()


@examples(120)
@given(on_partitions(scripts(), prompt=True))
def test_the_broker_on_three_partitions_does_what_the_reference_does(script):
    Play(script).run()


@examples(250)
@given(on_partitions(scripts(), prompt=False))
def test_the_broker_on_three_partitions_that_announce_late_does_what_the_reference_does(script):
    Play(script).run()


@examples(80)
@given(scripts(steps_max=8, limits=False), st.lists(cuts, min_size=1, max_size=5))
def test_the_same_bytes_cut_elsewhere_end_the_same(script, others):
    """Both brokers rest after each step, and no client has a window, a packet limit or aliases, which would make what
    comes depend on what came first: nothing but the cuts can make a difference."""
    told = [outcome(Play(cut_anew(script, choice)).run()) for choice in ([Cuts()], others)]
    assert told[0] == told[1]


def cut_anew(script: Script, choice: list[Cuts]) -> Script:
    steps: list[Step] = []
    for number, step in enumerate(script.steps):
        if isinstance(step, Send) and not _plain(step):
            continue
        if isinstance(step, Come | Send | Acknowledge):
            step = replace(step, cuts=replace(choice[number % len(choice)], keep_last=False))
        if isinstance(step, Acknowledge):
            step = replace(step, places=())
        steps += (step, Around("settle"))
    return replace(script, steps=tuple(steps))


def _plain(step: Send) -> bool:
    """What is retained when a step subscribes and then goes on may be sent before or not."""
    kinds = step.about.split(", ")
    return "unsubscribe" not in kinds and "subscribe" not in kinds[:-1]


def outcome(connections: list[Client]) -> list[Any]:
    """What each connection came to. One that ended may have got more or less of what was due before."""
    found: list[Any] = []
    for client in connections:
        ended = [packet for packet in client.transcript if isinstance(packet, Connack | Disconnect)]
        if client.link.closed:
            found.append(("closed", [packet.reason for packet in ended]))
            continue
        answers: dict[str, list[Any]] = {}
        messages: Counter[Publish] = Counter()
        for packet in client.transcript:
            if isinstance(packet, Publish):
                user = tuple(pair for pair in packet.properties.user if pair[0] not in REPLAYED)
                about = replace(packet.properties, user=user)
                messages[replace(packet, packet_id=0, properties=about, passed_on=b"")] += 1
            else:
                kind = type(packet).__name__
                answers.setdefault(kind, []).append(replace(packet, packet_id=0) if kind == "Pubrel" else packet)
        found.append((messages, {kind: Counter(map(repr, of)) for kind, of in answers.items()}))
    return found
