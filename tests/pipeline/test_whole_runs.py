"""The real command beside a real broker: what it has told the broker is on disk before, and its verdicts arrive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from deltalake import DeltaTable
from observing import publish_all
from recorded_disk import Disk, Event, Recorder

from harness import BrokerProcess, RawClient

MESSAGES = 500
LIMITS = {"pipeline__abuse_connects_max": 3}


@dataclass(frozen=True, slots=True)
class Run:
    broker: BrokerProcess
    events: list[Event]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A broker with messages and a client that connects too often, after the pipeline has run to its end, recorded."""
    folder = tmp_path_factory.mktemp("whole")
    broker = BrokerProcess(folder / "data", **LIMITS)
    broker.start()
    with RawClient(broker.port) as publisher:
        publisher.connect("publisher")
        publish_all(publisher, [(f"a/{i % 7}", b"%d" % i) for i in range(MESSAGES)])
    for _ in range(8):
        with RawClient(broker.port) as hopper:
            hopper.connect("hopper")
    recorder = Recorder(folder / "recorded", folder)
    command = [sys.executable, "-m", "tidegate.cli", "pipeline", "run", "--once", "--data", str(broker.data)]
    environment = broker.environment() | recorder.environment()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    yield Run(broker, recorder.events())
    broker.stop()


def handovers(run: Run) -> list[tuple[int, int]]:
    """(index of the event with which the broker could first read it, position that it was told is in the lake)."""
    found = []
    told = run.broker.data / "pipeline" / "to-broker.json"
    content: dict[int, bytes] = {}
    for at, event in enumerate(run.events):
        if event.operation in ("sync", "write") and event.content is not None:
            content[event.inode] = event.content
        elif event.operation == "rename" and event.target == told:
            found.append((at, int(json.loads(content[event.inode])["archived_position"])))
    return found


@pytest.mark.timeout(400)
@pytest.mark.req("P.3", "P.6")
def test_what_the_broker_is_told_to_be_in_the_lake_is_there_after_a_loss_of_power(run: Run, tmp_path: Path):
    told = [(at, position) for at, position in handovers(run) if position]
    assert [position for _, position in told][-1:] == [MESSAGES]
    for at, position in told:
        disk = Disk(run.broker.data)
        for event in run.events[:at]:
            disk.apply(event)
        image = tmp_path / f"after-{at}"
        disk.write(image)
        table = DeltaTable(str(image / "lake" / "messages")).to_pyarrow_table(columns=["position"])
        assert sorted(table.column("position").to_pylist()) == list(range(position))


@pytest.mark.timeout(400)
@pytest.mark.req("P.3")
def test_the_lake_s_folders_have_their_names_on_disk_before_the_broker_is_told(run: Run):
    at = next(at for at, position in handovers(run) if position)
    synced = {
        event.path / name
        for event in run.events[:at]
        if event.operation == "sync" and event.names is not None
        for name in event.names
    }
    log = run.broker.data / "lake" / "messages" / "_delta_log"
    missing = [str(folder.relative_to(run.broker.data)) for folder in (log, *log.parents[:2]) if folder not in synced]
    assert missing == []


@pytest.mark.timeout(400)
@pytest.mark.req("P.3")
def test_no_file_is_named_in_a_commit_before_it_is_on_disk(run: Run):
    """Each Parquet file is synced, whole, before the commit that tells of it is."""
    lake = run.broker.data / "lake"
    safe: dict[str, int] = {}
    commits = 0
    for event in run.events:
        if event.operation != "sync" or event.content is None or not event.path.is_relative_to(lake):
            continue
        if event.path.suffix == ".parquet":
            safe[event.path.name] = len(event.content)
        elif event.path.suffix == ".json" and event.path.stem.isdigit():
            added = [json.loads(line).get("add") for line in event.content.splitlines()]
            for file in filter(None, added):
                commits += 1
                assert safe.get(file["path"]) == file["size"], f"{file['path']} of {event.path.name}"
    assert commits


@pytest.mark.timeout(400)
def test_the_pipeline_s_verdicts_reach_who_watches_the_broker(run: Run):
    with RawClient(run.broker.port) as watcher:
        watcher.connect("watcher")
        watcher.subscribe("$SYS/broker/abuse/#")
        message = watcher.message(20)
        assert message.topic == b"$SYS/broker/abuse/connects/hopper"
        verdict = json.loads(message.payload)
        assert (verdict["client"], verdict["rule"], verdict["limit"]) == ("hopper", "connects", 3)
        assert verdict["observed"] > 3
