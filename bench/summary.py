"""The tables that a run ends with on the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from measure import Measurement
from outcomes import BASELINE, Outcome, Verdict, kept_up

FALL_MAX = 0.10  # against the baseline: more than this in a bulk row is marked


def faults(row: Measurement) -> str:
    names = ("lost", "duplicated", "unfinished", "out_of_order")
    return "".join(f", {getattr(row, name):,} {name}" for name in names if getattr(row, name))


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def us(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def figures_table(outcomes: list[Outcome]) -> Table:
    table = Table(title="Messages delivered, medians (p50, p99 in µs)")
    for name in ("scenario", "broker"):
        table.add_column(name)
    for name in ("delivered/s", "p50", "p99", "CPU µs/delivery", "ratio"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        reference = "tidegate 3.1.1" if outcome.scenario.own_versions else "mosquitto"
        rows = outcome.medians()
        for label, row in rows.items():
            ratio = ""
            if reference in rows and label != reference:
                ratio = f"{row.delivered_per_s / rows[reference].delivered_per_s:.2f}×"
            noisy = " [yellow]disturbed[/]" if row.disturbed else ""
            behind = "" if kept_up(outcome.scenario, row) else " [red]behind[/]"
            table.add_row(
                outcome.scenario.name, label, f"{row.delivered_per_s:,.0f}{behind}{noisy}{faults(row)}",
                us(row.p50_us), us(row.p99_us), us(row.cpu_us_per_delivery, 2), ratio,
            )  # fmt: skip
        for label, reason in outcome.failures.items():
            table.add_row(outcome.scenario.name, label, "[red]failed[/]", escape(reason.splitlines()[0][:60]))
        for label, reason in outcome.unable.items():
            table.add_row(outcome.scenario.name, label, f"cannot: {escape(reason)}")
        table.add_section()
    return table


def bars_table(outcomes: list[Outcome]) -> Table:
    """What we aim for beside what was measured; a peer that was not measured has no line."""
    table = Table(title="Bars")
    for name in ("scenario", "row", "bar", "measured", "met?"):
        table.add_column(name)
    for outcome in outcomes:
        for verdict in outcome.verdicts:
            if verdict.ratio is not None:
                bar = verdict.bar
                figure = f"{verdict.ratio:.2f}×" if bar.against else f"{verdict.ratio:,.0f}"
                aim = f"{bar.text()} {bar.against or 'msg/s'}"
                table.add_row(outcome.scenario.name, bar.own, aim, figure, verdict_text(verdict))
        table.add_section()
    return table


def baseline_table(outcomes: list[Outcome]) -> Table:
    table = Table(title="This checkout beside the baseline, new : old")
    for name in ("scenario", "row"):
        table.add_column(name)
    for name in ("new/s", "old/s", "delivered/s", "CPU", "p50", "p99"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        rows = outcome.medians()
        for label, new in rows.items():
            old = rows.get(f"{label} {BASELINE}")
            if old is None:
                continue
            ratio = new.delivered_per_s / old.delivered_per_s if old.delivered_per_s else 0.0
            fell = outcome.scenario.is_throughput and ratio < 1 - FALL_MAX
            noisy = " [yellow]disturbed[/]" if new.disturbed or old.disturbed else ""
            others = [
                (getattr(new, metric), getattr(old, metric)) for metric in ("cpu_us_per_delivery", "p50_us", "p99_us")
            ]
            table.add_row(
                outcome.scenario.name, label, f"{new.delivered_per_s:,.0f}", f"{old.delivered_per_s:,.0f}",
                f"{f'[red]{ratio:.2f}× fell[/]' if fell else f'{ratio:.2f}×'}{noisy}",
                *(f"{mine / theirs:.2f}×" if mine and theirs else "–" for mine, theirs in others),
            )  # fmt: skip
    return table


def verdict_text(verdict: Verdict) -> str:
    assert verdict.ratio is not None
    if not verdict.proven:
        return f"[yellow]disturbed, else {'yes' if verdict.bar.met(verdict.ratio) else 'no'}[/]"
    return "[green]yes[/]" if verdict.met else "[red]no[/]"
