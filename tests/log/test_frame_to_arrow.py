"""A frame as an Arrow batch holds the same messages as the plain decoder finds."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_strategies import Message, messages, simple_run, ticks

from message_frames import encode_messages
from tidegate.log.frame import decode_messages, encode_changes
from tidegate.log.run import NO_EXPIRY, Run
from tidegate.pipeline.decode import SCHEMA, frame_to_arrow, runs_to_arrow


def rows_of(batch: pa.RecordBatch) -> list[Message]:
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    return [
        (
            row["position"], int(row["time"].timestamp() * 1000), row["topic"].encode(),
            row["publisher"].encode(), row["tenant"].encode(), row["qos"] | (4 if row["retain"] else 0),
            row["payload"], row["properties"] or b"",
            NO_EXPIRY if row["expiry"] is None else row["expiry"], row["uuid"] or bytes(16),
        )
        for row in batch.to_pylist()
    ]  # fmt: skip


@settings(deadline=None)
@given(ticks, st.integers(0, 2**62), st.integers(0, 30))
@pytest.mark.req("P.2", "S0.27")
def test_both_decoders_find_the_same(tick: list[Run], base: int, eighths: int) -> None:
    frame = bytes(8 * eighths) + encode_messages(tick, base, 1_700_000_000_000)
    runs = decode_messages(frame, 8 * eighths)
    assert rows_of(frame_to_arrow(frame, 8 * eighths)) == messages(runs) == messages(tick)
    assert rows_of(runs_to_arrow(runs)) == messages(tick)


def test_absent_values_are_null() -> None:
    run = simple_run(b"t", b"1", b"2")
    run.properties, run.expiries, run.uuids = [b"", b"p"], [NO_EXPIRY, 60], [bytes(16), b"u" * 16]
    columns = frame_to_arrow(encode_messages([run], 0, 0)).to_pydict()
    assert columns["properties"] == [None, b"p"]
    assert columns["expiry"] == [None, 60]
    assert columns["uuid"] == [None, b"u" * 16]


def test_payloads_are_not_copied() -> None:
    frame = encode_messages([simple_run(b"t", b"payload" * 10, b"x")], 0, 0)
    batch = frame_to_arrow(frame)
    address = batch.column("payload").buffers()[2].address
    start = pa.py_buffer(frame).address
    assert start < address < start + len(frame)


@pytest.mark.parametrize("raw", [b"", bytes(100), encode_changes([b"x"], 0, 0)], ids=["nothing", "zeros", "changes"])
def test_what_is_no_messages_frame_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="no MESSAGES frame"):
        frame_to_arrow(raw)
