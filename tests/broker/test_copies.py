"""How often a message is in memory while it goes out to many: counted exactly, where nothing else goes on."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from typing import NamedTuple

import pytest
from simulated import SimulatedBroker, SimulatedLink, SimulatedLog

from packet_bytes import publish_bytes
from tidegate.wire import FilterRequest, Pubrel, Subscribe

FEW, MANY = 10, 100  # subscribers
MORE = MANY - FEW
MIB = 1 << 20


class Cost(NamedTuple):
    """Of messages that have been given to all sockets, while these still hold them."""

    blocks: int  # of memory: objects, or a little more
    held_bytes: int
    peak_bytes: int
    distinct: int  # objects among what the sockets hold


def cost(subscribers: int, qos: int, messages: int, payload_bytes: int) -> Cost:
    simulated = SimulatedBroker(SimulatedLog(late=False))
    packets: list[list[bytes]] = []
    for number in range(subscribers):
        subscriber = simulated.client(f"s{number}", 4 + number % 2)
        subscriber.send(Subscribe(1, (FilterRequest(b"a", qos),)))
        simulated.rest()
        packets.append(keep(subscriber.link))
    publisher = simulated.client("p")

    def publish(count: int) -> None:
        sent = [publish_bytes(b"a", b"%04d" % i + bytes(payload_bytes - 4), qos, i + 1) for i in range(count)]
        publisher.send_bytes(b"".join(sent))
        simulated.rest()

    publish(2)  # what is made once has been made
    if qos == 2:
        publisher.send(Pubrel(1), Pubrel(2))
        simulated.rest()
    for each in packets:
        each.clear()
    gc.collect()
    gc.disable()
    try:
        tracemalloc.start()
        before = sys.getallocatedblocks()
        publish(messages)
        blocks = sys.getallocatedblocks() - before
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert all(sum(map(len, each)) > messages * payload_bytes for each in packets)
    return Cost(blocks, held_bytes, peak_bytes, len({id(data) for each in packets for data in each}))


def keep(link: SimulatedLink) -> list[bytes]:
    """A socket that takes everything, and that nobody reads from: it holds what it was given, as it was given."""
    given: list[bytes] = []

    def write(data: bytes) -> int:
        given.append(data)
        return 0

    link.write = write  # type: ignore[method-assign]
    return given


@pytest.mark.req("S3.9")
@pytest.mark.parametrize(("messages", "payload_bytes"), [(1, MIB), (3, MIB), (500, 20)])
def test_messages_without_packet_ids_are_in_memory_once_for_each_version_however_many_get_them(messages, payload_bytes):
    few, many = (cost(subscribers, 0, messages, payload_bytes) for subscribers in (FEW, MANY))
    assert few.distinct == many.distinct == 2  # 3.1.1 and 5
    assert many.blocks - few.blocks < 2 * MORE  # of 500 messages too
    for more in (many.held_bytes - few.held_bytes, many.peak_bytes - few.peak_bytes):
        assert more < 200 * MORE  # places in a list or two


@pytest.mark.req("S3.9")
@pytest.mark.parametrize(("messages", "payload_bytes"), [(1, MIB), (3, MIB), (500, 200)])
@pytest.mark.parametrize("qos", [1, 2])
def test_messages_with_packet_ids_are_in_memory_once_for_each_who_gets_them(qos, messages, payload_bytes):
    """The packet id stands within the packet, so each needs bytes of its own. No object is made for each message."""
    few, many = (cost(subscribers, qos, messages, payload_bytes) for subscribers in (FEW, MANY))
    assert many.blocks - few.blocks < 10 * MORE
    copy_bytes = messages * (payload_bytes + 15)
    for more in (many.held_bytes - few.held_bytes, many.peak_bytes - few.peak_bytes):
        assert more < MORE * (copy_bytes + 1000)
