"""Measure Tidegate beside its peers: python bench/run.py --help

Every scenario measures each broker in the same run, interleaved (A B C, A B C, ...), so that a machine that
slows down slows all of them; the median of the repeats is reported. Each measurement gets a fresh broker.

    python bench/run.py --list                                        the rows there are
    python bench/run.py --quick                                       a fast look at all of them
    python bench/run.py --quick --only mixed-1-1-q0                   one row alone
    python bench/run.py --quick --only 10-pairs-q2,drain-q1-q2 --brokers tidegate,mosquitto
    python bench/run.py --only 1-1-q0,10-pairs-q1 --brokers tidegate --baseline ../before
                                                                      and the same with another checkout's source

What is measured as "tidegate" is the source of this checkout, whatever is installed. To profile a broker, start it
yourself and give the load generator its port; the flags of a row are those that --list prints:

    bench/out/mqttload --port 1883 --qos 1 --pubs 10 --subs 10 --topics 1000 --payload-max 264 --seconds 5
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from brokers import KNOWN, BrokerError, Peer, filesystem_of, peer_of_argument, tidegate_of
from measure import HERE, Measurement, MeasurementError, build_generators, measure, median_of, wait_for_quiet
from outcomes import BASELINE, Outcome, faultless, judge
from scenarios import PAYLOAD_BYTES, SCENARIOS, Contender, Scenario
from summary import bars_table, baseline_table, faults, figures_table, percent, us

# A table cut to the width of a pipe would be useless in a log.
console = Console(width=None if sys.stdout.isatty() else 130)
progress = Console(stderr=True, width=None if sys.stderr.isatty() else 160)


class Session:
    """One call of this program: its brokers, its settings and how far it is."""

    def __init__(self, peers: dict[str, Peer], left_out: dict[str, str], options: argparse.Namespace) -> None:
        self.peers = peers
        self.options = options
        self.done = 0
        self.total = 0
        self.discarded = 0
        self.left_out = left_out

    def plan(self, scenario: Scenario) -> tuple[list[Contender], dict[str, str]]:
        wanted, unable = [], {}
        asked = scenario.contenders([name for name in self.peers if name != BASELINE])
        for contender in self.beside_baseline(asked):
            reason = self.peers[contender.broker].lacking(contender)
            if reason is None:
                wanted.append(contender)
            else:
                unable[contender.label] = reason
                progress.print(f"{scenario.name}: {contender.label} cannot do it: {reason}", highlight=False)
        return wanted, unable

    def beside_baseline(self, contenders: list[Contender]) -> Iterator[Contender]:
        """Each of Tidegate's rows is followed by the other checkout's, so that they alternate."""
        for contender in contenders:
            yield contender
            if contender.broker == "tidegate" and BASELINE in self.peers:
                yield replace(contender, label=f"{contender.label} {BASELINE}", broker=BASELINE)

    def run(self, scenarios: list[Scenario]) -> list[Outcome]:
        plans = [(scenario, *self.plan(scenario)) for scenario in scenarios]
        self.total = sum(len(plan) for _, plan, _ in plans) * self.options.repeat
        return [self.run_scenario(scenario, plan, unable) for scenario, plan, unable in plans if plan]

    def run_scenario(self, scenario: Scenario, plan: list[Contender], unable: dict[str, str]) -> Outcome:
        runs: dict[str, list[Measurement]] = {contender.label: [] for contender in plan}
        failures: dict[str, str] = {}
        for _ in range(self.options.repeat):
            for contender in plan:
                self.done += 1
                head = f"[{self.done}/{self.total}] {scenario.name} {contender.label}:"
                try:
                    row = self.measure_undisturbed(contender)
                except (BrokerError, MeasurementError) as error:
                    failures[contender.label] = str(error)
                    progress.print(f"{head} [red]failed[/]: {escape(str(error))}", highlight=False)
                    continue
                runs[contender.label].append(row)
                progress.print(
                    f"{head} {row.delivered_per_s:,.0f}/s, p50 {us(row.p50_us)}, p99 {us(row.p99_us)} µs;"
                    f" CPU: broker {percent(row.broker_cpu_share)}, generator"
                    f" {percent(row.generator_cpu_share)}, others {percent(row.other_cpu_share)}"
                    f"{' [yellow]disturbed[/]' if row.disturbed else ''}{faults(row)}",
                    highlight=False,
                )
        rows = {label: median_of(found) for label, found in runs.items() if found}
        return Outcome(scenario, runs, failures, unable, judge(scenario, rows))

    def measure_undisturbed(self, contender: Contender) -> Measurement:
        """The first measurement no other process disturbed, else the least disturbed one.

        What the broker achieved plays no part in the choice, and every broker gets the same tries.
        """
        tries: list[Measurement] = []
        for _ in range(1 + self.options.retries):
            wait_for_quiet(self.options.patience)
            row = measure(
                self.peers[contender.broker], contender,
                self.options.data_root, self.options.seconds, self.options.warmup,
            )  # fmt: skip
            tries.append(row)
            if not row.disturbed:
                break
        self.discarded += len(tries) - 1
        return min(tries, key=lambda one: one.other_cpu_share or 0.0)


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
        "python_profile_guided": profile_guided(),
    }


def profile_guided() -> bool:
    """Whether this interpreter was built with profile-guided optimisation, which is worth 10 to 28 %."""
    asked = sysconfig.get_config_var("CONFIG_ARGS") or ""
    flags = sysconfig.get_config_var("PY_CORE_CFLAGS") or ""
    if "--enable-optimizations" in asked or "-fprofile-use" in flags:
        return True
    # Debian and its kin drive the profiling themselves, and leave the flag for its use out of what they install.
    return sys.base_prefix == "/usr" and not sysconfig.get_config_var("PGO_PROF_USE_FLAG")


def report_of(outcomes: list[Outcome], session: Session) -> dict[str, object]:
    options = session.options
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: peer.version for name, peer in session.peers.items() if name != BASELINE},
        "left_out": session.left_out,
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
                "results": {label: asdict(row) for label, row in outcome.published().items()},
                "runs": {label: [asdict(row) for row in rows] for label, rows in outcome.runs.items()},
                # What a broker logged below the first line is for the terminal: it may name this machine's folders.
                "failures": {label: reason.partition("\n")[0] for label, reason in outcome.failures.items()},
                "unable": outcome.unable,
                "bars": [
                    asdict(verdict.bar)
                    | {"text": verdict.bar.text(), "ratio": verdict.ratio, "met": verdict.met}
                    for verdict in outcome.verdicts
                ],
            }
            for outcome in outcomes
        ],
    }  # fmt: skip


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Tidegate beside other MQTT brokers.")
    parser.add_argument("--list", action="store_true", help="print the rows with their load, and stop")
    parser.add_argument("--quick", action="store_true", help="2 s per measurement, once, without waiting for quiet")
    parser.add_argument("--only", type=names, metavar="NAME[,NAME]", help="these rows; see --list")
    parser.add_argument("--brokers", type=names, metavar="NAME[,NAME]", help=f"of {', '.join(KNOWN)} and of --broker")
    parser.add_argument(
        "--broker", action="append", default=[], metavar="NAME=…",
        help="another broker: name=host:port[,pid=PID] or name='command with {port} and {data}'",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", type=Path, metavar="PATH", help="another checkout: measure its source too, and print new : old"
    )
    parser.add_argument("--repeat", type=int, help="measurements per broker and scenario (3)")
    parser.add_argument("--seconds", type=float, help="length of a measurement (5)")
    parser.add_argument("--json", type=Path, help="(bench/out/results.json; a look at a part or in haste: look.json)")
    parser.add_argument("--picture", type=Path, help="write an SVG (or PNG) here")
    parser.add_argument("--data-root", type=Path, default=HERE / "out" / "data", help="on a disk")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is not met")
    parser.add_argument("--patience", type=float, help="seconds to wait for quiet (20; --quick: 0)")
    parser.add_argument("--retries", type=int, help="repeats of a disturbed measurement (2; --quick: 0)")
    options = parser.parse_args()
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.seconds = options.seconds or (2.0 if options.quick else 5.0)
    options.warmup = 0.5 if options.quick else 1.0
    if options.json is None:
        # bench/report.py publishes results.json: only a whole run may leave one there.
        partial = options.quick or options.only or options.brokers
        options.json = HERE / "out" / ("look.json" if partial else "results.json")
    if options.patience is None:
        options.patience = 0.0 if options.quick else 20.0
    if options.retries is None:
        options.retries = 0 if options.quick else 2
    unknown = set(options.only or ()) - {scenario.name for scenario in SCENARIOS}
    if unknown:
        known = " ".join(scenario.name for scenario in SCENARIOS)
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {known}")
    return options


def find_peers(options: argparse.Namespace) -> tuple[dict[str, Peer], dict[str, str]]:
    """The brokers to measure, and why others cannot be."""
    extra = {peer.name: peer for peer in map(peer_of_argument, options.broker)}
    peers: dict[str, Peer] = {}
    left_out: dict[str, str] = {}
    for name in options.brokers or [*KNOWN, *extra]:
        if name in extra:
            peers[name] = extra[name]
        elif name in KNOWN:
            try:
                peers[name] = KNOWN[name]()
            except BrokerError as error:
                left_out[name] = str(error)
                progress.print(f"[bold red]left out:[/] {escape(str(error))}", highlight=False)
        else:
            raise BrokerError(f"--brokers {name}: no such broker; there are {', '.join([*KNOWN, *extra])}")
    if not peers:
        raise BrokerError("no broker to measure")
    if options.baseline:
        peers[BASELINE] = tidegate_of(BASELINE, options.baseline)
    return peers, left_out


def main() -> int:
    options = parse_arguments()
    if options.list:
        for scenario in SCENARIOS:
            load = scenario.load
            print(f"{scenario.name:20} {scenario.title}\n{'':20} {load.program} --version {scenario.mqtt_version}",
                  *load.arguments(options.seconds, options.warmup))  # fmt: skip
        return 0
    # An exception unwinds the `with` that stops the broker and deletes its data; a bare SIGTERM would not.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        build_generators()
        peers, left_out = find_peers(options)
    except (BrokerError, MeasurementError) as error:
        progress.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return 2
    options.data_root.mkdir(parents=True, exist_ok=True)
    if filesystem_of(options.data_root) in ("tmpfs", "ramfs"):
        progress.print("[yellow]the data root is in memory: durable figures mean nothing; use --data-root[/]")
    chosen = [scenario for scenario in SCENARIOS if not options.only or scenario.name in options.only]
    session = Session(peers, left_out, options)
    outcomes = session.run(chosen)

    console.print(figures_table(outcomes))
    console.print(bars_table(outcomes))
    if options.baseline:
        console.print(baseline_table(outcomes))
    disturbed = sum(row.disturbed for outcome in outcomes for rows in outcome.runs.values() for row in rows)
    if disturbed:
        console.print(f"[yellow]{disturbed} measurements were disturbed by other processes: run it again[/]")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = report_of(outcomes, session)
    options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if options.picture:
        from picture import draw  # matplotlib takes a second to load: only for those who want the picture

        draw(report, options.picture)
    wrong = [
        (outcome.scenario, label, row)
        for outcome in outcomes
        for label, row in outcome.medians().items()
        if not faultless(outcome.scenario, row)
    ]
    for scenario, label, row in wrong:
        console.print(f"[bold red]{scenario.name}: {label} broke its promise{faults(row)}[/]", highlight=False)
    # What a peer cannot do is published; what we cannot is a failure.
    ours = [label for outcome in outcomes for label in outcome.failures] + [label for _, label, _ in wrong]
    if not outcomes or any(label.startswith("tidegate") for label in ours):
        return 2
    if options.check and not all(
        verdict.met for outcome in outcomes for verdict in outcome.verdicts if verdict.ratio is not None
    ):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
