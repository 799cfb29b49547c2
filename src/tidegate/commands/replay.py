"""`tidegate replay`."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

from tidegate.config import Config
from tidegate.errors import BrokerUnreachable, PeerError, PublishRefused
from tidegate.router.filters import parse

from .config import data_option, with_config
from .failure import Failure, Refusal
from .mqtt import address_of, host_option, port_option
from .spark import lake_of, spark_for, watched
from .text import parse_place, safe

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import Console

    from tidegate.pipeline.jobs.replay import Found, Selection, Speed, Stopped, Template
    from tidegate.pipeline.lake import Lake

INTERRUPTED = 130


@click.command("replay")
@with_config(data=data_option, host=host_option, port=port_option)
@click.option("--filter", "topic_filter", metavar="FILTER", help="Only messages whose topic matches.")
@click.option("--from", "origin", default="earliest", show_default=True, metavar="PLACE", help="Where to begin.")
@click.option("--to", "until", metavar="PLACE", help="Where to stop; what is there is not sent.")
@click.option("--tenant", help="Only messages of this tenant.")
@click.option(
    "--speed",
    default="max",
    show_default=True,
    metavar="SPEED",
    help="max; 1x, or 10x as fast as they were published; or 500/s.",
)
@click.option("--to-topic", "template", metavar="TEMPLATE", help="Publish to another topic: 'replayed/{topic}'.")
@click.option("--qos", type=click.IntRange(0, 2), help="With this QoS (default: as it was).")
@click.option("--retain", is_flag=True, help="Keep the retain flag of messages that had it.")
@click.option("--dead-letters", "dead", is_flag=True, help="Send messages again that were given up.")
@click.option("--where", metavar="SQL", help="Only these dead letters, by a condition on their columns.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
def replay(
    config: Config,
    topic_filter: str | None,
    origin: str,
    until: str | None,
    tenant: str | None,
    speed: str,
    template: str | None,
    qos: int | None,
    retain: bool,
    dead: bool,
    where: str | None,
    dry_run: bool,
) -> None:
    """Publish messages of the lake again, in order.

    They are new messages to the broker and its subscribers. Without --retain they leave the retained messages alone.
    Ctrl-C stops, and says how to go on. A PLACE is earliest, a position, a time such as 2026-01-31T12:00:00Z, or an age
    such as -15m; for dead letters a time is when they were given up.

    In a TEMPLATE, {topic} stands for the topic, and {1}, {2} … for its levels.

    \b
    Examples:
      tidegate replay --filter 'plant/#' --from -1h --to-topic 'replayed/{topic}'
      tidegate replay --from 2026-01-31T12:00:00Z --to 2026-01-31T13:00:00Z --speed 10x
      tidegate replay --dead-letters --where "reason = 'expired' and client = 'pump-7'"
      tidegate replay --filter 'plant/#' --dry-run
    """
    broker = None if dry_run else address_of(config)
    lake = lake_of(config)
    from rich.console import Console

    from tidegate.pipeline.jobs.replay import Selection, Speed, Template

    now_ms = time.time_ns() // 1_000_000
    stop = None if until is None else parse_place(until, now_ms)
    selection = Selection(parse_place(origin, now_ms), stop, _checked(topic_filter), tenant)
    pace, renamed = Speed.parse(speed), None if template is None else Template(template)
    if where is not None and not dead:
        raise Failure("--where chooses dead letters", "add --dead-letters")
    table = "dead_letters" if dead else "messages"
    if not lake.exists(table):
        raise Failure(f"the lake has no table {table} yet", "`tidegate pipeline run --once` brings it up to date")
    console = Console(stderr=True)
    with spark_for("replay", config, console, quick=True) as spark:
        source = _Source(spark, lake, selection, renamed, qos, retain, where, dead)
        with watched(spark, console, "looking"):
            found = source.survey()
        if found is None:
            raise Refusal("there is nothing to send", "choose another --filter, --from or --to")
        _tell(found, dry_run)
        if broker is not None:
            sys.exit(_send(source, found, pace, *broker, console))


def _checked(topic_filter: str | None) -> str | None:
    if topic_filter is None:
        return None
    try:
        parsed = parse(topic_filter.encode())
    except PeerError as error:
        raise Failure(f"--filter {safe(topic_filter)}: {error}") from error
    if parsed.kind != "plain":
        raise Failure(f"--filter {safe(topic_filter)}: a plain filter is needed", "--from says where to begin")
    return topic_filter


class _Source:
    """The rows to send, from the lake's messages or from its dead letters."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        selection: Selection,
        template: Template | None,
        qos: int | None,
        retain: bool,
        where: str | None,
        dead: bool,
    ) -> None:
        self._spark, self._lake, self._selection = spark, lake, selection
        self._template, self._qos, self._retain = template, qos, retain
        self._where = where
        self.dead = dead

    def survey(self) -> Found | None:
        from tidegate.pipeline.jobs.replay import selected, survey

        if self.dead:
            found = survey(self._letters())
        else:
            positions = self._selection.positions(self._lake.end())
            found = survey(selected(self._lake.read(self._spark, "messages", positions), self._selection))
        needed = self._template.levels if self._template is not None else 0
        if found is not None and found.fewest_levels < needed:
            message = f"--to-topic: a topic has only {found.fewest_levels} levels, and {{{needed}}} is used"
            raise Failure(message, "choose topics with --filter")
        return found

    def batches(self) -> Iterator[pa.RecordBatch]:
        from tidegate.pipeline.batches import arrow_batches
        from tidegate.pipeline.jobs.replay import in_order

        if self.dead:
            return arrow_batches(self._prepared(self._letters()).orderBy("place", "ordinal"))
        return in_order(self._spark, self._lake, self._selection, self._prepared)

    def _letters(self) -> DataFrame:
        from tidegate.pipeline.jobs.replay import selected
        from tidegate.pipeline.query import BadQuery, query

        try:
            chosen = query(self._spark, self._lake, f"select * from dead_letters where {self._where or 'true'}")
        except BadQuery as error:
            raise Failure(f"--where: {error}", error.hint) from error
        return selected(chosen, self._selection)

    def _prepared(self, rows: DataFrame) -> DataFrame:
        from tidegate.pipeline.jobs.replay import as_published

        return as_published(rows, self._template, self._qos, self._retain)


def _tell(found: Found, dry_run: bool) -> None:
    first, last = (_short(moment.isoformat(timespec="milliseconds")) for moment in (found.first_time, found.last_time))
    text = f"{_count(found.messages)} on about {found.topics:,} topics, positions {found.first_position} to "
    text += f"{found.last_position}, from {first} to {last}"
    click.echo(f"would send {text}" if dry_run else f"sending {text}", err=not dry_run)


def _short(moment: str) -> str:
    return moment.replace("+00:00", "Z")


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages:,} messages"


# ── sending ──


def _send(source: _Source, found: Found, speed: Speed, host: str, port: int, console: Console) -> int:
    """Returns the exit code."""
    from tidegate.client.publisher import BulkPublisher
    from tidegate.pipeline.jobs.replay import Replay

    stop = threading.Event()
    publisher = BulkPublisher(host, port)
    sending = Replay(publisher, speed, stop)
    began_s = time.monotonic()
    try:
        with _interruptible(stop), _bar(console, found.messages) as progress:
            reached = sending.run(source.batches(), progress)
    except (PublishRefused, BrokerUnreachable, ValueError) as error:
        raise Refusal(str(error), _go_on(source, found, sending.reached(error))) from error
    finally:
        publisher.close()
    took_s = max(time.monotonic() - began_s, 0.001)
    rate = f"in {took_s:.1f} s, {reached.sent / took_s:,.0f} a second"
    if stop.is_set() and reached.sent < found.messages:
        click.echo(f"stopped after {_count(reached.sent)} {rate}; {_go_on(source, found, reached)}", err=True)
        return INTERRUPTED
    click.echo(f"sent {_count(reached.sent)} {rate}", err=True)
    return 0


def _go_on(source: _Source, found: Found, reached: Stopped) -> str:
    after = reached.after
    if not source.dead:
        words = f"go on with --from {found.first_position if after is None else after['position'] + 1}"
    elif after is None:
        words = "nothing was sent"
    else:
        place, ordinal = after["place"], after["ordinal"]
        words = f'go on with --where "place > {place} or place = {place} and ordinal > {ordinal}"'
    return words + ("" if reached.exact else "; some of what comes then was already sent")


@contextmanager
def _interruptible(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C asks to stop between two messages, the second one does not ask."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:,.0f}/s"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("replay", total=total, rate=0.0)

        def progress(sent: int) -> None:
            bar.update(task, completed=sent, rate=bar.tasks[0].speed or 0.0)

        yield progress
