from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "broker"))  # the simulated log and broker

from log_drivers import MAKERS, Driver


@pytest.fixture
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Driver]:
    """A log of the kind that the clause is held against."""
    driver = MAKERS[request.param](tmp_path)
    yield driver
    driver.close()
