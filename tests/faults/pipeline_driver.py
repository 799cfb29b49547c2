"""The pipeline's driver as `tidegate pipeline run` runs it, but with jobs that are due every moment, and small files
that are soon worth being made one: so that within seconds everything happens that takes hours otherwise.

    python pipeline_driver.py DATA [--once]

With `--once` it then looks through the lake with the pipeline's own data tests, and prints what they find as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

from tidegate.config import Config, Pipeline
from tidegate.pipeline import checks, driver
from tidegate.pipeline.jobs import compaction
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder
from tidegate.pipeline.spark import spark_session

SPARK = {"spark.master": "local[2]", "spark.driver.memory": "512m"}
INTERVAL_S = 0.5


def main() -> int:
    data, once = Path(sys.argv[1]), "--once" in sys.argv
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    config = replace(Config(data=data, pipeline=Pipeline(archive_interval_s=0)), spark=SPARK)
    for job in driver.JOBS:
        job.INTERVAL_S = INTERVAL_S
    driver.RETRY_MAX_S = 1.0
    compaction.FILES_MIN = 4
    if not once:
        return driver.Driver(config).run()
    spark = spark_session("torture", SPARK)
    code = driver.Driver(config, spark).run(once=True)
    found = checks.check(Lake(config.lake_folder), spark, LogFolder(data / "log"))
    print(json.dumps([" ".join(finding) for finding in found]))
    spark.stop()
    return code


if __name__ == "__main__":
    sys.exit(main())
