"""`tidegate pipeline run`, `tidegate pipeline status` and `tidegate pipeline stop`."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tidegate.config import Config
from tidegate.pipeline.status import read_status

from .config import config_file, configured, data_option, with_config
from .failure import Failure, Refusal
from .text import safe

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from tidegate.pipeline.driver import Progress

PACKAGES = ("pyspark", "deltalake", "pyarrow")
STALLED_S = 30  # the driver reports every second
REFRESH_S = 1.0
STOP_POLL_S = 0.1


@click.group("pipeline")
def pipeline_group() -> None:
    """Run and watch the Spark pipeline.

    It takes the messages from the log into the lake, and makes tables of them. `tidegate up` runs it by itself.
    """


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


# ── run ──


def _spark_setting(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for key, sign, _ in pairs:
        if not sign or not key.startswith("spark."):
            raise click.BadParameter("spark.KEY=VALUE is expected, such as spark.executor.memory=2g")
    return {key: value for key, _, value in pairs}


@pipeline_group.command("run")
@data_option
@config_file
@click.option(
    "--conf",
    "spark",
    multiple=True,
    metavar="spark.KEY=VALUE",
    callback=_spark_setting,
    help="A setting of Spark, such as spark.master=spark://host:7077. May be given often.",
)
@click.option("--once", is_flag=True, help="Process what there is, and end.")
def run(file: Path | None, data: Path | None, spark: dict[str, str], once: bool) -> None:
    """Run the pipeline in the foreground.

    With a broker beside it or without one; `tidegate up` does this by itself. SIGTERM or Ctrl-C ends it after the
    step at hand; nothing is lost or done twice, whenever and however it ends.

    \b
    Examples:
      tidegate pipeline run --data data
      tidegate pipeline run --once
      tidegate pipeline run --conf spark.master=spark://host:7077 --conf spark.executor.memory=2g
    """
    if missing := missing_packages():
        raise Failure(
            f"the pipeline needs {' and '.join(missing)}", "pip install 'tidegate[pipeline]' brings everything"
        )
    from tidegate.pipeline.spark import submitted

    sys.exit(_run(configured(file, data=data, **spark, **submitted()), once))


def _run(config: Config, once: bool) -> int:
    if config.log.durability == "memory":
        raise Failure("the pipeline reads the log's files, and durability memory keeps none")
    from tidegate.pipeline.driver import Driver

    line = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=config.log_level.upper(), format=line, stream=sys.stderr)
    click.echo(f"tidegate: the pipeline starts Spark at {config.spark['spark.master']}", err=True)
    if not once:
        return Driver(config).run()
    with _bar() as progress:
        code = Driver(config).run(once=True, progress=progress)
    _summary(config.data)
    return code


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting Spark", total=None)

        def progress(done: int, total: int) -> None:
            what = "archiving messages" if done < total else "archived; what follows from it"
            bar.update(task, description=what, completed=done, total=total)

        yield progress


def _summary(data: Path) -> None:
    status = read_status(data)
    assert status is not None
    for name, job in status["jobs"].items():
        if job["state"] == "failing":
            click.echo(f"tidegate: {name} failed: {safe(job['last_error'])}", err=True)
        elif job["rows"]:
            click.echo(f"tidegate: {name}: {job['rows']:,} rows", err=True)
    if not any(job["rows"] or job["state"] == "failing" for job in status["jobs"].values()):
        click.echo("tidegate: there was nothing to do", err=True)


# ── status ──


class Report(NamedTuple):
    """The driver's status, corrected by what can be seen from outside."""

    status: Mapping[str, Any]
    state: str
    exit_code: int


def report(data: Path, now_s: float) -> Report:
    """Besides the driver's own states: `never` ran; `died` without a last word; `stalled`, alive but silent."""
    status = read_status(data)
    if status is None:
        return Report({"version": 1, "state": "never", "jobs": {}}, "never", 0)
    state = status["state"]
    if state in ("starting", "running"):
        if driver_pid(data) is None:
            state = "died"
        elif state == "running" and now_s - _unix(status["updated_at"]) > STALLED_S:
            state = "stalled"
    failing = any(job["state"] == "failing" for job in status["jobs"].values())
    return Report({**status, "state": state}, state, int(failing or state in ("failed", "died", "stalled")))


def driver_pid(data: Path) -> int | None:
    """The process that holds the lock of the data folder's pipeline; None if nobody does."""
    try:
        with (data / "pipeline" / "pid").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = (data / "pipeline" / "pid").read_text()
        return int(text) if text.isdigit() else None
    return None


@pipeline_group.command("status")
@with_config(data=data_option)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.option("--watch", is_flag=True, help="Show it anew every second, until Ctrl-C.")
def status(config: Config, as_json: bool, watch: bool) -> None:
    """Show how the jobs are doing.

    For each its state, rate, lag, last batch and failures. The exit code is 1 if a job is failing, or if the pipeline
    died.

    \b
    Examples:
      tidegate pipeline status
      tidegate pipeline status --watch
      tidegate pipeline status --json --data /var/lib/tidegate
    """
    if as_json and watch:
        raise Failure("--watch shows a table; it does not go with --json")
    folder = config.data
    found = report(folder, time.time())
    if as_json:
        click.echo(json.dumps(found.status, indent=2, ensure_ascii=False))
        sys.exit(found.exit_code)
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not watch:
        console.print(shown(found, folder, time.time()))
        sys.exit(found.exit_code)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                found = report(folder, time.time())
                live.update(shown(found, folder, time.time()), refresh=True)
                time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        sys.exit(found.exit_code)


_STYLES = {"running": "green", "starting": "yellow", "ok": "green", "failing": "bold red", "waiting": "dim"}
_STYLES |= dict.fromkeys(("failed", "died", "stalled"), "bold red")


def shown(found: Report, data: Path, now_s: float) -> Group:
    """The status for people: a sentence, a row for each job, and what is wrong in words."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if found.state == "never":
        return Group(
            Text(f"No pipeline has run for {data} yet."),
            Text("`tidegate up` starts one beside the broker, `tidegate pipeline run` one alone.", "dim"),
        )
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("job", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("rows", "rows/s", "behind", "for", "last batch", "took", "ago"):
        table.add_column(name, justify="right", no_wrap=True)
    notes = []
    for name, job in found.status["jobs"].items():
        batch = job["last_batch_at"]
        table.add_row(
            name,
            Text(job["state"], _STYLES.get(job["state"], "")),
            f"{job['rows']:,}",
            f"{job['rate']:,.0f}",
            f"{job['lag_rows']:,}" if job["lag_rows"] else "-",
            span(job["lag_s"]) if job["lag_s"] else "-",
            f"{job['last_batch_rows']:,}" if batch else "-",
            f"{job['last_batch_s']:.1f} s" if batch else "-",
            span(now_s - _unix(batch)) if batch else "-",
        )
        notes += [Text.assemble((f"{name} ", "bold"), note) for note in _notes(job, now_s)]
    return Group(_sentence(found, data, now_s), Text(""), table, *([Text("")] if notes else []), *notes)


def _notes(job: Mapping[str, Any], now_s: float) -> Iterator[tuple[str, str]]:
    """What deserves a look, in words and a colour."""
    times = "once" if job["failures"] == 1 else f"{job['failures']:,} times"
    if job["state"] == "failing":
        retry = job["retry_at"] and f"; tried again in {span(_unix(job['retry_at']) - now_s)}"
        reason = safe(job["last_error"] or "for no known reason")
        yield f"has failed {times}: {reason}{retry or ''}", "red"
    elif job["failures"]:
        yield f"has failed {times} and works again", "yellow"
    if job["quarantined"]:
        rows = "1 row" if job["quarantined"] == 1 else f"{job['quarantined']:,} rows"
        yield f"could not process {rows}: see the table `quarantine`", "yellow"


def _sentence(found: Report, data: Path, now_s: float) -> Text:
    from rich.text import Text

    status, state = found.status, found.state
    ran = span(now_s - _unix(status["started_at"]))
    told = span(now_s - _unix(status["updated_at"]))
    who = f"process {status['pid']}, Spark at {status['spark_master']}"
    nobody = f"no pipeline runs for {data}"
    verb, rest = {
        "starting": ("is ", f": {who}"),
        "running": ("has been ", f" for {ran}: {who}"),
        "stalled": ("has ", f": process {status['pid']} is alive and has said nothing for {told}"),
        "stopped": ("was ", f" {told} ago; {nobody}. `tidegate pipeline run` starts it again"),
        "failed": ("", f" {told} ago; {nobody}: {safe(status.get('error') or 'no reason known')}"),
        "died": ("", f" {told} ago without a last word; {nobody}"),
    }[state]
    return Text.assemble(f"The pipeline {verb}", (state, _STYLES.get(state, "yellow")), f"{rest}.")


def span(seconds: float) -> str:
    """A stretch of time in one unit that makes it a number of two or three digits."""
    for unit, factor in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _unix(moment: str) -> float:
    return datetime.fromisoformat(moment).astimezone(UTC).timestamp()


# ── stop ──


@pipeline_group.command("stop")
@with_config(data=data_option)
@click.option(
    "--timeout", type=click.FloatRange(0), default=60.0, show_default=True, help="How long to wait, in seconds."
)
def stop(config: Config, timeout: float) -> None:
    """Stop the pipeline of a data folder, after the step at hand. `tidegate up` does not start it again.

    \b
    Example:
      tidegate pipeline stop --data data
    """
    folder = config.data
    pid = driver_pid(folder)
    if pid is None:
        click.echo(f"No pipeline runs for {folder}.")
        return
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout
    while driver_pid(folder) == pid:
        if time.monotonic() > deadline_s:
            raise Refusal(
                f"process {pid} has been told to stop and is still at its step after {timeout:g} s",
                f"wait; or kill -9 {pid}: nothing is lost, and the step is done again",
            )
        time.sleep(STOP_POLL_S)
    click.echo(f"The pipeline (process {pid}) has stopped.")
