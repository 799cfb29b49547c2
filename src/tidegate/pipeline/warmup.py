"""Halves the time that Spark takes to start, by an archive of the classes that a start loads.

    python -m tidegate.pipeline.warmup

Java maps the archive instead of reading, checking and linking the classes one by one from some hundred jars. It is
made once for a Java and a Spark (`make run` does), lies in the user's cache folder, and may be deleted at any time.
Java itself sees whether the archive fits, and goes without it if not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import SparkContext

from tidegate.pipeline.java import find_java
from tidegate.pipeline.spark import JAVA_OPTIONS, spark_archive, spark_session

EXIT_S = 120.0  # Java writes the archive when it ends


def warm_up() -> bool:
    """Whether there is an archive now. Not every Java can make one."""
    archive = spark_archive()
    if archive.exists():
        return True
    base = subprocess.run([find_java().path, "-Xshare:on", "-version"], capture_output=True, check=False)
    if base.returncode:
        return False  # ours would only add to Java's own archive, and that is not there
    draft = archive.with_name(f".{archive.name}.{os.getpid()}")
    try:
        _rehearse({"spark.master": "local[1]", JAVA_OPTIONS: f'"-XX:ArchiveClassesAtExit={draft}"'})
        if not draft.exists():
            return False
        with draft.open("rb") as file:
            os.fsync(file.fileno())  # half an archive under the right name could keep Java from starting
        draft.rename(archive)
    finally:
        draft.unlink(missing_ok=True)
    return True


def _rehearse(settings: dict[str, str]) -> None:
    """Does a little of everything that our jobs and queries do, in a Java that ends before this returns."""
    spark = spark_session("warmup", settings)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "rows"))
        rows = spark.range(1000).selectExpr("id", "id % 7 as topic", "current_timestamp() as time")
        rows.mapInArrow(_same, rows.schema).write.parquet(path)
        spark.read.parquet(path).createOrReplaceTempView("rows")
        spark.sql("select topic, count(*), max_by(id, time) from rows group by topic order by 2").collect()
        spark.sparkContext.parallelize([1], 1).map(str).collect()
    gateway = SparkContext._gateway
    assert gateway is not None
    java: subprocess.Popen[bytes] = gateway.proc
    spark.stop()
    assert java.stdin is not None
    java.stdin.close()  # Java ends with it
    java.wait(EXIT_S)


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


if __name__ == "__main__":
    java = find_java()
    made = warm_up()
    print(f"Spark starts from {spark_archive()}" if made else f"Java {java.version} at {java.path} keeps no archive")
    sys.exit(0)
