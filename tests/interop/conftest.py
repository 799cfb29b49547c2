"""Clients that others wrote, and what it takes to drive them. A peer that is not installed skips its tests;
in CI they fail."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import BrokerProcess
from peers import missing

HERE = Path(__file__).parent
TIMEOUT_S = 20.0


class MqttJs:
    """An mqtt.js client in a node process of its own, see `peer.js`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["node", str(HERE / "peer.js")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
        )
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.seen: list[dict[str, Any]] = []  # passed over by `wait`
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))

    def do(self, command: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **fields}) + "\n")
        self.process.stdin.flush()

    def wait(self, event: str) -> dict[str, Any]:
        """The next event of a kind; others that come before it stay for later."""
        for index, got in enumerate(self.seen):
            if got["event"] == event:
                return self.seen.pop(index)
        while (got := self.events.get(timeout=TIMEOUT_S))["event"] != event:
            assert got["event"] != "failed", got
            self.seen.append(got)
        return got

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        self.process.stdout.close()


@pytest.fixture
def mqttjs(shared_broker: BrokerProcess) -> Iterator[Callable[..., MqttJs]]:
    """Starts mqtt.js clients, connected if options are given; ends them with the test."""
    if shutil.which("node") is None:
        missing("node is not installed: tools/peers.sh tells what mqtt.js needs")
    if not (HERE / "node_modules" / "mqtt").is_dir():
        missing("mqtt.js is not installed: run tools/peers.sh")
    started: list[MqttJs] = []

    def start(client_id: str, version: int = 5, port: int = 0, **options: Any) -> MqttJs:
        peer = MqttJs()
        started.append(peer)
        protocol = {"protocolId": "MQIsdp" if version == 3 else "MQTT", "protocolVersion": version}
        url = f"mqtt://127.0.0.1:{port or shared_broker.port}"
        peer.do("connect", url=url, options={"clientId": client_id, **protocol, "reconnectPeriod": 0, **options})
        return peer

    yield start
    for peer in started:
        peer.close()


class MosquittoSub:
    """A running mosquitto_sub that has its SUBACK."""

    def __init__(self, port: int, *arguments: str) -> None:
        # -d tells when the SUBACK is there; stdbuf, because a pipe would keep that to itself; -W bounds a failing test.
        command = ["stdbuf", "-oL", "mosquitto_sub", "-d", "-W", "20", "-h", "127.0.0.1", "-p", str(port), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.early: list[str] = []  # messages that came before the SUBACK
        while not (line := self._line()).startswith("Subscribed"):
            if not line.startswith("Client "):
                self.early.append(line)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"mosquitto_sub ended with {self.process.wait()}"
        return line.rstrip("\n")

    def line(self) -> str:
        """The next line that is a message."""
        if self.early:
            return self.early.pop(0)
        while (line := self._line()).startswith(("Client ", "Subscribed")):
            pass
        return line

    def lines(self, count: int) -> list[str]:
        return [self.line() for _ in range(count)]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Mosquitto:
    def __init__(self, port: int) -> None:
        self.port = port
        self.running: list[MosquittoSub] = []

    def sub(self, *arguments: str) -> MosquittoSub:
        self.running.append(MosquittoSub(self.port, *arguments))
        return self.running[-1]

    def pub(self, *arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Runs mosquitto_pub to its end: with QoS 1 and 2 it waits for the acknowledgement."""
        command = ["mosquitto_pub", "-h", "127.0.0.1", "-p", str(self.port), *arguments]
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return subprocess.run(command, input=data, capture_output=True, timeout=TIMEOUT_S)


@pytest.fixture
def mosquitto(shared_broker: BrokerProcess) -> Iterator[Mosquitto]:
    for command in ("mosquitto_pub", "mosquitto_sub", "stdbuf"):
        if shutil.which(command) is None:
            missing(f"{command} is not installed: run tools/peers.sh (Debian: mosquitto-clients)")
    peer = Mosquitto(shared_broker.port)
    yield peer
    for subscriber in peer.running:
        subscriber.close()
