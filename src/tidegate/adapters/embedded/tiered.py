"""The embedded log continued into the lake: one log, whose older part is read from the archive.

The seam is the hot log's floor. It only ever moves up, whenever segments that the lake holds are dropped; a read
belongs to one side of it and never crosses. What was read from segments that were dropped meanwhile is read again,
from the lake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidegate.adapters.embedded.archive import LakeArchive
from tidegate.adapters.embedded.asking_again import Report
from tidegate.adapters.embedded.commitlog import EmbeddedLog, unheard
from tidegate.errors import StorageError
from tidegate.log.files import SegmentedLog
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.ports.archive import NOTHING


class TieredLog(EmbeddedLog):
    def __init__(
        self,
        store: SegmentedLog,
        archive: LakeArchive,
        *,
        wait_for_disk: bool,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[StorageError], None],
        report: Report = unheard,
    ) -> None:
        super().__init__(store, wait_for_disk=wait_for_disk, loop=loop, on_failure=on_failure, report=report)
        self._archive = archive

    @property
    def floors(self) -> tuple[int, ...]:
        return (min(self.seam, self._archive_floor()),)

    @property
    def seam(self) -> int:
        """Below it messages come from the lake."""
        return self._store.floor

    def _archive_floor(self) -> int:
        """The lowest position of the lake if it reaches up to the hot log without a gap."""
        archived = self._archive.archived
        first = self._store.first
        if archived is None or first is None or archived.segment < first.sequence:
            return NOTHING
        return archived.floor

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        if self._archive_floor() <= position < self.seam:
            self._archive.read(position, min(end, self.seam), bytes_max, wanted, done)
            return

        def check(found: Read) -> None:
            if self._archive_floor() <= position < self.seam:
                self.read(position, end, bytes_max, wanted, done)  # dropped before it was read, or since
            else:
                done(found)

        super().read(position, end, bytes_max, wanted, check)

    def positions_at_time(self, time_ms: int, found: Callable[[list[int]], None]) -> tuple[list[int], bool]:
        first = self._store.first
        in_hot_log = first is not None and 0 < first.first_time_ms < time_ms
        earlier = self._archive.before(time_ms)
        if in_hot_log or earlier is None or not self._archive_floor() <= earlier < self.seam:
            return super().positions_at_time(time_ms, found)

        def sought(position: int | None) -> None:
            if position is not None:
                found([position])
                return
            positions, known = super(TieredLog, self).positions_at_time(time_ms, found)
            if known:
                found(positions)

        self._archive.seek(time_ms, sought)
        return [earlier], False

    def close(self) -> None:
        self._archive.close()
        super().close()
