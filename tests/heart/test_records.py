"""Whatever a record holds, the broker starts: what cannot be applied is set aside, counted and reported."""

from __future__ import annotations

import time
from typing import Any

import pytest
from heart_kit import attach, attach_kept, counted, eventually, sys_until

from harness import BrokerProcess, RawClient
from tidegate.wire import Connect, Properties, Will, encode

TOPIC_NAME_INVALID = 0x90
DEEP = b"/".join([b"a"] * 60)
LEVELS = {"mqtt__topic_levels_max": 20}
PAIRS = 10
PROPER = {b"wills/%d" % i for i in range(PAIRS)}
ROOMY = {"mqtt__topic_levels_max": 100}


def delayed(topic: bytes, delay_s: int = 1, payload: bytes = b"gone") -> Will:
    return Will(topic, payload, 1, properties=Properties(will_delay=delay_s))


# ── at CONNECT ──


@pytest.mark.parametrize("name", [DEEP, b"/" * 21], ids=["deep", "slashes"])
def test_a_will_topic_with_too_many_levels_is_refused(start_broker, name):
    """A will is a publish to come: what could not be published is refused when it is set, with the reason."""
    broker: BrokerProcess = start_broker(**LEVELS)
    client = RawClient(broker.port, 5)
    assert client.connect("client", will=Will(name, b"x", 0)).reason == TOPIC_NAME_INVALID
    client.until_closed()
    old = RawClient(broker.port, 4)
    old.send_bytes(encode(Connect(4, b"client", True, 0, Will(name, b"x", 0)), 4))
    assert old.until_closed() == []  # 3.1.1 has no code for it [MQTT-3.1.4-1]
    assert broker.stop() == 0


def test_a_will_topic_with_as_many_levels_as_allowed_is_taken(start_broker):
    """(The bound itself is allowed, and the will goes out.)"""
    broker: BrokerProcess = start_broker(**LEVELS)
    listener = attach(broker, "listener")
    listener.subscribe("#", qos=1)
    topic = b"/".join([b"a"] * 20)
    attach(broker, "client", 5, will=Will(topic, b"gone", 1)).close()
    assert listener.message().topic == topic


# ── at start ──


class Folder:
    """A data folder with records that a broker with a lower limit cannot apply, and some that it can."""

    def __init__(self, broker: BrokerProcess, end: str) -> None:
        self.broker = broker
        # Due only in the next run, and then in turn: whatever comes due together, some come behind one that fails.
        for i in range(PAIRS):
            attach_kept(broker, f"too-deep-{i}", will=delayed(DEEP, 2)).close()
            attach_kept(broker, f"proper-{i}", will=delayed(b"wills/%d" % i, 2)).close()
        deep_filter = attach_kept(broker, "deep-filter")
        deep_filter.subscribe(DEEP.decode() + "/#", "plain", qos=1)
        deep_filter.disconnect()
        attach_kept(broker, "brief", properties=Properties(session_expiry=3), will=delayed(b"wills/brief", 60)).close()
        publisher = attach(broker, "publisher", 5)
        publisher.publish(DEEP, b"kept", 1, retain=True)
        publisher.publish("plain", b"for deep-filter", 1)
        getattr(broker, end)()
        self.seen = len(broker.log())

    def start(self, **settings: Any) -> BrokerProcess:
        self.broker.settings = {**settings, "sys__interval_s": 1}
        return self.broker.start(timeout_s=20)

    def news(self) -> str:
        """What the log has said since the folder was made."""
        return self.broker.log()[self.seen :]


@pytest.fixture(params=["stop", "kill"])
def folder(request: pytest.FixtureRequest, start_broker) -> Folder:
    return Folder(start_broker(**ROOMY), request.param)


def test_a_will_that_cannot_be_sent_costs_no_other_timer_and_no_start(folder: Folder):
    """The will that is due with too many levels is set aside. Another client's will and another session's end come in
    time; SIGTERM ends with 0; and the broker starts again, as often as one likes."""
    broker = folder.start(**LEVELS)
    listener = attach_kept(broker, "listener")
    listener.subscribe("wills/#", qos=1)
    try:
        expected = {*PROPER, b"wills/brief"}
        assert {listener.message(15).topic for _ in expected} == expected
    except TimeoutError:
        raise AssertionError(f"other timers stand still: {folder.news()[-1500:]}") from None
    brief = attach(broker, "brief", 5, clean=False)
    assert brief.connack is not None and not brief.connack.session_present
    assert broker.stop() == 0, folder.news()[-1500:]
    for _ in range(2):
        broker.start(timeout_s=20)
        again = attach_kept(broker, "deep-filter")
        assert again.connack is not None and again.connack.session_present
        assert broker.stop() == 0, folder.news()[-1500:]


def test_a_will_that_cannot_be_sent_is_counted_and_reported(folder: Folder):
    """Nothing is dropped silently: it is in `$SYS` under refused or dropped, and in the log with the client's name."""
    broker = folder.start(**LEVELS)
    sys_until(broker, lambda values: any("will" in reason for reason in counted(values)), timeout_s=15)
    assert "too-deep" in folder.news()
    assert "Traceback" not in folder.news()
    assert broker.stop() == 0


def test_a_will_that_came_due_while_the_broker_was_down_does_not_keep_it_from_starting(folder: Folder):
    """The first thing that a start does may be to send a will: one that cannot be is no reason not to start."""
    time.sleep(3)  # the time that the wills wait for passes while nobody is there
    broker = folder.start(**LEVELS)
    listener = attach(broker, "listener")
    listener.subscribe("$replay/earliest/wills/#", qos=1)
    assert {listener.message(15).topic for _ in PROPER} == PROPER
    assert broker.stop() == 0, folder.news()[-1500:]
    broker.start(timeout_s=20)
    assert broker.stop() == 0, folder.news()[-1500:]


def test_other_records_of_the_same_session_are_applied(folder: Folder):
    """A filter that may not be does not take the rest of its session with it."""
    broker = folder.start(**LEVELS)
    again = attach_kept(broker, "deep-filter")
    assert again.connack is not None and again.connack.session_present
    assert again.message().payload == b"for deep-filter"
    attach(broker, "publisher", 5).publish("plain", b"and more", 1)
    assert again.message().payload == b"and more"
    assert broker.stop() == 0


def test_with_the_old_limit_everything_is_as_it_was(folder: Folder):
    """(A control: with the limit that they were stored under, the will and the filter are what they were.)"""
    broker = folder.start(**ROOMY)
    listener = attach(broker, "listener")
    listener.subscribe("$replay/earliest/#", qos=1)
    got: set[bytes] = set()
    eventually(lambda: got.add(listener.message(15).topic) or {DEEP, *PROPER, b"plain"} <= got)
    assert broker.stop() == 0
