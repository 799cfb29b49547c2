"""A log whose older part lies elsewhere may answer late, piece by piece, or with a hole: what was in flight is sent
again all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated import SimulatedBroker, SimulatedClient, SimulatedLog

from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.run import Run
from tidegate.wire import FilterRequest, Puback, Publish, Subscribe, Unsubscribe, encode

KEPT: dict[str, Any] = {"clean": False, "session_expiry": 1000}
COUNT = 10
TOPIC, OTHER = b"t", b"w"  # of the same partition, if there are three


class Elsewhere(SimulatedLog):
    """`change` may alter what a read finds."""

    def __init__(self, partitions: int) -> None:
        super().__init__(late=False, partitions=partitions)
        self.change: Callable[[int, Read], Read] = lambda position, read: read

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        super().read(position, end, bytes_max, wanted, lambda read: done(self.change(position, read)))


def in_flight(partitions: int) -> tuple[SimulatedBroker, Elsewhere, list[Publish]]:
    """A client that has been sent messages of one run, and went away without a word."""
    log = Elsewhere(partitions)
    simulated = SimulatedBroker(log, tail_bytes=1)
    client = simulated.client("s", 5, **KEPT)
    client.send(Subscribe(1, (FilterRequest(TOPIC, 1),)))
    simulated.rest()
    client.received()
    publisher = simulated.client("publisher")
    packets = [Publish(TOPIC, b"%d" % i, 1, packet_id=i + 1) for i in range(COUNT)]
    publisher.send_bytes(b"".join(encode(packet, 4) for packet in packets))
    simulated.rest()
    publisher.send(Publish(OTHER, b"", 1, packet_id=99))  # so that they are not in memory any more
    simulated.rest()
    sent = client.only(Publish)
    assert len(sent) == COUNT
    client.drop()
    simulated.rest()
    return simulated, log, sent


def back(simulated: SimulatedBroker) -> SimulatedClient:
    client = SimulatedClient(simulated, 5)
    client.connect("s", **KEPT)
    return client


def pieces(run: Run, size: int) -> list[Run]:
    return [
        Run(run.topic, run.publisher, run.tenant, run.flags, run.payloads[i : i + size], base=run.base + i)
        for i in range(0, run.count, size)
    ]


@pytest.mark.req("S1.22")
@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_run_that_comes_in_pieces_is_sent_again_as_a_whole(partitions, size):
    simulated, log, sent = in_flight(partitions)
    log.change = lambda position, read: read._replace(runs=[p for run in read.runs for p in pieces(run, size)])
    client = back(simulated)
    simulated.rest()
    again = client.only(Publish)
    assert [(m.payload, m.packet_id, m.dup) for m in again] == [(m.payload, m.packet_id, True) for m in sent]
    client.send(*[Puback(message.packet_id) for message in again])
    simulated.rest()
    assert not client.only(Publish)


@pytest.mark.req("S1.22", "S3.14")
def test_only_what_is_gone_is_given_up(partitions):
    simulated, log, _ = in_flight(partitions)

    def with_a_hole(position: int, read: Read) -> Read:
        left = [p for run in read.runs for p in pieces(run, 1) if p.payloads[0] not in (b"3", b"4")]
        return read._replace(runs=left)

    log.change = with_a_hole
    client = back(simulated)
    simulated.rest()
    assert [m.payload for m in client.only(Publish)] == [b"0", b"1", b"2", b"5", b"6", b"7", b"8", b"9"]
    assert simulated.broker.counters.dropped["no longer stored"] == 2


@pytest.mark.req("S1.22")
def test_what_cannot_be_read_for_the_moment_is_asked_for_again(partitions):
    simulated, log, sent = in_flight(partitions)
    refusals = iter([True, True, True])
    log.change = lambda position, read: Read([], position, 0) if next(refusals, False) else read
    client = back(simulated)
    for _ in range(4):
        simulated.rest()
        simulated.pass_time(0.1)
    simulated.rest()
    assert [m.packet_id for m in client.only(Publish)] == [m.packet_id for m in sent]
    assert not simulated.broker.counters.dropped.total()


# ── a time that has to be searched for ──


class Searching(Elsewhere):
    """Knows a time's place only when the test says so."""

    def positions_at_time(self, time_ms: int, found: Callable[[list[int]], None]) -> tuple[list[int], bool]:
        def tell(offset: int) -> None:
            """In the partition of the messages; others have none."""
            places = list(self.ends)
            home = sum(TOPIC) % self.partitions
            places[home] = self.floors[home] + offset
            found(places)

        self.found = tell
        return list(self.floors), False


def replaying(partitions: int) -> tuple[SimulatedBroker, Searching, SimulatedClient]:
    log = Searching(partitions)
    simulated = SimulatedBroker(log, tail_bytes=1)
    publisher = simulated.client("publisher")
    publisher.send_bytes(b"".join(encode(Publish(TOPIC, b"%d" % i, 1, packet_id=i + 1), 4) for i in range(COUNT)))
    simulated.rest()
    publisher.send(Publish(OTHER, b"", 1, packet_id=99))
    simulated.rest()
    client = simulated.client("s", 5, **KEPT)
    client.send(Subscribe(1, (FilterRequest(b"$replay/2020-01-01T00:00:00Z/t", 1),)))
    simulated.rest()
    return simulated, log, client


@pytest.mark.req("S3.12")
def test_a_replay_waits_until_its_place_is_found(partitions):
    simulated, log, client = replaying(partitions)
    assert not client.only(Publish)
    log.found(7)
    simulated.rest()
    assert [m.payload for m in client.only(Publish)] == [b"7", b"8", b"9"]


@pytest.mark.req("S3.12")
def test_a_place_that_is_found_after_a_reconnection_still_counts(partitions):
    simulated, log, client = replaying(partitions)
    client.drop()
    again = back(simulated)
    simulated.rest()
    assert not again.only(Publish)
    log.found(7)
    simulated.rest()
    assert [m.payload for m in again.only(Publish)] == [b"7", b"8", b"9"]


@pytest.mark.req("S3.12")
def test_a_place_that_is_found_after_unsubscribing_does_nothing(partitions):
    simulated, log, client = replaying(partitions)
    client.send(Unsubscribe(2, (b"$replay/2020-01-01T00:00:00Z/t",)))
    simulated.rest()
    log.found(7)
    simulated.rest()
    assert not client.only(Publish)
    assert not simulated.broker.delivery.moved


@pytest.mark.req("S3.12")
def test_after_a_crash_before_its_place_was_found_a_replay_brings_rather_more_than_less(partitions):
    simulated, _, _ = replaying(partitions)
    simulated.crash()
    again = simulated.client("s", 5, **KEPT)
    assert [m.payload for m in again.only(Publish)] == [b"%d" % i for i in range(COUNT)]
