"""The broker under test, as little of it as the comparison needs. All uses of its API are in this file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from simulated import TICKS_MAX, SimulatedBroker, SimulatedLink, SimulatedLog

from tidegate.errors import StorageError
from tidegate.log.rows import Rows
from tidegate.ports.commitlog import Listener
from tidegate.session.link import Phase
from tidegate.wire import Packet, decode


@dataclass(frozen=True)
class Written:
    packet: Packet
    size: int
    minimal: bool  # its remaining length takes no more bytes than needed [MQTT-1.5.5-1]


@dataclass(frozen=True)
class Announced:
    """A message that the log has told the broker of."""

    publisher: bytes
    topic: bytes
    payload: bytes


class SystemUnderTest(Protocol):
    prompt: bool  # messages are announced as soon as they are appended

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

    def announce(self, partition: int) -> None:
        """The oldest messages of a partition that were not announced are, if there are any."""

    def announced(self) -> list[Announced]:
        """What was announced since the last call, where the log is not prompt."""

    def settle(self) -> Iterator[None]:
        """Everything comes to its end, step by step: as far as it has to be known what was before an announcement."""

    def advance(self, seconds: float) -> None:
        """Time passes."""

    def written(self, link: Any, version: int) -> list[Written]:
        """What was sent to the client since the last call."""

    def unread(self, link: Any) -> int:
        """Bytes that wait until an earlier packet has been dealt with, as if they had not come yet."""

    def closed(self, link: Any) -> bool:
        """Whether the broker has closed the connection."""


class Ears:
    """Hears what the log tells the broker."""

    def __init__(self, broker: Listener) -> None:
        self.broker = broker
        self.heard: list[Announced] = []

    def announced(self, partition: int, rows: Rows) -> None:
        self.heard += map(Announced, rows.publishers, rows.topics, rows.payloads)
        self.broker.announced(partition, rows)

    def stored(self, ticket: int) -> None:
        self.broker.stored(ticket)

    def refused(self, ticket: int, why: StorageError) -> None:
        self.broker.refused(ticket, why)


class Simulated:
    """The broker on a simulated log that stores at once, or late: when `store` is called.

    `hurry`: messages that come alone are handed over ahead of their tick. `tail_bytes`: how much of the log's end is in
    memory; with little, readers that are behind read from the log. `partitions`, `prompt`: how many the log has, and
    whether it announces within the call, as one with a single partition does, or when `announce` or `store` is."""

    def __init__(
        self,
        *,
        late: bool = True,
        hurry: bool = False,
        tail_bytes: int = 64 << 20,
        partitions: int = 1,
        prompt: bool = True,
        **mqtt: Any,
    ) -> None:
        log = SimulatedLog(late=late, partitions=partitions, prompt=prompt)
        self.prompt = log.prompt
        self.broker = SimulatedBroker(log, tail_bytes=tail_bytes, ack_timeout_s=86400, **mqtt)
        self.broker.hurrying = hurry
        self.ears = Ears(log.listener)
        if not self.prompt:
            log.listener = self.ears

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

    def announce(self, partition: int) -> None:
        if self.broker.log._unannounced[partition]:
            self.broker.log.announce(partition)

    def announced(self) -> list[Announced]:
        heard, self.ears.heard = self.ears.heard, []
        return heard

    def settle(self) -> Iterator[None]:
        if not self.prompt:
            for _ in range(TICKS_MAX):
                if self.broker.idle:
                    break
                self.tick()
                yield
                self.store()
                yield
        self.broker.rest()
        yield

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
