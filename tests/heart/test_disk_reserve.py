"""A disk that is smaller than the log may be: the broker leaves a reserve on it, so that the lake can be written, the
log be trimmed, and everything go on by itself.

On a real file system of 16 MiB, of which the reserve is a twentieth.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from heart_kit import MIB, attach, attach_kept, eventually, publish_bytes, sys_until

from harness import BrokerProcess, RawClient
from lake_tools import TestLake
from peers import small_disk
from tidegate.wire import Puback, Publish

DISK_BYTES = 16 * MIB
RESERVE_BYTES = DISK_BYTES // 20
NO_ROOM = 0x97
SMALL = {
    "log__segment_bytes": 65536,
    "log__tail_bytes": 65536,
    "log__retention_bytes": MIB,
    "log__clean_interval_s": 1,
    "sys__interval_s": 1,
}

Start = Callable[..., BrokerProcess]


@pytest.fixture
def on_small_disk(start_broker: Start, tmp_path: Path) -> Iterator[Start]:
    """Starts a broker whose data folder is a file system of its own."""
    data = tmp_path / "data"

    def start(durability: str = "fsync", **settings: Any) -> BrokerProcess:
        return start_broker(durability, **{**SMALL, **settings})

    with small_disk(data, DISK_BYTES):
        yield start


def free_bytes(broker: BrokerProcess) -> int:
    found = os.statvfs(broker.data)
    return found.f_bavail * found.f_frsize


def events(broker: BrokerProcess, name: str) -> list[str]:
    return [line for line in broker.log().splitlines() if f" {name} " in f"{line} "]


def numbered(number: int, size: int = 8000) -> bytes:
    return b"%06d" % number + b"x" * size


def number(message: Publish) -> int:
    return int(message.payload[:6])


def fill(publisher: RawClient, first: int = 0) -> int:
    """Publish until that is refused: the number of the first message that was."""
    while publisher.publish("a/b", numbered(first), 1) != NO_ROOM:
        first += 1
        assert first < 10_000, "nobody is refused"
    return first


def seconds_pass(broker: BrokerProcess, count: int) -> None:
    """By the broker's own count."""

    def uptime_s(values: dict[str, str]) -> int:
        return int(values.get("uptime", "0").split()[0])

    until_s = uptime_s(sys_until(broker, lambda values: uptime_s(values) > 0)) + count
    sys_until(broker, lambda values: uptime_s(values) >= until_s)


def replayed(broker: BrokerProcess, count: int) -> list[int]:
    sub = attach(broker, "replay", 5)
    sub.subscribe("$replay/earliest/a/#")
    return [number(sub.message()) for _ in range(count)]


@pytest.mark.req("S4.13", "P.6", "S1.25")
@pytest.mark.attack("C5")
def test_a_log_that_fills_the_disk_leaves_room_for_the_lake_and_goes_on_by_itself(on_small_disk):
    """Full, archived, trimmed and open again, twice, without a restart; and what was acknowledged is there."""
    broker = on_small_disk()
    lake = TestLake(broker.data)
    lake.tell()  # there is a pipeline, and it stands still
    sys_until(broker, lambda values: values.get("archive/position") == "0")
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    publisher = attach(broker, "p", 5)
    accepted = 0
    for _ in range(2):
        accepted = fill(publisher, accepted)
        assert free_bytes(broker) > RESERVE_BYTES * 3 // 8  # half of it at least, but for what is written besides
        old = attach(broker, "old")
        old.publish("a/b", b"x", 1, wait=False)
        assert not [packet for packet in old.until_closed() if isinstance(packet, Puback)]
        lake.archive(rows_per_file=100)
        eventually(lambda: publisher.publish("b", b"", 1) != NO_ROOM)
    assert accepted > 2000
    assert "log.reserve_bytes" in events(broker, "log.refused")[0]
    assert replayed(broker, accepted) == list(range(accepted))
    broker.kill()
    broker.start()
    back = attach_kept(broker, "s")
    assert [number(back.message()) for _ in range(accepted)] == list(range(accepted))


@pytest.mark.attack("C5")
def test_below_the_reserve_sessions_come_and_go_and_are_as_they_were_afterwards(on_small_disk):
    broker = on_small_disk()
    lake = TestLake(broker.data)
    lake.tell()
    sys_until(broker, lambda values: values.get("archive/position") == "0")
    leaving = attach_kept(broker, "leaving")
    leaving.subscribe("a/c", qos=1)
    publisher = attach(broker, "p", 5)
    publisher.publish("a/c", numbered(0), 1)
    accepted = fill(publisher)
    assert number(leaving.message()) == 0  # acknowledged while nothing can be written
    leaving.disconnect()
    watcher = attach(broker, "watcher")
    assert watcher.subscribe("$SYS/broker/uptime").reasons == (0,)
    assert watcher.message().topic == b"$SYS/broker/uptime"
    kept = attach_kept(broker, "kept")
    assert kept.subscribe("a/c", qos=1).reasons == (NO_ROOM,)
    lake.archive(rows_per_file=100)
    eventually(lambda: publisher.publish("a/c", numbered(accepted), 1) != NO_ROOM)
    publisher.publish("b", b"", 1)
    broker.kill()
    broker.start()
    back = attach_kept(broker, "leaving")
    assert back.connack is not None and back.connack.session_present
    assert number(back.message()) == accepted
    back.nothing()


@pytest.mark.attack("C5")
def test_a_publisher_that_is_quicker_than_a_look_at_the_disk_does_not_use_up_the_reserve(on_small_disk):
    broker = on_small_disk("os")
    TestLake(broker.data).tell()
    sys_until(broker, lambda values: values.get("archive/position") == "0")
    publisher = attach(broker, "p", 5)
    refused: list[bool] = []
    while len(refused) * 4000 < 2 * DISK_BYTES:
        some = range(len(refused), len(refused) + 16)
        publisher.send_bytes(b"".join([publish_bytes(b"a/b", numbered(i, 4000), 1, i + 1, version=5) for i in some]))
        refused += [publisher.expect(Puback).reason == NO_ROOM for _ in some]
    assert free_bytes(broker) > RESERVE_BYTES * 3 // 8
    accepted = refused.count(False)
    assert refused == sorted(refused)  # and it stays so
    assert replayed(broker, accepted) == list(range(accepted))


@pytest.mark.req("S0.5")
@pytest.mark.attack("C5")
def test_without_a_pipeline_the_oldest_goes_before_the_disk_is_full(on_small_disk):
    """As above log.hard_bytes: also if a session needs it, which is told so; publishers go on."""
    broker = on_small_disk()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    publisher = attach(broker, "p", 5)
    last = DISK_BYTES * 9 // 8 // 8000
    least = DISK_BYTES
    for i in range(last + 1):
        eventually(lambda i=i: publisher.publish("a/b", numbered(i), 1) != NO_ROOM)
        least = min(least, free_bytes(broker))
    assert least > RESERVE_BYTES // 4
    assert events(broker, "log.promise_broken")
    back = attach_kept(broker, "s")
    got = [number(back.message())]
    while got[-1] != last:
        got.append(number(back.message()))
    assert got == list(range(got[0], last + 1))
    assert len(got) * 8000 > DISK_BYTES // 2  # no more went than had to


@pytest.mark.attack("C5")
def test_a_disk_that_others_fill_is_refused_and_goes_on_when_they_make_room(on_small_disk):
    broker = on_small_disk()
    publisher = attach(broker, "p", 5)
    assert publisher.publish("a/b", numbered(0), 1) != NO_ROOM
    ballast = broker.data / "ballast"
    ballast.write_bytes(bytes(free_bytes(broker) - RESERVE_BYTES // 4))
    eventually(lambda: publisher.publish("a/b", b"", 1) == NO_ROOM)
    assert "make room" in events(broker, "log.refused")[0]
    os.truncate(ballast, ballast.stat().st_size - RESERVE_BYTES // 2)  # more than the half, less than the whole of it
    seconds_pass(broker, 3)  # it has looked by then
    assert publisher.publish("a/b", b"", 1) == NO_ROOM
    ballast.unlink()
    eventually(lambda: publisher.publish("a/b", numbered(1), 1) != NO_ROOM)
    assert len(events(broker, "log.accepted")) == 1


@pytest.mark.req("S4.13")
def test_the_limit_that_the_disk_sets_is_told_at_start(on_small_disk):
    broker = on_small_disk()
    (line,) = events(broker, "log.limited")
    found = re.search(r"limit_bytes=(\d+) hard_bytes=(\d+) free_bytes=(\d+) reserve_bytes=(\d+) why=\"", line)
    assert found is not None, line
    limit, hard, free, reserve = map(int, found.groups())
    assert hard == 64 << 30 and reserve == RESERVE_BYTES
    assert DISK_BYTES - 2 * RESERVE_BYTES < limit <= free
    broker.stop()
    broker.settings["log__hard_bytes"] = 8 * MIB
    broker.start()
    assert len(events(broker, "log.limited")) == 1  # there is room for this
    broker.stop()
    broker.settings |= {"log__hard_bytes": DISK_BYTES, "log__reserve_bytes": 100_000}
    broker.start()
    assert "reserve_bytes=100000" in events(broker, "log.limited")[1]
