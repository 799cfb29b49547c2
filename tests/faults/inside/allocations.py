"""The most memory that a process's objects took between two moments, asked for by files in the folder ALLOCATIONS_IN:
`begin` starts a measurement, `end` has it written to `peak`, in bytes above what there was; each is then removed."""

# ruff: noqa: PTH108, PTH110, PTH123 (it brings nothing with it into the process)

import os
import threading
import time
import tracemalloc

_FOLDER = os.environ.get("ALLOCATIONS_IN", "")
_POLL_S = 0.01


def _answer() -> None:
    before = 0
    while True:
        time.sleep(_POLL_S)
        if os.path.exists(f"{_FOLDER}/begin"):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            os.unlink(f"{_FOLDER}/begin")
        if os.path.exists(f"{_FOLDER}/end"):
            with open(f"{_FOLDER}/peak", "w") as file:
                file.write(str(tracemalloc.get_traced_memory()[1] - before))
            os.unlink(f"{_FOLDER}/end")


def install() -> None:
    if _FOLDER:
        tracemalloc.start()
        threading.Thread(target=_answer, daemon=True).start()
