"""Packets that are laid out by the thousand are the same as those of the plain encoder."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.client.batch import Layouts, Messages, answers, releases
from tidegate.wire import MQTT_5, Properties, Puback, Publish, Pubrec, Pubrel, encode

PACKET_BYTES_MAX = 1 << 20
BLOCKS = [None, b"", b"\x01\x01", b"\x03\x00\x04text", b"\x26\x00\x01k\x00\x01v\x26\x00\x01k\x00\x01w"]

message = st.tuples(
    st.sampled_from(["a", "a/b", "grün/1", "x" * 200]),
    st.binary(max_size=10) | st.binary(min_size=100, max_size=300),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(BLOCKS),
    st.none() | st.integers(0, 2**32 - 1),
)


def laid_out(first_number: int, rows: list[tuple[Any, ...]]) -> Messages:
    topics, payloads, qos, retains, properties, expiries = zip(*rows, strict=True)
    named = [topic.encode() for topic in topics]
    return Layouts().messages(first_number, named, payloads, qos, retains, properties, expiries, PACKET_BYTES_MAX)


@given(st.lists(message, min_size=1, max_size=20), st.integers(1, 65_000))
@pytest.mark.req("P.2")
def test_a_batch_is_the_packets_one_after_the_other(rows: list[tuple[Any, ...]], first_id: int) -> None:
    expected = b""
    packet_id = first_id
    for topic, payload, qos, retain, block, expiry in rows:
        known = Properties(message_expiry=expiry)
        expected += encode(
            Publish(topic.encode(), payload, qos, retain, False, packet_id if qos else 0, known, block or b""), MQTT_5
        )
        packet_id += bool(qos)
    assert Layouts().encode(laid_out(0, rows), first_id) == expected


@given(st.lists(message, min_size=1, max_size=30), st.integers(1, 7))
def test_chunks_hold_every_message_once_and_never_mix_qos_2_with_others(rows: list[tuple[Any, ...]], most: int) -> None:
    chunks = list(laid_out(100, rows).chunks(most))
    assert [number for chunk in chunks for number in chunk.numbers] == list(range(100, 100 + len(rows)))
    assert [payload for chunk in chunks for payload in chunk.payloads] == [row[1] for row in rows]
    for chunk in chunks:
        assert 1 <= len(chunk.firsts) <= most
        assert len({first >> 1 & 3 == 2 for first in chunk.firsts}) == 1


@given(st.lists(message, min_size=1, max_size=20))
def test_what_is_sent_again_is_what_is_acknowledged_with_dup(rows: list[tuple[Any, ...]]) -> None:
    again = laid_out(7, rows).acknowledged().repeated()
    assert list(again.numbers) == [7 + i for i, row in enumerate(rows) if row[2]]
    assert [(first >> 3 & 1, first >> 1 & 3, first & 1) for first in again.firsts] == [
        (1, row[2], row[3]) for row in rows if row[2]
    ]
    assert [again.topic(i).decode() for i in range(len(again.firsts))] == [row[0] for row in rows if row[2]]


def test_the_answers_to_compare_with_are_those_of_the_encoder() -> None:
    assert answers(0x40).startswith(encode(Puback(1), 5) + encode(Puback(2), 5))
    assert answers(0x40).endswith(encode(Puback(65535), 5))
    assert answers(0x50, 0x10).startswith(encode(Pubrec(1, 0x10), 5) + encode(Pubrec(2, 0x10), 5))
    assert len(answers(0x40)) == 4 * 65535
    assert releases(9, 2) == encode(Pubrel(9), 5) + encode(Pubrel(10), 5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"topics": [b"a", b"b/#"]}, "message 51: cannot publish to 'b/#': wildcard"),
        ({"topics": [b"a", b""]}, "message 51: the topic is empty"),
        ({"topics": [b"a", b"\xff"]}, r"message 51: cannot publish to '\\\\xff': a string is not UTF-8"),
        ({"topics": [b"a", b"x\0y"]}, "message 51: .* NUL in a UTF-8 string"),
        ({"topics": [b"a", b"x" * 65536]}, "message 51: .* a field of 65536 bytes"),
        ({"qos": 3}, "QoS 3 is not one of 0, 1, 2"),
        ({"qos": [0, -1]}, "message 51: QoS -1 is not one of 0, 1, 2"),
        ({"payloads": [b""]}, "2 topics, but a column of 1 entries"),
        ({"expiries": [None, 1 << 32]}, "message 51: an expiry of 4294967296 seconds"),
        ({"properties": [b"", b"\xff"]}, "message 51: these are not the properties of a PUBLISH: unknown property"),
        ({"properties": [b"", b"\x23\x00\x01"]}, "message 51: its properties can be"),  # a topic alias
        (
            {"payloads": [b"", bytes(2**20)]},
            "message 51 to 'b' makes a packet of 1048586 bytes; the broker takes 1048576",
        ),
    ],
)
def test_what_no_broker_takes_is_named(change: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {
        "topics": [b"a", b"b"], "payloads": [b"", b""], "qos": 1, "retains": None, "properties": None, "expiries": None,
        "packet_bytes_max": PACKET_BYTES_MAX,
    }  # fmt: skip
    with pytest.raises(ValueError, match=told):
        Layouts().messages(50, **{**given, **change})
