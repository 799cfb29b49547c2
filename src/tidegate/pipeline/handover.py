"""What the pipeline tells the broker, in a file of the data folder: how far the log is safely in the lake, what the
lake has lost since, and the verdicts on abuse. The broker deletes no segment that is not in the lake, and serves what
it has deleted from there.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tidegate.limits import LOST_MAX, VERDICTS_MAX
from tidegate.pipeline.lake import Lake, LakeFile
from tidegate.pipeline.small_files import read_json, replace_json

FILE_NAME = "to-broker.json"
_writing = threading.Lock()
"""The archive and the cleaner both tell it, each on a thread of its own."""


def handover_file(data: Path) -> Path:
    return data / "pipeline" / FILE_NAME


def tell_broker(
    data: Path,
    lake: Lake,
    archived: int | None,
    verdicts: list[dict[str, Any]] | None = None,
    lost: LakeFile | None = None,
) -> None:
    """`archived` is the place up to which the lake has everything, on disk; None if it has nothing yet. Without
    `verdicts` the last ones stay. `lost` is one more file of messages that is gone for good."""
    path = handover_file(data)
    with _writing:
        before = read_json(path) or {}
        losses = before.get("lost", [])
        if lost is not None:
            loss = {"first": lost.min_position, "last": lost.max_position, "messages": lost.rows}
            losses = [*(each for each in losses if each != loss), loss][-LOST_MAX:]
        told = {
            "version": 1,
            "archived_segment": 0 if archived is None else archived >> 32,
            "archived_position": lake.end(),
            "lake": str(lake.folder.resolve()),
            "lost": losses,
            "verdicts": before.get("verdicts", []) if verdicts is None else verdicts[:VERDICTS_MAX],
        }
        if told != before:
            replace_json(path, told, durable=True)
