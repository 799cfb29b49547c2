"""What some tests need of the machine, and it may lack: programs and libraries of others, a small file system."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Without it the test is skipped, and says so; in CI (CI=true), where everything is to be there, it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (in CI that is a failure)", pytrace=False)
    pytest.skip(reason)


@contextmanager
def small_disk(folder: Path, size: str | int) -> Iterator[None]:
    """While it lasts the folder is a file system of its own, of so many bytes (or "2m")."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tidegate-test", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        missing(f"a small file system cannot be mounted, which takes root: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a failed test may have left it open
