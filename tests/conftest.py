from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import BrokerProcess, RawClient

_names = itertools.count()


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    """Starts brokers with their own data folder and settings (`log__segment_bytes=65536`); stops them at the end."""
    started: list[BrokerProcess] = []

    def start(durability: str = "os", data: str = "data", **settings: Any) -> BrokerProcess:
        broker = BrokerProcess(tmp_path / data, durability, **settings)
        started.append(broker)
        return broker.start()

    yield start
    for broker in started:
        if broker.alive:
            broker.stop()


@pytest.fixture
def broker(start_broker: Callable[..., BrokerProcess]) -> BrokerProcess:
    """A fresh broker."""
    return start_broker()


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests that leave it as they found it: use `unique` for topics and client ids."""
    with BrokerProcess(tmp_path_factory.mktemp("shared") / "data") as broker:
        yield broker
        assert broker.alive


@pytest.fixture
def unique() -> str:
    """A name nobody else uses: for topics and client ids on the shared broker."""
    return f"u{next(_names)}"


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[Callable[..., RawClient]]:
    """Opens raw clients on the shared broker; closes them at the end."""
    opened: list[RawClient] = []

    def open_client(client_id: str | None = None, version: int = 4, **connect: Any) -> RawClient:
        raw = RawClient(shared_broker.port, version)
        opened.append(raw)
        if client_id is not None or connect:
            raw.connect(client_id or "", **connect)
        return raw

    yield open_client
    for raw in opened:
        raw.close()
