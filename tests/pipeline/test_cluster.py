"""The same pipeline on a Spark cluster: a real master and two workers, submitted as any Spark program is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyspark
import pytest
from deltalake import DeltaTable

from harness import BrokerProcess, RawClient
from tidegate.pipeline.java import java_home

SPARK = Path(pyspark.__path__[0])
SCRIPT = Path(__file__).parent.parent.parent / "deploy" / "pipeline.py"
MESSAGES = 3000


class Cluster(NamedTuple):
    master: str
    workers: list[Path]
    environment: dict[str, str]


def await_line(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError("".join(seen))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A master and two workers with one core each, on loopback."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    environment |= {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[str]:
        command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
        process = subprocess.Popen(
            [*command, "--webui-port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    try:
        master = await_line(start("master.Master", "--port", "0"), r"Starting Spark master at (spark://\S+)")[1]
        folders = [tmp_path / f"worker{number}" for number in (1, 2)]
        workers = [
            start("worker.Worker", "--cores", "1", "--memory", "1g", "--work-dir", str(folder), master)
            for folder in folders
        ]
        for worker in workers:
            await_line(worker, "Successfully registered with master")
        yield Cluster(master, folders, environment)
    finally:
        for process in reversed(started):
            process.terminate()
            process.communicate()


@pytest.mark.req("P.1", "P.3")
@pytest.mark.timeout(600)
def test_a_cluster_archives_every_message_once(cluster: Cluster, start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(log__segment_bytes=64 << 10)
    client = RawClient(broker.port)
    client.connect("publisher")
    for number in range(MESSAGES):
        client.publish(f"demo/{number % 7}", f"{number:0100d}", 1)
    client.disconnect()
    assert broker.stop() == 0
    assert len(list((broker.data / "log").glob("*.log"))) > 2, "there is work for both workers"

    submit = [str(SPARK / "bin" / "spark-submit"), "--master", cluster.master]
    for setting in (
        "spark.executor.memory=512m",
        "spark.driver.host=127.0.0.1",
        "spark.scheduler.minRegisteredResourcesRatio=1.0",
        "spark.sql.shuffle.partitions=2",
    ):
        submit += ["--conf", setting]
    result = subprocess.run(
        [*submit, str(SCRIPT), "--data", str(broker.data), "--once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=cluster.environment,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert f"tidegate: the pipeline starts Spark at {cluster.master}" in result.stdout

    rows = DeltaTable(broker.data / "lake" / "messages").to_pyarrow_table(columns=["position", "payload"])
    assert sorted(map(int, rows["payload"].to_pylist())) == list(range(MESSAGES))
    assert len(set(rows["position"].to_pylist())) == MESSAGES

    executors = [log for folder in cluster.workers for log in folder.glob("app-*/*/stderr")]
    assert len(executors) == 2
    assert any("Finished task" in log.read_text() for log in executors)
