"""A lake for tests, made as the archive makes it: from the segments of a broker's log, or from rows given.

Files hold disjoint ranges of positions, rows sorted by topic and position; the table's log names them with
statistics; `to-broker.json` says how far it reaches. No Spark: a test has its lake in milliseconds.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from tidegate.log.frame import MESSAGES as MESSAGES_FRAME
from tidegate.log.segment import SEGMENT_HEADER_BYTES, Status, parse_segment_header, scan, segment_name, sequence_of
from tidegate.pipeline.decode import frame_to_arrow
from tidegate.pipeline.schemas import MESSAGES

ROWS_PER_FILE = 500_000
ROWS_PER_GROUP = 65_536


def rows_table(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Rows for `messages`; what a row leaves out is as for a plain QoS 1 message."""
    plain = {"tenant": "default", "publisher": "p", "qos": 1, "retain": False, "time": 0, "payload": b""}
    return pa.Table.from_pylist([plain | row for row in rows], schema=MESSAGES)


class TestLake:
    """The table `messages` and the file that tells the broker of it, in a broker's data folder."""

    __test__ = False

    def __init__(self, data: Path) -> None:
        self.data = data
        self.folder = data / "lake" / "messages"
        self.segment = 0  # the first that is not archived
        self.position = 0
        self.verdicts: list[dict[str, Any]] = []
        self.lost: list[dict[str, int]] = []

    # ── from the log ──

    def archive(self, *, segments: int | None = None, rows_per_file: int = ROWS_PER_FILE) -> TestLake:
        """Archive sealed segments, so many or all, and tell the broker."""
        log = self.data / "log"
        sequences = sorted(n for path in log.glob("*.log") if (n := sequence_of(path.name)) is not None)
        sealed = [n for n in sequences[:-1] if n >= self.segment][:segments]
        tables = []
        for sequence in sealed:
            content = (log / segment_name(sequence)).read_bytes()
            header = parse_segment_header(content)
            assert header is not None
            for found in scan(content, SEGMENT_HEADER_BYTES, header.writer, header.base):
                assert found.status is Status.VALID and found.header is not None
                self.position = max(self.position, found.header.end)
                if found.header.kind == MESSAGES_FRAME:
                    tables.append(pa.Table.from_batches([frame_to_arrow(content, found.offset)]))
        if tables:
            self.add(pa.concat_tables(tables).select(MESSAGES.names).cast(MESSAGES), rows_per_file)
        following = [n for n in sequences if n not in sealed and n >= self.segment]
        self.segment = following[0] if following else self.segment
        return self.tell()

    def tell(self) -> TestLake:
        """Write `to-broker.json`."""
        said = {
            "version": 1,
            "archived_segment": self.segment,
            "archived_position": self.position,
            "lake": str(self.folder.parent),
            "lost": self.lost,
            "verdicts": self.verdicts,
        }
        self.tell_raw(json.dumps(said))
        return self

    def tell_raw(self, text: str) -> None:
        place = self.data / "pipeline" / "to-broker.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(place)

    # ── the table ──

    def table(self) -> DeltaTable:
        if not DeltaTable.is_deltatable(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            return DeltaTable.create(str(self.folder), MESSAGES)
        return DeltaTable(str(self.folder))

    def files(self) -> list[Path]:
        """The committed files, by position."""
        actions = pa.table(self.table().get_add_actions(flatten=True)).sort_by("min.position")
        return [self.folder / name for name in actions["path"].to_pylist()]

    def add(
        self, messages: pa.Table, rows_per_file: int = ROWS_PER_FILE, rows_per_group: int = ROWS_PER_GROUP
    ) -> list[Path]:
        """Commit rows, in order of position, as one or several files."""
        actions = [
            self._write(messages.slice(start, rows_per_file), rows_per_group)
            for start in range(0, len(messages), rows_per_file)
        ]
        self.table().create_write_transaction(actions, "append", MESSAGES)
        return [self.folder / action.path for action in actions]

    def compact(self, files: Sequence[Path], *, vacuum: bool = True) -> Path:
        """Replace some files by one that holds the same, and delete them."""
        rows = pa.concat_tables([pq.read_table(path, schema=MESSAGES) for path in files]).sort_by("position")
        whole = self._write(rows, ROWS_PER_GROUP)
        self.replace(files, [whole], vacuum=vacuum)
        return self.folder / whole.path

    def remove(self, files: Sequence[Path]) -> None:
        """What the lake's own retention does."""
        self.replace(files, [], vacuum=True)

    def replace(self, files: Sequence[Path], added: list[AddAction], *, vacuum: bool) -> None:
        now_ms = int(time.time() * 1000)
        gone = [RemoveAction(path.name, True, now_ms, path.stat().st_size) for path in files]
        self.table().create_write_transaction([*added, *gone], "append", MESSAGES)
        for path in files if vacuum else ():
            path.unlink()

    def _write(self, messages: pa.Table, rows_per_group: int) -> AddAction:
        name = f"{uuid.uuid4()}.parquet"
        path = self.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            messages.sort_by([("topic", "ascending"), ("position", "ascending")]),
            path,
            row_group_size=rows_per_group,
            compression="zstd",
            write_page_checksum=True,
        )
        return AddAction(name, path.stat().st_size, {}, int(time.time() * 1000), True, json.dumps(_stats(messages)))


def _stats(messages: pa.Table) -> dict[str, Any]:
    ends = {name: pc.min_max(messages[name]).as_py() for name in ("position", "time", "topic")}
    for at in ("min", "max"):
        ends["time"][at] = ends["time"][at].isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        "numRecords": len(messages),
        "minValues": {name: found["min"] for name, found in ends.items()},
        "maxValues": {name: found["max"] for name, found in ends.items()},
        "nullCount": {name: messages[name].null_count for name in messages.column_names},
    }


def flip_bytes(path: Path, at: float) -> None:
    """Damage a file somewhere: `at` is a share of its length."""
    content = bytearray(path.read_bytes())
    place = int(len(content) * at)
    for i in range(place, min(place + 64, len(content))):
        content[i] ^= 0xFF
    path.write_bytes(content)
