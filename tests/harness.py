"""What tests over sockets share: a broker process, and a client that speaks bytes.

`BrokerProcess` runs the real command. `RawClient` sends and receives single packets, valid or not, so that tests can
look at what libraries hide: order, packet ids, DUP flags, reason codes.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tidegate.wire import (
    NO_PROPERTIES,
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    PacketStream,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
    decode,
    encode,
)

P = TypeVar("P")


class BrokerProcess:
    """A broker of its own in a process of its own. `settings` are dotted configuration paths."""

    def __init__(self, data: Path, durability: str = "os", **settings: Any) -> None:
        self.data = data
        self.durability = durability
        self.settings = settings
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.log_path = data.parent / (data.name + ".log")

    def spawn(self) -> subprocess.Popen[str]:
        """Begin to start, without waiting until it listens."""
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                [*self.command(), "broker", *self.arguments()],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment(),
            )
        return self.process

    def environment(self) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
        settings = {f"TIDEGATE_{path.replace('__', '_').upper()}": str(v) for path, v in self.settings.items()}
        return found | settings

    def start(self, timeout_s: float = 60.0) -> BrokerProcess:
        self.spawn()
        return self.until_listening(timeout_s)

    def until_listening(self, timeout_s: float = 60.0) -> BrokerProcess:
        """Wait for the line that says so. A broker that ends instead, or does not get there in time, is an error, and
        none is left running."""
        assert self.process is not None and self.process.stdout is not None
        out = self.process.stdout.fileno()  # not the file: select would not see what it has read ahead
        deadline_s = time.monotonic() + timeout_s
        said = b""
        while select.select([out], [], [], max(0.0, deadline_s - time.monotonic()))[0] and (data := os.read(out, 4096)):
            said += data
            if found := re.search(rb"listening on [^ ]+:(\d+).*\n", said):
                self.port = int(found[1])
                return self
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, min(5.0, deadline_s - time.monotonic())))
        self.kill()
        raise RuntimeError(f"the broker ended, or did not listen within {timeout_s:g} s: {self.log()[-2000:]}")

    def command(self) -> list[str]:
        """What stands for `tidegate` on the command line."""
        return [sys.executable, "-m", "tidegate.cli"]

    def arguments(self) -> list[str]:
        return ["--data", str(self.data), "--port", str(self.port), "--durability", self.durability]

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def rss_bytes(self) -> int:
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """kill -9"""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._close()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and wait for the clean end: the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._close()
        return code

    def _close(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> BrokerProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.alive:
            self.stop()


class Closed(Exception):
    """The broker closed the connection."""


class RawClient:
    """A blocking client that does nothing by itself: no acknowledgements, no pings."""

    def __init__(self, port: int, version: int = 4, timeout_s: float = 10.0) -> None:
        self.version = version
        self.timeout_s = timeout_s
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = PacketStream(1 << 28)
        self.waiting: list[Packet] = []
        self.connack: Connack | None = None
        self._next_id = 0

    # ── single packets ──

    def send(self, packet: Packet) -> None:
        self.socket.sendall(encode(packet, self.version))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, timeout_s: float | None = None) -> Packet:
        """The next packet. Raises Closed at the end of the connection, TimeoutError when none comes."""
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while not self.waiting:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no packet came")
            self.socket.settimeout(left_s)
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionError as error:
                raise Closed from error
            if not data:
                raise Closed
            self.waiting += [
                decode(first, body, self.version, from_server=True) for first, body in self.stream.feed(data)
            ]
        return self.waiting.pop(0)

    def expect(self, kind: type[P], timeout_s: float | None = None) -> P:
        packet = self.receive(timeout_s)
        assert isinstance(packet, kind), f"expected {kind.__name__}, got {packet}"
        return packet

    def amid(self, kind: type[P], timeout_s: float | None = None) -> P:
        """The next packet of a kind; what comes before it stays for later."""
        others: list[Packet] = []
        while True:
            packet = self.receive(timeout_s)
            if isinstance(packet, kind):
                self.waiting[:0] = others
                return packet
            others.append(packet)

    def nothing(self, for_s: float = 0.3) -> None:
        """Nothing arrives: shown by a ping that overtakes whatever would have been on its way, then a short wait."""
        self.send(Pingreq())
        packet = self.receive()
        assert isinstance(packet, Pingresp), f"expected nothing, got {packet}"
        try:
            packet = self.receive(for_s)
        except TimeoutError:
            return
        raise AssertionError(f"expected nothing, got {packet}")

    def until_closed(self, timeout_s: float | None = None) -> list[Packet]:
        """Everything up to the end of the connection."""
        packets: list[Packet] = []
        try:
            while True:
                packets.append(self.receive(timeout_s))
        except Closed:
            return packets

    def packet_id(self) -> int:
        self._next_id = self._next_id % 65535 + 1
        return self._next_id

    # ── exchanges ──

    def connect(
        self,
        client_id: str | bytes = b"",
        *,
        clean: bool = True,
        keep_alive: int = 60,
        will: Will | None = None,
        properties: Properties = NO_PROPERTIES,
        username: bytes | None = None,
        password: bytes | None = None,
    ) -> Connack:
        name = client_id.encode() if isinstance(client_id, str) else client_id
        self.send(Connect(self.version, name, clean, keep_alive, will, username, password, properties))
        self.connack = self.expect(Connack)
        return self.connack

    def subscribe(self, *filters: str, qos: int = 0, properties: Properties = NO_PROPERTIES, **options: Any) -> Suback:
        requests = tuple(
            FilterRequest(
                f.encode(),
                qos,
                options.get("no_local", False),
                options.get("retain_as_published", False),
                options.get("retain_handling", 0),
            )
            for f in filters
        )
        self.send(Subscribe(self.packet_id(), requests, properties))
        return self.amid(Suback)

    def unsubscribe(self, *filters: str) -> Unsuback:
        self.send(Unsubscribe(self.packet_id(), tuple(f.encode() for f in filters), NO_PROPERTIES))
        return self.amid(Unsuback)

    def publish(
        self,
        topic: str | bytes,
        payload: bytes | str = b"",
        qos: int = 0,
        retain: bool = False,
        *,
        packet_id: int | None = None,
        dup: bool = False,
        properties: Properties = NO_PROPERTIES,
        wait: bool = True,
    ) -> int:
        """Publish and, unless told otherwise, complete the flow; returns the reason code of the first answer."""
        name = topic.encode() if isinstance(topic, str) else topic
        content = payload.encode() if isinstance(payload, str) else payload
        pid = (packet_id or self.packet_id()) if qos else 0
        self.send(Publish(name, content, qos, retain, dup, pid, properties, b""))
        if not wait or not qos:
            return 0
        if qos == 1:
            return self.amid(Puback).reason
        reason = self.amid(Pubrec).reason
        if reason < 0x80:
            self.send(Pubrel(pid))
            self.amid(Pubcomp)
        return reason

    def message(self, timeout_s: float | None = None, acknowledge: bool = True) -> Publish:
        """The next PUBLISH, acknowledged to its end."""
        publish = self.expect(Publish, timeout_s)
        if acknowledge and publish.qos == 1:
            self.send(Puback(publish.packet_id))
        elif acknowledge and publish.qos == 2:
            self.send(Pubrec(publish.packet_id))
            self.amid(Pubrel)
            self.send(Pubcomp(publish.packet_id))
        return publish

    def payloads(self, count: int, timeout_s: float | None = None) -> list[bytes]:
        return [self.message(timeout_s).payload for _ in range(count)]

    def disconnect(self, reason: int = 0, properties: Properties = NO_PROPERTIES) -> None:
        self.send(Disconnect(reason, properties))
        self.until_closed()
        self.close()

    def close(self) -> None:
        """Drop the connection without a DISCONNECT."""
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
