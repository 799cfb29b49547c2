"""What the broker tells whoever runs it: lines that stay lines whatever clients send, and that no flood drowns."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import BrokerProcess, RawClient
from tidegate.config import LogFormat, LogLevel
from tidegate.server.events import FIELD_CHARS_MAX, LEVELS, LINES_PER_S, Events
from tidegate.server.progress import Progress
from tidegate.wire import Disconnect, Properties

NEW_YEAR_S = 1_767_225_600  # 2026-01-01T00:00:00Z
SOURCE = Path(__file__).resolve().parent.parent / "src" / "tidegate"


class Written:
    """Events into a buffer, at a time of the test's choosing."""

    def __init__(self, form: LogFormat = "text", level: LogLevel = "info") -> None:
        self.out = io.StringIO()
        self.now_s = 0.0
        self.events = Events(level, form, self.out, now_s=lambda: self.now_s, wall_s=lambda: NEW_YEAR_S + self.now_s)
        self.report = self.events.report

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def test_a_line_for_people_has_time_level_name_and_fields() -> None:
    written = Written()
    written.report("client.connected", {"client": b"pump-7", "version": 5, "session_present": True, "why": "two words"})
    assert written.lines == [
        "2026-01-01T00:00:00.000Z INFO client.connected "
        'client=pump-7 version=5 session_present=true why="two words"'
    ]


def test_a_line_for_programs_has_the_same_as_json() -> None:
    written = Written("json")
    written.report("client.connected", {"client": b"pump-7", "version": 5, "session_present": True, "ms": 0.5})
    assert written.rows == [
        {
            "time": "2026-01-01T00:00:00.000Z",
            "level": "info",
            "event": "client.connected",
            "client": "pump-7",
            "version": 5,
            "session_present": True,
            "ms": 0.5,
        }
    ]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "client", [b"a\nb", b"\x1b[2J", b"\x00", b"\xff\xfe", "\u2028\u202e\x85".encode(), b'" x="y', b"", "ä ö".encode()]
)
def test_whatever_a_client_is_called_it_stays_one_line_without_controls(form: LogFormat, client: bytes) -> None:
    written = Written(form)
    written.report("peer.fault", {"client": client, "reason": "0x81"})
    (line,) = written.out.getvalue().split("\n")[:-1]
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    if form == "text":
        found = re.fullmatch(r'\S+ INFO peer\.fault client=([^ "]+|"(?:[^"\\]|\\.)*") reason=0x81', line)
        assert found, line


def test_a_long_field_is_cut() -> None:
    written = Written("json")
    written.report("peer.fault", {"client": b"x" * 70_000})
    assert len(written.rows[0]["client"]) == FIELD_CHARS_MAX


# ── levels ──


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("log.refused", "warning"),
        ("log.failed", "critical"),
        ("peer.fault", "info"),
        ("client.connected", "info"),
        ("some.other", "info"),
    ],
)
def test_the_name_of_an_event_says_how_severe_it_is(name: str, level: str) -> None:
    written = Written("json")
    written.report(name, {})
    assert written.rows[0]["level"] == level


def test_a_level_may_be_given() -> None:
    written = Written("json")
    written.report("peer.fault", {}, logging.ERROR)
    assert written.rows[0]["level"] == "error"


def test_what_is_less_severe_than_asked_for_is_not_written() -> None:
    written = Written(level="warning")
    written.report("client.connected", {})
    written.report("log.refused", {})
    assert [line.split()[2] for line in written.lines] == ["log.refused"]


def test_every_event_that_is_reported_has_a_level_of_its_own() -> None:
    calls = re.compile(r'\b_?(?:report|tell)\(\s*"([a-z_]+\.[a-z_]+)"')
    modules = [path for path in SOURCE.rglob("*.py") if "pipeline" not in path.parts]
    reported = {name for path in modules for name in calls.findall(path.read_text())}
    assert len(reported) > 10
    assert reported - set(LEVELS) == set()


# ── floods ──


def test_of_one_event_only_so_many_lines_are_written_in_a_second_and_the_rest_is_counted() -> None:
    written = Written("json")
    for number in range(LINES_PER_S + 500):
        written.report("peer.fault", {"number": number})
    written.report("log.refused", {})  # another event is not held up by it
    assert [row["event"] for row in written.rows] == ["peer.fault"] * LINES_PER_S + ["log.refused"]
    written.now_s = 1.0
    written.events.each_second()
    last = written.rows[-1]
    assert (last["event"], last["level"]) == ("events.left_out", "warning")
    assert (last["of"], last["lines"]) == ("peer.fault", 500)
    written.report("peer.fault", {"number": "next"})
    written.now_s = 2.0
    written.events.each_second()
    assert written.rows[-1]["number"] == "next"


def test_what_was_left_out_is_told_before_the_next_of_its_kind() -> None:
    written = Written("json")
    for _ in range(LINES_PER_S + 1):
        written.report("peer.fault", {})
    written.now_s = 1.5
    written.report("peer.fault", {})
    assert [row["event"] for row in written.rows[-2:]] == ["events.left_out", "peer.fault"]


def test_what_was_left_out_is_told_at_the_end() -> None:
    written = Written("json", "error")
    for _ in range(LINES_PER_S + 3):
        written.report("log.damaged", {})
    written.events.close()
    assert written.rows[-1]["lines"] == 3


# ── what else is written there ──


def test_what_libraries_log_becomes_events() -> None:
    written = Written("json")
    logger = logging.Logger("asyncio")
    root_handlers, root_level = logging.root.handlers[:], logging.root.level
    try:
        written.events.take_logging()
        logger.addHandler(logging.root.handlers[0])
        try:
            raise ValueError("a\nb")
        except ValueError:
            logger.exception("in a %s", "callback")
    finally:
        logging.root.handlers[:], logging.root.level = root_handlers, root_level
    (row,) = written.rows
    assert (row["event"], row["level"], row["message"]) == ("python.asyncio", "error", "in a callback")
    assert "ValueError: a\nb" in row["trace"]


def test_a_crash_is_told_with_its_trace() -> None:
    written = Written()
    try:
        raise KeyError("x\x1b[2J")
    except KeyError as error:
        written.events.crashed(error)
    assert "CRITICAL broker.crashed" in written.lines[0]
    assert written.lines[1] == "Traceback (most recent call last):"
    assert "\x1b" not in written.out.getvalue()


def test_a_reader_that_is_gone_or_full_stops_nobody() -> None:
    written = Written()
    written.out.close()
    written.report("log.refused", {})


def test_progress_is_an_event_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written = Written("json")
    monkeypatch.setattr("tidegate.server.progress.QUIET_S", -10.0)
    progress = Progress(written.report)
    progress._said_s -= 10
    progress.of("segments", 3, 10)
    assert [(row["event"], row["what"], row["done"], row["total"]) for row in written.rows] == [
        ("broker.loading", "segments", 3, 10)
    ]
    assert capsys.readouterr().err == ""


# ── a real broker ──

Start = Callable[..., BrokerProcess]


def misbehave(port: int, client_id: bytes) -> None:
    raw = RawClient(port)
    raw.connect(client_id)
    raw.send_bytes(b"\x00\x00")  # packet type 0 is reserved
    raw.until_closed()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_flood_of_faults_is_told_in_a_few_whole_lines(start_broker: Start, form: str) -> None:
    broker = start_broker(log_format=form)
    for _ in range(200):
        misbehave(broker.port, "a b\u202e=\\\"".encode())
    broker.stop()
    lines = broker.log().splitlines()
    assert all(line.isprintable() for line in lines)
    faults = [line for line in lines if "peer.fault" in line and "events.left_out" not in line]
    assert 0 < len(faults) < 200
    if form == "json":
        rows = [json.loads(line) for line in lines]
        assert all({"time", "level", "event"} <= set(row) for row in rows)
        told = [row for row in rows if row["event"] == "peer.fault"]
        assert {row["client"] for row in told} == {"a b\u202e=\\\""}
        assert len(told) + sum(row["lines"] for row in rows if row.get("of") == "peer.fault") == 200


def test_who_comes_who_goes_and_why_is_told(start_broker: Start) -> None:
    broker = start_broker(log_format="json", listen__connections_max=3)
    minute = Properties(session_expiry=60)

    def connected(client_id: str, **connect: Any) -> RawClient:
        raw = RawClient(broker.port, 5)
        assert raw.connect(client_id, clean=False, **connect).reason == 0
        return raw

    polite, rude, silent = connected("polite"), connected("rude"), connected("silent", keep_alive=1)
    peers = {name: f"127.0.0.1:{raw.socket.getsockname()[1]}" for name, raw in (("polite", polite), ("rude", rude))}
    with RawClient(broker.port) as too_many:
        peers["too many"] = f"127.0.0.1:{too_many.socket.getsockname()[1]}"
        assert too_many.until_closed() == []
    polite.disconnect()
    [told] = silent.until_closed()
    assert isinstance(told, Disconnect) and told.reason == 0x8D
    rude.close()
    first = connected("twice", properties=minute)
    second = connected("twice", properties=minute)
    first.until_closed()
    second.disconnect(4)  # with its will
    with RawClient(broker.port, 5) as unknown:
        assert unknown.connect("x" * 1025).reason == 0x85
    again = RawClient(broker.port, 5)
    again.connect("twice", clean=True)
    again.disconnect()
    broker.stop()

    rows = [json.loads(line) for line in broker.log().splitlines()]

    def told_of(event: str, *fields: str) -> list[tuple[Any, ...]]:
        return [tuple(row[field] for field in fields) for row in rows if row["event"] == event]

    comings = ["polite", "rude", "silent", "twice", "twice", "twice"]
    assert told_of("client.connected", "client", "version") == [(name, 5) for name in comings]
    assert told_of("client.connected", "peer")[:2] == [(peers["polite"],), (peers["rude"],)]
    goings = {
        "polite": [("0x00", "client disconnected")],
        "rude": [("0x00", "connection lost")],
        "silent": [("0x8D", "keep-alive")],
        "twice": [("0x8E", "taken over"), ("0x04", "client disconnected"), ("0x00", "client disconnected")],
    }
    gone = told_of("client.disconnected", "client", "reason", "why")
    assert {name: [(reason, why) for who, reason, why in gone if who == name] for name in goings} == goings
    assert len(gone) == len(comings)
    assert told_of("session.taken_over", "client") == [("twice",)]
    ended = told_of("session.ended", "client", "why")
    assert sorted(ended) == [
        ("polite", "connection closed"),
        ("rude", "connection closed"),
        ("silent", "connection closed"),
        ("twice", "clean start"),
        ("twice", "connection closed"),
    ]
    assert told_of("client.refused", "reason", "why") == [("0x85", "client id of more than 1024 bytes")]
    assert told_of("connection.refused", "level", "peer", "why") == [
        ("warning", peers["too many"], "too many connections")
    ]


def refused_start(*arguments: str, **variables: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    command = [sys.executable, "-m", "tidegate.cli", "broker", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**kept, **variables}, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    return result.stderr.splitlines()


def test_a_refusal_to_start_is_an_event_for_programs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = refused_start(f"--data={tmp_path / 'data'}", f"--port={port}", TIDEGATE_LOG_FORMAT="json")
    last = [json.loads(line) for line in lines][-1]
    assert (last["event"], last["error"]) == ("broker.refused", f"port {port} on 127.0.0.1 is in use")
    assert "--port" in last["hint"]


# ── who may come in ──


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_broker_that_others_can_reach_says_that_nobody_is_asked_who_he_is(
    start_broker: Start, host: str, warned: bool
) -> None:
    broker = start_broker(listen__host=host)
    told = [line for line in broker.log().splitlines() if "listen.unprotected" in line]
    assert [("WARNING" in line, "no authentication" in line, f":{broker.port}" in line) for line in told] == [
        (True, True, True)
    ] * warned
