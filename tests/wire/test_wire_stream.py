"""Cutting the byte stream."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packet_strategies import Spoken, spoken
from vectors import VALID

from tidegate.errors import MalformedPacket, PeerError, Refused
from tidegate.wire import PacketStream, encode, encode_varint


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[a:b] for a, b in pairwise(edges)]


def outcome(stream: PacketStream, chunks: list[bytes]) -> tuple[list[tuple[int, bytes]], int | None]:
    """All packets, and the reason code of the fault that ended them."""
    packets: list[tuple[int, bytes]] = []
    try:
        for chunk in (*chunks, b""):
            packets += stream.feed(chunk)
    except PeerError as fault:
        return packets, fault.reason
    return packets, None


@given(st.lists(spoken, max_size=6), st.lists(st.integers(0, 2000), max_size=12))
@pytest.mark.attack("A18")
def test_the_packets_are_the_same_however_the_stream_is_cut(said: list[Spoken], places: list[int]) -> None:
    raws = [encode(s.packet, s.version) for s in said]
    stream = PacketStream(1 << 20)
    packets, fault = outcome(stream, cut(b"".join(raws), places))
    assert fault is None
    assert [bytes((first,)) + encode_varint(len(body)) + body for first, body in packets] == raws
    assert stream.pending_bytes == 0


@given(st.binary(max_size=120), st.lists(st.integers(0, 200), max_size=12), st.integers(2, 60))
def test_garbage_ends_the_same_way_however_it_is_cut(raw: bytes, places: list[int], maximum: int) -> None:
    whole = outcome(PacketStream(maximum), [raw])
    assert outcome(PacketStream(maximum), cut(raw, places)) == whole
    assert outcome(PacketStream(maximum), [raw[i : i + 1] for i in range(len(raw))]) == whole


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=12), st.integers(2, 60))
@pytest.mark.attack("A1")
def test_never_more_than_one_packet_is_pending(raw: bytes, places: list[int], maximum: int) -> None:
    stream = PacketStream(maximum)
    try:
        for chunk in cut(raw, places):
            stream.feed(chunk)
            assert stream.pending_bytes < max(maximum, 5)
    except PeerError:
        assert stream.pending_bytes == 0


@pytest.mark.attack("A4")
@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_a_remaining_length_of_five_bytes_is_malformed(step: int) -> None:
    raw = b"\x30\xff\xff\xff\xff\x01"
    stream = PacketStream(1 << 28)
    with pytest.raises(MalformedPacket) as fault:
        for at in range(0, len(raw), step):
            stream.feed(raw[at : at + step])
    assert fault.value.reason == 0x81
    assert stream.pending_bytes == 0


@pytest.mark.attack("A1")
def test_a_huge_length_is_refused_by_its_header_alone() -> None:
    stream = PacketStream(1_000)
    with pytest.raises(Refused) as fault:
        stream.feed(b"\x10\xff\xff\xff\x7f")
    assert fault.value.reason == 0x95
    assert stream.pending_bytes == 0


@pytest.mark.attack("A1")
def test_an_announced_length_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        streams = [PacketStream(268_435_460) for _ in range(100)]
        for stream in streams:
            stream.feed(b"\x30\xff\xff\xff\x7f")
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_packet_of_exactly_the_maximum_is_taken_and_one_byte_more_is_not() -> None:
    assert PacketStream(5).feed(b"\x30\x03\x00\x01a") == [(0x30, b"\x00\x01a")]
    with pytest.raises(Refused):
        PacketStream(4).feed(b"\x30\x03\x00\x01a")


def test_packets_in_front_of_a_fault_are_returned_and_the_fault_follows() -> None:
    stream = PacketStream(100)
    assert stream.feed(b"\xc0\x00\xc0\x00\x30\xff\x7f") == [(0xC0, b""), (0xC0, b"")]
    assert isinstance(stream.fault, Refused)
    for _ in range(2):
        with pytest.raises(Refused):
            stream.feed(b"")


def test_after_a_fault_nothing_is_buffered() -> None:
    stream = PacketStream(100)
    with pytest.raises(Refused):
        stream.feed(b"\x30\xff\x7f")
    with pytest.raises(Refused):
        stream.feed(b"x" * 10_000)
    assert stream.pending_bytes == 0


@pytest.mark.parametrize("raw", [b"\xc0\x80\x00", b"\xc0\x80\x80\x00", b"\x30\x83\x80\x80\x00\x00\x01a"])
@pytest.mark.parametrize("step", [1, 2, 8])
def test_a_length_written_longer_than_needed_is_malformed(raw: bytes, step: int) -> None:
    """[MQTT-1.5.5-1]"""
    stream = PacketStream(100)
    assert stream.feed(b"\xc0\x00") == [(0xC0, b"")]
    with pytest.raises(MalformedPacket) as fault:
        for at in range(0, len(raw), step):
            stream.feed(raw[at : at + step])
    assert fault.value.reason == 0x81
    assert stream.pending_bytes == 0


def test_a_length_whose_lower_bits_are_zero_is_not_longer_than_needed() -> None:
    body = b"\x00\x01a" + bytes(125)
    assert PacketStream(1_000).feed(b"\x30\x80\x01" + body) == [(0x30, body)]


def test_every_vector_passes_byte_by_byte() -> None:
    stream = PacketStream(1 << 20)
    packets = [packet for v in VALID for byte in v.raw for packet in stream.feed(bytes((byte,)))]
    assert len(packets) == len(VALID)


@pytest.mark.attack("A18")
def test_time_per_byte_does_not_grow_with_the_packet() -> None:
    def seconds(size: int) -> float:
        raw = b"\x30" + encode_varint(size) + b"x" * size
        chunks = [raw[i : i + 1] for i in range(len(raw))]
        stream = PacketStream(1 << 24)
        started = time.perf_counter()
        packets = [packet for chunk in chunks for packet in stream.feed(chunk)]
        elapsed = time.perf_counter() - started
        assert len(packets) == 1
        return elapsed

    small, large = min(seconds(20_000) for _ in range(3)), seconds(640_000)
    # 32 times the bytes: linear is 32 times the time, quadratic would be 1,024 times.
    assert large < small * 150
