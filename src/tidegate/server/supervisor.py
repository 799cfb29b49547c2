"""`tidegate up`: the broker and the pipeline, each in a process of its own, and this one watching over both.

The broker is what counts: the pipeline runs at a lower priority, is the first to go when memory runs out, and is
started again when it dies, after pauses that grow. When the broker ends, all ends, with its exit code. When this
process is killed, the kernel tells both to stop; Spark's JVM goes with the Python process that holds its standard
input.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidegate.pipeline.status import read_status

LOG_NAME, OLD_LOG_NAME = "log.txt", "log.old.txt"
LOG_BYTES_MAX = 8 << 20
TAIL_BYTES = 64 << 10  # of the pipeline's log, in which the reason of its end is looked for
REASON_CHARS_MAX = 300

LOOK_S = 1.0  # between two looks at the pipeline's status and log
HEADSTART_S = 1.0  # a broker that cannot start has said so by then, and that is all the user should read
SETTLED_S = 60.0  # a pipeline that ran so long was well; the next pause is the shortest again
STOP_S = 30.0  # how long the pipeline may take to finish its step; what it has not committed it does again

NICENESS = 10
OOM_SCORE = "500"  # the kernel's out-of-memory killer takes the highest

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
WATCHED = STOP_SIGNALS | {signal.SIGCHLD}
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Supervisor:
    def __init__(
        self,
        broker: Sequence[str],
        pipeline: Sequence[str],
        data: Path,
        *,
        retry_min_s: float = 1.0,
        retry_max_s: float = 60.0,
    ) -> None:
        self._broker_command, self._pipeline_command = broker, pipeline
        self._data = data
        self._folder = data / "pipeline"
        self._retry_min_s, self._retry_max_s = retry_min_s, retry_max_s
        self._pipeline: subprocess.Popen[bytes] | None = None
        self._due_s: float | None = None  # when the pipeline is started; None: it runs, or is meant to be stopped
        self._pause_s = retry_min_s
        self._started_s = 0.0
        self._log_start = 0  # where in its log this run of the pipeline begins
        self._running = False
        self._failing: set[str] = set()  # jobs
        self._said = ""  # the reason last given for an end, which is not repeated

    def run(self) -> int:
        """Until the broker ends; its exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # they wait until they are asked for
        broker = self._spawn(self._broker_command)
        self._due_s = time.monotonic() + HEADSTART_S
        while broker.poll() is None:
            self._tend()
            caught = signal.sigtimedwait(WATCHED, LOOK_S)
            if caught is not None and caught.si_signo in STOP_SIGNALS:
                broker.terminate()
                break
        return self._stop(broker)

    def _spawn(self, command: Sequence[str], niceness: int = 0, **streams: Any) -> subprocess.Popen[bytes]:
        # In a session of its own, so that Ctrl-C reaches this process alone, which then stops both.
        return subprocess.Popen(
            command, preexec_fn=_tied_to(os.getpid(), niceness), start_new_session=True, **streams
        )

    def _stop(self, broker: subprocess.Popen[bytes]) -> int:
        """Both end; a second signal ends them at once, which loses nothing that was acknowledged or archived."""
        pipeline = self._pipeline
        if pipeline is not None and pipeline.poll() is None:
            pipeline.terminate()
        deadline_s = time.monotonic() + STOP_S
        while broker.poll() is None or (pipeline is not None and pipeline.poll() is None):
            caught = signal.sigtimedwait(WATCHED, LOOK_S)
            again = caught is not None and caught.si_signo in STOP_SIGNALS
            if pipeline is not None and (again or time.monotonic() > deadline_s):
                pipeline.kill()
            if again:
                broker.kill()
        code = broker.wait()
        return code if code >= 0 else 128 - code  # as a shell says that a signal ended it

    # ── the pipeline ──

    def _tend(self) -> None:
        now_s = time.monotonic()
        if self._pipeline is None:
            if self._due_s is not None and now_s >= self._due_s:
                self._start()
            return
        code = self._pipeline.poll()
        if code is not None:
            self._ended(code, now_s)
            return
        self._listen()
        if now_s - self._started_s > SETTLED_S:
            self._pause_s = self._retry_min_s
        if self._log.stat().st_size > LOG_BYTES_MAX:
            self._trim_log()

    @property
    def _log(self) -> Path:
        return self._folder / LOG_NAME

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._started_s:
            if self._log.exists():
                self._log.replace(self._folder / OLD_LOG_NAME)
            say(f"the pipeline is starting; its log is {self._log}")
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._pipeline = self._spawn(
                self._pipeline_command, NICENESS, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._pipeline.pid}/oom_score_adj").write_text(OOM_SCORE)
        self._started_s = time.monotonic()
        self._due_s = None
        self._running = False
        self._failing.clear()

    def _ended(self, code: int, now_s: float) -> None:
        self._pipeline = None
        if code == 0:
            say("the pipeline was stopped; `tidegate pipeline run` starts it again")
            return
        reason = self._reason(code)
        if reason != self._said:
            say(f"the pipeline ended: {reason}; it is started again in {self._pause_s:g} s")
            self._said = reason
        self._due_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._retry_max_s)

    def _listen(self) -> None:
        """Tells what the pipeline's status says, when it changes."""
        assert self._pipeline is not None
        status = read_status(self._data)
        if status is None or status["pid"] != self._pipeline.pid or status["state"] != "running":
            return
        if not self._running:
            self._running = True
            self._said = ""
            say(f"the pipeline runs, on Spark at {status['spark_master']}")
        for name, job in status["jobs"].items():
            if job["state"] == "failing" and name not in self._failing:
                self._failing.add(name)
                say(f"the pipeline's job {name} fails and is tried again: {job['last_error']}")
            elif job["state"] != "failing" and name in self._failing:
                self._failing.remove(name)
                say(f"the pipeline's job {name} works again")

    def _reason(self, code: int) -> str:
        """The last error in its log, with the hint below it; its last line if there is none."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
        if not errors:
            return lines[-1].strip()[:REASON_CHARS_MAX] if lines else f"exit code {code}"
        told = lines[errors[-1] : errors[-1] + 2]
        hint = f" ({told[1].removeprefix('hint: ')})" if len(told) == 2 and told[1].startswith("hint: ") else ""
        return told[0].removeprefix("error: ")[:REASON_CHARS_MAX] + hint[:REASON_CHARS_MAX]

    def _trim_log(self) -> None:
        """Kept once more, and begun anew under the hands of the processes that append to it."""
        shutil.copyfile(self._log, self._folder / OLD_LOG_NAME)
        os.truncate(self._log, 0)
        self._log_start = 0


def say(line: str) -> None:
    print(f"tidegate: {line}", flush=True)


def _tied_to(parent: int, niceness: int) -> Callable[[], None]:
    """Runs in the new process before its program: it is told to stop when the parent is gone."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def tie() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # it went before it could be watched
        os.nice(niceness)

    return tie
