"""What is kept for absent sessions and what is not; limits in time and size; switching it off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from observing import log_bytes, publish_all, sys_until
from stored import attach, attach_kept, eventually, stored_session

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties

MIB = 1 << 20

reconnections = pytest.mark.parametrize("how", ["reconnect", "stop", "kill"])


def come_back(broker: BrokerProcess, how: str) -> RawClient:
    """The session `s` again, after nothing, a clean stop or a kill."""
    if how != "reconnect":
        getattr(broker, how)()
        broker.start()
    return attach_kept(broker, "s")


def seconds_pass(broker: BrokerProcess, count: int) -> None:
    """By the broker's own clock (`sys__interval_s=1`)."""
    began: list[int] = []

    def passed(values: dict[str, str]) -> bool:
        began.append(int(values["uptime"].split()[0]))
        return began[-1] - began[0] > count

    sys_until(broker, passed)


# ── what must be kept ──


@pytest.mark.req("S4.4")
@reconnections
@pytest.mark.parametrize(("message_qos", "filter_qos"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_message_and_a_filter_of_qos_1_or_2_make_a_message_kept(broker, how, message_qos, filter_qos):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=filter_qos)
    sub.disconnect()
    attach(broker, "p").publish("a", b"m", message_qos)
    got = come_back(broker, how).message()
    assert (got.payload, got.qos) == (b"m", min(message_qos, filter_qos))


@pytest.mark.req("S4.4")
@reconnections
def test_a_qos_0_message_is_not_kept(broker, how):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    sub.disconnect()
    pub = attach(broker, "p")
    pub.publish("a", b"not kept", 0)
    pub.publish("a", b"kept", 1)
    back = come_back(broker, how)
    assert back.message().payload == b"kept"
    back.nothing(0.05)


@pytest.mark.req("S4.4")
@reconnections
def test_nothing_is_kept_for_a_qos_0_filter(broker, how):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=0)
    sub.subscribe("b", qos=1)
    sub.disconnect()
    pub = attach(broker, "p")
    pub.publish("a", b"not kept", 1)
    pub.publish("b", b"kept", 1)
    back = come_back(broker, how)
    assert back.message().payload == b"kept"
    back.nothing(0.05)


@pytest.mark.req("S4.4", "S4.9")
@reconnections
@pytest.mark.parametrize("version", [4, 5])
def test_nothing_is_kept_for_a_clean_session(broker, how, version):
    sub = attach(broker, "s", version)
    sub.subscribe("a", qos=1)
    sub.disconnect()
    attach(broker, "p").publish("a", b"not kept", 1)
    back = come_back(broker, how)
    assert back.connack is not None and not back.connack.session_present
    back.nothing(0.05)


@pytest.mark.req("S4.4")
@reconnections
def test_nothing_is_kept_for_an_expired_session(broker, how):
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=1))
    sub.subscribe("a", qos=1)
    sub.disconnect()
    attach(broker, "p").publish("a", b"not kept", 1)
    eventually(lambda: stored_session(broker.data, "s") is None)
    back = come_back(broker, how)
    assert back.connack is not None and not back.connack.session_present
    back.nothing(0.05)


@pytest.mark.req("S4.4")
@reconnections
def test_nothing_is_kept_for_a_filter_that_was_unsubscribed(broker, how):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", "b", qos=1)
    sub.unsubscribe("a")
    sub.disconnect()
    pub = attach(broker, "p")
    pub.publish("a", b"not kept", 1)
    pub.publish("b", b"kept", 1)
    back = come_back(broker, how)
    assert back.message().payload == b"kept"
    back.nothing(0.05)


# ── limits ──


@pytest.mark.req("S4.13")
@pytest.mark.parametrize("how", ["reconnect", "kill"])
def test_a_message_that_expired_while_its_reader_was_away_is_not_delivered_and_counted(start_broker, how):
    broker = start_broker(sys__interval_s=1)
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    sub.disconnect()
    pub = attach(broker, "p", 5)
    pub.publish("a", b"short", 1, properties=Properties(message_expiry=1))
    pub.publish("a", b"long", 1, properties=Properties(message_expiry=1000))
    pub.publish("a", b"for ever", 1)
    seconds_pass(broker, 1)
    back = come_back(broker, how)
    long, for_ever = back.message(), back.message()
    assert (long.payload, for_ever.payload) == (b"long", b"for ever")
    assert long.properties.message_expiry is not None and 900 < long.properties.message_expiry < 1000
    assert for_ever.properties.message_expiry is None
    back.nothing(0.05)
    sys_until(broker, lambda values: values.get("dropped/expired") == "1")


@pytest.mark.req("S4.13")
@pytest.mark.parametrize("version", [4, 5])
def test_the_longest_a_session_is_kept_can_be_limited(start_broker, version):
    broker = start_broker(mqtt__session_expiry_max_s=1)
    sub = attach_kept(broker, "s", version)
    if version == 5:
        assert sub.connack is not None and sub.connack.properties.session_expiry == 1
    sub.disconnect()
    eventually(lambda: stored_session(broker.data, "s") is None)


@pytest.mark.req("S4.13")
def test_a_session_whose_time_ends_while_the_broker_is_down_is_gone_afterwards(broker):
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=1))
    sub.subscribe("a", qos=1)
    attach_kept(broker, "longer").subscribe("a", qos=1)
    sub.disconnect()
    with attach(broker, "p") as pub:
        pub.publish("a", b"m", 1)
    broker.kill()
    time.sleep(1.1)  # nobody is there who could tell
    broker.start()
    eventually(lambda: stored_session(broker.data, "s") is None)
    assert attach_kept(broker, "longer").message().payload == b"m"


@pytest.mark.req("S4.13")
def test_in_total_no_more_is_kept_than_the_hard_limit_whoever_needs_it(start_broker):
    limits = {"log__retention_bytes": MIB, "log__hard_bytes": 2 * MIB, "log__clean_interval_s": 1}
    broker = start_broker(log__tail_bytes=65536, log__segment_bytes=256 << 10, sys__interval_s=1, **limits)
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    sub.disconnect()
    publish_all(attach(broker, "p"), [("a", b"%05d" % i + b"x" * 1000) for i in range(6000)])
    values = sys_until(broker, lambda values: int(values["store/messages/bytes"]) <= 2 * MIB)
    assert int(values["dropped/needed, but the log was full"]) > 0
    assert log_bytes(broker) <= 2 * MIB
    assert int(values["store/messages/bytes"]) > MIB  # and no more was taken than had to be
    back = attach_kept(broker, "s")
    first = int(back.message().payload[:5])
    assert [int(payload[:5]) for payload in back.payloads(5999 - first)] == list(range(first + 1, 6000))


@pytest.mark.req("S4.13")
def test_what_nobody_needs_is_not_kept_beyond_its_time(start_broker):
    limits = {"log__retention_s": 1, "log__clean_interval_s": 1}
    broker = start_broker(log__tail_bytes=65536, log__segment_bytes=65536, sys__interval_s=1, **limits)
    sub = attach_kept(broker, "s")
    sub.subscribe("needed", qos=1)
    sub.disconnect()
    pub = attach(broker, "p")
    publish_all(pub, [("nobody", b"x" * 1000)] * 300)
    sys_until(broker, lambda values: int(values["log/floor"]) > 200)
    publish_all(pub, [("needed", b"x" * 1000)] * 300)
    seconds_pass(broker, 2)
    assert len(attach_kept(broker, "s").payloads(300)) == 300


# ── on by default, and in the file ──


class Configured(BrokerProcess):
    """A broker that is told everything by its file."""

    def arguments(self) -> list[str]:
        return ["--config", str(self.data.with_suffix(".toml")), "--port", str(self.port)]


Configure = Callable[[str], Configured]


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Configure]:
    started: list[Configured] = []

    def start(text: str) -> Configured:
        (tmp_path / "data.toml").write_text(f"data = {str(tmp_path / 'data')!r}\n{text}")
        started.append(Configured(tmp_path / "data"))
        started[-1].start()
        return started[-1]

    yield start
    for broker in started:
        if broker.alive:
            broker.stop()


def kept_over_a_kill(broker: BrokerProcess) -> bool:
    sub = attach_kept(broker, "s", 4)
    sub.subscribe("a", qos=1)
    sub.close()
    attach(broker, "p").publish("a", b"m", 1)
    broker.kill()
    broker.start()
    back = attach_kept(broker, "s", 4)
    assert back.connack is not None
    if back.connack.session_present:
        assert back.message().payload == b"m"
    else:
        back.nothing(0.05)
    return back.connack.session_present


@pytest.mark.req("S4.14")
def test_sessions_and_messages_are_kept_when_nothing_is_configured(configured):
    assert kept_over_a_kill(configured(""))


@pytest.mark.req("S4.14", "S2.27")
def test_keeping_can_be_limited_to_memory_in_the_configuration_file(configured):
    assert not kept_over_a_kill(configured('[log]\ndurability = "memory"\n'))


@pytest.mark.req("S4.14")
def test_sessions_can_be_made_to_end_with_their_connection_in_the_configuration_file(configured):
    assert not kept_over_a_kill(configured("[mqtt]\nsession_expiry_max_s = 0\n"))


@pytest.mark.req("S4.14", "S4.13")
def test_the_limits_in_the_configuration_file_hold(configured):
    limits = "segment_bytes = 65536\nretention_bytes = 1048576\nhard_bytes = 1048576\nclean_interval_s = 1\n"
    broker = configured(f'[log]\ndurability = "os"\n{limits}')
    publish_all(attach(broker, "p"), [("a", b"x" * 1000)] * 4000)
    eventually(lambda: log_bytes(broker) <= MIB)
