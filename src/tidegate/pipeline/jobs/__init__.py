"""The pipeline's jobs, one module each: a pure function from DataFrame to DataFrame, and its wiring.

Every module has `NAME`, `INTERVAL_S` (how often it looks for work) and `run(context)`, which does one bounded
step and returns what it did, or None if there was nothing to do. How far a job has come is committed with its
results, in the table that it writes: a step that was cut off happens again, and one that was committed does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

from tidegate.config import Config
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder


@dataclass(frozen=True, slots=True)
class Context:
    """What a job works with."""

    spark: SparkSession
    lake: Lake
    log: LogFolder
    data: Path
    config: Config


class Batch(NamedTuple):
    """One step: rows taken in, how far that reached, what is left to do, what could not be processed."""

    rows: int
    reached: int
    lag_rows: int = 0
    quarantined: int = 0
