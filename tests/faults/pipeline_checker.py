"""Judges a torture run of the pipeline by what the publishers wrote down, what the log holds, and the lake's files.

    I8   every acknowledged message is in the lake; no position twice; nothing that nobody published
    C11  the archive's progress is the log's end, and files have their positions to themselves
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from torture_checker import Verdict
from torture_clients import PUBLISHERS

from tidegate.pipeline.jobs import archive
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.parquet import read_file
from tidegate.pipeline.segments import LogFolder

Row = tuple[int, str, str]
"""(position, topic, payload)"""


def check(data: Path, published: Path, log: list[dict[str, Any]], whole: bool) -> Verdict:
    """`log` are the messages that the log still has; `whole`: those are all that there ever were."""
    verdict = Verdict()
    publishers = json.loads(published.read_text())
    for each in publishers:
        verdict.fault(f"{each['name']} saw the protocol broken", each["violations"])
    acknowledged = {payload for each in publishers for _, payload in each["acknowledged"]}
    lake = Lake(data / "lake")
    rows = [row for row in archived(lake) if row[1].startswith("t/")]
    verdict.acknowledged, verdict.stored = len(acknowledged), len(rows)
    times = Counter(payload for _, _, payload in rows)
    verdict.fault("acknowledged, but not in the lake", sorted(acknowledged - times.keys()))
    # At the end all that was ever sent has been acknowledged.
    verdict.fault("in the lake, but never published", sorted(times.keys() - acknowledged))
    exactly_once = {topic for plan in PUBLISHERS if plan.qos == 2 for topic in plan.topics}
    twice = {payload for _, topic, payload in rows if topic in exactly_once and times[payload] > 1}
    verdict.fault("in the lake more than once, QoS 2", sorted(twice))
    known = {position: (topic, payload) for position, topic, payload in rows}
    positions = Counter(position for position, _, _ in rows)
    verdict.fault("positions that are in the lake more than once", [p for p, n in positions.items() if n > 1])
    stored = [(row["position"], row["topic"], row["payload"]) for row in log]
    other = [row for row in stored if known.get(row[0]) != row[1:]]
    verdict.fault("in the log, but not so in the lake", other)
    if whole:
        verdict.fault("in the lake, but not in the log", sorted(set(rows) - set(stored)))
    files = lake.files("messages")
    verdict.fault(
        "files that overlap",
        [(a.path, b.path) for a, b in itertools.pairwise(files) if a.max_position >= b.min_position],
    )
    end = LogFolder(data / "log").end()
    if archive.archived_to(lake) != end.place:
        verdict.faults.append(f"the archive has come to {archive.archived_to(lake)}, the log ends at {end.place}")
    if lake.end() > end.position:
        verdict.faults.append(f"the lake ends at {lake.end()}, the log at {end.position}")
    return verdict


def archived(lake: Lake) -> list[Row]:
    rows: list[Row] = []
    for file in lake.files("messages"):
        table = read_file(lake.path("messages", file), ["position", "topic", "payload"])
        rows += [(row["position"], row["topic"], row["payload"].decode()) for row in table.to_pylist()]
    return rows
