"""Runs, ticks and naive twins for the log's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from message_frames import encode_messages
from tidegate.log.frame import encode_changes
from tidegate.log.run import NO_EXPIRY, Run

Message = tuple[int, int, bytes, bytes, bytes, int, bytes, bytes, int, bytes]

TOPICS = [b"a", b"a/b", b"a/b/c", b"a/c", b"b", b"b/a", "grün/1".encode(), b"$SYS/x"]


def messages(runs: Iterable[Run]) -> list[Message]:
    """Every message as a row of all that is stored, whatever runs it came in."""
    return [
        (
            run.base + i, run.time_ms, run.topic, run.publisher, run.tenant, run.flags, run.payloads[i],
            run.properties[i] if run.properties else b"",
            run.expiries[i] if run.expiries else NO_EXPIRY,
            run.uuids[i] if run.uuids else bytes(16),
        )
        for run in runs
        for i in range(run.count)
    ]  # fmt: skip


@st.composite
def runs(draw: st.DrawFn, topics: list[bytes] = TOPICS) -> Run:
    payloads = draw(st.lists(st.binary(max_size=20), min_size=1, max_size=5))
    n = len(payloads)

    def column(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        return st.none() | st.lists(values, min_size=n, max_size=n)

    return Run(
        draw(st.sampled_from(topics)),
        draw(st.sampled_from([b"", b"p1", b"publisher-2"])),
        draw(st.sampled_from([b"t", b"tenant-2"])),
        draw(st.integers(0, 2)) | draw(st.sampled_from([0, 4])),
        payloads,
        draw(column(st.binary(max_size=9))),
        draw(column(st.integers(0, 2**32 - 1))),
        draw(column(st.binary(min_size=16, max_size=16))),
    )


ticks = st.lists(runs(), min_size=1, max_size=4)


def simple_run(topic: bytes, *payloads: bytes) -> Run:
    return Run(topic, b"publisher", b"tenant", 1, list(payloads))


def tick(
    runs: list[Run], records: list[bytes], base: int, time_ms: int
) -> tuple[bytes, int, list[tuple[int, int, int, list[bytes] | None]]]:
    """What a broker appends: bytes, the end after them, index entries."""
    frames, entries, end = b"", [], base
    if runs:
        frames = encode_messages(runs, base, time_ms)
        end += sum(run.count for run in runs)
        entries.append((0, base, end - base, [run.topic for run in runs]))
    if records:
        entries.append((len(frames), end, len(records), None))
        frames += encode_changes(records, end, time_ms)
    return frames, end, entries


def kept(rows: list[Message], wanted: Callable[[bytes], bool]) -> list[Message]:
    return [row for row in rows if wanted(row[2])]
