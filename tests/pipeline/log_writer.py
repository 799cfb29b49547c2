"""Logs for tests, written by the broker's own code, without a broker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from message_frames import encode_messages
from tidegate.log.files import SegmentedLog
from tidegate.log.frame import encode_changes, frame_entries
from tidegate.log.run import Run

START_MS = 1_800_000_000_000


class LogWriter:
    """Appends ticks to a log folder; one second passes with each."""

    def __init__(self, folder: Path, segment_bytes: int = 1 << 20) -> None:
        self.log = SegmentedLog.open(folder, segment_bytes=segment_bytes)
        self.time_ms = START_MS

    def tick(self, runs: Sequence[Run], changes: Sequence[bytes] = ()) -> int:
        """Returns the position of its first message."""
        base = self.log.end
        self.time_ms += 1000
        end = base + sum(run.count for run in runs)
        frames = encode_messages(runs, base, self.time_ms, followed=bool(changes)) if runs else b""
        if changes:
            frames += encode_changes(changes, end, self.time_ms)
        self.log.append(frames, end, list(frame_entries(frames)))
        return base

    def messages(self, count: int, topics: int = 10, start: int = 0, size: int = 20) -> int:
        """One tick of `count` messages, each a run of its own."""
        return self.tick([run(b"t/%d" % (i % topics), b"%d" % i + bytes(size)) for i in range(start, start + count)])

    def close(self, clean: bool = True) -> None:
        self.log.sync()
        self.log.close(clean=clean)


def run(topic: bytes, *payloads: bytes, flags: int = 1, publisher: bytes = b"p", tenant: bytes = b"") -> Run:
    return Run(topic, publisher, tenant, flags, list(payloads))


def write_damaged(folder: Path) -> None:
    """A closed log of three frames with 100 messages each, of which the second has a flipped bit."""
    writer = LogWriter(folder)
    for i in range(3):
        writer.messages(100, start=100 * i)
    writer.close()
    path = sorted(folder.glob("*.log"))[0]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
