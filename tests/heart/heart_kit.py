"""What the tests of the heart share: faults, bystanders with a budget, clients that do not read, and quick bytes.

Everything is seen from outside, over sockets and the process's own figures, so that it says nothing about how the
broker is made.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from harness import BrokerProcess, RawClient
from packet_bytes import acknowledgements, framed, publish_bytes, utf8
from tidegate.wire import Pingreq, Pingresp, Properties, Publish

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
PATIENCE_S = 10.0  # for an answer
DAY = Properties(session_expiry=86_400)

T = TypeVar("T")


def attach(broker: BrokerProcess, client_id: str = "", version: int = 4, **connect: Any) -> RawClient:
    """A connected client, which the broker does not expect to ping."""
    raw = RawClient(broker.port, version, timeout_s=PATIENCE_S)
    raw.connect(client_id, **{"keep_alive": 0, **connect})
    return raw


def attach_kept(broker: BrokerProcess, client_id: str, version: int = 5, **connect: Any) -> RawClient:
    """A client with a session that outlives the connection, connected without a clean start."""
    properties = connect.pop("properties", DAY if version == 5 else Properties())
    return attach(broker, client_id, version, clean=False, properties=properties, **connect)


def return_raw(broker: BrokerProcess, client_id: str) -> socket.socket:
    """Return to a 3.1.1 session: a socket from which nothing but the CONNACK has been read."""
    peer = socket.create_connection(("127.0.0.1", broker.port))
    peer.sendall(framed(0x10, utf8(b"MQTT") + b"\x04\x00\x00\x00" + utf8(client_id.encode())))
    assert read_exactly(peer, 4) == b"\x20\x02\x01\x00", "there is no session"
    return peer


def eventually(look: Callable[[], T], timeout_s: float = 20.0, what: str = "it did not happen in time") -> T:
    """What `look` returns as soon as it is true: for what is announced to nobody."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)
    return found


def sync(client: RawClient, timeout_s: float | None = None) -> None:
    """What was sent before this has been taken in."""
    client.send(Pingreq())
    client.amid(Pingresp, timeout_s)


# ── messages in numbers ──


def publish_all(
    client: RawClient, messages: Iterable[tuple[bytes, bytes]], qos: int = 1, retain: bool = False, together: int = 500
) -> None:
    """Publish over 3.1.1 with QoS 0 or 1, so many in one go; when this returns the broker has taken them all."""
    some: list[bytes] = []

    def flush() -> None:
        client.send_bytes(b"".join(some))
        if qos:
            read_exactly(client.socket, 4 * len(some))
        some.clear()

    for topic, payload in messages:
        some.append(publish_bytes(topic, payload, qos, len(some) + 1, retain))
        if len(some) == together:
            flush()
    if some:
        flush()
    sync(client)


def read_exactly(peer: socket.socket, size: int, timeout_s: float = 60.0) -> bytes:
    peer.settimeout(timeout_s)
    got = bytearray()
    while len(got) < size:
        data = peer.recv(min(1 << 20, size - len(got)))
        assert data, f"closed after {len(got)} of {size} bytes"
        got += data
    return bytes(got)


def short_packets(buffer: bytearray) -> Iterator[bytes]:
    """Take all whole packets of less than 128 bytes from the front of a buffer."""
    at = 0
    while at + 1 < len(buffer) and at + 2 + buffer[at + 1] <= len(buffer):
        after = at + 2 + buffer[at + 1]
        yield bytes(buffer[at:after])
        at = after
    del buffer[:at]


# ── faults ──


class FaultyBroker(BrokerProcess):
    """A broker whose calls to the kernel can be made to wait or fail; see `faulty_tidegate`."""

    def __init__(self, data: Path, durability: str = "fsync", **settings: Any) -> None:
        super().__init__(data, durability, **settings)
        self.faults = data.parent / (data.name + ".faults")
        self.faults.mkdir(exist_ok=True)

    def command(self) -> list[str]:
        return [sys.executable, str(HERE / "faulty_tidegate.py"), str(self.faults)]

    def fault(self, name: str, content: str = "") -> None:
        made = self.faults / (name + ".new")
        made.write_text(content)
        made.rename(self.faults / name)

    def pending(self, name: str) -> bool:
        return (self.faults / name).exists()

    def mend(self, name: str) -> None:
        (self.faults / name).unlink(missing_ok=True)

    @contextmanager
    def syncs_held(self) -> Iterator[None]:
        """Nothing that is written reaches the disk, as far as the broker can tell."""
        self.fault("hold-sync")
        try:
            yield
        finally:
            self.mend("hold-sync")

    def blocks(self) -> int:
        """Blocks of memory that the broker's interpreter has in use: what leaks shows, however small."""
        (self.faults / "blocks").unlink(missing_ok=True)
        self.fault("count-blocks")
        eventually(lambda: self.pending("blocks"))
        return int((self.faults / "blocks").read_text())


class NoRoom:
    """While it lasts no file of the broker may grow, as if the disk were full."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.hard = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)[1]

    def __enter__(self) -> NoRoom:
        with RawClient(self.broker.port, 5) as publisher:
            publisher.connect("no-room")
            publisher.publish("no-room", bytes(20_000), 1)  # or its events would find no room in their file either
            newest = max((self.broker.data / "log").glob("*.log"))
            resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE, (newest.stat().st_size, self.hard))
            eventually(lambda: publisher.publish("no-room", bytes(5000), 1) >= 0x80, what="the disk is not full")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.broker.alive:
            resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE, (self.hard, self.hard))


# ── `$SYS` ──


def sys_until(broker: BrokerProcess, enough: Callable[[dict[str, str]], bool], timeout_s: float = 20) -> dict[str, str]:
    """Values of `$SYS/broker/…` as soon as they are as wanted (the broker needs `sys__interval_s=1`)."""
    values: dict[str, str] = {}
    deadline_s = time.monotonic() + timeout_s
    with attach(broker) as watcher:
        watcher.subscribe("$SYS/broker/#")
        while not enough(values):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"$SYS never got there: {values}"
            message = watcher.expect(Publish, left_s + 1)
            values[message.topic.decode().removeprefix("$SYS/broker/")] = message.payload.decode()
    return values


def counted(values: dict[str, str]) -> dict[str, int]:
    """What has been dropped or refused, by reason."""
    return {name: int(value) for name, value in values.items() if name.startswith(("dropped/", "refused/"))}


# ── memory ──


def deaf(broker: BrokerProcess, client_id: str = "", version: int = 4, **connect: Any) -> RawClient:
    """A connected client with a small receive buffer, so that not reading shows at once."""
    raw = RawClient(broker.port, version, timeout_s=PATIENCE_S)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(client_id, **{"keep_alive": 0, **connect})
    return raw


def cpu_s(broker: BrokerProcess) -> float:
    fields = Path(f"/proc/{broker.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def queueing_ms(broker: BrokerProcess) -> float:
    """How long the broker's main thread could have run and did not, for want of a processor."""
    return int(Path(f"/proc/{broker.pid}/schedstat").read_text().split()[1]) / 1e6


def grows_less_than(
    broker: BrokerProcess, before: int, most: int, quiet_s: float = 1.0, patience_s: float = 15
) -> None:
    """The broker's memory stays within `before + most` until it has come to rest."""
    deadline_s = time.monotonic() + patience_s
    since_s, used_s = time.monotonic(), cpu_s(broker)
    while time.monotonic() - since_s < quiet_s and time.monotonic() < deadline_s:
        grown = broker.rss_bytes() - before
        assert grown < most, f"grew by {grown // MIB} MiB and more, from {before // MIB} MiB"
        if cpu_s(broker) > used_s + 0.2 * (time.monotonic() - since_s) + 0.03:
            since_s, used_s = time.monotonic(), cpu_s(broker)
        time.sleep(0.02)


def at_rest(broker: BrokerProcess, quiet_s: float = 0.3, patience_s: float = 20) -> None:
    """Wait until the broker has nothing to do."""
    deadline_s = time.monotonic() + patience_s
    since_s, used_s = time.monotonic(), cpu_s(broker)
    while time.monotonic() - since_s < quiet_s and time.monotonic() < deadline_s:
        time.sleep(0.02)
        if cpu_s(broker) > used_s + 0.25 * (time.monotonic() - since_s) + 0.02:
            since_s, used_s = time.monotonic(), cpu_s(broker)


class Eaters(threading.Thread):
    """Reads from many sockets and throws it away."""

    def __init__(self, peers: list[socket.socket]) -> None:
        super().__init__(daemon=True)
        self.eaten = 0
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        for peer in peers:
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ)

    def run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(0.05):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                try:
                    self.eaten += len(sock.recv(1 << 18))
                except OSError:
                    pass

    def stop(self) -> None:
        self._over.set()
        self.join()


# ── budgets ──

WORST_MS = 100.0
P99_MS = 50.0
NOISE = 5.0  # a machine on which an idle broker lets a bystander wait long is given so much more than that
ATTEMPTS = 3
BEYOND_NOISE_MS = 1000.0  # no machine is that noisy: one attempt is enough
IDLE_S = 0.5
WINDOW_S = 1.0  # what is over sooner is looked at for so long, or the p99 would be that of two or three pings


class Waits(NamedTuple):
    """What a bystander saw."""

    pings: int
    p99_ms: float
    worst_ms: float

    def __str__(self) -> str:
        return f"p99 {self.p99_ms:.1f} ms, worst {self.worst_ms:.1f} ms of {self.pings} pings"


class Bystander:
    """A client that pings all the time and knows how long it had to wait."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        command = [sys.executable, str(HERE / "bystander_process.py"), str(broker.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.waits()  # it is there

    def waits(self) -> Waits:
        """Since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        said = self._process.stdout.readline().split()
        assert len(said) == 3, "the bystander was cut off"
        return Waits(int(said[0]), float(said[1]), float(said[2]))

    def idle(self) -> Waits:
        """With nothing else going on."""
        self.waits()
        time.sleep(IDLE_S)
        return self.waits()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def nobody_waits(
    bystander: Bystander, work: Callable[[], object], prepare: Callable[[], object] = lambda: None
) -> None:
    """While `work` goes on a bystander waits at most 50 ms at the p99 and 100 ms at worst.

    The one place that compares times. What else the machine does is no fault of the broker's: the limits are at
    least five times what the bystander saw with nothing going on, and the best of three attempts counts. `prepare`
    comes before each and is not looked at."""
    seen: list[str] = []
    for _ in range(ATTEMPTS):
        prepare()
        idle = bystander.idle()
        began_s, queued_ms = time.monotonic(), queueing_ms(bystander.broker)
        work()
        time.sleep(max(0.0, began_s + WINDOW_S - time.monotonic()))
        waits = bystander.waits()
        if waits.worst_ms <= max(WORST_MS, NOISE * idle.worst_ms) and waits.p99_ms <= max(P99_MS, NOISE * idle.p99_ms):
            return
        queued_ms = queueing_ms(bystander.broker) - queued_ms
        seen.append(f"{waits} (idle: {idle}; in all the broker itself waited {queued_ms:.0f} ms for a processor)")
        if waits.worst_ms > BEYOND_NOISE_MS:
            break
    raise AssertionError(f"a bystander waited, allowed are p99 {P99_MS} ms, worst {WORST_MS} ms:\n" + "\n".join(seen))


def take_all(client: RawClient, count: int, of_bytes: int) -> list[int]:
    """Read so many PUBLISH packets of one size and QoS above 0: their packet ids."""
    data = read_exactly(client.socket, count * of_bytes)
    at = 2 + 2 + int.from_bytes(data[2:4], "big")  # short ones: a byte of remaining length
    return [int.from_bytes(data[i + at : i + at + 2], "big") for i in range(0, len(data), of_bytes)]


def puback_all(client: RawClient, pids: Iterable[int]) -> None:
    client.send_bytes(acknowledgements(0x40, pids))
