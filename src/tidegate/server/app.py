"""The broker as a process: opens the log, recovers, listens, and stops cleanly on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import uvloop

from tidegate.adapters.embedded.archive import LakeArchive
from tidegate.adapters.embedded.commitlog import EmbeddedLog, FileSnapshot
from tidegate.adapters.embedded.tiered import TieredLog
from tidegate.broker.core import Broker
from tidegate.broker.housekeeping import Housekeeping, state_records
from tidegate.broker.recover import Recovery
from tidegate.broker.sys_topics import SysTopics
from tidegate.config import Config
from tidegate.errors import StorageError
from tidegate.log.files import SegmentedLog
from tidegate.log.memory import MemoryLog
from tidegate.server.clock import Clock
from tidegate.server.connection import Connection
from tidegate.server.progress import Progress
from tidegate.wire import Reason

log = logging.getLogger("tidegate")

OFTEN_S = 0.1
BUSY_S = 0.01  # while a snapshot is being written
QUIET_S = 50e-6  # since the last tick; about what a tick of one message and its system calls take
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
DRAIN_S = 5.0  # how long a stop waits for connections to take their last bytes


def run(config: Config) -> int:
    """Run until told to stop; the exit code."""
    line = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=config.log_level.upper(), format=line, stream=sys.stderr)
    _keep_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Server(config).serve())


def _keep_memory() -> None:
    """Each tick takes and gives back buffers of some hundred kilobytes. glibc would return them to the kernel and
    fault them in again every time, which costs a third of the time to encode a large frame."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 256 << 20)
        mallopt(M_MMAP_THRESHOLD, 32 << 20)


class Server:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.stopping = asyncio.Event()
        self.exit_code = 0
        self.connections: set[Connection] = set()

    async def serve(self) -> int:
        self.loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stopping.set)
        store = self._open_store()
        try:
            self._start(store)
            server = await self.loop.create_server(
                lambda: Connection(self.broker, self.connections),
                self.config.listen.host,
                self.config.listen.port,
                reuse_address=True,
                backlog=4096,
            )
        except BaseException:
            store.close(clean=False)
            raise
        host, port = server.sockets[0].getsockname()[:2]
        print(f"tidegate: listening on {host}:{port}, data in {self._where()}", flush=True)
        self._ticker = self.loop.call_later(OFTEN_S, self._often)
        await self.stopping.wait()
        await self._stop(server)
        return self.exit_code

    def _where(self) -> str:
        return "memory" if self.config.log.durability == "memory" else str(self.config.data)

    def _open_store(self) -> SegmentedLog | MemoryLog:
        limits = self.config.log
        if limits.durability == "memory":
            return MemoryLog(limits.retention_bytes)
        with Progress() as progress:
            return SegmentedLog.open(
                self.config.data / "log", segment_bytes=limits.segment_bytes, progress=progress.of
            )

    def _start(self, store: SegmentedLog | MemoryLog) -> None:
        segments = store.segments()
        self.clock = Clock(time.monotonic, time.time, segments[-1].last_time_ms if segments else 0)
        self.archive: LakeArchive | None = None
        self.log = self._tiered(store) if isinstance(store, SegmentedLog) else self._in_memory(store)
        self.broker = Broker(
            self.config,
            self.log,
            self.archive,
            now_s=self.clock.now_s,
            now_ms=self.clock.now_ms,
            wake=self._wake,
            report=report,
        )
        self.broker.hurry = self._hurry
        with Progress() as progress:
            recovered = Recovery(self.broker).run(progress.count)
        for damage in self.log.report:
            report("log.damaged", {"what": damage})
        report("broker.recovered", recovered._asdict())
        self.housekeeping = Housekeeping(self.broker)
        self.sys_topics = SysTopics(self.broker, memory_bytes)
        # What has been loaded stays, and so does most of what outlives a few ticks: sessions, and the log's tail. The
        # garbage collector looks at what is young, in short steps, and never walks the rest; circles are undone by
        # hand where sessions end.
        gc.collect()
        gc.freeze()
        gc.set_threshold(5_000, 1_000_000, 1_000_000)
        self._second_s = self.clock.now_s

    def _in_memory(self, store: MemoryLog) -> EmbeddedLog:
        return EmbeddedLog(store, wait_for_disk=False, loop=self.loop, on_failure=self._storage_failed)

    def _tiered(self, store: SegmentedLog) -> TieredLog:
        self.archive = LakeArchive(self.config.data, lambda: store.end, loop=self.loop, report=report)
        self.archive.open()
        wait_for_disk = self.config.log.durability == "fsync"
        return TieredLog(
            store, self.archive, wait_for_disk=wait_for_disk, loop=self.loop, on_failure=self._storage_failed
        )

    # ── the loop ──

    def _wake(self) -> None:
        self.loop.call_soon(self._tick)

    def _hurry(self) -> bool:
        """Messages that arrive one by one are handed over and appended as they come; close together, they share a
        tick."""
        clock = self.clock
        broker = self.broker
        last_s = clock.now_s
        clock.tick()
        now_s = clock.now_s
        if now_s - last_s < QUIET_S:
            return False
        broker.now_s = now_s
        broker.now_ms = clock.now_ms
        broker.hand_over()
        broker.flush()
        return True

    def _tick(self) -> None:
        self.clock.tick()
        self.broker.now_s = self.clock.now_s
        self.broker.now_ms = self.clock.now_ms
        self.broker.flush()

    def _often(self) -> None:
        pause_s = OFTEN_S if not self.housekeeping.busy else BUSY_S
        self._ticker = self.loop.call_later(pause_s, self._often)
        self.clock.tick()
        now_s = self.broker.now_s = self.clock.now_s
        self.broker.now_ms = self.clock.now_ms
        self.housekeeping.often()
        if now_s - self._second_s >= 1.0:
            self.clock.adjust(now_s - self._second_s)
            self._second_s = now_s
            self.housekeeping.each_second()
            self.sys_topics.each_second(now_s)
            self.log.close_sealed()
            if self.archive is not None:
                self.archive.poll()

    # ── stopping ──

    def _storage_failed(self, error: StorageError) -> None:
        """The disk lost what it had taken: nothing after this could be promised. Stop."""
        report("log.failed", {"error": str(error)}, logging.CRITICAL)
        self.exit_code = 1
        self.stopping.set()

    async def _stop(self, server: asyncio.Server) -> None:
        """Stop accepting, tell clients, keep sessions, write everything (0x8B: server shutting down)."""
        report("broker.stopping", {"connections": len(self.connections)})
        server.close()
        self._ticker.cancel()
        broker = self.broker
        self._tick()
        broker.closing = True
        for link in list(broker.links):
            broker.close(link, Reason.SERVER_SHUTTING_DOWN, send_will=True)
        self._tick()
        for connection in list(self.connections):
            connection.close()
        deadline_s = time.monotonic() + DRAIN_S
        while self.connections and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()
        while broker.moved:
            self.housekeeping.write_positions()
        self._tick()
        if self.exit_code == 0:
            self._last_snapshot()
        self.log.close()

    def _last_snapshot(self) -> None:
        """Makes the next start quick; without it the log would be replayed."""
        try:
            snapshot = self.log.snapshot()
            for records in state_records(self.broker):
                snapshot.add(records)
            if isinstance(snapshot, FileSnapshot):
                snapshot.commit_now()
        except StorageError as error:
            report("snapshot.failed", {"error": str(error)})


def report(event: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
    """One structured line: the event's stable name, then its fields."""
    log.log(level, "%s %s", event, " ".join(f"{name}={_clean(value)}" for name, value in fields.items()))


def memory_bytes() -> tuple[int, int]:
    """What the process holds in memory now, and the most it has held."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _clean(value: object) -> str:
    """Client ids and reasons come from outside: no control characters get into the log."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return repr(text) if not text.isprintable() or " " in text else text
