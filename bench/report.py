"""docs/performance.md, and README's table, from the JSON that the benches wrote: no figure in them is typed by hand.

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

from scenarios import OTHER_CPU_SHARE_MAX, RATE_KEPT_MIN

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"

HEAD = """# Performance

Written by `make bench` and `make bench-pipeline` (bench/report.py) from [bench/](bench/); do not edit.

The load generator (`bench/mqttload.c`; for drains `bench/mqttdrain.c`) is a closed loop on raw sockets: publishers keep
a window of messages that are not acknowledged (QoS 0: not delivered) and refill it in batches, so nothing is measured
in socket buffers. Loss, duplicates, order, topics, sizes, QoS and properties are checked. It shares the machine's cores
with the broker. Every broker is measured in the same run, alternately; the figures are medians. A measurement during
which other processes used the CPU is repeated, and marked if that did not help. mosquitto runs without persistence and
without queue limits, nats-server with JetStream on disk, rumqttd with its log in memory; Tidegate appends every message
to its log on disk, QoS 0 too, and acknowledges after the fsync or after the write (`os`), as its row says. Where a peer
is ahead, its row says so.

`python bench/run.py --list` prints the rows, `python bench/run.py --quick --only NAME` looks at one of them.

![Throughput](images/bench.svg)
"""


PEERS = ("mosquitto", "nats", "rumqttd")
RATE_METRICS = {"cpu_us_per_delivery": "CPU", "p50_us": "p50", "p99_us": "p99"}


def throughput(report: dict[str, Any]) -> list[str]:
    settings = report["settings"]
    versions = ", ".join(report["versions"].values())
    lines = [
        "## Beside other brokers",
        "",
        f"{_machine(report['machine'])}; {versions}; {settings['payload_bytes']}-byte payloads unless a row says "
        f"otherwise, {settings['repeat']} × {settings['seconds']:g} s, data on {settings['data_filesystem']}; "
        f"{report['date'][:10]}.",
        "",
        "| load | broker | delivered/s | p50 µs | p99 µs | CPU µs per delivery | bar: ratio |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for scenario in report["scenarios"]:
        first = f"{scenario['title']} (`{scenario['name']}`)"
        for label, row in scenario["results"].items():
            cells = [
                first,
                _broker(label, scenario["durability"]),
                f"{row['delivered_per_s']:,.0f}{_marks(scenario, label, row)}",
                *(_number(row[name]) for name in ("p50_us", "p99_us", "cpu_us_per_delivery")),
                "; ".join(_bars(scenario, label) if label.startswith("tidegate") else _leads(scenario, row)),
            ]
            lines.append("| " + " | ".join(cells) + " |")
            first = ""
        for label, reason in _absent(scenario).items():
            lines.append(f"| | {label} | {reason} | | | | |")
    for reason in report.get("left_out", {}).values():
        lines += ["", f"{reason}."]
    return lines


def _machine(machine: dict[str, Any]) -> str:
    built = {True: " (built with profile-guided optimisation)", False: " (built without profile-guided optimisation)"}
    how = built.get(machine.get("python_profile_guided"), "")  # older results do not say
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"Python {machine['python']}{how}"
    )


def _broker(label: str, durability: str) -> str:
    named = {"tidegate": durability, "tidegate fsync": "fsync", "tidegate plain": f"{durability}, plain load"}
    return f"tidegate, {named[label]}" if label in named else label


def _bars(scenario: dict[str, Any], label: str) -> list[str]:
    found = []
    for bar in scenario["bars"]:
        if bar.get("own", "tidegate") == label and bar["ratio"] is not None:
            mark = "✓" if bar["met"] else "✗"
            measured = f" {bar['against']}: **{bar['ratio']:.2f}×**" if bar["against"] else f": **{bar['ratio']:,.0f}**"
            found.append(f"{bar['text']}{measured} {mark}")
    return found


def _leads(scenario: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """In what a peer is ahead of us."""
    rate = scenario["load"]["rate_per_s"]
    found = []
    for own in ("tidegate", "tidegate fsync"):
        ours = scenario["results"].get(own)
        if ours is None:
            continue
        if not rate and row["delivered_per_s"] > ours["delivered_per_s"]:
            found.append(f"**ahead of {own}: {row['delivered_per_s'] / ours['delivered_per_s']:.2f}×**")
        # The latency of a broker that fell behind is only the length of its queue.
        if rate and row["delivered_per_s"] >= RATE_KEPT_MIN * rate:
            ahead = [
                f"{text} {row[metric] / ours[metric]:.2f}×"
                for metric, text in RATE_METRICS.items()
                if row[metric] is not None and ours[metric] and row[metric] < ours[metric]
            ]
            found += [f"**ahead of {own}: {', '.join(ahead)}**"] if ahead else []
    if rate and row["delivered_per_s"] < RATE_KEPT_MIN * rate:
        found.append("fell behind the rate")
    return found


def _marks(scenario: dict[str, Any], label: str, row: dict[str, Any]) -> str:
    """What to know before believing a figure."""
    disturbed = row.get("other_cpu_share") is not None and row["other_cpu_share"] > OTHER_CPU_SHARE_MAX
    marks = ["disturbed"] if disturbed else []
    marks += [f"{row[name]:,} {name}" for name in ("lost", "duplicated", "unfinished") if row.get(name)]
    if scenario["load"].get("aliases") and label != "tidegate plain" and row.get("aliased") == 0:
        marks.append("sends no aliases")
    return f" ({', '.join(marks)})" if marks else ""


def _absent(scenario: dict[str, Any]) -> dict[str, str]:
    """Brokers without a figure here, and why."""
    unable = {label: f"cannot: {reason}" for label, reason in scenario.get("unable", {}).items()}
    failed = {label: f"failed: {reason.splitlines()[0]}" for label, reason in scenario["failures"].items()}
    return {label: why for label, why in (unable | failed).items() if label not in scenario["results"]}


README_BEGIN, README_END = "<!-- bench/report.py: begin -->", "<!-- end -->"
README_PICTURE = "](docs/images/bench.svg)"


def readme_table(report: dict[str, Any]) -> list[str]:
    """One line per load: messages delivered per second, or for a fixed rate CPU µs per delivery, p50 and p99."""
    lines = [
        f"| delivered/s; at a fixed rate: CPU µs per delivery, p50, p99 µs | tidegate | {' | '.join(PEERS)} |",
        "|---|--:|" + "--:|" * len(PEERS),
    ]
    for scenario in report["scenarios"]:
        results = scenario["results"]
        if not any(peer in results for peer in PEERS):
            continue
        for own in ("tidegate", "tidegate fsync"):
            if own in results:
                durability = _broker(own, scenario["durability"]).partition(", ")[2]
                cells = [f"{scenario['title'].partition(' (')[0]}; {durability}", _brief(scenario, own)]
                cells += [_readme_peer(scenario, results[own], peer) for peer in PEERS]
                lines.append("| " + " | ".join(cells) + " |")
    where = f"{_machine(report['machine'])}, load generator included; {report['date'][:10]}."
    return [*lines, "", f"{where} In bold where a peer is ahead, if only in one of the figures."]


def _readme_peer(scenario: dict[str, Any], ours: dict[str, Any], peer: str) -> str:
    if peer not in scenario["results"]:
        return _absent(scenario).get(peer, "–").partition(":")[0]
    row = scenario["results"][peer]
    leads = any(text.startswith("**ahead") for text in _leads(scenario | {"results": {"tidegate": ours}}, row))
    return f"**{_brief(scenario, peer)}** (ahead)" if leads else _brief(scenario, peer)


def _brief(scenario: dict[str, Any], label: str) -> str:
    row = scenario["results"][label]
    if not scenario["load"]["rate_per_s"]:
        return f"{row['delivered_per_s']:,.0f}{_marks(scenario, label, row)}"
    if row["delivered_per_s"] < RATE_KEPT_MIN * scenario["load"]["rate_per_s"]:
        return "fell behind"
    return ", ".join(_number(row[metric]) for metric in RATE_METRICS) + _marks(scenario, label, row)


def write_readme(report: dict[str, Any]) -> None:
    """Between its marks; where there are none yet, below the picture."""
    target = HERE.parent / "README.md"
    text = target.read_text()
    block = "\n".join((README_BEGIN, *readme_table(report), README_END))
    if README_BEGIN in text:
        head, _, rest = text.partition(README_BEGIN)
        tail = rest.partition(README_END)[2]
        target.write_text(head + block + tail)
    elif README_PICTURE in text:
        head, picture, tail = text.partition(README_PICTURE)
        target.write_text(f"{head}{picture}\n\n{block}{tail}")


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
            found = json.loads(kept.read_text())
            page += section(found)
            if name == "results":
                write_readme(found)
    notes = DOCS / "bench" / "notes.md"
    if notes.exists():
        page += ["", notes.read_text().rstrip()]
    (DOCS / "performance.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
