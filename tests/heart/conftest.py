from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from heart_kit import Bystander, FaultyBroker

from harness import BrokerProcess


@pytest.fixture
def start_faulty(tmp_path: Path) -> Iterator[Callable[..., FaultyBroker]]:
    """Starts brokers whose calls to the kernel can be made to fail; ends them at the end, whatever they do then."""
    started: list[FaultyBroker] = []

    def start(durability: str = "fsync", data: str = "data", **settings: Any) -> FaultyBroker:
        broker = FaultyBroker(tmp_path / data, durability, **settings)
        started.append(broker)
        broker.start()
        return broker

    yield start
    for broker in started:
        if broker.alive:
            broker.kill()


@pytest.fixture
def bystand() -> Iterator[Callable[[BrokerProcess], Bystander]]:
    """Puts a bystander beside a broker's other clients."""
    present: list[Bystander] = []

    def bystand(broker: BrokerProcess) -> Bystander:
        present.append(Bystander(broker))
        return present[-1]

    yield bystand
    for bystander in present:
        bystander.close()


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)
