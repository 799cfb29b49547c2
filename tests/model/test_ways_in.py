"""Publishes in every shape that has ever had a way of its own through the broker, as a table of byte streams.

Each is fed in one piece, byte by byte with ticks in between, and cut in the middle of its packets. What comes of it is
written out here, and compared with the reference besides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from forgiveness import TODAY
from stage import Stage, acknowledged, payloads

from tidegate.wire import (
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Properties,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    encode,
)

KEYED = Properties(user=((b"k", b"v"),))


def run(count: int, qos: int, topic: bytes = b"t/a", size: int = 8, first: int = 1) -> list[Packet]:
    """Alike but for their content."""
    return [
        Publish(topic, b"%0*d" % (size, number), qos, packet_id=number if qos else 0)
        for number in range(first, first + count)
    ]


def changed(packets: list[Packet], place: int, **fields: object) -> list[Packet]:
    return [replace(packet, **fields) if at == place else packet for at, packet in enumerate(packets)]  # type: ignore[type-var]


@dataclass(frozen=True)
class Way:
    name: str
    packets: list[Packet]
    raw_end: bytes = b""  # what no packet could say
    messages: int = -1  # that are stored; all if not said
    reason: int | None = None  # of the DISCONNECT that ends it
    versions: tuple[int, ...] = (4, 5)


LONE = [Publish(b"t/%d" % n, b"%d" % n, 1, packet_id=n) for n in range(1, 13)]
WAYS = [
    Way("lone publishes, each for its topic", LONE),
    Way("lone publishes with QoS 0", [replace(p, qos=0, packet_id=0) for p in LONE]),
    Way("two topics in turn", [replace(p, topic=b"t/%d" % (n % 2)) for n, p in enumerate(LONE)]),
    Way("an equal block, QoS 0", run(40, 0)),
    Way("an equal block, QoS 1", run(40, 1)),
    Way("an equal block, QoS 2", run(40, 2)),
    Way("a block with one of another size", changed(run(40, 1), 20, payload=b"longer than that")),
    Way("a block with one of another topic", changed(run(40, 1), 20, topic=b"t/b")),
    Way("a block that looks like packets", [replace(p, payload=b"0\x06\0\x03t/a" * 3) for p in run(20, 0)]),
    Way("a run of one topic, sizes vary", [replace(p, payload=b"x" * n) for n, p in enumerate(run(12, 1))]),
    Way("a run with QoS 0, sizes vary", [replace(p, payload=b"x" * n) for n, p in enumerate(run(12, 0))]),
    Way("remaining lengths of one, two and three bytes", [*run(2, 1, size=20), *run(2, 1, size=200, first=3),
                                                          *run(2, 1, size=20_000, first=5)]),
    Way("a run with properties", [replace(p, properties=KEYED) for p in run(12, 1)], versions=(5,)),
    Way("properties in the middle", changed(run(12, 1), 6, properties=KEYED), versions=(5,)),
    Way("properties in the middle, QoS 0", changed(run(12, 0), 6, properties=KEYED), versions=(5,)),
    Way("expiry in the middle", changed(run(12, 1), 6, properties=Properties(message_expiry=60)), versions=(5,)),
    Way("QoS 2 in runs, released in runs", [*run(9, 2), *(Pubrel(n) for n in range(1, 10)), *run(9, 2)], messages=18),
    Way("QoS 2 in runs, one of them repeated", [*run(9, 2), replace(run(9, 2)[4], dup=True)], messages=9),
    Way("mixed QoS", [p for n in range(1, 9) for p in run(1, n % 3, first=n)]),
    Way("retained in the middle", changed(run(12, 1), 6, retain=True)),
    Way("retained in the middle, QoS 0", changed(run(12, 0), 6, retain=True)),
    Way("retained and cleared again", changed(changed(run(12, 1), 4, retain=True), 8, retain=True, payload=b"")),
    Way("DUP in the middle", changed(run(12, 1), 6, dup=True)),
    Way("a PINGREQ in the middle", [*run(6, 1), Pingreq(), *run(6, 1, first=7)], messages=12),
    Way(
        "an alias in the middle",
        [*run(4, 1), *changed(run(2, 1, first=5), 0, properties=Properties(topic_alias=1)),
         *(replace(p, topic=b"", properties=Properties(topic_alias=1)) for p in run(3, 1, first=7)),
         *run(3, 1, first=10)],
        versions=(5,),
    ),
    Way("refused in the middle", changed(run(9, 1), 4, topic=b"$t/a"), messages=8),
    Way("a packet id of 0 in the middle", run(12, 1), b"\x32\x0f\0\x03t/a\0\0" + b"8 bytes." + encode(run(1, 1)[0], 4),
        reason=0x82, versions=(4,)),
    Way("a packet id of 0 in the middle, QoS 2", run(12, 2),
        b"\x34\x0f\0\x03t/a\0\0" + b"8 bytes.", reason=0x82, versions=(4,)),
    Way("a packet id of 0 in the middle, MQTT 5", run(12, 1),
        b"\x32\x10\0\x03t/a\0\0\0" + b"8 bytes.", reason=0x82, versions=(5,)),
    Way("oversized in the middle", run(12, 1), b"\x32\xff\xff\x7f\0\x03t/a", reason=0x95),
    Way("oversized in the middle, QoS 0", run(12, 0), b"\x30\xff\xff\x7f\0\x03t/a", reason=0x95),
    Way("QoS 3 in the middle", run(12, 1), b"\x36\x08\0\x03t/a\0\1x", reason=0x81),
    Way("a wildcard in the middle", run(12, 0), b"\x30\x06\0\x03t/+x", reason=0x90),
    Way("a second CONNECT in the middle", [*run(12, 0), Connect(4, b"p")], reason=0x82, messages=12),
    Way("a DISCONNECT in the middle", [*run(6, 1), Disconnect(), *run(6, 1, first=7)], messages=6),
]  # fmt: skip


def cases() -> list[object]:
    found = []
    for way in WAYS:
        for version in way.versions:
            for cut in ("whole", "byte by byte", "in pieces"):
                name = f"{way.name}, {'MQTT 5' if version == 5 else '3.1.1'}, {cut}"
                found.append(pytest.param(way, version, cut, id=name))
    return found


@pytest.mark.parametrize(("way", "version", "cut"), cases())
def test_publishes_end_the_same_whatever_their_shape(way: Way, version: int, cut: str):
    forgiven = TODAY & {"refusals overtake acknowledgements"}
    stage = Stage(late=cut != "whole", packet_bytes_max=100_000, forgiven=forgiven)
    readers = [
        stage.connect("v3 qos 0", 4),
        stage.connect("v3 qos 2", 4),
        stage.connect("v5 qos 1"),
        stage.connect("v5 qos 2", receive_maximum=3),
        stage.connect("v5 aliases", topic_alias_maximum=5),
    ]
    for reader, qos, options in zip(readers, (0, 2, 1, 2, 1), ({}, {}, {"identifier": 7}, {}, {}), strict=True):
        stage.subscribe(reader, b"#", qos, **options)
    stage.subscribe(readers[2], b"t/a", 0, 300, retain_as_published=True)
    publisher = stage.connect("p", version)
    stage.agreement.settle()

    data = b"".join(encode(packet, version) for packet in way.packets) + way.raw_end
    step = {"whole": len(data), "byte by byte": 1, "in pieces": 7}[cut]
    for at in range(0, len(data), step):
        stage.agreement.feed(publisher, data[at : at + step])
        if cut != "whole":
            stage.agreement.tick()
            if at % 3 == 0:
                stage.agreement.store()
    stage.acknowledge(*readers)

    sent = [packet for packet in way.packets if isinstance(packet, Publish)]
    stored = len(sent) if way.messages < 0 else way.messages
    expected = [packet.payload for packet in sent if not packet.topic.startswith(b"$")][:stored]
    for reader in readers:
        assert payloads(reader) == expected
    ended = way.reason is not None or any(isinstance(packet, Disconnect) for packet in way.packets)
    assert stage.agreement.sut.closed(publisher.at_broker) == ended
    if way.reason is not None and version == 5:
        assert [p.reason for p in publisher.transcript if isinstance(p, Disconnect)] == [way.reason]
    if not ended:
        refused = [p for p in sent if p.topic.startswith(b"$")]
        code = 0x90 if version == 5 else 0
        assert sorted(acknowledged(publisher)) == sorted(
            (p.packet_id, code if p in refused else 0) for p in sent if p.qos == 1
        )
        received = sorted(packet_id for packet_id, _ in acknowledged(publisher, Pubrec))
        assert received == sorted(p.packet_id for p in sent if p.qos == 2)
        released = [p.packet_id for p in way.packets if isinstance(p, Pubrel)]
        assert [pid for pid, _ in acknowledged(publisher, Pubcomp)] == released

