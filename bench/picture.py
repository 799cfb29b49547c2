"""The picture of a report: one small panel per scenario, one bar per broker.

Also a program: python bench/picture.py RESULTS.json OUT.svg draws an earlier report again.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from scenarios import RATE_KEPT_MIN

PANELS_PER_ROW = 3
TITLE_CHARACTERS = 38  # what fits above a panel
SLOTS_MIN = 3  # bars of one height in all panels, however few brokers took part
COLOURS = {
    "tidegate": "#0b7285",
    "tidegate 3.1.1": "#66b2bd",
    "tidegate fsync": "#3d94a3",
    "tidegate plain": "#66b2bd",
    "mosquitto": "#868e96",
    "nats": "#ced4da",
    "rumqttd": "#d8a48f",
}
OTHER_COLOUR = "#e9c46a"


def _panels(report: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """(title, unit, figure per broker): throughput, or for a fixed rate what that rate was run for."""
    panels = []
    for scenario in report["scenarios"]:
        rate = scenario["load"]["rate_per_s"]
        metrics = [("delivered_per_s", "thousand msg/s", 1e-3)]
        if rate:
            metrics = [("p50_us", "p50, µs", 1.0), ("p99_us", "p99, µs", 1.0)]
            metrics.append(("cpu_us_per_delivery", "CPU µs per delivery", 1.0))
        for metric, unit, scale in metrics:
            figures = {
                label: row[metric] * scale
                for label, row in scenario["results"].items()
                # The latency of a broker that fell behind is only the length of its queue.
                if row[metric] is not None and row["delivered_per_s"] >= RATE_KEPT_MIN * rate
            }
            if figures:
                panels.append((scenario["title"].partition(" (")[0], unit, figures))
    return panels


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def draw(report: dict[str, Any], target: Path) -> None:
    panels = _panels(report)
    if not panels:
        return
    rows = -(-len(panels) // PANELS_PER_ROW)
    plt.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "svg.fonttype": "path"})
    figure, axes = plt.subplots(rows, PANELS_PER_ROW, figsize=(11, 1.9 * rows + 0.6), squeeze=False)
    flat = list(axes.flat)
    for axis, (title, unit, figures) in zip(flat, panels, strict=False):
        labels = list(figures)
        values = list(figures.values())
        colours = [COLOURS.get(label, OTHER_COLOUR) for label in labels]
        places = range(len(labels))
        axis.barh(places, values, color=colours, height=0.68)
        axis.set_yticks(places, labels)
        axis.set_ylim(max(len(labels), SLOTS_MIN) - 0.5, -0.5)
        # Room for the number behind the longest bar. Linear from zero: lengths are what the eye compares.
        axis.set_xlim(0, max(values) * 1.28 or 1)
        axis.set_xticks([])
        for place, value in zip(places, values, strict=True):
            axis.text(value + max(values) * 0.02, place, _number(value), va="center")
        axis.set_title(f"{textwrap.fill(title, TITLE_CHARACTERS)}\n{unit}", fontsize=9, loc="left")
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    for axis in flat[len(panels) :]:
        axis.set_visible(False)
    machine = report["machine"]
    versions = " · ".join(report["versions"].values())
    figure.text(
        0.01, 0.004,
        f"{machine['cpu']}, {machine['cores']} cores, load generator included · {machine['kernel']} · "
        f"{report['settings']['payload_bytes']}-byte payloads · {versions} · {report['date'][:10]}",
        fontsize=7, color="#495057",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
