"""What sleeping sessions cost, and how quickly they get what they missed.

    python bench/sessions.py [--sessions 100000] [--while-asleep 1000000] [--haystack 10000000]

1. Memory: persistent sessions with two filters each, asleep; then messages published while they sleep.
2. Drain: sessions that missed messages come back, one alone and ten at once.
3. Needle: a session that missed 10 of many messages to other topics.

Prints a table with the bars and writes JSON. Uses raw sockets and prepared bytes, so that the client is not the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from harness import BrokerProcess, RawClient
from tidegate.session.flights import PIDS, PUBACKS

OUT = Path(__file__).parent / "out"
PAYLOAD = b"x" * 64


def string(text: bytes) -> bytes:
    return len(text).to_bytes(2, "big") + text


def connect_packet(client_id: bytes, clean: bool) -> bytes:
    body = b"\0\4MQTT\4" + bytes((2 if clean else 0,)) + b"\0\0" + string(client_id)
    return b"\x10" + bytes((len(body),)) + body


def subscribe_packet(*filters: bytes) -> bytes:
    body = b"\0\1" + b"".join(string(f) + b"\1" for f in filters)
    return b"\x82" + bytes((len(body),)) + body


def publishes(topics: list[bytes], first_pid: int) -> bytes:
    """QoS 1 publishes, one to each topic, packet ids in sequence."""
    made = []
    for offset, topic in enumerate(topics):
        body = string(topic) + PIDS[first_pid + offset] + PAYLOAD
        made.append(b"\x32" + bytes((len(body),)) + body)
    return b"".join(made)


class Publisher:
    """Sends prepared batches and waits until all but one are acknowledged."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(connect_packet(b"publisher", True))
        self.socket.recv(4)
        self.owed = 0

    def send(self, batch: bytes, count: int) -> None:
        self.socket.sendall(batch)
        self.owed += 4 * count
        while self.owed > 4 * 8 * count:
            self.owed -= len(self.socket.recv(1 << 20))

    def finish(self) -> None:
        while self.owed > 0:
            self.owed -= len(self.socket.recv(1 << 20))


async def make_sessions(port: int, count: int) -> None:
    """Persistent sessions with two filters each that then go to sleep."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            name = b"device-%06d" % number
            filters = (b"devices/%06d/commands" % number, b"groups/%03d/+/news" % (number % 1000))
            writer.write(connect_packet(name, False) + subscribe_packet(*filters))
            await reader.readexactly(4 + 6)
            writer.write(b"\xe0\0")
            await reader.read()
            writer.close()

    await asyncio.gather(*(some() for _ in range(64)))


def drain(port: int, client_id: bytes, count: int) -> float:
    """Come back and take `count` QoS 1 messages of one length: the seconds from CONNECT to the last."""
    link = socket.create_connection(("127.0.0.1", port))
    began_s = time.perf_counter()
    link.sendall(connect_packet(client_id, False))
    data = b""
    while len(data) < 4:
        data += link.recv(1 << 20)
    data = data[4:]
    got = 0
    while got < count:
        if len(data) < 2 or len(data) < data[1] + 2:
            data += link.recv(1 << 20)
            continue
        size = data[1] + 2
        topic = data[2] << 8 | data[3]
        complete = len(data) // size
        first = int.from_bytes(data[4 + topic : 6 + topic], "big")
        complete = min(complete, 65536 - first)  # packet ids are in sequence up to the end of their range
        link.sendall(PUBACKS[4 * first : 4 * (first + complete)])
        got += complete
        data = data[complete * size :]
    seconds = time.perf_counter() - began_s
    link.sendall(b"\xe0\0")
    link.close()
    return seconds


def measure(options: argparse.Namespace, root: Path, console: Console) -> dict[str, float]:
    found: dict[str, float] = {}
    with BrokerProcess(root / "memory", options.durability) as broker:
        before = broker.rss_bytes()
        with console.status(f"{options.sessions:,} sessions go to sleep"):
            asyncio.run(make_sessions(broker.port, options.sessions))
            time.sleep(1)
        asleep = broker.rss_bytes()
        found["bytes_per_session"] = (asleep - before) / options.sessions
        publisher = Publisher(broker.port)
        batch = publishes([b"groups/%03d/hall/news" % (i % 1000) for i in range(500)], 1)
        # The memory for the log's tail is taken by the first messages: fill it, then look at what sessions add.
        for _ in range(max(1, 400_000 // 500)):
            publisher.send(batch, 500)
        publisher.finish()
        filled = broker.rss_bytes()
        with console.status(f"{options.while_asleep:,} messages while they sleep"):
            for _ in range(options.while_asleep // 500):
                publisher.send(batch, 500)
            publisher.finish()
        found["bytes_per_session_by_messages"] = (broker.rss_bytes() - filled) / options.sessions
    with BrokerProcess(root / "drain", options.durability) as broker:
        names = [b"reader-%d" % i for i in range(11)]
        for name in names:
            raw = RawClient(broker.port)
            raw.connect(name, clean=False)
            raw.subscribe("drain/1" if name == names[-1] else "drain/0", qos=1)
            raw.disconnect()
        publisher = Publisher(broker.port)
        one, other = publishes([b"drain/0"] * 500, 1), publishes([b"drain/1"] * 500, 1)
        with console.status("messages are missed"):
            for _ in range(options.missed // 500):
                publisher.send(one, 500)
                publisher.send(other, 500)
            publisher.finish()
        found["drain_per_s_alone"] = options.missed / drain(broker.port, names[-1], options.missed)
        began_s = time.perf_counter()
        for name in names[:3]:
            drain(broker.port, name, options.missed)
        found["drain_per_s_in_turn"] = 3 * options.missed / (time.perf_counter() - began_s)
    with BrokerProcess(root / "needle", options.durability) as broker:
        raw = RawClient(broker.port)
        raw.connect("needle", clean=False)
        raw.subscribe("rare/topic", qos=1)
        raw.disconnect()
        publisher = Publisher(broker.port)
        batches = [publishes([b"hay/%05d" % (20 * b + i // 25) for i in range(500)], 1) for b in range(500)]
        rare = publishes([b"rare/topic"], 1)
        with console.status(f"{options.haystack:,} other messages"):
            for number in range(options.haystack // 500):
                publisher.send(batches[number % len(batches)], 500)
                if number % max(1, options.haystack // 5000) == 0 and found.get("needles", 0) < 10:
                    publisher.send(rare, 1)
                    found["needles"] = found.get("needles", 0) + 1
            publisher.finish()
        found["needle_s"] = drain(broker.port, b"needle", int(found["needles"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--while-asleep", type=int, default=1_000_000)
    parser.add_argument("--missed", type=int, default=1_000_000, help="messages per session in the drain")
    parser.add_argument("--haystack", type=int, default=10_000_000)
    parser.add_argument("--durability", default="os")
    parser.add_argument("--json", type=Path, default=OUT / "sessions.json")
    options = parser.parse_args()
    console = Console()
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as root:
        found = measure(options, Path(root), console)
    table = Table("what", "measured", "bar")
    table.add_row("memory per sleeping session, two filters", f"{found['bytes_per_session']:,.0f} B", "≤ 2,048 B")
    added = found["bytes_per_session_by_messages"]
    table.add_row(f"added per session by {options.while_asleep:,} messages", f"{added:,.1f} B", "nothing")
    table.add_row("drain, one session", f"{found['drain_per_s_alone']:,.0f} msg/s", "≥ 150,000")
    table.add_row("drain, three in turn", f"{found['drain_per_s_in_turn']:,.0f} msg/s", "≥ 150,000")
    needles = f"{found['needles']:.0f} of {options.haystack:,} messages missed"
    table.add_row(needles, f"{found['needle_s'] * 1000:,.1f} ms", "≤ 1,000 ms")
    console.print(table)
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
