"""The examples of docs/spark.md, as they stand there, against a real broker and a real lake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from harness import BrokerProcess
from tidegate.client.publisher import BulkPublisher
from tidegate.config import Config
from tidegate.pipeline.jobs import Context, archive
from tidegate.pipeline.lake import Lake
from tidegate.pipeline.segments import LogFolder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"
ROOMS = 4
MESSAGES = 200


def blocks() -> list[tuple[int, str]]:
    """Every Python example with the line that it begins at."""
    text = PAGE.read_text("utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


@pytest.mark.timeout(300)
@pytest.mark.req("P.2")
def test_every_example_runs(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_broker()
    with BulkPublisher(port=broker.port, client_id="sensors") as publisher:
        publisher.publish(
            [b"sensors/room%d/temperature" % (i % ROOMS) for i in range(MESSAGES)],
            [b"%d" % (i % 40) for i in range(MESSAGES)],
        )
    context = Context(
        spark, Lake(broker.data / "lake"), LogFolder(broker.data / "log"), broker.data, Config(data=broker.data)
    )
    while archive.run(context) is not None:
        pass
    found = blocks()
    assert len(found) >= 9
    seen: dict[str, Any] = {"__name__": "notebook"}
    for line, block in found:
        here = block.replace('data = "data"', f'data = "{broker.data}"').replace("port = 1883", f"port = {broker.port}")
        exec(compile("\n" * line + here, str(PAGE), "exec"), seen)  # an error names the page's own line
        if (query := seen.get("query")) is not None:
            assert query.exception() is None
    assert (seen["data"], seen["port"]) == (str(broker.data), broker.port)
    topics = {f"sensors/room{i}/temperature" for i in range(ROOMS)}
    # What the examples were to show:
    assert seen["celsius"].count() == MESSAGES
    each = dict.fromkeys(topics, MESSAGES // ROOMS)
    assert {row.topic: row["count"] for row in spark.table("counts").collect()} == each
    assert dict(seen["busiest_archived"].fetchall()) == each
    hot = sum(1 for i in range(MESSAGES) if i % 40 > 30)
    published = {
        kind: spark.read.format("tidegate").option("filter", filter).load(str(broker.data))
        for kind, filter in (("alarms", "alarms/#"), ("fahrenheit", "sensors/+/temperature/fahrenheit"))
    }
    assert published["alarms"].where("retain").count() == hot
    degrees = published["fahrenheit"].selectExpr("cast(cast(payload as string) as double) as f").collect()
    assert sorted(row.f for row in degrees) == sorted(i % 40 * 9 / 5 + 32 for i in range(MESSAGES))
    assert seen["messages"].count() == MESSAGES
    everything = spark.read.format("tidegate").load(str(broker.data))
    assert seen["whole"].count() == everything.count() == seen["newer"].count() + MESSAGES
    assert "room1" in capsys.readouterr().out
