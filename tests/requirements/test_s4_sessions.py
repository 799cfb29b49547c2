"""Sessions and their messages across reconnections and restarts, clean and unclean."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from observing import process_figures, publish_all
from stored import KEPT, attach, attach_kept, eventually, stored_session

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties, Puback, Will

ends = pytest.mark.parametrize("how", ["stop", "kill"])
versions = pytest.mark.parametrize("version", [4, 5])


def restart(broker: BrokerProcess, how: str) -> None:
    getattr(broker, how)()
    broker.start()


def sleeper(broker: BrokerProcess, *filters: str, name: str = "s", version: int = 4, qos: int = 1) -> None:
    """Make a session with filters and leave it."""
    sub = attach_kept(broker, name, version)
    sub.subscribe(*filters, qos=qos)
    sub.disconnect()


def were_connected(broker: BrokerProcess) -> int:
    """What the last start found out."""
    return int(re.findall(r"were_connected=(\d+)", broker.log())[-1])


def present(sub: RawClient) -> bool:
    assert sub.connack is not None
    return sub.connack.session_present


# ── subscriptions ──


@pytest.mark.req("S4.1")
@ends
@versions
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_subscription_survives_the_end_of_the_broker(start_broker, how, version, durability):
    broker = start_broker(durability)
    attach_kept(broker, "s", version).subscribe("a/+", qos=1)
    restart(broker, how)
    back = attach_kept(broker, "s", version)
    assert present(back)
    attach(broker, "p").publish("a/b", b"m", 1)
    assert back.message().payload == b"m"


@pytest.mark.req("S4.1")
@ends
def test_the_options_of_a_subscription_survive(broker, how):
    sub = attach_kept(broker, "s")
    options = {"no_local": True, "retain_as_published": True}
    sub.subscribe("a", qos=2, properties=Properties(subscription_ids=(77,)), **options)
    restart(broker, how)
    back = attach_kept(broker, "s")
    back.publish("a", b"own", 1)
    attach(broker, "p").publish("a", b"m", 2, retain=True)
    got = back.message()
    assert (got.payload, got.qos, got.retain, got.properties.subscription_ids) == (b"m", 2, True, (77,))


@pytest.mark.req("S4.1")
def test_what_was_subscribed_and_unsubscribed_between_many_kills_is_known(broker):
    for i in range(5):
        sub = attach_kept(broker, "s")
        sub.subscribe(f"a/{i}", "same", qos=1)
        if i:
            sub.unsubscribe(f"a/{i - 1}")
        restart(broker, "kill")
    back, pub = attach_kept(broker, "s"), attach(broker, "p")
    for i in range(5):
        pub.publish(f"a/{i}", b"%d" % i, 1)
    pub.publish("same", b"same", 1)
    assert back.payloads(2) == [b"4", b"same"]
    back.nothing(0.05)


# ── messages ──


@pytest.mark.req("S4.2", "S4.11")
@versions
@pytest.mark.parametrize("qos", [1, 2])
def test_messages_sent_while_a_client_was_away_are_delivered_when_it_returns(client, unique, version, qos):
    kept = KEPT if version == 5 else Properties()
    sub = client(unique, version, clean=False, properties=kept)
    sub.subscribe(unique, qos=2)
    sub.disconnect()
    pub = client(unique + "-p")
    for i in range(20):
        pub.publish(unique, b"%d" % i, qos)
    back = client(unique, version, clean=False, properties=kept)
    got = [back.message() for _ in range(20)]
    assert [(m.payload, m.qos) for m in got] == [(b"%d" % i, qos) for i in range(20)]
    back.nothing(0.05)


@pytest.mark.req("S4.2", "S4.7")
@ends
@pytest.mark.parametrize("qos", [1, 2])
def test_messages_survive_the_end_of_the_broker_as_well_as_subscriptions(broker, how, qos):
    sleeper(broker, "a", qos=2)
    pub = attach(broker, "p")
    for i in range(10):
        pub.publish("a", b"%d" % i, qos)
    restart(broker, how)
    pub = attach(broker, "p")
    for i in range(10, 20):
        pub.publish("a", b"%d" % i, qos)
    back = attach_kept(broker, "s", 4)
    assert back.payloads(20) == [b"%d" % i for i in range(20)]
    back.nothing(0.05)


@pytest.mark.req("S4.2")
def test_messages_are_kept_for_a_client_whose_connection_broke(client, unique):
    sub = client(unique, 4, clean=False)
    sub.subscribe(unique, qos=1)
    sub.close()
    client(unique + "-p").publish(unique, b"m", 1)
    assert client(unique, 4, clean=False).message().payload == b"m"


@pytest.mark.req("S4.3")
def test_a_reconnection_is_served_from_memory_while_the_log_s_tail_holds_what_it_missed(start_broker):
    broker = start_broker()
    assert _bytes_read_for_what_was_missed(broker) < 100_000


@pytest.mark.req("S4.3")
def test_a_reconnection_is_served_from_disk_when_the_tail_does_not_hold_what_it_missed(start_broker):
    broker = start_broker(log__tail_bytes=65536)
    assert _bytes_read_for_what_was_missed(broker) > 700_000


def _bytes_read_for_what_was_missed(broker: BrokerProcess) -> int:
    sleeper(broker, "a")
    pub = attach(broker, "p")
    for start in range(0, 1000, 20):
        publish_all(pub, [("a", b"%04d" % i + b"x" * 800) for i in range(start, start + 20)])
    before = process_figures(broker)["rchar"]
    back = attach_kept(broker, "s", 4)
    got = [back.message(acknowledge=False).payload[:4] for _ in range(1000)]
    assert got == [b"%04d" % i for i in range(1000)]
    return process_figures(broker)["rchar"] - before


@pytest.mark.req("S4.5")
@ends
def test_only_what_was_not_acknowledged_is_sent_again(broker, how):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    pub = attach(broker, "p")
    publish_all(pub, [("a", b"%d" % i) for i in range(10)])
    got = [sub.message(acknowledge=False) for _ in range(10)]
    for message in got[:6]:
        sub.send(Puback(message.packet_id))
    eventually(lambda: stored_session(broker.data, "s").position == 6)
    restart(broker, how)
    back = attach_kept(broker, "s")
    assert back.payloads(4) == [b"6", b"7", b"8", b"9"]
    back.nothing(0.05)


@pytest.mark.req("S4.5")
@ends
def test_only_sessions_that_wanted_them_get_stored_messages(broker, how):
    sleeper(broker, "a", name="wanted")
    sleeper(broker, "b", name="other")
    clean = attach(broker, "clean")
    clean.subscribe("a", qos=1)
    clean.close()
    attach(broker, "p").publish("a", b"m", 1)
    restart(broker, how)
    assert attach_kept(broker, "wanted", 4).message().payload == b"m"
    attach_kept(broker, "other", 4).nothing(0.05)
    back = attach_kept(broker, "clean", 4)
    assert not present(back)
    back.nothing(0.05)


@pytest.mark.req("S4.5")
@ends
def test_what_was_delivered_and_acknowledged_before_is_not_repeated_by_a_second_restart(broker, how):
    sleeper(broker, "a")
    attach(broker, "p").publish("a", b"m", 1)
    restart(broker, how)
    back = attach_kept(broker, "s", 4)
    assert back.message().payload == b"m"
    eventually(lambda: stored_session(broker.data, "s").position > 0)
    restart(broker, how)
    attach_kept(broker, "s", 4).nothing(0.05)


# ── who was connected ──


@pytest.mark.req("S4.6")
def test_after_a_kill_it_is_known_who_was_connected(broker):
    sleeper(broker, "a", name="away")
    here = [attach_kept(broker, f"here{i}") for i in range(3)]
    here[0].publish("a", b"", 1)
    broker.kill()
    listed = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", "sessions", "--data", str(broker.data), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    facts = {each["client_id"]: each["connected"] for each in map(json.loads, listed.stdout.splitlines())}
    assert facts == {"away": False, "here0": True, "here1": True, "here2": True}
    broker.start()
    assert were_connected(broker) == 3


@pytest.mark.req("S4.6")
def test_the_wills_of_those_who_were_connected_are_sent_after_a_kill(broker):
    sleeper(broker, "will/#", name="watcher")
    will = Will(b"will/here", b"gone", 1, False)
    here = attach(broker, "here", 5, clean=False, properties=KEPT, will=will)
    left = attach(broker, "left", 5, clean=False, properties=KEPT, will=Will(b"will/left", b"gone", 1, False))
    left.disconnect()
    here.publish("x", b"", 1)
    restart(broker, "kill")
    watcher = attach_kept(broker, "watcher", 4)
    assert watcher.message().topic == b"will/here"
    watcher.nothing(0.05)


@pytest.mark.req("S4.6")
def test_after_a_clean_stop_nobody_counts_as_connected(broker):
    attach_kept(broker, "s")
    restart(broker, "stop")
    assert were_connected(broker) == 0


# ── filters ──


@pytest.mark.req("S4.8")
@ends
def test_every_filter_of_a_client_is_kept_and_served(broker, how):
    filters = [f"topic/{i}" for i in range(60)]
    sleeper(broker, *filters)
    pub = attach(broker, "p")
    publish_all(pub, [(topic, topic.encode()) for topic in filters[:30]])
    restart(broker, how)
    publish_all(attach(broker, "p"), [(topic, topic.encode()) for topic in filters[30:]])
    back = attach_kept(broker, "s", 4)
    assert back.payloads(60) == [topic.encode() for topic in filters]
    facts = stored_session(broker.data, "s")
    assert facts is not None and facts.subscriptions == filters


@pytest.mark.req("S4.8")
def test_overlapping_filters_of_an_absent_client_give_one_delivery(broker):
    sleeper(broker, "a/b", "a/+", "#")
    attach(broker, "p").publish("a/b", b"m", 1)
    restart(broker, "kill")
    back = attach_kept(broker, "s", 4)
    assert back.message().payload == b"m"
    back.nothing(0.05)


@pytest.mark.req("S4.12")
@ends
@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ("a/#", [b"a", b"a/b", b"a/b/c", b"a/x/c"]),
        ("a/+/c", [b"a/b/c", b"a/x/c"]),
        ("+", [b"a", b"z"]),
        ("#", [b"a", b"a/b", b"a/b/c", b"a/x/c", b"z", b"z/b"]),
        ("+/b", [b"a/b", b"z/b"]),
    ],
)
def test_wildcard_filters_of_absent_clients_are_matched(start_broker, how, filter, expected):
    broker = start_broker(log__tail_bytes=65536, log__segment_bytes=65536)
    sleeper(broker, filter)
    topics = ["a", "a/b", "a/b/c", "a/x/c", "z", "z/b"]
    publish_all(attach(broker, "p"), [(topic, topic.encode()) for topic in topics])
    restart(broker, how)
    back = attach_kept(broker, "s", 4)
    assert back.payloads(len(expected)) == expected
    back.nothing(0.05)


# ── clean sessions, connected sessions ──


@pytest.mark.req("S4.9")
@ends
@versions
def test_a_clean_session_gets_nothing_of_what_its_predecessor_missed(broker, how, version):
    sub = attach_kept(broker, "s", version)
    sub.subscribe("a", qos=1)
    sub.disconnect()
    attach(broker, "p").publish("a", b"m", 1)
    restart(broker, how)
    clean = attach(broker, "s", version)
    assert not present(clean)
    clean.subscribe("a", qos=1)
    clean.nothing(0.05)
    clean.disconnect()
    back = attach_kept(broker, "s", version)
    assert not present(back)
    back.nothing(0.05)


@pytest.mark.req("S4.10")
@ends
def test_what_a_connected_session_acknowledged_is_not_kept_for_it(broker, how):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=2)
    pub = attach(broker, "p")
    for i in range(10):
        pub.publish("a", b"%d" % i, i % 3)
    assert len([sub.message() for _ in range(10)]) == 10
    eventually(lambda: stored_session(broker.data, "s").position >= 9)
    sub.disconnect()
    pub.publish("a", b"missed", 1)
    restart(broker, how)
    back = attach_kept(broker, "s")
    assert back.message().payload == b"missed"
    back.nothing(0.05)


@pytest.mark.req("S4.11")
def test_what_was_handed_over_at_a_reconnection_is_not_handed_over_again(client, unique):
    sub = client(unique, 4, clean=False)
    sub.subscribe(unique, qos=1)
    sub.disconnect()
    publish_all(client(unique + "-p"), [(unique, b"%d" % i) for i in range(10)])
    back = client(unique, 4, clean=False)
    assert len(back.payloads(10)) == 10
    back.disconnect()
    client(unique, 4, clean=False).nothing(0.05)


@pytest.mark.req("S4.11")
def test_a_reconnection_that_breaks_off_again_and_again_gets_everything_in_the_end(client, unique):
    sub = client(unique, 4, clean=False)
    sub.subscribe(unique, qos=1)
    sub.disconnect()
    publish_all(client(unique + "-p"), [(unique, b"%d" % i) for i in range(50)])
    got: set[bytes] = set()
    for _ in range(10):
        back = client(unique, 4, clean=False)
        got.update(back.payloads(5))
        back.disconnect()
    assert got == {b"%d" % i for i in range(50)}


# ── long names ──


@pytest.mark.req("S4.1")
@versions
@ends
def test_a_session_with_the_longest_name_that_mqtt_has_outlives_a_restart(start_broker, version, how):
    """65,535 bytes; another that differs in the last of them is another's."""
    broker = start_broker("fsync", mqtt__client_id_bytes_max=65535)
    names = ["n" * 65_534 + last for last in "ab"]
    for name in names:
        sub = attach_kept(broker, name, version)
        sub.subscribe("to/" + name[-1], qos=1)
        assert sub.publish("by/" + name[-1], b"", 1) in (0, 0x10)  # the log names who published
        sub.disconnect()
    publisher = attach(broker, "publisher")
    publisher.publish("to/a", b"before", 1)
    restart(broker, how)
    publisher = attach(broker, "publisher")
    for last in "ab":
        publisher.publish("to/" + last, last.encode(), 1)
    for name, missed in zip(names, ([b"before", b"a"], [b"b"]), strict=True):
        sub = attach_kept(broker, name, version)
        assert present(sub)
        assert sub.payloads(len(missed)) == missed
        sub.nothing()
        sub.disconnect()
    assert not present(attach_kept(broker, names[0][:-1], version))
