"""Measure the Spark pipeline: python bench/pipeline.py --help

In one warm Spark session: the archive beside Spark's own copy of the same rows, the source, the join of the backlog.
Then with real processes: replay, freshness, a busy pipeline beside a busy broker, and the course of lag over time.
Each result is written as soon as it is there, with its bars judged; what the file has from before stays unless it is
measured again, so that a run that was cut off goes on with --resume.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brokers import filesystem_of
from measure import HERE, MeasurementError, build, build_generators
from pipeline_live import COUNTER, COUNTER_SOURCE, measure_beside, measure_freshness, measure_replay, measure_timeline
from pipeline_plan import FRAME_ROWS, MASTER, PAYLOAD_BYTES, PLANS, RUNS, TOPICS, Sizes
from pipeline_spark import Bench, Found, measure_archive, measure_backlog, measure_source
from run import machine
from tidegate.pipeline.java import find_java

DOCS = HERE.parent / "docs"
PACKAGES = ("tidegate", "pyspark", "deltalake", "pyarrow")

console = Console(width=None if sys.stdout.isatty() else 130)
progress = Console(stderr=True, width=None if sys.stderr.isatty() else 160)

IN_SPARK: dict[str, Callable[[Bench], Found]] = {
    "archive": measure_archive,
    "source": measure_source,
    "backlog": measure_backlog,
}
WITH_PROCESSES: dict[str, Callable[[Bench], Found]] = {
    "replay": measure_replay,
    "freshness": measure_freshness,
    "beside": measure_beside,
    "timeline": measure_timeline,
}


class Report:
    """The file of results."""

    def __init__(self, path: Path, data_root: Path) -> None:
        self.path = path
        about: dict[str, Any] = {
            "machine": machine(),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES} | {"java": find_java().version},
            "settings": {
                "master": MASTER, "payload_bytes": PAYLOAD_BYTES, "topics": TOPICS, "frame_rows": FRAME_ROWS,
                "runs": RUNS, "data_filesystem": filesystem_of(data_root),
            },
        }  # fmt: skip
        self.content = {"date": "", **about, "measurements": {}, "failures": {}}
        if path.exists():
            before = json.loads(path.read_text())
            if all(before.get(name) == about[name] for name in about):
                self.content = before
            else:
                progress.print(f"{path} is of another machine or version: it is begun anew")

    def has(self, name: str, sizes: Sizes) -> bool:
        return bool(self.content["measurements"].get(name, {}).get("sizes") == asdict(sizes))

    def add(self, name: str, sizes: Sizes, found: Found) -> None:
        plan = PLANS[name]
        unproven = found.pop("unproven", ())
        bars = [
            asdict(bar)
            | {"value": found["figures"][bar.figure]}
            | {"met": bar.met(found["figures"][bar.figure]) and bar.figure not in unproven}
            for bar in plan.bars
        ]
        about = {"title": plan.title, "date": now(), "sizes": asdict(sizes)}
        self.content["measurements"][name] = about | found | {"bars": bars}
        self.content["failures"].pop(name, None)
        self.write()

    def failed(self, name: str, reason: str) -> None:
        self.content["failures"][name] = reason
        self.content["measurements"].pop(name, None)
        self.write()

    def write(self) -> None:
        """Replaced as a whole, so that a kill leaves the old one or the new one."""
        self.content["date"] = now()
        order = {name: self.content["measurements"][name] for name in PLANS if name in self.content["measurements"]}
        self.content["measurements"] = order
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.content, indent=2, ensure_ascii=False) + "\n")
        draft.replace(self.path)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def measure_all(names: list[str], bench: Bench, report: Report) -> None:
    def each(chosen: dict[str, Callable[[Bench], Found]]) -> None:
        for name in chosen:
            if name not in names:
                continue
            bench.say(f"[{names.index(name) + 1}/{len(names)}] {name}: {PLANS[name].title}")
            try:
                report.add(name, bench.sizes, chosen[name](bench))
            except Exception as error:  # the others can be measured all the same
                text = str(error).strip() or repr(error)
                report.failed(name, f"{type(error).__name__}: {text.splitlines()[0]}")
                progress.print(f"[red]{name} failed[/]: {escape(text[:2000])}", highlight=False)

    each(IN_SPARK)
    if "replay" in names:
        try:
            bench.say(f"the lake has {bench.lake.rows('messages'):,} messages")
        except Exception as error:
            progress.print(f"[red]no lake to replay from[/]: {escape(str(error)[:500])}", highlight=False)
    bench.close()
    each(WITH_PROCESSES)


def table_of(content: dict[str, Any]) -> Table:
    table = Table(title="The pipeline")
    for name in ("measurement", "figure"):
        table.add_column(name)
    for name in ("value", "bar", "met?"):
        table.add_column(name, justify="right")
    for name, found in content["measurements"].items():
        bars = {bar["figure"]: bar for bar in found["bars"]}
        label = f"{name} [yellow]disturbed[/]" if found["disturbed"] else name
        for figure, value in found["figures"].items():
            limit = met = ""
            if figure in bars:
                bar = bars[figure]
                limit = f"{'≥' if bar['at_least'] else '≤'} {bar['limit']:,.10g}"
                met = "[green]yes[/]" if bar["met"] else "[red]no[/]"
            shown = "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
            table.add_row(label, figure, shown, limit, met)
            label = ""
        table.add_section()
    for name, reason in content["failures"].items():
        table.add_row(name, "[red]failed[/]", escape(reason[:60]))
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the Spark pipeline.")
    parser.add_argument("--messages", type=int, default=5_000_000, help="in the log (5000000)")
    parser.add_argument("--filters", type=int, default=100_000, help="of absent sessions (100000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic for freshness and timeline (60)")
    parser.add_argument("--only", metavar="NAME,NAME", help=" ".join(PLANS))
    parser.add_argument("--resume", action="store_true", help="leave out what the file already has at these sizes")
    parser.add_argument("--out", type=Path, default=DOCS / "bench" / "pipeline.json")
    parser.add_argument("--picture", type=Path, default=DOCS / "images" / "pipeline.svg")
    parser.add_argument("--data-root", type=Path, default=HERE / "out" / "data", help="on a disk")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet machine (20)")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is not met")
    options = parser.parse_args()
    options.names = options.only.split(",") if options.only else list(PLANS)
    if unknown := set(options.names) - set(PLANS):
        parser.error(f"no measurement {', '.join(sorted(unknown))}; there are {' '.join(PLANS)}")
    options.names = [name for name in PLANS if name in options.names]
    return options


def main() -> int:
    options = parse_arguments()
    # An exception unwinds the `with`s that stop what was started; a bare SIGTERM would not.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()

    def say(text: str) -> None:
        progress.print(f"{time.monotonic() - began:6.1f} s  {escape(text)}", highlight=False)

    try:
        build_generators()
        build(COUNTER_SOURCE, COUNTER)
    except MeasurementError as error:
        progress.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return 2
    options.data_root.mkdir(parents=True, exist_ok=True)
    if filesystem_of(options.data_root) in ("tmpfs", "ramfs"):
        progress.print("[yellow]the data root is in memory: figures of the disk mean nothing; use --data-root[/]")
    messages = options.messages
    sizes = Sizes(messages, min(messages, 1_000_000), options.filters, min(messages, 2_000_000), options.seconds)
    report = Report(options.out, options.data_root)
    names = [name for name in options.names if not (options.resume and report.has(name, sizes))]
    with tempfile.TemporaryDirectory(prefix="pipeline-", dir=options.data_root) as folder:
        bench = Bench(Path(folder).resolve(), sizes, options.patience, say)
        try:
            measure_all(names, bench, report)
        except KeyboardInterrupt:
            progress.print(f"interrupted; {options.out} has what was measured, and --resume goes on from there")
            return 130
        finally:
            bench.close()
    content = report.content
    console.print(table_of(content))
    if "timeline" in content["measurements"]:
        from pipeline_picture import draw  # matplotlib takes a second to load

        draw(content, options.picture)
    say("done")
    if any(name in content["failures"] for name in options.names):
        return 2
    bars = [bar for found in content["measurements"].values() for bar in found["bars"]]
    return 1 if options.check and not all(bar["met"] for bar in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
