"""One real Spark session for all tests of the pipeline: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tidegate.pipeline.spark import spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("tests", {"spark.master": "local[2]", "spark.driver.memory": "1g"})
    yield session
    session.stop()
