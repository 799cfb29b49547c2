"""The archive of classes: made whole, found again, and really used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.pipeline.java import find_java

START = """
from tidegate.pipeline.spark import JAVA_OPTIONS, spark_session
spark = spark_session("test", {"spark.master": "local[1]", JAVA_OPTIONS: "-Xlog:class+load:file=loaded.txt"})
print(spark.range(10).count())
spark.stop()
"""


@pytest.mark.timeout(400)
def test_spark_starts_from_the_archive_that_was_made_once(tmp_path: Path) -> None:
    if subprocess.run([find_java().path, "-Xshare:on", "-version"], capture_output=True, check=False).returncode:
        pytest.skip("this Java has no archive of its own to add to")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "a cache")}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    said = python("-m", "tidegate.pipeline.warmup")
    (archive,) = (tmp_path / "a cache" / "tidegate").glob("*.jsa")
    assert said == f"Spark starts from {archive}\n"
    made_at = archive.stat().st_mtime_ns
    assert python("-m", "tidegate.pipeline.warmup") == said
    assert archive.stat().st_mtime_ns == made_at
    assert python("-c", START) == "10\n"
    context = next(
        line for line in (tmp_path / "loaded.txt").read_text().splitlines() if "org.apache.spark.SparkContext " in line
    )
    assert "shared objects file" in context
