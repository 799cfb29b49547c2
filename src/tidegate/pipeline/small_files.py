"""The pipeline's own small files: replaced as a whole, so that a reader never sees half of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidegate.log.files.disk import replace_file


def replace_json(path: Path, value: Any, *, durable: bool) -> None:
    """Put `value` at `path`. `durable`: it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(value).encode(), durable=durable)


def read_json(path: Path) -> Any:
    """What is there; None if nothing is, or nothing that can be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
