"""The pipeline beside a broker, as `tidegate up` runs them: freshness, what the broker loses to it, and how lag and
throughput go over time; and replay, from the lake back through a broker. Real processes, real sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow.parquet as pq

from brokers import KNOWN, LOG_TAIL_BYTES, BrokerError, Running, machine_cpu_s, process_tree_cpu_s, start
from measure import HERE, OTHER_CPU_SHARE_MAX, Measurement, MeasurementError, run_load, wait_for_quiet
from pipeline_plan import FRESHNESS_RATE_PER_S, RUNS, STEPS
from pipeline_spark import Bench, Found
from scenarios import SCENARIOS, Load
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder
from tidegate.pipeline.status import read_status
from tidegate.server.supervisor import NICENESS

MQTT_VERSION = 4
PROBE_S = 0.1
SAMPLE_S = 0.25
WARM_S = 10.0
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
CATCH_UP_TIMEOUT_S = 120.0
BESIDE = ("10-pairs-q1", "1-1-q0")
COUNTER_SOURCE = HERE / "mqttcount.c"
COUNTER = HERE / "out" / "mqttcount"


# ── the pipeline's process ──


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    process: subprocess.Popen[bytes]
    data: Path

    def cpu_s(self) -> float:
        """Of the driver, its JVM and the workers."""
        return process_tree_cpu_s(self.process.pid)

    def master(self) -> str:
        status = read_status(self.data)
        assert status is not None
        return str(status["spark_master"])

    def check(self) -> None:
        """Raises BrokerError if it is gone, or a job fails: what is measured then would mean nothing."""
        if self.process.poll() is not None:
            tail = (self.data / "pipeline.log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            raise BrokerError(f"the pipeline ended with code {self.process.returncode}:\n{tail}")
        for name, job in ((read_status(self.data) or {}).get("jobs") or {}).items():
            if job["failures"]:
                raise BrokerError(f"the pipeline's job {name} has failed: {job['last_error']}")


@contextlib.contextmanager
def pipeline(data: Path) -> Iterator[RunningPipeline]:
    """`tidegate pipeline run` for a data folder, as little urgent as `tidegate up` makes it; yields when it works."""
    command = [sys.executable, "-m", "tidegate.cli", "pipeline", "run", "--data", str(data)]
    with (data / "pipeline.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=lambda: os.nice(NICENESS) and None
        )
    running = RunningPipeline(process, data)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (read_status(data) or {}).get("state") != "running":
            running.check()
            if time.monotonic() > deadline:
                raise BrokerError(f"the pipeline did not start within {START_TIMEOUT_S:.0f} s")
            time.sleep(PROBE_S)
        yield running
    finally:
        _stop_tree(process)


def _stop_tree(process: subprocess.Popen[Any]) -> None:
    """A driver ends its JVM and workers; if it takes too long, each of them is ended."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(tree, timeout=5)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, timeout=5)


@contextlib.contextmanager
def broker(bench: Bench, durability: str, fill: Callable[[Path], None] | None = None) -> Iterator[Running]:
    os.sync()
    wait_for_quiet(bench.patience_s)
    with start(KNOWN["tidegate"](), bench.root, durability, fill) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Mark:
    """What the clocks said when the load generator began or ended to measure."""

    time_s: float  # Unix
    pipeline_cpu_s: float
    broker_cpu_s: float
    probe_cpu_s: float  # this process
    machine_cpu_s: float


class Marks:
    def __init__(self, broker: Running, pipe: RunningPipeline) -> None:
        self._broker, self._pipe = broker, pipe
        self.at: dict[str, Mark] = {}

    def __call__(self, event: str) -> None:
        cpu_s = self._broker.cpu_s()
        assert cpu_s is not None
        self.at[event] = Mark(time.time(), self._pipe.cpu_s(), cpu_s, time.process_time(), machine_cpu_s())

    @property
    def start(self) -> Mark:
        return self.at["measure-start"]

    @property
    def end(self) -> Mark:
        return self.at["measure-end"]

    def shares(self, generator: float) -> dict[str, float]:
        """Cores used in the measured window, by whom."""
        seconds = self.end.time_s - self.start.time_s
        pipe = (self.end.pipeline_cpu_s - self.start.pipeline_cpu_s) / seconds
        own = (self.end.broker_cpu_s - self.start.broker_cpu_s) / seconds
        probe = (self.end.probe_cpu_s - self.start.probe_cpu_s) / seconds
        whole = (self.end.machine_cpu_s - self.start.machine_cpu_s) / seconds
        others = max(0.0, whole - pipe - own - generator - probe)
        return {"pipeline": pipe, "broker": own, "generator": generator, "probe": probe, "others": others}


class Repeating:
    """Calls something at a fixed pace on a thread of its own, for the duration of a `with`."""

    def __init__(self, every_s: float, call: Callable[[], None]) -> None:
        self._every_s, self._call = every_s, call
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                self._call()
                due = max(due + self._every_s, time.monotonic())
        except BaseException as error:
            self._failure = error

    def check(self) -> None:
        if self._failure is not None:
            raise MeasurementError(f"the probe failed: {self._failure}") from self._failure

    def __enter__(self) -> Repeating:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# ── freshness ──


class Probe:
    """A reader of the Delta table that notes when it saw each message for the first time."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._files: set[str] = set()
        self.end = 0
        self.seen = 0
        self.commits: list[tuple[float, np.ndarray[Any, Any]]] = []  # when, and the times of its messages in seconds

    def look(self) -> None:
        files = self._lake.files("messages")
        now = time.time()
        new = [file for file in files if file.path not in self._files and file.max_position >= self.end]
        self._files = {file.path for file in files}
        times = []
        for file in new:
            # A file may also be an older one's rows written anew: what was seen before does not count again.
            table = pq.read_table(self._lake.path("messages", file), columns=["position", "time"])
            fresh = table.column("position").to_numpy() >= self.end
            times.append(table.column("time").to_numpy()[fresh].astype("datetime64[us]").astype(np.int64) / 1e6)
        if times:
            found = np.concatenate(times)
            self.seen += len(found)
            self.commits.append((now, found))
            self.end = max(file.max_position + 1 for file in new)

    def delays(self, start_s: float, end_s: float) -> np.ndarray[Any, Any]:
        """Seconds from the message's acceptance to its being visible, of the messages accepted in a window."""
        parts = [seen_s - times[(times >= start_s) & (times < end_s)] for seen_s, times in self.commits]
        return np.concatenate(parts)


def measure_freshness(bench: Bench) -> Found:
    """Messages one by one at a steady rate; a reader looks at the table ten times a second."""
    load = Load("pairs", 10, 10, 1, rate_per_s=FRESHNESS_RATE_PER_S)
    with broker(bench, "fsync") as served:
        assert served.data is not None
        began = time.monotonic()
        with pipeline(served.data) as pipe:
            started_s = time.monotonic() - began
            bench.say(f"freshness: the pipeline runs after {started_s:.1f} s; {bench.sizes.seconds:.0f} s of traffic")
            probe, marks = Probe(Lake(served.data / "lake")), Marks(served, pipe)
            with Repeating(PROBE_S, probe.look) as watching:
                row = run_load(served, MQTT_VERSION, load, bench.sizes.seconds, WARM_S, marks)
                total = LogFolder(served.data / "log").end().position
                _until(lambda: probe.end >= total, watching, pipe)
            if probe.seen != total:
                raise MeasurementError(f"the lake has {probe.seen:,} of {total:,} messages")
            shares = marks.shares(row.generator_cpu_share)
            master = pipe.master()
    delays = probe.delays(marks.start.time_s, marks.end.time_s)
    p50, p95, p99 = (float(value) for value in np.percentile(delays, (50, 95, 99)))
    commits = [seen_s for seen_s, _ in probe.commits if marks.start.time_s <= seen_s < marks.end.time_s]
    bench.say(
        f"freshness: p50 {p50:.2f}, p95 {p95:.2f}, max {delays.max():.2f} s;"
        f" CPU: pipeline {shares['pipeline']:.2f}, broker {shares['broker']:.2f} cores"
    )
    return {
        "figures": {
            "p50_s": p50,
            "p95_s": p95,
            "p99_s": p99,
            "max_s": float(delays.max()),
            "pipeline_cpu_share": shares["pipeline"],
            "broker_cpu_share": shares["broker"],
        },
        "messages": len(delays),
        "published_per_s": row.published_per_s,
        "commits": len(commits),
        "commit_interval_s": float(np.median(np.diff(commits))) if len(commits) > 1 else None,
        "pipeline_start_s": started_s,
        "spark_master": master,
        "cpu_shares": shares,
        "load": asdict(row),
        "disturbed": shares["others"] > OTHER_CPU_SHARE_MAX,
    }


def _until(reached: Callable[[], bool], watching: Repeating, pipe: RunningPipeline) -> None:
    deadline = time.monotonic() + CATCH_UP_TIMEOUT_S
    while not reached():
        watching.check()
        pipe.check()
        if time.monotonic() > deadline:
            raise MeasurementError(f"the lake did not catch up within {CATCH_UP_TIMEOUT_S:.0f} s")
        time.sleep(PROBE_S)
    pipe.check()


# ── the broker beside a busy pipeline ──


def measure_beside(bench: Bench) -> Found:
    """The same loads on one broker, first alone, then beside a pipeline that archives a backlog without a pause."""
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in BESIDE]
    seconds = max(2.0, bench.sizes.seconds / 8)
    source = bench.data / "log"
    found: dict[str, Any] = {scenario.name: {"title": scenario.title} for scenario in scenarios}
    with broker(bench, "os", lambda data: _copied(source, data / "log")) as served:
        assert served.data is not None
        for scenario in scenarios:
            row = run_load(served, MQTT_VERSION, scenario.load, seconds, 1.0)
            found[scenario.name]["alone"] = _row(row)
            bench.say(f"beside: {scenario.name} alone: {row.delivered_per_s:,.0f} delivered/s")
        os.sync()
        written = served.data / "lake" / "messages"
        with pipeline(served.data) as pipe:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not list(written.glob("*.parquet")):
                pipe.check()
                if time.monotonic() > deadline:
                    raise MeasurementError("the pipeline does not begin to archive")
                time.sleep(PROBE_S)
            window: list[Mark] = []
            for scenario in scenarios:
                marks = Marks(served, pipe)
                row = run_load(served, MQTT_VERSION, scenario.load, seconds, 1.0, marks)
                window += [marks.start, marks.end]
                ratio = row.delivered_per_s / found[scenario.name]["alone"]["delivered_per_s"]
                shares = marks.shares(row.generator_cpu_share)
                found[scenario.name] |= {"beside": _row(row) | {"cpu_shares": shares}, "ratio": ratio}
                bench.say(
                    f"beside: {scenario.name} with the archive: {row.delivered_per_s:,.0f} delivered/s ({ratio:.2f}×);"
                    f" CPU: broker {shares['broker']:.2f}, pipeline {shares['pipeline']:.2f} cores"
                )
            archived = _written_rows(written, window[0].time_s, window[-1].time_s)
            pipe.check()
    archive_per_s = archived / (window[-1].time_s - window[0].time_s)
    bench.say(f"beside: {archive_per_s:,.0f} rows/s archived meanwhile")
    figures = {"archive_rows_per_s": archive_per_s}
    for name, each in found.items():
        figures[f"{name} alone_delivered_per_s"] = each["alone"]["delivered_per_s"]
        figures[f"{name} beside_delivered_per_s"] = each["beside"]["delivered_per_s"]
        figures[f"{name} ratio"] = each["ratio"]
    others = [each["beside"]["cpu_shares"]["others"] for each in found.values()]
    return {
        "figures": figures,
        "seconds": seconds,
        "niceness": NICENESS,
        "scenarios": found,
        "disturbed": max(others) > OTHER_CPU_SHARE_MAX or any(each["alone"]["disturbed"] for each in found.values()),
    }


def _copied(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("LOCK"))


def _row(row: Measurement) -> dict[str, Any]:
    return asdict(row) | {"disturbed": row.disturbed}


def _written_rows(folder: Path, start_s: float, end_s: float) -> int:
    """Rows of the files that workers finished in a window. Commits come once a round, too seldom to tell a rate; the
    files of a round come one by one."""
    rows = 0
    for path in folder.glob("*.parquet"):
        if start_s <= path.stat().st_mtime < end_s:
            try:
                rows += pq.read_metadata(path).num_rows
            except OSError:
                pass  # just being written
    return rows


# ── over time ──


def measure_timeline(bench: Bench) -> Found:
    """Traffic in steps; the log's end and the lake's, four times a second."""
    total_s = bench.sizes.seconds
    with broker(bench, "fsync") as served:
        assert served.data is not None
        log, lake = LogFolder(served.data / "log"), Lake(served.data / "lake")
        samples: list[tuple[float, int, int]] = []
        with pipeline(served.data) as pipe:
            bench.say("timeline: warming up")
            run_load(served, MQTT_VERSION, Load("pairs", 10, 10, 1, rate_per_s=5_000), WARM_S, 0)
            sampler = Repeating(SAMPLE_S, lambda: samples.append((time.monotonic(), log.end().position, lake.end())))
            with sampler:
                began = time.monotonic()
                steps: list[dict[str, Any]] = []
                for share, rate in STEPS:
                    seconds = share * total_s
                    words = "idle" if rate is None else "burst" if rate == 0 else f"{rate:,} msg/s"
                    bench.say(f"timeline: {words} for {seconds:.0f} s")
                    steps.append({"at_s": time.monotonic() - began, "words": words, "rate_per_s": rate})
                    if rate is None:
                        time.sleep(seconds)
                    else:
                        marks = Marks(served, pipe)
                        row = run_load(
                            served, MQTT_VERSION, Load("pairs", 10, 10, 1, rate_per_s=rate), seconds, 0, marks
                        )
                        steps[-1]["cpu_shares"] = marks.shares(row.generator_cpu_share)
                _until(lambda: bool(samples) and samples[-1][1] == samples[-1][2], sampler, pipe)
                time.sleep(2 * SAMPLE_S)  # so that the end can be seen
    rows = [(at - began, log_end, lake_end) for at, log_end, lake_end in samples]
    lags = [(at, log_end - lake_end) for at, log_end, lake_end in rows]
    burst = next(i for i, step in enumerate(steps) if step["rate_per_s"] == 0)
    before, after = steps[burst]["at_s"], steps[burst + 1]["at_s"]
    usual = max(lag for at, lag in lags if at < before)
    caught_up = next((at - after for at, lag in lags if at > after and lag <= usual), None)
    return {
        "figures": {
            "usual_lag_max": usual,
            "lag_max": max(lag for _, lag in lags),
            "caught_up_after_s": caught_up,
            "messages": rows[-1][1] - rows[0][1],
        },
        "steps": steps,
        "samples": {
            "at_s": [round(at, 3) for at, _, _ in rows],
            "log_end": [log_end for _, log_end, _ in rows],
            "lake_end": [lake_end for _, _, lake_end in rows],
        },
        "disturbed": any(step.get("cpu_shares", {}).get("others", 0) > OTHER_CPU_SHARE_MAX for step in steps),
    }


# ── replay ──


def measure_replay(bench: Bench) -> Found:
    """`tidegate replay` at full speed into an empty broker, with one subscriber to everything that counts."""
    expected = bench.sizes.replay_messages
    if Lake(bench.data / "lake").rows("messages") < expected:
        raise MeasurementError("there is no lake to replay from")
    runs = [_replay(bench, expected) for _ in range(RUNS)]
    best = max(runs, key=lambda run: run["per_s"])
    return {
        "figures": {
            "messages_per_s": best["per_s"],
            "broker_cpu_share": best["cpu_shares"]["broker"],
            "replay_cpu_share": best["cpu_shares"]["replay"],
        },
        "messages": expected,
        "median_per_s": statistics.median(run["per_s"] for run in runs),
        "runs": runs,
        "disturbed": best["cpu_shares"]["others"] > OTHER_CPU_SHARE_MAX,
    }


def _replay(bench: Bench, expected: int) -> dict[str, Any]:
    with broker(bench, "fsync") as served, _ended(_counter(served, expected)) as counter:
        assert counter.stderr is not None and counter.stdout is not None
        replay: subprocess.Popen[str] | None = None
        clocks: dict[str, tuple[float, float, float, float]] = {}
        complaints = []
        with contextlib.ExitStack() as stack:
            for line in counter.stderr:
                event = line.removeprefix("event ").strip()
                if event == line.strip():
                    complaints.append(event)
                elif event == "subscribed":
                    replay = stack.enter_context(_ended(_replaying(bench, served, expected)))
                elif replay is not None:
                    replay_s = process_tree_cpu_s(replay.pid)
                    clocks[event] = (time.monotonic(), served.cpu_s() or 0.0, replay_s, machine_cpu_s())
            output = counter.stdout.read()
            if counter.wait() and replay is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    complaints.append(replay.communicate(timeout=STOP_TIMEOUT_S)[1][-LOG_TAIL_BYTES:])
                raise MeasurementError(f"not all {expected:,} messages came: {output.strip()} {' '.join(complaints)}")
            if replay is None:
                raise MeasurementError(f"mqttcount could not subscribe: {' '.join(complaints)}")
            if replay.wait(STOP_TIMEOUT_S):
                raise MeasurementError(f"replay ended with code {replay.returncode}: {replay.communicate()[1][-500:]}")
    counted: dict[str, Any] = json.loads(output)
    first, last = clocks["first"], clocks["last"]
    own, sent, whole = ((last[i] - first[i]) / (last[0] - first[0]) for i in (1, 2, 3))
    subscriber = counted["cpu_s"] / counted["seconds"]
    others = max(0.0, whole - own - sent - subscriber)
    shares = {"broker": own, "replay": sent, "subscriber": subscriber, "others": others}
    bench.say(
        f"replay: {counted['per_s']:,.0f} msg/s, first message after {counted['first_after_s']:.1f} s;"
        f" CPU: replay {sent:.2f}, broker {own:.2f} cores"
    )
    return counted | {"cpu_shares": shares}


def _counter(served: Running, expected: int) -> subprocess.Popen[str]:
    command = [str(COUNTER), "--host", served.host, "--port", str(served.port), "--messages", str(expected)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _replaying(bench: Bench, served: Running, expected: int) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "tidegate.cli", "replay", "--data", str(bench.data), "--to", str(expected),
        "--speed", "max", "--host", served.host, "--port", str(served.port),
    ]  # fmt: skip
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, which does not outlive the `with`."""
    try:
        yield process
    finally:
        if process.poll() is None:
            _stop_tree(process)
