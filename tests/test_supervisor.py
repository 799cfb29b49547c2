"""`tidegate up` as the keeper of two processes: what it restarts, what it passes on, and that it leaves nothing behind.

Small scripts stand in for broker and pipeline where only starting and ending matter; the last tests run the real ones.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness import RawClient

TIMEOUT_S = 60.0

LIVES = "import time; time.sleep(1000)"
LISTENS = """
import os, sys
os.write(int(sys.argv[2].removeprefix("--ready-fd=")), b'["127.0.0.1", 1]\\n')
"""
PUTS_ITS_PID = "import os, sys; from pathlib import Path; Path(sys.argv[1]).write_text(str(os.getpid()))\n"


def wait_for(what: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Supervised:
    """A supervisor in a process of its own, with what it says line by line."""

    def __init__(self, command: list[str], **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**kept, **environment}
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))

    def says(self, words: str, timeout_s: float = TIMEOUT_S) -> str:
        """Waits for a line with these words; those before it are kept in `lines` as well."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"it never said {words!r} but: {self.lines}") from None
            self.lines.append(line)
            if words in line:
                return line

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def hang_up(self) -> None:
        """Reads no more, from the next line on: until then the thread that waits for it holds the pipe."""
        assert self.process.stdout is not None
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, self.process.stdout.fileno())
        os.close(nothing)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._thread.join(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


Supervise = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    """Starts a supervisor over two scripts; each gets the path of a file to put its process number in."""
    started: list[Supervised] = []

    def start(pipeline: str, broker: str = PUTS_ITS_PID + LISTENS + LIVES, **constants: float) -> Supervised:
        for name, text in (("broker", broker), ("pipeline", pipeline)):
            (tmp_path / f"{name}.py").write_text(text)
        commands = [[sys.executable, f"{name}.py", f"{name}.pid"] for name in ("broker", "pipeline")]
        constants = {"LOOK_S": 0.1, **constants}
        program = (
            "import sys; from pathlib import Path; from tidegate.server import supervisor\n"
            f"vars(supervisor).update({constants})\n"
            "tell = {'welcome': lambda at: print('welcome to', at), 'announce': lambda at: print('listening on', at)}\n"
            f"up = supervisor.Supervisor(*{commands}, Path('data'), **tell, retry_min_s=0.1, retry_max_s=0.4)\n"
            "sys.exit(up.run())"
        )
        found = Supervised([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}"])
        started.append(found)
        return found

    yield start
    for each in started:
        each.close()


@pytest.fixture
def pid_of(tmp_path: Path) -> Callable[[str], int]:
    def read(name: str) -> int:
        path = tmp_path / f"{name}.pid"
        wait_for(lambda: path.exists() and path.read_text())
        return int(path.read_text())

    return read


@pytest.mark.req("P.1", "P.11")
def test_a_killed_pipeline_comes_back(supervise: Supervise, pid_of: Callable[[str], int], tmp_path: Path) -> None:
    up = supervise(PUTS_ITS_PID + LIVES)
    first, broker = pid_of("pipeline"), pid_of("broker")
    os.kill(first, signal.SIGKILL)
    up.says("the pipeline was killed by SIGKILL; it is started again in 0.1 s")
    wait_for(lambda: pid_of("pipeline") != first)
    assert alive(pid_of("pipeline"))
    assert alive(broker)


FAILS = """
import sys
from pathlib import Path
count = Path("count")
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
print("Traceback (most recent call last):")
print(f"error: reason {number}", file=sys.stderr)
print("hint: try harder", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.req("P.11")
def test_a_pipeline_that_keeps_failing_is_tried_with_growing_pauses_and_says_why(supervise: Supervise) -> None:
    up = supervise(FAILS)
    told = [up.says(f"reason {number}") for number in (1, 2, 3, 4)]
    assert told == [
        f"tidegate: the pipeline ended with exit code 3: reason {number} (try harder); it is started again in {pause} s"
        for number, pause in ((1, "0.1"), (2, "0.2"), (3, "0.4"), (4, "0.4"))
    ]


@pytest.mark.req("P.1")
def test_a_pipeline_that_was_stopped_on_purpose_stays_stopped(supervise: Supervise, tmp_path: Path) -> None:
    up = supervise(FAILS.replace("sys.exit(3)", "sys.exit(0)"))
    up.says("the pipeline was stopped; `tidegate pipeline run` starts it again")
    time.sleep(1.0)  # ten times the pause before a restart
    assert (tmp_path / "count").read_text() == "1"
    assert up.process.poll() is None


REPORTS = """
import json, os, sys, time
from pathlib import Path
folder = Path("data/pipeline")
def report(state):
    job = {"state": state, "last_error": "ValueError: no such thing"}
    status = {"pid": os.getpid(), "state": "running", "spark_master": "local[1]", "jobs": {"traffic": job}}
    (folder / "draft").write_text(json.dumps(status))
    (folder / "draft").replace(folder / "status.json")
Path(sys.argv[1]).write_text(str(os.getpid()))
report("ok")
while not Path("fail").exists(): time.sleep(0.05)
report("failing")
while Path("fail").exists(): time.sleep(0.05)
report("ok")
time.sleep(1000)
"""


@pytest.mark.req("P.11")
def test_a_job_that_fails_and_recovers_is_told(supervise: Supervise, tmp_path: Path) -> None:
    up = supervise(REPORTS)
    up.says("the pipeline runs, on Spark at local[1]")
    (tmp_path / "fail").touch()
    up.says("the pipeline's job traffic fails and is tried again: ValueError: no such thing")
    (tmp_path / "fail").unlink()
    up.says("the pipeline's job traffic works again")


ENDS_CLEANLY = """
import signal, sys, time
from pathlib import Path
def stop(*_):
    Path(sys.argv[1] + ".ended").touch()
    sys.exit(int({code}))
signal.signal(signal.SIGTERM, stop)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_both_cleanly_and_the_exit_code_is_the_broker_s(
    supervise: Supervise, pid_of: Callable[[str], int], tmp_path: Path, number: signal.Signals
) -> None:
    up = supervise(
        ENDS_CLEANLY.format(code=0) + PUTS_ITS_PID + LIVES, ENDS_CLEANLY.format(code=7) + PUTS_ITS_PID + LISTENS + LIVES
    )
    pids = [pid_of("broker"), pid_of("pipeline")]
    assert up.stop(number) == 7
    assert (tmp_path / "broker.pid.ended").exists()
    assert (tmp_path / "pipeline.pid.ended").exists()
    assert not any(map(alive, pids))


def test_a_killed_broker_comes_back_and_the_pipeline_goes_on_meanwhile(
    supervise: Supervise, pid_of: Callable[[str], int]
) -> None:
    up = supervise(PUTS_ITS_PID + LIVES)
    pipeline, first = pid_of("pipeline"), pid_of("broker")
    os.kill(first, signal.SIGKILL)
    up.says("the broker was killed by SIGKILL; it is started again in 0.1 s")
    up.says("listening on 127.0.0.1:1")
    assert alive(pid_of("broker")) and pid_of("broker") != first
    assert pid_of("pipeline") == pipeline and alive(pipeline)
    assert [line for line in up.lines if "welcome" in line] == ["welcome to 127.0.0.1:1"]  # once


@pytest.mark.parametrize("listens", ["", LISTENS], ids=["before it listens", "after it listened"])
def test_a_broker_that_keeps_dying_is_started_again_with_growing_pauses(supervise: Supervise, listens: str) -> None:
    up = supervise(LIVES, listens + "import sys; sys.exit(1)")
    pauses = [up.says("the broker ended with exit code 1; it is started again in").split()[-2] for _ in range(4)]
    assert pauses == ["0.1", "0.2", "0.4", "0.4"]


def test_a_broker_that_ran_well_for_a_while_is_started_again_soon(supervise: Supervise) -> None:
    up = supervise(LIVES, LISTENS + "import sys, time; time.sleep(0.4); sys.exit(1)", SETTLED_S=0.2)
    pauses = [up.says("it is started again in").split()[-2] for _ in range(3)]
    assert pauses == ["0.1"] * 3


def test_a_broker_that_refuses_to_start_ends_all_and_says_so(
    supervise: Supervise, pid_of: Callable[[str], int], tmp_path: Path
) -> None:
    refuses = 'from pathlib import Path\nif Path("refuse").exists():\n    import sys; sys.exit(2)\n'
    up = supervise(ENDS_CLEANLY.format(code=0) + PUTS_ITS_PID + LIVES, refuses + PUTS_ITS_PID + LISTENS + LIVES)
    pipeline = pid_of("pipeline")
    (tmp_path / "refuse").touch()
    os.kill(pid_of("broker"), signal.SIGKILL)
    up.says("killed by SIGKILL")
    up.says("the broker cannot run like this (exit code 2)")
    assert up.process.wait(TIMEOUT_S) == 2
    assert (tmp_path / "pipeline.pid.ended").exists()
    assert not alive(pipeline)


def test_a_broker_that_was_stopped_on_purpose_ends_all(supervise: Supervise, pid_of: Callable[[str], int]) -> None:
    up = supervise(PUTS_ITS_PID + LIVES, ENDS_CLEANLY.format(code=0) + PUTS_ITS_PID + LISTENS + LIVES)
    pid_of("pipeline")
    os.kill(pid_of("broker"), signal.SIGTERM)
    up.says("the broker was stopped, and so is everything else")
    assert up.process.wait(TIMEOUT_S) == 0


def test_a_signal_ends_it_while_the_broker_waits_to_be_started(supervise: Supervise) -> None:
    up = supervise(LIVES, LISTENS + "import sys; sys.exit(5)")
    for _ in range(3):
        up.says("it is started again")
    assert up.stop() == 5


def test_a_pipeline_that_cannot_be_started_leaves_the_broker_alone(
    supervise: Supervise, pid_of: Callable[[str], int], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pipeline").write_text("a file where a folder should be")
    up = supervise(PUTS_ITS_PID + LIVES)
    broker = pid_of("broker")
    up.says("the pipeline cannot be looked after: data/pipeline: File exists")
    assert alive(broker)
    (tmp_path / "data" / "pipeline").unlink()
    pid_of("pipeline")
    assert pid_of("broker") == broker


def test_nobody_reading_what_it_says_is_no_reason_to_stop(
    supervise: Supervise, pid_of: Callable[[str], int]
) -> None:
    up = supervise(PUTS_ITS_PID + LIVES)
    up.says("listening on")
    broker = pid_of("broker")
    up.hang_up()
    for _ in range(3):
        pipeline = pid_of("pipeline")
        os.kill(pipeline, signal.SIGKILL)
        wait_for(lambda before=pipeline: pid_of("pipeline") != before, 20)
    assert up.process.poll() is None
    assert alive(broker)


def test_the_pipeline_waits_until_the_broker_listens(
    supervise: Supervise, pid_of: Callable[[str], int], tmp_path: Path
) -> None:
    loads = 'import time; from pathlib import Path\nwhile not Path("loaded").exists(): time.sleep(0.05)\n'
    up = supervise(PUTS_ITS_PID + LIVES, PUTS_ITS_PID + loads + LISTENS + LIVES)
    pid_of("broker")
    time.sleep(0.5)  # some looks
    assert not (tmp_path / "pipeline.pid").exists()
    (tmp_path / "loaded").touch()
    up.says("welcome to 127.0.0.1:1")
    pid_of("pipeline")


STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PUTS_ITS_PID


def test_a_pipeline_that_does_not_stop_is_killed_in_the_end(
    supervise: Supervise, pid_of: Callable[[str], int]
) -> None:
    up = supervise(STUBBORN + LIVES, STOP_S=0.5)
    pipeline = pid_of("pipeline")
    up.stop()
    assert not alive(pipeline)


def test_a_second_signal_ends_everything_at_once(supervise: Supervise, pid_of: Callable[[str], int]) -> None:
    up = supervise(STUBBORN + LIVES, STUBBORN + LISTENS + LIVES, STOP_S=1000.0)
    pids = [pid_of("broker"), pid_of("pipeline")]
    up.process.send_signal(signal.SIGINT)
    while up.process.poll() is None:
        time.sleep(0.2)
        up.process.send_signal(signal.SIGINT)
    assert not any(map(alive, pids))


def test_a_killed_supervisor_leaves_nothing_running(supervise: Supervise, pid_of: Callable[[str], int]) -> None:
    up = supervise(PUTS_ITS_PID + LIVES)
    pids = [pid_of("broker"), pid_of("pipeline")]
    up.process.kill()
    wait_for(lambda: not any(map(alive, pids)))


def test_the_pipeline_gives_way_to_the_broker(supervise: Supervise, pid_of: Callable[[str], int]) -> None:
    supervise(PUTS_ITS_PID + LIVES)
    broker, pipeline = psutil.Process(pid_of("broker")), psutil.Process(pid_of("pipeline"))
    assert pipeline.nice() == broker.nice() + 10
    scores = [int(Path(f"/proc/{each.pid}/oom_score_adj").read_text()) for each in (broker, pipeline)]
    assert scores[1] > scores[0]


TALKS = """
import sys, time
while True:
    print("x" * 1000, flush=True)
    time.sleep(0.001)
"""


def test_the_pipeline_s_log_is_bounded(supervise: Supervise, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "pipeline"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("of an earlier run\n")
    supervise(TALKS, LOG_BYTES_MAX=100_000)
    old = folder / "log.old.txt"
    wait_for(lambda: old.exists() and old.stat().st_size > 100_000)  # the second turn: the first kept the earlier run
    size = old.stat().st_size
    wait_for(lambda: (folder / "log.txt").stat().st_size < size)
    assert (folder / "log.txt").read_bytes().lstrip(b"x\n") == b""  # no hole where the writer went on


# ── the real ones ──

SPARK = {"TIDEGATE_SPARK_MASTER": "local[1]"}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Supervised]:
    command = [sys.executable, "-m", "tidegate.cli", "up", "--port=0", "--durability=os", f"--data={tmp_path / 'data'}"]
    found = Supervised(command, **SPARK)
    yield found
    found.close()


def status(data: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads((data / "pipeline" / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def broker_of(up: Supervised) -> psutil.Process:
    (found,) = [each for each in psutil.Process(up.process.pid).children() if "broker" in each.cmdline()]
    return found


def port_in(line: str) -> int:
    return int(line.split("127.0.0.1:")[1].partition(",")[0])


def test_up_brings_a_killed_broker_back_with_what_it_had_acknowledged(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tidegate.cli", "up", f"--port={port}", f"--data={tmp_path / 'data'}"]
    up = Supervised(command, TIDEGATE_PIPELINE_ENABLED="false")
    try:
        assert port_in(up.says("listening on")) == port
        client = RawClient(port)
        client.connect("c")
        client.publish("demo/a", "kept", 1)
        broker_of(up).kill()
        up.says("the broker was killed by SIGKILL; it is started again in 1 s")
        assert port_in(up.says("listening on")) == port
        back = RawClient(port)
        back.connect("c")
        back.subscribe("$replay/earliest/demo/a", qos=1)
        assert back.message().payload == b"kept"
        assert up.stop() == 0
    finally:
        up.close()


@pytest.mark.req("P.1", "P.11")
@pytest.mark.timeout(300)
def test_up_runs_broker_and_pipeline_and_brings_a_killed_pipeline_back(up: Supervised, tmp_path: Path) -> None:
    data = tmp_path / "data"
    port = port_in(up.says("listening on"))
    client = RawClient(port)
    client.connect("c")
    for number in range(100):
        client.publish("demo/a", str(number), 1)
    up.says("the pipeline runs, on Spark at local[1]", 120)

    def archived() -> object:
        jobs = status(data).get("jobs")
        return isinstance(jobs, dict) and jobs["archive"]["rows"] == 100

    wait_for(archived, 120)
    first = status(data)["pid"]
    assert isinstance(first, int)
    processes = family(first)
    assert "java" in [each.name() for each in processes]
    os.kill(first, signal.SIGKILL)
    up.says("killed by SIGKILL; it is started again in 1 s")
    wait_for(lambda: not any(alive(each.pid) for each in processes))
    up.says("the pipeline runs", 120)
    assert status(data)["pid"] != first

    stopped = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", "pipeline", "stop", "--data", str(data)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (stopped.returncode, stopped.stderr) == (0, "")
    up.says("the pipeline was stopped")
    assert status(data)["state"] == "stopped"
    client.publish("demo/a", "still here", 1)
    broker_of(up).kill()
    up.says("the broker was killed by SIGKILL; it is started again in 1 s")
    assert port_in(up.says("listening on")) == port  # though --port 0 asked for any
    again = RawClient(port)
    again.connect("c")
    again.publish("demo/a", "and here again", 1)
    again.disconnect()
    assert up.stop(signal.SIGINT) == 0


@pytest.mark.req("P.1")
@pytest.mark.timeout(300)
def test_a_killed_supervisor_leaves_neither_broker_nor_pipeline_nor_java(up: Supervised, tmp_path: Path) -> None:
    up.says("the pipeline runs", 120)
    processes = family(up.process.pid)[1:]
    assert "java" in [each.name() for each in processes]
    up.process.kill()
    wait_for(lambda: not any(alive(each.pid) for each in processes))
