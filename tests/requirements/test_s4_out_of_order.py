"""What was acknowledged out of order does not come again after a restart: each message is owed or not by itself."""

from __future__ import annotations

import pytest
from observing import publish_all
from stored import attach, attach_kept

from harness import BrokerProcess, RawClient
from tidegate.wire import Puback, Publish

ends = pytest.mark.parametrize("end", ["kill", "stop"])
filters = pytest.mark.parametrize(
    "filter", ["a", "$replay/earliest/a", "$share/g/a"], ids=["plain", "replay", "shared"]
)

STORED_S = 0.6  # what was acknowledged is written ten times a second: by then it is


def numbered(messages: list[Publish]) -> dict[int, Publish]:
    return {int(message.payload): message for message in messages}


def acknowledge(client: RawClient, messages: dict[int, Publish], *numbers: int) -> None:
    for number in numbers:
        client.send(Puback(messages[number].packet_id))
    client.nothing(STORED_S)


def restart(broker: BrokerProcess, end: str) -> None:
    getattr(broker, end)()
    broker.start()


def come_again(client: RawClient) -> list[int]:
    """The numbers of all messages that come, acknowledged."""
    got: list[int] = []
    while True:
        try:
            got.append(int(client.message(0.5).payload))
        except TimeoutError:
            return got


@pytest.mark.req("S4.5")
@ends
@filters
def test_exactly_what_was_not_acknowledged_comes_again_after_a_restart(broker, end: str, filter: str):
    sub, pub = attach_kept(broker, "s"), attach(broker, "p")
    sub.subscribe(filter, qos=1)
    publish_all(pub, [("a", b"%d" % number) for number in range(1, 11)])
    messages = numbered([sub.message(acknowledge=False) for _ in range(10)])
    acknowledge(sub, messages, 1, 2, 4, 5, 7)
    restart(broker, end)
    again = come_again(attach_kept(broker, "s"))
    assert (sorted(again) if "$share" in filter else again) == [3, 6, 8, 9, 10]  # a group may send it in any order


@pytest.mark.req("S4.5")
@ends
def test_what_was_acknowledged_out_of_order_over_two_restarts_stays_so(broker, end: str):
    sub, pub = attach_kept(broker, "s"), attach(broker, "p")
    sub.subscribe("a", qos=1)
    publish_all(pub, [("a", b"%d" % number) for number in range(1, 11)])
    messages = numbered([sub.message(acknowledge=False) for _ in range(10)])
    acknowledge(sub, messages, 2, 4, 6, 8, 10)
    restart(broker, end)
    sub = attach_kept(broker, "s")
    messages = numbered([sub.message(acknowledge=False) for _ in range(5)])
    assert sorted(messages) == [1, 3, 5, 7, 9]
    acknowledge(sub, messages, 3, 9)
    restart(broker, end)
    assert come_again(attach_kept(broker, "s")) == [1, 5, 7]


@pytest.mark.req("S2.15", "S4.5")
@ends
def test_a_consumer_s_place_in_each_topic_survives_a_restart(broker, end: str):
    """All of one topic is acknowledged and nothing of the other, although they lie mixed in the log."""
    sub, pub = attach_kept(broker, "s"), attach(broker, "p")
    sub.subscribe("slow", "quick", qos=1)
    publish_all(pub, [("slow" if number % 2 else "quick", b"%d" % number) for number in range(40)])
    messages = numbered([sub.message(acknowledge=False) for _ in range(40)])
    acknowledge(sub, messages, *range(0, 40, 2))
    restart(broker, end)
    assert come_again(attach_kept(broker, "s")) == list(range(1, 40, 2))


@pytest.mark.req("S4.5")
@ends
def test_new_messages_follow_those_that_come_again(broker, end: str):
    sub, pub = attach_kept(broker, "s"), attach(broker, "p")
    sub.subscribe("a", qos=1)
    publish_all(pub, [("a", b"%d" % number) for number in range(1, 6)])
    messages = numbered([sub.message(acknowledge=False) for _ in range(5)])
    acknowledge(sub, messages, 2, 4, 5)
    sub.close()
    publish_all(pub, [("a", b"%d" % number) for number in range(6, 9)])
    restart(broker, end)
    assert come_again(attach_kept(broker, "s")) == [1, 3, 6, 7, 8]
