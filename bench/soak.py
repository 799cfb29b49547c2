"""Does the broker stay the size it is, when everything about it changes all the time?

    python bench/soak.py [--minutes 20] [--seed 1]

A real broker on loopback with small limits, and clients that come, go and misbehave, in duties that are done again and
again. Meanwhile memory, descriptors, threads and files are sampled. The first quarter of the time is for
warming up: caches and the log's tail fill. What the last quarter has more than the second is growth; too much of it
fails the run, as do errors in the broker's log, a duty that never got through a round, and an exit code that is not 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from harness import BrokerProcess
from tidegate import wire

OUT = Path(__file__).parent / "out"
MIB = 1 << 20
SAMPLE_INTERVAL_S = 10.0
SAMPLES_MIN = 24  # six a quarter: a short run samples more often
ROUND_TIMEOUT_S = 30.0
SESSION_EXPIRY_S = 2
CLIENT_IDS = 200  # of each kind
WINDOW_BYTES = 4096  # the socket buffer of those who read slowly or not at all
SETTINGS = {
    "log__segment_bytes": MIB, "log__retention_bytes": 16 * MIB, "log__tail_bytes": 4 * MIB, "log__clean_interval_s": 1,
    # The longest a session lives holds for MQTT 3.1.1 too, which cannot ask for less.
    "mqtt__session_expiry_max_s": SESSION_EXPIRY_S, "mqtt__ack_timeout_s": 5, "listen__connect_timeout_s": 2,
    "sys__interval_s": 2, "log_level": "error",
}  # fmt: skip
# Nothing; half a CONNECT; a reserved type; a length of five bytes; a wildcard in a topic name; QoS 3; a SUBSCRIBE that
# has no filters; wrong flags; another protocol's name; more than the largest packet; one that is never finished.
MALFORMED = (
    b"", b"\x10\x10\x00\x04MQ", b"\x00\x00", b"\x10\xff\xff\xff\xff\x01", b"\x30\x04\x00\x02a#", b"\x36\x05\x00\x01aaa",
    b"\x82\x02\x00\x01", b"\x80\x06\x00\x01\x00\x01a\x00", b"\x10\x0c\x00\x04MQTX\x04\x02\x00\x00\x00\x00",
    b"\xf0\xff\xff\xff\x7f", b"\x30\x64\x00\x03abc",
)  # fmt: skip


class Client:
    """Speaks MQTT over a socket, and reads only when told to."""

    def __init__(self, connection: socket.socket, version: int) -> None:
        self.connection = connection
        self.version = version
        self.stream = wire.PacketStream(1 << 28)
        self.waiting: list[wire.Packet] = []

    async def send_bytes(self, sent: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, sent)

    async def send(self, *packets: wire.Packet) -> None:
        await self.send_bytes(b"".join(wire.encode(packet, self.version) for packet in packets))

    async def receive_bytes(self, size_max: int = 1 << 16) -> bytes:
        got = await asyncio.get_running_loop().sock_recv(self.connection, size_max)
        if not got:
            raise ConnectionResetError
        return got

    async def until(self, kind: Any) -> Any:
        """The next packet of a kind. What the protocol wants in return for it and those before is sent."""
        while True:
            while self.waiting:
                packet = self.waiting.pop(0)
                if isinstance(packet, kind):
                    return packet
            frames = self.stream.feed(await self.receive_bytes())
            self.waiting = [wire.decode(first, body, self.version, from_server=True) for first, body in frames]
            await self.send(*(answer for packet in self.waiting if (answer := answer_to(packet)) is not None))

    async def until_closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await self.receive_bytes()

    async def subscribe(self, *filters: str, qos: int = 0) -> None:
        await self.send(wire.Subscribe(1, tuple(wire.FilterRequest(name.encode(), qos) for name in filters)))
        await self.until(wire.Suback)

    async def publish(self, messages: list[wire.Publish]) -> None:
        """Send them all, and wait until those that have a packet id are acknowledged."""
        await self.send(*messages)
        for _ in range(sum(message.qos > 0 for message in messages)):
            await self.until(wire.Puback | wire.Pubcomp)


def answer_to(packet: wire.Packet) -> wire.Packet | None:
    if isinstance(packet, wire.Publish) and packet.qos:
        return (wire.Puback if packet.qos == 1 else wire.Pubrec)(packet.packet_id)
    if isinstance(packet, wire.Pubrec):
        return wire.Pubrel(packet.packet_id)
    return wire.Pubcomp(packet.packet_id) if isinstance(packet, wire.Pubrel) else None


@dataclass(slots=True)
class Churn:
    """The duties, and what they share."""

    port: int
    dice: random.Random
    until_s: float
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def socket(self, window_bytes: int = 1 << 18) -> AsyncIterator[Client]:
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
            yield Client(connection, self.dice.choice((4, 5)))

    @contextlib.asynccontextmanager
    async def client(
        self, name: str = "", clean: bool = True, will: wire.Will | None = None, window_bytes: int = 1 << 18
    ) -> AsyncIterator[Client]:
        """Connected until the end of the block, then gone without a word."""
        async with self.socket(window_bytes) as client:
            lives = wire.Properties(session_expiry=None if clean else SESSION_EXPIRY_S)  # left out by MQTT 3.1.1
            await client.send(wire.Connect(client.version, name.encode(), clean, 60, will, properties=lives))
            await client.until(wire.Connack)
            yield client

    def name(self, kind: str) -> str:
        return f"{kind}-{self.dice.randrange(CLIENT_IDS)}"

    def perhaps(self) -> bool:
        return self.dice.random() < 0.5

    def topic(self) -> bytes:
        """One of a set that rolls on, or a name that never was."""
        number = next(self.numbers)
        rolling = b"rolling/%d" % (number // 1000 + self.dice.randrange(500))
        return rolling if self.perhaps() else b"new/%d/%d" % (number % 97, number)

    async def repeat(self, duty: Callable[[Churn], Awaitable[None]], rest_s: float) -> None:
        while (left_s := self.until_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left_s, ROUND_TIMEOUT_S)):
                    await duty(self)
                self.outcomes[duty.__name__, "rounds"] += 1
            except ConnectionError:
                self.outcomes[duty.__name__, "closed early"] += 1
            except TimeoutError:  # one that the end of the run cuts off does not count
                self.outcomes[duty.__name__, "timed out"] += left_s >= ROUND_TIMEOUT_S
            await asyncio.sleep(rest_s * self.dice.uniform(0.5, 1.5))

    async def storm(self) -> None:
        """Clean and persistent sessions, whose wills come, at once or later, unless they say goodbye."""
        delay = wire.Properties(will_delay=self.dice.randrange(3))
        will = wire.Will(b"wills/%d" % next(self.numbers), b"gone", self.dice.randrange(3), properties=delay)
        async with self.client(self.name("any"), self.perhaps(), will if self.perhaps() else None) as client:
            if self.perhaps():
                await client.send(wire.Disconnect())

    async def sleeper(self) -> None:
        """A session that misses messages, and comes back for them, or too late."""
        name = self.name("sleeper")
        async with self.client(name, clean=False) as client:
            await client.subscribe("rolling/#", qos=2)
        await asyncio.sleep(self.dice.choice((0.3, 1.0, 3.0)))
        async with self.client(name, clean=False) as client:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.until(wire.Disconnect), 1.0)

    async def takeover(self) -> None:
        name = self.name("taken")
        async with self.client(name, clean=False) as first, self.client(name, self.perhaps()):
            await first.until_closed()

    async def filters(self) -> None:
        number = next(self.numbers)
        names = [f"new/{number % 97}/+", "+/+", f"$share/group{number % 50}/new/#", f"rolling/{number // 1000}"]
        names += [f"never/{number}/{i}/+/#" for i in range(40)] + [f"$share/g{number}/never/{i}" for i in range(10)]
        async with self.client(self.name("filters"), self.perhaps()) as client:
            await client.subscribe(*names, qos=self.dice.randrange(3))
            await client.send(wire.Unsubscribe(2, tuple(name.encode() for name in self.dice.sample(names, 30))))
            await client.until(wire.Unsuback)

    async def replay(self) -> None:
        """From the oldest message on. Few in persistent sessions: the log keeps what these still have to get."""
        async with self.client(self.name("replay"), clean=self.dice.random() > 0.05) as client:
            await client.subscribe("$replay/earliest/#", qos=self.dice.randrange(2))
            for _ in range(self.dice.randrange(2000)):
                await client.until(wire.Publish)

    async def publisher(self) -> None:
        async with self.client() as client:
            for _ in range(20):
                payload = self.dice.randbytes(self.dice.randrange(1000))
                qos = (self.dice.randrange(3) for _ in range(60))
                sent = [wire.Publish(self.topic(), payload, q, packet_id=i) for i, q in enumerate(qos, 1)]
                await client.publish(sent)
                await asyncio.sleep(0.1)

    async def retained(self) -> None:
        """Set, read and deleted."""
        number = next(self.numbers)
        topics = [b"kept/%d/%d" % (number, i) for i in range(20)] + [b"kept/ever/%d" % (number % 100)]
        async with self.client() as client:
            for payload in (self.dice.randbytes(200), b""):
                await client.publish([wire.Publish(t, payload, 1, True, packet_id=i) for i, t in enumerate(topics, 1)])
                await client.subscribe("kept/#")

    async def slow_reader(self) -> None:
        """Takes a few bytes a second and acknowledges nothing, until it is dropped."""
        wanted = wire.FilterRequest(b"$replay/earliest/#", 1), wire.FilterRequest(b"#", 1)
        async with self.client(self.name("slow"), window_bytes=WINDOW_BYTES) as client:
            await client.send(wire.Subscribe(1, wanted))
            with contextlib.suppress(ConnectionError):
                while True:
                    await asyncio.sleep(1.0)
                    await client.receive_bytes(16)
                    await client.send(wire.Pingreq())

    async def deaf_reader(self) -> None:
        """Asks for everything, pings and never reads; leaves by itself, or is dropped."""
        wanted = wire.FilterRequest(b"$replay/earliest/#"), wire.FilterRequest(b"#")
        async with self.client(self.name("deaf"), window_bytes=WINDOW_BYTES) as client:
            await client.send(wire.Subscribe(1, wanted))
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(self.dice.uniform(3, 15)):
                    while True:
                        await client.send(*[wire.Pingreq()] * 1000)
                        await asyncio.sleep(0.2)

    async def malformed(self) -> None:
        """Instead of a CONNECT, or after it."""
        async with self.client(self.name("bad"), self.perhaps()) if self.perhaps() else self.socket() as client:
            await client.send_bytes(self.dice.choice((*MALFORMED, self.dice.randbytes(50))))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.until_closed(), 3.0)


# The duty, how many do it at once, and how long each rests between two rounds.
DUTIES = (
    (Churn.storm, 6, 0.05), (Churn.sleeper, 4, 0.1), (Churn.takeover, 2, 0.1), (Churn.filters, 2, 0.1),
    (Churn.replay, 2, 0.5), (Churn.publisher, 2, 0.1), (Churn.retained, 1, 0.1), (Churn.slow_reader, 4, 0.1),
    (Churn.deaf_reader, 3, 0.1), (Churn.malformed, 6, 0.1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    left_s: float
    rss: float  # in MiB
    heap: float  # the same, as the broker says it
    descriptors: int
    threads: int
    files: int


async def watch(churn: Churn, broker: BrokerProcess, interval_s: float, samples: list[Sample]) -> None:
    process, heap_bytes = Path(f"/proc/{broker.pid}"), 0
    async with churn.client("watch") as client:
        await client.subscribe("$SYS/broker/heap/current")
        while (left_s := churn.until_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, interval_s)):
                    while True:
                        heap_bytes = int((await client.until(wire.Publish)).payload)
            await client.send(wire.Pingreq())
            descriptors, threads = (sum(1 for _ in (process / kind).iterdir()) for kind in ("fd", "task"))
            files = sum(len(names) for _, _, names in os.walk(broker.data))
            left_s = max(0.0, churn.until_s - time.monotonic())
            one = Sample(left_s, broker.rss_bytes() / MIB, heap_bytes / MIB, descriptors, threads, files)
            samples.append(one)
            print(f"{left_s:5.0f} s left: RSS {one.rss:.1f} MiB, heap {one.heap:.1f} MiB, {descriptors} descriptors, "
                  f"{threads} threads, {files} files, {churn.outcomes.total():,} rounds", flush=True)  # fmt: skip


def judge(samples: list[Sample], whole_s: float) -> tuple[Table, list[str]]:
    """What changed between the medians of the second and the last quarter, and what of it is too much."""
    table, faults = Table("what", "second quarter", "last quarter", "growth", "allowed"), []
    second = [one for one in samples if 0.5 < one.left_s / whole_s <= 0.75]
    last = [one for one in samples if one.left_s / whole_s <= 0.25]
    if not second or not last:
        return table, ["the broker closed the watching connection, or is gone"]
    for what in ("rss", "heap", "descriptors", "threads", "files"):
        before, after = (median(getattr(one, what) for one in quarter) for quarter in (second, last))
        allowed = max(0.1 * before, 16) if what in ("rss", "heap") else 0.1 * before + 20
        table.add_row(what, *(f"{number:,.1f}" for number in (before, after, after - before, allowed)))
        if after - before > allowed:
            faults.append(f"{what} grew by {after - before:,.1f} from {before:,.1f}; {allowed:,.1f} is allowed")
    return table, faults


async def soak(churn: Churn, broker: BrokerProcess, interval_s: float) -> list[Sample]:
    samples: list[Sample] = []
    async with asyncio.TaskGroup() as group:
        for duty, workers, rest_s in DUTIES:
            for _ in range(workers):
                group.create_task(churn.repeat(duty, rest_s))
        try:
            await watch(churn, broker, interval_s, samples)
        except ConnectionError:
            churn.until_s = 0.0  # nothing to see any more: all go home
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    whole_s = options.minutes * 60
    with tempfile.TemporaryDirectory(dir=OUT) as root, BrokerProcess(Path(root) / "soak", "os", **SETTINGS) as broker:
        churn = Churn(broker.port, random.Random(options.seed), time.monotonic() + whole_s)
        samples = asyncio.run(soak(churn, broker, min(SAMPLE_INTERVAL_S, whole_s / SAMPLES_MIN)))
        exit_code, log = broker.stop(), broker.log()
    table, faults = judge(samples, whole_s)
    outcomes = ("rounds", "closed early", "timed out")
    duties = Table("duty", *outcomes)
    for name in (duty.__name__ for duty, _, _ in DUTIES):
        duties.add_row(name, *(f"{churn.outcomes[name, outcome]:,}" for outcome in outcomes))
        if not churn.outcomes[name, "rounds"]:
            faults.append(f"{name} never got through a round")
    if exit_code:
        faults.append(f"the broker's exit code is {exit_code}")
    if log:
        faults.append(f"{log.count(chr(10))} lines of errors in the broker's log:\n{log[:4000]}")
    Console().print(duties, table)
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
