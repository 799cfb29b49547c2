"""What the tests of requirements measure a running broker by: `$SYS`, the process's own figures, and its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from harness import BrokerProcess, RawClient
from tidegate.wire import Packet, Pingreq, Pingresp, Puback, Publish, encode

UPTIME = "uptime"  # changes at every update of $SYS
UPDATES_MAX = 30


def sys_values(broker: BrokerProcess) -> dict[str, str]:
    """`$SYS/broker/…` as it is now: all values of the next update (the broker needs `sys__interval_s=1`)."""
    return sys_until(broker, lambda values: True)


def sys_until(broker: BrokerProcess, enough: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """The values of the first update of `$SYS/broker/…` that is as wanted."""
    with RawClient(broker.port) as watcher:
        watcher.connect()
        watcher.subscribe("$SYS/broker/#")
        values: dict[str, str] = {}
        updates = 0
        while True:
            message = watcher.message()
            values[_name(message)] = message.payload.decode()
            if _name(message) != UPTIME or message.retain:
                continue
            watcher.send(Pingreq())  # its answer comes after the rest of the update
            while not isinstance(packet := watcher.receive(), Pingresp):
                assert isinstance(packet, Publish)
                values[_name(packet)] = packet.payload.decode()
            if enough(values):
                return values
            updates += 1
            assert updates < UPDATES_MAX, f"$SYS never got there: {values}"


def _name(message: Publish) -> str:
    return message.topic.decode().removeprefix("$SYS/broker/")


def process_figures(broker: BrokerProcess) -> dict[str, int]:
    """What the kernel counted: `rchar` and `wchar` bytes, `syscr` and `syscw` calls of read and write."""
    lines = Path(f"/proc/{broker.pid}/io").read_text().splitlines()
    return {name: int(number) for name, number in (line.split(": ") for line in lines)}


def log_bytes(broker: BrokerProcess) -> int:
    found = 0
    for path in (broker.data / "log").glob("*.log"):
        with suppress(FileNotFoundError):  # dropped meanwhile
            found += path.stat().st_size
    return found


def publish_all(
    client: RawClient, messages: Iterable[tuple[str, bytes]], qos: int = 1, together: int = 1000
) -> None:
    """Publish with QoS 0 or 1, so many in one go, and wait until the broker has them before the next."""
    packets: list[Packet] = []
    for topic, payload in messages:
        pid = client.packet_id() if qos else 0
        packets.append(Publish(topic.encode(), payload, qos, packet_id=pid))
    for start in range(0, len(packets), together):
        some = packets[start : start + together]
        client.send_bytes(b"".join(encode(packet, client.version) for packet in some))
        for _ in some if qos else ():
            client.amid(Puback)
        if not qos:
            client.send(Pingreq())
            client.amid(Pingresp)


def user_properties(message: Publish) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in message.properties.user}


def notice_of(message: Publish) -> dict[str, object]:
    told: dict[str, object] = json.loads(message.payload)
    return told
