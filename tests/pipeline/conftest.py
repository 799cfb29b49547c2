"""One real Spark session for all tests of the pipeline: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tidegate.pipeline.spark import spark_session


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, all of these run in one of them."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Small plans, each run once: the second compiler costs as much time as everything else, and never pays.
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {"spark.master": "local[2]", "spark.driver.memory": "1g", "spark.driver.extraJavaOptions": quick}
    session = spark_session("tests", settings)
    yield session
    session.stop()
