"""When what cannot be read counts as lost: one rule, for the log's files and for the lake's.

    it was read and does not check out; it is missing    lost
    the device fails (`DEVICE_ERRORS`)                   lost once that has lasted for `LOST_AFTER_S`: cables, paths and
                                                         controllers come back
    anything else                                        never, however long it lasts: the system is short of something
                                                         or somebody said no, and the bytes are where they were

An error without a number is a library's complaint about content.
"""

from __future__ import annotations

import errno
import time

DEVICE_ERRORS = frozenset((errno.EIO, errno.EUCLEAN, errno.EBADMSG))  # the last two: a file system's own checksums

LOST_AFTER_S = 180.0

# Whoever wants something asks again every few seconds: a device that was not heard of for so long had been well.
FORGOTTEN_S = 60.0


class Ailing:
    """How long a file's device has been failing. `place` is where in the file it did first: only when that can be read
    has it passed, for the rest of the file may have been well all the time."""

    __slots__ = ("_last_s", "_place", "_since_s")

    def __init__(self) -> None:
        self._place: int | None = None
        self._since_s = self._last_s = 0.0

    def is_lost(self, error: OSError, place: int = 0) -> bool:
        """Whether what could not be read is to be counted as lost, or asked for again."""
        if error.errno is None:
            return True
        if error.errno not in DEVICE_ERRORS:
            return False
        now_s = time.monotonic()
        if self._place is None or now_s - self._last_s > FORGOTTEN_S:
            self._place, self._since_s = place, now_s
        self._last_s = now_s
        return now_s - self._since_s >= LOST_AFTER_S

    def was_read(self, place: int = 0) -> None:
        if place == self._place:
            self._place = None
