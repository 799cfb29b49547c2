"""Somebody sets the machine's clock while the broker runs: what lasts an interval lasts as long as it should (C6).

The broker is the real one; only the time of day that it sees is moved. Whatever depends on it is given time to go
wrong: several updates of $SYS, which come once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observing import sys_until
from recorded_disk import with_inside
from stored import eventually, stored_messages

from harness import BrokerProcess, RawClient
from tidegate.wire import Pingreq, Pingresp, Properties, Puback, Publish, Will

DAY_S = 86_400
HOUR_S = 3600
NO_SUBSCRIBERS = 0x10
LOOKS = 3  # updates of $SYS in which nothing may happen

# Record time follows a clock that is far ahead at once, for it was wrong before (`server/clock`); what is measured by
# it then counts the jump.
a_little_ahead = pytest.mark.parametrize("jump_s", [300], ids=["five minutes ahead"])
ahead = pytest.mark.parametrize("jump_s", [300, DAY_S], ids=["five minutes ahead", "a day ahead"])


class ClockedBroker(BrokerProcess):
    """A broker whose clock can be set."""

    def __init__(self, data: Path, **settings: Any) -> None:
        super().__init__(data, "os", sys__interval_s=1, **settings)
        self.moved_by = data.with_name(data.name + "-clock")

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": with_inside(), "CLOCK_MOVED_BY": str(self.moved_by)}

    def set_clock(self, moved_by_s: float) -> None:
        temporary = self.moved_by.with_suffix(".new")
        temporary.write_text(str(moved_by_s))
        temporary.replace(self.moved_by)

    def let_it_look(self) -> None:
        """Return when it has had several occasions to be mistaken."""
        seen = 0

        def enough(values: dict[str, str]) -> bool:
            nonlocal seen
            seen += 1
            return seen > LOOKS

        sys_until(self, enough)

    def join(self, client_id: str, expiry_s: int = 0, **connect: Any) -> RawClient:
        client = RawClient(self.port, 5)
        client.connect(client_id, clean=False, properties=Properties(session_expiry=expiry_s), **connect)
        return client


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[Callable[..., ClockedBroker]]:
    started: list[ClockedBroker] = []

    def start(**settings: Any) -> ClockedBroker:
        broker = ClockedBroker(tmp_path / "data", **settings)
        started.append(broker)
        broker.start()
        return broker

    yield start
    for broker in started:
        if broker.alive:
            broker.stop()


def is_gone(broker: ClockedBroker, topic: str) -> bool:
    """Whether nobody subscribes to it any more."""
    with RawClient(broker.port, 5) as publisher:
        publisher.connect()
        return publisher.publish(topic, b"", 1) == NO_SUBSCRIBERS


# ── ahead: nothing ends early ──


@pytest.mark.attack("C6")
@ahead
def test_a_client_within_its_keep_alive_stays_connected(clocked, jump_s: int):
    broker = clocked()
    client = broker.join("client", keep_alive=100)
    broker.set_clock(jump_s)
    broker.let_it_look()
    client.send(Pingreq())
    client.expect(Pingresp)


@pytest.mark.attack("C6")
@ahead
def test_a_client_that_still_has_time_to_acknowledge_stays_connected(clocked, jump_s: int):
    broker = clocked()
    client = broker.join("client", HOUR_S)
    client.subscribe("a", qos=1)
    client.publish("a", b"m", 1, wait=False)
    message = client.amid(Publish)
    broker.set_clock(jump_s)
    broker.let_it_look()
    client.send(Puback(message.packet_id))
    client.expect(Puback)
    client.nothing(0.1)


@pytest.mark.attack("C6")
@ahead
def test_a_session_that_expires_later_is_not_ended_at_the_jump(clocked, jump_s: int):
    broker = clocked()
    client = broker.join("client", 120)
    client.subscribe("a", qos=1)
    client.disconnect()
    broker.set_clock(jump_s)
    broker.let_it_look()
    assert broker.join("client", 120).connack.session_present


@pytest.mark.attack("C6")
@a_little_ahead
def test_a_message_that_has_not_expired_is_delivered_with_the_rest_of_its_time(clocked, jump_s: int):
    broker = clocked()
    client = broker.join("client", 2 * DAY_S)
    client.subscribe("a", qos=1)
    client.disconnect()
    publisher = broker.join("publisher")
    publisher.publish("a", b"m", 1, properties=Properties(message_expiry=120))
    publisher.publish("kept", b"m", 1, True, properties=Properties(message_expiry=120))
    broker.set_clock(jump_s)
    broker.let_it_look()
    back = broker.join("client", 2 * DAY_S)
    publisher.publish("a", b"last", 1)
    message = back.message()
    assert message.payload == b"m", "it expired early"
    assert 60 < (message.properties.message_expiry or 0) <= 120
    assert back.message().payload == b"last"
    back.subscribe("kept", qos=1)
    kept = back.message(3)
    assert 60 < (kept.properties.message_expiry or 0) <= 120


@pytest.mark.attack("C6")
@ahead
def test_a_will_waits_for_the_whole_of_its_delay(clocked, jump_s: int):
    broker = clocked()
    watcher = broker.join("watcher", keep_alive=0)
    watcher.subscribe("wills", qos=1)
    will = Will(b"wills", b"", 1, False, Properties(will_delay=120))
    broker.join("client", 2 * DAY_S, will=will).close()
    broker.set_clock(jump_s)
    broker.let_it_look()
    watcher.nothing(0.1)


@pytest.mark.attack("C6")
@a_little_ahead
def test_messages_are_kept_for_as_long_as_retention_says(clocked, jump_s: int):
    broker = clocked(log__retention_s=200, log__clean_interval_s=1, log__segment_bytes=65536)
    publisher = broker.join("publisher")
    for i in range(60):
        publisher.publish("a", b"%d" % i + b"x" * 4000, 1)
    broker.set_clock(jump_s)
    publisher.publish("a", b"after", 1)
    broker.let_it_look()
    assert stored_messages(broker.data)[0].position == 0, "messages were trimmed that are some seconds old"


# ── back: nothing lasts for ever ──


@pytest.mark.attack("C6")
def test_when_the_clock_goes_back_a_silent_client_is_still_noticed(clocked):
    broker = clocked()
    client = broker.join("client", keep_alive=1)
    broker.set_clock(-DAY_S)
    client.until_closed(20)


@pytest.mark.attack("C6")
def test_when_the_clock_goes_back_a_session_still_expires(clocked):
    broker = clocked()
    client = broker.join("client", 1)
    client.subscribe("a", qos=1)
    client.disconnect()
    broker.set_clock(-DAY_S)
    eventually(lambda: is_gone(broker, "a"))


@pytest.mark.attack("C6")
def test_when_the_clock_goes_back_a_message_still_expires(clocked):
    broker = clocked()
    client = broker.join("client", HOUR_S)
    client.subscribe("a", qos=1)
    client.disconnect()
    publisher = broker.join("publisher")
    publisher.publish("a", b"m", 1, properties=Properties(message_expiry=1))
    publisher.publish("kept", b"m", 1, True, properties=Properties(message_expiry=1))
    broker.set_clock(-DAY_S)
    broker.let_it_look()
    publisher.publish("a", b"last", 1)
    back = broker.join("client", HOUR_S)
    assert back.message().payload == b"last"
    back.subscribe("kept", qos=1)
    back.nothing(0.1)


@pytest.mark.attack("C6")
def test_when_the_clock_goes_back_a_will_still_comes(clocked):
    broker = clocked()
    watcher = broker.join("watcher", keep_alive=0)
    watcher.subscribe("wills", qos=1)
    broker.join("client", HOUR_S, will=Will(b"wills", b"w", 1, False, Properties(will_delay=1))).close()
    broker.set_clock(-DAY_S)
    assert watcher.message(20).payload == b"w"


@pytest.mark.attack("C6")
def test_when_the_clock_goes_back_messages_are_still_trimmed(clocked):
    broker = clocked(log__retention_s=1, log__clean_interval_s=1, log__segment_bytes=65536)
    publisher = broker.join("publisher")
    broker.set_clock(-DAY_S)
    for i in range(60):
        publisher.publish("a", b"%d" % i + b"x" * 4000, 1)
    eventually(lambda: stored_messages(broker.data)[0].position > 30)


# ── while the broker was dead, the clock is all there is ──


@pytest.mark.req("S0.20")
def test_a_will_s_delay_goes_on_over_a_crash_and_does_not_start_anew(clocked):
    """Half of it passes, the broker is killed, and comes again when a little of it is left; and not before."""
    broker = clocked()
    watcher = broker.join("watcher", DAY_S)
    watcher.subscribe("wills", qos=1)
    will = Will(b"wills", b"w", 1, False, Properties(will_delay=HOUR_S))
    broker.join("client", DAY_S, will=will).close()
    watcher.nothing(0.1)
    broker.kill()
    broker.set_clock(HOUR_S / 2)
    broker.start()
    watcher = broker.join("watcher", DAY_S, keep_alive=0)
    broker.let_it_look()
    watcher.nothing(0.1)
    broker.kill()
    broker.set_clock(HOUR_S - 5)
    broker.start()
    watcher = broker.join("watcher", DAY_S, keep_alive=0)
    assert watcher.message(30).payload == b"w"


@pytest.mark.req("S4.13")
def test_a_session_s_expiry_goes_on_over_a_crash_and_does_not_start_anew(clocked):
    broker = clocked()
    client = broker.join("client", HOUR_S)
    client.subscribe("a", qos=1)
    client.disconnect()
    broker.kill()
    broker.set_clock(HOUR_S / 2)
    broker.start()
    assert not is_gone(broker, "a")
    broker.kill()
    broker.set_clock(HOUR_S - 5)
    broker.start()
    eventually(lambda: is_gone(broker, "a"), 30)
