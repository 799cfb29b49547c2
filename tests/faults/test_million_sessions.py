"""An unclean stop with very many sessions: the start completes, shows progress, and they are all there (C14).

A hundred thousand; a million with TORTURE=1.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from many_sessions import EXPIRY_S, write_state

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties

SESSIONS = 1_000_000 if os.environ.get("TORTURE") else 100_000
DAY = Properties(session_expiry=EXPIRY_S)


def pause_while_loading(broker: BrokerProcess, pause_s: float) -> None:
    """Make sure that the start takes long enough to have something to say."""
    lock = broker.data / "log" / "LOCK"
    while lock.read_text() != str(broker.pid):
        time.sleep(0.001)
    os.kill(broker.pid, signal.SIGSTOP)
    time.sleep(pause_s)
    os.kill(broker.pid, signal.SIGCONT)


@pytest.mark.timeout(600)
@pytest.mark.attack("C14")
@pytest.mark.req("S0.3", "S4.1", "S4.6")
def test_a_start_after_an_unclean_stop_shows_progress_and_finds_all_of_very_many_sessions(tmp_path: Path):
    write_state(tmp_path / "data" / "log", SESSIONS)
    broker = BrokerProcess(tmp_path / "data")
    broker.spawn()
    pause_while_loading(broker, 2.1)
    broker.until_listening(timeout_s=300)
    try:
        assert "tidegate: loading" in broker.log()
        (line,) = [line for line in broker.log().splitlines() if "broker.recovered" in line]
        assert f"sessions={SESSIONS} " in line
        assert f"were_connected={SESSIONS // 2} " in line
        assert f"subscriptions={2 * SESSIONS} " in line
        publisher = RawClient(broker.port, 4)
        publisher.connect("publisher")
        for number in [1, SESSIONS, *random.Random(1).sample(range(2, SESSIONS), 20)]:
            publisher.publish(f"to/{number}", b"hello %d" % number, 1)
            session = RawClient(broker.port, 5)
            connack = session.connect(f"device-{number}", clean=False, properties=DAY)
            assert connack.session_present
            assert session.message().payload == b"hello %d" % number
            session.disconnect()
    finally:
        broker.stop(timeout_s=300)
