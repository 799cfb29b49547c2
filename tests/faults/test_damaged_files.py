"""Files that were cut, changed or lost: found at the start, reported with what was lost, and the rest is served (C4).

Each test fills a log of several small segments, ends the broker, hurts one file and starts it again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties

DAY = Properties(session_expiry=86_400)
COUNT = 400
PAYLOAD = b"%05d " + b"x" * 1000
SMALL = {"log__segment_bytes": 65536, "log__tail_bytes": 65536}


def fill(broker: BrokerProcess) -> None:
    """400 messages over several segments, an absent session that is owed them all, and a retained message."""
    absent = RawClient(broker.port, 5)
    absent.connect("absent", clean=False, properties=DAY)
    absent.subscribe("a/#", qos=1)
    absent.disconnect()
    publisher = RawClient(broker.port, 4)
    publisher.connect("publisher")
    publisher.publish("kept", b"retained", 1, True)
    for i in range(COUNT):
        publisher.publish(f"a/{i % 3}", PAYLOAD % i, 1)
    publisher.close()


def owed(broker: BrokerProcess) -> list[int]:
    """What the absent session gets when it comes back, up to a last message that is published now."""
    session = RawClient(broker.port, 5)
    assert session.connect("absent", clean=False, properties=DAY).session_present
    publisher = RawClient(broker.port, 4)
    publisher.connect("publisher")
    publisher.publish("a/last", b"last", 1)
    got: list[int] = []
    while (payload := session.message().payload) != b"last":
        got.append(int(payload[:5]))
    return got


def retained(broker: BrokerProcess) -> bytes:
    client = RawClient(broker.port, 4)
    client.connect("curious")
    client.subscribe("kept")
    return client.message().payload


def verify(broker: BrokerProcess) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate.cli", "log", "verify", "--data", str(broker.data)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def files(broker: BrokerProcess, kind: str) -> list[Path]:
    return sorted((broker.data / "log").glob(f"*.{kind}"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def damage_lines(broker: BrokerProcess) -> list[str]:
    return [line for line in broker.log().splitlines() if "log.damaged" in line]


def in_order(got: list[int]) -> bool:
    return got == sorted(set(got))


@pytest.mark.attack("C4")
def test_a_torn_last_write_is_cut_off_and_everything_before_it_served(start_broker):
    broker = start_broker(**SMALL)
    fill(broker)
    broker.kill()
    newest = files(broker, "log")[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole + whole[64:164])  # the beginning of a frame that never came to its end
    assert "unfinished" in verify(broker).stdout
    broker.start()
    assert any("torn tail" in line and newest.name in line for line in damage_lines(broker))
    assert owed(broker) == list(range(COUNT))
    broker.stop()
    assert verify(broker).returncode == 0


@pytest.mark.attack("C4")
def test_a_last_write_that_was_cut_loses_only_itself(start_broker):
    broker = start_broker(**SMALL)
    fill(broker)
    broker.kill()
    newest = files(broker, "log")[-1]
    newest.write_bytes(newest.read_bytes()[:-700])
    broker.start()
    assert any("torn tail" in line for line in damage_lines(broker))
    got = owed(broker)
    assert in_order(got) and got == list(range(len(got)))
    assert COUNT - 3 <= len(got) <= COUNT


@pytest.mark.attack("C4")
@pytest.mark.parametrize("end", [BrokerProcess.kill, BrokerProcess.stop], ids=["kill", "clean stop"])
def test_a_flipped_bit_loses_one_commit_which_is_named(start_broker, end):
    broker = start_broker(**SMALL)
    fill(broker)
    end(broker)
    middle = files(broker, "log")[2]
    flip(middle, middle.stat().st_size // 2)
    found = verify(broker)
    assert found.returncode == 1
    assert f"damaged: {middle.name}" in found.stdout and "are lost" in found.stdout
    broker.start()
    got = owed(broker)
    assert in_order(got) and len(got) == COUNT - 1
    assert retained(broker) == b"retained"


@pytest.mark.attack("C4")
@pytest.mark.parametrize("end", [BrokerProcess.kill, BrokerProcess.stop], ids=["kill", "clean stop"])
def test_a_missing_segment_is_reported_and_the_others_served(start_broker, end):
    broker = start_broker(**SMALL)
    fill(broker)
    end(broker)
    gone = files(broker, "log")[2]
    gone.unlink()
    found = verify(broker)
    assert found.returncode == 1 and f"damaged: {gone.name}" in found.stdout and "missing" in found.stdout
    broker.start()
    assert any(gone.name in line and "missing" in line for line in damage_lines(broker))
    got = owed(broker)
    assert in_order(got) and COUNT - 90 < len(got) < COUNT - 30
    assert got[0] == 0 and got[-1] == COUNT - 1


@pytest.mark.attack("C4")
def test_a_truncated_segment_in_the_middle_is_reported_and_the_others_served(start_broker):
    broker = start_broker(**SMALL)
    fill(broker)
    broker.kill()
    middle = files(broker, "log")[2]
    middle.write_bytes(middle.read_bytes()[: middle.stat().st_size // 2])
    assert verify(broker).returncode == 1
    broker.start()
    assert any(middle.name in line for line in damage_lines(broker))
    got = owed(broker)
    assert in_order(got) and COUNT - 90 < len(got) < COUNT
    assert got[-1] == COUNT - 1


@pytest.mark.attack("C4")
def test_a_segment_overwritten_with_zeros_is_reported_and_the_others_served(start_broker):
    broker = start_broker(**SMALL)
    fill(broker)
    broker.kill()
    middle = files(broker, "log")[2]
    middle.write_bytes(bytes(middle.stat().st_size))
    assert verify(broker).returncode == 1
    broker.start()
    assert any(middle.name in line for line in damage_lines(broker))
    got = owed(broker)
    assert in_order(got) and got[0] == 0 and got[-1] == COUNT - 1


@pytest.mark.attack("C4")
@pytest.mark.parametrize("hurt", ["missing", "truncated", "flipped in its head", "flipped in its body", "empty"])
def test_a_damaged_index_is_made_anew_from_its_segment(start_broker, hurt: str):
    broker = start_broker(**SMALL)
    fill(broker)
    broker.stop()
    for index in files(broker, "index"):
        if hurt == "missing":
            index.unlink()
        elif hurt == "truncated":
            index.write_bytes(index.read_bytes()[:-20])
        elif hurt == "empty":
            index.write_bytes(b"")
        else:
            flip(index, 30 if hurt == "flipped in its head" else 140)
    assert verify(broker).returncode == 0  # nothing is lost
    broker.start()
    assert owed(broker) == list(range(COUNT))
    broker.stop()
    assert verify(broker).returncode == 0


@pytest.mark.attack("C4")
@pytest.mark.parametrize("hurt", ["missing", "truncated", "empty", "flipped in its head", "flipped in its end"])
def test_a_damaged_snapshot_is_replaced_by_the_one_before_and_the_log(start_broker, hurt: str):
    """Sessions and retained messages come from the older snapshot and the changes since."""
    broker = start_broker(**SMALL)
    fill(broker)
    broker.stop()
    broker.start()
    late = RawClient(broker.port, 5)
    late.connect("late", clean=False, properties=DAY)
    late.subscribe("b/#", qos=1)
    broker.stop()
    snapshot = files(broker, "snapshot")[-1]
    if hurt == "missing":
        snapshot.unlink()
    elif hurt == "truncated":
        snapshot.write_bytes(snapshot.read_bytes()[:-50])
    elif hurt == "empty":
        snapshot.write_bytes(b"")
    else:
        flip(snapshot, 20 if hurt == "flipped in its head" else snapshot.stat().st_size - 10)
    broker.start()
    if hurt != "missing":
        assert any(snapshot.name in line for line in damage_lines(broker))
    assert RawClient(broker.port, 5).connect("late", clean=False, properties=DAY).session_present
    assert retained(broker) == b"retained"
    assert owed(broker) == list(range(COUNT))


@pytest.mark.attack("C4")
def test_a_flipped_bit_in_the_only_snapshot_costs_nothing_that_the_log_still_holds(start_broker):
    broker = start_broker(**SMALL)
    fill(broker)
    broker.stop()
    (snapshot,) = files(broker, "snapshot")
    flip(snapshot, 140)
    broker.start()
    assert any(snapshot.name in line and "lost" in line for line in damage_lines(broker))
    assert retained(broker) == b"retained"
    assert owed(broker) == list(range(COUNT))


def test_a_file_that_is_no_segment_is_left_alone_and_reported(start_broker):
    broker = start_broker(**SMALL)
    fill(broker)
    broker.kill()
    stranger = broker.data / "log" / "00000000000000000099.log"
    stranger.write_bytes(b"somebody else's notes" * 10)
    broker.start()
    assert any(stranger.name in line for line in damage_lines(broker))
    assert owed(broker) == list(range(COUNT))
    assert stranger.read_bytes() == b"somebody else's notes" * 10


@pytest.mark.attack("C4")
def test_a_reader_is_told_of_what_the_disk_lost(start_broker):
    """Messages that cannot be read any more are counted where an operator looks."""
    broker = start_broker(**SMALL, sys__interval_s=1)
    fill(broker)
    broker.kill()
    middle = files(broker, "log")[2]
    flip(middle, middle.stat().st_size // 2)
    broker.start()
    owed(broker)
    watcher = RawClient(broker.port, 4)
    watcher.connect("watcher")
    watcher.subscribe("$SYS/broker/dropped/damaged on disk")
    assert watcher.message().payload == b"1"
