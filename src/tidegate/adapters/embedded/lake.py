"""Messages read back from the lake's table `messages`, in the order of their positions.

The table's log names its files, each with the range of positions that it alone holds. Within a file the rows are
sorted by topic and position, so the statistics of its row groups tell where a topic can be. A file is decoded once for
all that read it at the time, put in order, and from then on handed out in slices.

Files may be replaced at any time (compaction, retention): a file that is gone is looked for in the table's log again.
A file that is still named there but missing or damaged is lost: it is counted and stepped over; and so is one that
the pipeline has taken out for that reason.

Everything here happens on one thread. pyarrow and deltalake are imported when a lake is there to be read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.errors import StorageError
from tidegate.limits import LAKE_CACHE_BYTES_MAX
from tidegate.log.index import Wanted
from tidegate.log.reading import FOUND_MAX, Read
from tidegate.log.run import NO_EXPIRY, RETAIN, Run
from tidegate.log.unreadable import Ailing
from tidegate.ports.archive import NOTHING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

FILES_MAX = 4
"""A read looks through this many files at most, so that it returns in time when nothing matches."""
REFRESHES_MAX = 3
"""How often a read that finds a file gone looks at the table's log again before it is tried later."""
WINDOW_ROWS = 4096
"""Rows whose topics are matched at once."""
MESSAGE_BYTES = 64
"""What a message counts beside its payload."""

_COLUMNS = [
    "position", "time", "tenant", "topic", "publisher", "qos", "retain", "uuid", "expiry", "properties", "payload",
]  # fmt: skip
_FILLED = ["position", "time", "tenant", "topic", "publisher", "qos", "retain", "payload"]
_NAMES = ["tenant", "topic", "publisher"]
_NO_UUID = bytes(16)

Report = Callable[[str, Mapping[str, object]], None]


class NoPackages(StorageError):
    """What reads the lake is not installed."""


class Lost(NamedTuple):
    """Messages whose file was damaged and has been taken out of the table."""

    first: int  # lowest position
    last: int
    messages: int


class LakeFile(NamedTuple):
    path: Path
    rows: int
    first: int  # lowest position
    last: int  # highest
    last_ms: int  # newest time
    gone: bool = False  # only its place is left

    def rows_from(self, position: int) -> int:
        """At most so many of its rows lie at or after a position."""
        return min(self.rows, self.last - max(position, self.first) + 1)


class Listing:
    """The committed files by position, as of a moment."""

    __slots__ = ("_lasts", "archived", "files")

    def __init__(self, files: Sequence[LakeFile], archived: int) -> None:
        self.files = tuple(sorted(files, key=lambda file: file.first))
        self.archived = archived  # it names every file with positions below this one
        self._lasts = [file.last for file in self.files]

    @property
    def floor(self) -> int:
        return self.files[0].first if self.files else NOTHING

    @property
    def end(self) -> int:
        """The position behind the last one that it knows of."""
        return self._lasts[-1] + 1 if self.files else 0

    def outgrown(self, archived: int) -> bool:
        """Whether its floor means nothing any more: it knows of no file, and now there are some."""
        return not self.files and self.archived < archived

    def at(self, position: int) -> LakeFile | None:
        """The file that holds the position, or the first one behind it."""
        index = bisect_left(self._lasts, position)
        return self.files[index] if index < len(self.files) else None

    def since(self, time_ms: int) -> Iterator[LakeFile]:
        """The files that may hold something of that time or later."""
        return (file for file in self.files if file.last_ms >= time_ms and not file.gone)


class _Chosen:
    """What a `Wanted` has found out about a file: which row groups to read, and which topics it takes of them."""

    __slots__ = ("groups", "takes")

    def __init__(self, groups: tuple[int, ...] | None) -> None:
        self.groups = groups  # None: all
        self.takes: np.ndarray[Any, Any] | None = None  # per topic of the block: 1 yes, 0 no, -1 not looked at


class Lake:
    """The table in `folder`. `report` hears of files that are lost."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.folder = folder
        self.listing = Listing((), -1)
        self.lost: dict[Path, int] = {}  # rows of unreadable files
        self.gone: tuple[Lost, ...] = ()  # what the table does not have any more
        self._report = report
        self._blocks: OrderedDict[tuple[Path, tuple[int, ...] | None], Block] = OrderedDict()
        self._bytes = 0
        self._ailing: dict[Path, Ailing] = defaultdict(Ailing)

    def refresh(self, archived: int) -> None:
        """Read the table's log. Raises StorageError."""
        files = sorted(self._committed(), key=lambda file: file.first)
        self.listing = Listing([*files, *self._gaps(files)], archived)
        paths = {file.path for file in self.listing.files}
        for key in [key for key in self._blocks if key[0] not in paths]:
            self._bytes -= self._blocks.pop(key).bytes
        for path in self._ailing.keys() - paths:
            del self._ailing[path]

    def _committed(self) -> list[LakeFile]:
        try:
            import pyarrow as pa
            from deltalake import DeltaTable
        except ImportError as error:
            hint = "pip install 'tidegate[pipeline]'"
            raise NoPackages(f"reading the lake needs {error.name}, which is not installed: {hint}") from error
        try:
            if not DeltaTable.is_deltatable(str(self.folder)):
                raise StorageError(f"there is no table in {self.folder}")
            actions = pa.table(DeltaTable(str(self.folder)).get_add_actions(flatten=True))
            times = actions["max.time"].cast(pa.int64()).to_pylist()
            columns = [actions[name].to_pylist() for name in ("path", "num_records", "min.position", "max.position")]
        except StorageError:
            raise
        except Exception as error:  # deltalake raises several kinds for a log that it cannot read
            raise StorageError(f"cannot read the table in {self.folder}: {error}") from error
        files = []
        for path, rows, first, last, time_us in zip(*columns, times, strict=True):
            if first is None or last is None:
                self._lose(self.folder / path, rows or 0, "the table's log does not say which positions it holds")
            else:
                last_ms = NOTHING if time_us is None else time_us // 1000
                files.append(LakeFile(self.folder / path, rows or 0, first, last, last_ms))
        return files

    def _gaps(self, files: Sequence[LakeFile]) -> Iterator[LakeFile]:
        """What is gone, as far as it lies between files: what is older is a matter of retention."""
        lasts = [file.last for file in files]
        for lost in self.gone:
            at = bisect_left(lasts, lost.first)
            if at > 0 and (at == len(files) or lost.last < files[at].first):
                name = f"positions {lost.first} to {lost.last}"
                yield LakeFile(self.folder / name, lost.messages, lost.first, lost.last, NOTHING, gone=True)

    # ── reading ──

    def read(self, position: int, end: int, bytes_max: int, wanted: Wanted | None, archived: int) -> Read:
        """Messages from `position` up to `end`; all below `archived` are there. Raises OSError or StorageError for
        what may be different at the next attempt."""
        if wanted is not None:
            wanted.begin()
        runs: list[Run] = []
        damaged = refreshes = 0
        budget = bytes_max
        for _ in range(FILES_MAX):
            if budget <= 0:
                return Read(runs, position, damaged)
            while True:
                if position < self.listing.floor:
                    return Read(runs, position, damaged)  # retention has been here: the caller compares
                file = self.listing.at(position)
                if file is None and self.listing.archived < archived:
                    self.refresh(archived)
                    continue
                if file is None or file.first >= end:
                    return Read(runs, max(position, end), damaged)
                if file.gone:
                    block, lost = None, self._lose(file.path, file.rows, "its file was damaged and is gone")
                    break
                try:
                    block, lost = self._open(file, wanted)
                    break
                except FileNotFoundError:
                    if refreshes == REFRESHES_MAX:
                        raise
                    refreshes += 1
                    self.refresh(archived)
                    if self.listing.at(position) == file:
                        block, lost = None, self._lose(file.path, file.rows, "the file is missing")
                        break
            damaged += min(lost, file.rows_from(position))
            upto = min(end, file.last + 1)
            if block is None:
                position = max(position, upto)
            else:
                found, position, spent = block.read(position, upto, budget, wanted, _chosen(wanted, file.path))
                runs += found
                budget -= spent
        return Read(runs, position, damaged)

    def position_at_time(self, time_ms: int, archived: int) -> int | None:
        """The first position with a time not before `time_ms`; None if all are older. Raises like `read`."""
        found = self._listed_position(time_ms)
        if found is None and self.listing.archived < archived:
            self.refresh(archived)
            found = self._listed_position(time_ms)
        return found

    def _listed_position(self, time_ms: int) -> int | None:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        listing = self.listing
        for file in listing.since(time_ms):
            try:
                rows = pq.read_table(file.path, columns=["position", "time"], use_threads=False)
            except FileNotFoundError:
                self.refresh(listing.archived)
                return file.first if file in self.listing.files else self._listed_position(time_ms)
            except Exception as error:
                if not _is_damage(error, self._ailing[file.path]):
                    raise
                return file.first  # nobody knows better; whoever reads from here on steps over it
            newer = rows.filter(pc.greater_equal(_milliseconds(rows["time"]), time_ms))
            if len(newer):
                return int(pc.min(newer["position"]).as_py())
        return None

    def _open(self, file: LakeFile, wanted: Wanted | None) -> tuple[Block | None, int]:
        """The file decoded as far as it may hold something wanted, None if it holds nothing, and how many rows of it
        are lost. These are told once to each `wanted`, which passes them once."""
        first_look = wanted is not None and file.path not in wanted.found
        try:
            if first_look:
                assert wanted is not None
                while len(wanted.found) >= FOUND_MAX:
                    del wanted.found[next(iter(wanted.found))]
                wanted.found[file.path] = _Chosen(_choose(file.path, wanted))
            chosen = _chosen(wanted, file.path)
            groups = None if chosen is None else chosen.groups
            if groups == ():
                return None, 0
            block = self._blocks.get((file.path, groups))
            if block is None:
                block = self._decode(file.path, groups)
            else:
                self._blocks.move_to_end((file.path, groups))
        except Exception as error:
            if not _is_damage(error, self._ailing[file.path]):
                if first_look and wanted is not None:
                    wanted.found.pop(file.path, None)  # nothing has been told yet
                raise
            return None, self._lose(file.path, file.rows, str(error))
        return block, block.lost if first_look else 0

    def _decode(self, path: Path, groups: tuple[int, ...] | None) -> Block:
        block = decode(path, groups, self._ailing[path])
        del self._ailing[path]
        if block.lost:
            self._lose(path, block.lost, block.why)
        self._bytes += block.bytes
        while self._blocks and self._bytes > LAKE_CACHE_BYTES_MAX:
            self._bytes -= self._blocks.popitem(last=False)[1].bytes
        self._blocks[path, groups] = block
        return block

    def _lose(self, path: Path, rows: int, why: str) -> int:
        if self.lost.get(path, -1) < rows:
            self.lost[path] = rows
            self._report("lake.damaged", {"file": path.name, "messages": rows, "why": why})
        return rows


def _chosen(wanted: Wanted | None, path: Path) -> _Chosen | None:
    found = None if wanted is None else wanted.found.get(path)
    return found if isinstance(found, _Chosen) else None


def _choose(path: Path, wanted: Wanted) -> tuple[int, ...] | None:
    """The row groups whose topics may be wanted; None for all."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        column = metadata.schema.names.index("topic")
        groups = []
        for group in range(metadata.num_row_groups):
            known = metadata.row_group(group).column(column).statistics
            if known is None or not known.has_min_max or _overlaps(wanted, known.min_raw, known.max_raw):
                groups.append(group)
        return None if len(groups) == metadata.num_row_groups else tuple(groups)


def _overlaps(wanted: Wanted, lowest: bytes, highest: bytes) -> bool:
    if any(lowest <= topic <= highest for topic in wanted.exact):
        return True
    prefixes = wanted.prefixes if wanted.match is not None else ()
    return any(lowest[: len(prefix)] <= prefix <= highest for prefix in prefixes)


def _is_damage(error: Exception, ailing: Ailing) -> bool:
    """Whether it is the content of a file that is at fault, or counts as lost; not a moment without descriptors or
    memory, and not a mistake of ours."""
    import pyarrow as pa

    if isinstance(error, FileNotFoundError | pa.ArrowMemoryError):
        return False  # what is missing is looked for
    if isinstance(error, OSError):
        return ailing.is_lost(error)
    # The last two: names that are no text, or not those that they should be.
    return isinstance(error, pa.ArrowException | ValueError | LookupError)


# ── decoded files ──


class Block:
    """Rows of a file in the order of their positions, with names as codes into dictionaries."""

    def __init__(self, table: pa.Table, lost: int, why: str) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        self.lost = lost  # rows that could not be decoded
        self.why = why
        if any(table[name].null_count for name in _FILLED):
            raise pa.ArrowInvalid("a value is missing that every message has")
        positions = table["position"].to_numpy()
        order = np.argsort(positions, kind="stable")
        table = table.unify_dictionaries().take(pa.array(order)).combine_chunks()
        self.positions = positions[order]
        self.topics, self._topic = _dictionary(table["topic"])
        self._publishers, self._publisher = _dictionary(table["publisher"])
        self._tenants, self._tenant = _dictionary(table["tenant"])
        self._flags = table["qos"].to_numpy() | table["retain"].to_numpy() * RETAIN
        self._times_ms = _milliseconds(table["time"]).to_numpy()
        self._payloads = _whole(table["payload"])
        self._sizes = pc.binary_length(self._payloads).to_numpy() + MESSAGE_BYTES
        self._properties = _filled(table["properties"], b"")
        self._expiries = _filled(table["expiry"], NO_EXPIRY)
        self._uuids = _filled(table["uuid"], _NO_UUID)
        # Whether a row begins a run: it does not go on where the row before it stopped.
        self._begins = np.ones(len(positions), bool)
        self._begins[1:] = np.diff(self.positions) != 1
        for column in (self._topic, self._publisher, self._tenant, self._flags, self._times_ms):
            self._begins[1:] |= column[1:] != column[:-1]
        self.bytes = table.nbytes + 30 * len(positions) + 100 * len(self.topics)

    def read(
        self, position: int, upto: int, bytes_max: int, wanted: Wanted | None, chosen: _Chosen | None
    ) -> tuple[list[Run], int, int]:
        """Wanted messages from `position` until `upto` or about `bytes_max`: them, the position reached, the bytes."""
        import numpy as np

        runs: list[Run] = []
        spent = 0
        start, stop = (int(at) for at in np.searchsorted(self.positions, (position, upto)))
        window = WINDOW_ROWS
        while start < stop:
            after = min(start + window, stop)
            rows = self._wanted_rows(start, after, wanted, chosen)
            ends = np.cumsum(self._sizes[rows])
            fits = int(np.searchsorted(ends, bytes_max - spent)) + 1
            if len(rows):
                runs += self._runs(rows[:fits])
                spent += int(ends[min(fits, len(rows)) - 1])
            if spent >= bytes_max:
                return runs, int(self.positions[rows[fits - 1]]) + 1, spent
            start = after
            window *= 2
        return runs, max(position, upto), spent

    def _wanted_rows(
        self, start: int, stop: int, wanted: Wanted | None, chosen: _Chosen | None
    ) -> np.ndarray[Any, Any]:
        import numpy as np

        if wanted is None or chosen is None:
            return np.arange(start, stop)
        if chosen.takes is None:
            chosen.takes = np.full(len(self.topics), -1, np.int8)
        codes = self._topic[start:stop]
        takes = chosen.takes[codes]
        if takes.min() < 0:
            for code in np.unique(codes[takes < 0]).tolist():
                chosen.takes[code] = wanted(self.topics[code])
            takes = chosen.takes[codes]
        return start + np.flatnonzero(takes)

    def _runs(self, rows: np.ndarray[Any, Any]) -> list[Run]:
        import numpy as np

        begins = self._begins[rows]  # also after a row that is left out: its topic was another
        begins[0] = True
        starts = np.flatnonzero(begins)
        heads = rows[starts]
        first = starts.tolist()
        after = [*first[1:], len(rows)]
        payloads = _values(self._payloads, rows)
        return [
            Run(
                self.topics[topic], self._publishers[publisher], self._tenants[tenant], flags,
                payloads[a:b], properties, expiries, uuids, base, time_ms,
            )
            for a, b, topic, publisher, tenant, flags, base, time_ms, properties, expiries, uuids in zip(
                first,
                after,
                self._topic[heads].tolist(),
                self._publisher[heads].tolist(),
                self._tenant[heads].tolist(),
                self._flags[heads].tolist(),
                self.positions[heads].tolist(),
                self._times_ms[heads].tolist(),
                _cuts(self._properties, rows, first, after, b""),
                _cuts(self._expiries, rows, first, after, NO_EXPIRY),
                _cuts(self._uuids, rows, first, after, _NO_UUID),
                strict=False,
            )
        ]  # fmt: skip


def decode(path: Path, groups: tuple[int, ...] | None, ailing: Ailing) -> Block:
    """Row groups of a file, all for None. Raises OSError and Arrow's exceptions if it is no such file at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, read_dictionary=_NAMES, page_checksum_verification=True) as file:
        numbers = list(range(file.num_row_groups) if groups is None else groups)
        try:
            return Block(file.read_row_groups(numbers, _COLUMNS, use_threads=False), 0, "")
        except Exception as error:
            if not _is_damage(error, ailing):
                raise
            why = str(error)
        # Some of it is damaged: take the rest.
        tables = [file.read_row_groups([], _COLUMNS)]
        lost = 0
        for number in numbers:
            try:
                tables.append(file.read_row_group(number, _COLUMNS, use_threads=False))
            except Exception as error:
                if not _is_damage(error, ailing):
                    raise
                lost += file.metadata.row_group(number).num_rows
        return Block(pa.concat_tables(tables), lost, why)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _dictionary(column: pa.ChunkedArray) -> tuple[list[bytes], np.ndarray[Any, Any]]:
    import pyarrow as pa

    coded = _whole(column)
    names, codes = coded.dictionary.cast(pa.binary()).to_pylist(), coded.indices.to_numpy()
    if len(codes) and not 0 <= codes.min() <= codes.max() < len(names):
        raise pa.ArrowInvalid("a name is missing")
    return names, codes


def _milliseconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa

    return times.cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())


def _filled(column: pa.ChunkedArray, missing: object) -> pa.Array | None:
    """None if no row has a value."""
    return None if column.null_count == len(column) else _whole(column.fill_null(missing))


def _values(column: pa.Array, rows: np.ndarray[Any, Any]) -> list[Any]:
    import pyarrow as pa

    if rows[-1] - rows[0] == len(rows) - 1:
        found = column.slice(int(rows[0]), len(rows))
    else:
        found = column.take(pa.array(rows))
    values: list[Any] = found.to_pylist()
    return values


def _cuts(
    column: pa.Array | None, rows: np.ndarray[Any, Any], first: list[int], after: list[int], missing: object
) -> Iterator[list[Any] | None]:
    """Each run's share of an optional column; None where no message of the run has a value."""
    if column is None:
        return repeat(None)
    values = _values(column, rows)
    cuts = (values[a:b] for a, b in zip(first, after, strict=True))
    return (cut if cut.count(missing) < len(cut) else None for cut in cuts)
