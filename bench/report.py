"""docs/performance.md from the JSON that the benches wrote: no figure in it is typed by hand.

    python bench/report.py [--results bench/out]

`make bench` runs the benches and then this. The JSON is kept beside the page in docs/bench, so that it can be checked.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"

HEAD = """# Performance

Written by `make bench` (bench/report.py) from [bench/](bench/); do not edit.

The load generator (`bench/mqttload.c`) is a closed loop on raw sockets: publishers keep a window of messages that are
not acknowledged (QoS 0: not delivered) and refill it in batches, so nothing is measured in socket buffers, and loss,
duplicates and order are checked. It shares the machine's cores with the broker. Every broker is measured in the same
run, alternately; the figures are medians. A measurement during which other processes used the CPU is repeated, and
marked if that did not help. mosquitto runs without persistence and without queue limits, nats-server with JetStream on
disk; Tidegate appends every message to its log on disk, QoS 0 too.

![Throughput](images/bench.svg)
"""


def throughput(report: dict[str, Any]) -> list[str]:
    machine, settings = report["machine"], report["settings"]
    versions = ", ".join(report["versions"].values())
    lines = [
        "## Beside other brokers",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, Python "
        f"{machine['python']}; {versions}; {settings['payload_bytes']}-byte payloads, {settings['repeat']} × "
        f"{settings['seconds']:g} s, data on {settings['data_filesystem']}; {report['date'][:10]}.",
        "",
        "| load | broker | delivered/s | p50 µs | p99 µs | CPU µs per delivery | bar: ratio |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for scenario in report["scenarios"]:
        bars = [
            f"{bar['text']} {bar['against']}: **{bar['ratio']:.2f}×** {'✓' if bar['met'] else '✗'}"
            for bar in scenario["bars"]
            if bar["ratio"] is not None
        ]
        for label, row in scenario["results"].items():
            cells = [
                scenario["name"],
                label,
                f"{row['delivered_per_s']:,.0f}" + (" (disturbed)" if row.get("disturbed") else ""),
                *(_number(row[name]) for name in ("p50_us", "p99_us", "cpu_us_per_delivery")),
                "; ".join(bars) if label == "tidegate" else "",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def sessions(found: dict[str, Any]) -> list[str]:
    added_mb = found["bytes_per_session_by_messages"] * 100_000 / 1e6
    return [
        "",
        "## Sessions",
        "",
        "`python bench/sessions.py`: 100,000 persistent sessions with two filters each that sleep; sessions that come",
        "back to a million missed messages; one that missed 10 of 10,000,000.",
        "",
        "| | measured | bar |",
        "|---|--:|--:|",
        f"| memory per sleeping session | {found['bytes_per_session']:,.0f} B | ≤ 2,048 B |",
        f"| added by 1,000,000 messages, all sessions together | {added_mb:,.1f} MB (index of the active segment) "
        "| nothing per session |",
        f"| drain, one session | {found['drain_per_s_alone']:,.0f} msg/s | ≥ 150,000 |",
        f"| drain, three in turn | {found['drain_per_s_in_turn']:,.0f} msg/s | ≥ 150,000 |",
        f"| 10 of 10,000,000 messages | {found['needle_s'] * 1000:,.1f} ms | ≤ 1,000 ms |",
    ]


def index(found: dict[str, Any]) -> list[str]:
    ours = found["tidegate"]
    lines = [
        "",
        "## Subscription index",
        "",
        f"`python bench/index.py`: {found['filters']:,} filters, half of them with wildcards.",
        "",
        "| | measured | bar |",
        "|---|--:|--:|",
        f"| memory per filter | {ours['filter']['bytes']:,.0f} B | ≤ 1,024 B |",
    ]
    for name, row in ours.items():
        if name != "filter":
            matches = int(name.split()[0])
            lines.append(f"| {name}: p50 / p99 | {row['p50_us']:.1f} / {row['p99_us']:.1f} µs | < {30 + matches} µs |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "out")
    results = parser.parse_args().results
    (DOCS / "bench").mkdir(exist_ok=True)
    page = [HEAD]
    for name, section in (("results", throughput), ("sessions", sessions), ("index", index)):
        source = results / f"{name}.json"
        kept = DOCS / "bench" / f"{name}.json"
        if source.exists():
            shutil.copy(source, kept)
        if kept.exists():
            page += section(json.loads(kept.read_text()))
    notes = DOCS / "bench" / "notes.md"
    if notes.exists():
        page += ["", notes.read_text().rstrip()]
    (DOCS / "performance.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
