"""The driver: jobs in turns, what happens when one fails, and what it tells of itself."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from jobs_kit import context_of
from log_writer import LogWriter, write_damaged
from pyspark.sql import SparkSession

from tidegate.config import Config, Pipeline
from tidegate.errors import StorageError
from tidegate.pipeline import driver as driver_module
from tidegate.pipeline.driver import JOBS, AlreadyRunning, Driver
from tidegate.pipeline.handover import handover_file
from tidegate.pipeline.jobs import Batch, Context, archive
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.status import read_status, status_file

PATIENCE_S = 60.0

Status = dict[str, Any]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(data=tmp_path, pipeline=Pipeline(archive_interval_s=0))


@pytest.fixture
def driver(config: Config, spark: SparkSession) -> Driver:
    return Driver(config, spark)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "RETRY_MIN_S", 0.02)
    monkeypatch.setattr(driver_module, "RETRY_MAX_S", 0.1)
    monkeypatch.setattr(driver_module, "STATUS_S", 0.02)
    monkeypatch.setattr(driver_module, "WAIT_S", 0.01)


def a_job(name: str, run: Callable[[Context], Batch | None]) -> SimpleNamespace:
    return SimpleNamespace(NAME=name, INTERVAL_S=0.0, run=run)


def with_jobs(monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession, *jobs: Any) -> Driver:
    """A driver with the archive and jobs of the test's own."""
    monkeypatch.setattr(driver_module, "JOBS", (archive, *jobs))
    return Driver(config, spark)


def status_of(config: Config) -> Status:
    found = read_status(config.data)
    assert found is not None
    return dict(found)


@contextmanager
def stopped_when(driver: Driver, config: Config, seen: Callable[[Status], bool]) -> Iterator[list[Status]]:
    """The driver runs on the main thread, as it must; from another it is stopped once its status shows something."""
    found: list[Status] = []
    ended = threading.Event()

    def watch() -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and not ended.wait(0.005):
            status = read_status(config.data)
            if status is not None and seen(dict(status)):
                found.append(dict(status))
                break
        if not ended.is_set():  # nobody else should get it
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.req("P.11")
def test_a_job_that_fails_is_told_and_tried_again_with_growing_pauses_while_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    steps: dict[str, int] = {"bad": 0, "good": 0}
    good_at_failure: list[int] = []

    def bad(context: Context) -> Batch | None:
        steps["bad"] += 1
        if steps["bad"] < 6:
            good_at_failure.append(steps["good"])
            raise ValueError("there is no such thing\nand more that nobody wants to read")
        return Batch(1, 0)

    def good(context: Context) -> Batch | None:
        steps["good"] += 1
        return Batch(10, 0)

    driver = with_jobs(monkeypatch, config, spark, a_job("bad", bad), a_job("good", good))
    failing: list[Status] = []

    def seen(status: Status) -> bool:
        job = status["jobs"]["bad"]
        if job["state"] == "failing":
            failing.append(job)
        return bool(job["rows"])

    with caplog.at_level(logging.WARNING), stopped_when(driver, config, seen) as found:
        assert driver.run() == 0
    assert failing
    assert failing[0]["last_error"] == "ValueError: there is no such thing"
    assert failing[0]["retry_at"] is not None and failing[0]["failures"] >= 1
    pauses = [float(pause) for pause in re.findall(r"pipeline\.failed job=bad retry_s=([\d.]+)", caplog.text)]
    assert pauses == [0.02, 0.04, 0.08, 0.1, 0.1]
    assert good_at_failure[-1] > good_at_failure[0]
    job = found[0]["jobs"]["bad"]
    assert (job["state"], job["failures"], job["last_error"], job["retry_at"]) == ("ok", 5, None, None)
    assert found[0]["jobs"]["good"]["failures"] == 0


@pytest.mark.req("P.11")
@pytest.mark.attack("C4")
def test_every_job_reports_lag_rate_last_batch_failures_and_quarantine(
    driver: Driver, config: Config, tmp_path: Path
) -> None:
    write_damaged(tmp_path / "log")
    assert driver.run(once=True) == 0
    status = status_of(config)
    assert status["state"] == "stopped"
    facts = {"lag_rows", "lag_s", "rate", "rows", "last_batch_at", "last_batch_rows", "last_batch_s", "failures"}
    facts |= {"state", "last_error", "retry_at", "quarantined"}
    assert {name: set(job) for name, job in status["jobs"].items()} == {job.NAME: facts for job in JOBS}
    assert {job["state"] for job in status["jobs"].values()} == {"ok"}
    archived = status["jobs"]["archive"]
    assert (archived["rows"], archived["last_batch_rows"], archived["quarantined"]) == (200, 200, 1)
    assert archived["rate"] > 0 and archived["last_batch_at"] is not None and archived["lag_rows"] == 0
    assert status["jobs"]["traffic"]["rows"] == 200
    # The next driver knows what is in quarantine, though it has found nothing itself.
    assert Driver(config, driver._spark).run(once=True) == 0
    assert status_of(config)["jobs"]["archive"]["quarantined"] == 1


@pytest.mark.req("P.11")
def test_what_is_left_to_do_is_shown_as_lag(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    left = [300, 200, 100, 0]
    lags: list[int] = []

    def slow(context: Context) -> Batch | None:
        return Batch(100, 0, left.pop(0)) if left else None

    driver = with_jobs(monkeypatch, config, spark, a_job("slow", slow))

    def seen(status: Status) -> bool:
        lags.append(status["jobs"]["slow"]["lag_rows"])
        return not left and not lags[-1]

    with stopped_when(driver, config, seen) as found:
        assert driver.run() == 0
    assert max(lags) > 0
    assert found[0]["jobs"]["slow"]["rows"] == 400


@pytest.mark.req("P.11")
def test_a_job_that_takes_long_rests_longer_and_leaves_the_others_their_turns(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    spans: list[tuple[float, float]] = []

    def long(context: Context) -> Batch | None:
        began = time.monotonic()
        time.sleep(0.1)
        spans.append((began, time.monotonic()))
        return Batch(1, 0)

    first, other = a_job("first", lambda context: None), a_job("other", lambda context: Batch(1, 0))
    driver = with_jobs(monkeypatch, config, spark, first, a_job("long", long), other)
    with stopped_when(driver, config, lambda status: len(spans) > 2) as found:
        assert driver.run() == 0
    for (began, ended), (next_began, _) in pairwise(spans):
        assert next_began - ended >= 4 * (ended - began)
    assert found[0]["jobs"]["other"]["rows"] > len(spans)


@pytest.mark.req("P.11")
def test_sigterm_ends_it_after_the_step_at_hand(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def long(context: Context) -> Batch | None:
        begun.set()
        assert driver.stopping.wait(PATIENCE_S)
        ended.set()
        return Batch(1, 0)

    driver = with_jobs(monkeypatch, config, spark, a_job("long", long))
    with stopped_when(driver, config, lambda status: begun.is_set()):
        assert driver.run() == 0
    assert ended.is_set()
    status = status_of(config)
    assert (status["state"], status["error"], status["jobs"]["long"]["rows"]) == ("stopped", None, 1)
    assert spark.range(3).count() == 3  # a session that was given to it is left alone


def test_a_second_driver_is_refused(driver: Driver, config: Config, spark: SparkSession) -> None:
    held = driver_module._lock(config.data / "pipeline")
    status_file(config.data).write_text('{"state": "running"}')
    try:
        with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}"):
            driver.run(once=True)
    finally:
        os.close(held)
    assert json.loads(status_file(config.data).read_text()) == {"state": "running"}
    assert driver.run(once=True) == 0


@pytest.mark.req("P.11")
def test_once_ends_with_1_if_a_job_failed_and_does_the_others(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    LogWriter(config.data / "log").messages(5)
    todo = [Batch(7, 0, 5), Batch(5, 0), None]

    def bad(context: Context) -> Batch | None:
        raise OSError("no")

    driver = with_jobs(monkeypatch, config, spark, a_job("bad", bad), a_job("good", lambda context: todo.pop(0)))
    told: list[tuple[int, int]] = []
    assert driver.run(once=True, progress=lambda done, total: told.append((done, total))) == 1
    status = status_of(config)
    assert status["state"] == "stopped"
    assert {name: (job["state"], job["rows"]) for name, job in status["jobs"].items()} == {
        "archive": ("ok", 5),
        "bad": ("failing", 0),
        "good": ("ok", 12),
    }
    assert told[-1] == (5, 5)


def test_once_takes_what_there_is_and_does_not_wait_for_a_busy_broker_to_fall_silent(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    writer = LogWriter(config.data / "log")
    writer.messages(10)
    run = archive.run
    rounds: list[Batch | None] = []

    def beside_a_broker(context: Context) -> Batch | None:
        writer.messages(10)
        rounds.append(run(context))
        assert len(rounds) < 10
        return rounds[-1]

    monkeypatch.setattr(archive, "run", beside_a_broker)
    driver = with_jobs(monkeypatch, config, spark)
    assert driver.run(once=True) == 0
    assert status_of(config)["jobs"]["archive"]["rows"] >= 10


@pytest.mark.req("P.11")
def test_once_tells_of_segments_that_are_gone_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    writer = LogWriter(config.data / "log", segment_bytes=16 << 10)
    context = context_of(spark, config.data)
    writer.messages(10)
    archive.run(context)
    for i in range(8):
        writer.messages(400, start=i)
    for path in sorted((config.data / "log").glob("*.log"))[:3]:
        path.unlink()
    assert with_jobs(monkeypatch, config, spark).run(once=True) == 0
    assert status_of(config)["jobs"]["archive"]["quarantined"] == 1


@pytest.mark.attack("C12")
def test_a_status_that_cannot_be_written_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    LogWriter(config.data / "log").messages(5)
    status_file(config.data).mkdir(parents=True)
    driver = with_jobs(monkeypatch, config, spark)
    assert driver.run(once=True) == 0
    assert Lake(config.lake_folder).rows("messages") == 5


@pytest.mark.attack("C12")
def test_a_failure_while_damage_is_dealt_with_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, config: Config, spark: SparkSession
) -> None:
    steps: list[int] = []

    def bad(context: Context) -> Batch | None:
        steps.append(1)
        if len(steps) < 3:
            raise OSError("messages/part-00000000-0000-0000-0000-000000000000.parquet")
        return Batch(1, 0)

    def no_room(*given: object) -> list[str]:
        raise OSError("No space left on device")

    monkeypatch.setattr(driver_module.damage, "set_aside_named", no_room)
    driver = with_jobs(monkeypatch, config, spark, a_job("bad", bad))
    with stopped_when(driver, config, lambda status: status["jobs"]["bad"]["rows"] > 0) as found:
        assert driver.run() == 0
    assert found and found[0]["jobs"]["bad"]["failures"] == 2


def test_a_wrong_lake_is_told_at_once(driver: Driver, config: Config, tmp_path: Path) -> None:
    (tmp_path / "lake" / "messages" / "_delta_log").mkdir(parents=True)
    (tmp_path / "lake" / "messages" / "_delta_log" / f"{7:020d}.json").write_text('{"commitInfo":{}}')
    with pytest.raises(StorageError, match="messages"):
        driver.run(once=True)
    status = status_of(config)
    assert status["state"] == "failed" and "messages" in status["error"]


@pytest.mark.req("P.11")
@pytest.mark.attack("C11")
def test_when_java_is_killed_the_process_ends_and_says_so(tmp_path: Path) -> None:
    """Also while there is nothing to do: whoever supervises it must learn that."""
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tidegate.cli", "pipeline", "run", "--data", str(tmp_path / "data")),
                *("--conf", "spark.master=local[1]", "--conf", "spark.driver.memory=512m"),
            ],
            stderr=out,
        )
    config = Config(data=tmp_path / "data")
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while (read_status(config.data) or {}).get("state") != "running":
            assert process.poll() is None and time.monotonic() < deadline_s, (tmp_path / "out").read_text()[-2000:]
            time.sleep(0.05)
        java = [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "java"]
        assert len(java) == 1
        java[0].kill()
        assert process.wait(PATIENCE_S) == 1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    status = status_of(config)
    assert status["state"] == "failed" and "Spark has ended" in status["error"]
    assert handover_file(config.data).exists()  # a broker goes on keeping what is not archived
