"""Files of the lake that cannot be read any more: taken out of their table, kept beside it in `_damaged`, and told of
in quarantine, so that the jobs go on without them.

Messages that the log still has are written again from it, and nothing is lost. `retained` is made again from all
messages. Of the other tables the file's rows are gone; its row in quarantine says how many, and which positions.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.pipeline.handover import tell_broker
from tidegate.pipeline.jobs import Context, archive, retained
from tidegate.pipeline.lake import Lake, LakeFile, check_length
from tidegate.pipeline.parquet import FileDamaged, WrittenFile, read_file
from tidegate.pipeline.segments import LogFolder, read_split

FOLDER = "_damaged"
KEPT_BYTES_MAX = 1 << 30
"""Of a table's damaged files the newest are kept, so many bytes of them, but at least one."""
REASON = "a file of the lake cannot be read"

_NAMED = re.compile(r"([A-Za-z0-9_]+)/(part-[0-9a-f-]{36}\.parquet)")


def set_aside_named(context: Context, job: str, error: BaseException) -> list[str]:
    """Set aside the files that a failure names, if they are indeed damaged. Returns what was."""
    found: list[str] = []
    for table, path in sorted(set(_NAMED.findall(str(error)))):
        file = next((each for each in context.lake.files(table) if each.path == path), None)
        if file is not None and not readable(context.lake, table, file):
            set_aside(context, table, file, job)
            found.append(f"{table}/{path}")
    return found


def readable(lake: Lake, table: str, file: LakeFile) -> bool:
    path = lake.path(table, file)
    try:
        check_length(path, file.bytes)
        read_file(path)
    except FileDamaged:
        return False
    return True


def set_aside(context: Context, table: str, file: LakeFile, job: str) -> None:
    lake = context.lake
    again = _from_log(context, file) if table == "messages" else []
    mark = f"damaged {table}/{file.path}"
    if lake.progress("quarantine", mark) is None:
        row = _row(table, file, job, again=bool(again) or table == retained.TABLE)
        lake.append("quarantine", pa.Table.from_pylist([row], lake.schema("quarantine")), app=mark, version=1)
    if table == "messages" and not again:
        tell_broker(context.data, lake, archive.archived_to(lake), lost=file)  # its readers get to a gap
    if table == retained.TABLE:
        lake.commit(table, [], app=retained.NAME, version=0, remove=lake.files(table))
    else:
        lake.commit(table, again, app=mark, version=1, remove=[file], same_rows=bool(again))
    kept = lake.folder / table / FOLDER
    kept.mkdir(exist_ok=True)
    path = lake.path(table, file)
    if path.exists():
        path.rename(kept / path.name)
        _forget_oldest(kept)


def _forget_oldest(kept: Path) -> None:
    newest_first = sorted(kept.iterdir(), key=lambda each: each.stat().st_ctime, reverse=True)
    total = 0
    for path in newest_first:
        total += path.stat().st_size
        if total > KEPT_BYTES_MAX and path is not newest_first[0]:
            path.unlink()


def _from_log(context: Context, file: LakeFile) -> list[WrittenFile]:
    """The file's messages once more; none if the log does not have all of them any more."""
    log = LogFolder(context.log.folder)  # the archive uses the other one at the same time
    found: list[pa.RecordBatch] = []
    for split in log.splits(log.place_of(file.min_position).place, log.end().place):
        if split.base > file.max_position:
            break
        for batch in read_split(split):
            position = batch.column("position")
            inside = pc.and_(pc.greater_equal(position, file.min_position), pc.less_equal(position, file.max_position))
            found.append(batch.filter(inside))
    if sum(batch.num_rows for batch in found) != file.rows:
        return []
    return archive.write_messages(found, str(context.lake.folder))


def _row(table: str, file: LakeFile, job: str, again: bool) -> dict[str, Any]:
    """`again`: nothing of it is lost."""
    return {
        "time": int(time.time() * 1e6),
        "job": job,
        "reason": REASON,
        "detail": f"{table}/{file.path}: {file.rows} rows, " + ("made again" if again else "lost"),
        "first_position": file.low.get("position"),
        "last_position": file.high.get("position"),
    }
