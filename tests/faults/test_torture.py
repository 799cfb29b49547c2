"""Nothing acknowledged is lost and QoS 2 is exact, however often the broker is killed (C1, I1, I3, I4, I10).

TORTURE_KILLS says how often, both durabilities together; `make torture` sets more. TORTURE_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from torture import Run

KILLS = int(os.environ.get("TORTURE_KILLS", "120"))
SEED = int(os.environ.get("TORTURE_SEED") or random.randrange(1 << 30))


@pytest.mark.timeout(120 + 4 * KILLS)
@pytest.mark.attack("C1")
@pytest.mark.req("S0.7", "S0.12", "S0.13", "S1.22", "S1.24", "S4.1", "S4.2", "S4.5")
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_nothing_is_lost_and_qos_2_is_exact_when_the_broker_is_killed_at_random(tmp_path: Path, durability: str):
    run = Run(tmp_path, SEED, max(1, KILLS // 2), durability)
    verdict = run()
    assert verdict.acknowledged > 10 * run.kills, "the clients hardly got to work: the run proves nothing"
    assert not verdict.faults, f"seed {SEED}: " + "; ".join(verdict.faults)
