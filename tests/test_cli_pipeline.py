"""`tidegate pipeline …` and what `tidegate up` makes of the pipeline, as a person or a program would use them."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

import tidegate.pipeline
import tidegate.server
from harness import BrokerProcess, RawClient
from tidegate.cli import tidegate as command
from tidegate.commands.pipeline import span
from tidegate.config import Config
from tidegate.pipeline.status import moment
from tidegate.server.listening import Address, Announce


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), env={"COLUMNS": "100", **(env or {})})


# ── status ──


def job(**known: Any) -> dict[str, Any]:
    plain = {"state": "ok", "last_batch_at": None, "last_batch_rows": 0, "last_batch_s": 0.0, "rows": 0, "rate": 0.0}
    plain |= {"lag_rows": 0, "lag_s": 0.0, "failures": 0, "last_error": None, "retry_at": None, "quarantined": 0}
    return {**plain, **known}


def put_status(state: str = "running", ago_s: float = 1.0, **jobs: dict[str, Any]) -> None:
    now_s = time.time()
    status = {"version": 1, "state": state, "pid": os.getpid(), "spark_master": "local[*]", "error": None}
    status |= {"started_at": moment(now_s - 7300), "updated_at": moment(now_s - ago_s), "jobs": jobs}
    Path("data/pipeline").mkdir(parents=True, exist_ok=True)
    Path("data/pipeline/status.json").write_text(json.dumps(status))


@contextmanager
def lock() -> Iterator[None]:
    """What a driver holds while it lives."""
    path = Path("data/pipeline/pid")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(os.getpid()))
        file.flush()
        yield


@pytest.mark.req("P.11")
def test_status_shows_each_job_s_rate_lag_and_last_batch() -> None:
    batch_at = moment(time.time() - 20)
    busy = job(rows=1_234_567, rate=11_234.4, lag_rows=53_210, lag_s=75.0)
    busy |= {"last_batch_at": batch_at, "last_batch_rows": 12_000, "last_batch_s": 0.44}
    put_status(archive=busy, traffic=job(state="waiting"))
    with lock():
        result = run("pipeline", "status")
    head, _, titles, archive, traffic = result.output.splitlines()
    assert head == f"The pipeline has been running for 2 h: process {os.getpid()}, Spark at local[*]."
    assert titles.split() == ["job", "state", "rows", "rows/s", "behind", "for", "last", "batch", "took", "ago"]
    assert archive.split()[:9] == ["archive", "ok", "1,234,567", "11,234", "53,210", "75", "s", "12,000", "0.4"]
    assert traffic.split() == ["traffic", "waiting", "0", "0", "-", "-", "-", "-", "-"]
    assert result.exit_code == 0


@pytest.mark.req("P.11")
def test_a_failing_job_is_told_with_its_reason_and_its_next_try_and_the_exit_code_is_1() -> None:
    error = "ValueError: [red] is no column\x1b[2J"
    put_status(traffic=job(state="failing", failures=3, last_error=error, retry_at=moment(time.time() + 40)))
    with lock():
        result = run("pipeline", "status", env={"COLUMNS": "200"})
    assert "traffic has failed 3 times: ValueError: [red] is no column\\u001b[2J; tried again in" in result.output
    assert result.exit_code == 1


@pytest.mark.req("P.11")
def test_past_failures_and_the_quarantine_are_told() -> None:
    put_status(traffic=job(failures=1), extract=job(quarantined=1234))
    with lock():
        result = run("pipeline", "status")
    assert "traffic has failed once and works again" in result.output
    assert "extract could not process 1,234 rows: see the table `quarantine`" in result.output
    assert result.exit_code == 0


@pytest.mark.req("P.11")
@pytest.mark.parametrize(
    ("state", "ago_s", "held", "words", "code"),
    [
        ("running", 1, False, "The pipeline died 1 s ago without a last word; no pipeline runs for data.", 1),
        ("running", 50, True, "is alive and has said nothing for 50 s.", 1),
        ("starting", 1, True, "The pipeline is starting", 0),
        ("starting", 1, False, "The pipeline died", 1),
        ("stopped", 1, False, "The pipeline was stopped 1 s ago; no pipeline runs for data.", 0),
        ("failed", 1, False, "The pipeline failed 1 s ago; no pipeline runs for data", 1),
    ],
)
def test_status_says_plainly_what_runs_and_what_does_not(
    state: str, ago_s: float, held: bool, words: str, code: int
) -> None:
    put_status(state, ago_s, archive=job())
    if held:
        with lock():
            result = run("pipeline", "status", env={"COLUMNS": "200"})
    else:
        result = run("pipeline", "status", env={"COLUMNS": "200"})
    assert words in result.output
    assert result.exit_code == code


def test_status_before_the_first_run_says_how_to_start_one() -> None:
    result = run("pipeline", "status", "--data", "elsewhere")
    assert "No pipeline has run for elsewhere yet." in result.output
    assert "tidegate pipeline run" in result.output
    assert result.exit_code == 0


def test_status_is_json_for_programs() -> None:
    assert json.loads(run("pipeline", "status", "--json").output) == {"version": 1, "state": "never", "jobs": {}}
    put_status(archive=job(rows=7))
    died = run("pipeline", "status", "--json")
    with lock():
        alive = run("pipeline", "status", "--json")
    assert json.loads(alive.output)["jobs"]["archive"]["rows"] == 7
    assert [(json.loads(each.output)["state"], each.exit_code) for each in (died, alive)] == [
        ("died", 1),
        ("running", 0),
    ]


def test_status_is_shown_anew_until_interrupted() -> None:
    put_status("stopped", archive=job(rows=7))
    arguments = [sys.executable, "-m", "tidegate.cli", "pipeline", "status", "--watch"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "archive" in line:
                break
        put_status("stopped", archive=job(rows=8))
        for line in process.stdout:
            if "archive" in line and " 8 " in line:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 0


def test_status_needs_no_spark() -> None:
    program = (
        "import sys\nfrom tidegate.cli import tidegate\n"
        "try: tidegate(['pipeline', 'status'])\n"
        "except SystemExit: print(sorted(set(sys.modules) & {'pyspark', 'pyarrow', 'deltalake', 'numpy'}))"
    )
    put_status("stopped", archive=job())
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (-3, "0 s"), (119, "119 s"), (120, "2 m"), (7300, "2 h"), (200_000, "2 d")]
)
def test_spans_of_time_are_short(seconds: float, text: str) -> None:
    assert span(seconds) == text


# ── stop ──


def test_stopping_what_does_not_run_is_no_error() -> None:
    put_status("stopped")
    result = run("pipeline", "stop")
    assert (result.exit_code, result.output) == (0, "No pipeline runs for data.\n")


HOLDS_THE_LOCK = """
import fcntl, os, signal, sys, time
file = open("data/pipeline/pid", "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(str(os.getpid())); file.flush()
if sys.argv[1:]: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("held", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_tells_the_driver_and_waits_for_its_end(stubborn: bool) -> None:
    Path("data/pipeline").mkdir(parents=True)
    arguments = [sys.executable, "-c", HOLDS_THE_LOCK, *["stubborn"] * stubborn]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        result = run("pipeline", "stop", "--timeout", "1" if stubborn else "60")
        if stubborn:
            assert result.exit_code == 1
            assert f"process {process.pid} has been told to stop and is still at its step" in result.stderr
            assert process.poll() is None
            process.kill()
        else:
            assert result.output == f"The pipeline (process {process.pid}) has stopped.\n"
            assert process.wait(60) == -signal.SIGTERM


# ── run ──

Call = tuple[Config, bool]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Puts a driver that only notes what it is asked in the place of the one that starts Spark."""
    calls: list[Call] = []

    class Driver:
        def __init__(self, config: Config) -> None:
            self.config = config

        def run(self, once: bool = False, progress: Callable[[int, int], None] | None = None) -> int:
            calls.append((self.config, once))
            put_status("stopped", archive=job(rows=1500), traffic=job(state="failing", last_error="no"))
            if progress is not None:
                progress(1500, 1500)
            return 5

    module = ModuleType("tidegate.pipeline.driver")
    module.Driver = Driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tidegate.pipeline.driver", module)
    monkeypatch.setattr(tidegate.pipeline, "driver", module, raising=False)
    return calls


@pytest.mark.req("P.1")
def test_run_gives_spark_what_the_file_and_the_flags_say(driver: list[Call]) -> None:
    Path("mine.toml").write_text("[spark]\nmaster = 'spark://there:7077'\nexecutor.memory = '2g'\n")
    result = run("pipeline", "run", "--config", "mine.toml", "--data", "d", "--conf", "spark.executor.memory=3g")
    assert result.exit_code == 5
    ((config, once),) = driver
    assert (config.data, once) == (Path("d"), False)
    assert config.spark == {"spark.master": "spark://there:7077", "spark.executor.memory": "3g"}


@pytest.mark.req("P.11")
def test_once_ends_with_what_was_done_and_what_failed(driver: list[Call]) -> None:
    result = run("pipeline", "run", "--once")
    assert result.exit_code == 5
    assert driver[0][1] is True
    assert "archive: 1,500 rows" in result.stderr
    assert "traffic failed: no" in result.stderr


@pytest.mark.parametrize("given", ["master=local", "spark.master", "=x"])
def test_a_setting_that_is_not_spark_s_is_refused(driver: list[Call], given: str) -> None:
    result = run("pipeline", "run", "--conf", given)
    assert result.exit_code == 2
    assert "spark.KEY=VALUE is expected" in result.stderr
    assert driver == []


def test_without_files_there_is_nothing_to_run_on(driver: list[Call]) -> None:
    result = run("pipeline", "run", env={"TIDEGATE_LOG_DURABILITY": "memory"})
    assert result.exit_code == 2
    assert "durability memory keeps none" in result.stderr


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyspark" else find(name))


def test_without_spark_it_says_how_to_get_it(without_spark: None) -> None:
    result = run("pipeline", "run")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: the pipeline needs pyspark",
        "hint: pip install 'tidegate[pipeline]' brings everything",
    ]


@pytest.mark.req("P.1")
def test_a_second_driver_for_a_data_folder_is_refused() -> None:
    with lock():
        result = run("pipeline", "run")
    assert result.exit_code == 1
    assert f"a pipeline already runs for data: process {os.getpid()}" in result.stderr


@pytest.mark.req("P.1", "P.3", "P.11")
@pytest.mark.timeout(300)
def test_once_archives_what_there_is(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    client = RawClient(broker.port)
    client.connect("c")
    for number in range(300):
        client.publish(f"demo/{number % 3}", str(number), 1)
    client.disconnect()
    arguments = ["pipeline", "run", "--once", "--data", str(broker.data), "--conf", "spark.master=local[1]"]
    result = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first == "tidegate: the pipeline starts Spark at local[1]"
    assert "tidegate: archive: 300 rows" in rest
    assert all(line.startswith("tidegate: ") for line in rest), "Spark is quiet"
    shown = run("pipeline", "status", "--data", str(broker.data))
    assert "was stopped" in shown.output
    assert shown.exit_code == 0


@pytest.mark.timeout(120)
def test_a_driver_that_is_told_to_stop_while_spark_starts_does_not_wait_for_it() -> None:
    arguments = [sys.executable, "-m", "tidegate.cli", "pipeline", "run", "--conf", "spark.master=local[1]"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not (java := [each for each in psutil.Process(process.pid).children() if each.name() == "java"]):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == ["tidegate: the pipeline starts Spark at local[1]"]
    java[0].wait(60)
    assert json.loads(run("pipeline", "status", "--json").output)["state"] == "stopped"


# ── up ──

Commands = tuple[list[str], list[str] | None, Path]

@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> list[Commands]:
    """Puts something that only notes its commands in the place of the supervisor, which has tests of its own."""
    seen: list[Commands] = []

    class Supervisor:
        def __init__(
            self, broker: list[str], pipeline: list[str] | None, data: Path, welcome: Announce, announce: Announce
        ) -> None:
            seen.append((broker, pipeline, data))
            self.welcome = welcome

        def run(self) -> int:
            self.welcome(Address("127.0.0.1", 1234))
            return 3

    module = ModuleType("tidegate.server.supervisor")
    module.Supervisor = Supervisor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tidegate.server.supervisor", module)
    monkeypatch.setattr(tidegate.server, "supervisor", module, raising=False)
    return seen


@pytest.mark.req("P.1")
def test_up_starts_broker_and_pipeline_with_the_same_configuration(
    supervisor: list[Commands],
) -> None:
    Path("mine.toml").write_text("[spark]\nmaster = 'local[2]'\n")
    result = run("up", "--config", "mine.toml", "--port", "0", "--data", "d", "--durability", "os")
    assert result.exit_code == 3
    ((broker, pipeline, data),) = supervisor
    assert broker[3] == "broker"
    assert set(broker[4:]) == {"--config=mine.toml", "--data=d", "--port=0", "--durability=os"}
    assert pipeline is not None and pipeline[3:] == ["pipeline", "run", "--config=mine.toml", "--data=d"]
    assert data == Path("d")
    assert "Spark on local[2]" in result.output
    assert "mqtt://127.0.0.1:1234" in result.output
    assert "tidegate sub --port 1234 -t 'demo/#'" in result.output
    assert 'tidegate sql --data d "select topic, count(*) from messages group by topic"' in result.output
    assert "tidegate pipeline status --data d" in result.output


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        (["--durability", "memory"], {}, "durability memory keeps none"),
        ([], {"TIDEGATE_PIPELINE_ENABLED": "false"}, "off (pipeline.enabled)"),
    ],
)
def test_up_without_a_pipeline_says_why_and_runs_the_broker_alone(
    supervisor: list[Commands], flags: list[str], env: dict[str, str], words: str
) -> None:
    result = run("up", "--port", "0", *flags, env=env)
    assert words in result.output
    assert "tidegate sql" not in result.output
    assert [pipeline for _, pipeline, _ in supervisor] == [None]


def test_up_without_spark_says_how_to_get_it(supervisor: list[Commands], without_spark: None) -> None:
    result = run("up", "--port", "0")
    assert "none without pyspark: pip install 'tidegate[pipeline]' brings it" in result.output
    assert [pipeline for _, pipeline, _ in supervisor] == [None]
