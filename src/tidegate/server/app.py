"""The broker as a process: opens the log, recovers, listens, and stops cleanly on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from tidegate.adapters.embedded.archive import LakeArchive
from tidegate.adapters.embedded.commitlog import EmbeddedLog, FileSnapshot
from tidegate.adapters.embedded.tiered import TieredLog
from tidegate.broker.core import Broker
from tidegate.broker.housekeeping import Housekeeping
from tidegate.broker.recover import Recovery
from tidegate.broker.state import all_records
from tidegate.broker.sys_topics import SysTopics
from tidegate.config import Config
from tidegate.errors import StorageError, TidegateError
from tidegate.exit_codes import FAILED
from tidegate.log.files import SegmentedLog
from tidegate.log.memory import MemoryLog
from tidegate.server.clock import Clock
from tidegate.server.connection import Connection
from tidegate.server.events import Events
from tidegate.server.listening import Address, Announce, in_words
from tidegate.server.progress import Progress
from tidegate.wire import Reason

UNPROTECTED = "there is no authentication: whoever reaches this address may read and write everything"

OFTEN_S = 0.1
BUSY_S = 0.01  # while a snapshot is being written
QUIET_S = 50e-6  # since the end of the last tick: whoever comes sooner has company
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
DRAIN_S = 5.0  # how long a stop waits for connections to take their last bytes


def run(config: Config, announce: Announce | None = None) -> int:
    """Run until told to stop; the exit code. `announce` is told when and where the broker listens."""
    events = Events(config.log_level, config.log_format)
    events.take_logging()
    _keep_memory()
    where = "memory" if config.log.durability == "memory" else str(config.data)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Server(config, events, announce or in_words(where)).serve())
    except (TidegateError, OSError):
        raise  # whoever called has words for it
    except Exception as error:
        events.crashed(error)
        return FAILED
    finally:
        events.close()


def _keep_memory() -> None:
    """Each tick takes and gives back buffers of some hundred kilobytes. glibc would return them to the kernel and
    fault them in again every time, which costs a third of the time to encode a large frame."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 256 << 20)
        mallopt(M_MMAP_THRESHOLD, 32 << 20)


class Server:
    def __init__(self, config: Config, events: Events, announce: Announce) -> None:
        self.config = config
        self.events = events
        self.report = events.report
        self.announce = announce
        self.stopping = asyncio.Event()
        self.exit_code = 0
        self.connections: set[Connection] = set()

    async def serve(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._failed)
        threading.excepthook = self._thread_failed
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
        addresses = [Address(*each.getsockname()[:2]) for each in server.sockets]
        for address in addresses:
            if not address.is_local:
                self.report("listen.unprotected", {"address": address, "why": UNPROTECTED})
        self.announce(addresses[0])
        self._ticker = self.loop.call_later(OFTEN_S, self._often)
        await self.stopping.wait()
        await self._stop(server)
        return self.exit_code

    def _open_store(self) -> SegmentedLog | MemoryLog:
        limits = self.config.log
        if limits.durability == "memory":
            return MemoryLog(limits.memory_bytes)
        with self._progress() as progress:
            return SegmentedLog.open(
                self.config.data / "log", segment_bytes=limits.segment_bytes, progress=progress.of
            )

    def _progress(self) -> Progress:
        return Progress(self.report if self.config.log_format == "json" else None)

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
            report=self.report,
        )
        self.broker.hurry = self._hurry
        self.broker.look_at_clock = self._look_at_clock
        with self._progress() as progress:
            recovered = Recovery(self.broker).run(progress.count)
        for damage in self.log.report:
            self.report("log.damaged", {"what": damage})
        self.report("broker.recovered", recovered._asdict())
        self.broker.room.open()
        self.housekeeping = Housekeeping(self.broker)
        self.sys_topics = SysTopics(self.broker, memory_bytes)
        # What has been loaded stays, and so does most of what outlives a few ticks: sessions, and the log's tail. The
        # garbage collector looks at what is young, in short steps, and never walks the rest; circles are undone by
        # hand where sessions end.
        gc.collect()
        gc.freeze()
        gc.set_threshold(5_000, 1_000_000, 1_000_000)
        self._second_s = self._done_s = self.clock.now_s

    def _in_memory(self, store: MemoryLog) -> EmbeddedLog:
        return EmbeddedLog(
            store, wait_for_disk=False, loop=self.loop, on_failure=self._storage_failed, report=self.report
        )

    def _tiered(self, store: SegmentedLog) -> TieredLog:
        self.archive = LakeArchive(self.config.data, lambda: store.end, loop=self.loop, report=self.report)
        self.archive.open()
        wait_for_disk = self.config.log.durability == "fsync"
        return TieredLog(
            store,
            self.archive,
            wait_for_disk=wait_for_disk,
            loop=self.loop,
            on_failure=self._storage_failed,
            report=self.report,
        )

    # ── the loop ──

    def _wake(self) -> None:
        self.loop.call_soon(self._tick)

    def _hurry(self) -> bool:
        """Messages that arrive one by one are handed over and appended as they come; close together, they share a
        tick."""
        clock = self.clock
        broker = self.broker
        clock.tick()
        now_s = clock.now_s
        if now_s - self._done_s < QUIET_S:
            return False
        broker.at(now_s, clock.now_ms)
        broker.hurrying = True
        broker.flush()
        broker.hurrying = False
        self._done_s = time.monotonic()
        return True

    def _look_at_clock(self) -> None:
        self.clock.tick()
        self.broker.at(self.clock.now_s, self.clock.now_ms)

    def _tick(self) -> None:
        self._look_at_clock()
        self.broker.flush()
        self._done_s = time.monotonic()

    def _often(self) -> None:
        pause_s = OFTEN_S if not self.housekeeping.busy else BUSY_S
        self._ticker = self.loop.call_later(pause_s, self._often)
        self.clock.tick()
        now_s = self.clock.now_s
        self.broker.at(now_s, self.clock.now_ms)
        self.housekeeping.often()
        if now_s - self._second_s >= 1.0:
            self.clock.adjust(now_s - self._second_s)
            self._second_s = now_s
            self.events.each_second()
            self.housekeeping.each_second()
            # Deadlines are judged behind the sockets' next turn: what has arrived in time counts, however late the
            # loop itself is. The first call comes before that turn, the second after it.
            self.loop.call_soon(self.loop.call_soon, self._judge)
            self.sys_topics.each_second(now_s)
            self.log.close_sealed()
            if self.archive is not None:
                self.archive.poll()

    def _judge(self) -> None:
        if self.housekeeping.deadlines():
            self.loop.call_soon(self.loop.call_soon, self._judge)

    # ── stopping ──

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something went wrong that nobody foresaw: end before another promise is kept. A peer's broken connection is
        foreseen."""
        error = context.get("exception")
        if isinstance(error, OSError) and "transport" in context:
            return
        self._crash(error if isinstance(error, BaseException) else RuntimeError(context.get("message", "")))

    def _thread_failed(self, failed: threading.ExceptHookArgs) -> None:
        """The same on any other thread: what the broker promises stands on each of them. The loop may go on while this
        is reported, but tells nobody anything any more."""
        if hasattr(self, "broker"):
            self.broker.halted = True
        self._crash(failed.exc_value or failed.exc_type())

    def _crash(self, error: BaseException) -> NoReturn:
        self.events.crashed(error)
        os._exit(FAILED)

    def _storage_failed(self, error: StorageError) -> None:
        """The disk lost what it had taken: nothing after this could be promised. Stop."""
        if self.exit_code == 0:  # else it is known, and under way
            self.report("log.failed", {"error": str(error)})
        self.exit_code = FAILED
        self.stopping.set()

    async def _stop(self, server: asyncio.Server) -> None:
        """Stop accepting, tell clients, keep sessions, write everything (0x8B: server shutting down)."""
        self.report("broker.stopping", {"connections": len(self.connections)})
        server.close()
        self._ticker.cancel()
        broker = self.broker
        self._tick()
        broker.closing = True
        for link in list(broker.sessions.links):
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
        while broker.delivery.moved and broker.storing.on:
            self.housekeeping.write_positions(last=True)
        self._tick()
        if self.exit_code == 0:
            self._last_snapshot()
        self.log.close()

    def _last_snapshot(self) -> None:
        """Makes the next start quick; without it the log would be replayed."""
        try:
            snapshot = self.log.snapshot()
            for records in all_records(self.broker):
                snapshot.add(records)
            if isinstance(snapshot, FileSnapshot):
                snapshot.commit_now()
        except StorageError as error:
            self.report("snapshot.failed", {"error": str(error)})


def memory_bytes() -> tuple[int, int]:
    """What the process holds in memory now, and the most it has held."""
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    # The kernel raises its own maximum now and then only, and may be behind what is held now.
    return held, max(held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
