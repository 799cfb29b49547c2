"""Spark looks into packages whose name begins with `pyspark_` for data sources: here it finds `format("tidegate")`."""

from tidegate.pipeline.source import TidegateDataSource as DefaultSource

__all__ = ["DefaultSource"]
