"""The lake holds each message once, whoever is killed whenever (C11, I8).

TORTURE_PIPELINE_KILLS says how often, both runs together; with TORTURE=1 it is sixty. TORTURE_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from pipeline_torture import Run

TORTURE = os.environ.get("TORTURE") == "1"
KILLS = int(os.environ.get("TORTURE_PIPELINE_KILLS") or (60 if TORTURE else 6))
SEED = int(os.environ.get("TORTURE_SEED") or random.randrange(1 << 30))


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.attack("C11")
@pytest.mark.req("P.3", "P.6", "P.10", "P.11", "S4.1", "S4.2")
def test_each_acknowledged_message_is_in_the_lake_once_while_the_broker_trims_its_log(tmp_path: Path):
    run = Run(tmp_path, SEED, KILLS if not TORTURE else KILLS // 2, trim=True)
    verdict = run()
    assert run.trimmed > 0, "the broker deleted nothing: the run proves little"
    assert verdict.acknowledged > 100 * run.kills, "the publishers hardly got to work: the run proves nothing"
    assert not verdict.faults, f"seed {SEED}, killed {run.killed}: " + "; ".join(verdict.faults)


@pytest.mark.skipif(not TORTURE, reason="the other run takes long enough; TORTURE=1 makes this one as well")
@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.attack("C11")
@pytest.mark.req("P.3")
def test_the_lake_is_the_log(tmp_path: Path):
    run = Run(tmp_path, SEED, max(1, KILLS // 2))
    verdict = run()
    assert verdict.acknowledged > 100 * run.kills, "the publishers hardly got to work: the run proves nothing"
    assert not verdict.faults, f"seed {SEED}, killed {run.killed}: " + "; ".join(verdict.faults)
