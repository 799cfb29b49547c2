"""Compaction: many small files into few of a sensible size, sorted as one; and files that nothing needs any more off
the disk. The rows stay the same, so nobody who follows a table sees a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.pipeline.jobs import Batch, Context
from tidegate.pipeline.lake import Lake, LakeFile
from tidegate.pipeline.parquet import (
    FILE_BYTES_MAX,
    FILE_ROWS_MAX,
    WrittenFile,
    data_bytes,
    in_files,
    read_file,
    sorted_by_topic,
    write_file,
)

NAME = "compaction"
INTERVAL_S = 30.0

SMALL_ROWS = FILE_ROWS_MAX // 2
SMALL_BYTES = FILE_BYTES_MAX // 4
FILES_MIN = 16
"""So many small files in a row are worth being made one."""
VACUUM_S = 3600
"""How long a file that nothing names is left for readers that still use it, and how often such files are looked for."""

TABLES = ("messages", "sessions", "dead_letters", "quarantine")
"""The tables that only grow; others are rewritten by their own jobs. Extracted tables come on top."""

_data_bytes = lru_cache(1 << 16)(data_bytes)  # a file never changes


def run(context: Context) -> Batch | None:
    """One group of files."""
    lake = context.lake
    names = [name for name in lake.names() if name in TABLES or name.startswith("json_")]
    waiting = [(name, group) for name in names for group in small_groups(lake, name)]
    if not waiting:
        for name in lake.names():
            lake.vacuum(name, VACUUM_S)
        return None
    name, group = waiting[0]
    [made] = rewrite(context, name, [group])
    version = (lake.progress(name, NAME) or 0) + 1
    lake.commit(name, made, app=NAME, version=version, remove=group, same_rows=True)
    left = sum(file.rows for _, later in waiting[1:] for file in later)
    return Batch(sum(file.rows for file in group), version, left)


def small_groups(lake: Lake, name: str) -> list[list[LakeFile]]:
    return groups(lake.files(name), lambda file: _data_bytes(lake.path(name, file)))


def groups(files: Sequence[LakeFile], data: Callable[[LakeFile], int]) -> list[list[LakeFile]]:
    """Neighbours that are small, as many as make one file. They stay in order of position, so that files of messages
    still do not overlap. `data` are a file's bytes before compression: those are what a reader holds in memory, and
    what the new file is cut by."""
    found: list[list[LakeFile]] = []
    group: list[LakeFile] = []
    rows = size = 0
    for file in files:
        small = file.rows < SMALL_ROWS and file.bytes < SMALL_BYTES and data(file) < SMALL_BYTES
        if not small or rows + file.rows > FILE_ROWS_MAX or size + data(file) > FILE_BYTES_MAX:
            found.append(group)
            group, rows, size = [], 0, 0
        if small:
            group.append(file)
            rows, size = rows + file.rows, size + data(file)
    found.append(group)
    return [each for each in found if len(each) >= FILES_MIN]


def rewrite(
    context: Context, name: str, groups: Sequence[Sequence[LakeFile]], without: str | None = None
) -> list[list[WrittenFile]]:
    """Have the workers put each group's rows into new files, `without` those of a tenant. Nothing is committed."""
    if not groups:
        return []
    work = partial(merge_files, str(context.lake.folder / name), without)
    paths = [[file.path for file in group] for group in groups]
    return context.spark.sparkContext.parallelize(paths, len(paths)).map(work).collect()


def merge_files(folder: str, without: str | None, paths: Iterable[str]) -> list[WrittenFile]:
    """On a worker. Raises FileDamaged."""
    whole = pa.concat_tables([read_file(Path(folder, path)) for path in paths])
    if without is not None:
        whole = whole.filter(pc.not_equal(whole["tenant"], without))
    sort = "topic" in whole.column_names and "position" in whole.column_names
    if sort:
        whole = whole.sort_by("position")
        column = whole.schema.get_field_index("topic")
        names = whole.column(column).dictionary_encode()
        whole = whole.set_column(column, whole.schema.field(column).with_type(names.type), names)
    parts = (part for part in in_files(whole.to_batches()) if part.num_rows)
    return [write_file(sorted_by_topic(part) if sort else part, folder) for part in parts]
