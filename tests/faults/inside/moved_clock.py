"""The system's clock, moved while the process runs: the file CLOCK_MOVED_BY holds by how many seconds. Only the time of
day is moved; the monotonic clock goes on, as it does when somebody sets a machine's clock."""

# ruff: noqa: PTH123 (it brings nothing with it into the process)

import os
import time

_FILE = os.environ.get("CLOCK_MOVED_BY", "")


def _moved_by() -> float:
    try:
        with open(_FILE) as file:
            return float(file.read() or 0)
    except FileNotFoundError:
        return 0.0


def install() -> None:
    if not _FILE:
        return
    real_s, real_ns, real_clock = time.time, time.time_ns, time.clock_gettime
    time.time = lambda: real_s() + _moved_by()
    time.time_ns = lambda: real_ns() + int(_moved_by() * 1e9)
    time.clock_gettime = lambda clock: real_clock(clock) + (_moved_by() if clock == time.CLOCK_REALTIME else 0.0)
