"""A reader that retention has passed is told: a notice with what it lost, and a counter."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from observing import publish_all, sys_until
from stored import attach, attach_kept

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties, Puback

MIB = 1 << 20
OVERRUN = "dropped/overrun by retention"

Start = Callable[..., BrokerProcess]


def small(start_broker: Start, durability: str, **more: Any) -> BrokerProcess:
    """A broker whose log holds about a megabyte, whatever anyone needs."""
    limits = {
        "log__tail_bytes": 65536,
        "log__segment_bytes": 65536,
        "log__retention_bytes": MIB,
        "log__hard_bytes": MIB,
        "log__memory_bytes": MIB,
        "log__clean_interval_s": 1,
    }
    return start_broker(durability, sys__interval_s=1, **limits, **more)


def overrun(broker: BrokerProcess, topic: str = "a", count: int = 5000) -> None:
    """Publish more than the log may hold, and wait until it has let go of the first messages."""
    publish_all(attach(broker, "filler"), [(topic, b"%05d" % i + b"x" * 400) for i in range(count)])
    sys_until(broker, lambda values: int(values["log/floor"]) > count // 4)


def notice(watcher: RawClient) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(watcher.message().payload)
    return told


@pytest.mark.req("S3.14")
@pytest.mark.attack("C7")
@pytest.mark.parametrize("durability", ["memory", "os"])
def test_a_session_that_was_away_too_long_is_told_what_it_lost(start_broker, durability):
    broker = small(start_broker, durability)
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    sub.disconnect()
    watcher = attach(broker, "w")
    watcher.subscribe("$SYS/clients/s/notice")
    overrun(broker)
    back = attach_kept(broker, "s")
    told = notice(watcher)
    first = back.message()
    assert (told["event"], told["lost_from"]) == ("overrun", 0)
    assert told["lost_before"] == int(first.payload[:5])  # what comes is what is left, from there on
    assert back.payloads(4999 - int(first.payload[:5]))[-1][:5] == b"04999"


@pytest.mark.req("S3.14")
@pytest.mark.attack("C7")
@pytest.mark.parametrize("durability", ["memory", "os"])
def test_a_client_that_watches_its_own_notices_gets_this_one(start_broker, durability):
    broker = small(start_broker, durability)
    sub = attach_kept(broker, "s", 4)
    sub.subscribe("a", "$SYS/clients/s/notice", qos=1)
    sub.disconnect()
    overrun(broker)
    back = attach_kept(broker, "s", 4)
    told = [m for m in (back.message() for _ in range(20)) if m.topic == b"$SYS/clients/s/notice"]
    assert [json.loads(m.payload)["event"] for m in told] == ["overrun"]


@pytest.mark.req("S3.14")
@pytest.mark.attack("C7")
@pytest.mark.parametrize("durability", ["memory", "os"])
def test_an_overrun_is_counted(start_broker, durability):
    broker = small(start_broker, durability)
    subs = [attach_kept(broker, f"s{i}") for i in range(3)]
    for sub in subs:
        sub.subscribe("a", qos=1)
        sub.disconnect()
    overrun(broker)
    back = [attach_kept(broker, f"s{i}") for i in range(3)]
    for sub in back:
        sub.message()
    sys_until(broker, lambda values: values.get(OVERRUN) == "3")


@pytest.mark.req("S3.14")
@pytest.mark.attack("C7")
def test_a_connected_reader_that_does_not_acknowledge_is_overrun_and_told_when_it_goes_on(start_broker):
    broker = small(start_broker, "memory")
    sub = attach(broker, "s", 5, properties=Properties(receive_maximum=5))
    sub.subscribe("$SYS/clients/s/notice")
    sub.subscribe("a", qos=1)
    overrun(broker)
    got = [sub.message() for _ in range(5)]
    while not got[-1].topic.startswith(b"$SYS"):  # a few it had read before they went
        got.append(sub.message())
    told = json.loads(got.pop().payload)
    assert [int(message.payload[:5]) for message in got] == list(range(told["lost_from"]))
    assert told["lost_before"] == int(sub.message().payload[:5]) > told["lost_from"]


@pytest.mark.req("S3.14")
@pytest.mark.attack("C7")
def test_a_replay_that_retention_passes_is_told(start_broker):
    broker = small(start_broker, "memory")
    publish_all(attach(broker, "p"), [("a", b"early")] * 100)
    sub = attach(broker, "s", 5, properties=Properties(receive_maximum=5))
    sub.subscribe("$SYS/clients/s/notice")
    sub.subscribe("$replay/10/a", qos=1)
    window = [sub.message(acknowledge=False) for _ in range(5)]
    overrun(broker)
    for message in window:
        sub.send(Puback(message.packet_id))
    while not (message := sub.message()).topic.startswith(b"$SYS"):
        pass
    told = json.loads(message.payload)
    assert 15 <= told["lost_from"] < told["lost_before"] == 100 + int(sub.message().payload[:5])


@pytest.mark.req("S3.14")
@pytest.mark.attack("C7")
def test_a_shared_group_that_retention_passed_tells_its_members(start_broker):
    broker = small(start_broker, "memory")
    sub = attach_kept(broker, "s")
    sub.subscribe("$share/g/a", qos=1)
    sub.disconnect()
    watcher = attach(broker, "w")
    watcher.subscribe("$SYS/clients/+/notice")
    overrun(broker)
    back = attach_kept(broker, "s")
    message = watcher.message()
    assert message.topic == b"$SYS/clients/s/notice"
    assert json.loads(message.payload)["lost_before"] == int(back.message().payload[:5])


@pytest.mark.req("S4.13")
def test_nobody_is_told_anything_when_only_what_nobody_needed_was_let_go(start_broker):
    broker = small(start_broker, "os")
    sub = attach_kept(broker, "s")
    sub.subscribe("a", "$SYS/clients/s/notice", qos=1)
    sub.disconnect()
    overrun(broker, "other")
    attach(broker, "p").publish("a", b"m", 1)
    back = attach_kept(broker, "s")
    assert back.message().payload == b"m"
    back.nothing(0.1)


@pytest.mark.req("S4.13")
def test_what_a_session_needs_is_kept_beyond_the_retention_up_to_the_hard_limit(start_broker):
    limits = {"log__segment_bytes": 65536, "log__retention_bytes": MIB, "log__clean_interval_s": 1}
    broker = start_broker(log__tail_bytes=65536, log__hard_bytes=64 * MIB, sys__interval_s=1, **limits)
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    sub.disconnect()
    pub = attach(broker, "p")
    publish_all(pub, [("before", b"")] * 10)
    publish_all(pub, [("a", b"%05d" % i + b"x" * 400) for i in range(5000)])
    sys_until(broker, lambda values: int(values["uptime"].split()[0]) > 3)  # it has looked at the log by then
    back = attach_kept(broker, "s")
    assert [int(payload[:5]) for payload in back.payloads(5000)] == list(range(5000))
    # Acknowledged, they go.
    sys_until(broker, lambda values: int(values["store/messages/bytes"]) < 2 * MIB)
