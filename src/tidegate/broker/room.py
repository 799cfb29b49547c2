"""How much the log may hold, and when it may not grow: the one place that knows.

The limit is log.hard_bytes, or what the disk has room for beside the reserve, if that is less. Above it goes whatever
may go (`housekeeping`). The log takes no more

    at the limit                 while its oldest segment is not in the lake: then nothing may go
    at half of the reserve       in any case: what goes does not go quickly enough, or others fill the disk

The reserve is what the lake and the snapshots are written with, without which nothing could be let go. The disk is
looked at once a second, and sooner when half of the room that there was has been used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# The reserve is no larger than this part of the disk: a small one would be nothing but reserve.
RESERVE_SHARE = 20

# While the log takes no more, the reserve counts as larger by this part: who is let in is not refused a second later.
SLACK_SHARE = 4

# What was dropped may become free only later: others have the file open, or the file system takes its time. For so long
# it is waited for, before more of what is not in the lake goes.
SETTLE_S = 30.0


class Room:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.limit_bytes = broker.config.log.hard_bytes  # what the log may hold, as of the last look
        self._left_bytes = 0  # what may be appended until the next one
        self._whole_bytes = 0  # what it holds, and what is free
        self._awaited = (-SETTLE_S, 0)  # when segments were dropped, and how much is more than without them

    def open(self) -> None:
        """Look for the first time, and say so if the disk is smaller than the configuration."""
        self.look()
        limits = self._broker.config.log
        if self.limit_bytes < limits.hard_bytes:
            disk = self._broker.log.disk()
            about = {
                "limit_bytes": max(0, self.limit_bytes),
                "hard_bytes": limits.hard_bytes,
                "free_bytes": disk.free_bytes,
                "reserve_bytes": self._reserve_bytes(disk.bytes),
                "why": "the disk has less room than log.hard_bytes",
            }
            self._broker.report("log.limited", about)

    def look(self, coming_bytes: int = 0) -> None:
        """Find the limit, and let the log refuse or go on. `coming_bytes` are about to be appended."""
        broker = self._broker
        archived, refusing, hard_bytes = broker.archived, bool(broker.storing.full), broker.config.log.hard_bytes
        disk = broker.log.disk()
        reserve_bytes = self._reserve_bytes(disk.bytes)
        kept_bytes = reserve_bytes + (reserve_bytes // SLACK_SHARE if refusing else 0)
        segments = broker.log.segments()
        held_bytes = sum(segment.bytes for segment in segments)
        self._whole_bytes = held_bytes + disk.free_bytes
        since_s, without_bytes = self._awaited
        awaited = self._whole_bytes <= without_bytes and broker.now_s - since_s < SETTLE_S and archived is None
        self.limit_bytes = hard_bytes if awaited else min(hard_bytes, self._whole_bytes - kept_bytes)

        # What is not in the lake yet is never let go.
        stuck = archived is not None and len(segments) > 1 and segments[0].sequence >= archived.segment
        least_bytes = kept_bytes if stuck or refusing else reserve_bytes // 2
        on_disk_bytes = disk.free_bytes - least_bytes - coming_bytes
        in_log_bytes = hard_bytes - held_bytes if stuck else on_disk_bytes
        self._left_bytes = min(on_disk_bytes, in_log_bytes) // 2  # indices and whole blocks take room as well
        full = ""
        if on_disk_bytes < 0:
            to_do = "see that the pipeline runs, or make room" if stuck else "make room"
            full = f"{disk.free_bytes} bytes are free on the disk, log.reserve_bytes keeps {reserve_bytes}: {to_do}"
        elif in_log_bytes < 0:
            full = f"the log may hold {hard_bytes} bytes (log.hard_bytes), and the pipeline has not archived its oldest"
        if bool(full) != refusing:
            broker.storing.limit(full)

    def spend(self, count: int) -> None:
        """So many bytes are about to be appended."""
        self._left_bytes -= count
        if self._left_bytes < 0:
            self.look(count)

    def dropped(self, count: int) -> None:
        """Segments of so many bytes have been let go."""
        self._awaited = self._broker.now_s, self._whole_bytes - count // 2

    def _reserve_bytes(self, disk_bytes: int) -> int:
        return min(self._broker.config.log.reserve_bytes, disk_bytes // RESERVE_SHARE)
