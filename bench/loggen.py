"""Logs to measure with: `write_log` fills a folder with messages as a broker would, but as fast as the disk takes them.

On the command line: `python bench/loggen.py FOLDER [MESSAGES]`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tidegate.log.files import SEGMENT_BYTES, SegmentedLog
from tidegate.log.frame import encode_rows
from tidegate.log.rows import Rows
from tidegate.log.run import Run

START_MS = 1_800_000_000_000
MESSAGES_PER_MS = 500


def topic_names(topics: int) -> list[bytes]:
    return [b"site/%d/device/%d/temperature" % (i % 20, i) for i in range(topics)]


def write_log(
    folder: Path,
    messages: int,
    payload_bytes: int = 100,
    topics: int = 10_000,
    frame_rows: int = 2000,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    seed: int = 1,
) -> int:
    """Append `messages` to random topics to the log in `folder`, `frame_rows` a frame, and stop it cleanly. Returns the
    log's end. With the same seed it is the same log, but for the writer's number."""
    chance = random.Random(seed)
    names = topic_names(topics)
    publishers = [b"client-%03d" % i for i in range(100)]
    # Content that does not compress, cut from one piece: making a million random payloads would take longest.
    content = chance.randbytes(1 << 20)
    log = SegmentedLog.open(folder, segment_bytes=segment_bytes)
    written = 0
    while written < messages:
        rows = min(frame_rows, messages - written)
        ats = [chance.randrange(len(content) - payload_bytes) for _ in range(rows)]
        runs = [
            Run(topic, publisher, b"", 1, [content[at : at + payload_bytes]])
            for topic, publisher, at in zip(
                chance.choices(names, k=rows), chance.choices(publishers, k=rows), ats, strict=True
            )
        ]
        base = log.end
        frame, _ = encode_rows(Rows.of(runs), base, START_MS + written // MESSAGES_PER_MS)
        log.append(frame, base + rows, [(0, base, rows, [run.topic for run in runs])])
        written += rows
    end = log.end
    log.close()
    return end


if __name__ == "__main__":
    print(write_log(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2_000_000))
