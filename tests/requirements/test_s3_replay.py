"""Going back in time with ordinary clients: `$replay/<from>/<filter>`, and `tidegate-from` on an MQTT 5 SUBSCRIBE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from observing import publish_all, user_properties
from stored import attach, attach_kept, eventually, stored_messages, stored_session

from harness import BrokerProcess, RawClient
from tidegate.wire import Pingreq, Pingresp, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel

SMALL = {"log__tail_bytes": 65536, "log__segment_bytes": 65536}  # most of the log is on disk only


def number(message: Publish) -> int:
    return int(message.payload.split(b".")[0])


def numbered(first: int, after: int, topic: str = "a", size: int = 100) -> Iterator[tuple[str, bytes]]:
    return ((topic, b"%d" % i + b"." * size) for i in range(first, after))


def numbers(sub: RawClient, count: int) -> list[int]:
    return [number(sub.message()) for _ in range(count)]


def going_back(start: str) -> Properties:
    return Properties(user=((b"tidegate-from", start.encode()),))


def iso(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Ten:
    """Ten messages of a topic in the log, one tick each."""

    def __init__(self, broker: BrokerProcess, topic: str) -> None:
        self.broker, self.topic = broker, topic
        self.pub = attach(broker, topic + "-p")
        for _, payload in numbered(0, 10):
            self.pub.publish(topic, payload, 1)
        stored = stored_messages(broker.data, topic.encode())
        self.positions = [record.run.base + record.at for record in stored]
        self.times_ms = [record.run.time_ms for record in stored]

    def client(self, version: int = 5) -> RawClient:
        return attach(self.broker, self.topic + "-s", version)


@pytest.fixture
def ten(shared_broker: BrokerProcess, unique: str) -> Ten:
    return Ten(shared_broker, unique)


# ── where to begin ──


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("first", [0, 1, 6, 9])
def test_a_filter_goes_back_to_a_position(ten, version, first):
    sub = ten.client(version)
    assert sub.subscribe(f"$replay/{ten.positions[first]}/{ten.topic}", qos=1).reasons == (1,)
    ten.pub.publish(ten.topic, b"10", 1)
    assert numbers(sub, 11 - first) == list(range(first, 11))


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("0", 0), ("9999999999999999", 10)])
def test_a_filter_goes_back_to_the_beginning_or_not_at_all(ten, version, start, first):
    sub = ten.client(version)
    assert sub.subscribe(f"$replay/{start}/{ten.topic}", qos=1).reasons == (1,)
    ten.pub.publish(ten.topic, b"10", 1)
    assert numbers(sub, 11 - first) == list(range(first, 11))


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("form", ["iso", "unix seconds", "unix milliseconds"])
def test_a_filter_goes_back_to_a_time(start_broker, version, form):
    broker = start_broker()
    pub = attach(broker, "p")
    publish_all(pub, numbered(0, 5))
    boundary_ms = _next_second_ms(broker, pub)
    publish_all(pub, numbered(5, 10))
    start = {
        "iso": iso(boundary_ms),
        "unix seconds": f"@{boundary_ms // 1000}",
        "unix milliseconds": f"@{boundary_ms}",
    }[form]
    sub = attach(broker, "s", version)
    sub.subscribe(f"$replay/{start}/a", qos=1)
    assert numbers(sub, 5) == list(range(5, 10))
    sub.nothing(0.05)


def _next_second_ms(broker: BrokerProcess, pub: RawClient) -> int:
    """A whole second after everything published so far; the log's own clock has reached it."""
    last_ms = max(record.run.time_ms for record in stored_messages(broker.data))
    boundary_ms = (last_ms // 1000 + 1) * 1000

    def reached() -> bool:
        pub.publish("clock", b"", 1)
        return stored_messages(broker.data)[-1].run.time_ms >= boundary_ms

    eventually(reached)
    return boundary_ms


@pytest.mark.req("S3.12")
def test_the_time_of_a_message_itself_is_where_it_is_found(ten):
    first = ten.times_ms.index(ten.times_ms[7])
    sub = ten.client(4)
    sub.subscribe(f"$replay/{iso(ten.times_ms[7])}/{ten.topic}", qos=1)
    assert numbers(sub, 10 - first) == list(range(first, 10))


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", [4, 5])
def test_a_filter_goes_back_by_an_age(start_broker, version):
    broker = start_broker()
    pub = attach(broker, "p")
    publish_all(pub, numbered(0, 5))
    _next_second_ms(broker, pub)
    _next_second_ms(broker, pub)
    publish_all(pub, numbered(5, 10))
    sub = attach(broker, "s", version)
    sub.subscribe("$replay/-1s/a", qos=1)
    assert numbers(sub, 5) == list(range(5, 10))
    everything = attach(broker, "e", version)
    everything.subscribe("$replay/-1h/a", qos=1)
    assert numbers(everything, 10) == list(range(10))


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(days=400)])
def test_a_time_to_come_means_from_now_on(ten, ahead):
    sub = ten.client(4)
    sub.subscribe(f"$replay/{(datetime.now(UTC) + ahead).strftime('%Y-%m-%dT%H:%M:%SZ')}/{ten.topic}", qos=1)
    ten.pub.publish(ten.topic, b"10", 1)
    assert numbers(sub, 1) == [10]


@pytest.mark.parametrize(
    "filter",
    ["$replay/yesterday/a", "$replay/2026-13-01/a", "$replay/-5/a", "$replay/earliest", "$replay/earliest/$share/g/a"],
)
@pytest.mark.parametrize("version", [4, 5])
def test_a_start_that_means_nothing_is_refused(client, unique, version, filter):
    assert client(unique, version).subscribe(filter, qos=1).reasons == (0x8F if version == 5 else 0x80,)


# ── the MQTT 5 property ──


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("form", ["earliest", "position", "time", "age"])
def test_a_user_property_takes_a_plain_filter_back(ten, form):
    start, first = {
        "earliest": ("earliest", 0),
        "position": (str(ten.positions[6]), 6),
        "time": (iso(ten.times_ms[5]), ten.times_ms.index(ten.times_ms[5])),
        "age": ("-1h", 0),
    }[form]
    sub = ten.client()
    assert sub.subscribe(ten.topic, qos=1, properties=going_back(start)).reasons == (1,)
    assert numbers(sub, 10 - first) == list(range(first, 10))


def test_a_user_property_that_means_nothing_is_refused(client, unique):
    sub = client(unique, 5)
    assert sub.subscribe(unique, qos=1, properties=going_back("whenever")).reasons == (0x8F,)


# ── what a replayed message carries ──


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_replayed_message_carries_its_first_time_and_position(ten, qos):
    sub = ten.client()
    sub.subscribe(f"$replay/earliest/{ten.topic}", qos=qos)
    got = [sub.message() for _ in range(10)]
    assert {message.qos for message in got} == {min(qos, 1)}
    carried = [user_properties(message) for message in got]
    assert [int(each["tidegate-position"]) for each in carried] == ten.positions
    assert [each["tidegate-time"] for each in carried] == [iso(time_ms) for time_ms in ten.times_ms]


def test_the_publisher_s_own_properties_stay_in_front(client, unique):
    own = Properties(user=((b"k", b"v"),), content_type=b"text/plain", correlation_data=b"c")
    client(unique + "-p", 5).publish(unique, b"m", 1, properties=own)
    sub = client(unique, 5)
    sub.subscribe(f"$replay/earliest/{unique}", qos=1)
    message = sub.message()
    assert (message.properties.content_type, message.properties.correlation_data) == (b"text/plain", b"c")
    assert [name for name, _ in message.properties.user] == [b"k", b"tidegate-time", b"tidegate-position"]


@pytest.mark.req("S3.12")
def test_a_position_that_was_delivered_can_be_gone_back_to(ten):
    sub = ten.client()
    sub.subscribe(f"$replay/earliest/{ten.topic}", qos=1)
    fourth = [sub.message() for _ in range(4)][3]
    sub.subscribe(f"$replay/{user_properties(fourth)['tidegate-position']}/{ten.topic}", qos=1)
    assert [number(m) for m in (sub.message() for _ in range(13))] == [*range(4, 10), *range(3, 10)]


@pytest.mark.req("S3.12")
def test_a_replayed_message_sent_again_after_a_reconnection_still_carries_its_position(ten):
    sub = attach_kept(ten.broker, ten.topic)
    sub.subscribe(f"$replay/earliest/{ten.topic}", qos=1)
    sub.message()
    before = sub.message(acknowledge=False)
    sub.close()
    again = attach_kept(ten.broker, ten.topic).message()
    assert (again.payload, again.dup) == (before.payload, True)
    assert user_properties(again) == user_properties(before)


# ── from disk through memory to the present ──


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_replay_crosses_disk_and_memory_and_stays_live(start_broker, version, qos):
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    publish_all(pub, ((f"a/{i % 7}" if i % 2 else "b", b"%d" % i + b"." * 100) for i in range(4000)))
    sub = attach(broker, "s", version)
    sub.subscribe("$replay/earliest/a/+", qos=qos)
    assert numbers(sub, 2000) == list(range(1, 4000, 2))
    publish_all(pub, numbered(4000, 4100, "a/live"))
    live = [sub.message() for _ in range(100)]
    assert [number(message) for message in live] == list(range(4000, 4100))
    assert not any(user_properties(message) for message in live)


@pytest.mark.req("S3.12")
def test_a_replay_loses_and_repeats_nothing_while_messages_keep_coming(start_broker):
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    publish_all(pub, numbered(0, 3000))
    sub = attach(broker, "s", 5, properties=Properties(receive_maximum=50))
    sub.subscribe("$replay/earliest/a", qos=1)
    got: list[int] = []
    for step in range(3000, 5000, 100):
        publish_all(pub, numbered(step, step + 100))
        got += numbers(sub, 150)
    got += numbers(sub, 5000 - len(got))
    assert got == list(range(5000))


@pytest.mark.req("S3.12")
def test_a_replay_and_a_plain_filter_of_one_client_go_their_own_ways(ten):
    sub = ten.client()
    sub.subscribe(ten.topic, qos=1)
    sub.subscribe(f"$replay/{ten.positions[8]}/{ten.topic}", qos=1)
    assert numbers(sub, 2) == [8, 9]
    ten.pub.publish(ten.topic, b"10", 1)
    assert numbers(sub, 2) == [10, 10]


@pytest.mark.req("S3.12")
def test_subscribing_again_to_a_replay_starts_it_again(ten):
    sub = ten.client(4)
    for _ in range(2):
        sub.subscribe(f"$replay/{ten.positions[5]}/{ten.topic}", qos=1)
        assert numbers(sub, 5) == list(range(5, 10))
    ten.pub.publish(ten.topic, b"10", 1)
    assert numbers(sub, 1) == [10]
    sub.nothing(0.05)


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("tail_bytes", [65536, 64 << 20])
def test_unsubscribing_ends_a_replay_that_waits_for_acknowledgements(start_broker, tail_bytes):
    broker = start_broker(log__tail_bytes=tail_bytes, log__segment_bytes=65536)
    publish_all(attach(broker, "p"), numbered(0, 2000))
    sub = attach(broker, "s", 5, properties=Properties(receive_maximum=10))
    sub.subscribe("$replay/earliest/a", qos=1)
    window = [sub.message(acknowledge=False) for _ in range(10)]
    sub.unsubscribe("$replay/earliest/a")
    for message in window:
        sub.send(Puback(message.packet_id))
    sub.nothing(0.1)


# ── in a session that outlives its connection ──

Restart = Callable[[BrokerProcess], None]


def _nothing(broker: BrokerProcess) -> None:
    """Only the client reconnects."""


def _kill(broker: BrokerProcess) -> None:
    broker.kill()
    broker.start()


def _stop(broker: BrokerProcess) -> None:
    broker.stop()
    broker.start()


restarts: Any = pytest.mark.parametrize("restart", [_nothing, _stop, _kill])


@pytest.mark.req("S3.12")
@restarts
@pytest.mark.parametrize(("version", "how"), [(4, "filter"), (5, "filter"), (5, "property")])
def test_a_replay_resumes_where_it_was(start_broker, restart, version, how):
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    publish_all(pub, numbered(0, 2000))
    sub = attach_kept(broker, "s", version)
    if how == "filter":
        sub.subscribe("$replay/earliest/a", qos=1)
    else:
        sub.subscribe("a", qos=1, properties=going_back("earliest"))
    assert numbers(sub, 700) == list(range(700))
    _acknowledged(broker, sub)
    sub.close()
    restart(broker)
    back = attach_kept(broker, "s", version)
    assert back.connack is not None and back.connack.session_present
    assert numbers(back, 1300) == list(range(700, 2000))
    attach(broker, "p2").publish("a", b"2000", 1)
    assert numbers(back, 1) == [2000]


@pytest.mark.req("S3.12")
@restarts
def test_a_qos_2_replay_resumes_where_it_was_and_repeats_nothing(start_broker, restart):
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    for topic, payload in numbered(0, 300):
        pub.publish(topic, payload, 2)
    publish_all(pub, numbered(0, 2000, "other"))
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=60, receive_maximum=20))
    sub.subscribe("$replay/earliest/a", qos=2)
    got = numbers(sub, 100)
    sub.close()
    restart(broker)
    back = attach_kept(broker, "s", properties=Properties(session_expiry=60, receive_maximum=20))
    while len(got) < 300:
        packet = back.receive()
        if isinstance(packet, Pubrel):  # the end of an exchange that was cut off
            back.send(Pubcomp(packet.packet_id))
            continue
        assert isinstance(packet, Publish)
        back.send(Pubrec(packet.packet_id))
        back.amid(Pubrel)
        back.send(Pubcomp(packet.packet_id))
        got.append(number(packet))
    assert got == list(range(300))
    back.nothing(0.05)


@pytest.mark.req("S3.12")
@restarts
def test_a_replay_that_was_live_gets_what_it_missed_and_no_more(start_broker, restart):
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    publish_all(pub, numbered(0, 1000))
    sub = attach_kept(broker, "s")
    sub.subscribe("$replay/earliest/a", qos=1)
    assert numbers(sub, 1000) == list(range(1000))
    _acknowledged(broker, sub)
    sub.disconnect()
    publish_all(pub, numbered(1000, 2000))
    restart(broker)
    back = attach_kept(broker, "s")
    assert numbers(back, 1000) == list(range(1000, 2000))
    back.nothing(0.05)


@pytest.mark.req("S3.12")
@restarts
def test_a_finished_replay_of_qos_0_messages_is_not_repeated(start_broker, restart):
    broker = start_broker()
    publish_all(attach(broker, "p"), numbered(0, 100), qos=0)
    sub = attach_kept(broker, "s")
    sub.subscribe("$replay/earliest/a", qos=1)
    assert numbers(sub, 100) == list(range(100))
    _acknowledged(broker, sub)
    sub.disconnect()
    restart(broker)
    attach_kept(broker, "s").nothing(0.1)


@pytest.mark.req("S3.12")
@restarts
def test_replays_of_one_session_keep_places_of_their_own(start_broker, restart):
    broker = start_broker(**SMALL)
    pub = attach(broker, "p")
    publish_all(pub, ((("a", "b")[i % 2], b"%d" % i + b"." * 100) for i in range(2000)))
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=60, receive_maximum=10))
    sub.subscribe("$replay/earliest/a", qos=1)
    got_a = numbers(sub, 500)
    sub.subscribe("$replay/1000/b", qos=1)
    got: dict[bytes, list[int]] = {b"a": got_a, b"b": []}
    for _ in range(200):
        message = sub.message()
        got[message.topic].append(number(message))
    _acknowledged(broker, sub)
    sub.close()
    restart(broker)
    back = attach_kept(broker, "s", properties=Properties(session_expiry=60, receive_maximum=10))
    while len(got[b"a"]) + len(got[b"b"]) < 1500:
        message = back.message()
        got[message.topic].append(number(message))
    assert got == {b"a": list(range(0, 2000, 2)), b"b": list(range(1001, 2000, 2))}
    back.nothing(0.05)


def _acknowledged(broker: BrokerProcess, sub: RawClient) -> None:
    """Wait until the positions behind what `sub` acknowledged are written: those of a later one are."""
    sub.send(Pingreq())
    sub.amid(Pingresp)
    probe = attach_kept(broker, "probe")
    probe.subscribe("probe", qos=1)
    registered = stored_session(broker.data, "probe")
    probe.publish("probe", b"", 1)
    probe.message()
    assert registered is not None
    eventually(lambda: stored_session(broker.data, "probe").position > registered.position)
