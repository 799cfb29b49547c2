"""The lake: plain Delta tables, one folder each. A commit is atomic, carries its job's progress, and is on disk when
it returns.

Progress and data are one: a Delta *app transaction* (app id = the job, version = how far it has come) goes into the
same commit as the files. After kill -9 at any instant a job asks the table how far it came, and goes on from there:
nothing is missing, nothing is twice. Of two drivers that commit the same step, one is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from tidegate.errors import StorageError
from tidegate.log.files.disk import make_folder
from tidegate.pipeline.parquet import FileDamaged, WrittenFile, in_files, read_file, write_file
from tidegate.pipeline.schemas import TABLES, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHECKPOINT_COMMITS = 50
"""Delta's log is summed up after so many commits."""
LOG_RETENTION = "interval 1 hours"
"""How far back the table can be read as it was; also how long a slow reader may hold on to an old version."""
END = "end"
"""The app transaction of `messages` that has the position after the last message ever archived."""
TORN_MAX = 10
"""Torn commits and checkpoints of a table that are kept to be looked at."""
LISTING_MAX = 1_000_000
"""Spark would list the files again in a job of its own above this many; we have just listed them."""

_OURS = "tidegate.transactions"
"""In a commit's own description: how many app transactions a commit of ours has; they come last."""
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


class LakeDamaged(StorageError):
    """A table's log cannot be read."""


class LakeFile(NamedTuple):
    """A committed file. `low` and `high` hold the bounds of its columns, as far as they are known."""

    path: str
    rows: int
    bytes: int
    low: Mapping[str, Any]
    high: Mapping[str, Any]

    @property
    def min_position(self) -> int:
        return int(self.low["position"])

    @property
    def max_position(self) -> int:
        return int(self.high["position"])

    def overlaps(self, column: str, low: Any, high: Any) -> bool:
        """Whether it may hold values from `low` up to, not including, `high`."""
        if column not in self.low or column not in self.high:
            return True
        return bool(self.low[column] < high and self.high[column] >= low)


class Lake:
    """All tables below one folder. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tables: dict[str, DeltaTable] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._guard = threading.Lock()
        self._vacuumed: dict[str, float] = {}

    # ── looking ──

    def names(self) -> list[str]:
        """The tables that there are."""
        if not self.folder.is_dir():
            return []
        return sorted(each.name for each in self.folder.iterdir() if self.exists(each.name))

    def exists(self, name: str) -> bool:
        """Whether it has ever been committed to: a folder alone may be what is left of a driver that was killed."""
        return name in self._tables or any((self.folder / name / "_delta_log").glob("*.json"))

    def progress(self, name: str, app: str) -> int | None:
        """How far the job `app` has come with a table; None if it has never committed to it."""
        if not self.exists(name):
            return None
        with self._table(name) as table:
            return table.transaction_version(app)

    def files(self, name: str) -> list[LakeFile]:
        """The committed files; by position where they have one."""
        if not self.exists(name):
            return []
        with self._table(name) as table:
            actions = pa.table(table.get_add_actions(flatten=True))
        return _files(actions)

    def end(self) -> int:
        """The position after the last message that was archived, also if it has been deleted since."""
        reached = self.progress("messages", END) or 0
        return max([reached, *(file.max_position + 1 for file in self.files("messages"))])

    def rows(self, name: str) -> int:
        return sum(file.rows for file in self.files(name))

    def column(self, name: str, column: str) -> list[Any]:
        """One column of a small table."""
        if not self.exists(name):
            return []
        found: list[Any] = []
        for file in self.files(name):
            found += read_file(self.path(name, file), [column]).column(column).to_pylist()
        return found

    def path(self, name: str, file: LakeFile) -> Path:
        return self.folder / name / file.path

    def read(
        self,
        spark: SparkSession,
        name: str,
        positions: tuple[int, int] | None = None,
        files: Sequence[LakeFile] | None = None,
    ) -> DataFrame:
        """A table as Spark sees it: exactly the committed files, and of those only what may hold the `positions`.
        Raises FileDamaged if one of them is gone or not as long as it was: Spark takes an empty one for no rows."""
        from pyspark.sql import functions as f

        chosen = self.files(name) if files is None else list(files)
        if positions is not None:
            chosen = [file for file in chosen if file.overlaps("position", *positions)]
        schema = spark_schema(self.schema(name))
        if not chosen:
            return spark.createDataFrame([], schema)
        for file in chosen:
            check_length(self.path(name, file), file.bytes)
        spark.conf.set("spark.sql.sources.parallelPartitionDiscovery.threshold", LISTING_MAX)
        frame = spark.read.schema(schema).parquet(*[str(self.path(name, file)) for file in chosen])
        if positions is not None:
            frame = frame.where((f.col("position") >= positions[0]) & (f.col("position") < positions[1]))
        return frame

    def schema(self, name: str) -> pa.Schema:
        if name in TABLES:
            return TABLES[name]
        with self._table(name) as table:
            return pa.schema(table.schema().to_arrow())

    def description(self, name: str) -> str | None:
        """What was said of the table when it was made."""
        with self._table(name) as table:
            return table.metadata().description

    # ── writing ──

    def create(self, name: str, schema: pa.Schema | None = None, description: str | None = None) -> None:
        """Make the table if it is not there."""
        if not self.exists(name):
            with self._lock(name):
                self._create(name, schema, description)

    def commit(
        self,
        name: str,
        add: Sequence[WrittenFile],
        *,
        app: str,
        version: int,
        remove: Sequence[LakeFile] = (),
        same_rows: bool = False,
        also: Mapping[str, int] | None = None,
    ) -> None:
        """Name new files and forget old ones, in one step, with the job's progress. `same_rows`: the new files hold
        exactly what the old ones held, so that nobody who follows the table need look at them. `also`: other numbers
        to remember with the progress.

        Raises DeltaError if another process has taken the same step."""
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.name, file.bytes, {}, file.modified_ms, not same_rows, file.stats) for file in add
        ]
        actions += [RemoveAction(file.path, not same_rows, now_ms, file.bytes) for file in remove]
        reached = [Transaction(name, number, now_ms) for name, number in {app: version, **(also or {})}.items()]
        self.create(name)
        with self._table(name) as table:
            sync(self.folder / name)  # the new files' names, before the commit that tells of them
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                commit_properties=CommitProperties({_OURS: str(len(reached))}, app_transactions=reached),
                post_commithook_properties=_NO_HOOKS,
            )
            table.update_incremental()
            log = self.folder / name / "_delta_log"
            committed = table.version()
            sync(log / f"{committed:020d}.json")
            sync(log)
            if committed % CHECKPOINT_COMMITS == 0:
                self._checkpoint(table, log)

    def write(
        self,
        name: str,
        frame: DataFrame,
        *,
        app: str,
        version: int,
        remove: Sequence[LakeFile] = (),
        sort: Sequence[str] = (),
        schema: pa.Schema | None = None,
    ) -> int:
        """Write a DataFrame's rows, by the workers, and commit them. Returns how many there were."""
        self.create(name, schema)
        if sort:
            frame = frame.sortWithinPartitions(*sort)
        written = write_frame(frame, str(self.folder / name), self.schema(name))
        self.commit(name, written, app=app, version=version, remove=remove)
        return sum(file.rows for file in written)

    def append(self, name: str, rows: pa.Table, *, app: str, version: int) -> None:
        """Write rows that the driver holds."""
        self.create(name)
        folder = str(self.folder / name)
        written = [write_file(part, folder) for part in in_files(rows.cast(TABLES[name]).to_batches())]
        self.commit(name, written, app=app, version=version)

    def vacuum(self, name: str, keep_s: int) -> int:
        """Delete files that no commit has named for `keep_s`; looks that often at most. Returns how many."""
        if time.monotonic() - self._vacuumed.get(name, -keep_s) < keep_s:
            return 0
        self._vacuumed[name] = time.monotonic()
        with self._table(name) as table:
            gone = table.vacuum(
                retention_hours=max(1, keep_s // 3600),
                dry_run=False,
                enforce_retention_duration=False,
                post_commithook_properties=_NO_HOOKS,
                full=True,  # also what workers left that were killed
            )
            _sync_commits(self.folder / name / "_delta_log")  # two of its own, and the next one builds on them
        return len(gone)

    # ── inside ──

    @contextlib.contextmanager
    def _table(self, name: str) -> Iterator[DeltaTable]:
        """The table as it is now; one thread at a time."""
        with self._lock(name):
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = self._open(name)
            else:
                try:
                    table.update_incremental()
                except DeltaError:
                    table = self._tables[name] = self._open(name)
            yield table

    def _lock(self, name: str) -> threading.RLock:
        with self._guard:
            return self._locks.setdefault(name, threading.RLock())

    def _create(self, name: str, schema: pa.Schema | None, description: str | None) -> None:
        if self.exists(name):
            return
        folder = self.folder / name
        make_folder(folder)
        self._tables[name] = DeltaTable.create(
            str(folder),
            schema=TABLES[name] if schema is None else schema,
            mode="ignore",
            description=description,
            configuration={"delta.logRetentionDuration": LOG_RETENTION},
        )
        for path in (folder / "_delta_log" / f"{0:020d}.json", folder / "_delta_log", folder, self.folder):
            sync(path)

    def _open(self, name: str) -> DeltaTable:
        folder = self.folder / name
        log = folder / "_delta_log"
        _set_aside_torn_commit(log)
        try:
            table = DeltaTable(str(folder))
        except TableNotFoundError:
            raise LakeDamaged(f"{folder} is not a table of the lake") from None
        except Exception as error:
            if _set_aside_torn_checkpoint(log):
                return self._open(name)
            raise LakeDamaged(f"the table {folder} cannot be read: {str(error).splitlines()[0]}") from error
        _sync_commits(log)  # whoever made the last one may have been killed before it was on disk
        return table

    def _checkpoint(self, table: DeltaTable, log: Path) -> None:
        """Sum up Delta's log, and only when that is on disk delete what it replaces."""
        table.create_checkpoint()
        for path in log.glob("*.checkpoint*.parquet"):
            sync(path)
        sync(log / "_last_checkpoint")
        sync(log)
        table.cleanup_metadata()


def write_frame(frame: DataFrame, folder: str, schema: pa.Schema) -> list[WrittenFile]:
    """Have the workers write a DataFrame's partitions as files."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in in_files(batches):
            file = write_file(table.select(schema.names).cast(schema), folder)
            yield pa.RecordBatch.from_pylist([file._asdict()])

    facts = frame.mapInArrow(write, "name string, rows long, bytes long, modified_ms long, stats string")
    return [WrittenFile(*row) for row in facts.collect()]


def _files(actions: pa.Table) -> list[LakeFile]:
    bounds: dict[str, list[tuple[str, list[Any]]]] = {"min.": [], "max.": []}
    for column in actions.column_names:
        for prefix, found in bounds.items():
            if column.startswith(prefix):
                found.append((column.removeprefix(prefix), actions.column(column).to_pylist()))
    plain = zip(
        actions.column("path").to_pylist(),
        actions.column("num_records").to_pylist(),
        actions.column("size_bytes").to_pylist(),
        strict=True,
    )
    files = [
        LakeFile(
            path,
            rows,
            size,
            {name: values[i] for name, values in bounds["min."] if values[i] is not None},
            {name: values[i] for name, values in bounds["max."] if values[i] is not None},
        )
        for i, (path, rows, size) in enumerate(plain)
    ]
    return sorted(files, key=lambda file: (file.low.get("position", 0), file.path))


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_commits(log: Path) -> None:
    for path in log.glob("*.json"):
        sync(path)
    sync(log)


def _set_aside_torn_commit(log: Path) -> None:
    """The newest commit, if power was lost before it was synced and left it torn. Nobody was promised what it said,
    so the step that it ended happens again."""
    commits = sorted(each for each in log.glob("*.json") if each.stem.isdigit())
    if commits and not _whole(commits[-1]):
        _rename_torn(commits[-1])
        sync(log)


def _rename_torn(path: Path) -> None:
    path.rename(path.with_suffix(".torn"))
    torn = sorted(path.parent.glob("*.torn"), key=lambda each: each.stat().st_ctime)
    for each in torn[:-TORN_MAX]:
        each.unlink()


def _whole(commit: Path) -> bool:
    try:
        actions = [json.loads(line) for line in commit.read_text("utf-8").splitlines()]
        promised = sum(int(each.get("commitInfo", {}).get(_OURS, 0)) for each in actions)
        return bool(actions) and sum("txn" in each for each in actions) >= promised
    except (ValueError, AttributeError):
        return False


def _set_aside_torn_checkpoint(log: Path) -> bool:
    """The newest checkpoint, if it is missing or torn: what it sums up is deleted only after it was synced, so it is
    still there. Returns whether there was one."""
    hint = log / "_last_checkpoint"
    newest = sorted(log.glob("*.checkpoint*.parquet"))[-1:]
    if newest and newest[0].stat().st_size:
        try:
            read_file(newest[0])
            newest = []
        except FileDamaged:
            pass
    if not newest and not hint.exists():
        return False
    for path in newest:
        _rename_torn(path)
    hint.unlink(missing_ok=True)  # without it the newest that is there is looked for
    sync(log)
    return True


def check_length(path: Path, size: int) -> None:
    """Raises FileDamaged if a file is gone, or not as long as its commit says."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise FileDamaged(path, "it is not there") from None
    if found != size:
        raise FileDamaged(path, f"it has {found} bytes, and had {size} when it was committed")

