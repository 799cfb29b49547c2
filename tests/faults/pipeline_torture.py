"""kill -9 of the pipeline's driver, of Spark's Java, of a Python worker and of the broker, at random instants under
load, again and again on one data folder (C11).

    python tests/faults/pipeline_torture.py --seed 7 --kills 30 --trim

The seed decides who dies when; it does not decide how the operating system schedules them. `--trim` keeps the hot
log so small that the broker deletes what has been archived all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parents[1])]

from pipeline_checker import check  # noqa: E402
from torture import CLIENTS, SETTINGS, answer, free_port, stored, traceback_of, verify  # noqa: E402
from torture_checker import Verdict  # noqa: E402

from harness import BrokerProcess, RawClient  # noqa: E402
from tidegate.log.segment import sequence_of  # noqa: E402

DRIVER = Path(__file__).with_name("pipeline_driver.py")
TRIM = {"log__retention_bytes": 1 << 20}
FIRST = ("worker", "driver", "broker", "worker", "java", "broker")
"""A short run has those, of which only two make Spark start again; a longer one goes on with:"""
KINDS = ("worker", "driver", "broker", "java", "both", "stop")
LIFE_S = (0.0, 3.0)
START_S = 120.0
DRAIN_S = 300.0


class DriverProcess:
    """The driver and what it starts, with a log of its own."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.log_path = data.parent / "driver.log"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen([sys.executable, str(DRIVER), str(self.data)], stderr=log, text=True)

    def once(self) -> list[str]:
        """Everything that there is to do, and what the data tests find then."""
        with self.log_path.open("a") as log:
            done = subprocess.run(
                [sys.executable, str(DRIVER), str(self.data), "--once"],
                stdout=subprocess.PIPE, stderr=log, text=True, timeout=DRAIN_S, check=False,
            )  # fmt: skip
        if done.returncode:
            return [f"--once ended with {done.returncode}: {self.log()[-1500:]}"]
        found: list[str] = json.loads(done.stdout)
        return found

    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def until_running(self) -> None:
        """Until it has taken a step, or has ended by itself."""
        assert self.process is not None
        deadline_s = time.monotonic() + START_S
        status = self.data / "pipeline" / "status.json"
        while self.process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                told = json.loads(status.read_text())
                if told["pid"] == self.pid and told["state"] == "running" and told["jobs"]["archive"]["rows"]:
                    return
            assert time.monotonic() < deadline_s, f"the driver does not come to work: {self.log()[-2000:]}"
            time.sleep(0.05)

    def below(self, name: str) -> list[psutil.Process]:
        """Spark's processes: `java`, or `pyspark.daemon` for the workers; all without a name."""
        found: list[psutil.Process] = []
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                found += [child] if any(name in word for word in child.cmdline()) else []
        return found

    def kill(self) -> None:
        """kill -9 of the driver itself. What it has started may live on for a moment."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_below(self, name: str) -> int:
        """kill -9 of processes below it: how many there were."""
        found = self.below(name)
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.kill()
        return len(found)

    def stop(self, everybody: bool = False) -> int:
        """SIGTERM, as `tidegate pipeline stop` sends it; to `everybody`, as systemd and a terminal do."""
        assert self.process is not None
        others = self.below("") if everybody else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        for each in others:
            with contextlib.suppress(psutil.Error):
                each.terminate()
        return self.process.wait(START_S)


@dataclass(slots=True)
class Run:
    folder: Path
    seed: int
    kills: int
    trim: bool = False
    killed: list[str] = field(default_factory=list)
    trimmed: int = 0  # segments that the broker deleted

    def __call__(self) -> Verdict:
        dice = random.Random(self.seed)
        broker = BrokerProcess(self.folder / "data", "os", **SETTINGS, **(TRIM if self.trim else {}))
        broker.port = free_port(dice)
        broker.start()
        away = subscribed(broker)
        driver = DriverProcess(broker.data)
        published = self.folder / "published.json"
        publishers = subprocess.Popen(
            [
                *(sys.executable, str(CLIENTS), "publishers", "--port", str(broker.port)),
                *("--seed", str(self.seed), "--journal", str(published)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        faults: list[str] = []
        try:
            driver.start()
            kinds = kinds_of(self.kills, dice)
            while kinds:
                driver.until_running()
                time.sleep(dice.uniform(*LIFE_S))
                if self._end_one(kinds[0], broker, driver, dice):
                    self.killed.append(kinds.pop(0))
                assert publishers.poll() is None, "the publishers died"
            driver.until_running()
            answer(publishers, "finished", "finish")
            faults += missed(broker, away, published)
            self.trimmed = first_segment(broker.data) - 1
            if (code := broker.stop()) != 0:
                faults.append(f"the broker ended with {code} when it was told to stop")
            if (code := driver.stop()) != 0:
                faults.append(f"the driver ended with {code} when it was told to stop")
        finally:
            if publishers.poll() is None:
                publishers.kill()
            publishers.communicate()
            if driver.process is not None and driver.process.poll() is None:
                driver.kill()
            if broker.alive:
                broker.stop()
        faults += driver.once()
        verdict = check(broker.data, published, stored(broker.data), whole=not self.trim)
        verdict.faults += faults
        if (found := verify(broker.data)) is not None:
            verdict.faults.append(f"log verify: {found}")
        if "Traceback" in broker.log():
            verdict.faults.append("the broker's log has a traceback: " + traceback_of(broker.log()))
        return verdict

    def _end_one(self, kind: str, broker: BrokerProcess, driver: DriverProcess, dice: random.Random) -> bool:
        """Whether it could be done."""
        match kind:
            case "worker":  # several times, or it would hardly ever be one that is at work
                found = 0
                for _ in range(8):
                    time.sleep(dice.uniform(0, 0.2))
                    found += driver.kill_below("pyspark.daemon")
                return found > 0
            case "broker":
                broker.kill()
                broker.start()
                return True
            case "java":
                driver.kill_below("java")
                assert driver.process is not None
                code = driver.process.wait(START_S)
                assert code == 1, f"the driver ended with {code} when Java was killed: {driver.log()[-1500:]}"
            case "stop":
                assert driver.stop(everybody=True) == 0, driver.log()[-1500:]
            case _:
                driver.kill()
                if kind == "both":
                    broker.kill()
                    broker.start()
        driver.start()
        if dice.random() < 0.2:
            time.sleep(dice.uniform(0, 8))
            driver.kill()  # while it starts
            driver.start()
        return True


def kinds_of(kills: int, dice: random.Random) -> list[str]:
    rounds = [*FIRST]
    while len(rounds) < kills:
        rounds += dice.sample(KINDS, len(KINDS))
    return rounds[:kills]


def subscribed(broker: BrokerProcess) -> str:
    """A session that is away from now on."""
    with RawClient(broker.port) as client:
        client.connect("away", clean=False)
        client.subscribe("t/#", qos=1)
        client.disconnect()
    return "away"


def missed(broker: BrokerProcess, name: str, published: Path) -> list[str]:
    """What the session does not get when it returns, of all that was acknowledged while it was away."""
    owed = {payload for each in json.loads(published.read_text()) for _, payload in each["acknowledged"]}
    with RawClient(broker.port, timeout_s=60.0) as client:
        client.connect(name, clean=False)
        while owed:
            try:
                owed.discard(client.message().payload.decode())
            except TimeoutError:
                return [f"{len(owed)} messages never came to a session that was away, such as {min(owed)}"]
        client.disconnect()
    return []


def first_segment(data: Path) -> int:
    return min(sequence_of(path.name) or 0 for path in (data / "log").glob("*.log"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--trim", action="store_true")
    parser.add_argument("--folder", type=Path, help="default: a new temporary one, kept")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {given.seed}, {given.kills} kills, in {folder}", flush=True)
    run = Run(folder, given.seed, given.kills, given.trim)
    verdict = run()
    print(f"killed {', '.join(run.killed)}; {run.trimmed} segments trimmed")
    print(f"{verdict.acknowledged:,} acknowledged, {verdict.stored:,} in the lake")
    for fault in verdict.faults:
        print("FAULT", fault)
    sys.exit(1 if verdict.faults else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
