"""Whoever breaks a rule is told which, is disconnected, and disturbs nobody (4.13)."""

from __future__ import annotations

from typing import Any

import pytest
from vectors import INVALID_CONNECTS, INVALID_OTHERS, INVALID_PUBLISHES, Invalid

from harness import RawClient
from tidegate.wire import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Reason,
    Suback,
    Unsuback,
    encode,
)


def reasons(raw: RawClient) -> list[int]:
    """What a v5 client is told at the end; a v3 client is told nothing."""
    said = raw.until_closed()
    assert all(isinstance(p, Disconnect) for p in said), said
    return [p.reason for p in said]


def cases(*vectors: Invalid) -> list[Any]:
    return [
        pytest.param(
            v, version, id=f"{v.name} (v{version})", marks=[pytest.mark.attack(*v.attacks)] if v.attacks else []
        )
        for v in vectors
        for version in v.versions
    ]


# Only a server may send these: being sent at all comes before what is in them.
FROM_SERVERS = ("CONNACK", "5.0 CONNACK", "SUBACK", "3.x SUBACK", "UNSUBACK", "3.x UNSUBACK", "PINGRESP")


@pytest.mark.parametrize(
    ("vector", "version"), cases(*(v for v in INVALID_OTHERS if not v.name.startswith(FROM_SERVERS)))
)
def test_a_malformed_packet_closes_the_connection_with_its_reason(client, unique, vector, version):
    """[MQTT-4.13.1-1]"""
    raw = client(unique, version)
    raw.send_bytes(vector.raw)
    assert reasons(raw) == ([vector.reason] if version == 5 else [])


@pytest.mark.parametrize(("vector", "version"), cases(*INVALID_PUBLISHES))
def test_a_malformed_publish_closes_the_connection_with_its_reason(client, unique, vector, version):
    """[MQTT-4.13.1-1]"""
    raw = client(unique, version)
    raw.send_bytes(vector.raw)
    assert reasons(raw) == ([vector.reason] if version == 5 else [])


@pytest.mark.parametrize(("vector", "version"), cases(*INVALID_CONNECTS))
def test_a_malformed_connect_is_never_accepted(client, vector, version):
    """[MQTT-3.1.4-1], [MQTT-3.1.4-2]"""
    raw = client(version=version)
    raw.send_bytes(vector.raw)
    raw.socket.settimeout(10)
    answer = b""
    while data := raw.socket.recv(4096):
        answer += data
    assert answer == b"" or (answer[0] == 0x20 and answer[3] != 0)


@pytest.mark.parametrize(("vector", "version"), cases(*(v for v in INVALID_CONNECTS if v.raw[8:9] == b"\x05")))
def test_a_malformed_v5_connect_is_answered_with_its_reason(client, vector, version):
    """4.13: a CONNACK with the reason, where the client can read one"""
    raw = client(version=5)
    raw.send_bytes(vector.raw)
    assert raw.expect(Connack).reason == vector.reason


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_second_connect_is_a_protocol_error(client, unique, version):
    """[MQTT-3.1.0-2]"""
    raw = client(unique, version)
    raw.send(Connect(version, unique.encode()))
    assert reasons(raw) == ([Reason.PROTOCOL_ERROR] if version == 5 else [])


@pytest.mark.attack("A7")
@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("packet", [Connack(), Suback(1, (0,)), Pingresp()], ids=lambda p: type(p).__name__)
def test_a_packet_that_only_servers_send_is_a_protocol_error(client, unique, version, packet):
    raw = client(unique, version)
    raw.send(packet)
    assert reasons(raw) == ([Reason.PROTOCOL_ERROR] if version == 5 else [])


@pytest.mark.attack("A7")
@pytest.mark.parametrize("version", [4, 5])
def test_unsuback_from_a_client_is_a_protocol_error(client, unique, version):
    raw = client(unique, version)
    raw.send(Unsuback(1, (0,) if version == 5 else ()))
    assert reasons(raw) == ([Reason.PROTOCOL_ERROR] if version == 5 else [])


@pytest.mark.parametrize(
    "auth", [Auth(), Auth(Reason.REAUTHENTICATE, Properties(auth_method=b"SCRAM-SHA-1"))], ids=["empty", "method"]
)
def test_auth_without_enhanced_authentication_is_a_protocol_error(client, unique, auth):
    """[MQTT-4.12.1-1], [MQTT-4.12.0-6]"""
    raw = client(unique, 5)
    raw.send(auth)
    assert reasons(raw) == [Reason.PROTOCOL_ERROR]


def test_no_local_on_a_shared_subscription_is_a_protocol_error(client, unique):
    """[MQTT-3.8.3-4]"""
    raw = client(unique, 5)
    raw.send_bytes(bytes.fromhex("82 10 0001 00 000a") + b"$share/g/a" + b"\x04")
    assert reasons(raw) == [Reason.PROTOCOL_ERROR]


@pytest.mark.parametrize(("sent", "answer"), [(1, Pubrec), (2, Puback), (2, Pubcomp)])
def test_the_wrong_acknowledgement_is_a_protocol_error(client, unique, sent, answer):
    """[MQTT-4.3.2-1], [MQTT-4.3.3-1]"""
    raw = client(unique, 5)
    raw.subscribe(unique, qos=2)
    client(unique + "-p", 5).publish(unique, b"m", sent)
    raw.send(answer(raw.message(acknowledge=False).packet_id))
    assert reasons(raw) == [Reason.PROTOCOL_ERROR]


def test_an_acknowledgement_of_nothing_is_ignored(client, unique):
    """3.4: nothing forbids a PUBACK that comes late"""
    raw = client(unique, 5)
    raw.send(Puback(5))
    raw.send(Pubcomp(6))
    raw.nothing()


def test_a_violation_comes_with_a_reason_string(client, unique):
    """3.14.2.2.3"""
    raw = client(unique, 5)
    raw.send(Connect(5, unique.encode()))
    assert b"CONNECT" in raw.expect(Disconnect).properties.reason_string


def test_the_reason_string_stays_away_if_not_wanted(client, unique):
    """[MQTT-3.1.2-29] would allow it in DISCONNECT; less is asked for"""
    raw = client(unique, 5, properties=Properties(request_problem_info=False))
    raw.send(Connect(5, unique.encode()))
    assert raw.expect(Disconnect).properties == Properties()


def test_what_came_before_the_violation_was_done(client, unique):
    sub, raw = client(unique + "-s", 5), client(unique, 5)
    sub.subscribe(unique, qos=1)
    good = Publish(unique.encode(), b"good", 1, packet_id=1)
    raw.send_bytes(encode(good, 5) + b"\x00\x00")
    assert sub.message().payload == b"good"


def test_others_notice_nothing(client, unique):
    others = [client(f"{unique}-{i}", 5) for i in range(3)]
    others[0].subscribe(unique, qos=1)
    for vector in INVALID_PUBLISHES:
        raw = client(unique + "-bad", vector.versions[0])
        raw.send_bytes(vector.raw)
        raw.until_closed()
    others[1].publish(unique, b"all is well", 1)
    assert others[0].message().payload == b"all is well"
