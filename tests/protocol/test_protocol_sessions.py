"""Sessions: how long they last, what they keep, and what is sent again."""

from __future__ import annotations

import pytest

from tidegate.wire import Connack, Disconnect, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel, Reason, Will


def gone(client, client_id: str) -> bool:
    """Whether the broker knows no such session (asking ends it)."""
    raw = client(version=5)
    return not raw.connect(client_id, clean=False).session_present


# ── how long a session lasts ──


@pytest.mark.req("S0.21")
def test_without_an_expiry_a_v5_session_ends_with_its_connection(client, unique):
    """3.1.2.11.2: absent means 0"""
    client(unique, 5, clean=False).disconnect()
    assert gone(client, unique)


@pytest.mark.req("S0.19", "S1.4")
def test_with_an_expiry_it_outlives_its_connection(lasting, unique):
    """[MQTT-3.1.2-5], [MQTT-3.1.2-23], [MQTT-3.2.2-3]"""
    lasting(unique).disconnect()
    assert lasting(unique).connack.session_present


def test_clean_start_says_nothing_about_the_end(lasting, unique):
    """[MQTT-3.1.2-4]: in v5, clean start with an expiry is a new session that lasts."""
    lasting(unique, clean=True).disconnect()
    assert lasting(unique).connack.session_present


@pytest.mark.req("S0.18")
def test_clean_start_discards_what_was_stored(lasting, client, unique):
    """[MQTT-3.1.2-4], [MQTT-3.2.2-2]"""
    sub = lasting(unique)
    sub.subscribe(unique + "/t", qos=1)
    sub.disconnect()
    again = lasting(unique, clean=True)
    assert not again.connack.session_present
    client(unique + "-p", 5).publish(unique + "/t", b"not subscribed any more", 1)
    again.nothing()


def test_an_unknown_session_is_not_present(lasting, unique):
    """[MQTT-3.1.2-6], [MQTT-3.2.2-2]"""
    assert not lasting(unique).connack.session_present


def test_a_refused_connack_never_has_session_present(lasting, client, unique):
    """[MQTT-3.2.2-6]"""
    lasting(unique).disconnect()
    refused = client(version=5).connect(unique, clean=False, properties=Properties(auth_method=b"x"))
    assert refused.reason
    assert not refused.session_present


@pytest.mark.req("S0.21")
@pytest.mark.parametrize("version", [3, 4])
def test_a_v3_clean_session_ends_with_its_connection(client, lasting, unique, version):
    """3.1.1: [MQTT-3.1.2-6]"""
    client(unique, version).close()
    assert not lasting(unique, 4).connack.session_present


@pytest.mark.req("S0.19", "S4.2")
@pytest.mark.parametrize("version", [3, 4])
def test_a_v3_session_that_is_not_clean_stays(lasting, client, unique, version):
    """3.1.1: [MQTT-3.1.2-4], [MQTT-3.1.2-5]"""
    sub = lasting(unique, version)
    sub.subscribe(unique + "/t", qos=1)
    sub.close()
    client(unique + "-p").publish(unique + "/t", b"missed", 1)
    assert lasting(unique, version).message().payload == b"missed"


def test_v31_connacks_have_no_session_present_flag(lasting, client, unique):
    """The first byte after the length is reserved in 3.1."""
    lasting(unique, 3).close()
    raw = client(version=3)
    raw.version = 4  # reads the flag; the CONNECT below is of 3.1
    raw.send_bytes(bytes((0x10, 14 + len(unique))) + b"\x00\x06MQIsdp\x03\x00\x00\x3c\x00" + bytes((len(unique),)))
    raw.send_bytes(unique.encode())
    assert not raw.expect(Connack).session_present


def test_an_expired_session_is_forgotten(client, unique):
    """3.1.2.11.2: [MQTT-4.1.0-2]"""
    watcher = client(unique + "-w", 5)
    watcher.subscribe(unique + "/end")
    brief = client(
        unique, 5, clean=False, properties=Properties(session_expiry=1),
        will=Will(f"{unique}/end".encode(), b"", 0, False, Properties(will_delay=50)),
    )  # fmt: skip
    brief.subscribe(unique + "/t", qos=1)
    brief.close()
    watcher.message()  # the will comes at the session's end at the latest [MQTT-3.1.2-8]
    assert gone(client, unique)


# ── changing one's mind at DISCONNECT (3.14.2.2.2) ──


def test_disconnect_can_end_a_session_that_would_have_lasted(lasting, unique):
    lasting(unique).disconnect(properties=Properties(session_expiry=0))
    assert not lasting(unique).connack.session_present


def test_disconnect_can_prolong_a_session(client, lasting, unique):
    client(unique, 5, clean=False, properties=Properties(session_expiry=1)).disconnect(
        properties=Properties(session_expiry=600)
    )
    other = client(unique + "-o", 5, keep_alive=1)
    other.until_closed()  # more than a second
    assert lasting(unique).connack.session_present


def test_disconnect_cannot_bring_a_session_that_was_to_end_with_its_connection_to_last(client, unique):
    """3.14.2.2.2: a protocol error"""
    raw = client(unique, 5)
    raw.send(Disconnect(0, Properties(session_expiry=10)))
    assert [p.reason for p in raw.until_closed()] == [Reason.PROTOCOL_ERROR]
    assert gone(client, unique)


def test_disconnect_may_repeat_that_the_session_ends(client, unique):
    raw = client(unique, 5)
    raw.send(Disconnect(0, Properties(session_expiry=0)))
    assert raw.until_closed() == []


# ── what was missed ──


@pytest.mark.req("S4.2", "S4.8", "S4.10", "S0.12", "S0.19")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_was_missed_arrives_in_order_before_what_is_new(lasting, client, unique, version, qos):
    """[MQTT-4.6.0-6]: the order of messages of one QoS"""
    sub = lasting(unique, version)
    sub.subscribe(unique + "/a/+", unique + "/b", qos=2)
    sub.close()
    pub = client(unique + "-p", 5)
    for i in range(50):
        pub.publish(f"{unique}/a/{i % 3}" if i % 4 else f"{unique}/b", b"%d" % i, qos)
    sub = lasting(unique, version)
    pub.publish(unique + "/b", b"50", qos)
    assert [int(p) for p in sub.payloads(51)] == list(range(51))


@pytest.mark.req("S4.4")
@pytest.mark.parametrize(("sent", "subscribed"), [(0, 2), (2, 0)])
def test_qos_0_on_either_side_is_not_kept_for_the_absent(lasting, client, unique, sent, subscribed):
    sub = lasting(unique)
    sub.subscribe(unique + "/t", qos=subscribed)
    sub.subscribe(unique + "/mark", qos=1)
    sub.close()
    pub = client(unique + "-p", 5)
    pub.publish(unique + "/t", b"lost", sent)
    pub.publish(unique + "/mark", b"mark", 1)
    assert lasting(unique).message().payload == b"mark"


@pytest.mark.req("S0.24", "S4.4")
def test_what_was_unsubscribed_is_not_kept(lasting, client, unique):
    sub = lasting(unique)
    sub.subscribe(unique + "/t", unique + "/mark", qos=1)
    sub.unsubscribe(unique + "/t")
    sub.close()
    pub = client(unique + "-p", 5)
    pub.publish(unique + "/t", b"lost", 1)
    pub.publish(unique + "/mark", b"mark", 1)
    assert lasting(unique).message().payload == b"mark"


# ── what is sent again (4.4) ──


@pytest.mark.req("S1.22", "S4.5", "S2.18")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_an_unacknowledged_message_comes_again_with_its_id_and_dup(lasting, client, unique, version, qos):
    """[MQTT-4.4.0-1], [MQTT-3.3.1-1]"""
    sub = lasting(unique, version)
    sub.subscribe(unique, qos=qos)
    client(unique + "-p").publish(unique, b"m", qos)
    first = sub.message(acknowledge=False)
    sub.close()
    again = lasting(unique, version).message(acknowledge=False)
    assert (first.dup, again.dup) == (False, True)
    assert (again.packet_id, again.payload) == (first.packet_id, b"m")


@pytest.mark.req("S2.18", "S4.5")
def test_an_acknowledged_message_does_not_come_again(lasting, client, unique):
    sub = lasting(unique)
    sub.subscribe(unique, qos=1)
    pub = client(unique + "-p", 5)
    pub.publish(unique, b"one", 1)
    pub.publish(unique, b"two", 1)
    sub.message()
    assert sub.message(acknowledge=False).payload == b"two"
    sub.close()
    assert lasting(unique).message().payload == b"two"


@pytest.mark.parametrize("version", [4, 5])
def test_after_pubrec_only_the_pubrel_comes_again(lasting, client, unique, version):
    """[MQTT-4.4.0-1], [MQTT-4.3.3-13]"""
    sub = lasting(unique, version)
    sub.subscribe(unique, qos=2)
    client(unique + "-p").publish(unique, b"m", 2)
    pid = sub.message(acknowledge=False).packet_id
    sub.send(Pubrec(pid))
    sub.expect(Pubrel)
    sub.close()
    sub = lasting(unique, version)
    assert sub.expect(Pubrel).packet_id == pid
    sub.send(Pubcomp(pid))
    sub.nothing()


def test_messages_are_sent_again_in_the_order_they_were_sent(lasting, client, unique):
    """[MQTT-4.6.0-1]"""
    sub = lasting(unique)
    sub.subscribe(unique, qos=2)
    pub = client(unique + "-p", 5)
    for i in range(9):
        pub.publish(unique, b"%d" % i, 1 + i % 2)
    pids = [sub.message(acknowledge=False).packet_id for _ in range(9)]
    sub.close()
    again = lasting(unique)
    assert [again.message(acknowledge=False).packet_id for _ in range(9)] == pids


def test_nothing_is_sent_again_within_a_connection(lasting, client, unique):
    """[MQTT-4.4.0-1]: only when a client reconnects"""
    sub = lasting(unique)
    sub.subscribe(unique, qos=1)
    client(unique + "-p", 5).publish(unique, b"m", 1)
    sub.message(acknowledge=False)
    sub.nothing(1.2)


def test_flights_may_finish_in_any_order(lasting, client, unique):
    sub = lasting(unique)
    sub.subscribe(unique, qos=1)
    pub = client(unique + "-p", 5)
    for i in range(5):
        pub.publish(unique, b"%d" % i, 1)
    pids = {m.payload: m.packet_id for m in (sub.message(acknowledge=False) for _ in range(5))}
    for payload in (b"4", b"1", b"2"):
        sub.send(Puback(pids[payload]))
    sub.nothing()
    sub.close()
    again = lasting(unique)
    assert [again.message(acknowledge=False).payload for _ in range(2)] == [b"0", b"3"]
    again.nothing()


def test_a_message_in_flight_survives_a_change_of_version(lasting, client, unique):
    sub = lasting(unique, 5)
    sub.subscribe(unique, qos=1)
    client(unique + "-p", 5).publish(
        unique, b"m", 1, properties=Properties(user=((b"k", b"v"),), content_type=b"text/plain")
    )
    sub.message(acknowledge=False)
    sub.close()
    old = lasting(unique, 4)
    assert old.message(acknowledge=False).payload == b"m"
    old.close()
    assert lasting(unique, 5).message().properties.user == ((b"k", b"v"),)


# ── the publisher's side ──


@pytest.mark.attack("A11")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_qos_2_message_sent_again_is_not_delivered_again(lasting, client, unique, version):
    """[MQTT-4.3.3-10], [MQTT-4.4.0-1]"""
    sub = client(unique + "-s", 5)
    sub.subscribe(unique, qos=2)
    pub = lasting(unique, version)
    pub.send(Publish(unique.encode(), b"once", 2, packet_id=77))
    pub.expect(Pubrec)
    pub.close()
    pub = lasting(unique, version)
    pub.send(Publish(unique.encode(), b"once", 2, dup=True, packet_id=77))
    assert pub.expect(Pubrec).packet_id == 77
    pub.send(Pubrel(77))
    assert pub.expect(Pubcomp).reason == 0
    assert sub.message().payload == b"once"
    sub.nothing()


def test_after_pubcomp_the_id_stands_for_a_new_message(client, unique):
    """[MQTT-4.3.3-12]"""
    sub, pub = client(unique + "-s", 5), client(unique, 5)
    sub.subscribe(unique, qos=2)
    for payload in (b"first", b"second"):
        pub.publish(unique, payload, 2, packet_id=9)
    assert sub.payloads(2) == [b"first", b"second"]


def test_pubrel_for_an_unknown_id_is_answered(client, unique):
    """[MQTT-4.3.3-11]; v5: 0x92"""
    modern, old = client(unique, 5), client(unique + "-o", 4)
    for raw in (modern, old):
        raw.send(Pubrel(4711))
    assert modern.expect(Pubcomp) == Pubcomp(4711, Reason.PACKET_ID_NOT_FOUND)
    assert old.expect(Pubcomp) == Pubcomp(4711)


def test_a_qos_2_publisher_that_starts_clean_starts_anew(lasting, client, unique):
    """[MQTT-3.1.2-4]: the old packet ids went with the session."""
    sub = client(unique + "-s", 5)
    sub.subscribe(unique, qos=2)
    pub = lasting(unique)
    pub.send(Publish(unique.encode(), b"old", 2, packet_id=5))
    pub.expect(Pubrec)
    pub = lasting(unique, clean=True)
    pub.publish(unique, b"new", 2, packet_id=5)
    assert sub.payloads(2) == [b"old", b"new"]
