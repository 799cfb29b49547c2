"""What other tests lean on: a broker that does not come up is told in time, and is not left behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from harness import BrokerProcess


class Impostor(BrokerProcess):
    """Something else in the broker's place."""

    program = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


@pytest.mark.parametrize(
    "program",
    ["import time; time.sleep(600)", "import time; print('half a line', end='', flush=True); time.sleep(600)"],
    ids=["silent", "half a line"],
)
def test_a_broker_that_does_not_listen_in_time_is_ended_and_told(tmp_path: Path, program: str) -> None:
    broker = Impostor(tmp_path / "data")
    broker.program = program
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="did not listen within 1 s"):
        broker.start(timeout_s=1)
    assert time.monotonic() - began_s < 60  # of 600
    assert not broker.alive


def test_a_broker_that_ends_is_told_at_once_with_what_it_said(tmp_path: Path) -> None:
    broker = Impostor(tmp_path / "data")
    broker.program = "import sys; sys.exit('no disk')"
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="no disk"):
        broker.start(timeout_s=600)
    assert time.monotonic() - began_s < 60
