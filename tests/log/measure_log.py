"""Measure the log by itself: `PYTHONPATH=tests python tests/log/measure_log.py [folder]`. A figure per line."""

from __future__ import annotations

import random
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from log_strategies import simple_run

from message_frames import encode_messages
from tidegate.log.files import SegmentedLog
from tidegate.log.frame import decode_messages, encode_changes
from tidegate.log.index import Wanted
from tidegate.log.run import Run
from tidegate.pipeline.decode import frame_to_arrow

PAYLOAD = bytes(64)


def best(call: Callable[[], object], number: int) -> float:
    """Seconds per call, the best of five."""
    return min(timeit.repeat(call, number=number, repeat=5)) / number


def say(what: str, value: float, unit: str) -> None:
    print(f"{what:<58}{value:>12,.2f} {unit}", flush=True)


def measure_frames() -> None:
    one = Run(b"devices/floor7/sensor42/temp", b"client-000123", b"default", 1, [PAYLOAD])
    say("encode a frame of one message", best(lambda: encode_messages((one,), 5, 6), 100_000) * 1e6, "µs")
    sizes = [bytes(random.randrange(60, 68)) for _ in range(3000)]
    many = Run(b"devices/floor7/sensor42/temp", b"client-000123", b"default", 1, sizes)
    say(
        "encode a run of 3000",
        best(lambda: encode_messages((many,), 5, 6), 200) / 3000 * 1e9,
        "ns per message",
    )
    frame = encode_messages((many,), 5, 6)
    say("decode a run of 3000", best(lambda: decode_messages(frame), 200) / 3000 * 1e9, "ns per message")
    say("frame of 3000 to Arrow", 3000 / best(lambda: frame_to_arrow(frame), 500) / 1e6, "M rows/s")
    runs = [Run(b"t/%d" % (i % 50), b"client-%d" % i, b"default", 1, [PAYLOAD]) for i in range(100)]
    say("encode 100 runs of one", best(lambda: encode_messages(runs, 5, 6), 500) / 100 * 1e9, "ns per message")
    mixed = encode_messages(runs, 5, 6)
    say("decode 100 runs of one", best(lambda: decode_messages(mixed), 500) / 100 * 1e9, "ns per message")
    large = [Run(b"t/%d" % i, b"c%d" % i, b"default", 1, [PAYLOAD] * 100) for i in range(300)]
    wide = encode_messages(large, 5, 6)
    say("frame of 300 runs × 100 to Arrow", 30_000 / best(lambda: frame_to_arrow(wide), 50) / 1e6, "M rows/s")
    records = [bytes(40)] * 3
    say("encode 3 changes", best(lambda: encode_changes(records, 5, 6), 50_000) * 1e6, "µs")


def measure_log(folder: Path) -> None:
    log = SegmentedLog.open(folder)
    frames = [encode_messages((simple_run(b"t", PAYLOAD),), i, 1) for i in range(100_000)]
    topics = (b"t",)
    start = time.perf_counter()
    for i, frame in enumerate(frames):
        log.append(frame, i + 1, ((0, i, 1, topics),))
    say("append a tick of one message, no sync", (time.perf_counter() - start) / len(frames) * 1e6, "µs")
    rare = {random.randrange(33_000) for _ in range(10)}
    count = 0
    start = time.perf_counter()
    for i in range(33_334):  # 10 million messages in frames of 300, 10,000 topics
        runs = [simple_run(b"d/%d/t" % (i * 10 % 10_000 + k), *[PAYLOAD] * 30) for k in range(10)]
        if i in rare:
            runs.append(simple_run(b"rare/%d" % i, b"!"))
        frame = encode_messages(runs, log.end, i)
        n = sum(run.count for run in runs)
        log.append(frame, log.end + n, ((0, log.end, n, [run.topic for run in runs]),))
        count += n
    spent = time.perf_counter() - start
    say(f"encode and append {count:,} messages, no sync", count / spent / 1e6, "M messages/s")
    start = time.perf_counter()
    log.close()
    say("close, with the last index", (time.perf_counter() - start) * 1e3, "ms")
    start = time.perf_counter()
    log = SegmentedLog.open(folder)
    say(f"open cleanly, {len(log.segments())} segments", (time.perf_counter() - start) * 1e3, "ms")
    for what, wanted in (
        ("exact", Wanted(frozenset(b"rare/%d" % i for i in rare))),
        ("prefix", Wanted(frozenset(), (b"rare/",), lambda topic: True)),
    ):
        for turn in ("first", "again"):
            found, position = 0, 0
            start = time.perf_counter()
            while position < log.end:
                read = log.read(position, bytes_max=1 << 20, wanted=wanted, end=log.end)
                found += sum(run.count for run in read.runs)
                position = read.next_position
            say(f"find {found} by {what} ({turn})", (time.perf_counter() - start) * 1e3, "ms")
    start = time.perf_counter()
    found, position = 0, 0
    while position < log.end and found < 3_000_000:
        read = log.read(position, bytes_max=1 << 20, wanted=None, end=log.end)
        found += sum(run.count for run in read.runs)
        position = read.next_position
    say("read everything", found / (time.perf_counter() - start) / 1e6, "M messages/s")
    start = time.perf_counter()
    damages = list(log.verify())
    total = sum(segment.bytes for segment in log.segments())
    say(f"verify ({len(damages)} damages)", total / (time.perf_counter() - start) / 1e9, "GB/s")
    log.append(encode_messages((simple_run(b"t", PAYLOAD),), log.end, 1), log.end + 1)
    log.close(clean=False)
    start = time.perf_counter()
    log = SegmentedLog.open(folder)
    say("open after a crash", (time.perf_counter() - start) * 1e3, "ms")
    log.close()


if __name__ == "__main__":
    measure_frames()
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        measure_log(Path(name))
