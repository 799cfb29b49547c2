from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties

SESSION_EXPIRY_S = 600


@pytest.fixture
def lasting(client: Callable[..., RawClient], shared_broker: BrokerProcess) -> Iterator[Callable[..., RawClient]]:
    """Opens or resumes sessions that outlive their connection, in any version; they are ended with the test."""
    used: set[str] = set()

    def resume(client_id: str, version: int = 5, *, properties: Properties | None = None, **options: Any) -> RawClient:
        used.add(client_id)
        if version < 5:
            return client(client_id, version, clean=False, **options)
        asked = properties or Properties(session_expiry=SESSION_EXPIRY_S)
        return client(client_id, version, clean=options.pop("clean", False), properties=asked, **options)

    yield resume
    for client_id in used:
        with RawClient(shared_broker.port) as raw:
            raw.connect(client_id)


@pytest.fixture
def retain(client: Callable[..., RawClient], unique: str) -> Iterator[Callable[..., int]]:
    """Publishes retained messages, and deletes them with the test."""
    topics: set[str] = set()
    publisher = client(unique + "-retainer", 5)

    def publish(topic: str, payload: bytes = b"kept", qos: int = 1, **options: Any) -> int:
        topics.add(topic)
        return publisher.publish(topic, payload, qos, True, **options)

    yield publish
    for topic in topics:
        publisher.publish(topic, b"", 1, True)
