"""`tidegate log list`, `log dump` and `log verify`: they read the segment files and write nothing.

No lock is taken, so they work beside a running broker. Its last segment is being written meanwhile: what
follows the last whole frame there is no damage.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import click

from tidegate.config import Config
from tidegate.errors import PeerError
from tidegate.log.frame import MESSAGES, Buffer, decode_messages
from tidegate.log.index import TopicIndex
from tidegate.log.recovery import POSITION_GAP, Damage, examine
from tidegate.log.run import NO_EXPIRY, QOS_MASK, RETAIN, Run
from tidegate.log.segment import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    Status,
    index_name,
    parse_segment_header,
    scan,
    segment_name,
    sequence_of,
)
from tidegate.router.filters import Start, check_filter, matches
from tidegate.wire.properties import read_properties, with_length

from .config import data_option, with_config
from .failure import Failure
from .text import parse_place, payload_text, safe, utc

PUBLISH = 3  # the packet type whose properties a record carries


@click.group("log")
def log_group() -> None:
    """Look into the message log. Only reads; works beside a running broker."""


# ------------------------------------------------------------------------------------------ segments


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment's file and bytes. `header` None: its first bytes are no segment header."""

    path: Path
    sequence: int
    buffer: Buffer
    header: SegmentHeader | None

    def index(self) -> TopicIndex | None:
        """Its index, if there is one that fits it."""
        try:
            index = TopicIndex.load(read_bytes(self.path.with_name(index_name(self.sequence))))
        except FileNotFoundError:
            return None  # not written yet, or trimmed by the broker meanwhile
        return index if index is not None and index.header.segment_bytes == len(self.buffer) else None


def read_bytes(path: Path) -> Buffer:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return b""


def segment_files(data: Path) -> list[Path]:
    folder = data / "log"
    if not folder.is_dir():
        raise Failure(f"{data} has no message log", "name the broker's data folder with --data")
    return sorted(each for each in folder.iterdir() if sequence_of(each.name) is not None)


def open_segments(data: Path) -> Iterator[Segment]:
    for path in segment_files(data):
        try:
            buffer = read_bytes(path)
        except FileNotFoundError:
            continue  # trimmed by the broker since the folder was read
        header = parse_segment_header(buffer[:SEGMENT_HEADER_BYTES])
        yield Segment(path, sequence_of(path.name) or 0, buffer, header)


# ------------------------------------------------------------------------------------------ list


@dataclass(slots=True)
class Summary:
    sequence: int
    base: int
    end: int
    messages: int
    bytes: int
    first_time: str
    last_time: str
    sealed: bool


def summary_of(segment: Segment) -> Summary:
    base = segment.header.base if segment.header else 0
    found = Summary(segment.sequence, base, base, 0, len(segment.buffer), "", "", False)
    index = segment.index()
    if index is not None:
        found.sealed = True
        found.end, found.messages = index.header.end, sum(index.counts)
        if found.messages:
            found.first_time, found.last_time = (
                utc(index.header.first_time_ms),
                utc(index.header.last_time_ms),
            )
        return found
    writer = segment.header.writer if segment.header else None
    newest = 0
    for item in scan(segment.buffer, SEGMENT_HEADER_BYTES, writer, base):
        if item.status is Status.VALID and item.header is not None and item.header.kind == MESSAGES:
            found.messages += item.header.count
            found.end = item.header.end
            found.first_time = found.first_time or utc(item.header.time_ms)
            newest = max(newest, item.header.time_ms)
    found.last_time = utc(newest) if newest else ""
    return found


@log_group.command("list")
@with_config(data=data_option)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
def list_segments(config: Config, as_json: bool) -> None:
    """List the segments.

    \b
    Example:
      tidegate log list --data data
    """
    summaries = [summary_of(each) for each in open_segments(config.data)]
    if as_json:
        for each in summaries:
            click.echo(json.dumps({name: getattr(each, name) for name in Summary.__slots__}))
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(header_style="bold", show_footer=True)
    total, size = sum(each.messages for each in summaries), sum(each.bytes for each in summaries)
    table.add_column("segment", f"{len(summaries)} in all", justify="right")
    for name, footer in (("base", ""), ("end", ""), ("messages", f"{total:,}"), ("bytes", decimal(size))):
        table.add_column(name, footer, justify="right")
    for name in ("first message", "last message", "state"):
        table.add_column(name, overflow="fold")
    for each in summaries:
        table.add_row(
            str(each.sequence),
            str(each.base),
            str(each.end),
            f"{each.messages:,}",
            decimal(each.bytes),
            _short(each.first_time),
            _short(each.last_time),
            "sealed" if each.sealed else "open",
        )
    Console().print(table)


def _short(moment: str) -> str:
    return moment[:19].replace("T", " ")


# ------------------------------------------------------------------------------------------ dump


@dataclass(frozen=True, slots=True)
class Record:
    """One message of a run."""

    run: Run
    at: int

    @property
    def position(self) -> int:
        return self.run.base + self.at


def records(
    data: Path, wanted: Callable[[bytes], bool] | None, start: Start, stop: Start | None
) -> Iterator[Record]:
    """The messages from `start` up to, and not including, `stop`."""
    first = start.value if start.kind == "position" else 0
    since_ms = start.value if start.kind == "time" else 0
    end = stop.value if stop is not None and stop.kind == "position" else None
    until_ms = stop.value if stop is not None and stop.kind == "time" else None
    for segment in open_segments(data):
        index = segment.index()
        if index is not None and (index.header.end <= first or index.header.last_time_ms < since_ms):
            continue
        base, writer = (segment.header.base, segment.header.writer) if segment.header else (0, None)
        if end is not None and base >= end:
            return
        for item in scan(segment.buffer, SEGMENT_HEADER_BYTES, writer, base):
            header = item.header
            if item.status is not Status.VALID or header is None or header.kind != MESSAGES:
                continue
            if end is not None and header.base >= end:
                return
            if header.end <= first or header.time_ms < since_ms:
                continue
            if until_ms is not None and header.time_ms >= until_ms:
                continue  # not the end: a clock that went back may have older ones after it
            for run in decode_messages(segment.buffer, item.offset, wanted, first):
                for at in range(run.count):
                    if end is None or run.base + at < end:
                        yield Record(run, at)


@log_group.command("dump")
@with_config(data=data_option)
@click.option("--filter", "topic_filter", metavar="FILTER", help="Only messages whose topic matches.")
@click.option("--from", "origin", default="earliest", show_default=True, metavar="PLACE", help="Where to begin.")
@click.option("--to", "until", metavar="PLACE", help="Where to stop; what is there is not shown.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N messages.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
def dump(
    config: Config, topic_filter: str | None, origin: str, until: str | None, limit: int | None, as_json: bool
) -> None:
    """Show the stored messages.

    A PLACE is earliest, a position, a time such as 2026-01-31T12:00:00Z, or an age such as -15m.

    \b
    Examples:
      tidegate log dump --filter 'demo/#' --from -15m
      tidegate log dump --from 1000 --to 2000 --json
    """
    now_ms = time.time_ns() // 1_000_000
    start = parse_place(origin, now_ms)
    stop = None if until is None else parse_place(until, now_ms)
    line = _json_line if as_json else _text_line
    for number, record in enumerate(records(config.data, _topic_test(topic_filter), start, stop)):
        if number == limit:
            break
        sys.stdout.write(line(record) + "\n")
    sys.stdout.flush()


def _topic_test(topic_filter: str | None) -> Callable[[bytes], bool] | None:
    if topic_filter is None:
        return None
    wanted = topic_filter.encode()
    try:
        check_filter(wanted)
    except PeerError as error:
        raise Failure(f"--filter {safe(topic_filter)}: {error}") from error

    @lru_cache(10_000)
    def test(topic: bytes) -> bool:
        return matches(wanted, topic)

    return test


def _text_line(record: Record) -> str:
    run = record.run
    marks = f"q{run.flags & QOS_MASK}" + ("r" if run.flags & RETAIN else "")
    topic = safe(run.topic.decode("utf-8", "replace"))
    return f"{utc(run.time_ms)} @{record.position} {marks} {topic} {payload_text(run.payloads[record.at])}"


def _json_line(record: Record) -> str:
    run, at = record.run, record.at
    row: dict[str, object] = {
        "position": record.position,
        "time": utc(run.time_ms),
        "tenant": run.tenant.decode("utf-8", "replace"),
        "topic": run.topic.decode("utf-8", "replace"),
        "qos": run.flags & QOS_MASK,
        "retain": bool(run.flags & RETAIN),
        "publisher": run.publisher.decode("utf-8", "replace"),
    }
    payload = run.payloads[at]
    try:
        row["payload"] = payload.decode("utf-8")
    except UnicodeDecodeError:
        row["payload_hex"] = payload.hex()
    if run.expiries is not None and run.expiries[at] != NO_EXPIRY:
        row["expiry_s"] = run.expiries[at]
    if run.uuids is not None and any(run.uuids[at]):
        row["uuid"] = run.uuids[at].hex()
    if run.properties is not None and run.properties[at]:
        row |= _property_rows(run.properties[at])
    return json.dumps(row)


def _property_rows(block: bytes) -> dict[str, object]:
    try:
        found, _, _ = read_properties(with_length(block), 0, PUBLISH)
    except PeerError:
        return {"properties_hex": block.hex()}
    rows: dict[str, object] = {}
    if found.payload_format is not None:
        rows["payload_format"] = found.payload_format
    if found.content_type is not None:
        rows["content_type"] = found.content_type.decode("utf-8", "replace")
    if found.response_topic is not None:
        rows["response_topic"] = found.response_topic.decode("utf-8", "replace")
    if found.correlation_data is not None:
        rows["correlation_hex"] = found.correlation_data.hex()
    if found.user:
        rows["user_properties"] = [
            [name.decode("utf-8", "replace"), value.decode("utf-8", "replace")] for name, value in found.user
        ]
    return rows


# ------------------------------------------------------------------------------------------ verify


@dataclass(slots=True)
class Verdict:
    segments: int
    messages: int
    damages: list[Damage]
    unfinished: Damage | None  # bytes after the last whole frame of the last segment


def examine_all(data: Path, progressed: Callable[[int], None]) -> Verdict:
    verdict = Verdict(0, 0, [], None)
    segments = list(open_segments(data))
    expected = segments[0].sequence if segments else 0
    position = 0
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        for missing in range(expected, segment.sequence):
            # After an unclean stop the positions jump, and how many of them were messages is unknown.
            base = segment.header.base if segment.header else None
            last = base - 1 if base is not None and base - position < POSITION_GAP else None
            verdict.damages.append(
                Damage(segment_name(missing), 0, 0, position, last, "the segment is missing")
            )
        next_base = following.header.base if following and following.header else None
        examined = examine(
            segment.buffer,
            segment.path.name,
            segment.sequence,
            last=following is None,
            base=position,
            next_base=next_base,
        )
        damages = list(examined.damages)
        if examined.header is not None and examined.keep_bytes < len(segment.buffer):
            verdict.unfinished = damages.pop()
        verdict.damages += damages
        verdict.messages += sum(examined.index.counts)
        verdict.segments += 1
        position = examined.end
        expected = segment.sequence + 1
        progressed(len(segment.buffer))
    return verdict


@log_group.command("verify")
@with_config(data=data_option)
def verify(config: Config) -> None:
    """Check every byte of the log against its checksums. Exit code 1 if anything is damaged.

    \b
    Example:
      tidegate log verify --data data
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    total = sum(each.stat().st_size for each in segment_files(config.data))
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=total)
        verdict = examine_all(config.data, lambda size: progress.advance(task, size))
    for damage in verdict.damages:
        click.echo(
            f"damaged: {damage.segment} at byte {damage.offset}, {damage.bytes} bytes: {damage.reason}"
        )
        click.echo(f"         {_lost(damage)}")
    if verdict.unfinished is not None:
        rest = verdict.unfinished
        click.echo(
            f"note: {rest.segment} ends with {rest.bytes} bytes of an unfinished write; a running broker is "
            "about to finish it, and after a crash the next start cuts it off"
        )
    click.echo(
        f"{verdict.segments} segments, {verdict.messages:,} messages are whole, "
        f"{len(verdict.damages)} places are damaged"
    )
    if verdict.damages:
        sys.exit(1)


def _lost(damage: Damage) -> str:
    if damage.last_position is None:
        return f"messages from position {damage.first_position} on may be lost"
    if damage.last_position < damage.first_position:
        return "no message is lost"
    return f"messages {damage.first_position} to {damage.last_position} are lost"
