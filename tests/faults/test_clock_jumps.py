"""The system's clock jumps: the broker's own time neither goes back nor expires anything early (C6)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import RawClient
from message_frames import encode_messages
from tidegate.log.files import SegmentedLog
from tidegate.log.run import Run
from tidegate.server.clock import SLEW, STEP_MS, Clock
from tidegate.wire import Properties

DAY_S = 86_400.0
NOON_S = 1_800_000_000.0


class TwoClocks:
    """The machine's clocks, to be moved by hand; `clock` runs by them."""

    def __init__(self, not_before_ms: int = 0) -> None:
        self.monotonic_s, self.wall_s = 1000.0, NOON_S
        self.clock = Clock(lambda: self.monotonic_s, lambda: self.wall_s, not_before_ms)

    def pass_seconds(self, seconds: int) -> int:
        """Let time pass: how many milliseconds of record time that were."""
        before_ms = self.clock.now_ms
        for _ in range(seconds):
            self.monotonic_s += 1
            self.wall_s += 1
            self.clock.tick()
            self.clock.adjust(1.0)
        return self.clock.now_ms - before_ms


def test_record_time_follows_the_system_clock_while_it_behaves():
    clocks = TwoClocks()
    assert clocks.clock.now_ms == NOON_S * 1000
    assert clocks.pass_seconds(60) == 60_000


@pytest.mark.attack("C6")
def test_a_clock_that_goes_back_makes_record_time_slower_but_never_goes_back():
    clocks = TwoClocks()
    clocks.wall_s -= DAY_S
    assert 60_000 * (1 - 2 * SLEW) <= clocks.pass_seconds(60) < 60_000


@pytest.mark.attack("C6")
def test_a_small_jump_ahead_is_made_up_for_gradually():
    clocks = TwoClocks()
    clocks.wall_s += 30
    assert 60_000 < clocks.pass_seconds(60) <= 60_000 * (1 + 2 * SLEW)
    clocks.pass_seconds(1000)
    assert abs(clocks.clock.now_ms - clocks.wall_s * 1000) <= 1


@pytest.mark.attack("C6")
def test_a_clock_that_was_far_behind_is_followed_at_once():
    clocks = TwoClocks()
    clocks.wall_s += STEP_MS / 1000 + DAY_S
    clocks.pass_seconds(2)
    assert abs(clocks.clock.now_ms - clocks.wall_s * 1000) <= 1000


@pytest.mark.attack("C6")
def test_intervals_do_not_notice_the_system_clock():
    clocks = TwoClocks()
    before_s = clocks.clock.now_s
    clocks.wall_s -= 10 * DAY_S
    clocks.pass_seconds(5)
    clocks.wall_s += 20 * DAY_S
    clocks.pass_seconds(5)
    assert clocks.clock.now_s - before_s == 10


@pytest.mark.attack("C6")
def test_record_time_begins_where_the_log_ends_although_the_clock_is_behind():
    later_ms = int((NOON_S + DAY_S) * 1000)
    clocks = TwoClocks(not_before_ms=later_ms)
    assert clocks.clock.now_ms == later_ms
    assert clocks.pass_seconds(60) > 0


@pytest.mark.attack("C6")
@given(st.lists(st.tuples(st.integers(-10**7, 10**7), st.integers(0, 5)), max_size=30))
def test_record_time_never_goes_back_whatever_the_clock_does(jumps: list[tuple[int, int]]):
    clocks = TwoClocks()
    last_ms = clocks.clock.now_ms
    for jump_s, seconds in jumps:
        clocks.wall_s += jump_s
        clocks.pass_seconds(seconds)
        assert clocks.clock.now_ms >= last_ms
        last_ms = clocks.clock.now_ms


# ── between two runs of a real broker ──


def log_from_the_future(folder: Path, ahead_s: float) -> None:
    """A log whose newest message was stored by a clock that was ahead."""
    log = SegmentedLog.open(folder)
    time_ms = int((time.time() + ahead_s) * 1000)
    run = Run(b"a", b"earlier", b"default", 1, [b"from the future"])
    log.append(encode_messages([run], log.end, time_ms), log.end + 1)
    log.close()


@pytest.mark.attack("C6")
def test_a_broker_whose_clock_was_set_back_since_its_last_run_keeps_order_and_expiry(start_broker, tmp_path: Path):
    log_from_the_future(tmp_path / "data" / "log", DAY_S)
    broker = start_broker()
    publisher = RawClient(broker.port, 5)
    publisher.connect("publisher")
    publisher.publish("a", b"now", 1, properties=Properties(message_expiry=60))
    reader = RawClient(broker.port, 5)
    reader.connect("reader")
    reader.subscribe("$replay/earliest/a", qos=1)
    first, second = reader.message(), reader.message()
    assert (first.payload, second.payload) == (b"from the future", b"now")
    assert 58 <= (second.properties.message_expiry or 0) <= 60
    stamps = [dict(message.properties.user)[b"tidegate-time"] for message in (first, second)]
    assert stamps == sorted(stamps)
    reader.subscribe("$replay/-1h/a", qos=1)  # by the broker's time, which is a day ahead as well
    assert reader.message().payload == b"from the future"


@pytest.mark.attack("C6")
def test_a_broker_whose_clock_was_far_ahead_does_not_end_sessions_that_are_younger(start_broker):
    """A session's absence is reckoned from when it was last seen; a time in the future counts as just now."""
    broker = start_broker()
    client = RawClient(broker.port, 5)
    client.connect("client", clean=False, properties=Properties(session_expiry=3600))
    client.subscribe("a", qos=1)
    client.disconnect()
    broker.kill()
    log_from_the_future(broker.data / "log", 30 * 60)
    broker.start()
    again = RawClient(broker.port, 5)
    assert again.connect("client", clean=False, properties=Properties(session_expiry=3600)).session_present
