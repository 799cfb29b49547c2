"""The cleaner: what nobody needs any more goes by itself, what somebody needs stays."""

from __future__ import annotations

import pytest
from observing import log_bytes
from stored import attach, attach_kept, eventually, stored_messages

from harness import BrokerProcess
from tidegate.wire import Properties, Puback

PADDING = b"x" * 4000
SMALL = {
    "log__segment_bytes": 65536,
    "log__retention_bytes": 1 << 20,
    "log__tail_bytes": 65536,
    "log__clean_interval_s": 1,
}


def publish_megabytes(broker: BrokerProcess, count: int, topic: str = "bulk") -> None:
    pub = attach(broker, "bulk publisher")
    for i in range(count * 250):
        pub.publish(topic, b"%d " % i + PADDING, 1, wait=False)
        if i % 50 == 49:
            for _ in range(50):
                pub.expect(Puback)
    pub.disconnect()


def floor(broker: BrokerProcess) -> int:
    """The lowest position still stored; far above all if none is."""
    return min((record.position for record in stored_messages(broker.data)), default=1 << 62)


@pytest.mark.req("S0.5")
def test_messages_that_nobody_needs_go_by_themselves(start_broker):
    broker = start_broker(**SMALL)
    publish_megabytes(broker, 3)
    eventually(lambda: floor(broker) > 400)
    assert stored_messages(broker.data)[-1].position == 749
    publish_megabytes(broker, 1)  # periodically: not only once
    eventually(lambda: floor(broker) > 650)


@pytest.mark.req("S0.5")
def test_old_messages_go_when_their_time_is_over(start_broker):
    broker = start_broker(**SMALL, log__retention_s=1)
    publish_megabytes(broker, 1)
    eventually(lambda: floor(broker) > 200)


@pytest.mark.req("S0.5")
def test_what_an_absent_session_has_not_got_stays_until_it_has_it(start_broker):
    broker = start_broker(**SMALL)
    sub = attach_kept(broker, "s")
    sub.subscribe("bulk", qos=1)
    sub.disconnect()
    publish_megabytes(broker, 1, "before")  # nobody needs these: they show that the cleaner has been here
    publish_megabytes(broker, 3)
    eventually(lambda: floor(broker) > 100)
    sub = attach_kept(broker, "s")
    assert [int(sub.message().payload.split()[0]) for _ in range(750)] == list(range(750))
    sub.disconnect()
    eventually(lambda: floor(broker) > 600)


@pytest.mark.req("S0.5", "S2.22")
@pytest.mark.parametrize("filter", ["$share/g/bulk", "$replay/earliest/bulk"], ids=["shared group", "replay"])
@pytest.mark.parametrize("present", [False, True], ids=["away", "slow"])
def test_what_a_reader_of_another_kind_has_not_got_stays_until_it_has_it(start_broker, filter, present):
    broker = start_broker(**SMALL)
    one_at_a_time = Properties(session_expiry=3600, receive_maximum=1)
    sub = attach_kept(broker, "s", properties=one_at_a_time)
    sub.subscribe(filter, qos=1)
    if not present:
        sub.disconnect()
    publish_megabytes(broker, 1, "before")  # nobody needs these: they show that the cleaner has been here
    publish_megabytes(broker, 3)
    eventually(lambda: floor(broker) > 100)
    if not present:
        sub = attach_kept(broker, "s", properties=one_at_a_time)
    assert [int(sub.message().payload.split()[0]) for _ in range(750)] == list(range(750))
    sub.disconnect()
    eventually(lambda: floor(broker) > 600)


@pytest.mark.req("S0.5")
@pytest.mark.parametrize("ending", ["unsubscribes", "ends its session"])
def test_what_was_kept_for_a_session_goes_when_it(start_broker, ending):
    broker = start_broker(**SMALL)
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=3600, receive_maximum=1))
    sub.subscribe("bulk", qos=1)
    publish_megabytes(broker, 3)
    sub.message(acknowledge=False)
    if ending == "unsubscribes":
        sub.unsubscribe("bulk")
    sub.disconnect(properties=Properties(session_expiry=0 if ending == "ends its session" else None))
    eventually(lambda: floor(broker) > 400)


@pytest.mark.req("S0.5")
def test_retained_messages_and_sessions_outlive_the_segments_they_were_written_in(start_broker):
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    pub.publish("r", b"retained", 1, True)
    sub = attach_kept(broker, "s")
    sub.subscribe("rare", qos=1)
    sub.disconnect()
    publish_megabytes(broker, 3)
    eventually(lambda: floor(broker) > 400)
    broker.kill()
    broker.start()
    sub = attach_kept(broker, "s")
    assert sub.connack.session_present
    attach(broker, "p").publish("rare", b"x", 1)
    assert sub.message().payload == b"x"
    sub.subscribe("r")
    assert sub.message().payload == b"retained"


@pytest.mark.req("S0.5")
def test_above_the_hard_limit_even_what_is_needed_goes_and_that_is_said(start_broker):
    broker = start_broker(**SMALL, log__hard_bytes=2 << 20)
    sub = attach_kept(broker, "s")
    sub.subscribe("bulk", qos=1)
    sub.disconnect()
    publish_megabytes(broker, 4)
    eventually(lambda: floor(broker) > 400)
    assert "log.promise_broken" in broker.log()
    eventually(lambda: 0 < log_bytes(broker) <= 2 << 20)
    assert stored_messages(broker.data)[-1].position == 999  # the newest stay
