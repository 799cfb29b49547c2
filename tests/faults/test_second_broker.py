"""Two brokers on one data folder: the second refuses and the first notices nothing (C13)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties

DAY = Properties(session_expiry=86_400)


def try_to_start(data: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate.cli", "broker", "--data", str(data), "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def fingerprint(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (data / "log").iterdir()}


@pytest.mark.attack("C13")
def test_a_second_broker_on_the_same_folder_refuses_and_names_the_first(broker: BrokerProcess):
    client = RawClient(broker.port, 5)
    client.connect("client", clean=False, properties=DAY)
    client.subscribe("a", qos=1)
    before = fingerprint(broker.data)
    second = try_to_start(broker.data)
    assert second.returncode == 2
    assert "in use" in second.stderr and str(broker.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert fingerprint(broker.data) == before
    client.publish("a", b"still here", 1, wait=False)
    assert {type(client.receive()).__name__ for _ in range(2)} == {"Puback", "Publish"}


@pytest.mark.attack("C13")
def test_another_way_to_the_same_folder_is_refused_as_well(broker: BrokerProcess, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(broker.data)
    assert try_to_start(elsewhere).returncode == 2


def test_a_broker_that_was_killed_leaves_no_lock_behind(broker: BrokerProcess):
    broker.kill()
    broker.start()
    assert broker.alive


def test_the_folder_is_free_again_after_a_refused_start_and_a_clean_stop(broker: BrokerProcess):
    assert try_to_start(broker.data).returncode == 2
    assert broker.stop() == 0
    broker.start()
    assert broker.alive
