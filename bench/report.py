"""docs/performance.md from the JSON that the benches wrote: no figure in it is typed by hand.

    python bench/report.py [--results bench/out]

`make bench` and `make bench-pipeline` run the benches and then this. The JSON is kept beside the page in docs/bench, so
that it can be checked.
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

Written by `make bench` and `make bench-pipeline` (bench/report.py) from [bench/](bench/); do not edit.

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


def pipeline(report: dict[str, Any]) -> list[str]:
    machine, settings, versions = report["machine"], report["settings"], report["versions"]
    found = report["measurements"]
    lines = [
        "",
        "## Pipeline",
        "",
        f"`make bench-pipeline`: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['kernel']}, Python {machine['python']}, Java {versions['java']}, Spark {versions['pyspark']} at "
        f"`{settings['master']}`, deltalake {versions['deltalake']}, pyarrow {versions['pyarrow']}; "
        f"{settings['payload_bytes']}-byte payloads that do not compress, {settings['topics']:,} topics, data on "
        f"{settings['data_filesystem']}; warm session, the best of {settings['runs']} runs; {report['date'][:10]}.",
        "",
        "| | measured | bar |",
        "|---|--:|---|",
    ]
    for name, row in found.items():
        lines += [f"| {text} | {value} | {_bar(row, figure)} |" for text, value, figure in _pipeline_rows(name, row)]
    lines += [f"| {name} | could not be measured: {reason} | |" for name, reason in report["failures"].items()]
    if "archive" in found:
        lines += [
            "",
            "Spark's copy reads the lake's files and writes their rows to other Parquet files, with Spark's own reader "
            f"and writer ({found['archive']['spark_copy']['codec']}; the lake's files: zstd). It neither sorts nor "
            "syncs; the archive reads the log, checks every frame, sorts by topic, and syncs files and commits.",
        ]
    if "freshness" in found:
        row = found["freshness"]
        lines += [
            "",
            f"Freshness: {row['messages']:,} messages one by one through 10 pairs of clients, QoS 1, fsync; a reader "
            "looks at the Delta table ten times a second, and each message's age counts when it is first seen; "
            f"{row['commits']:,} commits. All jobs of the pipeline ran.",
        ]
    if "beside" in found:
        lines += _beside(found["beside"])
    if "timeline" in found:
        figures = found["timeline"]["figures"]
        caught_up = figures["caught_up_after_s"]
        ending = "" if caught_up is None else f", and was back where it had been {caught_up:.1f} s after the burst"
        lines += [
            "",
            "![Throughput and lag](images/pipeline.svg)",
            "",
            f"One run, {figures['messages']:,} messages: at a steady rate the lake was behind by at most "
            f"{figures['usual_lag_max']:,} messages, in the burst by {figures['lag_max']:,}{ending}.",
        ]
    return lines


def _pipeline_rows(name: str, row: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, measured, the figure whose bar counts)"""
    figures = row["figures"]
    mark = " (disturbed)" if row["disturbed"] else ""

    def rate(figure: str, unit: str) -> str:
        return f"{figures[figure]:,.0f} {unit}{mark}"

    match name:
        case "archive":
            return [
                (f"archive: log → lake, {row['rows']:,} rows", rate("rows_per_s", "rows/s"), "rows_per_s"),
                ("the same rows: Spark's copy, Parquet → Parquet", rate("spark_copy_rows_per_s", "rows/s"), ""),
                ("archive : Spark's copy", f"{figures['ratio_to_spark_copy']:.2f}×{mark}", "ratio_to_spark_copy"),
            ]
        case "source":
            return [(f"source: `{row['title'].split(' →')[0]}` → nothing", rate("rows_per_s", "rows/s"), "rows_per_s")]
        case "backlog":
            what = f"backlog: {row['messages']:,} messages ⋈ {row['filters']:,} filters → {row['ranges']:,} ranges"
            return [(what, rate("messages_per_s", "msg/s"), "messages_per_s")]
        case "replay":
            what = f"replay: lake → broker → subscriber, {row['messages']:,} messages"
            return [(what, rate("messages_per_s", "msg/s"), "messages_per_s")]
        case "freshness":
            ages = " / ".join(f"{figures[figure]:.1f}" for figure in ("p50_s", "p95_s", "max_s"))
            return [
                (f"freshness, {row['title'].split(', ')[1]}: p50 / p95 / max", f"{ages} s{mark}", "p95_s"),
                ("CPU of the pipeline meanwhile", f"{figures['pipeline_cpu_share']:.2f} cores", "pipeline_cpu_share"),
                ("CPU of the broker meanwhile", f"{figures['broker_cpu_share']:.2f} cores", ""),
            ]
    return []


def _bar(row: dict[str, Any], figure: str) -> str:
    for bar in row["bars"]:
        if bar["figure"] == figure:
            kind = {"p95_s": "p95 ", "ratio_to_spark_copy": ""}.get(figure, "")
            unit = {"p95_s": " s", "ratio_to_spark_copy": "×", "pipeline_cpu_share": " cores"}.get(figure, "")
            return f"{kind}{'≥' if bar['at_least'] else '≤'} {bar['limit']:,.10g}{unit} {'✓' if bar['met'] else '✗'}"
    return ""


def _beside(row: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"The broker alone, and beside a pipeline (nice {row['niceness']}, as `tidegate up` starts it) that archives a "
        f"backlog without a pause: {row['figures']['archive_rows_per_s']:,.0f} rows/s meanwhile.",
        "",
        "| load | alone, delivered/s | beside, delivered/s | ratio | cores: broker, load generator, pipeline |",
        "|---|--:|--:|--:|---|",
    ]
    for each in row["scenarios"].values():
        shares = each["beside"]["cpu_shares"]
        cores = ", ".join(f"{shares[who]:.2f}" for who in ("broker", "generator", "pipeline"))
        alone, beside = each["alone"]["delivered_per_s"], each["beside"]["delivered_per_s"]
        mark = " (disturbed)" if row["disturbed"] else ""
        lines.append(f"| {each['title']} | {alone:,.0f} | {beside:,.0f}{mark} | {each['ratio']:.2f}× | {cores} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "out")
    results = parser.parse_args().results
    (DOCS / "bench").mkdir(exist_ok=True)
    page = [HEAD]
    sections = {"results": throughput, "sessions": sessions, "index": index, "pipeline": pipeline}
    for name, section in sections.items():
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
