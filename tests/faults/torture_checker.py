"""Judges a torture run by what the clients wrote down and what the log holds. Knows nothing of how it was done.

    I1   every acknowledged message is in the log, and each subscriber got it
    I3   messages of one publisher on one topic come in order, repetitions aside
    I4   QoS 2 exactly once, in the log and at each subscriber; QoS 1 at least once
    I10  a position means one message for ever
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torture_clients import PUBLISHERS, SUBSCRIBERS, owed

SHOWN_MAX = 5


@dataclass(slots=True)
class Verdict:
    faults: list[str] = field(default_factory=list)
    acknowledged: int = 0
    delivered: int = 0
    stored: int = 0

    def fault(self, what: str, cases: list[Any]) -> None:
        if cases:
            shown = ", ".join(map(str, cases[:SHOWN_MAX]))
            self.faults.append(f"{what}: {len(cases)} ({shown}{', …' if len(cases) > SHOWN_MAX else ''})")


def check(published: Path, received: Path, log: list[dict[str, Any]]) -> Verdict:
    """`log` are the stored messages in order: position, topic, payload."""
    verdict = Verdict()
    publishers = json.loads(published.read_text())
    readers = {each["name"]: each for each in json.loads(received.read_text())}
    for each in (*publishers, *readers.values()):
        verdict.fault(f"{each['name']} saw the protocol broken", each["violations"])
    acknowledged = [(topic, payload) for each in publishers for topic, payload in each["acknowledged"]]
    verdict.acknowledged = len(acknowledged)
    verdict.stored = len(log)
    exactly_once = {topic for plan in PUBLISHERS if plan.qos == 2 for topic in plan.topics}
    _check_log(verdict, acknowledged, exactly_once, log, readers["observer"]["places"])
    parties: dict[str, list[dict[str, Any]]] = {}
    for plan in SUBSCRIBERS:
        parties.setdefault(plan.group or plan.name, []).append(readers[plan.name])
    plans = {plan.group or plan.name: plan for plan in SUBSCRIBERS}
    for name, members in parties.items():
        got = [(topic, payload) for member in members for topic, payload, _, _ in member["received"]]
        verdict.delivered += len(got)
        times = Counter(payload for _, payload in got)
        verdict.fault(f"{name} never got", sorted(owed(plans[name], acknowledged) - times.keys()))
        if plans[name].qos == 2:
            twice = {payload for topic, payload in got if topic in exactly_once and times[payload] > 1}
            verdict.fault(f"{name} got more than once, QoS 2", sorted(twice))
        if len(members) == 1:
            verdict.fault(f"{name} got out of order", _disorder(got))
    return verdict


def _check_log(
    verdict: Verdict,
    acknowledged: list[tuple[str, str]],
    exactly_once: set[str],
    log: list[dict[str, Any]],
    places: dict[str, str],
) -> None:
    times = Counter(row["payload"] for row in log)
    verdict.fault("acknowledged, but not in the log", [p for _, p in acknowledged if not times[p]])
    twice = {row["payload"] for row in log if row["topic"] in exactly_once and times[row["payload"]] > 1}
    verdict.fault("stored more than once, QoS 2", sorted(twice))
    positions = [row["position"] for row in log]
    backwards = [b for a, b in itertools.pairwise(positions) if b <= a]
    verdict.fault("positions that do not increase", backwards)
    stored = {row["position"]: row["payload"] for row in log}
    verdict.fault(
        "positions that meant something else before",
        [int(place) for place, payload in places.items() if stored.get(int(place)) != payload],
    )
    verdict.fault("stored out of order", _disorder([(row["topic"], row["payload"]) for row in log]))


def _disorder(got: list[tuple[str, str]]) -> list[str]:
    """Messages that came, for the first time, after a later one of the same publisher and topic."""
    highest: dict[tuple[str, str], int] = {}
    seen: set[str] = set()
    late = []
    for topic, payload in got:
        if payload in seen:
            continue
        seen.add(payload)
        publisher, _, number = payload.split()
        key = publisher, topic
        if int(number) < highest.get(key, 0):
            late.append(payload)
        highest[key] = max(highest.get(key, 0), int(number))
    return late
