"""How long property tests search: a little in every run, the same each time; long and elsewhere with TORTURE=1."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TORTURE = bool(os.environ.get("TORTURE"))


def examples(count: int, **more: object) -> settings:
    """Settings for a test of `count` examples, thirty times as many under torture."""
    return settings(
        max_examples=count * 30 if TORTURE else count,
        deadline=None,
        derandomize=not TORTURE,
        suppress_health_check=list(HealthCheck),
        **more,  # type: ignore[arg-type]
    )
