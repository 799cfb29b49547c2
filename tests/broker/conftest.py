"""The scripted tests run on a simulated log with one partition and on one with three, which announce when the log
stores (`partitions`). Those that do not, and why:

- `test_session_flows` has its like with late announcements and refusals in `tests/contract/test_broker_on_partitions`;
- `test_smoke` starts the broker as a process, on the embedded log, which has one;
- `test_waiting_readers` compares with what the pipeline tells of sessions. It reads the embedded log's records, and
  keeps one position for each reader.
"""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 3], ids=["one partition", "three partitions"])
def partitions(request: pytest.FixtureRequest) -> int:
    """How many the log has."""
    count: int = request.param
    return count
