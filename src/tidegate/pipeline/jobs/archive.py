"""Archive: every message of the log, once and only once, into the lake; with the changes of sessions, dead letters,
and what could not be read.

Bulk bytes stay out of the JVM: Spark hands byte ranges of segments to its workers, which turn frames into Arrow and
write Parquet; the driver commits the list of files. All tables of a round carry the round's end; `messages` is
committed last. If a round was cut off between two commits, the next one ends where the furthest table is, and skips
the tables that already have it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.errors import StorageError
from tidegate.log.frame import FrameHeader
from tidegate.log.segment import SEGMENT_HEADER_BYTES, sequence_of
from tidegate.pipeline.jobs import Batch, Context
from tidegate.pipeline.lake import END, Lake, sync
from tidegate.pipeline.parquet import WrittenFile, in_files, sorted_by_topic, write_file
from tidegate.pipeline.schemas import RAW_BYTES_MAX, TABLES
from tidegate.pipeline.segments import LogFolder, Lost, Split, read_split
from tidegate.pipeline.state import DeadRow, SessionRow, change_rows

NAME = "archive"
INTERVAL_S = 1.0
ROUND_BYTES_MAX = 1 << 30
SPLIT_BYTES_MIN, SPLIT_BYTES_MAX = 16 << 20, 40 << 20

WRITER = "writer"
"""The app transaction of `messages` that has the number in the header of the segment that was last taken from."""

SIDE_TABLES = ("sessions", "dead_letters", "quarantine")


class LogReplaced(StorageError):
    """The log is not the one that the lake was made from, or an older copy of it."""

    def __init__(self, sign: str) -> None:
        super().__init__(f"{sign}: it was made from another log; give the lake a folder of its own (pipeline.lake)")


@dataclass(slots=True)
class Archived:
    """What a worker made of a split, by table."""

    files: dict[str, list[WrittenFile]] = field(default_factory=dict)
    quarantined: int = 0


def run(context: Context) -> Batch | None:
    """One round."""
    lake, log = context.lake, context.log
    reached = lake.progress("messages", NAME)
    ahead = max((lake.progress(name, NAME) or 0 for name in SIDE_TABLES), default=0)
    end = log.end().place
    start = log.start().place if reached is None else reached
    if end >> 32 < start >> 32:
        raise LogReplaced(f"the log ends in segment {end >> 32}, but the lake already has segment {start >> 32}")
    if reached is not None:
        _check_same_log(log, lake, reached)
    if end <= start:
        return None
    holes = log.holes(start, end, lake.end())
    start_now = max(start, log.start().place)
    until = ahead if ahead > start else log.bounded(start_now, end, round_bytes(lake.folder))
    rows = _round(context, start_now, until, [hole for hole in holes if hole.place < until])
    return Batch(rows.messages, until, log.rows(until, end), rows.quarantined)


def round_bytes(folder: Path) -> int:
    """How much of the log a round takes. It writes about as much as it reads, and has to come to its end also on a disk
    that is nearly full: the log can be trimmed only behind it."""
    while not folder.exists():
        folder = folder.parent
    return min(ROUND_BYTES_MAX, max(SPLIT_BYTES_MIN, shutil.disk_usage(folder).free // 2))


def _check_same_log(log: LogFolder, lake: Lake, reached: int) -> None:
    """Raises LogReplaced if the segment that was last taken from is another now."""
    segment = log.segment(reached >> 32)
    writer = lake.progress("messages", WRITER) or 0
    if segment is None or reached & 0xFFFFFFFF <= SEGMENT_HEADER_BYTES:  # a number that nothing was taken of is free
        return
    if writer and segment.writer and writer != segment.writer:
        raise LogReplaced(f"segment {segment.sequence} is not the one of which the lake has a part")


@dataclass(slots=True)
class _Counts:
    messages: int
    quarantined: int


def _round(context: Context, start: int, until: int, holes: list[Lost]) -> _Counts:
    lake = context.lake
    for name in ("messages", *SIDE_TABLES):
        lake.create(name)
    spark = context.spark.sparkContext
    splits = _splits(context.log, start, until, spark.defaultParallelism)
    archived: list[Archived] = []
    if splits:
        if splits[0].base < lake.end():
            raise LogReplaced(f"the log goes on at {splits[0].base}, but the lake already has {lake.end()} positions")
        _hold_number(context.log, Path(splits[-1].path), lake.progress("messages", NAME))
        work = partial(archive_split, folder=str(lake.folder))
        archived = spark.parallelize(splits, len(splits)).map(work).collect()
    archived.append(_write_side(lake.folder, {"quarantine": [_lost_row(hole) for hole in holes]}))
    for name in SIDE_TABLES:
        files = [file for each in archived for file in each.files.get(name, ())]
        if files and (lake.progress(name, NAME) or 0) < until:
            lake.commit(name, files, app=NAME, version=until)
    files = [file for each in archived for file in each.files.get("messages", ())]
    segment = context.log.segment(until >> 32)
    also = {END: context.log.position_at(until), WRITER: segment.writer if segment is not None else 0}
    lake.commit("messages", files, app=NAME, version=until, also=also)
    quarantined = sum(file.rows for each in archived for file in each.files.get("quarantine", ()))
    return _Counts(sum(file.rows for file in files), quarantined)


def _hold_number(log: LogFolder, newest: Path, reached: int | None) -> None:
    """Sync a segment that we read from for the first time. After power loss a broker gives the number of a segment
    without a frame to its next one, and we would take up that one in the middle, where we had stopped in the first."""
    if reached is None or sequence_of(newest.name) != reached >> 32:
        for path in (newest, log.folder):
            sync(path)


def _splits(log: LogFolder, start: int, until: int, cores: int) -> list[Split]:
    """So that all cores have work, but no more and no smaller files than that takes."""
    total = sum(split.end - split.start for split in log.splits(start, until, 1 << 62))
    return log.splits(start, until, min(max(total // max(cores, 1) + 1, SPLIT_BYTES_MIN), SPLIT_BYTES_MAX))


# ── on the workers ──


def archive_split(split: Split, folder: str) -> Archived:
    """Write what a split holds; nothing of it counts before the driver has committed it."""
    sessions: list[SessionRow] = []
    dead: list[DeadRow] = []
    lost: list[dict[str, Any]] = []

    def on_changes(at: int, header: FrameHeader, records: list[bytes]) -> None:
        session_rows, dead_rows, unreadable = change_rows(records, at, header.time_ms, header.base)
        sessions.extend(session_rows)
        dead.extend(dead_rows)
        lost.extend(
            _quarantine_row(each.reason, each.detail, at, None, None, each.raw, header.time_ms) for each in unreadable
        )

    batches = read_split(split, on_lost=lambda each: lost.append(_lost_row(each)), on_changes=on_changes)
    files = write_messages(batches, folder)
    rows: dict[str, Iterable[Any]] = {
        "sessions": [row._asdict() for row in _latest_positions(sessions)],
        "dead_letters": [row._asdict() for row in dead],
        "quarantine": lost,
    }
    archived = _write_side(Path(folder), rows)
    archived.files["messages"] = files
    return archived


def write_messages(batches: Iterable[pa.RecordBatch], folder: str) -> list[WrittenFile]:
    """Write batches of a split's form (`decode.SCHEMA`) as files of the table."""
    files = []
    for table in in_files(batches):
        part = sorted_by_topic(table)
        column = part.schema.get_field_index("uuid")
        part = part.set_column(column, "uuid", part.column("uuid").cast(pa.binary()))
        files.append(write_file(part, str(Path(folder, "messages"))))
    return files


def _latest_positions(rows: list[SessionRow]) -> list[SessionRow]:
    """Of how far readers have come, only the last in this split: they tell it ten times a second."""
    last = {row.reader: row for row in rows if row.kind == "position"}
    return [row for row in rows if row.kind != "position" or last[row.reader] is row]


def _write_side(folder: Path, rows: dict[str, Any]) -> Archived:
    archived = Archived()
    for name, found in rows.items():
        if found:
            table = pa.Table.from_pylist(list(found), schema=TABLES[name])
            archived.files[name] = [write_file(part, str(folder / name)) for part in in_files(table.to_batches())]
    return archived


def _lost_row(lost: Lost) -> dict[str, Any]:
    detail = f"segment {lost.place >> 32}, byte {lost.place & 0xFFFFFFFF}"
    return _quarantine_row(lost.reason, detail, lost.place, lost.first_position, lost.last_position, lost.raw, None)


def _quarantine_row(
    reason: str,
    detail: str,
    at: int,
    first_position: int | None,
    last_position: int | None,
    raw: bytes,
    time_ms: int | None,
) -> dict[str, Any]:
    return {
        "time": int(time.time() * 1e6) if time_ms is None else time_ms * 1000,
        "job": NAME,
        "reason": reason,
        "detail": detail,
        "place": at,
        "first_position": first_position,
        "last_position": last_position,
        "raw": raw[:RAW_BYTES_MAX],
    }


def archived_to(lake: Lake) -> int | None:
    """The place up to which everything is in the lake; None before the first round."""
    return lake.progress("messages", NAME)

