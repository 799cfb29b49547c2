"""`format("tidegate")` as a source: every row, once, wherever a query stops; and clear words when that cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from log_writer import START_MS, LogWriter, run
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from harness import BrokerProcess, RawClient
from message_frames import encode_messages
from tidegate.errors import ConfigError, CorruptLog
from tidegate.log.frame import encode_changes, parse_header
from tidegate.log.run import NO_EXPIRY, Run
from tidegate.pipeline import source
from tidegate.pipeline.segments import LogGone
from tidegate.pipeline.source import LogStreamReader, TidegateDataSource
from tidegate.router.filters import matches
from tidegate.wire import Properties


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def writer(data: Path) -> Iterator[LogWriter]:
    writer = LogWriter(data / "log", segment_bytes=64 << 10)
    yield writer
    writer.close()


def options(data: Path, **given: object) -> dict[str, str]:
    return {"path": str(data)} | {name.removesuffix("_"): str(value) for name, value in given.items()}


def read(data: Path, **given: object) -> list[dict[str, Any]]:
    """Plan and read as Spark does, but here."""
    made = TidegateDataSource(options(data, **given))
    reader = made.reader(made.schema())
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return [row for batch in batches for row in batch.to_pylist()]


def positions(rows: list[dict[str, Any]]) -> list[int]:
    return [row["position"] for row in rows]


def stream_reader(data: Path, **given: object) -> LogStreamReader:
    made = TidegateDataSource(options(data, **given))
    reader = made.streamReader(made.schema())
    assert isinstance(reader, LogStreamReader)
    return reader


def between(reader: LogStreamReader, start: dict[str, int], end: dict[str, int]) -> list[int]:
    rows: list[dict[str, Any]] = []
    for partition in reader.partitions(start, end):
        for batch in reader.read(partition):
            rows += batch.to_pylist()
    return positions(rows)


def iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ── the rows ──


@pytest.mark.req("P.2")
def test_the_rows_are_what_was_published(spark: SparkSession, broker: BrokerProcess) -> None:
    content = Properties(payload_format=0, content_type=b"image/png", user=((b"k", b"v"), (b"k", b"w")))
    block = b"\x01\x00\x03\x00\x09image/png\x26\x00\x01k\x00\x01v\x26\x00\x01k\x00\x01w"
    before = datetime.now()
    with RawClient(broker.port, 5) as client:
        client.connect("the-publisher")
        client.publish("plain", b"zero", qos=0)
        client.publish("kept/gr\u00fcn", bytes(range(256)), qos=1, retain=True)
        client.publish("rich", b"", qos=2, properties=content)
        client.publish("passing", b"x", qos=1, properties=Properties(message_expiry=600))
        client.disconnect()
    frame = spark.read.format("tidegate").load(str(broker.data))
    assert frame.columns == [*source.TABLES["messages"].names]
    rows = frame.where("publisher = 'the-publisher'").orderBy("position").collect()
    found = [
        (row.topic, bytes(row.payload), row.qos, row.retain, row.expiry, row.properties and bytes(row.properties))
        for row in rows
    ]
    assert found == [
        ("plain", b"zero", 0, False, None, None),
        ("kept/gr\u00fcn", bytes(range(256)), 1, True, None, None),
        ("rich", b"", 2, False, None, block),
        ("passing", b"x", 1, False, 600, None),
    ]
    assert all(row.uuid is None for row in rows)
    assert len({row.tenant for row in rows}) == 1
    assert all(abs((row.time.replace(tzinfo=None) - before).total_seconds()) < 86_400 for row in rows)
    assert positions([row.asDict() for row in rows]) == sorted({row.position for row in rows})


@pytest.mark.req("P.2", "S0.27")
def test_every_field_of_the_log_is_a_column(writer: LogWriter, data: Path) -> None:
    writer.tick([run(b"fill", b"z") for _ in range(100)])
    rich = Run(b"a/b", b"me", b"acme", 0b110, [b"x", b"y"], [b"\x01\x01", b""], [60, NO_EXPIRY], [b"u" * 16, bytes(16)])
    base = writer.tick([rich])
    made = TidegateDataSource(options(data))
    reader = made.reader(made.schema())
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    assert {field.name: field.type for field in batches[0].schema} == {
        field.name: field.type for field in source.TABLES["messages"]
    }
    for batch in batches:
        batch.validate(full=True)
    at = datetime.fromtimestamp(writer.time_ms / 1000, UTC)
    same = {"time": at, "tenant": "acme", "topic": "a/b", "publisher": "me", "qos": 2, "retain": True}
    assert [row for batch in batches for row in batch.to_pylist()][100:] == [
        {"position": base, **same, "payload": b"x", "uuid": b"u" * 16, "expiry": 60, "properties": b"\x01\x01"},
        {"position": base + 1, **same, "payload": b"y", "uuid": None, "expiry": None, "properties": None},
    ]


@pytest.mark.req("P.2")
def test_splits_are_read_in_parallel_and_hold_each_row_once(spark: SparkSession, data: Path) -> None:
    writer = LogWriter(data / "log", segment_bytes=1 << 20)
    for i in range(60):
        writer.messages(100, start=100 * i, size=100)
    writer.close()
    frame = spark.read.format("tidegate").options(**options(data, bytesPerSplit=64 << 10)).load()
    assert frame.rdd.getNumPartitions() > 8
    found = frame.selectExpr("position", "decode(payload, 'UTF-8') as payload").orderBy("position").collect()
    assert [row.position for row in found] == list(range(6000))
    assert [row.payload.rstrip("\0") for row in found] == [str(i) for i in range(6000)]
    assert spark.read.format("tidegate").load(str(data)).rdd.getNumPartitions() == 1  # all of it is less than 32 MiB


@pytest.mark.parametrize("path", ["data", "log", "file:"])
def test_the_data_folder_and_the_log_folder_can_be_named(writer: LogWriter, data: Path, path: str) -> None:
    writer.messages(5)
    named = {"data": data, "log": data / "log", "file:": f"file:{data}"}[path]
    assert len(read(named)) == 5  # type: ignore[arg-type]


def test_batches_are_worth_handing_over_and_bounded(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BATCH_ROWS", 1000)
    monkeypatch.setattr(source, "BATCH_BYTES", 40_000)
    writer = LogWriter(data / "log", segment_bytes=1 << 20)
    for i in range(30):
        writer.messages(100, start=i)
    writer.log.roll()
    for _ in range(4):
        writer.tick([run(b"large", *[bytes(10_000)] * 20)])
    writer.close()
    made = TidegateDataSource(options(data))
    reader = made.reader(made.schema())
    small, large = (list(reader.read(partition)) for partition in reader.partitions())
    assert [batch.num_rows for batch in small] == [1000, 1000, 1000]
    assert sum(batch.num_rows for batch in large) == 80
    assert all(batch.column("payload").nbytes <= 2 * 40_000 + 10_000 for batch in large)


def test_only_the_columns_asked_for_are_made(spark: SparkSession, writer: LogWriter, data: Path) -> None:
    writer.messages(5, topics=2)
    asked = spark.read.format("tidegate").options(**options(data, columns="topic, position")).load()
    assert asked.columns == ["topic", "position"]
    assert [tuple(row) for row in asked.orderBy("position").collect()] == [(f"t/{i % 2}", i) for i in range(5)]
    given = spark.read.format("tidegate").schema("qos byte, topic string").load(str(data))
    assert [tuple(row) for row in given.collect()][:1] == [(1, "t/0")]


# ── which rows ──


def many_topics(writer: LogWriter, ticks: int = 40) -> list[tuple[int, int, str]]:
    """(position, time, topic) of what was written; some topics are everywhere, some in one frame only."""
    rows = []
    for i in range(ticks):
        topics = [b"a/%d/%d" % (i % 4, k) for k in range(70)] + [b"rare/%d" % i] * (i % 13 == 5)
        base = writer.tick([run(topic, b"x" * 20) for topic in topics])
        rows += [(base + k, writer.time_ms, topic.decode()) for k, topic in enumerate(topics)]
    return rows


@pytest.mark.req("P.2")
@pytest.mark.parametrize("closed", [False, True], ids=["running", "closed"])
@pytest.mark.parametrize(
    "filter", ["#", "a/#", "a/+/7", "a/2/+", "rare/#", "rare/18", "+/18", "nothing/here", "a", "a/3/69", "$SYS/#"]
)
def test_a_filter_leaves_exactly_the_topics_that_it_matches(
    writer: LogWriter, data: Path, filter: str, closed: bool
) -> None:
    written = many_topics(writer)
    if closed:
        writer.close()
    expected = [position for position, _, topic in written if matches(filter.encode(), topic.encode())]
    assert positions(read(data, filter=filter)) == expected
    assert positions(read(data, filter=filter, bytesPerSplit=64 << 10)) == expected


@pytest.mark.req("P.2")
def test_segments_and_frames_without_a_topic_are_not_even_opened(writer: LogWriter, data: Path) -> None:
    many_topics(writer, 200)
    writer.close()
    made = TidegateDataSource(options(data, filter="rare/18"))
    everything = TidegateDataSource(options(data)).reader(made.schema()).partitions()
    planned: list[Any] = made.reader(made.schema()).partitions()
    assert len(everything) > 4
    assert len(planned) == 1
    whole = planned[0].split.end - planned[0].split.start
    assert sum(end - start for start, end in planned[0].spans) < whole / 4


@pytest.mark.req("P.2")
@pytest.mark.parametrize("until", ["", "latest", "0", "1", "700", "1234", "99999999", iso(START_MS + 30_000)])
@pytest.mark.parametrize(
    "start",
    ["earliest", "0", "1", "699", "700", "2000", "99999999", "2020-01-01", iso(START_MS + 10_000), "@1800000015"],
)
def test_a_range_holds_exactly_what_lies_in_it(writer: LogWriter, data: Path, start: str, until: str) -> None:
    written = many_topics(writer)

    def reached(point: str, position: int, time_ms: int) -> bool:
        if point in ("earliest", "2020-01-01"):
            return True
        if point.startswith("@"):
            return time_ms >= int(point[1:]) * 1000
        if point.endswith("Z"):
            return time_ms >= datetime.fromisoformat(point).timestamp() * 1000
        return position >= int(point)

    expected = [
        position
        for position, time_ms, _ in written
        if reached(start, position, time_ms) and (until in ("", "latest") or not reached(until, position, time_ms))
    ]
    given = {"from_": start} | ({"until": until} if until else {})
    assert positions(read(data, **given)) == expected


def test_an_age_counts_from_now(writer: LogWriter, data: Path) -> None:
    now_ms = time.time_ns() // 1_000_000
    writer.time_ms = now_ms - 3_600_000
    old = writer.messages(10)
    writer.time_ms = now_ms - 60_000
    new = writer.messages(10)
    assert positions(read(data, from_="-30m")) == list(range(new, new + 10))
    assert positions(read(data, until="-30m")) == list(range(old, old + 10))


def test_a_filter_a_range_and_columns_together(spark: SparkSession, writer: LogWriter, data: Path) -> None:
    written = many_topics(writer)
    chosen = options(data, filter="a/+/7", from_="500", until="1500", columns="position")
    found = spark.read.format("tidegate").options(**chosen).load().orderBy("position").collect()
    assert [row.position for row in found] == [
        position for position, _, topic in written if topic.endswith("/7") and 500 <= position < 1500
    ]


# ── a log that lives ──


@pytest.mark.req("P.2")
def test_positions_may_jump(data: Path) -> None:
    """After an unclean stop they go on far above; nothing is missing, nothing is twice."""
    expected: list[int] = []
    for stop in range(3):
        writer = LogWriter(data / "log", segment_bytes=64 << 10)
        for i in range(20):
            base = writer.messages(70, start=i)
            expected += range(base, base + 70)
        writer.close(clean=stop == 1)
    assert expected[-1] > 2**32
    assert positions(read(data)) == expected
    reader = stream_reader(data)
    offset, found = reader.initialOffset(), list[int]()
    assert reader.latestOffset(offset, ReadMaxRows(333)) == offset  # the first batch only notes the beginning
    while (end := reader.latestOffset(offset, ReadMaxRows(333))) != offset:
        rows = between(reader, offset, end)
        assert len(rows) == min(333, len(expected) - len(found))
        found += rows
        offset = end
    assert found == expected


@pytest.mark.req("P.2")
@pytest.mark.attack("C4")
def test_what_is_not_whole_is_not_read_yet(writer: LogWriter, data: Path) -> None:
    """A torn tail; and messages whose state changes, written with them, are not there: the two are one."""
    writer.messages(10)
    writer.log.sync()
    path = max((data / "log").glob("*.log"))
    size = path.stat().st_size
    tick = encode_messages([run(b"t", b"1")], 10, START_MS, followed=True) + encode_changes([b"\x02abcd"], 11, START_MS)
    header = parse_header(tick)
    assert header is not None
    reader = stream_reader(data, from_="latest")
    start = reader.initialOffset()
    reader.latestOffset(start, ReadAllAvailable())
    for cut in (1, 64, header.length - 1, header.length, len(tick) - 1):
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(tick[:cut])
        assert positions(read(data)) == list(range(10))
        assert reader.latestOffset(start, ReadAllAvailable()) == start
    with path.open("r+b") as file:
        file.seek(size)
        file.write(tick)
    assert positions(read(data)) == list(range(11))
    end = reader.latestOffset(start, ReadAllAvailable())
    assert between(reader, start, end) == [10]


@pytest.mark.req("P.2")
def test_a_stream_follows_a_log_that_grows(spark: SparkSession, writer: LogWriter, data: Path, tmp_path: Path) -> None:
    writer.messages(10)
    found: list[int] = []
    stream = spark.readStream.format("tidegate").options(**options(data, columns="position")).load()
    query = stream.writeStream.foreachBatch(collecting(found)).option("checkpointLocation", str(tmp_path / "c")).start()
    try:
        for i in range(6):
            query.processAllAvailable()
            assert found == list(range(10 + 300 * i))
            writer.messages(300, start=i, size=200)  # across segments
    finally:
        query.stop()


def collecting(found: list[int], batches: list[int] | None = None) -> Callable[[DataFrame, int], None]:
    def take(frame: DataFrame, batch: int) -> None:
        rows = sorted(row.position for row in frame.collect())
        found.extend(rows)
        if batches is not None:
            batches.append(len(rows))

    return take


@pytest.mark.req("P.2")
def test_latest_begins_with_what_comes(spark: SparkSession, writer: LogWriter, data: Path, tmp_path: Path) -> None:
    writer.messages(10)
    found: list[int] = []
    stream = spark.readStream.format("tidegate").options(**options(data, from_="latest")).load()
    query = stream.writeStream.foreachBatch(collecting(found)).option("checkpointLocation", str(tmp_path / "c")).start()
    try:
        query.processAllAvailable()
        writer.messages(5)
        query.processAllAvailable()
    finally:
        query.stop()
    assert found == [10, 11, 12, 13, 14]


@pytest.mark.req("P.2")
@pytest.mark.parametrize("start", ["latest", "earliest", "-1h"])
def test_the_beginning_of_a_query_is_kept_even_if_its_first_batch_fails(
    writer: LogWriter, data: Path, start: str
) -> None:
    """Spark asks for the initial offset again when the first batch was planned but not finished."""
    writer.time_ms = time.time_ns() // 1_000_000
    writer.messages(10)
    first = stream_reader(data, from_=start)
    begin = first.initialOffset()
    planned = first.latestOffset(begin, ReadAllAvailable())  # in the checkpoint; then everything dies
    writer.messages(10)
    second = stream_reader(data, from_=start)
    assert between(second, second.initialOffset(), planned) == []
    end = second.latestOffset(planned, ReadAllAvailable())
    assert between(second, planned, end) == (list(range(10, 20)) if start == "latest" else list(range(20)))


@pytest.mark.req("P.2")
def test_all_that_is_there_now_is_read_in_bounded_batches(
    spark: SparkSession, writer: LogWriter, data: Path, tmp_path: Path
) -> None:
    """AvailableNow ends; no batch is larger than asked for, also where that cuts a frame in two."""
    for i in range(10):
        writer.messages(1000, start=i)
    found: list[int] = []
    batches: list[int] = []

    def run_once() -> None:
        stream = spark.readStream.format("tidegate").options(**options(data, maxRowsPerTrigger=1700)).load()
        made = stream.writeStream.foreachBatch(collecting(found, batches)).trigger(availableNow=True)
        assert made.option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination(100)

    run_once()
    assert found == list(range(10_000))
    run_once()
    assert found == list(range(10_000))
    writer.messages(1000)
    run_once()
    assert found == list(range(11_000))
    assert [rows for rows in batches if rows] == [1700] * 5 + [1500, 1000]


@pytest.mark.req("P.2")
def test_a_stream_ends_where_it_shall(writer: LogWriter, data: Path) -> None:
    writer.messages(100)
    reader = stream_reader(data, until="150")
    start = reader.initialOffset()
    start = reader.latestOffset(start, ReadAllAvailable())
    middle = reader.latestOffset(start, ReadAllAvailable())
    assert between(reader, start, middle) == list(range(100))
    writer.messages(100)
    end = reader.latestOffset(middle, ReadAllAvailable())
    assert between(reader, middle, end) == list(range(100, 150))
    writer.messages(100)
    assert reader.latestOffset(end, ReadAllAvailable()) == end


@pytest.mark.parametrize("limit", [1, 49, 50, 51, 100, 149, 150, 1000])
def test_limits_and_ends_may_lie_anywhere_in_a_frame(writer: LogWriter, data: Path, limit: int) -> None:
    for i in range(4):
        writer.tick([run(b"t/%d" % i, *[b"x"] * 100)], [b"\x7fstate"])
        writer.tick([], [b"\x7fmore state"])
    reader = stream_reader(data, from_="50", until="250")
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    batches: list[list[int]] = []
    while (end := reader.latestOffset(offset, ReadMaxRows(limit))) != offset:
        batches.append(between(reader, offset, end))
        offset = end
    assert [position for batch in batches for position in batch] == list(range(50, 250))
    assert all(len(batch) == limit for batch in batches[:-1])


def test_available_now_does_not_run_after_what_comes_meanwhile(writer: LogWriter, data: Path) -> None:
    writer.messages(100)
    reader = stream_reader(data)
    reader.prepareForTriggerAvailableNow()
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    writer.messages(100)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert between(reader, start, end) == list(range(100))
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert reader.reportLatestOffset()["position"] == 200


def test_offsets_are_plain_numbers(writer: LogWriter, data: Path) -> None:
    writer.messages(100)
    reader = stream_reader(data)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    end = reader.latestOffset(start, ReadMaxRows(30))
    assert end["position"] == 30
    assert all(type(value) is int for value in (*start.values(), *end.values()))
    assert set(end) == {"place", "position"}


DRIVER = """
import sys
from tidegate.pipeline.spark import spark_session
data, out, checkpoint = sys.argv[1:]
spark = spark_session("killed", {"spark.master": "local[2]", "spark.driver.memory": "512m"})
stream = spark.readStream.format("tidegate").option("maxRowsPerTrigger", 500).load(data).select("position")
query = stream.writeStream.format("parquet").option("path", out).option("checkpointLocation", checkpoint).start()
query.awaitTermination()
"""


@pytest.mark.timeout(300)  # it starts a driver of its own
@pytest.mark.req("P.2")
@pytest.mark.attack("C11")
def test_a_query_that_is_killed_goes_on_where_it_was(
    spark: SparkSession, writer: LogWriter, data: Path, tmp_path: Path
) -> None:
    """kill -9 of the whole driver in the middle; the next one, with its checkpoint, completes it: each row once."""
    for i in range(40):
        writer.messages(250, start=i)
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    with (tmp_path / "driver.log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(data), str(out), str(checkpoint)],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        committed = checkpoint / "commits"
        while not (committed.is_dir() and any(each.name == "3" for each in committed.iterdir())):
            assert driver.poll() is None, (tmp_path / "driver.log").read_text()[-3000:]
            time.sleep(0.02)
    finally:
        os.killpg(driver.pid, 9)
        driver.wait()
    stream = spark.readStream.format("tidegate").option("maxRowsPerTrigger", 3000).load(str(data)).select("position")
    query = (
        stream.writeStream.format("parquet")
        .option("path", str(out))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(90)
    found = sorted(row.position for row in spark.read.parquet(str(out)).collect())
    assert found == list(range(10_000))


@pytest.mark.req("P.2")
def test_a_query_that_is_stopped_while_a_broker_writes_goes_on_where_it_was(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    count = 3000

    def publish() -> None:
        with RawClient(broker.port, 5) as client:
            client.connect("p")
            for i in range(count):
                client.publish(f"t/{i % 7}", b"%d" % i, qos=1)

    publisher = threading.Thread(target=publish)
    publisher.start()
    stops = 0
    while publisher.is_alive() or stops < 2:
        query = streaming(spark, broker.data, out, checkpoint)
        until_s = time.monotonic() + 60
        while (query.lastProgress is None or query.lastProgress.batchId < 1) and time.monotonic() < until_s:
            assert query.exception() is None
            if not query.isActive or not publisher.is_alive():
                break
            time.sleep(0.01)
        query.stop()
        stops += 1
    assert streaming(spark, broker.data, out, checkpoint, availableNow=True).awaitTermination(60)
    rows = spark.read.parquet(str(out)).collect()
    assert sorted(int(row.payload) for row in rows) == list(range(count))
    assert len({row.position for row in rows}) == count


def streaming(spark: SparkSession, data: Path, out: Path, checkpoint: Path, **trigger: bool) -> Any:
    stream = spark.readStream.format("tidegate").option("filter", "t/+").load(str(data))
    made = stream.selectExpr("position", "cast(payload as string) as payload").writeStream.format("parquet")
    made = made.option("path", str(out)).option("checkpointLocation", str(checkpoint))
    return (made.trigger(**trigger) if trigger else made).start()  # type: ignore[arg-type]


# ── when something is wrong ──


def damaged(writer: LogWriter, data: Path) -> None:
    for i in range(3):
        writer.messages(100, start=100 * i)
    writer.close()
    path = max((data / "log").glob("*.log"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.req("P.2", "P.11")
@pytest.mark.attack("C4")
def test_damage_is_stepped_over_and_told(writer: LogWriter, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged(writer, data)
    assert positions(read(data)) == [*range(100), *range(200, 300)]
    assert "positions 100 to 199 cannot be read" in caplog.text
    assert positions(read(data, filter="t/3")) == [*range(3, 100, 10), *range(203, 300, 10)]


@pytest.mark.req("P.11")
def test_damage_ends_the_query_if_it_shall(spark: SparkSession, writer: LogWriter, data: Path) -> None:
    damaged(writer, data)
    with pytest.raises(CorruptLog, match="positions 100 to 199 cannot be read"):
        read(data, damage="fail")
    with pytest.raises(PySparkException, match="positions 100 to 199 cannot be read"):
        spark.read.format("tidegate").options(**options(data, damage="fail")).load().collect()


def test_a_missing_segment_is_damage(writer: LogWriter, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(30):
        writer.messages(100, start=i, size=100)
    everything = read(data)
    segments = sorted((data / "log").glob("*.log"))
    assert len(segments) >= 4
    segments[1].unlink()
    found = positions(read(data))
    assert 0 < len(found) < len(everything)
    assert "is missing" in caplog.text
    with pytest.raises(CorruptLog, match="is missing"):
        read(data, damage="fail")


@pytest.mark.req("P.2")
def test_a_stream_that_the_broker_has_overtaken_is_told_where_to_read(
    spark: SparkSession, writer: LogWriter, data: Path, tmp_path: Path
) -> None:
    for i in range(30):
        writer.messages(100, start=i, size=100)
    stream = spark.readStream.format("tidegate").options(**options(data, maxRowsPerTrigger=150)).load()
    made = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    query = made.trigger(processingTime="1 hour").start()
    while query.lastProgress is None:
        time.sleep(0.01)
    query.stop()
    sealed = [segment for segment in writer.log.segments() if segment.sealed]
    writer.log.drop(sealed[:2])
    query = made.trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=r"were trimmed before this query read them.*lake.*messages"):
        query.awaitTermination(60)


def test_a_segment_that_goes_while_it_is_read_is_told(writer: LogWriter, data: Path) -> None:
    for i in range(30):
        writer.messages(100, start=i, size=100)
    made = TidegateDataSource(options(data))
    reader = made.reader(made.schema())
    planned = reader.partitions()
    writer.log.drop([segment for segment in writer.log.segments() if segment.sealed][:1])
    with pytest.raises(LogGone, match=r"segment 1 is no longer in the log: the broker trimmed it.*lake"):
        list(reader.read(planned[0]))
    assert sum(batch.num_rows for batch in reader.read(planned[-1])) > 0


def test_a_stream_at_the_end_of_a_trimmed_segment_has_lost_nothing(writer: LogWriter, data: Path) -> None:
    while len(writer.log.segments()) < 3:
        writer.messages(100, size=100)
    first, second, _ = writer.log.segments()
    reader = stream_reader(data, damage="fail")
    start = {"place": first.sequence << 32 | first.bytes, "position": first.end}
    writer.log.drop([first])
    end = reader.latestOffset(start, ReadAllAvailable())
    assert between(reader, start, end)[0] == second.base


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"filtre": "a"}, "option filtre: there is no such option .known are path, from, until"),
        ({"from_": "yesterday"}, "option from: 'yesterday' is no place in the log .allowed are `earliest`"),
        ({"until": "2026-13-01"}, "option until: '2026-13-01' is no place"),
        ({"filter": "a/#/b"}, "option filter: 'a/#/b': `#` must be the last level"),
        ({"filter": "$share/g/a"}, "option filter: .* is no plain filter"),
        ({"columns": "topic,paylod"}, "option columns: there is no column 'paylod' .known are position, time"),
        ({"maxRowsPerTrigger": "0"}, "option maxRowsPerTrigger: '0' is not allowed .a number from 1"),
        ({"maxRowsPerTrigger": "many"}, "option maxRowsPerTrigger: 'many' is not allowed"),
        ({"bytesPerSplit": "1"}, "option bytesPerSplit: '1' is not allowed .a number from 65536"),
        ({"damage": "ignore"}, "option damage: 'ignore' is not allowed .one of skip, fail"),
        ({"path": "/there/is/none"}, "option path: there is no folder /there/is/none"),
        ({"path": ""}, "option path: is missing"),
        ({"from_": "latest"}, "option from: a batch query has nothing to read from `latest` on"),
    ],
)
def test_a_wrong_option_is_told_with_what_is_right(
    writer: LogWriter, data: Path, given: dict[str, str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        read(data, **given)


def test_a_folder_without_a_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no log .the broker's data folder, or its log folder"):
        read(tmp_path)


def test_spark_tells_wrong_options_when_it_loads(spark: SparkSession, writer: LogWriter, data: Path) -> None:
    with pytest.raises(AnalysisException, match="option from: 'noon' is no place in the log"):
        spark.read.format("tidegate").options(**options(data, from_="noon")).load()
    with pytest.raises(AnalysisException, match="option filtre: there is no such option"):
        spark.readStream.format("tidegate").options(**options(data, filtre="a")).load()
    with pytest.raises(PySparkException, match=r"schema: the column 'qos' has another type .it is tinyint"):
        spark.read.format("tidegate").schema("qos string").load(str(data)).collect()


def test_a_stream_cannot_begin_in_the_future(writer: LogWriter, data: Path) -> None:
    writer.messages(1)
    with pytest.raises(ConfigError, match="lies in the future"):
        stream_reader(data, from_="2999-01-01").initialOffset()
    assert read(data, from_="2999-01-01") == []


def test_an_empty_log_has_no_rows(spark: SparkSession, data: Path) -> None:
    (data / "log").mkdir(parents=True)
    frame = spark.read.format("tidegate").load(str(data))
    assert frame.collect() == []
    writer = LogWriter(data / "log")
    writer.messages(3)
    assert spark.read.format("tidegate").load(str(data)).count() == 3
    writer.close()


def test_a_stream_may_begin_before_the_first_message(data: Path) -> None:
    (data / "log").mkdir(parents=True)
    reader = stream_reader(data)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    writer = LogWriter(data / "log")
    writer.messages(30)
    middle = reader.latestOffset(start, ReadMaxRows(20))
    end = reader.latestOffset(middle, ReadMaxRows(20))
    assert between(reader, start, middle) + between(reader, middle, end) == list(range(30))
    writer.close()


def test_arrow_can_carry_what_spark_expects(writer: LogWriter, data: Path) -> None:
    """Spark compares the schema of the first batch only; all others must have the same."""
    writer.messages(100)
    writer.tick([Run(b"a", b"p", b"", 1, [b"x"], [b"\x01\x01"], [5], [b"u" * 16])])
    made = TidegateDataSource(options(data, bytesPerSplit=64 << 10))
    reader = made.reader(made.schema())
    schemas: set[pa.Schema] = {batch.schema for partition in reader.partitions() for batch in reader.read(partition)}
    assert len(schemas) == 1
