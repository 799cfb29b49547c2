"""Watching one client: `$SYS/clients/<client id>/trace`, and `tidegate trace`, which shows it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from harness import BrokerProcess, RawClient
from tidegate.wire import (
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Publish,
    Suback,
    Subscribe,
    Unsubscribe,
    Will,
    encode,
)

VERSIONS = pytest.mark.parametrize("version", [3, 4, 5], ids=["3.1", "3.1.1", "5"])
TIMED_OUT = 3
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (in |out) ([A-Z]+|wrong) *(.*)")


class Watcher:
    """Subscribes to a client's trace, as the command does."""

    def __init__(self, raw: RawClient, client_id: str) -> None:
        self.raw = raw
        raw.subscribe(f"$SYS/clients/{client_id}/trace")

    def next(self) -> dict[str, Any]:
        return json.loads(self.raw.expect(Publish).payload)

    def until(self, direction: str, packet: str) -> list[dict[str, Any]]:
        """What is told, the packet named last."""
        told = [self.next()]
        while (told[-1]["direction"], told[-1]["packet"]) != (direction, packet):
            told.append(self.next())
        return told


@pytest.fixture
def watch(client: Callable[..., RawClient]) -> Callable[..., Watcher]:
    return lambda client_id, version=5: Watcher(client(f"{client_id} watched", version), client_id)


def names(told: list[dict[str, Any]]) -> list[str]:
    return [f"{each['direction']} {each['packet']}" for each in told]


# ── what is told ──


@VERSIONS
def test_every_packet_of_the_client_is_told_in_both_directions(client, watch, unique, version):
    watcher = watch(unique)
    raw = client(unique, version)
    raw.subscribe(unique, qos=2)
    for qos in (1, 2):
        raw.publish(unique, b"hello", qos)
        raw.message()
    raw.unsubscribe(unique)
    raw.publish(unique, b"hello", 0)
    raw.send(Pingreq())
    raw.expect(Pingresp)
    raw.disconnect()
    told = watcher.until("in", "DISCONNECT")
    assert [each["number"] for each in told] == list(range(1, len(told) + 1))
    found = names(told)
    assert found[:4] == ["in CONNECT", "out CONNACK", "in SUBSCRIBE", "out SUBACK"]
    assert found[-6:] == [
        *("in UNSUBSCRIBE", "out UNSUBACK"),
        "in PUBLISH",
        *("in PINGREQ", "out PINGRESP"),
        "in DISCONNECT",
    ]
    flows = [
        *("in PUBLISH", "out PUBACK"),
        *("out PUBLISH", "in PUBACK"),
        *("in PUBLISH", "out PUBREC", "in PUBREL", "out PUBCOMP"),
        *("out PUBLISH", "in PUBREC", "out PUBREL", "in PUBCOMP"),
    ]
    assert sorted(found[4:-6]) == sorted(flows)  # a message and its answers may come in either order


@VERSIONS
def test_a_packet_is_told_with_what_matters_of_it(client, watch, unique, version):
    watcher = watch(unique)
    raw = client(unique, version, will=Will(b"gone"))
    raw.subscribe(unique, "other/+", qos=1)
    raw.publish(unique, b"hello", 1, retain=True, packet_id=77)
    raw.message()
    raw.disconnect()
    told = watcher.until("in", "DISCONNECT")
    by_name = dict(zip(names(told), told, strict=True))
    connect = by_name["in CONNECT"]
    assert connect["protocol"] == {3: "3.1", 4: "3.1.1", 5: "5"}[version]
    assert (connect["clean_start"], connect["keep_alive_s"], connect["will"]) == (True, 60, "gone")
    assert by_name["out CONNACK"]["session_present"] is False
    subscribe = by_name["in SUBSCRIBE"]
    assert (subscribe["packet_id"], subscribe["filters"], subscribe["qos"]) == (1, [unique, "other/+"], [1, 1])
    assert by_name["out SUBACK"]["reasons"] == [1, 1]
    publish = {"topic": unique, "qos": 1, "retain": True, "dup": False, "packet_id": 77, "bytes": 5}
    assert publish.items() <= by_name["in PUBLISH"].items()
    assert by_name["out PUBACK"]["packet_id"] == 77
    assert by_name["out PUBLISH"]["packet_id"] == by_name["in PUBACK"]["packet_id"] != 77
    assert {re.fullmatch(r"[-\d]{10}T[:\d]{8}\.\d{3}Z", each["at"]) is not None for each in told} == {True}


@VERSIONS
def test_neither_passwords_nor_payloads_are_told(client, watch, unique, version):
    watcher = watch(unique)
    raw = client(unique, version, username=b"anna", password=b"hunter2", will=Will(b"gone", b"testament"))
    raw.publish(unique, b"content", 1)
    raw.disconnect()
    told = watcher.until("in", "DISCONNECT")
    assert (told[0]["user"], told[0]["password"]) == ("anna", "given")
    for secret in ("hunter2", "testament", "content"):
        assert secret not in json.dumps(told)


def test_what_mqtt_5_gives_as_a_reason_is_told(client, watch, unique):
    watcher = watch(unique)
    raw = client(unique, 5)
    raw.subscribe("$unknown/a")
    client(unique, 5)
    raw.until_closed()
    told = watcher.until("out", "DISCONNECT")
    (suback,) = [each for each in told if each["packet"] == "SUBACK"]
    assert suback["reasons"] == [0x8F]
    assert (told[-1]["reason"], told[-1]["why"]) == (0x8E, "taken over")


@VERSIONS
def test_a_refused_connection_is_told(client, watch, unique, version):
    too_long = unique + "x" * 1024
    watcher = Watcher(client(unique), too_long)
    raw = client(version=version)
    raw.send(Connect(version, too_long.encode()))
    raw.until_closed()
    connect, connack = watcher.next(), watcher.next()
    assert names([connect, connack]) == ["in CONNECT", "out CONNACK"]
    assert connack["reason"] == 0x85


@VERSIONS
def test_a_packet_that_is_wrong_is_told_with_the_reason(client, watch, unique, version):
    watcher = watch(unique)
    raw = client(unique, version)
    raw.send_bytes(encode(Pingreq(), version) + b"\x36\x04\0\1a\0")  # QoS 3
    raw.until_closed()
    told = watcher.until("in", "wrong")
    assert "in PINGREQ" in names(told)
    assert "QoS" in told[-1]["why"]


def test_lengths_that_are_wrong_are_told_after_what_was_right(client, watch, unique):
    watcher = watch(unique)
    raw = client(unique)
    raw.send_bytes(encode(Pingreq(), 4) + b"\x30\xff\xff\xff\xff\x01")
    raw.until_closed()
    told = watcher.until("in", "wrong")
    assert "in PINGREQ" in names(told)
    assert "length" in told[-1]["why"]


def test_long_texts_and_lists_are_cut(client, watch, unique):
    watcher = watch(unique)
    raw = client(unique)
    raw.subscribe("x" * 5000, *(f"{unique}/{n}" for n in range(30)))
    subscribe = watcher.until("in", "SUBSCRIBE")[-1]
    assert subscribe["filters"][0] == "x" * 255 + "…"
    assert (len(subscribe["filters"]), len(subscribe["qos"]), subscribe["more_filters"]) == (20, 20, 11)


def test_aliases_are_told(client, watch, unique):
    watcher = watch(unique)
    raw = client(unique, 5)
    raw.publish(unique, b"", 1, properties=Properties(topic_alias=3))
    raw.publish("", b"", 1, properties=Properties(topic_alias=3))
    told = [each for each in watcher.until("out", "PUBACK") + watcher.until("out", "PUBACK") if "topic" in each]
    assert [(each["topic"], each["alias"]) for each in told] == [(unique, 3), ("", 3)]


# ── how it came does not matter ──


def conversation(client_id: str, version: int) -> bytes:
    packets: list[Packet] = [
        Connect(version, client_id.encode()),
        Subscribe(1, (FilterRequest(b"nobody", 1),)),
        Publish(b"a/b", b"x" * 200, 1, packet_id=2),
        Publish(b"a/b", b"", 2, packet_id=3),
        Unsubscribe(4, (b"nobody",)),
        Pingreq(),
        Disconnect(),
    ]
    return b"".join(encode(packet, version) for packet in packets)


@pytest.mark.parametrize("version", [4, 5])
def test_packets_cut_at_any_byte_are_told_as_if_they_were_whole(client, watch, unique, version):
    watcher = watch(unique)
    data = conversation(unique, version)

    def told_of(pieces: list[bytes]) -> list[dict[str, Any]]:
        raw = client(version=version)
        for piece in pieces:
            raw.send_bytes(piece)
        raw.until_closed()
        raw.close()
        came = [each for each in watcher.until("in", "DISCONNECT") if each["direction"] == "in"]
        return [{key: value for key, value in each.items() if key not in ("at", "number")} for each in came]

    whole = told_of([data])
    kinds = [each["packet"] for each in whole]
    assert kinds == ["CONNECT", "SUBSCRIBE", "PUBLISH", "PUBLISH", "UNSUBSCRIBE", "PINGREQ", "DISCONNECT"]
    for cut in range(1, len(data)):
        assert told_of([data[:cut], data[cut:]]) == whole, cut
    assert told_of([data[at : at + 1] for at in range(len(data))]) == whole


def test_each_of_many_packets_in_one_read_is_told_once(client, watch, unique):
    # So many that the client's packets take several turns: the rest of the read waits, and is looked at again.
    count = 2000
    watcher = watch(unique)
    raw = client(unique)
    subscribes = [Subscribe(pid, (FilterRequest(b"%d" % pid),)) for pid in range(1, count + 1)]
    raw.send_bytes(b"".join(encode(packet, 4) for packet in subscribes))
    for _ in range(count):
        raw.expect(Suback)
    raw.disconnect()
    told = watcher.until("in", "DISCONNECT")
    for name in ("in SUBSCRIBE", "out SUBACK"):
        assert [each["packet_id"] for each in told if f"{each['direction']} {each['packet']}" == name] == list(
            range(1, count + 1)
        )


def test_messages_in_blocks_are_told_one_by_one(client, watch, unique):
    watcher = watch(unique)
    raw = client(unique)
    raw.subscribe(unique, qos=1)
    raw.send_bytes(b"".join(encode(Publish(unique.encode(), b"x", 1, packet_id=pid), 4) for pid in range(1, 301)))
    for _ in range(600):
        packet = raw.receive()
        if isinstance(packet, Publish):
            raw.send(Puback(packet.packet_id))
    raw.disconnect()
    found = names(watcher.until("in", "DISCONNECT"))
    for name in ("in PUBLISH", "out PUBACK", "out PUBLISH", "in PUBACK"):
        assert found.count(name) == 300


def test_a_trace_that_begins_within_a_packet_tells_it_whole(client, watch, unique):
    raw = client(unique)
    data = encode(Publish(unique.encode(), b"x" * 100, 1, packet_id=9), 4)
    raw.send_bytes(encode(Pingreq(), 4) + data[:50])
    raw.expect(Pingresp)
    watcher = watch(unique)
    raw.send_bytes(data[50:])
    raw.expect(Puback)
    told = watcher.next()
    assert (told["packet"], told["packet_id"], told["bytes"]) == ("PUBLISH", 9, 100)


def test_a_trace_may_begin_between_a_connection_and_its_connect(client, watch, unique):
    raw = client()
    data = encode(Connect(4, unique.encode()), 4)
    raw.send_bytes(data[:5])
    watcher = watch(unique)
    raw.send_bytes(data[5:])
    raw.expect(Connack)
    assert names(watcher.until("out", "CONNACK")) == ["in CONNECT", "out CONNACK"]


# ── whom it is about, and how long ──


def test_nothing_is_told_of_anybody_by_default(client, unique):
    onlooker = client(f"{unique} onlooker", 5)
    onlooker.subscribe("$SYS/clients/#", "$SYS/clients/+/trace")
    raw = client(unique)
    raw.publish(unique, b"", 1)
    onlooker.nothing()


def test_only_the_client_that_is_watched_is_told_of(client, watch, unique):
    onlooker = client(f"{unique} onlooker", 5)
    onlooker.subscribe("$SYS/clients/#")
    watch(unique)
    others = [client(name) for name in (f"{unique}0", f"{unique}/a", unique[:-1] or "u", f"x{unique}")]
    for other in others:
        other.publish(unique, b"", 1)
    onlooker.nothing()
    client(unique)
    assert onlooker.message().topic == f"$SYS/clients/{unique}/trace".encode()


@pytest.mark.parametrize("end", ["unsubscribe", "disconnect", "lost"])
def test_a_trace_ends_with_its_last_watcher(client, watch, unique, end):
    onlooker = client(f"{unique} onlooker", 5)
    first, second = watch(unique), Watcher(client(f"{unique} too"), unique)
    second.raw.subscribe(f"$SYS/clients/{unique}/trace")  # twice the same is one
    onlooker.subscribe("$SYS/clients/#")
    raw = client(unique)

    def leave(watcher: Watcher) -> None:
        if end == "unsubscribe":
            watcher.raw.unsubscribe(f"$SYS/clients/{unique}/trace")
        elif end == "disconnect":
            watcher.raw.disconnect()
        else:
            watcher.raw.close()

    def told_of_a_ping() -> bool:
        raw.send(Pingreq())
        raw.expect(Pingresp)
        onlooker.send(Pingreq())
        told = []
        while not isinstance(packet := onlooker.receive(), Pingresp):
            told.append(packet)
        return bool(told)

    leave(first)
    assert told_of_a_ping()
    leave(second)
    while told_of_a_ping():
        assert end == "lost"  # the broker hears of it when its socket does
    onlooker.nothing()


def test_a_watcher_that_keeps_its_session_goes_on_after_a_restart(start_broker):
    broker: BrokerProcess = start_broker()
    keeping = Properties(session_expiry=600)
    raw = RawClient(broker.port, 5)
    raw.connect("watcher", clean=False, properties=keeping)
    raw.subscribe("$SYS/clients/pump/trace")
    raw.disconnect()
    broker.stop()
    broker.start()
    with RawClient(broker.port, 5) as raw, RawClient(broker.port) as pump:
        assert raw.connect("watcher", clean=False, properties=keeping).session_present
        pump.connect("pump")
        pump.send(Pingreq())
        assert names([json.loads(raw.message().payload) for _ in range(3)]) == [
            "in CONNECT",
            "out CONNACK",
            "in PINGREQ",
        ]


@pytest.mark.parametrize("name", ["a+b#", "a%2Bb", "100%", "a/b/c", "pump 7", "gerät"])
def test_a_client_id_may_hold_anything(client, unique, name):
    level = (unique + name).replace("%", "%25").replace("+", "%2B").replace("#", "%23")
    watcher = Watcher(client(f"{unique} watcher", 5), level)
    client((unique + name).replace("%2B", "+") + "%" * ("%2B" not in name))  # of almost the same name
    client(unique + name)
    assert names(watcher.until("out", "CONNACK")) == ["in CONNECT", "out CONNACK"]
    watcher.raw.nothing()


@pytest.mark.parametrize("aliases", [0, 5])
def test_clients_that_watch_each_other_and_themselves_come_to_an_end(client, unique, aliases):
    pair = [client(f"{unique}{n}", 5, properties=Properties(topic_alias_maximum=aliases)) for n in range(2)]
    for raw in pair:
        raw.subscribe(f"$SYS/clients/{unique}0/trace", f"$SYS/clients/{unique}1/trace")
    packets = 0
    for raw in pair * 2:
        raw.send(Pingreq())
        while not isinstance(raw.receive(), Pingresp):
            packets += 1
            assert packets < 100
    for raw in pair:
        try:
            while True:
                raw.receive(0.3)
                packets += 1
                assert packets < 100
        except TimeoutError:
            pass


# ── the command ──


Tracer = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def tracer(shared_broker: BrokerProcess) -> Iterator[Tracer]:
    """Runs `tidegate trace`, and waits until it does; what is still running at the end is ended."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tidegate.cli", "trace", "--port", str(shared_broker.port), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean())
        running.append(process)
        assert process.stderr is not None
        assert process.stderr.readline() == f"tidegate: waiting for packets of {arguments[0]}; Ctrl-C ends\n"
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


def failing(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate.cli", "trace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean(), check=False)


@pytest.mark.parametrize("protocol", [MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5])
def test_the_command_shows_a_client_that_comes_later(shared_broker, tracer, unique, protocol):
    process = tracer(unique, "--timeout", "60")
    done: set[str] = set()
    peer = paho.Client(CallbackAPIVersion.VERSION2, client_id=unique, protocol=protocol)
    peer.username_pw_set("anna", "hunter2")
    peer.on_connect = lambda *_: peer.subscribe(unique, 1)
    peer.on_subscribe = lambda *_: peer.publish(unique, "hello", 1)
    peer.on_publish = lambda *_: done.add("acknowledged")
    peer.on_message = lambda *_: done.add("received")
    peer.connect("127.0.0.1", shared_broker.port)
    while len(done) < 2 or peer.want_write():
        peer.loop(0.1)
    peer.disconnect()
    shown: list[tuple[str, str, str]] = []
    while not shown or shown[-1][1] != "DISCONNECT":
        line = process.stdout.readline()
        found = LINE.fullmatch(line.rstrip("\n"))
        assert found, line
        shown.append((found[1].strip(), found[2], found[3]))
    version = "5" if protocol is MQTTProtocolVersion.MQTTv5 else "3.1.1"
    about = f"protocol={version} clean_start=true keep_alive_s=60 user=anna password=given"
    assert shown[:4] == [
        ("in", "CONNECT", about),
        ("out", "CONNACK", ""),
        ("in", "SUBSCRIBE", f'packet_id=1 filters=["{unique}"] qos=[1]'),
        ("out", "SUBACK", "packet_id=1 reasons=[1]"),
    ]
    assert sorted(shown[4:-1]) == sorted(
        [
            ("in", "PUBLISH", f"topic={unique} qos=1 packet_id=2 bytes=5"),
            ("out", "PUBACK", "packet_id=2"),
            ("out", "PUBLISH", f"topic={unique} qos=1 packet_id=1 bytes=5"),
            ("in", "PUBACK", "packet_id=1"),
        ]
    )
    assert shown[-1] == ("in", "DISCONNECT", "")


def test_the_command_shows_json_and_ends_after_so_many(tracer, client, unique):
    process = tracer(unique, "--json", "--count", "2")
    client(unique)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert names([json.loads(line) for line in out.splitlines()]) == ["in CONNECT", "out CONNACK"]


def test_the_command_ends_when_its_time_is_over_whatever_came(tracer, client, unique):
    process = tracer(unique, "--timeout", "1")
    client(unique)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err, len(out.splitlines())) == (TIMED_OUT, "", 2)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_trace_ends_with_the_command(tracer, client, unique, end):
    process = tracer(unique, "-i", f"{unique} tracer")
    raw, onlooker = client(unique), client(f"{unique} onlooker")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(end)
    process.wait(30)
    onlooker.subscribe("$SYS/clients/#")
    # The broker has seen the end of the connection when the id is free again.
    client(f"{unique} tracer")
    raw.publish(unique, b"", 1)
    onlooker.nothing()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "CLIENT_ID"),
        ([""], "a client id is not empty"),
        (["a", "b"], "unexpected extra argument (b)"),
        (["a", "--count", "0"], "--count"),
        (["a", "--timeout", "soon"], "--timeout"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_with_words(arguments, words):
    result = failing(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert "waiting" not in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["x" * 70_000, "/" * 500, "a\udcffb"])
def test_ids_that_no_client_can_have_are_refused_with_words(shared_broker, name):
    result = failing(name, "--port", str(shared_broker.port), "--timeout", "5")
    assert (result.returncode, result.stdout) in {(1, ""), (2, "")}
    assert result.stderr.startswith("error: ")
    assert "waiting" not in result.stderr and "Traceback" not in result.stderr
