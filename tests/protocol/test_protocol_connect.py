"""CONNECT and CONNACK: versions, names, capabilities, keep-alive, takeover, shutdown."""

from __future__ import annotations

import pytest

from harness import BrokerProcess, Closed, RawClient
from tidegate.wire import Connack, Disconnect, Pingreq, Pingresp, Properties, Reason, Will

MQTT_LEVEL_6 = bytes.fromhex("100c 0004 4d515454 06 02 003c 0000")


@pytest.mark.req("S1.5")
@pytest.mark.parametrize("version", [3, 4, 5])
def test_every_version_is_welcome(client, unique, version):
    connack = client(version=version).connect(unique)
    assert (connack.reason, connack.session_present) == (0, False)


@pytest.mark.parametrize("version", [4, 5])
def test_a_clean_client_without_a_name_is_given_one(client, version):
    """[MQTT-3.1.3-6]; 3.1.1: [MQTT-3.1.3-7]"""
    assert client(version=version).connect("").reason == 0


def test_the_name_given_is_told_and_unique(client):
    """[MQTT-3.1.3-7], [MQTT-3.2.2-16]"""
    names = [client(version=5).connect("").properties.assigned_client_id for _ in range(3)]
    assert all(names)
    assert len(set(names)) == 3


def test_a_name_of_its_own_is_not_repeated(client, unique):
    assert client(version=5).connect(unique).properties.assigned_client_id is None


def test_a_session_can_be_resumed_under_the_name_given(client, lasting):
    first = client(version=5)
    name = first.connect("", properties=Properties(session_expiry=600)).properties.assigned_client_id
    first.close()
    assert lasting(name.decode()).connack.session_present


def test_v311_refuses_an_empty_name_for_a_session_that_lasts(client):
    """3.1.1: [MQTT-3.1.3-8]"""
    raw = client(version=4)
    assert raw.connect("", clean=False).reason == Reason.CLIENT_ID_NOT_VALID
    assert raw.until_closed() == []


def test_v31_refuses_an_empty_name(client):
    """MQTT 3.1 knows no names made by the server (3.1, section 3.1)."""
    raw = client(version=3)
    assert raw.connect("").reason == Reason.CLIENT_ID_NOT_VALID
    assert raw.until_closed() == []


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("length", [1, 23, 24, 1000])
def test_names_of_every_usual_length_are_taken(client, unique, version, length):
    """[MQTT-3.1.3-5] demands 1 to 23 characters; more are allowed."""
    name = (unique[-1] * length) if length == 1 else unique.ljust(length, "x")
    assert client(version=version).connect(name).reason == 0


def test_a_name_beyond_the_limit_is_refused_with_its_reason(client):
    """[MQTT-3.1.3-8]"""
    raw = client(version=5)
    connack = raw.connect("n" * 5000)
    assert connack.reason == Reason.CLIENT_ID_NOT_VALID
    assert b"1024" in connack.properties.reason_string


def test_an_unknown_protocol_level_is_answered_with_unacceptable_version(client):
    """3.1.1: [MQTT-3.1.2-2]; 5: 3.1.2.2"""
    raw = client(version=4)
    raw.send_bytes(MQTT_LEVEL_6.replace(b"\x06\x02\x00", b"\x02\x02\x00"))
    assert raw.expect(Connack).reason == Reason.UNSUPPORTED_PROTOCOL_VERSION
    assert raw.until_closed() == []


def test_a_level_from_the_future_is_answered_in_the_newest_version(client):
    """3.1.2.2: a CONNACK with 0x84 says why."""
    raw = client(version=5)
    raw.send_bytes(MQTT_LEVEL_6)
    assert raw.expect(Connack).reason == Reason.UNSUPPORTED_PROTOCOL_VERSION
    assert raw.until_closed() == []


def test_a_malformed_v5_connect_is_told_so(client):
    """[MQTT-3.1.4-1]: a CONNACK with a reason may come before the close."""
    raw = client(version=5)
    raw.send_bytes(bytes.fromhex("100d 0004 4d515454 05 03 003c 00 0000"))  # the reserved flag is set [MQTT-3.1.2-3]
    assert raw.expect(Connack).reason == Reason.MALFORMED_PACKET
    assert raw.until_closed() == []


@pytest.mark.req("S1.5")
def test_the_server_announces_what_it_can(client, unique):
    """3.2.2.3: what is absent means that all of it is available; the numbers are told."""
    told = client(version=5).connect(unique).properties
    assert told.receive_maximum == 8192
    assert told.maximum_packet_size == 4 << 20
    assert told.topic_alias_maximum == 64
    assert told.maximum_qos is None  # [MQTT-3.2.2-9]: absent means 2
    assert told.retain_available is not False
    assert told.wildcard_available is not False
    assert told.subscription_ids_available is not False
    assert told.shared_available is not False


def test_v3_connacks_carry_no_properties(client, unique):
    raw = client(version=4)
    raw.connect(unique)
    assert raw.connack.properties == Properties()


def test_the_configured_limits_are_the_ones_announced(start_broker):
    broker = start_broker(
        "memory", mqtt__receive_maximum=7, mqtt__packet_bytes_max=5000, mqtt__topic_alias_maximum=3,
        mqtt__session_expiry_max_s=100,
    )  # fmt: skip
    with RawClient(broker.port, 5) as raw:
        told = raw.connect("c", properties=Properties(session_expiry=5000)).properties
    assert (told.receive_maximum, told.maximum_packet_size, told.topic_alias_maximum) == (7, 5000, 3)
    assert told.session_expiry == 100


def test_enhanced_authentication_is_refused_by_its_method(client, unique):
    """[MQTT-4.12.0-1]"""
    raw = client(version=5)
    connack = raw.connect(unique, properties=Properties(auth_method=b"SCRAM-SHA-1", auth_data=b"x"))
    assert connack.reason == Reason.BAD_AUTHENTICATION_METHOD
    assert raw.until_closed() == []


@pytest.mark.req("S0.17")
def test_a_refused_connect_displaces_nobody(client, unique):
    """[MQTT-3.1.4-2]"""
    first = client(unique, 5)
    client(version=5).connect(unique, properties=Properties(auth_method=b"SCRAM-SHA-1"))
    first.nothing()


# ── takeover and shutdown ──


@pytest.mark.parametrize("second_version", [3, 4, 5])
def test_a_second_connection_takes_over_and_the_first_is_told(client, unique, second_version):
    """[MQTT-3.1.4-3]"""
    first = client(unique, 5)
    second = client(unique, second_version)
    assert [p.reason for p in first.until_closed()] == [Reason.SESSION_TAKEN_OVER]
    second.nothing()


@pytest.mark.parametrize("version", [3, 4])
def test_a_v3_connection_that_is_taken_over_is_closed_without_a_word(client, unique, version):
    """3.1.1: [MQTT-3.1.4-2]; a 3.x server has no DISCONNECT to send."""
    first = client(unique, version)
    client(unique, 5)
    assert first.until_closed() == []


@pytest.mark.req("S0.19")
def test_a_takeover_keeps_the_session_unless_a_clean_start_is_asked_for(lasting, unique):
    """[MQTT-3.1.4-4]"""
    lasting(unique).subscribe(unique + "/t", qos=1)
    assert lasting(unique).connack.session_present
    assert not lasting(unique, clean=True).connack.session_present


def test_shutting_down_is_told_to_v5_clients_and_closes_the_others(start_broker):
    """4.13.2: 0x8B"""
    broker = start_broker()
    modern, old = RawClient(broker.port, 5), RawClient(broker.port, 4)
    modern.connect("modern")
    old.connect("old")
    assert broker.stop() == 0
    assert [p.reason for p in modern.until_closed()] == [Reason.SERVER_SHUTTING_DOWN]
    assert old.until_closed() == []


@pytest.mark.req("S4.1")
def test_sessions_and_messages_survive_a_clean_stop(start_broker):
    broker = start_broker()
    with RawClient(broker.port, 5) as sub, RawClient(broker.port, 4) as pub:
        sub.connect("s", clean=False, properties=Properties(session_expiry=600))
        sub.subscribe("t", qos=1)
        sub.disconnect()
        pub.connect("p")
        pub.publish("t", b"missed", 1)
    broker.stop()
    broker.start()
    with RawClient(broker.port, 5) as sub:
        assert sub.connect("s", clean=False, properties=Properties(session_expiry=600)).session_present
        assert sub.message().payload == b"missed"


# ── keep-alive ──


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_ping_is_answered(client, unique, version):
    """[MQTT-3.12.4-1]"""
    raw = client(unique, version)
    raw.send(Pingreq())
    raw.expect(Pingresp)


@pytest.mark.parametrize("version", [4, 5])
def test_a_client_silent_beyond_its_keep_alive_is_closed_and_its_will_sent(client, unique, version):
    """[MQTT-3.1.2-22]; v5: 0x8D"""
    watcher = client(unique + "-w", 5)
    watcher.subscribe(unique + "/will")
    silent = client(unique, version, keep_alive=1, will=Will(f"{unique}/will".encode(), b"gone"))
    said = [p.reason for p in silent.until_closed() if isinstance(p, Disconnect)]
    assert said == ([Reason.KEEP_ALIVE_TIMEOUT] if version == 5 else [])
    assert watcher.message().payload == b"gone"


def test_pings_keep_a_connection_open_and_so_does_any_packet(client, unique):
    """[MQTT-3.1.2-20]"""
    pinging, publishing = client(unique, 5, keep_alive=1), client(unique + "-p", 5, keep_alive=1)
    silent = client(unique + "-s", 5, keep_alive=1)
    while True:  # until the silent one, as the clock of this test, is gone
        pinging.send(Pingreq())
        pinging.expect(Pingresp)
        publishing.publish(unique, b"", 1)
        try:
            if isinstance(silent.receive(0.2), Disconnect):
                break
        except TimeoutError:
            continue
    pinging.nothing()
    publishing.nothing()


def test_a_keep_alive_of_0_turns_it_off(client, unique):
    """3.1.2.10"""
    patient, silent = client(unique, 5, keep_alive=0), client(unique + "-s", 5, keep_alive=1)
    silent.until_closed()
    patient.nothing()


@pytest.fixture(scope="module")
def strict_broker(tmp_path_factory):
    """Grants keep-alives of up to two seconds."""
    folder = tmp_path_factory.mktemp("strict") / "data"
    with BrokerProcess(folder, "memory", mqtt__keep_alive_max_s=2) as broker:
        yield broker


@pytest.mark.parametrize("asked", [3, 0, 65535])
def test_a_longer_keep_alive_than_granted_is_replaced(strict_broker, unique, asked):
    """[MQTT-3.2.2-21]"""
    with RawClient(strict_broker.port, 5) as raw:
        assert raw.connect(unique, keep_alive=asked).properties.server_keep_alive == 2


def test_a_shorter_keep_alive_than_granted_stays(strict_broker, unique):
    """[MQTT-3.2.2-22]: without the property the client's value holds."""
    with RawClient(strict_broker.port, 5) as raw:
        assert raw.connect(unique, keep_alive=1).properties.server_keep_alive is None


def test_the_granted_keep_alive_is_the_one_enforced(strict_broker, unique):
    """[MQTT-3.1.2-21]"""
    with RawClient(strict_broker.port, 5) as raw:
        raw.connect(unique, keep_alive=0)
        assert [p.reason for p in raw.until_closed()] == [Reason.KEEP_ALIVE_TIMEOUT]


# ── before and around CONNECT ──


@pytest.mark.attack("A2")
@pytest.mark.req("S1.2")
@pytest.mark.parametrize("first", ["c000", "300400017478", "e000", "f000", "20020000"])
def test_nothing_but_connect_may_come_first(client, first):
    """[MQTT-3.1.0-1]"""
    raw = client(version=5)
    raw.send_bytes(bytes.fromhex(first))
    with pytest.raises(Closed):
        raw.receive()


@pytest.mark.req("S1.2")
def test_a_connection_that_never_introduces_itself_is_closed(start_broker):
    """3.1: "reasonable amount of time\""""
    broker = start_broker("memory", listen__connect_timeout_s=1)
    with RawClient(broker.port) as raw:
        assert raw.until_closed() == []


def test_packets_may_follow_connect_without_waiting_for_connack(client, unique):
    """[MQTT-3.1.4-5] allows clients not to wait."""
    raw = client(version=4)
    raw.send_bytes(
        bytes.fromhex("10 10 0004 4d515454 04 02 003c 0004") + b"fast" + bytes.fromhex("82 06 0001 0001 74 00 c000")
    )
    kinds = [type(raw.receive()).__name__ for _ in range(3)]
    assert kinds[0] == "Connack"
    assert sorted(kinds[1:]) == ["Pingresp", "Suback"]
