"""What a start costs is what the state is, not all that ever happened (C14): counted in bytes read, not in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from observing import log_bytes, process_figures, publish_all

from harness import BrokerProcess, RawClient
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
