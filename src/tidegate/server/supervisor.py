"""`tidegate up`: the broker and the pipeline, each in a process of its own, and this one watching over both.

What dies is started again, after pauses that grow until it has run well for a while:

    ended by                            broker                      pipeline
    a signal, or an exit code           is started again            is started again
    exit code 2, see `exit_codes`       all ends, with that code    is started again
    exit code 0: somebody stopped it    all ends                    stays stopped

The broker is what counts: the pipeline is started when the broker listens, runs at a lower priority, and is the first
to go when memory runs out. It reads the log's files, and goes on while the broker is away. When this process is killed,
the kernel tells both to stop; Spark's JVM goes with the Python process that holds its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tidegate.exit_codes import REFUSED
from tidegate.pipeline.status import read_status
from tidegate.server.backoff import Backoff
from tidegate.server.listening import Address, Announce, announced

LOG_NAME, OLD_LOG_NAME = "log.txt", "log.old.txt"
LOG_BYTES_MAX = 8 << 20
TAIL_BYTES = 64 << 10  # of the pipeline's log, in which the reason of its end is looked for
REASON_CHARS_MAX = 300

LOOK_S = 1.0  # between two looks at the pipeline's status and log
SOON_S = 0.05  # between two looks whether the broker listens
SETTLED_S = 60.0  # what ran so long was well; the next pause is the shortest again
STOP_S = 30.0  # how long the pipeline may take to finish its step; what it has not committed it does again

NICENESS = 10
OOM_SCORE = "500"  # the kernel's out-of-memory killer takes the highest

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
WATCHED = STOP_SIGNALS | {signal.SIGCHLD}
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Supervisor:
    """`pipeline` None: the broker alone. `welcome` is told the first time that the broker listens, `announce` each."""

    def __init__(
        self,
        broker: Sequence[str],
        pipeline: Sequence[str] | None,
        data: Path,
        *,
        welcome: Announce,
        announce: Announce,
        retry_min_s: float = 1.0,
        retry_max_s: float = 60.0,
    ) -> None:
        self._broker = _Broker(broker, Backoff(retry_min_s, retry_max_s, SETTLED_S))
        self._pipeline = _Pipeline(pipeline, data, Backoff(retry_min_s, retry_max_s, SETTLED_S)) if pipeline else None
        self._welcome, self._announce = welcome, announce
        self._greeted = False

    def run(self) -> int:
        """Until a signal says stop, or the broker is not to be started again; the broker's exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # they wait until they are asked for
        self._broker.start()
        while not self._broker.over:
            caught = signal.sigtimedwait(WATCHED, LOOK_S if self._broker.listens else SOON_S)
            if caught is not None and caught.si_signo in STOP_SIGNALS:
                break
            address = self._broker.tend()
            if address is not None:
                self._greet(address)
            if self._greeted and self._pipeline is not None:
                self._pipeline.tend()
        return self._stop()

    def _greet(self, address: Address) -> None:
        first, self._greeted = not self._greeted, True
        with contextlib.suppress(OSError):  # nobody reads it
            if first:
                self._welcome(address)
            self._announce(address)

    def _stop(self) -> int:
        """Both end; a second signal ends them at once, which loses nothing that was acknowledged or archived."""
        broker, pipeline = self._broker.process, self._pipeline.process if self._pipeline is not None else None
        processes = [process for process in (broker, pipeline) if process is not None]
        for process in processes:
            process.terminate()  # does nothing to one that has ended
        deadline_s = time.monotonic() + STOP_S
        while any(process.poll() is None for process in processes):
            caught = signal.sigtimedwait(WATCHED, LOOK_S)
            again = caught is not None and caught.si_signo in STOP_SIGNALS
            if pipeline is not None and (again or time.monotonic() > deadline_s):
                pipeline.kill()
            if again and broker is not None:
                broker.kill()
        code = self._broker.code if broker is None else broker.wait()
        return code if code >= 0 else 128 - code  # as a shell says that a signal ended it


# ── the broker ──


class _Broker:
    def __init__(self, command: Sequence[str], backoff: Backoff) -> None:
        self._command = command
        self._backoff = backoff
        self.process: subprocess.Popen[bytes] | None = None
        self.code = 0  # of the last one that ended
        self.over = False  # it is not to be started again
        self._due_s = 0.0  # when it is started, if it does not run
        self._listens_since_s: float | None = None
        self._pipe: int | None = None  # through which it says that it listens
        self._heard = b""
        self._port: int | None = None  # where it listened; one that asked for any port gets this one again

    @property
    def listens(self) -> bool:
        return self._listens_since_s is not None

    def start(self) -> None:
        self._pipe, child_end = os.pipe()
        os.set_blocking(self._pipe, False)
        self._heard = b""
        same = [f"--port={self._port}"] if self._port is not None else []
        try:
            self.process = _spawn([*self._command, f"--ready-fd={child_end}", *same], pass_fds=(child_end,))
        finally:
            os.close(child_end)

    def tend(self) -> Address | None:
        """Where it listens, if it has just said so."""
        now_s = time.monotonic()
        if self.process is None:
            if now_s >= self._due_s:
                self._start_again(now_s)
            return None
        code = self.process.poll()
        address = self._hear()
        if address is not None:
            self._listens_since_s, self._port = now_s, address.port
        if code is not None:
            self._ended(code, now_s)
        return address

    def _start_again(self, now_s: float) -> None:
        try:
            self.start()
        except OSError as error:  # no memory or no process number left, for now
            self._hang_up()
            pause_s = self._backoff.pause_s(0.0)
            say(f"the broker could not be started: {error.strerror}; it is tried again in {pause_s:g} s")
            self._due_s = now_s + pause_s

    def _hang_up(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _hear(self) -> Address | None:
        if self._pipe is None:
            return None
        try:
            part = os.read(self._pipe, 4096)
        except BlockingIOError:
            return None
        self._heard += part
        if part and not part.endswith(b"\n"):
            return None
        self._hang_up()
        return announced(self._heard)

    def _ended(self, code: int, now_s: float) -> None:
        went_well_s = 0.0 if self._listens_since_s is None else now_s - self._listens_since_s
        self.process, self._listens_since_s, self.code = None, None, code
        self._hang_up()
        if code == 0:
            say("the broker was stopped, and so is everything else")
            self.over = True
        elif code == REFUSED:
            say(f"the broker cannot run like this (exit code {code}): mend what it says, and start again", sys.stderr)
            self.over = True
        else:
            pause_s = self._backoff.pause_s(went_well_s)
            say(f"the broker {how_it_ended(code)}; it is started again in {pause_s:g} s")
            self._due_s = now_s + pause_s


# ── the pipeline ──


class _Pipeline:
    def __init__(self, command: Sequence[str], data: Path, backoff: Backoff) -> None:
        self._command = command
        self._data = data
        self._folder = data / "pipeline"
        self._log = self._folder / LOG_NAME
        self._backoff = backoff
        self.process: subprocess.Popen[bytes] | None = None
        self._due_s: float | None = 0.0  # when it is started; None: it runs, or is meant to be stopped
        self._started_s = 0.0
        self._log_start = 0  # where in its log this run begins
        self._running = False
        self._failing: set[str] = set()  # jobs
        self._trouble = ""  # why it could not be looked after, so that it is told once

    def tend(self) -> None:
        """A full disk, or a folder that is gone, is no reason to leave the broker alone."""
        now_s = time.monotonic()
        try:
            self._tend(now_s)
            self._trouble = ""
        except OSError as error:
            trouble = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
            if trouble != self._trouble:
                say(f"the pipeline cannot be looked after: {trouble}; it is tried again")
            self._trouble = trouble
            if self.process is None:
                self._due_s = now_s + self._backoff.pause_s(0.0)

    def _tend(self, now_s: float) -> None:
        if self.process is None:
            if self._due_s is not None and now_s >= self._due_s:
                self._start()
            return
        code = self.process.poll()
        if code is not None:
            self._ended(code, now_s)
            return
        self._listen(self.process.pid)
        if self._log.stat().st_size > LOG_BYTES_MAX:
            self._trim_log()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._started_s:
            if self._log.exists():
                self._log.replace(self._folder / OLD_LOG_NAME)
            say(f"the pipeline is starting; its log is {self._log}")
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self.process = _spawn(self._command, NICENESS, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.pid}/oom_score_adj").write_text(OOM_SCORE)
        self._started_s = time.monotonic()
        self._due_s = None
        self._running = False
        self._failing.clear()

    def _ended(self, code: int, now_s: float) -> None:
        self.process = None
        if code == 0:
            say("the pipeline was stopped; `tidegate pipeline run` starts it again")
            return
        pause_s = self._backoff.pause_s(now_s - self._started_s)
        say(f"the pipeline {how_it_ended(code)}{self._reason(code)}; it is started again in {pause_s:g} s")
        self._due_s = now_s + pause_s

    def _listen(self, pid: int) -> None:
        """Tells what the pipeline's status says, when it changes."""
        status = read_status(self._data)
        if status is None or status["pid"] != pid or status["state"] != "running":
            return
        if not self._running:
            self._running = True
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
            return ""
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
        if not errors:
            return f": {lines[-1].strip()[:REASON_CHARS_MAX]}" if lines else ""
        told = lines[errors[-1] : errors[-1] + 2]
        hint = f" ({told[1].removeprefix('hint: ')})" if len(told) == 2 and told[1].startswith("hint: ") else ""
        return f": {told[0].removeprefix('error: ')[:REASON_CHARS_MAX]}{hint[:REASON_CHARS_MAX]}"

    def _trim_log(self) -> None:
        """Kept once more, and begun anew under the hands of the processes that append to it."""
        shutil.copyfile(self._log, self._folder / OLD_LOG_NAME)
        os.truncate(self._log, 0)
        self._log_start = 0


# ── processes ──


def say(line: str, out: IO[str] | None = None) -> None:
    """Whether somebody reads it or not."""
    with contextlib.suppress(OSError):
        print(f"tidegate: {line}", file=out, flush=True)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def _spawn(command: Sequence[str], niceness: int = 0, **streams: Any) -> subprocess.Popen[bytes]:
    # In a session of its own, so that Ctrl-C reaches this process alone, which then stops both.
    return subprocess.Popen(command, preexec_fn=_tied_to(os.getpid(), niceness), start_new_session=True, **streams)


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
