"""Measure Tidegate beside its peers: python bench/run.py --help

Every scenario measures each broker in the same run, interleaved (A B C, A B C, ...), so that a machine that
slows down slows all of them; the median of the repeats is reported. Each measurement gets a fresh broker.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brokers import KNOWN, BrokerError, Peer, filesystem_of, peer_of_argument
from measure import HERE, Measurement, MeasurementError, build_generator, measure, median_of, wait_for_quiet
from scenarios import PAYLOAD_BYTES, RATE_KEPT_MIN, SCENARIOS, Bar, Contender, Scenario

# A table cut to the width of a pipe would be useless in a log.
console = Console(width=None if sys.stdout.isatty() else 130)
progress = Console(stderr=True, width=None if sys.stderr.isatty() else 160)


@dataclass(frozen=True, slots=True)
class Verdict:
    bar: Bar
    ratio: float | None
    """None: one of the two figures is missing."""
    met: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one scenario gave: a row per contender, and the bars judged."""

    scenario: Scenario
    runs: dict[str, list[Measurement]]
    failures: dict[str, str]
    verdicts: list[Verdict]

    def medians(self) -> dict[str, Measurement]:
        return {label: median_of(runs) for label, runs in self.runs.items() if runs}


def kept_up(scenario: Scenario, row: Measurement) -> bool:
    return scenario.is_throughput or row.delivered_per_s >= RATE_KEPT_MIN * scenario.load.rate_per_s


def judge(scenario: Scenario, rows: dict[str, Measurement]) -> list[Verdict]:
    verdicts = []
    for bar in scenario.bars:
        own, other = rows.get("tidegate"), rows.get(bar.against)
        mine = getattr(own, bar.metric) if own else None
        theirs = getattr(other, bar.metric) if other else None
        ratio = mine / theirs if mine is not None and theirs else None
        # Fast by dropping messages, or by falling behind the rate, is not fast.
        sound = own is not None and not (own.lost and scenario.load.qos) and kept_up(scenario, own)
        # A peer that another process slowed down would flatter us: such a comparison proves nothing.
        sound = sound and other is not None and not other.disturbed
        verdicts.append(Verdict(bar, ratio, ratio is not None and sound and bar.met(ratio)))
    return verdicts


class Session:
    """One call of this program: its brokers, its settings and how far it is."""

    def __init__(self, peers: dict[str, Peer], options: argparse.Namespace) -> None:
        self.peers = peers
        self.options = options
        self.done = 0
        self.total = 0
        self.discarded = 0

    def plan(self, scenario: Scenario) -> list[Contender]:
        wanted = []
        for contender in scenario.contenders(list(self.peers)):
            peer = self.peers[contender.broker]
            if scenario.load.qos <= peer.qos_max and contender.mqtt_version in peer.mqtt_versions:
                wanted.append(contender)
            else:
                progress.print(f"{scenario.name}: {peer.name} does not support it, left out")
        return wanted

    def run(self, scenarios: list[Scenario]) -> list[Outcome]:
        plans = [(scenario, self.plan(scenario)) for scenario in scenarios]
        self.total = sum(len(plan) for _, plan in plans) * self.options.repeat
        return [self.run_scenario(scenario, plan) for scenario, plan in plans if plan]

    def run_scenario(self, scenario: Scenario, plan: list[Contender]) -> Outcome:
        runs: dict[str, list[Measurement]] = {contender.label: [] for contender in plan}
        failures: dict[str, str] = {}
        for _ in range(self.options.repeat):
            for contender in plan:
                self.done += 1
                head = f"[{self.done}/{self.total}] {scenario.name} {contender.label}:"
                try:
                    row = self.measure_undisturbed(contender, scenario)
                except (BrokerError, MeasurementError) as error:
                    failures[contender.label] = str(error)
                    progress.print(f"{head} [red]failed[/]: {escape(str(error))}", highlight=False)
                    continue
                runs[contender.label].append(row)
                progress.print(
                    f"{head} {row.delivered_per_s:,.0f}/s, p50 {row.p50_us:,.0f}, p99 {row.p99_us:,.0f} µs;"
                    f" CPU: broker {percent(row.broker_cpu_share)}, generator"
                    f" {percent(row.generator_cpu_share)}, others {percent(row.other_cpu_share)}"
                    f"{' [yellow]disturbed[/]' if row.disturbed else ''}{faults(row)}",
                    highlight=False,
                )
        rows = {label: median_of(found) for label, found in runs.items() if found}
        return Outcome(scenario, runs, failures, judge(scenario, rows))


    def measure_undisturbed(self, contender: Contender, scenario: Scenario) -> Measurement:
        """The first measurement no other process disturbed, else the least disturbed one.

        What the broker achieved plays no part in the choice, and every broker gets the same tries.
        """
        tries: list[Measurement] = []
        for _ in range(1 + self.options.retries):
            wait_for_quiet(self.options.patience)
            row = measure(
                self.peers[contender.broker], contender, scenario,
                self.options.data_root, self.options.seconds, self.options.warmup,
            )  # fmt: skip
            tries.append(row)
            if not row.disturbed:
                break
        self.discarded += len(tries) - 1
        return min(tries, key=lambda one: one.other_cpu_share or 0.0)


def faults(row: Measurement) -> str:
    names = ("lost", "duplicated", "out_of_order")
    return "".join(f", {getattr(row, name):,} {name}" for name in names if getattr(row, name))


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def us(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table(title="Messages delivered, medians (p50, p99 in µs)")
    for name in ("scenario", "broker"):
        table.add_column(name)
    for name in ("delivered/s", "p50", "p99", "CPU µs/delivery", "ratio", "bar", "met?"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        reference = "tidegate 3.1.1" if outcome.scenario.own_versions else "mosquitto"
        rows = outcome.medians()
        for label, row in rows.items():
            ratio = ""
            if reference in rows and label != reference:
                ratio = f"{row.delivered_per_s / rows[reference].delivered_per_s:.2f}×"
            bars = met = ""
            if label == "tidegate" and outcome.verdicts:
                bars = "\n".join(verdict.bar.text() for verdict in outcome.verdicts)
                met = "\n".join(verdict_text(verdict) for verdict in outcome.verdicts)
            noisy = " [yellow]disturbed[/]" if row.disturbed else ""
            behind = "" if kept_up(outcome.scenario, row) else " [red]behind[/]"
            table.add_row(
                outcome.scenario.name, label, f"{row.delivered_per_s:,.0f}{behind}{noisy}{faults(row)}",
                us(row.p50_us), us(row.p99_us), us(row.cpu_us_per_delivery, 2), ratio, bars, met,
            )  # fmt: skip
        for label, reason in outcome.failures.items():
            table.add_row(outcome.scenario.name, label, "[red]failed[/]", escape(reason.splitlines()[0][:60]))
        table.add_section()
    return table


def verdict_text(verdict: Verdict) -> str:
    if verdict.ratio is None:
        return "–"
    colour, word = ("green", "yes") if verdict.met else ("red", "no")
    return f"[{colour}]{word} ({verdict.ratio:.2f}×)[/]"


def machine() -> dict[str, object]:
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.machine(),
    )  # fmt: skip
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def report_of(outcomes: list[Outcome], session: Session) -> dict[str, object]:
    options = session.options
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: peer.version for name, peer in session.peers.items()},
        "settings": {
            "seconds": options.seconds, "warmup_s": options.warmup, "repeat": options.repeat,
            "payload_bytes": PAYLOAD_BYTES, "data_filesystem": filesystem_of(options.data_root),
            "discarded_as_disturbed": session.discarded,
        },
        "scenarios": [
            {
                "name": outcome.scenario.name,
                "title": outcome.scenario.title,
                "load": asdict(outcome.scenario.load),
                "durability": outcome.scenario.durability,
                "results": {label: asdict(row) for label, row in outcome.medians().items()},
                "runs": {label: [asdict(row) for row in rows] for label, rows in outcome.runs.items()},
                "failures": outcome.failures,
                "bars": [
                    asdict(verdict.bar)
                    | {"text": verdict.bar.text(), "ratio": verdict.ratio, "met": verdict.met}
                    for verdict in outcome.verdicts
                ],
            }
            for outcome in outcomes
        ],
    }  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Tidegate beside other MQTT brokers.")
    parser.add_argument("--quick", action="store_true", help="2 s per measurement, once")
    parser.add_argument("--scenario", nargs="+", metavar="NAME", help=" ".join(s.name for s in SCENARIOS))
    parser.add_argument("--only", nargs="+", metavar="BROKER", help=f"of {' '.join(KNOWN)} and of --broker")
    parser.add_argument(
        "--broker", action="append", default=[], metavar="NAME=…",
        help="another broker: name=host:port[,pid=PID] or name='command with {port} and {data}'",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, help="measurements per broker and scenario (3)")
    parser.add_argument("--seconds", type=float, help="length of a measurement (5)")
    parser.add_argument("--json", type=Path, default=HERE / "out" / "results.json")
    parser.add_argument("--picture", type=Path, help="write an SVG (or PNG) here")
    parser.add_argument("--data-root", type=Path, default=HERE / "out" / "data", help="on a disk")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is not met")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for quiet (20)")
    parser.add_argument("--retries", type=int, default=2, help="repeats of a disturbed measurement (2)")
    options = parser.parse_args()
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.seconds = options.seconds or (2.0 if options.quick else 5.0)
    options.warmup = 0.5 if options.quick else 1.0
    unknown = set(options.scenario or ()) - {scenario.name for scenario in SCENARIOS}
    if unknown:
        known = " ".join(scenario.name for scenario in SCENARIOS)
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {known}")
    return options


def find_peers(options: argparse.Namespace) -> dict[str, Peer]:
    extra = {peer.name: peer for peer in map(peer_of_argument, options.broker)}
    peers: dict[str, Peer] = {}
    for name in options.only or [*KNOWN, *extra]:
        if name in extra:
            peers[name] = extra[name]
        elif name in KNOWN:
            try:
                peers[name] = KNOWN[name]()
            except BrokerError as error:
                progress.print(f"[yellow]left out:[/] {escape(str(error))}", highlight=False)
        else:
            raise BrokerError(f"--only {name}: no such broker; there are {', '.join([*KNOWN, *extra])}")
    if not peers:
        raise BrokerError("no broker to measure")
    return peers


def main() -> int:
    options = parse_arguments()
    # An exception unwinds the `with` that stops the broker and deletes its data; a bare SIGTERM would not.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        build_generator()
        peers = find_peers(options)
    except (BrokerError, MeasurementError) as error:
        progress.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return 2
    options.data_root.mkdir(parents=True, exist_ok=True)
    if filesystem_of(options.data_root) in ("tmpfs", "ramfs"):
        progress.print("[yellow]the data root is in memory: durable figures mean nothing; use --data-root[/]")
    chosen = [scenario for scenario in SCENARIOS if not options.scenario or scenario.name in options.scenario]
    session = Session(peers, options)
    outcomes = session.run(chosen)

    console.print(table_of(outcomes))
    disturbed = sum(row.disturbed for outcome in outcomes for rows in outcome.runs.values() for row in rows)
    if disturbed:
        console.print(f"[yellow]{disturbed} measurements were disturbed by other processes: run it again[/]")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = report_of(outcomes, session)
    options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if options.picture:
        from picture import draw  # matplotlib takes a second to load: only for those who want the picture

        draw(report, options.picture)
    if not outcomes or any(outcome.failures for outcome in outcomes):
        return 2
    if options.check and not all(verdict.met for outcome in outcomes for verdict in outcome.verdicts):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
