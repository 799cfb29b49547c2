"""What came of a scenario, and whether its bars were met. Nothing here measures or prints."""

from __future__ import annotations

from dataclasses import dataclass

from measure import Measurement, median_of
from scenarios import RATE_KEPT_MIN, Bar, Scenario

BASELINE = "baseline"
"""How the other checkout is called: alone as a broker, and behind the label of the row that it repeats."""


@dataclass(frozen=True, slots=True)
class Verdict:
    bar: Bar
    ratio: float | None
    """Or the figure itself, where the bar names no peer. None: a figure is missing."""
    met: bool
    proven: bool
    """Whether nothing disturbed what it rests on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one scenario gave: a row per contender, and the bars judged."""

    scenario: Scenario
    runs: dict[str, list[Measurement]]
    failures: dict[str, str]
    unable: dict[str, str]
    """Brokers that cannot do it, and why."""
    verdicts: list[Verdict]

    def medians(self) -> dict[str, Measurement]:
        return {label: median_of(runs) for label, runs in self.runs.items() if runs}

    def published(self) -> dict[str, Measurement]:
        """Without the other checkout, which is for the terminal."""
        return {label: row for label, row in self.medians().items() if not label.endswith(f" {BASELINE}")}


def kept_up(scenario: Scenario, row: Measurement) -> bool:
    return scenario.is_throughput or row.delivered_per_s >= RATE_KEPT_MIN * scenario.load.rate_per_s


def faultless(scenario: Scenario, row: Measurement) -> bool:
    """QoS 1 loses nothing; QoS 2 neither loses nor doubles, and finishes what it began."""
    exact = scenario.load.qos == 2
    return not (row.lost and scenario.load.qos) and not (exact and (row.duplicated or row.unfinished))


def judge(scenario: Scenario, rows: dict[str, Measurement]) -> list[Verdict]:
    verdicts = []
    for bar in scenario.bars:
        own = rows.get(bar.own)
        value = getattr(own, bar.metric) if own else None
        # Fast by dropping messages, or by falling behind the rate, is not fast.
        sound = own is not None and faultless(scenario, own) and kept_up(scenario, own)
        proven = own is not None and not own.disturbed
        if bar.against is not None:
            other = rows.get(bar.against)
            theirs = getattr(other, bar.metric) if other else None
            value = value / theirs if value is not None and theirs else None
            # A peer that another process slowed down would flatter us: such a comparison proves nothing.
            proven = proven and other is not None and not other.disturbed
            sound = sound and other is not None and not other.disturbed
        verdicts.append(Verdict(bar, value, value is not None and sound and bar.met(value), proven))
    return verdicts
