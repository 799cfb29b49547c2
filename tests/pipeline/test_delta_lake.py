"""The lake is plain Delta: Spark with Delta Lake's own jars, which Tidegate does not use, reads it as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_kit import context_of, drain
from lake_rows import stored
from log_writer import LogWriter
from pyspark.sql import SparkSession

from peers import missing
from tidegate.config import Pipeline
from tidegate.pipeline.jobs import archive, cleaner, compaction, traffic
from tidegate.pipeline.lake import CHECKPOINT_COMMITS, Lake

JARS = sorted((Path(__file__).parent / "jars").glob("delta-*.jar"))

READER = """
import json, sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

jars, *folders = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.jars", jars)
    .config("spark.ui.enabled", "false")
    .config("spark.sql.session.timeZone", "UTC")
    .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    .config("spark.databricks.delta.snapshotPartitions", "1")
    .getOrCreate()
)
for folder in folders:
    frame = spark.read.format("delta").load(folder)
    texts = [f.col(n).cast("string") if kind in ("timestamp", "binary") else f.col(n) for n, kind in frame.dtypes]
    print("ROWS", json.dumps([row.asDict() for row in frame.select(*texts).collect()]))
spark.stop()
"""


@pytest.mark.req("P.3", "P.4")
def test_spark_s_own_delta_lake_reads_what_archive_compaction_and_cleaner_left(
    spark: SparkSession, tmp_path: Path
) -> None:
    if not JARS:
        missing("Delta Lake's jars are not there; `make peers` fetches them with Maven")
    context = context_of(spark, tmp_path, pipeline=Pipeline(lake_retention_bytes=40_000))
    writer = LogWriter(tmp_path / "log", segment_bytes=8192)
    for i in range(CHECKPOINT_COMMITS + 5):
        writer.messages(40, start=40 * i)
        archive.run(context)
    drain(traffic, context)
    cleaner.run(context)
    drain(compaction, context)
    writer.messages(40, start=40 * (CHECKPOINT_COMMITS + 5))
    archive.run(context)
    lake = Lake(context.lake.folder)
    assert list((lake.folder / "messages" / "_delta_log").glob("*.checkpoint.parquet"))
    names = ["messages", "traffic_minutely"]
    done = subprocess.run(
        [sys.executable, "-c", READER, ",".join(map(str, JARS)), *(str(lake.folder / name) for name in names)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    messages = sorted(read[0], key=lambda row: row["position"])
    expected = stored(lake)
    assert 0 < len(expected) < 40 * (CHECKPOINT_COMMITS + 6)  # the cleaner has been there
    assert [(row["position"], row["topic"], row["payload"]) for row in messages] == [
        (row["position"], row["topic"], row["payload"].decode()) for row in expected
    ]
    counted = sum(row["messages"] for row in stored(lake, "traffic_minutely"))
    assert sum(row["messages"] for row in read[1]) == counted == 40 * (CHECKPOINT_COMMITS + 5)
