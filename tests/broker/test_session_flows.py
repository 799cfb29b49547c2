"""Sessions keep their promises whatever happens, in any order.

`session_flows` has the rules and what must hold after each step and at the end, `session_model` what clients may
expect, `stories` random sequences from a seed. Hypothesis looks for surprises in short sequences, the seeds make for
breadth; a failure of either is told as short as possible.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test
from hypothesis_profiles import TORTURE, examples
from session_flows import SessionFlows
from stories import Stories

STORIES = 400
STEPS = 60
CHAPTERS = 240 if TORTURE else 8


@pytest.mark.timeout(900)  # for looking for the shortest way to a failure
@pytest.mark.req("S0.12", "S0.13", "S1.20", "S1.22", "S2.10", "S2.14", "S2.18", "S4.1", "S4.5")
@pytest.mark.attack("C2")
def test_sessions_keep_their_promises_whatever_happens():
    run_state_machine_as_test(SessionFlows, settings=examples(300, stateful_step_count=40))


@pytest.mark.req("S0.12", "S0.13", "S1.20", "S1.22", "S2.10", "S2.14", "S2.18", "S4.1", "S4.5")
@pytest.mark.attack("C2")
@pytest.mark.parametrize("chapter", range(CHAPTERS))
def test_sessions_keep_their_promises_in_every_story(chapter):
    Stories().must_go_well(range(chapter * STORIES, (chapter + 1) * STORIES), STEPS)
