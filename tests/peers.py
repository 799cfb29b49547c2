"""Programs and libraries of others that some tests need, and that a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Without the peer the test is skipped, and says so; in CI (CI=true), where every peer is to be there, it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (in CI a missing peer is a failure)", pytrace=False)
    pytest.skip(reason)
