"""A few clients around both brokers, for examples that are written out."""

from __future__ import annotations

from typing import Any

from agreement import Agreement, Client
from driver import Simulated
from reference import Reference, Settings

from tidegate.wire import (
    NO_PROPERTIES,
    Connect,
    FilterRequest,
    Packet,
    Properties,
    Puback,
    Publish,
    Subscribe,
    Will,
    encode,
)


class Stage:
    def __init__(
        self,
        *,
        late: bool = True,
        partitions: int = 1,
        prompt: bool = True,
        forgiven: frozenset[str] = frozenset(),
        **mqtt: Any,
    ) -> None:
        sut = Simulated(late=late, partitions=partitions, prompt=prompt, **mqtt)
        self.agreement = Agreement(sut, Reference(Settings(**mqtt), forgiven, prompt=sut.prompt))

    def connect(
        self, name: str, version: int = 5, *, clean: bool = True, will: Will | None = None, **properties: Any
    ) -> Client:
        client = self.agreement.connect(name)
        packet = Connect(version, name.encode(), clean, will=will, properties=Properties(**properties))
        self.agreement.feed(client, encode(packet, version))
        return client

    def subscribe(self, client: Client, filter: bytes, qos: int = 0, identifier: int = 0, **options: Any) -> None:
        about = Properties(subscription_ids=(identifier,)) if identifier else NO_PROPERTIES
        self.say(client, Subscribe(1, (FilterRequest(filter, qos, **options),), about))
        self.agreement.settle()

    def say(self, client: Client, *packets: Packet) -> None:
        """In one piece."""
        self.agreement.feed(client, b"".join(encode(packet, client.link.version) for packet in packets))

    def published(self) -> None:
        """What was sent has been announced: at once, but for a log that takes its time."""
        if not self.agreement.sut.prompt:
            self.agreement.settle()

    def acknowledge(self, *clients: Client) -> None:
        """All that they owe, till nothing moves any more."""
        self.agreement.settle()
        while any(client.to_acknowledge for client in clients):
            for client in clients:
                owed, client.to_acknowledge = client.to_acknowledge, []
                self.say(client, *owed)
            self.agreement.settle()


def payloads(client: Client) -> list[bytes]:
    return [packet.payload for packet in client.transcript if isinstance(packet, Publish)]


def acknowledged(client: Client, kind: type = Puback) -> list[tuple[int, int]]:
    return [(packet.packet_id, packet.reason) for packet in client.transcript if isinstance(packet, kind)]
