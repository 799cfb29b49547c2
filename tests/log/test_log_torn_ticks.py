"""Messages and the state changes that belong to them are stored as one, also when a write is torn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tidegate.adapters.embedded.commitlog import EmbeddedLog
from tidegate.log.files import SegmentedLog
from tidegate.log.rows import Rows
from tidegate.log.run import Run
from tidegate.session import changes


def append(folder: Path, *ticks: tuple[list[Run], list[bytes]]) -> list[int]:
    """Each tick in one append; the sizes of the segment after each."""
    loop = asyncio.new_event_loop()
    log = EmbeddedLog(SegmentedLog.open(folder), wait_for_disk=True, loop=loop, on_failure=lambda error: None)
    sizes = []
    for runs, records in ticks:
        log.append(Rows.of(runs), records, 1)
        sizes.append(segment(folder).stat().st_size)
    log.close()
    loop.close()
    (folder / "CLEAN").unlink()
    return sizes


def segment(folder: Path) -> Path:
    return max(folder.glob("*.log"))


def message(payload: bytes) -> Run:
    return Run(b"t", b"publisher", b"default", 2, [payload])


@pytest.mark.attack("C4", "C2")
@pytest.mark.parametrize("part", [0.55, 0.75, 0.99])
def test_a_message_is_not_kept_without_the_state_change_that_was_stored_with_it(tmp_path, part):
    """Else a QoS 2 message whose write was torn between the two is taken again from its publisher: twice in the log."""
    known = ([message(b"whole")], [changes.inbounds(1, [b"\0\1"])])
    torn = ([message(b"torn")], [changes.inbounds(1, [b"\0\2"])])
    before, after = append(tmp_path, known, torn)
    with segment(tmp_path).open("r+b") as file:
        file.truncate(before + int((after - before) * part))
    log = SegmentedLog.open(tmp_path)
    found = log.read(0, bytes_max=1 << 20, end=log.end)
    kept = {payload for run in found.runs for payload in run.payloads}
    taken = [changes.read_pids(record) for records in log.changes_from(0) for record in records]
    log.close(clean=False)
    assert (kept, taken) == ({b"whole"}, [(1, [b"\0\1"])])
