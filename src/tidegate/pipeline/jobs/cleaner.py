"""Cleaner: what the lake need not keep any longer, by age, by size and by tenant; never what a session still needs,
or a job has still to read.

Old messages go by whole files, from the oldest on. A tenant that keeps less than the others has its rows taken out of
the files that hold them. The log itself is trimmed by the broker, which asks the hand-over file how far it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile

from tidegate.pipeline.handover import tell_broker
from tidegate.pipeline.jobs import Batch, Context, extract, retained, traffic
from tidegate.pipeline.jobs.abuse import newest_verdicts
from tidegate.pipeline.jobs.archive import archived_to
from tidegate.pipeline.jobs.backlog import needed_floor
from tidegate.pipeline.jobs.compaction import rewrite
from tidegate.pipeline.lake import Lake, LakeFile

NAME = "cleaner"
INTERVAL_S = 60.0

FILES_MAX = 256
"""A tenant's messages are taken out of so many files in one step."""

TIME_COLUMNS = {
    "sessions": "time",
    "dead_letters": "time",
    "quarantine": "time",
    "traffic_minutely": "minute",
    "abuse_verdicts": "window_end",
}
"""The tables besides `messages` that grow with time, and what tells a row's age."""


def run(context: Context) -> Batch | None:
    limits = context.config.pipeline
    lake = context.lake
    tell_broker(context.data, lake, archived_to(lake), newest_verdicts(lake, 100))
    now = datetime.now(UTC)
    oldest = now - timedelta(seconds=limits.lake_retention_s)
    rows = _clean_messages(context, oldest, limits.lake_retention_bytes)
    for tenant, keep_s in limits.tenant_retention_s.items():
        rows += _clean_tenant(context, tenant, now - timedelta(seconds=keep_s))
    for name in lake.names():
        column = TIME_COLUMNS.get(name) or ("time" if name.startswith("json_") else None)
        if column is not None:
            rows += _clean_by_time(lake, name, column, oldest)
    return Batch(rows, lake.progress("messages", NAME) or 0) if rows else None


def due(files: Sequence[LakeFile], oldest: datetime, bytes_max: int) -> list[LakeFile]:
    """The first of `files`, which are in order of position, that are too old or too much."""
    total = sum(file.bytes for file in files)
    found: list[LakeFile] = []
    for file in files:
        if file.high["time"] >= oldest and total <= bytes_max:
            break
        found.append(file)
        total -= file.bytes
    return found


def _clean_messages(context: Context, oldest: datetime, bytes_max: int) -> int:
    lake = context.lake
    files = due(lake.files("messages"), oldest, bytes_max)
    if not files:
        return 0
    needed = [needed_floor(context, files[-1].max_position + 1), *_followed_to(context)]
    files = [file for file in files if all(floor is None or file.max_position < floor for floor in needed)]
    if files:
        version = max(lake.progress("messages", NAME) or 0, files[-1].max_position + 1)
        lake.commit("messages", [], app=NAME, version=version, remove=files)
    return sum(file.rows for file in files)


def _followed_to(context: Context) -> list[int | None]:
    """How far the jobs that follow the messages have read them, if they have begun."""
    lake = context.lake
    extracts = [
        lake.progress(extract.table_of(lake, name, each, extract.columns_of(name, each)), extract.NAME)
        for name, each in context.config.extract.items()
    ]
    return [lake.progress(retained.TABLE, retained.NAME), lake.progress(traffic.TABLE, traffic.NAME), *extracts]


def _clean_tenant(context: Context, tenant: str, oldest: datetime) -> int:
    """Take the tenant's messages out of the files that hold any, once all of a file is old and no session needs it.
    The job's progress says up to where that has been done: no file is looked at twice."""
    lake = context.lake
    app = f"{NAME} {tenant}"
    done = lake.progress("messages", app) or 0
    left = [file for file in lake.files("messages") if file.max_position >= done]
    old = list(takewhile(lambda file: file.high["time"] < oldest, left))[:FILES_MAX]
    if not old:
        return 0
    needed = needed_floor(context, old[-1].max_position + 1)
    old = [file for file in old if needed is None or file.max_position < needed]
    if not old:
        return 0
    held = [file for file in old if file.low["tenant"] <= tenant <= file.high["tenant"]]
    made = rewrite(context, "messages", [[file] for file in held], without=tenant)
    fewer = [(file, new) for file, new in zip(held, made, strict=True) if sum(each.rows for each in new) < file.rows]
    add = [each for _, new in fewer for each in new]
    remove = [file for file, _ in fewer]
    lake.commit("messages", add, app=app, version=old[-1].max_position + 1, remove=remove)
    return sum(file.rows for file in remove) - sum(file.rows for file in add)


def _clean_by_time(lake: Lake, name: str, column: str, oldest: datetime) -> int:
    files = [file for file in lake.files(name) if column in file.high and file.high[column] < oldest]
    if files:
        version = (lake.progress(name, NAME) or 0) + 1
        lake.commit(name, [], app=NAME, version=version, remove=files)
    return sum(file.rows for file in files)
