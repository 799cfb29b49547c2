"""The command line against a running broker: as a person at a terminal would use it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import BrokerProcess, RawClient
from packet_bytes import varint
from tidegate.wire import Disconnect, Properties, Publish, Will

TIMED_OUT = 3


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


def tidegate(
    *arguments: str | Path, stdin: str | None = None, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate.cli", *map(str, arguments)]
    env = {**environment(), **variables}
    return subprocess.run(
        command, capture_output=True, text=True, input=stdin, timeout=60, env=env, cwd=cwd, check=False
    )


@pytest.fixture
def subscriber() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs `tidegate sub`; what is still running at the end is ended."""
    running: list[subprocess.Popen[str]] = []

    def start(port: int, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tidegate.cli", "sub", "--port", str(port), *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def publish_all(port: int, topic: str, payloads: list[str], qos: int = 1) -> None:
    raw = RawClient(port)
    raw.connect("")
    for payload in payloads:
        raw.publish(topic, payload, qos)
    raw.disconnect()


# ── pub ──


@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_pub_delivers_to_a_subscriber(shared_broker, client, unique, qos):
    sub = client(unique, 5)
    sub.subscribe(unique + "/#", qos=2)
    result = tidegate("pub", "--port", str(shared_broker.port), "-t", unique + "/a", "-m", "hello", "-q", qos)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    got = sub.message()
    assert (got.topic.decode(), got.payload, got.qos) == (unique + "/a", b"hello", int(qos))


def test_pub_sends_properties_and_retains(shared_broker, client, unique):
    options = ["--property", "content-type=text/plain", "--user-property", "n=v", "--expiry", "60", "-r", "-q", "1"]
    assert tidegate("pub", "--port", str(shared_broker.port), "-t", unique, "-m", "x", *options).returncode == 0
    sub = client(unique, 5)
    sub.subscribe(unique)
    got = sub.message()
    assert (got.retain, got.properties.content_type, got.properties.user) == (True, b"text/plain", ((b"n", b"v"),))
    assert got.properties.message_expiry <= 60
    sub.publish(unique, b"", 1, True)


def test_pub_sends_each_line_of_standard_input(shared_broker, client, unique):
    sub = client(unique)
    sub.subscribe(unique, qos=1)
    lines = "".join(f"line {i}\n" for i in range(2500))
    result = tidegate("pub", "--port", str(shared_broker.port), "-t", unique, "--stdin-lines", "-q", "1", stdin=lines)
    assert result.returncode == 0
    assert [int(p.split()[1]) for p in sub.payloads(2500)] == list(range(2500))


def test_pub_says_what_the_broker_refused(shared_broker, unique):
    result = tidegate("pub", "--port", str(shared_broker.port), "-t", "$SYS/" + unique, "-m", "x", "-q", "1")
    assert result.returncode == 1
    assert "topics that begin with $ belong to the broker" in result.stderr


# ── sub ──


def test_sub_shows_messages_as_they_come(shared_broker, client, unique, subscriber):
    process = subscriber(shared_broker.port, "-t", unique + "/#", "-q", "1", "--count", "2", "-v")
    pub = client(unique, 5)
    while pub.publish(unique + "/a", b"hello", 1) == 0x10:
        pass  # until it is subscribed
    pub.publish(unique + "/b", b"\x00\xff", 1)
    lines = process.communicate(timeout=30)[0].splitlines()
    assert lines == [f"{unique}/a hello", f"{unique}/b 0x00ff"]
    assert process.returncode == 0


def test_sub_from_earliest_shows_time_and_position_and_then_stays_live(start_broker, subscriber):
    broker = start_broker()
    publish_all(broker.port, "demo/a", ["zero", "one"])
    publish_all(broker.port, "other", ["two"])
    process = subscriber(broker.port, "-t", "demo/#", "--from", "earliest", "-v", "--count", "3")
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert process.stdout is not None
    assert re.fullmatch(rf"{stamp} @0 demo/a zero\n", process.stdout.readline())
    assert re.fullmatch(rf"{stamp} @1 demo/a one\n", process.stdout.readline())
    publish_all(broker.port, "demo/a", ["live"])
    assert process.stdout.readline().endswith("demo/a live\n")
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("origin", "expected"), [("1", ["1", "2"]), ("-1h", ["0", "1", "2"]), ("2999-01-01T00:00:00Z", [])]
)
def test_sub_goes_back_to_a_position_or_a_time(start_broker, origin, expected):
    broker = start_broker()
    publish_all(broker.port, "a", ["0", "1", "2"])
    count = ["--count", str(len(expected))] if expected else ["--timeout", "1"]
    result = tidegate("sub", "--port", str(broker.port), "-t", "a", "--from", origin, *count)
    assert result.stdout.split() == expected
    assert result.returncode == (0 if expected else TIMED_OUT)


def test_sub_writes_json_for_programs(start_broker):
    broker = start_broker()
    publish_all(broker.port, "a", ["x"])
    result = tidegate("sub", "--port", str(broker.port), "-t", "a", "--from", "0", "--count", "1", "--format", "json")
    row = json.loads(result.stdout)
    assert (row["topic"], row["payload"], row["position"]) == ("a", "x", 0)


def test_sub_that_keeps_its_session_gets_what_came_while_it_was_away(start_broker):
    broker = start_broker()
    options = ["--port", str(broker.port), "-t", "a", "-q", "1", "-i", "laptop", "--keep-session"]
    assert tidegate("sub", *options, "--timeout", "0.2").returncode == TIMED_OUT
    publish_all(broker.port, "a", ["0", "1", "2"])
    assert tidegate("sub", *options, "--count", "2").stdout.split() == ["0", "1"]
    assert tidegate("sub", *options, "--count", "1").stdout.split() == ["2"]


# ── sub, when the connection is lost ──


def until_subscribed(port: int, topic: str, payload: bytes = b"probe") -> None:
    """Publishes until somebody gets it."""
    with RawClient(port, 5) as raw:
        raw.connect("")
        while raw.publish(topic, payload, 1) == 0x10:
            time.sleep(0.01)


def test_sub_connects_again_and_subscribes_again(start_broker, subscriber):
    broker: BrokerProcess = start_broker()
    process = subscriber(broker.port, "-t", "a", "-t", "b", "-q", "1")
    until_subscribed(broker.port, "a", b"before")
    assert process.stdout.readline() == "before\n"
    broker.kill()
    assert "the connection was lost" in (told := process.stderr.readline())
    assert "connecting again in 0.5 s" in told
    broker.start()
    while "connected again" not in process.stderr.readline():
        pass
    until_subscribed(broker.port, "b", b"after")
    assert process.stdout.readline() == "after\n"


def test_sub_that_keeps_its_session_misses_nothing_over_a_restart(start_broker, subscriber):
    broker: BrokerProcess = start_broker()
    process = subscriber(broker.port, "-t", "a", "-q", "1", "-i", "laptop", "--keep-session", "--count", "4")
    until_subscribed(broker.port, "a", b"0")
    assert process.stdout.readline() == "0\n"
    broker.stop()
    broker.start()
    publish_all(broker.port, "a", ["1", "2", "3"])  # before it is back, most likely
    assert process.communicate(timeout=60)[0].split() == ["1", "2", "3"]
    assert process.returncode == 0


def test_sub_that_went_back_in_time_goes_on_after_what_it_has_shown(start_broker, subscriber):
    broker: BrokerProcess = start_broker()
    publish_all(broker.port, "a", ["a0", "a1"])
    publish_all(broker.port, "b", ["b2"])
    filters = ["-t", "a", "-t", "b", "-t", "c"]
    process = subscriber(broker.port, *filters, "--from", "earliest", "--count", "6")
    assert sorted(process.stdout.readline() for _ in range(3)) == ["a0\n", "a1\n", "b2\n"]
    broker.stop()
    broker.start()
    publish_all(broker.port, "a", ["a3"])
    publish_all(broker.port, "c", ["c4"])
    publish_all(broker.port, "b", ["b5"])
    rest = process.communicate(timeout=60)[0].split()
    assert sorted(rest) == ["a3", "b5", "c4"]


def test_sub_without_reconnect_ends_with_an_error(start_broker, subscriber):
    broker: BrokerProcess = start_broker()
    process = subscriber(broker.port, "-t", "a", "--no-reconnect")
    until_subscribed(broker.port, "a")
    broker.kill()
    assert "error: the connection was lost" in process.communicate(timeout=30)[1]
    assert process.returncode == 1


def test_sub_in_old_mqtt_does_not_show_a_replay_twice(start_broker, subscriber):
    broker: BrokerProcess = start_broker()
    publish_all(broker.port, "a", ["0"])
    process = subscriber(broker.port, "-t", "a", "--from", "earliest", "--protocol", "3.1.1")
    assert process.stdout.readline() == "0\n"
    broker.kill()
    assert "--protocol 5" in process.communicate(timeout=30)[1]
    assert process.returncode == 1


def test_sub_does_not_fight_for_its_client_id(start_broker, subscriber):
    broker: BrokerProcess = start_broker()
    process = subscriber(broker.port, "-t", "a", "-i", "mine")
    until_subscribed(broker.port, "a")
    other = RawClient(broker.port, 5)
    other.connect("mine")
    assert "taken over" in process.communicate(timeout=30)[1]
    assert process.returncode == 1
    other.nothing()


def test_sub_ends_at_its_timeout_also_while_there_is_no_broker(start_broker, subscriber):
    broker: BrokerProcess = start_broker()
    process = subscriber(broker.port, "-t", "a", "--timeout", "3")
    until_subscribed(broker.port, "a")
    broker.kill()
    assert process.wait(30) == TIMED_OUT


# ── where commands find the broker and its data ──


@pytest.fixture
def configured(start_broker, tmp_path) -> Path:
    """A folder whose tidegate.toml is the one of a running broker, which has a message and a session."""
    broker = start_broker()
    publish_all(broker.port, "a", ["hello"])
    kept = RawClient(broker.port)
    kept.connect("kept", clean=False)
    kept.disconnect()
    folder = tmp_path / "configured"
    folder.mkdir()
    settings = f"data = '{broker.data}'\n[listen]\nhost = '0.0.0.0'\nport = {broker.port}\n"
    (folder / "tidegate.toml").write_text(settings)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pub", "-t", "b", "-m", "x", "-q", "1"], ""),
        (["sub", "-t", "a", "--from", "earliest", "--count", "1"], "hello"),
        (["log", "dump"], "hello"),
        (["log", "list", "--json"], '"messages": 1'),
        (["log", "verify"], "1 messages are whole"),
        (["sessions", "--json"], "kept"),
    ],
    ids=["pub", "sub", "log dump", "log list", "log verify", "sessions"],
)
def test_commands_take_the_broker_and_its_data_from_the_configuration(configured, tmp_path, arguments, words):
    from_folder = tidegate(*arguments, cwd=configured)
    assert (from_folder.returncode, from_folder.stderr) == (0, "")
    assert words in from_folder.stdout
    named = tidegate(*arguments, "--config", configured / "tidegate.toml", cwd=tmp_path)
    assert (named.returncode, named.stderr) == (0, "")
    settings = tomllib.loads((configured / "tidegate.toml").read_text())
    variables = {"TIDEGATE_DATA": settings["data"], "TIDEGATE_LISTEN_PORT": str(settings["listen"]["port"])}
    from_environment = tidegate(*arguments, cwd=tmp_path, **variables)
    assert (from_environment.returncode, from_environment.stderr) == (0, "")


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(configured):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = str(probe.getsockname()[1])
    port = str(tomllib.loads((configured / "tidegate.toml").read_text())["listen"]["port"])
    publish = ["pub", "-t", "b", "-m", "x"]
    astray = tidegate(*publish, cwd=configured, TIDEGATE_LISTEN_PORT=nobody)
    assert f"nothing listens on 127.0.0.1:{nobody}" in astray.stderr
    assert tidegate(*publish, "--port", port, cwd=configured, TIDEGATE_LISTEN_PORT=nobody).returncode == 0


def test_a_port_that_only_the_broker_knows_has_to_be_named(tmp_path):
    result = tidegate("pub", "-t", "b", "-m", "x", cwd=tmp_path, TIDEGATE_LISTEN_PORT="0")
    assert result.returncode == 2
    assert "--port" in result.stderr


# ── log and sessions, beside a running broker ──


def test_log_list_shows_the_segments_of_a_running_broker(start_broker):
    broker = start_broker(log__segment_bytes=65536)
    publish_all(broker.port, "a", ["x" * 4000] * 40)
    result = tidegate("log", "list", "--data", broker.data, "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert sum(row["messages"] for row in rows) == 40
    assert len(rows) >= 3
    assert [row["base"] for row in rows[1:]] == [row["end"] for row in rows[:-1]]
    assert tidegate("log", "list", "--data", broker.data).returncode == 0


def test_log_dump_shows_what_was_just_acknowledged(start_broker):
    broker = start_broker("fsync")
    publish_all(broker.port, "a/b", ["first", "second"], qos=2)
    publish_all(broker.port, "c", ["third"])
    result = tidegate("log", "dump", "--data", broker.data, "--filter", "a/#", "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["position"], row["topic"], row["qos"], row["payload"]) for row in rows] == [
        (0, "a/b", 2, "first"),
        (1, "a/b", 2, "second"),
    ]
    assert tidegate("log", "dump", "--data", broker.data, "--from", "2").stdout.endswith("@2 q1 c third\n")


def test_log_verify_finds_a_running_broker_s_log_sound(start_broker):
    broker = start_broker(log__segment_bytes=65536)
    publish_all(broker.port, "a", ["x" * 4000] * 40)
    result = tidegate("log", "verify", "--data", broker.data)
    assert (result.returncode, "40 messages are whole, 0 places are damaged" in result.stdout) == (0, True)
    publish_all(broker.port, "a", ["and the broker goes on"])


def test_log_verify_finds_the_log_sound_after_a_kill(start_broker):
    broker = start_broker("fsync")
    publish_all(broker.port, "a", ["0", "1", "2"])
    broker.kill()
    broker.start()
    publish_all(broker.port, "a", ["3"])
    result = tidegate("log", "verify", "--data", broker.data)
    assert (result.returncode, "4 messages are whole" in result.stdout) == (0, True)


def test_sessions_are_listed_with_where_they_are(start_broker):
    broker = start_broker()
    away = RawClient(broker.port, 5)
    away.connect("away", properties=Properties(session_expiry=3600))
    away.subscribe("a/#", "$share/g/b", qos=1)
    away.disconnect()
    here = RawClient(broker.port)
    here.connect("here")
    here.subscribe("c")
    publish_all(broker.port, "a/b", ["x"])
    result = tidegate("sessions", "--data", broker.data, "--json")
    rows = {row["client_id"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert set(rows) == {"away", "here"}
    assert (rows["away"]["connected"], rows["away"]["persistent"], rows["away"]["position"]) == (False, True, 0)
    assert rows["away"]["subscriptions"] == ["a/#", "$share/g/b"]
    assert (rows["here"]["connected"], rows["here"]["persistent"]) == (True, False)
    assert "away" in tidegate("sessions", "--data", broker.data).stdout


# ── the process ──


def test_sigterm_tells_clients_keeps_sessions_and_exits_with_0(start_broker):
    broker: BrokerProcess = start_broker("fsync")
    v5, v4 = RawClient(broker.port, 5), RawClient(broker.port, 4)
    v5.connect("v5", properties=Properties(session_expiry=3600))
    v4.connect("v4", clean=False)
    for raw in (v5, v4):
        raw.subscribe("a", qos=1)
    publish_all(broker.port, "a", ["unacknowledged"])
    for raw in (v5, v4):
        raw.message(acknowledge=False)
    assert broker.stop() == 0
    assert [packet.reason for packet in v5.until_closed() if isinstance(packet, Disconnect)] == [0x8B]
    assert v4.until_closed() == []
    broker.start()
    for version, name in ((5, "v5"), (4, "v4")):
        back = RawClient(broker.port, version)
        properties = Properties(session_expiry=3600) if version == 5 else Properties()
        assert back.connect(name, clean=False, properties=properties).session_present
        assert back.message().payload == b"unacknowledged"


def test_what_was_sent_right_before_sigterm_is_stored(start_broker):
    broker: BrokerProcess = start_broker("fsync")
    raw = RawClient(broker.port)
    raw.connect("p")
    for i in range(500):
        raw.publish("a", b"%d" % i, 1, wait=False)
    raw.receive()
    broker.stop()
    acknowledged = 1 + len(raw.until_closed())
    result = tidegate("log", "dump", "--data", broker.data, "--json")
    stored = [int(json.loads(line)["payload"]) for line in result.stdout.splitlines()]
    assert stored == list(range(len(stored)))
    assert len(stored) >= acknowledged


def test_a_stop_does_not_wait_for_a_client_that_never_reads(start_broker):
    broker: BrokerProcess = start_broker()
    stuck = RawClient(broker.port, 5)
    stuck.connect("stuck", will=Will(b"w", b"", 0, False))
    stuck.subscribe("a")
    pub = RawClient(broker.port)
    pub.connect("p")
    for _ in range(100):
        pub.publish("a", b"x" * 100_000, 1)
    assert broker.stop(timeout_s=30) == 0


def test_a_host_without_an_address_is_an_error_with_a_hint(tmp_path):
    result = tidegate("broker", "--data", tmp_path / "data", "--port", "0", "--host", "no such host")
    assert result.returncode == 2
    assert "no such host has no address" in result.stderr
    assert "--host" in result.stderr


def test_trace_waits_for_packets_of_a_client(start_broker):
    broker: BrokerProcess = start_broker()
    result = tidegate("trace", "pump-7", "--port", str(broker.port), "--timeout", "0.5")
    assert (result.returncode, result.stdout) == (TIMED_OUT, "")
    assert "waiting for packets of pump-7" in result.stderr


def test_a_busy_port_is_an_error_with_a_hint(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = tidegate("broker", "--data", tmp_path / "data", "--port", port)
    assert result.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.attack("C13")
def test_a_folder_in_use_is_an_error_with_a_hint_and_the_first_broker_goes_on(start_broker):
    broker: BrokerProcess = start_broker()
    result = tidegate("broker", "--data", broker.data, "--port", "0")
    assert result.returncode == 2
    assert "--data" in result.stderr
    assert "Traceback" not in result.stderr
    publish_all(broker.port, "a", ["still here"])
    assert "still here" in tidegate("log", "dump", "--data", broker.data).stdout


def test_up_with_a_folder_in_use_says_so_and_welcomes_nobody(start_broker):
    broker: BrokerProcess = start_broker()
    result = tidegate("up", "--data", broker.data, "--port", "0", TIDEGATE_PIPELINE_ENABLED="false")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "--data" in result.stderr
    assert "cannot run like this (exit code 2)" in result.stderr


def test_up_with_a_folder_that_is_none_ends_with_the_reason(tmp_path):
    (tmp_path / "data").write_text("a file")
    result = tidegate("up", "--data", tmp_path / "data", "--port", "0", TIDEGATE_PIPELINE_ENABLED="false")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Not a directory" in result.stderr


def test_up_serves_and_says_where(tmp_path):
    command = [sys.executable, "-m", "tidegate.cli", "up", "--data", str(tmp_path / "data"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    seen = ""
    while not (found := re.search(r"listening on [^ ]+:(\d+)", seen)):
        line = process.stdout.readline()
        assert line, seen
        seen += line
    assert f"tidegate sub --port {found[1]} -t 'demo/#'" in seen
    publish_all(int(found[1]), "demo/hello", ["hi"])
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_log_in_memory_is_bounded_by_its_own_setting(start_broker):
    broker: BrokerProcess = start_broker("memory", log__memory_bytes="1MiB")
    publish_all(broker.port, "a", [f"{i:03}" + "x" * 50_000 for i in range(60)])
    result = tidegate("sub", "--port", str(broker.port), "-t", "a", "--from", "earliest", "--timeout", "2")
    kept = [int(line[:3]) for line in result.stdout.splitlines()]
    assert kept == list(range(kept[0], 60))
    assert len(kept) * 50_000 <= 1 << 20


# ── $SYS ──

# What mosquitto 2.0.11 publishes below $SYS/broker, and exporters parse.
MOSQUITTO_TREE = [
    "bytes/received",
    "bytes/sent",
    "clients/active",
    "clients/connected",
    "clients/disconnected",
    "clients/expired",
    "clients/inactive",
    "clients/maximum",
    "clients/total",
    "heap/current",
    "heap/maximum",
    "messages/received",
    "messages/sent",
    "messages/stored",
    "publish/bytes/received",
    "publish/bytes/sent",
    "publish/messages/dropped",
    "publish/messages/received",
    "publish/messages/sent",
    "retained messages/count",
    "shared_subscriptions/count",
    "store/messages/bytes",
    "store/messages/count",
    "subscriptions/count",
    "uptime",
    "version",
    *(
        f"load/{name}/{span}"
        for name in (
            "bytes/received",
            "bytes/sent",
            "connections",
            "messages/received",
            "messages/sent",
            "publish/dropped",
            "publish/received",
            "publish/sent",
            "sockets",
        )
        for span in ("1min", "5min", "15min")
    ),
]


def sys_topics(port: int, names: list[str]) -> dict[str, bytes]:
    """The values of some topics, as a new subscriber gets them."""
    raw = RawClient(port)
    raw.connect("")
    raw.subscribe(*(f"$SYS/broker/{name}" for name in names))
    found: dict[str, bytes] = {}
    try:
        while len(found) < len(names):
            got = raw.expect(Publish, 2)
            found[got.topic.decode().removeprefix("$SYS/broker/")] = got.payload
    except TimeoutError:
        pass  # the test says which are missing
    return found


def test_sys_has_every_topic_that_mosquitto_has_in_the_same_form(broker):
    found = sys_topics(broker.port, MOSQUITTO_TREE)
    assert set(MOSQUITTO_TREE) - set(found) == set()
    assert re.fullmatch(rb"\d+ seconds", found["uptime"])
    for name in set(MOSQUITTO_TREE) - {"uptime", "version"}:
        form = rb"\d+\.\d\d" if name.startswith("load/") else rb"\d+"
        assert re.fullmatch(form, found[name]), (name, found[name])
    assert int(found["heap/maximum"]) >= int(found["heap/current"]) > 1 << 20


def test_sys_follows_what_happens(start_broker):
    broker = start_broker(sys__interval_s=1)
    watcher = RawClient(broker.port)
    watcher.connect("watcher")
    watcher.subscribe("$SYS/broker/clients/connected", "$SYS/broker/publish/messages/received")
    other = RawClient(broker.port)
    other.connect("other")
    for _ in range(7):
        other.publish("a", b"x", 1)
    wanted = {b"clients/connected": b"2", b"publish/messages/received": b"7"}
    while wanted:
        got = watcher.expect(Publish)
        name = got.topic.removeprefix(b"$SYS/broker/")
        if wanted.get(name) == got.payload:
            del wanted[name]


class Tally:
    """Counts what comes to a client, before it is decoded."""

    def __init__(self, client: RawClient) -> None:
        self.received_bytes = self.publish_bytes = 0
        self._stream, client.stream = client.stream, self  # type: ignore[assignment]

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        self.received_bytes += len(data)
        packets = self._stream.feed(data)
        for first, body in packets:
            if first >> 4 == 3:
                self.publish_bytes += 1 + len(varint(len(body))) + len(body)
        return packets


def test_sys_counts_bytes_of_publish_packets_apart_from_all_that_are_sent(start_broker):
    """Both to the byte: an update tells what had been sent when it began."""
    broker = start_broker(sys__interval_s=1)
    clients = [RawClient(broker.port, version) for version in (4, 5, 5, 4)]
    tallies = [Tally(client) for client in clients]
    subscriber, other, publisher, watcher = clients
    for client in clients:
        client.connect("")
    for client, qos in ((subscriber, 2), (other, 1)):
        client.subscribe("a", *(f"not/{i}" for i in range(200)), qos=qos)
    for qos in (0, 1, 2):
        publisher.publish("a", b"x" * 1000, qos)
        subscriber.message()
        other.message()
    for client in (subscriber, other, publisher):
        client.nothing(0.01)
    watcher.subscribe("$SYS/broker/publish/bytes/sent", "$SYS/broker/bytes/sent")
    update(watcher)  # what it gets by itself has been counted
    for _ in range(2):
        publishes, everything = sum(t.publish_bytes for t in tallies), sum(t.received_bytes for t in tallies)
        assert 0 < publishes < everything - 2 * 200  # a SUBACK has a byte for each filter
        assert update(watcher) == {b"publish/bytes/sent": b"%d" % publishes, b"bytes/sent": b"%d" % everything}


def update(watcher: RawClient) -> dict[bytes, bytes]:
    """All that the next update brings: it goes out at once, and a second lies between two."""
    found: dict[bytes, bytes] = {}
    message = watcher.expect(Publish)
    try:
        while True:
            found[message.topic.removeprefix(b"$SYS/broker/")] = message.payload
            message = watcher.expect(Publish, 0.3)
    except TimeoutError:
        return found


def test_sys_is_no_business_of_a_plain_wildcard_and_is_not_stored(start_broker):
    broker = start_broker(sys__interval_s=1)
    everything = RawClient(broker.port)
    everything.connect("everything")
    everything.subscribe("#", "+/broker/uptime")
    watcher = RawClient(broker.port)
    watcher.connect("watcher")
    watcher.subscribe("$SYS/broker/uptime")
    for _ in range(2):
        watcher.expect(Publish)
    everything.nothing()
    assert tidegate("log", "dump", "--data", broker.data).stdout == ""
