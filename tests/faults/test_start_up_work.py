"""What a start costs is what the state is, not all that ever happened (C14).

Counted in bytes read, in instructions, in processor time and in how often it waited; never in time that passed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from many_sessions import write_state
from observing import log_bytes, process_figures, publish_all

from harness import BrokerProcess, RawClient
from instructions import instructions
from tidegate.adapters.embedded.commitlog import EmbeddedLog
from tidegate.broker.core import Broker
from tidegate.broker.recover import Recovered, Recovery
from tidegate.config import Config
from tidegate.log.files import SegmentedLog
from tidegate.wire import Properties

HOUR = Properties(session_expiry=3600)
SMALL = {"log__segment_bytes": 65536}
FILTERS = [f"{'long' * 50}/{number}" for number in range(300)]  # about 70 KB of state

ends = pytest.mark.parametrize("end", ["stop", "kill"])


def attach(broker: BrokerProcess, client_id: str) -> RawClient:
    client = RawClient(broker.port, 5)
    client.connect(client_id, clean=False, properties=HOUR)
    return client


def read_at_start(broker: BrokerProcess) -> int:
    """Bytes that a start reads until it listens, the interpreter's own included."""
    broker.start()
    return process_figures(broker)["rchar"]


@pytest.fixture
def read_for_nothing(tmp_path: Path) -> int:
    """What a start on an empty folder reads."""
    broker = BrokerProcess(tmp_path / "empty", **SMALL)
    read = read_at_start(broker)
    broker.stop()
    return read


def end_then_read(broker: BrokerProcess, end: str) -> int:
    getattr(broker, end)()
    read = read_at_start(broker)
    broker.stop()
    return read


@pytest.mark.attack("C14")
@ends
def test_a_start_does_not_read_the_messages_of_earlier_segments(
    start_broker: Callable[..., BrokerProcess], read_for_nothing: int, end: str
):
    broker = start_broker(**SMALL)
    publish_all(attach(broker, "p"), [("a", b"x" * 4000)] * 2500, together=10)
    stored = log_bytes(broker)
    assert stored > 9_000_000
    assert end_then_read(broker, end) - read_for_nothing < stored // 10


def change_much(broker: BrokerProcess, between: Callable[[], object]) -> None:
    """Subscribe to the same filters again and again: much is written, and the state stays what it is."""
    client = attach(broker, "s")
    for _ in range(100):
        client.subscribe(*FILTERS, qos=1)
        between()
    client.disconnect()


@pytest.mark.attack("C14")
@pytest.mark.parametrize("messages", [True, False], ids=["with messages between", "without a message"])
@ends
def test_a_start_after_a_snapshot_does_not_read_the_changes_before_it(
    start_broker: Callable[..., BrokerProcess], read_for_nothing: int, end: str, messages: bool
):
    broker = start_broker(**SMALL)
    publisher = attach(broker, "p")
    change_much(broker, lambda: publisher.publish("a", b"m", 1) if messages else None)
    publisher.disconnect()
    changed = log_bytes(broker)
    assert changed > 5_000_000
    broker.stop()  # which leaves a snapshot
    broker.start()
    attach(broker, "s").disconnect()
    assert end_then_read(broker, end) - read_for_nothing < changed // 5


@pytest.mark.attack("C14")
def test_a_snapshot_is_made_by_itself_when_much_has_changed(start_broker: Callable[..., BrokerProcess]):
    """So that also a broker that is never stopped has a bounded start."""
    broker = start_broker(log__clean_interval_s=1)
    client = attach(broker, "s")
    long = [f"{'long' * 500}/{number}" for number in range(500)]  # a megabyte
    snapshots: set[Path] = set()
    for _ in range(150):
        client.subscribe(*long, qos=1)
        attach(broker, "p").publish("a", b"", 1)
        snapshots |= set((broker.data / "log").glob("*.snapshot"))
        if snapshots:
            return
    raise AssertionError("150 MB of changes, and no snapshot")


# ── very many sessions ──


class Start(NamedTuple):
    """What a start has cost when it listens."""

    cpu_s: float
    waited: int  # times that it gave up the processor by itself: for a disk, a lock, or to sleep


def start_with(folder: Path, sessions: int) -> Start:
    write_state(folder / "data" / "log", sessions)
    broker = BrokerProcess(folder / "data").start()
    try:
        assert sessions == 0 or f"sessions={sessions} " in broker.log()
        cpu_s = time.clock_gettime(~broker.pid << 3 | 2)  # as clock_getcpuclockid has it for its process
        tasks = [path.read_text().splitlines() for path in Path(f"/proc/{broker.pid}/task").glob("*/status")]
        found = [line.split()[1] for lines in tasks for line in lines if line.startswith("voluntary_ctxt_switches")]
        return Start(cpu_s, sum(map(int, found)))
    finally:
        broker.kill()


@pytest.mark.attack("C14")
def test_each_of_a_hundred_thousand_sessions_costs_a_start_what_each_of_ten_thousand_does(tmp_path: Path):
    """Ten times the sessions, ten times the work, and never a wait for one of them."""
    none, some, many = (start_with(tmp_path / str(count), count) for count in (0, 10_000, 100_000))
    assert (many.cpu_s - none.cpu_s) / 100_000 < 3 * (some.cpu_s - none.cpu_s) / 10_000  # 10 times, if it were squared
    assert many.waited < none.waited + 1000


INSTRUCTIONS_PER_SESSION_MAX = 3000  # with two filters; it takes about 2000, some more or less in each Python


async def recover(folder: Path) -> Recovered:
    """All of a start that looks at sessions."""
    store = SegmentedLog.open(folder)
    log = EmbeddedLog(store, wait_for_disk=False, loop=asyncio.get_running_loop(), on_failure=lambda error: None)
    broker = Broker(Config(), log, now_s=0.0, now_ms=0, wake=lambda: None, report=lambda event, fields: None)
    try:
        return Recovery(broker).run(lambda what, done: None)
    finally:
        store.close(clean=False)


@pytest.mark.attack("C14")
def test_a_start_takes_so_many_instructions_for_a_session_however_many_there_are(tmp_path: Path):
    def per_session(sessions: int) -> float:
        folder = tmp_path / str(sessions)
        write_state(folder, sessions)
        assert asyncio.run(recover(folder)).sessions == sessions  # also imports what is imported once
        return instructions(lambda: asyncio.run(recover(folder))) / sessions

    among_few, among_many = per_session(300), per_session(3000)
    assert 0 < among_many <= 1.2 * among_few
    assert among_many < INSTRUCTIONS_PER_SESSION_MAX
