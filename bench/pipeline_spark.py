"""The pipeline's work in bulk, measured inside one warm Spark session: archive, source, backlog.

Other processes on the machine are waited for and accounted for as in `measure`. Nothing is kept in memory between runs
but what the kernel caches of the log, for every contender alike.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from brokers import machine_cpu_s, process_tree_cpu_s
from loggen import START_MS, topic_names, write_log
from measure import OTHER_CPU_SHARE_MAX, wait_for_quiet
from pipeline_plan import FRAME_ROWS, MASTER, PAYLOAD_BYTES, RUNS, TOPICS, Sizes
from tidegate.config import Config
from tidegate.pipeline.jobs import Context, archive, backlog
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder
from tidegate.pipeline.spark import spark_session
from tidegate.pipeline.state import Waiting, WaitingFilter, WaitingReader

WARM_MESSAGES = 100_000
NOW_MS = START_MS

Say = Callable[[str], None]
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run."""

    seconds: float
    per_s: float
    cpu_share: float
    """Cores used by this process, its JVM and its workers."""
    other_cpu_share: float

    @property
    def disturbed(self) -> bool:
        return self.other_cpu_share > OTHER_CPU_SHARE_MAX


class Bench:
    """The session, the log and the lake that the measurements share; made when first asked for."""

    def __init__(self, root: Path, sizes: Sizes, patience_s: float, say: Say) -> None:
        self.root = root
        self.sizes = sizes
        self.patience_s = patience_s
        self.say = say
        self._spark: SparkSession | None = None

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            self.say(f"Spark starts at {MASTER}")
            self._spark = spark_session("bench", {"spark.master": MASTER})
            warm = self.root / "warm"
            write_log(warm / "log", WARM_MESSAGES, PAYLOAD_BYTES, TOPICS, FRAME_ROWS)
            self.archive(warm)
            Lake(warm / "lake").read(self._spark, "messages").write.parquet(str(warm / "copy"))
            shutil.rmtree(warm)
        return self._spark

    @property
    def data(self) -> Path:
        """A data folder with the log."""
        data = self.root / "data"
        if not (data / "log").exists():
            self.say(f"{self.sizes.messages:,} messages are written to a log")
            draft = data / "draft"
            write_log(draft, self.sizes.messages, PAYLOAD_BYTES, TOPICS, FRAME_ROWS)
            draft.rename(data / "log")
        return data

    @property
    def lake(self) -> Lake:
        """The lake with all of the log's messages."""
        lake = Lake(self.data / "lake")
        if not lake.exists("messages") or lake.rows("messages") < self.sizes.messages:
            self.archive(self.data)
        return lake

    def archive(self, data: Path) -> int:
        context = Context(self.spark, Lake(data / "lake"), LogFolder(data / "log"), data, Config(data=data))
        rows = 0
        while (batch := archive.run(context)) is not None:
            rows += batch.rows
        return rows

    def timed(self, what: str, rows: int, work: Callable[[], object]) -> Run:
        os.sync()  # what earlier runs wrote shall not be written back during this one
        wait_for_quiet(self.patience_s)
        own, machine, began = process_tree_cpu_s(os.getpid()), machine_cpu_s(), time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        own_s, machine_s = process_tree_cpu_s(os.getpid()) - own, machine_cpu_s() - machine
        run = Run(seconds, rows / seconds, own_s / seconds, max(0.0, machine_s - own_s) / seconds)
        note = " (disturbed)" if run.disturbed else ""
        self.say(f"{what}: {run.per_s:,.0f}/s in {seconds:.1f} s, CPU {run.cpu_share:.2f} cores{note}")
        return run

    @contextmanager
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.root) as name:
            yield Path(name)

    def close(self) -> None:
        """End the session and its JVM, which would else keep its memory while brokers are measured."""
        if self._spark is None:
            return
        gateway = SparkContext._gateway
        self._spark.stop()
        self._spark = None
        if gateway is not None:
            gateway.shutdown()
            process = gateway.proc
            process.stdin.close()
            process.wait(30)
            SparkContext._gateway = SparkContext._jvm = None


def runs_of(*runs: Run) -> Found:
    """The runs, with the best and the median of their rates."""
    best = max(runs, key=lambda run: run.per_s)
    rates = [run.per_s for run in runs]
    return {
        "best_per_s": best.per_s,
        "median_per_s": statistics.median(rates),
        "disturbed": best.disturbed,
        "runs": [asdict(run) for run in runs],
    }


# ── archive ──


def measure_archive(bench: Bench) -> Found:
    """The log into the lake, and in turns with it Spark's own copy of the lake's files into other Parquet files."""
    data, rows, spark = bench.data, bench.sizes.messages, bench.spark
    ours: list[Run] = []
    copies: list[Run] = []
    for _ in range(RUNS):
        shutil.rmtree(data / "lake", ignore_errors=True)
        ours.append(bench.timed("archive", rows, lambda: bench.archive(data)))
        lake = Lake(data / "lake")
        if lake.rows("messages") != rows:
            raise RuntimeError(f"the lake has {lake.rows('messages'):,} rows of {rows:,}")
        source = lake.read(spark, "messages")
        with bench.folder() as folder:
            copy = partial(source.write.parquet, str(folder / "copy"))
            copies.append(bench.timed("Spark's copy", rows, copy))
    archived, copied = runs_of(*ours), runs_of(*copies)
    return {
        "figures": {
            "rows_per_s": archived["best_per_s"],
            "spark_copy_rows_per_s": copied["best_per_s"],
            "ratio_to_spark_copy": archived["best_per_s"] / copied["best_per_s"],
        },
        "rows": rows,
        "files": len(Lake(data / "lake").files("messages")),
        "archive": archived,
        "spark_copy": copied | {"codec": spark.conf.get("spark.sql.parquet.compression.codec")},
        "disturbed": archived["disturbed"] or copied["disturbed"],
        # A peer that another process slowed down would flatter us: such a comparison proves nothing.
        "unproven": ["ratio_to_spark_copy"] if copied["disturbed"] else [],
    }


# ── source ──


def measure_source(bench: Bench) -> Found:
    path, rows, spark = str(bench.data), bench.sizes.messages, bench.spark
    count = spark.read.format("tidegate").load(path).count()  # also warms the source up
    if count != rows:
        raise RuntimeError(f"the source has {count:,} rows of {rows:,}")
    runs = [
        bench.timed("source", rows, lambda: _nowhere(spark.read.format("tidegate").load(path))) for _ in range(RUNS)
    ]
    found = runs_of(*runs)
    return {
        "figures": {"rows_per_s": found["best_per_s"]},
        "rows": rows,
        "source": found,
        "disturbed": found["disturbed"],
    }


def _nowhere(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


# ── backlog ──


def measure_backlog(bench: Bench) -> Found:
    rows, filters = min(bench.sizes.backlog_messages, bench.sizes.messages), bench.sizes.filters
    waiting = absent_sessions(filters, rows)
    messages = bench.lake.read(bench.spark, "messages", positions=(0, rows))
    ranges = backlog.backlog(messages, waiting, NOW_MS).count()  # also warms the query's plan up
    if not ranges:
        raise RuntimeError("no session has anything to come")
    runs = [
        bench.timed("backlog", rows, lambda: _nowhere(backlog.backlog(messages, waiting, NOW_MS))) for _ in range(RUNS)
    ]
    found = runs_of(*runs)
    return {
        "figures": {"messages_per_s": found["best_per_s"]},
        "messages": rows,
        "filters": filters,
        "sessions": len(waiting.readers),
        "ranges": ranges,
        "backlog": found,
        "disturbed": found["disturbed"],
    }


def absent_sessions(filters: int, end: int, seed: int = 1) -> Waiting:
    """Sessions with two filters each, away since anywhere before `end`. Of 200 filters 140 name a topic, 40 have one
    level open, 19 a tail, and one is a dashboard's, for all devices of a site."""
    chance = random.Random(seed)
    topics = [name.decode() for name in topic_names(TOPICS)]

    def filter_of(number: int) -> str:
        topic = chance.choice(topics)
        site, name, device, kind, measured = topic.split("/")
        match number % 200:
            case n if n < 140:
                return topic
            case n if n < 180:
                return f"{site}/+/{device}/{kind}/{measured}"
            case n if n < 199:
                return f"{site}/{name}/{device}/{kind}/#"
            case _:
                return f"{site}/{name}/{device}/+/{measured}" if number % 400 < 200 else f"{site}/{name}/#"

    readers = []
    for number in range(filters // 2):
        floor = chance.randrange(end)
        pair = [WaitingFilter(filter_of(2 * number + i), floor, False) for i in (0, 1)]
        readers.append(WaitingReader(number + 1, f"session-{number:06d}", "", pair))
    return Waiting(readers, [])
