"""The picture of the pipeline's report: throughput and lag of one run over time.

Also a program: python bench/pipeline_picture.py RESULTS.json OUT.svg draws an earlier report again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from scenarios import PAYLOAD_BYTES

PUBLISHED, ARCHIVED, LAG = "#e8590c", "#0b7285", "#6741d9"
TEXT, GRID, SHADE = "#343a40", "#dee2e6", "#f1f3f5"
SMOOTHED_SAMPLES = 4
TICKS = (0, 1e3, 1e4, 1e5, 1e6, 1e7)
TICK_LABELS = ("0", "1 k", "10 k", "100 k", "1 M", "10 M")

Series = tuple[list[float], list[float]]


def _published(at: np.ndarray[Any, Any], end: np.ndarray[Any, Any]) -> Series:
    """Messages a second, over the second around each moment."""
    n = SMOOTHED_SAMPLES
    return list((at[n:] + at[:-n]) / 2), list((end[n:] - end[:-n]) / (at[n:] - at[:-n]))


def _archived(at: np.ndarray[Any, Any], end: np.ndarray[Any, Any]) -> Series:
    """Each commit's rows, spread over the time since the commit before: what the archive did meanwhile."""
    times, rates = [float(at[0])], [0.0]
    last = 0
    for i in np.flatnonzero(np.diff(end)) + 1:
        times.append(float(at[i]))
        rates.append(float((end[i] - end[last]) / (at[i] - at[last])))
        last = int(i)
    return [*times, float(at[-1])], [*rates, 0.0]


def draw(report: dict[str, Any], target: Path) -> None:
    found = report["measurements"]["timeline"]
    at, log_end, lake_end = (np.array(found["samples"][name], float) for name in ("at_s", "log_end", "lake_end"))
    plt.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans", "svg.fonttype": "path"})
    plt.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 5.8), sharex=True, height_ratios=(1.15, 1), facecolor="white"
    )
    times, rates = _published(at, log_end)
    above.plot(times, rates, color=PUBLISHED, linewidth=2, label="published")
    times, rates = _archived(at, lake_end)
    # A commit's rate holds for the time before it.
    words = "archived: each commit over the time it took"
    above.step(times, rates, where="pre", color=ARCHIVED, linewidth=2, label=words)
    above.set_ylabel("messages per second")
    above.legend(loc="upper right", frameon=True, facecolor="white", edgecolor=GRID, framealpha=1)
    below.fill_between(at, log_end - lake_end, step="post", color=LAG, alpha=0.15, linewidth=0)
    below.step(at, log_end - lake_end, where="post", color=LAG, linewidth=2)
    below.set_ylabel("messages not yet\nin the lake")
    below.set_xlabel("seconds")
    top = 2.5 * max(float(np.max(log_end - lake_end)), *rates, 4e4)
    shown = {tick: label for tick, label in zip(TICKS, TICK_LABELS, strict=True) if tick <= top}
    for axis in (above, below):
        axis.set_yscale("symlog", linthresh=1e3, linscale=0.4)
        axis.set_ylim(0, top)
        axis.set_yticks(list(shown), list(shown.values()))
        axis.minorticks_off()
        axis.set_xlim(0, float(at[-1]))
        axis.grid(axis="y", color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    ends = [step["at_s"] for step in found["steps"][1:]] + [float(at[-1])]
    for number, (step, end) in enumerate(zip(found["steps"], ends, strict=True)):
        for axis in (above, below):
            if number % 2:
                axis.axvspan(step["at_s"], end, color=SHADE, zorder=-1, linewidth=0)
        above.text(
            (step["at_s"] + min(end, float(at[-1]))) / 2, 1.02, step["words"], transform=above.get_xaxis_transform(),
            ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
    above.set_title("Throughput and lag of the archive, one run", loc="left", fontsize=12, pad=24, fontweight="bold")
    about = report["machine"]
    figure.text(
        0.01, 0.008,
        f"{about['cpu']}, {about['cores']} cores, shared by load generator, broker and pipeline · "
        f"QoS 1, {PAYLOAD_BYTES}-byte payloads, fsync · logarithmic from 1 k on · {found['date'][:10]}",
        fontsize=7.5, color="#495057",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.025, 1, 1))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
