"""The command line, as far as it needs no broker: help, configuration, refusals, and what messages look like.

A scripted peer stands in for a broker where only its answers matter.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner, Result
from paho.mqtt.client import MQTTMessage
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

import tidegate.broker
import tidegate.server
from harness import BrokerProcess, RawClient
from message_frames import encode_messages
from tidegate import __version__
from tidegate.cli import tidegate as command
from tidegate.commands.subscribe import json_line, replay_place, template_line, verbose_line
from tidegate.commands.text import parse_place, payload_text, safe, utc
from tidegate.commands.trace import line
from tidegate.config import Config
from tidegate.config_sources import settings
from tidegate.errors import ConfigError, FolderLocked
from tidegate.log.files.disk import storage_error
from tidegate.log.frame import encode_changes
from tidegate.log.run import Run as MessageRun
from tidegate.log.segment import SegmentHeader, encode_segment_header, segment_name


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, env: dict[str, str] | None = None, stdin: str | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), env=env, input=stdin)


# ---------------------------------------------------------------------------------- help and version


def test_alone_it_prints_its_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert "tidegate sub -t 'demo/#' --from earliest -v" in result.output


def test_the_version_is_the_package_s() -> None:
    assert __version__ in run("version").output
    assert run("--version").output == run("version").output


def commands(group: click.Group = command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command, by its words."""
    for name, each in group.commands.items():
        if isinstance(each, click.Group):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_every_option_says_what_it_is_for(name: str) -> None:
    assert COMMANDS[name].help
    silent = [each.name for each in COMMANDS[name].params if isinstance(each, click.Option) and not each.help]
    assert silent == []


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"version"}))
def test_every_command_has_an_example_in_its_help(name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"tidegate {name}" in result.output.partition("Example")[2]


def test_an_unknown_command_is_a_usage_error() -> None:
    assert run("brokr").exit_code == 2


# ---------------------------------------------------------------------------------- config


def test_config_check_accepts_what_is_right() -> None:
    Path("tidegate.toml").write_text("[listen]\nport = 1884\n")
    result = run("config", "check")
    assert result.exit_code == 0
    assert f"1 of {len(settings())} settings differs from its default." in result.output


def test_config_check_counts_what_differs_and_not_what_was_merely_written_down() -> None:
    Path("tidegate.toml").write_text("[listen]\nport = 1883\nhost = '::1'\n[log]\nsegment_bytes = '128MiB'\n")
    output = run("config", "check", env={"TIDEGATE_DATA": "data", "TIDEGATE_LOG_LEVEL": "debug"}).output
    assert f"2 of {len(settings())} settings differ from their defaults." in output


def test_config_check_counts_entries_of_your_own_apart() -> None:
    Path("tidegate.toml").write_text(
        "[spark]\nmaster = 'local[1]'\nexecutor.memory = '2g'\n"
        "[extract.climate]\nfilter = 'a/#'\ncolumns = 'value double'\n"
    )
    output = run("config", "check").output
    assert f"1 of {len(settings())} settings differs from its default, and 3 entries are your own." in output


def test_config_check_refuses_in_one_line_and_a_hint() -> None:
    Path("mine.toml").write_text("[listen]\nprot = 1884\n")
    result = run("config", "check", "--config", "mine.toml")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: listen.prot: unknown setting in file mine.toml",
        "hint: did you mean listen.port?",
    ]


def test_config_show_says_where_each_value_came_from() -> None:
    result = run("config", "show", "--json", env={"TIDEGATE_LOG_SEGMENT_BYTES": "64MiB"})
    shown = json.loads(result.output)
    assert shown["log.segment_bytes"]["value"] == 64 << 20
    assert shown["log.segment_bytes"]["source"] == "environment TIDEGATE_LOG_SEGMENT_BYTES"
    assert shown["listen.port"] == {
        "value": 1883,
        "source": "default",
        "doc": "TCP port for MQTT; 0 picks a free one",
    }


def test_config_show_is_a_table_for_people() -> None:
    output = run("config", "show", env={"COLUMNS": "200"}).output
    assert "log.segment_bytes" in output
    assert "128MiB" in output


def test_config_show_has_the_entries_that_the_user_named_and_hides_secrets() -> None:
    Path("tidegate.toml").write_text(
        "[spark]\nexecutor.memory = '2g'\nhadoop.fs.s3a.secret.key = 'hush'\n"
        "[pipeline.tenant_retention_s]\nacme = '30d'\n"
        "[extract.climate]\nfilter = '[red]/#'\ncolumns = 'value double'\n"
    )
    shown = json.loads(run("config", "show", "--json").output)
    assert shown["spark.executor.memory"]["value"] == "2g"
    assert shown["pipeline.tenant_retention_s.acme"]["value"] == 30 * 86_400
    assert shown["extract.climate.filter"]["source"] == "file tidegate.toml"
    table = run("config", "show", env={"COLUMNS": "300"}).output
    assert "[red]/#" in table
    assert "30d" in table
    assert "hush" not in table + json.dumps(shown)


# ---------------------------------------------------------------------------------- broker and up

Run = Callable[[Config], int]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Puts a function in the place of the server, whose own tests start it for real."""

    def put(function: Run) -> None:
        app = ModuleType("tidegate.server.app")
        app.run = lambda config, announce: function(config)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tidegate.server.app", app)
        monkeypatch.setattr(tidegate.server, "app", app, raising=False)

    return put


def test_the_broker_runs_with_what_the_flags_say(server: Callable[[Run], None]) -> None:
    seen: list[Config] = []
    server(lambda config: seen.append(config) or 0)  # type: ignore[func-returns-value]
    flags = ["--data", "d", "--port", "1884", "--host", "0.0.0.0", "--durability", "os"]
    assert run("broker", *flags, "--log-level", "debug").exit_code == 0
    (config,) = seen
    assert (config.data, config.listen.port, config.listen.host) == (Path("d"), 1884, "0.0.0.0")
    assert (config.log.durability, config.log_level) == ("os", "debug")


def test_the_exit_code_is_the_server_s(server: Callable[[Run], None]) -> None:
    server(lambda config: 7)
    assert run("broker").exit_code == 7


@pytest.mark.parametrize(
    ("error", "line", "hint"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "port 1883 on 127.0.0.1 is in use", "--port"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "127.0.0.1 is not an address of this machine", "--host"),
        (FolderLocked("data is in use by process 7"), "data is in use by process 7", "--data"),
        (ConfigError("data", "is not a folder", "name another"), "data: is not a folder", "name another"),
        (PermissionError(errno.EACCES, "Permission denied", "data/log"), "data/log: Permission denied", ""),
    ],
    ids=["busy port", "foreign address", "locked folder", "configuration", "no permission"],
)
def test_what_stops_the_server_is_told_without_a_traceback(
    server: Callable[[Run], None], error: Exception, line: str, hint: str
) -> None:
    def fail(config: Config) -> int:
        raise error

    server(fail)
    result = run("broker")
    assert result.exit_code == 2
    first, *rest = result.stderr.splitlines()
    assert first == f"error: {line}"
    assert hint in "".join(rest)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EACCES, 2), (errno.ENOTDIR, 2), (errno.EROFS, 2), (errno.ENOSPC, 1), (errno.EMFILE, 1), (errno.EIO, 1)],
)
def test_the_exit_code_says_whether_another_start_may_go_well(
    server: Callable[[Run], None], number: int, code: int
) -> None:
    cause = OSError(number, "the system's word", "data/log")

    def fail(config: Config) -> int:
        raise storage_error(cause, "cannot open the log") from cause

    server(fail)
    assert run("broker").exit_code == code


ALONE = {"TIDEGATE_PIPELINE_ENABLED": "false"}


def test_up_on_a_busy_port_says_so_before_any_welcome() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        result = run("up", "--port", str(port), env=ALONE)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert "--port" in result.stderr


# ---------------------------------------------------------------------------------- sessions


@pytest.fixture
def stored_session(start_broker: Callable[..., BrokerProcess]) -> Path:
    """A session that a real broker stored, beside which the command reads."""
    broker = start_broker()
    raw = RawClient(broker.port, 4)
    raw.connect("lap[red]top", clean=False)
    raw.subscribe("demo/#", "[red]/+", qos=1)
    raw.disconnect()
    return broker.data


def test_sessions_are_listed_for_programs(stored_session: Path) -> None:
    facts = json.loads(run("sessions", "--json", "--data", str(stored_session)).stdout)
    assert facts["client_id"] == "lap[red]top"
    assert (facts["connected"], facts["persistent"]) == (False, True)
    assert facts["subscriptions"] == ["demo/#", "[red]/+"]


def test_sessions_are_listed_as_a_table_in_which_names_are_only_text(stored_session: Path) -> None:
    output = run("sessions", "--data", str(stored_session), env={"COLUMNS": "160"}).stdout
    assert "lap[red]top" in output
    assert "demo/# [red]/+" in output


# ---------------------------------------------------------------------------------- pub and sub

CONNECT, PUBLISH, SUBSCRIBE, DISCONNECT = 0x10, 0x30, 0x80, 0xE0
CONNACK_OK = bytes.fromhex("2003000000")


class ScriptedPeer:
    """Answers each kind of packet with the bytes it was told to, and remembers what it got."""

    def __init__(self, answers: dict[int, bytes]) -> None:
        self.answers = answers
        self.received: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = str(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        with connection, connection.makefile("rb") as stream:
            while head := stream.read(1):
                length = stream.read(1)[0]
                assert length < 128, "the scripted peer reads short packets only"
                self.received.append(head + stream.read(length))
                if head[0] & 0xF0 == DISCONNECT:
                    return
                try:
                    connection.sendall(self.answers.get(head[0] & 0xF0, b""))
                except OSError:
                    return

    def close(self) -> None:
        self._server.close()
        self._thread.join(10)


@pytest.fixture
def peer() -> Iterator[Callable[[dict[int, bytes]], ScriptedPeer]]:
    started: list[ScriptedPeer] = []

    def start(answers: dict[int, bytes]) -> ScriptedPeer:
        started.append(ScriptedPeer({CONNECT: CONNACK_OK, **answers}))
        return started[-1]

    yield start
    for each in started:
        each.close()


Start = Callable[[dict[int, bytes]], ScriptedPeer]


@pytest.mark.parametrize("name", ["pub", "sub"])
def test_without_a_broker_it_says_how_to_start_one(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    extra = ["-m", "x"] if name == "pub" else []
    result = run(name, "-t", "a", "--port", port, *extra)
    assert result.exit_code == 1
    assert f"nothing listens on 127.0.0.1:{port}" in result.stderr
    assert "tidegate up" in result.stderr


def test_a_refused_connection_is_told_in_words(peer: Start) -> None:
    refusing = peer({CONNECT: bytes.fromhex("2003008700")})
    result = run("pub", "-t", "a", "-m", "x", "--port", refusing.port)
    assert result.exit_code == 1
    assert "refused the connection: Not authorized" in result.stderr


def test_a_refused_subscription_is_told_in_words(peer: Start) -> None:
    refusing = peer({SUBSCRIBE: bytes.fromhex("900400010087")})
    result = run("sub", "-t", "secret/#", "--port", refusing.port, "--timeout", "10")
    assert result.exit_code == 1
    assert "refused the subscription to secret/#: Not authorized" in result.stderr


def test_a_refused_message_is_told_in_words(peer: Start) -> None:
    refusing = peer({PUBLISH: bytes.fromhex("40040001" + "9700")})
    result = run("pub", "-t", "a", "-m", "x", "-q", "1", "--port", refusing.port)
    assert result.exit_code == 1
    assert "refused messages: Quota exceeded: 1" in result.stderr


def test_a_broker_that_hangs_up_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        result = run("sub", "-t", "a", "--port", port)
        thread.join(10)
    assert result.exit_code == 1
    assert "did not accept the connection" in result.stderr


def test_each_line_of_standard_input_is_a_message(peer: Start) -> None:
    broker = peer({})
    result = run("pub", "-t", "a", "--stdin-lines", "--port", broker.port, stdin="one\ntwo\n")
    assert result.exit_code == 0
    published = [each[1:] for each in broker.received if each[0] & 0xF0 == PUBLISH]
    assert published == [b"\x00\x01a\x00one", b"\x00\x01a\x00two"]


def test_count_sends_a_message_so_often(peer: Start) -> None:
    broker = peer({})
    assert run("pub", "-t", "a", "-m", "x", "--count", "3", "--port", broker.port).exit_code == 0
    assert sum(each[0] & 0xF0 == PUBLISH for each in broker.received) == 3


def test_messages_are_shown_until_the_count_is_reached(peer: Start) -> None:
    message = bytes([0x30, 6, 0, 1]) + b"a" + b"\x00" + b"hi"
    broker = peer({SUBSCRIBE: bytes.fromhex("900400010000") + message * 3})
    result = run("sub", "-t", "a", "--count", "2", "--port", broker.port, "--timeout", "10")
    assert (result.exit_code, result.stdout) == (0, "hi\nhi\n")


def test_raw_writes_payload_bytes_only(peer: Start) -> None:
    message = bytes([0x30, 6, 0, 1]) + b"a" + b"\x00" + b"\xff\x00"
    broker = peer({SUBSCRIBE: bytes.fromhex("900400010000") + message})
    result = run("sub", "-t", "a", "--raw", "--count", "1", "--port", broker.port, "--timeout", "10")
    assert result.stdout_bytes == b"\xff\x00"


def test_a_subscription_that_sees_nothing_in_time_exits_with_3(peer: Start) -> None:
    broker = peer({SUBSCRIBE: bytes.fromhex("900400010000")})
    assert run("sub", "-t", "a", "--port", broker.port, "--timeout", "0.2").exit_code == 3


def test_from_subscribes_to_the_replay_of_the_filter(peer: Start) -> None:
    broker = peer({SUBSCRIBE: bytes.fromhex("900400010000")})
    run("sub", "-t", "demo/#", "--from", "earliest", "--port", broker.port, "--timeout", "0.2")
    (subscribe,) = [each for each in broker.received if each[0] & 0xF0 == SUBSCRIBE]
    assert b"$replay/earliest/demo/#" in subscribe


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pub", "-t", "a"], "one of -m, -f or --stdin-lines"),
        (["pub", "-t", "a", "-m", "x", "--stdin-lines"], "one of -m, -f or --stdin-lines"),
        (["pub", "-t", "a", "-m", "x", "--expiry", "5", "--protocol", "3.1.1"], "need --protocol 5"),
        (["pub", "-t", "a", "-m", "x", "--property", "colour=red"], "content-type"),
        (["pub", "-t", "a", "-m", "x", "--user-property", "colour"], "NAME=VALUE"),
        (["sub", "-t", "a", "--keep-session"], "-i"),
        (["sub", "-t", "a", "--raw", "-v"], "--raw"),
        (["sub", "-t", "a", "--from", "yesterday"], "-15m"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


# ---------------------------------------------------------------------------------- trace


TRACED = {"at": "2026-01-31T12:00:00.123Z", "direction": "in", "packet": "PUBLISH", "topic": "a b", "qos": 1}


def publication(topic: str, payload: bytes) -> bytes:
    body = len(topic).to_bytes(2, "big") + topic.encode() + b"\x00" + payload
    assert 127 < len(body) < 16384
    return bytes([PUBLISH, len(body) & 127 | 128, len(body) >> 7]) + body


@pytest.mark.parametrize("form", ["text", "json"])
def test_trace_shows_the_packets_of_a_client_one_a_line(peer: Start, form: str) -> None:
    told = publication("$SYS/clients/pump%2B%23/trace", json.dumps(TRACED).encode())
    broker = peer({SUBSCRIBE: bytes.fromhex("900400010000") + told})
    as_json = ["--json"] if form == "json" else []
    result = run("trace", "pump+#", "--port", broker.port, "--count", "1", "--timeout", "10", *as_json)
    (subscribe,) = [each for each in broker.received if each[0] & 0xF0 == SUBSCRIBE]
    assert b"$SYS/clients/pump%2B%23/trace" in subscribe
    assert result.exit_code == 0
    assert "waiting for packets of pump+#" in result.stderr
    if form == "json":
        assert json.loads(result.stdout) == TRACED
    else:
        assert result.stdout == '2026-01-31T12:00:00.123Z in  PUBLISH     topic="a b" qos=1\n'


def test_trace_says_where_packets_are_missing(peer: Start) -> None:
    numbers = [7, 8, 12, 1, 2]  # the client connected again after the 12th
    told = [publication("$SYS/clients/pump/trace", json.dumps(TRACED | {"number": n}).encode()) for n in numbers]
    broker = peer({SUBSCRIBE: bytes.fromhex("900400010000") + b"".join(told)})
    result = run("trace", "pump", "--port", broker.port, "--count", "5", "--timeout", "10")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert [line for line in result.stderr.splitlines() if "missing" in line] == [
        "tidegate: 3 packets are missing here: there were more than could be shown"
    ]


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'{"at": "T", "direction": "out", "packet": "PINGRESP"}', "T out PINGRESP"),
        (b'{"packet": "CONNACK", "session_present": true}', "? ?   CONNACK     session_present=true"),
        (b'{"packet": "PUBLISH", "topic": "\\u001b[2J\\n"}', '? ?   PUBLISH     topic="\\u001b[2J\\n"'),
        (b'{"packet": "SUBSCRIBE", "filters": ["a/#", "b"]}', '? ?   SUBSCRIBE   filters=["a/#", "b"]'),
        (b'{"packet": "PUBLISH", "number": 7, "dup": false, "qos": 0}', "? ?   PUBLISH     qos=0"),
        (b'{"packet": "PUBACK", "reason": 0}', "? ?   PUBACK"),
        (b'{"packet": "PUBACK", "reason": 151}', "? ?   PUBACK      reason=0x97 (quota exceeded)"),
        (b'{"packet": "PUBACK", "reason": 199}', "? ?   PUBACK      reason=0xC7"),
        (b'{"packet": "PUBACK", "reason": "?"}', "? ?   PUBACK      reason=?"),
        (b'{"packet": "SUBACK", "reasons": [2, 143]}', "? ?   SUBACK      reasons=[2, 0x8F]"),
        (b"not\njson", "not\\njson"),
        (b"[1]", "[1]"),
    ],
)
def test_a_packet_is_one_safe_line_whatever_it_holds(payload: bytes, shown: str) -> None:
    assert line(payload) == shown


# ---------------------------------------------------------------------------------- log

NEW_YEAR_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
WRITER = 7


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three segments of three frames of three messages; frame n was stored n seconds into the year."""
    folder = tmp_path / "data" / "log"
    folder.mkdir(parents=True)
    position = 0
    for sequence in (1, 2, 3):
        parts = [encode_segment_header(SegmentHeader(sequence, position, NEW_YEAR_MS, WRITER))]
        for _ in range(3):
            runs = [
                MessageRun(b"demo/a", b"pump", b"default", 1, [b"hi", b"\xff\x00"]),
                MessageRun(b"demo/b", b"pump", b"default", 4, [b"x"], [b"\x03\x00\x04text"], [60]),
            ]
            parts.append(encode_messages(runs, position, NEW_YEAR_MS + position // 3 * 1000, WRITER))
            position += 3
            parts.append(encode_changes([b"a session moved"], position, NEW_YEAR_MS, WRITER))
        (folder / segment_name(sequence)).write_bytes(b"".join(parts))
    return folder


def dumped(*arguments: str) -> list[int]:
    result = run("log", "dump", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line)["position"] for line in result.stdout.splitlines()]


def test_segments_are_listed_with_what_they_hold(log: Path) -> None:
    lines = [json.loads(line) for line in run("log", "list", "--json").stdout.splitlines()]
    assert [(each["base"], each["end"], each["messages"]) for each in lines] == [
        (0, 9, 9),
        (9, 18, 9),
        (18, 27, 9),
    ]
    assert lines[1]["first_time"] == "2026-01-01T00:00:03.000Z"
    assert lines[1]["last_time"] == "2026-01-01T00:00:05.000Z"


def test_segments_are_listed_as_a_table_for_people(log: Path) -> None:
    output = run("log", "list", env={"COLUMNS": "160"}).stdout
    assert "3 in all" in output
    assert "2026-01-01 00:00:08" in output


def test_messages_are_dumped_with_everything_stored(log: Path) -> None:
    first, second, third = run("log", "dump", "--limit", "3").stdout.splitlines()
    assert first == "2026-01-01T00:00:00.000Z @0 q1 demo/a hi"
    assert second == "2026-01-01T00:00:00.000Z @1 q1 demo/a 0xff00"
    assert third == "2026-01-01T00:00:00.000Z @2 q0r demo/b x"
    assert json.loads(run("log", "dump", "--from", "2", "--limit", "1", "--json").stdout) == {
        "position": 2,
        "time": "2026-01-01T00:00:00.000Z",
        "tenant": "default",
        "topic": "demo/b",
        "qos": 0,
        "retain": True,
        "publisher": "pump",
        "payload": "x",
        "expiry_s": 60,
        "content_type": "text",
    }


@pytest.mark.parametrize(
    ("arguments", "positions"),
    [
        (["--from", "25"], [25, 26]),
        (["--from", "7", "--to", "11"], [7, 8, 9, 10]),
        (["--from", "2026-01-01T00:00:08Z"], [24, 25, 26]),
        (["--to", "2026-01-01T00:00:01Z"], [0, 1, 2]),
        (["--filter", "demo/b", "--to", "9"], [2, 5, 8]),
        (["--filter", "+/b", "--limit", "2"], [2, 5]),
        (["--filter", "other/#"], []),
    ],
)
def test_a_part_of_the_log_is_chosen_by_place_and_topic(
    log: Path, arguments: list[str], positions: list[int]
) -> None:
    assert dumped(*arguments) == positions


def test_a_sound_log_is_verified(log: Path) -> None:
    result = run("log", "verify")
    assert result.exit_code == 0
    assert "3 segments, 27 messages are whole, 0 places are damaged" in result.stdout


def test_a_flipped_bit_is_found_and_told_with_what_it_cost(log: Path) -> None:
    path = log / segment_name(2)
    flipped = bytearray(path.read_bytes())
    flipped[200] ^= 1
    path.write_bytes(flipped)
    result = run("log", "verify")
    assert result.exit_code == 1
    assert f"damaged: {segment_name(2)} at byte 64" in result.stdout
    assert "messages 9 to 11 are lost" in result.stdout
    assert dumped("--from", "8", "--to", "13") == [8, 12]


def test_a_missing_segment_is_found(log: Path) -> None:
    (log / segment_name(2)).unlink()
    result = run("log", "verify")
    assert result.exit_code == 1
    assert f"{segment_name(2)} at byte 0, 0 bytes: the segment is missing" in result.stdout
    assert "messages 9 to 17 are lost" in result.stdout


def test_an_unfinished_write_at_the_end_is_no_damage(log: Path) -> None:
    with (log / segment_name(3)).open("ab") as file:
        file.write(b"TGF1")
    result = run("log", "verify")
    assert result.exit_code == 0
    assert "unfinished write" in result.stdout


def test_reading_the_log_changes_nothing_in_its_folder(log: Path) -> None:
    def contents() -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in log.parent.rglob("*") if each.is_file()}

    before = contents()
    for name in ("list", "dump", "verify"):
        run("log", name)
    assert contents() == before


def test_an_empty_segment_stops_no_reader(log: Path) -> None:
    (log / segment_name(4)).write_bytes(b"")
    assert run("log", "list").exit_code == 0
    assert dumped("--from", "26") == [26]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--data", "."], "has no message log"),
        (["dump", "--from", "yesterday"], "an age such as"),
        (["dump", "--filter", "a/#/b"], "`#` must be the last level"),
    ],
)
def test_what_cannot_be_read_is_refused(log: Path, arguments: list[str], words: str) -> None:
    result = run("log", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


# ---------------------------------------------------------------------------------- text


def message(topic: str, payload: bytes, user: list[tuple[str, str]] | None = None) -> MQTTMessage:
    made = MQTTMessage(topic=topic.encode())
    made.payload = payload
    made.properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    if user:
        made.properties.UserProperty = user
    return made


REPLAYED = [("tidegate-time", "2026-03-01T12:00:00.000Z"), ("tidegate-position", "42")]


def test_text_payloads_are_shown_as_they_are() -> None:
    assert payload_text("grüße".encode()) == "grüße"


def test_payloads_that_are_not_text_are_shown_in_hexadecimal() -> None:
    assert payload_text(b"\xff\x00") == "0xff00"


def test_control_characters_cannot_reach_the_terminal() -> None:
    assert safe("a\x1b[2Jb\nc\u202e") == "a\\u001b[2Jb\\nc\\u202e"


def test_verbose_shows_time_and_position_of_a_replayed_message() -> None:
    assert verbose_line(message("a/b", b"hi", REPLAYED)) == "2026-03-01T12:00:00.000Z @42 a/b hi"
    assert verbose_line(message("a/b", b"hi")) == "a/b hi"


def test_json_has_text_as_text_and_bytes_as_hexadecimal() -> None:
    assert json.loads(json_line(message("a", b"hi", REPLAYED))) == {
        "topic": "a",
        "qos": 0,
        "retain": False,
        "payload": "hi",
        "time": "2026-03-01T12:00:00.000Z",
        "position": 42,
        "user_properties": [list(each) for each in REPLAYED],
    }
    assert json.loads(json_line(message("a", b"\xff")))["payload_hex"] == "ff"


def test_a_template_places_the_parts() -> None:
    assert (
        template_line("%t|%p|%x|%l|%q|%r|%o|%%|%z", message("a", b"hi", REPLAYED))
        == "a|hi|6869|2|0|0|42|%|%z"
    )


def test_a_place_in_the_log_is_earliest_a_position_or_a_time_in_utc() -> None:
    assert replay_place("earliest") == "earliest"
    assert replay_place("42") == "42"
    assert replay_place("2026-03-01T12:00:00+02:00") == "2026-03-01T10:00:00.000Z"


def test_a_span_counts_back_from_now() -> None:
    assert parse_place("-15m", 1_000_000_000).value == 1_000_000_000 - 900_000


def test_times_are_written_in_utc() -> None:
    assert utc(0) == "1970-01-01T00:00:00.000Z"
