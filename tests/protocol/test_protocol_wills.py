"""Wills: when they are sent, when not, and what they carry."""

from __future__ import annotations

import pytest

from harness import RawClient
from tidegate.wire import Properties, Publish, Reason, Will, encode_message_properties


@pytest.fixture
def watcher(client, unique):
    """A subscriber that sees every will of this test."""
    raw = client(unique + "-watcher", 5)
    raw.subscribe(unique + "/#", qos=2, retain_as_published=True)
    return raw


@pytest.fixture
def will(unique):
    def make(payload: bytes = b"gone", qos: int = 0, retain: bool = False, **properties) -> Will:
        return Will(f"{unique}/will".encode(), payload, qos, retain, Properties(**properties))

    return make


def mark(client, unique: str) -> None:
    """Publishes a message that comes after every will sent so far."""
    client(unique + "-mark").publish(unique + "/mark", b"mark", 1)


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_broken_connection_sends_the_will_with_its_qos(client, watcher, will, unique, version, qos):
    """[MQTT-3.1.2-8]"""
    client(unique, version, will=will(qos=qos)).close()
    got = watcher.message()
    assert (got.payload, got.qos, got.retain) == (b"gone", qos, False)


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_disconnect_discards_the_will(client, watcher, will, unique, version):
    """[MQTT-3.1.2-10], [MQTT-3.14.4-3]"""
    client(unique, version, will=will()).disconnect()
    mark(client, unique)
    assert watcher.message().payload == b"mark"


def test_disconnect_with_0x04_sends_it(client, watcher, will, unique):
    """3.14.2.1: disconnect with will message"""
    client(unique, 5, will=will()).disconnect(Reason.DISCONNECT_WITH_WILL)
    assert watcher.message().payload == b"gone"


@pytest.mark.parametrize("reason", [0x80, 0x81, 0x93, 0x95])
def test_a_disconnect_with_an_error_sends_it(client, watcher, will, unique, reason):
    """[MQTT-3.14.4-3]: only 0x00 discards it; 3.1.2.5"""
    client(unique, 5, will=will()).disconnect(reason)
    assert watcher.message().payload == b"gone"


@pytest.mark.parametrize("version", [4, 5])
def test_a_protocol_error_sends_it(client, watcher, will, unique, version):
    """3.1.2.5: the server closes the connection because of a protocol error"""
    raw = client(unique, version, will=will())
    raw.send_bytes(b"\x00\x00")
    raw.until_closed()
    assert watcher.message().payload == b"gone"


@pytest.mark.parametrize("version", [4, 5])
def test_a_takeover_sends_it(client, watcher, will, unique, version):
    """3.1.4 with 3.1.2.5: the old connection did not end with a DISCONNECT"""
    client(unique, version, will=will())
    client(unique, version)
    assert watcher.message().payload == b"gone"


def test_a_will_is_sent_once(client, lasting, watcher, will, unique):
    """[MQTT-3.1.2-10]: it is gone once it was sent"""
    lasting(unique, will=will()).close()
    assert watcher.message().payload == b"gone"
    lasting(unique).close()
    watcher.nothing()


def test_each_connection_brings_its_own_will(client, watcher, will, unique):
    client(unique, 5, will=will(b"first")).disconnect()
    client(unique, 5, will=will(b"second")).close()
    assert watcher.message().payload == b"second"


def test_a_retained_will_stays(client, watcher, will, retain, unique):
    """[MQTT-3.1.2-15]"""
    client(unique, 5, will=will(retain=True, qos=1)).close()
    assert watcher.message().retain
    late = client(unique + "-late", 5)
    late.subscribe(unique + "/will", qos=1)
    assert late.message().payload == b"gone"
    retain(unique + "/will", b"")


def test_a_will_that_is_not_retained_does_not(client, watcher, will, unique):
    """[MQTT-3.1.2-14]"""
    client(unique, 5, will=will(qos=1)).close()
    watcher.message()
    late = client(unique + "-late", 5)
    late.subscribe(unique + "/will", qos=1)
    late.nothing()


def test_an_empty_will_is_a_message(client, watcher, will, unique):
    client(unique, 4, will=will(b"")).close()
    assert watcher.message().payload == b""


def test_every_will_property_is_passed_on_in_order(client, watcher, unique):
    """3.1.3.2"""
    block = encode_message_properties(
        Properties(
            payload_format=1, content_type=b"text/plain", response_topic=b"r/t", correlation_data=b"\x00\xff",
            user=((b"b", b"1"), (b"a", b"2"), (b"b", b"3")),
        ),
        b"", 0,
    )  # fmt: skip
    asked = Properties(message_expiry=1000)
    client(unique, 5, will=Will(f"{unique}/will".encode(), b"gone", 1, False, asked, block)).close()
    got = watcher.message()
    assert got.passed_on == block
    assert got.properties.message_expiry == 1000


# ── the delay (3.1.3.2.2) ──


@pytest.mark.req("S0.20")
def test_a_delayed_will_comes_later(client, lasting, watcher, will, unique):
    """[MQTT-3.1.3-9]"""
    lasting(unique, will=will(will_delay=1)).close()
    mark(client, unique)
    assert watcher.payloads(2) == [b"mark", b"gone"]


def test_a_client_that_is_back_in_time_keeps_its_will(lasting, client, watcher, will, unique):
    """[MQTT-3.1.3-9]: must not be sent"""
    lasting(unique, will=will(b"first", will_delay=1)).close()
    lasting(unique)
    lasting(unique + "-other", will=will(b"other", will_delay=1)).close()  # is due after the first
    assert watcher.message().payload == b"other"


def test_a_takeover_within_the_delay_keeps_it_too(lasting, client, watcher, will, unique):
    """[MQTT-3.1.3-9]"""
    lasting(unique, will=will(b"first", will_delay=1))
    lasting(unique)
    lasting(unique + "-other", will=will(b"other", will_delay=1)).close()
    assert watcher.message().payload == b"other"


@pytest.mark.req("S0.20")
def test_a_session_that_ends_with_its_connection_does_not_wait(client, watcher, will, unique):
    """3.1.3.2.2: the delay passed or the session ended, whichever is first"""
    client(unique, 5, will=will(will_delay=1000)).close()
    assert watcher.message().payload == b"gone"


def test_a_clean_start_ends_the_session_and_so_the_wait(lasting, watcher, will, unique):
    """3.1.3.2.2"""
    lasting(unique, will=will(will_delay=1000)).close()
    lasting(unique, clean=True)
    assert watcher.message().payload == b"gone"


def test_an_expiring_session_ends_the_wait(lasting, watcher, will, unique):
    """3.1.3.2.2"""
    lasting(unique, properties=Properties(session_expiry=1), will=will(will_delay=1000)).close()
    assert watcher.message().payload == b"gone"


@pytest.mark.req("S0.20")
def test_a_delayed_will_survives_a_crash_of_the_broker(start_broker):
    broker = start_broker("fsync")
    with RawClient(broker.port, 5) as raw, RawClient(broker.port, 5) as probe:
        raw.connect(
            "c", clean=False, properties=Properties(session_expiry=600),
            will=Will(b"will", b"gone", 1, False, Properties(will_delay=1, content_type=b"x")),
        )  # fmt: skip
        raw.close()
        probe.connect("s", clean=False, properties=Properties(session_expiry=600))
        probe.subscribe("will", qos=1)
    broker.kill()
    broker.start()
    with RawClient(broker.port, 5) as sub:
        sub.connect("s", clean=False, properties=Properties(session_expiry=600))
        got = sub.message()
        assert (got.payload, got.properties.content_type) == (b"gone", b"x")


@pytest.mark.req("S0.20")
def test_the_will_of_a_connection_that_died_with_the_broker_is_sent(start_broker):
    """S0.20: also when the whole node dies"""
    broker = start_broker("fsync")
    with RawClient(broker.port, 5) as raw, RawClient(broker.port, 5) as sub:
        sub.connect("s", clean=False, properties=Properties(session_expiry=600))
        sub.subscribe("will", qos=1)
        raw.connect(
            "c", clean=False, properties=Properties(session_expiry=600), will=Will(b"will", b"gone", 1)
        )
        raw.publish("x", b"", 1)  # everything before it is stored
        broker.kill()
    broker.start()
    with RawClient(broker.port, 5) as sub:
        sub.connect("s", clean=False, properties=Properties(session_expiry=600))
        assert sub.message().payload == b"gone"


# ── refused wills ──


@pytest.mark.attack("A10")
def test_a_will_on_a_broker_topic_is_refused(client, unique):
    connack = client(version=5).connect(unique, will=Will(b"$SYS/broker/uptime", b"x"))
    assert connack.reason == Reason.TOPIC_NAME_INVALID


@pytest.mark.attack("A10")
def test_a_will_that_is_not_the_utf8_it_claims_is_refused(client, unique):
    """3.1.3.2.3"""
    connack = client(version=5).connect(unique, will=Will(b"w", b"\xff", 0, False, Properties(payload_format=1)))
    assert connack.reason == Reason.PAYLOAD_FORMAT_INVALID


def test_a_will_goes_to_absent_sessions_as_well(client, lasting, will, unique):
    away = lasting(unique + "-away")
    away.subscribe(unique + "/will", qos=1)
    away.close()
    client(unique, 4, will=will(qos=1)).close()
    got = lasting(unique + "-away").expect(Publish)
    assert got.payload == b"gone"
