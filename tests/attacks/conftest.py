from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attack_kit import Scene

from harness import BrokerProcess


@pytest.fixture
def make_scene(start_broker: Callable[..., BrokerProcess]) -> Iterator[Callable[..., Scene]]:
    """Sets up a scene on a broker with the given settings; at its end the bystanders must have noticed nothing."""
    scenes: list[Scene] = []

    def make(durability: str = "os", **settings: Any) -> Scene:
        scene = Scene(start_broker(durability, sys__interval_s=1, **settings))
        scenes.append(scene)
        return scene

    yield make
    for scene in scenes:
        scene.end()


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)
