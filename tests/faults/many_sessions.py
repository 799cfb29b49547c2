"""A log folder with very many sessions, as an unclean stop leaves it.

They are written as the broker writes them, which is quicker than to connect them: most in a snapshot, the rest as
changes after it.
"""

from __future__ import annotations

import time
from pathlib import Path

from tidegate.log.files import SegmentedLog
from tidegate.log.frame import encode_changes
from tidegate.log.snapshot import SnapshotWriter
from tidegate.session import changes

STEP = 2_000
EXPIRY_S = 86_400


def records(number: int, position: int, away_ms: int) -> list[bytes]:
    """A session with two filters, one of them with a wildcard. Every second one was connected when it ended."""
    name = b"device-%d" % number
    return [
        changes.session(
            number, bool(number % 2), 5, EXPIRY_S, 0 if number % 2 else away_ms, position, name, b"default", None
        ),
        changes.subscribed(number, 1, 0, 0, 0, b"to/%d" % number),
        changes.subscribed(number, 1, 0, 0, 0, b"site/%d/+" % (number % 1000)),
    ]


def write_state(folder: Path, sessions: int) -> None:
    """A snapshot of nine tenths of the sessions, the others in the log behind it. A round number, please."""
    log = SegmentedLog.open(folder)
    away_ms = time.time_ns() // 1_000_000
    in_snapshot = sessions * 9 // 10
    snapshot = SnapshotWriter(folder, log.end)
    step = min(STEP, max(1, sessions // 10))
    for first in range(1, sessions + 1, step):
        some = [r for n in range(first, first + step) for r in records(n, log.end, away_ms)]
        if first <= in_snapshot:
            snapshot.add(some)
        else:
            log.append(encode_changes(some, log.end, away_ms), log.end)
    snapshot.commit()
    log.close(clean=False)
