"""The commit log port on `log.files.SegmentedLog` or `log.memory.MemoryLog`.

Appending is a write(2) on the loop's thread. Everything that can wait for the disk (fdatasync, reads, snapshots,
deleting) happens on two threads: one syncs, one does the rest, so that a slow read never delays an acknowledgement.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tidegate.errors import StorageError
from tidegate.log.files import SegmentedLog
from tidegate.log.frame import encode_changes, encode_messages
from tidegate.log.index import Wanted
from tidegate.log.memory import MemoryLog
from tidegate.log.reading import Read
from tidegate.log.recovery import Damage
from tidegate.log.run import Run
from tidegate.log.segment import SegmentFacts
from tidegate.log.snapshot import SnapshotWriter, load_snapshot, snapshot_positions
from tidegate.ports.commitlog import Snapshot


class EmbeddedLog:
    def __init__(
        self,
        store: SegmentedLog | MemoryLog,
        *,
        wait_for_disk: bool,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[StorageError], None],
    ) -> None:
        self._store = store
        self._folder: Path | None = store.folder if isinstance(store, SegmentedLog) else None
        self._wait_for_disk = wait_for_disk
        self._loop = loop
        self._on_failure = on_failure
        self._ticket = 0
        self.stored = 0
        self.end = store.end
        self.on_stored: Callable[[], None] = lambda: None
        self.report: list[Damage] = store.report
        self._appended_bytes = 0
        self._synced_bytes = 0
        self._syncing = False
        self._sync_requests: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidegate-disk")
        self._syncer = threading.Thread(target=self._sync_forever, name="tidegate-sync", daemon=True)
        self._syncer.start()

    @property
    def floor(self) -> int:
        return self._store.floor

    @property
    def unstored_bytes(self) -> int:
        return self._appended_bytes - self._synced_bytes if self._wait_for_disk else 0

    # ── appending ──

    def append(self, runs: Sequence[Run], changes: Sequence[bytes], time_ms: int) -> int:
        base = self.end
        end = base
        entries: list[tuple[int, int, int, Collection[bytes] | None]] = []
        frames = b""
        if runs:
            if len(runs) == 1:
                end += runs[0].count
                topics: Collection[bytes] = (runs[0].topic,)
            else:
                end += sum([run.count for run in runs])
                topics = dict.fromkeys([run.topic for run in runs])
            frames = encode_messages(runs, base, time_ms, followed=bool(changes), topics=topics)
            entries.append((0, base, end - base, topics))
        if changes:
            entries.append((len(frames), end, len(changes), None))
            frames += encode_changes(changes, end, time_ms)
        self._store.append(frames, end, entries)
        self.end = end
        self._appended_bytes += len(frames)
        self._ticket += 1
        if not self._wait_for_disk:
            self.stored = self._ticket
        return self._ticket

    def skip(self, positions: int) -> None:
        self.end += positions

    def commit(self) -> None:
        """Sync on the other thread; while one is under way, everything appended shares the next."""
        if not self._syncing and self._wait_for_disk:
            self._syncing = True
            self._sync_requests.put((self._ticket, self._appended_bytes))

    def close_sealed(self) -> None:
        """For durability "os": sealed segments are synced too. The active one is left to the kernel, because
        appending to a file waits while it is being synced."""
        if not self._wait_for_disk:
            self._worker.submit(self._store.sync_sealed)

    def _sync_forever(self) -> None:
        while (request := self._sync_requests.get()) is not None:
            try:
                self._store.sync()
            except StorageError as error:
                self._call(self._on_failure, error)
                return
            self._call(self._synced, *request)

    def sync_now(self) -> None:
        """Wait for the disk; not on the loop's thread while clients are served."""
        self._store.sync()

    def _synced(self, ticket: int, appended_bytes: int) -> None:
        self._syncing = False
        self._synced_bytes = appended_bytes
        if self._wait_for_disk:
            self.stored = ticket
            self.on_stored()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    # ── reading ──

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        def work() -> None:
            try:
                found = self._store.read(position, bytes_max=bytes_max, wanted=wanted, end=end)
            except (OSError, StorageError):
                # Unreadable is lost for this reader; it goes on behind it and the loss is counted.
                found = Read([], end, end - position)
            self._call(done, found)

        self._worker.submit(work)

    def position_at_time(self, time_ms: int, found: Callable[[int], None]) -> tuple[int, bool]:
        return self._store.position_at_time(time_ms), True

    # ── state ──

    def state(self) -> Iterator[list[bytes]]:
        position = 0
        if self._folder is not None:
            position, frames, damage = load_snapshot(self._folder)
            yield from frames
            self.report += damage
            if damage:
                position = 0  # what the snapshot lost may still stand in the log; the rest is replayed to the same end
        yield from self._store.changes_from(position)

    def snapshot(self) -> Snapshot:
        return FileSnapshot(self, self._folder, self.end)

    def snapshot_floor(self) -> int:
        if self._folder is None:
            return self.end  # state in memory is not rebuilt
        positions = snapshot_positions(self._folder)
        return positions[-1] if positions else 0

    # ── keeping house ──

    def segments(self) -> list[SegmentFacts]:
        return self._store.segments()

    def topics(self, segment: SegmentFacts) -> Iterator[bytes]:
        return self._store.topics(segment)

    def drop(self, segments: Sequence[SegmentFacts]) -> None:
        self._worker.submit(self._store.drop, segments)

    def close(self) -> None:
        self._sync_requests.put(None)
        self._worker.shutdown()
        self._syncer.join()
        self._store.close(clean=True)


class FileSnapshot:
    def __init__(self, log: EmbeddedLog, folder: Path | None, position: int) -> None:
        self._log = log
        self._writer = SnapshotWriter(folder, position) if folder is not None else None

    def add(self, records: Sequence[bytes]) -> None:
        if self._writer is not None:
            self._writer.add(records)

    def commit(self, done: Callable[[bool], None]) -> None:
        writer = self._writer
        if writer is None:
            self._log._loop.call_soon(done, True)
            return

        def work() -> None:
            try:
                self._log.sync_now()  # a snapshot must not know what the log could still lose
                writer.commit()
            except StorageError:
                writer.abort()
                self._log._call(done, False)
            else:
                self._log._call(done, True)

        self._log._worker.submit(work)

    def commit_now(self) -> None:
        """For the last one, when the loop is about to end."""
        if self._writer is not None:
            self._log.sync_now()
            self._writer.commit()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
