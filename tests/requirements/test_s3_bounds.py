"""What messages cost: copies, memory and work, with slow, silent and sleeping readers; and fairness."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from observing import log_bytes, process_figures, publish_all, sys_values
from recorded_disk import with_inside
from stored import attach, eventually

from harness import BrokerProcess, RawClient
from tidegate.wire import Pingreq, Pingresp, Properties, Puback, Publish

MIB = 1 << 20
SMALL = {"log__tail_bytes": MIB, "log__segment_bytes": 4 * MIB}
WAY_IN_COPIES = 6


# ── copies ──


@pytest.mark.req("S3.9")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_ten_publishes_to_ten_subscribers_cost_a_hundred_copies_on_the_wire_and_ten_in_the_log(start_broker, qos):
    broker = start_broker(sys__interval_s=1)
    payload = b"x" * 50_000
    subs = [attach(broker, f"s{i}", 4 + i % 2) for i in range(10)]
    for sub in subs:
        sub.subscribe("a", qos=max(1, qos))
    before, before_log, pub = sys_values(broker), log_bytes(broker), attach(broker, "p")
    for _ in range(10):
        pub.publish("a", payload, qos)
    for sub in subs:
        assert [sub.message().payload for _ in range(10)] == [payload] * 10
        sub.nothing(0.02)
    after = sys_values(broker)
    assert int(after["log/end"]) - int(before["log/end"]) == 10
    assert log_bytes(broker) - before_log < 11 * len(payload)
    assert 100 * len(payload) < int(after["bytes/sent"]) - int(before["bytes/sent"]) < 101 * len(payload)


class CountedBroker(BrokerProcess):
    """A broker that tells how much memory its objects took at most."""

    def environment(self) -> dict[str, str]:
        self.counts = self.data.with_name("counts")
        self.counts.mkdir(exist_ok=True)
        return super().environment() | {"PYTHONPATH": with_inside(), "ALLOCATIONS_IN": str(self.counts)}

    def ask(self, what: str) -> None:
        (self.counts / what).touch()
        eventually(lambda: not (self.counts / what).exists())


@pytest.mark.req("S3.9")
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "each in its own way"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_to_ten_subscribers_is_in_memory_once_for_each_at_most(tmp_path, qos, alike):
    """And a few times for its way in: the bytes received, the message in them, the frame that is appended."""
    payload = b"x" * (3 * MIB)
    with CountedBroker(tmp_path / "data", log__tail_bytes=65536) as broker:
        subs = [attach(broker, f"s{i}", 5) for i in range(10)]
        for number, sub in enumerate(subs):
            ids = () if alike else (number + 1,)  # so that no two get the same bytes
            sub.subscribe("a", qos=qos, properties=Properties(subscription_ids=ids))
        pub = attach(broker, "p")
        pub.publish("a", b"warm", max(1, qos))
        for sub in subs:
            sub.message()
        broker.ask("begin")
        pub.publish("a", payload, max(1, qos))
        for sub in subs:
            assert sub.message().payload == payload
        broker.ask("end")
        copies = int((broker.counts / "peak").read_text()) / len(payload)
    assert copies < len(subs) + WAY_IN_COPIES


# ── memory ──


@pytest.mark.req("S3.10", "S3.2")
@pytest.mark.parametrize("qos", [0, 1])
def test_readers_that_never_read_cost_their_send_window_and_no_more(start_broker, qos):
    """Each has a subscription identifier of its own, so that no two could share the bytes that wait for them."""
    broker = start_broker(**SMALL)
    stuck = [attach(broker, f"s{i}", 5) for i in range(10)]
    for i, sub in enumerate(stuck):
        sub.subscribe("a", qos=qos, properties=Properties(subscription_ids=(i + 1,)))
    pub = attach(broker, "p")
    publish_all(pub, [("a", b"x" * 4000)] * 500, qos)
    before = broker.rss_bytes()
    publish_all(pub, [("a", b"x" * 4000)] * 16_000, qos, together=100)  # 64 MB, 640 MB for all
    assert broker.rss_bytes() - before < 80 * MIB
    del stuck


@pytest.mark.req("S3.10")
def test_a_reader_that_acknowledges_without_reading_gets_no_more_than_its_send_window(start_broker):
    broker = start_broker(**SMALL)
    stuck, pub = attach(broker, "s", 5), attach(broker, "p")
    stuck.subscribe("a", qos=1)
    publish_all(pub, [("a", b"")] * 200)
    publish_all(pub, [("a", b"x" * 4000)] * 30_000, qos=0)  # 120 MB wait for it in the log
    before = broker.rss_bytes()
    for pid in range(1, 201):
        stuck.send(Puback(pid))
        pub.send(Pingreq())
        pub.expect(Pingresp)
    assert broker.rss_bytes() - before < 30 * MIB


@pytest.mark.req("S3.10", "S3.2")
def test_readers_with_a_full_window_cost_no_copies_of_what_waits_for_them(start_broker):
    broker = start_broker(**SMALL)
    window = Properties(receive_maximum=5)
    slow = [attach(broker, f"s{i}", 5, properties=window) for i in range(50)]
    for sub in slow:
        sub.subscribe("a", qos=1)
    pub = attach(broker, "p")
    publish_all(pub, [("a", b"x" * 4000)] * 500)
    before = broker.rss_bytes()
    publish_all(pub, [("a", b"%05d" % i + b"x" * 4000) for i in range(8000)])  # 32 MB, 1.6 GB for all
    assert broker.rss_bytes() - before < 60 * MIB
    for _ in range(500):
        slow[7].message()
    assert [int(slow[7].message().payload[:5]) for _ in range(1000)] == list(range(1000))


@pytest.mark.req("S3.10")
def test_the_log_gives_back_what_nobody_needs_while_publishers_go_on(start_broker):
    limits = {"log__segment_bytes": 256 << 10, "log__retention_bytes": MIB, "log__clean_interval_s": 1}
    broker = start_broker(log__tail_bytes=65536, sys__interval_s=1, **limits)
    pub = attach(broker, "p")
    publish_all(pub, [("a", b"x" * 4000)] * 2000)
    for _ in range(20):
        publish_all(pub, [("a", b"x" * 4000)] * 10)
        if int(sys_values(broker)["store/messages/bytes"]) < 2 * MIB:
            return
    pytest.fail("the log was not trimmed")


# ── sleeping sessions ──


def _sleepers(broker: BrokerProcess, count: int) -> None:
    for i in range(count):
        with RawClient(broker.port) as sleeper:
            sleeper.connect(f"sleeper{i}", clean=False)
            sleeper.subscribe("a/#", f"b/{i}", qos=1)


@pytest.mark.req("S3.11")
def test_sleeping_sessions_cost_no_copies_and_no_writes(start_broker):
    broker = start_broker(sys__interval_s=1, **SMALL)
    _sleepers(broker, 300)
    pub = attach(broker, "p")
    publish_all(pub, [("warm", b"x" * 100)] * 1000)
    first = sys_values(broker), log_bytes(broker), process_figures(broker)["syscw"]
    publish_all(pub, [("nobody", b"x" * 100)] * 10_000)
    second = sys_values(broker), log_bytes(broker), process_figures(broker)["syscw"]
    publish_all(pub, [("a/1234", b"x" * 100)] * 10_000)
    third = sys_values(broker), log_bytes(broker), process_figures(broker)["syscw"]
    assert third[1] - second[1] == pytest.approx(second[1] - first[1], rel=0.05)
    assert third[2] - second[2] < 2 * (second[2] - first[2]) + 100
    sent = [int(values[0]["bytes/sent"]) for values in (first, second, third)]
    assert sent[2] - sent[1] == pytest.approx(sent[1] - sent[0], rel=0.2)


@pytest.mark.req("S3.11", "S3.10")
def test_messages_published_while_sessions_sleep_add_nothing_per_session(start_broker):
    broker = start_broker(**SMALL)
    _sleepers(broker, 1000)
    pub = attach(broker, "p")
    publish_all(pub, [("a/x", b"x" * 400)] * 5000)
    before = broker.rss_bytes()
    publish_all(pub, [("a/x", b"x" * 400)] * 20_000)
    assert broker.rss_bytes() - before < 8 * MIB  # eight bytes a message and session would be 160 MB


@pytest.mark.req("S3.11")
def test_publishing_costs_the_same_work_with_and_without_sleeping_sessions(start_broker):
    """Work by the processor's clock of the broker: generous, for one look at each session would be 300 times more."""
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    publish_all(pub, [("a/x", b"x" * 100)] * 2000)
    alone = _ticks(broker, pub)
    _sleepers(broker, 300)
    assert _ticks(broker, pub) <= 4 * alone + 20


def _ticks(broker: BrokerProcess, pub: RawClient) -> int:
    def used() -> int:
        fields = Path(f"/proc/{broker.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = used()
    publish_all(pub, [("a/x", b"x" * 100)] * 20_000)
    return used() - before


# ── fairness ──


@pytest.mark.req("S3.4", "S3.10")
def test_a_reader_far_behind_does_not_hold_up_live_ones(start_broker):
    """While others read a long past, each live message comes before the past is over: shown by order, not by time."""
    broker = start_broker(log__tail_bytes=65536, log__segment_bytes=MIB)
    pub = attach(broker, "p")
    publish_all(pub, [("past", b"x" * 400)] * 30_000)
    live = attach(broker, "live")
    live.subscribe("now", qos=1)
    reading: list[int] = []
    done = threading.Event()

    def read_the_past(name: str) -> None:
        with RawClient(broker.port) as late:
            late.connect(name)
            late.subscribe("$replay/earliest/past")
            for _ in range(30_000):
                late.expect(Publish)
            reading.append(1)
            if len(reading) == 3:
                done.set()

    threads = [threading.Thread(target=read_the_past, args=(f"late{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    while_reading = 0
    while not done.is_set():
        pub.publish("now", b"", 1)
        live.message()
        while_reading += not done.is_set()
    for thread in threads:
        thread.join()
    assert while_reading > 20


@pytest.mark.req("S3.10")
def test_a_slow_reader_does_not_keep_messages_from_others(start_broker):
    broker = start_broker(**SMALL)
    stuck, quick, pub = attach(broker, "stuck"), attach(broker, "quick"), attach(broker, "p")
    for sub in (stuck, quick):
        sub.subscribe("a")
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.extend(int(quick.message().payload[:6]) for _ in range(10_000)))
    reader.start()
    publish_all(pub, [("a", b"%06d" % i + b"x" * 3000) for i in range(10_000)], qos=0)
    reader.join()
    assert got == list(range(10_000))
    # And the slow one reads on where it was.
    assert [int(stuck.message().payload[:6]) for _ in range(10_000)] == list(range(10_000))
