"""The Spark session, with the settings that a single machine needs; anything can be overridden."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession

from tidegate.pipeline.java import class_archive, java_home

GIB = 1 << 30

DEFAULTS = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.scheduler.mode": "FAIR",
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
}

# On this machine alone, nobody else need reach the driver.
LOCAL_DEFAULTS = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""For work of seconds or little CPU: code is compiled once, quickly, and not again to be fast for hours."""
NICENESS = 10


def spark_session(name: str, settings: Mapping[str, str]) -> SparkSession:
    """Start one, or join the one that runs in this process. What spark-submit was told wins over `settings`."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it reports what it raises as well
    told = submitted()
    wanted = {**settings, **told}
    wanted = {"spark.app.name": f"tidegate {name}", **_defaults(wanted.get("spark.master", "")), **wanted}
    if told:
        return _start(wanted)
    wanted[JAVA_OPTIONS] = f"{_java_options()} {wanted.get(JAVA_OPTIONS, '')}".strip()
    before = os.environ.get("JAVA_HOME")
    os.environ["JAVA_HOME"] = str(java_home())
    try:
        return _start(wanted)
    finally:  # ours is for Spark's launcher alone, not for what else this process starts
        if before is None:
            del os.environ["JAVA_HOME"]
        else:
            os.environ["JAVA_HOME"] = before


def _start(settings: Mapping[str, str]) -> SparkSession:
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def step_back(spark: SparkSession) -> None:
    """Let others go before Java from now on: above all a broker on the same machine."""
    java = getattr(spark.sparkContext._gateway, "proc", None)
    if java is None:
        return  # not ours
    for thread in Path(f"/proc/{java.pid}/task").glob("*"):  # those that they start will be like them
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NICENESS)


def submitted() -> dict[str, str]:
    """What spark-submit was told, if it is what started this process: Java runs already, and knows."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _defaults(master: str) -> dict[str, str]:
    memory = {"spark.driver.memory": f"{driver_memory_gib()}g"}
    return {**DEFAULTS, **memory, **({} if "://" in master or master == "yarn" else LOCAL_DEFAULTS)}


def driver_memory_gib() -> int:
    """A quarter of the machine, as Java itself would take, but enough for Spark and no more than our jobs use."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(4, machine_bytes // 4 // GIB))


def _java_options() -> str:
    """Quiet, and with the classes that `warmup` has put in order, if it has."""
    logging_file = Path(__file__).with_name("log4j2.properties").as_uri()
    options = [f"-Dlog4j2.configurationFile={logging_file}", "-Xlog:disable", "-Xlog:all=error:stderr"]
    archive = spark_archive()
    if archive.exists():
        options.append(f'"-XX:SharedArchiveFile={archive}"')
    return " ".join(options)


def spark_archive() -> Path:
    return class_archive(Path(_find_spark_home(), "jars"))
