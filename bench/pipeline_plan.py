"""What is measured of the pipeline, and the bars it is held to. Values only: nothing here starts a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAYLOAD_BYTES = 100
TOPICS = 10_000
FRAME_ROWS = 2_000
MASTER = "local[2]"
RUNS = 2
FRESHNESS_RATE_PER_S = 5_000


@dataclass(frozen=True, slots=True)
class Sizes:
    messages: int
    backlog_messages: int
    filters: int
    replay_messages: int
    seconds: float
    """Of the runs with a broker, a pipeline and traffic: freshness, and the course over time."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a measurement, at least (or at most) `limit`."""

    figure: str
    limit: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True)
class Plan:
    title: str
    bars: tuple[Bar, ...] = ()


PLANS: Mapping[str, Plan] = {
    "archive": Plan("log → lake", (Bar("rows_per_s", 800_000), Bar("ratio_to_spark_copy", 1.2))),
    "source": Plan('spark.read.format("tidegate") → nothing', (Bar("rows_per_s", 1_200_000),)),
    "backlog": Plan("messages ⋈ filters of absent sessions", (Bar("messages_per_s", 250_000),)),
    "replay": Plan("lake → broker → subscriber", (Bar("messages_per_s", 150_000),)),
    "freshness": Plan(
        f"from publish to visible in the lake, at {FRESHNESS_RATE_PER_S:,} msg/s",
        (Bar("p95_s", 5.0, at_least=False), Bar("pipeline_cpu_share", 1.0, at_least=False)),
    ),
    "beside": Plan("the broker, alone and beside an archive at full speed"),
    "timeline": Plan("lag and throughput over time"),
}

STEPS: tuple[tuple[float, int | None], ...] = ((1 / 3, 5_000), (1 / 12, 0), (1 / 4, 5_000), (1 / 3, None))
"""Traffic of the timeline: (share of the time, messages per second); 0 is as fast as possible, None is no traffic."""
