"""Retention keeps up with what comes in, however many topics it is spread over."""

from __future__ import annotations

import pytest
from heart_kit import MIB, attach, attach_kept, eventually, publish_all

from harness import BrokerProcess

SMALL = {
    "log__segment_bytes": MIB // 2,
    "log__tail_bytes": MIB,
    "log__retention_bytes": 8 * MIB,
    "log__hard_bytes": 16 * MIB,
    "log__clean_interval_s": 1,
}
TOPICS = 20_000
PAYLOAD = bytes(240)
MESSAGES = 200_000  # 56 MB on disk


def on_disk(broker: BrokerProcess) -> int:
    """What the log takes, its indices included."""
    found = 0
    for path in (broker.data / "log").iterdir():
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            pass  # let go meanwhile
    return found


@pytest.mark.req("S0.5", "S4.13")
def test_56_mb_over_20000_topics_are_trimmed_to_the_limit(start_broker):
    """With retention at 8 MiB and the hard limit at 16 MiB, and sessions away that need nothing of it, a burst over
    many topics is gone from the disk within a minute: looking at its topics takes no longer than writing them did."""
    broker: BrokerProcess = start_broker(**SMALL)
    for i in range(100):
        away = attach_kept(broker, f"away-{i}")
        away.subscribe(f"other/{i}/#", qos=1)
        away.disconnect()
    messages = ((b"topic/%d/of/many" % (i % TOPICS), PAYLOAD) for i in range(MESSAGES))
    publish_all(attach(broker, "publisher"), messages, 1, together=500)
    written = on_disk(broker)
    try:
        eventually(lambda: on_disk(broker) <= 16 * MIB, timeout_s=60)
    except AssertionError:
        raise AssertionError(f"{on_disk(broker) / MIB:.0f} MiB of {written // MIB} are left after a minute") from None


@pytest.mark.req("S0.5")
def test_the_log_stays_within_bounds_while_more_comes_in(start_broker):
    """The same under load: a steady stream over ever new topics never takes much more than the hard limit allows."""
    broker: BrokerProcess = start_broker(**SMALL)
    publisher = attach(broker, "publisher")
    most = 0
    for part in range(20):  # 110 MB in all
        publish_all(publisher, [(b"t/%d/%d" % (part, i), bytes(1000)) for i in range(5000)], 1, together=100)
        most = max(most, on_disk(broker))
    try:
        eventually(lambda: on_disk(broker) <= 16 * MIB, timeout_s=20)
    except AssertionError:
        raise AssertionError(f"{on_disk(broker) / MIB:.0f} MiB are left on disk, {most / MIB:.0f} at most") from None
