"""Cleaner: what is too old or too much goes, by whole files and from the oldest on; what a session needs stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from jobs_kit import Killed, context_of, drain, kill_at_commit
from lake_rows import NOW_S, disjoint, messages, positions, reopened, stored
from log_writer import LogWriter
from pyspark.sql import SparkSession

from harness import BrokerProcess, RawClient
from tidegate.config import Pipeline
from tidegate.pipeline.decode import SCHEMA
from tidegate.pipeline.handover import handover_file
from tidegate.pipeline.jobs import Context, archive, cleaner, traffic
from tidegate.pipeline.lake import END
from tidegate.pipeline.schemas import TABLES
from tidegate.session import changes

HOUR = 3600
DAY = 24 * HOUR

Cleaning = Callable[..., Context]


@pytest.fixture
def cleaning(spark: SparkSession, tmp_path: Path) -> Cleaning:
    """A context with limits of the test's own."""
    return lambda **limits: context_of(spark, tmp_path, pipeline=Pipeline(**limits))


def days(context: Context, *ages_d: float, **columns: Any) -> None:
    """A file of ten messages for each age, of positions 0 … 10, 10 … 20 and so on."""
    lake = context.lake
    for age_d in ages_d:
        first = lake.end()
        table = messages(range(first, first + 10), age_s=age_d * DAY, **columns)
        lake.commit("messages", archive.write_messages(_split_form(table), str(lake.folder)), app="archive",
                    version=first + 10, also={END: first + 10})  # fmt: skip


def _split_form(table: pa.Table) -> list[pa.RecordBatch]:
    """As a worker has them before it writes."""
    return table.cast(SCHEMA).combine_chunks().to_batches()


def session(number: int, name: str, position: int, *filters: str, tenant: str = "") -> list[bytes]:
    return [
        changes.session(number, False, 5, 0xFFFFFFFF, 0, position, name.encode(), tenant.encode(), None),
        *(changes.subscribed(number, 1, 0, 0, 0, filter.encode()) for filter in filters),
    ]


@pytest.mark.req("P.6", "S0.5", "S4.13")
def test_files_go_when_all_of_their_messages_are_too_old(cleaning: Cleaning) -> None:
    context = cleaning(lake_retention_s=7 * DAY)
    context.lake.create("messages")
    days(context, 30, 8, 6, 0)
    given = stored(context.lake)
    batch = cleaner.run(context)
    assert batch is not None and batch.rows == 20
    assert stored(context.lake) == given[20:]
    assert cleaner.run(context) is None


@pytest.mark.req("P.6", "S4.13")
def test_the_oldest_go_when_there_is_too_much(cleaning: Cleaning) -> None:
    context = cleaning()
    context.lake.create("messages")
    days(context, 5, 4, 3, 2, 1)
    sizes = [file.bytes for file in context.lake.files("messages")]
    context = cleaning(lake_retention_bytes=sum(sizes[3:]))
    cleaner.run(context)
    assert positions(context.lake) == list(range(30, 50))


@pytest.mark.req("P.6", "P.9")
def test_what_a_job_has_still_to_read_stays(cleaning: Cleaning) -> None:
    context = cleaning(lake_retention_s=7 * DAY)
    context.lake.create("messages")
    days(context, 30)
    drain(traffic, context)
    days(context, 29)  # traffic has not seen these
    cleaner.run(context)
    assert positions(context.lake) == list(range(10, 20))
    drain(traffic, context)
    cleaner.run(context)
    assert positions(context.lake) == []


@pytest.mark.req("P.6")
def test_how_far_was_archived_is_still_known_when_nothing_is_left(cleaning: Cleaning, tmp_path: Path) -> None:
    context = cleaning(lake_retention_s=1)
    context.lake.create("messages")
    days(context, 3, 2)
    cleaner.run(context)
    assert context.lake.files("messages") == []
    assert context.lake.end() == 20
    assert reopened(context).lake.end() == 20
    cleaner.run(context)  # tells the broker
    assert json.loads(handover_file(tmp_path).read_text())["archived_position"] == 20


@pytest.mark.req("P.6", "S0.5", "S2.22")
def test_what_a_session_still_needs_stays(cleaning: Cleaning, tmp_path: Path) -> None:
    context = cleaning(lake_retention_s=DAY)
    writer = LogWriter(tmp_path / "log")
    context.lake.create("messages")
    days(context, 9, 8, 7, 6, 5, topic="plant/1")
    days(context, 4, topic="other")
    writer.tick([], session(1, "away", 25, "plant/#"))
    cleaner.run(context)
    assert positions(context.lake) == list(range(20, 60))
    writer.tick([], [changes.positions([(1, 41)])])  # it has come, and taken some
    cleaner.run(context)
    assert positions(context.lake) == list(range(40, 60))
    writer.tick([], [changes.positions([(1, 50)])])  # all that it wanted; "other" is for nobody
    cleaner.run(context)
    assert positions(context.lake) == []


@pytest.mark.req("P.6", "S2.22")
def test_messages_that_no_session_subscribed_to_are_not_kept_for_one(cleaning: Cleaning, tmp_path: Path) -> None:
    context = cleaning(lake_retention_s=DAY)
    writer = LogWriter(tmp_path / "log")
    context.lake.create("messages")
    days(context, 9, 8, 7, topic="noise")
    days(context, 6, topic="plant/1")
    writer.tick([], session(1, "away", 0, "plant/#"))
    cleaner.run(context)
    assert positions(context.lake) == list(range(30, 40))


@pytest.mark.req("P.6")
def test_a_tenant_that_keeps_less_has_its_rows_taken_out(
    cleaning: Cleaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = cleaning(tenant_retention_s={"b": 7 * DAY})
    lake = context.lake
    lake.create("messages")
    for age_d, tenants in ((30, "abc"), (20, "b"), (10, "ac"), (8, "bc"), (6, "ab"), (0, "ab")):
        first = lake.end()
        rows = [
            messages(range(first + i, first + i + 1), age_s=age_d * DAY, tenant=tenants[i % len(tenants)])
            for i in range(12)
        ]
        lake.append("messages", pa.concat_tables(rows), app="archive", version=first + 12)
    given = stored(lake)
    batch = cleaner.run(context)
    kept = [row for row in given if row["tenant"] != "b" or row["position"] >= 48]
    assert batch is not None and batch.rows == len(given) - len(kept) == 4 + 12 + 6
    assert stored(lake) == kept
    assert lake.end() == 72
    # What has been looked at is not read again, though its tenants' names lie around this one's.
    looked: list[object] = []
    monkeypatch.setattr(cleaner, "rewrite", lambda *given, **named: looked.append(given) or [])
    assert cleaner.run(context) is None
    assert looked == []


@pytest.mark.req("P.6", "S2.22")
def test_a_tenant_s_rows_stay_while_one_of_its_sessions_needs_them(cleaning: Cleaning, tmp_path: Path) -> None:
    context = cleaning(tenant_retention_s={"b": DAY})
    writer = LogWriter(tmp_path / "log")
    context.lake.create("messages")
    days(context, 5, 4, 3, topic="plant/1", tenant="b")
    writer.tick([], session(1, "away", 15, "plant/#", tenant="b"))
    cleaner.run(context)
    assert positions(context.lake) == list(range(10, 30))
    writer.tick([], [changes.gone(1)])
    cleaner.run(context)
    assert positions(context.lake) == []


@pytest.mark.req("P.6")
def test_the_other_tables_are_cleaned_by_age_as_well(cleaning: Cleaning) -> None:
    context = cleaning(lake_retention_s=DAY)
    lake = context.lake
    for i, age_d in enumerate((3, 2, 0)):
        time_us = int((NOW_S - age_d * DAY) * 1e6)
        filled = {
            "sessions": {"place": i, "ordinal": 0, "time": time_us, "position": i, "kind": "gone"},
            "quarantine": {"time": time_us, "job": "archive", "reason": "", "detail": ""},
            "traffic_minutely": {
                **dict.fromkeys(TABLES["traffic_minutely"].names, 0),
                **dict.fromkeys(("tenant", "topic", "publisher"), ""),
                "minute": time_us,
            },
            "retained": {
                "tenant": "", "topic": f"t/{i}", "position": i, "time": time_us, "publisher": "", "qos": 0,
                "payload": b"x",
            },
        }  # fmt: skip
        for name, row in filled.items():
            lake.append(name, pa.Table.from_pylist([row], TABLES[name]), app="test", version=i + 1)
    cleaner.run(context)
    assert {name: lake.rows(name) for name in lake.names()} == {
        "sessions": 1,
        "quarantine": 1,
        "traffic_minutely": 1,
        "retained": 3,  # however old: it is the latest of its topic
    }


@pytest.mark.req("P.6")
@pytest.mark.attack("C11")
@pytest.mark.parametrize("limits", [{"lake_retention_s": 9 * DAY}, {"tenant_retention_s": {"b": 9 * DAY}}])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cleaning_that_is_cut_off_is_done_again(
    cleaning: Cleaning, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], when: str
) -> None:
    context = cleaning(**limits)
    context.lake.create("messages")
    days(context, 20, 10, 5, 0, tenant="b")
    kept = stored(context.lake)[20:]
    kill_at_commit(monkeypatch, "messages", when)
    with pytest.raises(Killed):
        cleaner.run(context)
    reborn = reopened(context)
    drain(cleaner, reborn)
    assert stored(reborn.lake) == kept
    assert disjoint(reborn.lake)


@pytest.mark.req("P.6", "S0.5", "S2.22")
def test_beside_a_broker_only_what_its_sessions_have_taken_is_deleted(
    start_broker: Callable[..., BrokerProcess], spark: SparkSession
) -> None:
    broker = start_broker()
    context = context_of(spark, broker.data, pipeline=Pipeline(lake_retention_bytes=1))
    with RawClient(broker.port) as away:
        away.connect("away", clean=False)
        away.subscribe("plant/#", qos=1)
        away.disconnect()
    with RawClient(broker.port) as publisher:
        publisher.connect("p")
        for round_ in range(4):
            for i in range(5):
                publisher.publish("plant/1" if round_ else "noise", f"{round_} {i}", qos=1)
            archive.run(context)
    assert len(context.lake.files("messages")) == 4
    cleaner.run(context)
    payloads = [row["payload"] for row in stored(context.lake)]
    assert payloads == [f"{round_} {i}".encode() for round_ in (1, 2, 3) for i in range(5)]
    with RawClient(broker.port) as away:
        away.connect("away", clean=False)
        assert away.payloads(15) == payloads
        away.disconnect()
    assert broker.stop() == 0
    cleaner.run(context)
    assert stored(context.lake) == []
