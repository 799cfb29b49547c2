"""The broker under test, as little of it as the comparison needs. All uses of its API are in this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from simulated import SimulatedBroker, SimulatedLink, SimulatedLog

from tidegate.session.link import Phase
from tidegate.wire import Packet, decode


@dataclass(frozen=True)
class Written:
    packet: Packet
    size: int
    minimal: bool  # its remaining length takes no more bytes than needed [MQTT-1.5.5-1]


class SystemUnderTest(Protocol):
    def connect(self) -> Any:
        """A new connection: its link."""

    def feed(self, link: Any, data: bytes) -> None:
        """Bytes have come from the client."""

    def lost(self, link: Any) -> None:
        """The client's side of the connection is gone."""

    def tick(self) -> None:
        """One pass of the loop."""

    def store(self) -> None:
        """The log has stored, and answered, one thing that was asked of it, if anything was."""

    def settle(self) -> None:
        """Everything comes to its end."""

    def advance(self, seconds: float) -> None:
        """Time passes."""

    def written(self, link: Any, version: int) -> list[Written]:
        """What was sent to the client since the last call."""

    def unread(self, link: Any) -> int:
        """Bytes that wait until an earlier packet has been dealt with, as if they had not come yet."""

    def closed(self, link: Any) -> bool:
        """Whether the broker has closed the connection."""


class Simulated:
    """The broker on a simulated log that stores at once, or late: when `store` is called.

    `hurry`: messages that come alone are handed over ahead of their tick. `tail_bytes`: how much of the log's end is in
    memory; with little, readers that are behind read from the log."""

    def __init__(self, *, late: bool = True, hurry: bool = False, tail_bytes: int = 64 << 20, **mqtt: Any) -> None:
        log = SimulatedLog(late=late)
        self.broker = SimulatedBroker(log, tail_bytes=tail_bytes, ack_timeout_s=86400, **mqtt)
        self.broker.hurrying = hurry

    def connect(self) -> SimulatedLink:
        link = SimulatedLink()
        self.broker.broker.accept(link)
        return link

    def feed(self, link: SimulatedLink, data: bytes) -> None:
        if link.phase is not Phase.CLOSED:  # as the server does
            self.broker.broker.receive(link, data)

    def lost(self, link: SimulatedLink) -> None:
        self.broker.broker.lost(link)
        link.closed = True

    def tick(self) -> None:
        self.broker.tick()

    def store(self) -> None:
        self.broker.log.store()
        self.broker.log.answer()

    def settle(self) -> None:
        self.broker.rest()

    def advance(self, seconds: float) -> None:
        self.broker.pass_time(seconds)

    def written(self, link: SimulatedLink, version: int) -> list[Written]:
        data = bytes(link.written)
        link.written.clear()
        return list(_decoded(data, version))

    def unread(self, link: SimulatedLink) -> int:
        return len(link.rest) if link.busy else 0

    def closed(self, link: SimulatedLink) -> bool:
        return link.closed


def _decoded(data: bytes, version: int) -> Any:
    """Whole packets: the broker never writes half of one."""
    at = 0
    while at < len(data):
        length = shift = 0
        body = at + 1
        while True:
            byte = data[body]
            length |= (byte & 0x7F) << shift
            shift += 7
            body += 1
            if byte < 0x80:
                break
        minimal = body - at == 2 or byte != 0
        end = body + length
        assert end <= len(data), "half a packet was written"
        yield Written(decode(data[at], data[body:end], version, from_server=True), end - at, minimal)
        at = end
