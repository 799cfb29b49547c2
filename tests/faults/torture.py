"""kill -9 at random instants under load, again and again on one data folder (C1).

    python tests/faults/torture.py --seed 7 --kills 500 --durability fsync

The seed decides when the broker dies and what the clients do; it does not decide how the operating system
schedules them, so a failure may take several runs with its seed to come back. The data folder, the clients'
journals and the broker's log stay in `--folder`.

One stop in ten is a clean one, so that snapshots are taken and recovered from as well. One in ten comes while
the broker is still starting.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from torture_checker import Verdict, check  # noqa: E402

from harness import BrokerProcess  # noqa: E402

CLIENTS = Path(__file__).with_name("torture_clients.py")
# Small segments and a small tail: rolling, indexing and reading from disk happen all the time.
SETTINGS = {"log__segment_bytes": 65536, "log__tail_bytes": 65536, "sys__interval_s": 0}
LIFE_S = (0.02, 0.9)
START_S = 0.4
ANSWER_S = 180.0


@dataclass(slots=True)
class Run:
    folder: Path
    seed: int
    kills: int
    durability: str

    def __call__(self) -> Verdict:
        dice = random.Random(self.seed)
        broker = BrokerProcess(self.folder / "data", self.durability, **SETTINGS)
        broker.port = free_port(dice)
        broker.start()
        published, received = self.folder / "published.json", self.folder / "received.json"
        subscribers = self._clients("subscribers", broker.port, received)
        publishers: subprocess.Popen[str] | None = None
        try:
            answer(subscribers, "subscribed")
            publishers = self._clients("publishers", broker.port, published)
            killed = 0
            while killed < self.kills:
                killed += stop_somehow(broker, dice)
                assert publishers.poll() is None and subscribers.poll() is None, "the clients died"
                broker.start()
            answer(publishers, "finished", "finish")
            answer(subscribers, "drained", str(published))
            broker.kill()
            broker.start()
            answer(subscribers, "finished", "restarted")
        finally:
            for clients in filter(None, (publishers, subscribers)):
                if clients.poll() is None:
                    clients.kill()
                clients.communicate()
            if broker.alive:
                broker.stop()
        verdict = check(published, received, stored(broker.data))
        if (found := verify(broker.data)) is not None:
            verdict.faults.append(f"log verify: {found}")
        if "Traceback" in broker.log():
            verdict.faults.append("the broker's log has a traceback: " + traceback_of(broker.log()))
        return verdict

    def _clients(self, role: str, port: int, journal: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, str(CLIENTS), role, "--port", str(port)),
                *("--seed", str(self.seed), "--journal", str(journal)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def free_port(dice: random.Random) -> int:
    """Below the ports that the system gives to clients: one that connects while the broker is down could
    otherwise meet itself there, and keep the broker out."""
    while True:
        port = dice.randrange(20_000, 32_000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def stop_somehow(broker: BrokerProcess, dice: random.Random) -> bool:
    """Let the broker live for a moment, then end it: whether it was a kill."""
    kind = dice.random()
    time.sleep(dice.uniform(*LIFE_S))
    if kind < 0.1:
        assert broker.stop() == 0, broker.log()[-2000:]
        return False
    broker.kill()
    if kind < 0.2:
        begun = broker.spawn()
        time.sleep(dice.uniform(0, START_S))
        begun.kill()
        begun.communicate()
    return True


def answer(clients: subprocess.Popen[str], expected: str, command: str = "") -> None:
    assert clients.stdin is not None and clients.stdout is not None
    if command:
        clients.stdin.write(command + "\n")
        clients.stdin.flush()
    line = clients.stdout.readline().strip()
    assert line == expected, f"the clients said {line!r} instead of {expected!r}"


def stored(data: Path) -> list[dict[str, object]]:
    done = tidegate("log", "dump", "--data", str(data), "--filter", "t/#", "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def verify(data: Path) -> str | None:
    """What `tidegate log verify` finds wrong."""
    done = tidegate("log", "verify", "--data", str(data))
    return None if done.returncode == 0 and "unfinished" not in done.stdout else done.stdout + done.stderr


def tidegate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)


def traceback_of(log: str) -> str:
    at = log.index("Traceback")
    return log[at : at + 1500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--durability", choices=("os", "fsync"), default="fsync")
    parser.add_argument("--folder", type=Path, help="default: a new temporary one, kept")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {given.seed}, {given.kills} kills, durability {given.durability}, in {folder}", flush=True)
    began_s = time.monotonic()
    verdict = Run(folder, given.seed, given.kills, given.durability)()
    print(
        f"{verdict.acknowledged:,} acknowledged, {verdict.stored:,} stored, {verdict.delivered:,} delivered "
        f"in {time.monotonic() - began_s:.0f} s"
    )
    for fault in verdict.faults:
        print("FAULT", fault)
    sys.exit(1 if verdict.faults else 0)


if __name__ == "__main__":
    main()
