"""Replay: a slice of the lake, published again, in order."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from jobs_kit import archived, context_of
from log_writer import START_MS, LogWriter, run
from pyspark.sql import SparkSession
from stored import stored_messages

from harness import BrokerProcess, RawClient
from tidegate.cli import tidegate
from tidegate.client.publisher import BulkPublisher
from tidegate.errors import ConfigError
from tidegate.log.run import Run
from tidegate.pipeline.jobs import replay as job
from tidegate.pipeline.jobs.replay import Replay, Selection, Speed, Template
from tidegate.pipeline.lake import Lake
from tidegate.router.filters import Start

PROPERTIES = bytes.fromhex("26 0001 6b 0001 76")  # a user property k=v


@pytest.fixture(scope="module")
def data(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Positions 0 … 402; each hundred, and the rest, is a second of its own."""
    folder = tmp_path_factory.mktemp("replay")
    writer = LogWriter(folder / "log")
    context = context_of(spark, folder)
    for part in range(4):
        runs = [run(b"plant/%d/temp" % (i % 3), b"%d" % (100 * part + i)) for i in range(100)]
        writer.tick(runs)
        archived(context)  # so that there is a file for each
    writer.tick(
        [
            Run(b"rich", b"p", b"", 2, [b"400"], [PROPERTIES], [77], None),
            run(b"kept", b"401", flags=5),
            run(b"plant/1/temp", b"402", flags=0, tenant=b"other"),
        ]
    )
    writer.close()
    archived(context)
    assert len(context.lake.files("messages")) == 5
    return folder


@pytest.fixture
def subscriber(broker: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(broker.port, 5) as raw:
        raw.connect("subscriber")
        raw.subscribe("#", qos=2, retain_as_published=True)
        yield raw


Send = Callable[..., Result]


@pytest.fixture
def send(data: Path, broker: BrokerProcess) -> Send:
    def sent(*options: object) -> Result:
        given = ["replay", "--data", str(data), "--port", str(broker.port), *map(str, options)]
        return CliRunner().invoke(tidegate, given)

    return sent


def numbers(client: RawClient, count: int) -> list[int]:
    found = [int(payload) for payload in client.payloads(count)]
    client.nothing(0.1)
    return found


def on_plant(part: int, *positions: int) -> list[int]:
    """Those of the positions that are on plant/<part>/temp."""
    return [at for at in positions if at < 400 and at % 100 % 3 == part]


@pytest.mark.req("P.10")
def test_everything_is_sent_again_in_order(
    send: Send, subscriber: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "STEP_ROWS", 150)  # some files together, not all
    result = send()
    assert result.exit_code == 0, result.stderr
    assert "sent 403 messages" in result.stderr
    assert numbers(subscriber, 403) == list(range(403))


@pytest.mark.req("P.10")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--filter", "plant/1/+", "--to", 150), on_plant(1, *range(150))),
        (("--filter", "plant/1/temp", "--tenant", "other"), [402]),
        (("--from", 90, "--to", 110), list(range(90, 110))),
        (("--from", f"@{START_MS + 2000}", "--to", f"@{START_MS + 4000}"), list(range(100, 300))),
        (("--from", f"@{START_MS + 5000}"), [400, 401, 402]),
        (("--from", 395, "--filter", "#", "--tenant", ""), [395, 396, 397, 398, 399, 400, 401]),
    ],
)
def test_a_slice_is_what_was_asked_for(
    send: Send, subscriber: RawClient, options: tuple[object, ...], expected: list[int]
) -> None:
    assert send(*options).exit_code == 0
    assert numbers(subscriber, len(expected)) == expected


@pytest.mark.req("P.10")
def test_a_message_is_as_it_was(send: Send, subscriber: RawClient, broker: BrokerProcess) -> None:
    assert send("--from", 400).exit_code == 0
    rich, kept, last = (subscriber.message() for _ in range(3))
    assert (rich.topic, rich.payload, rich.qos) == (b"rich", b"400", 2)
    assert rich.properties.user == ((b"k", b"v"),)
    assert rich.properties.message_expiry == 77
    assert (kept.qos, kept.retain, last.qos) == (1, False, 0)
    with RawClient(broker.port, 5) as later:
        later.connect("later")
        later.subscribe("#")
        later.nothing()  # what is retained today stays as it is
        assert send("--from", 401, "--to", 402, "--retain", "--qos", 0, "--to-topic", "old/{topic}").exit_code == 0
        found = later.message()
        assert (found.topic, found.payload) == (b"old/kept", b"401")
    assert subscriber.message().retain


def test_topics_can_be_rearranged(send: Send, subscriber: RawClient) -> None:
    assert send("--to", 2, "--to-topic", "lab/{3}/{2}/{topic}").exit_code == 0
    assert [subscriber.message().topic for _ in range(2)] == [
        b"lab/temp/0/plant/0/temp",
        b"lab/temp/1/plant/1/temp",
    ]
    result = send("--to-topic", "{3}")
    assert result.exit_code == 2
    assert "a topic has only 1 levels, and {3} is used" in result.stderr
    subscriber.nothing(0.1)


def test_a_dry_run_sends_nothing_and_says_what_it_would(send: Send, subscriber: RawClient) -> None:
    result = send("--filter", "plant/#", "--dry-run")
    assert result.exit_code == 0
    assert "would send 401 messages on about 3 topics, positions 0 to 402, from 2027-01-15T08:" in result.stdout
    subscriber.nothing(0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--filter", "plant/#/x"), "`#` must be the last level"),
        (("--filter", "$share/g/x"), "a plain filter is needed"),
        (("--filter", "nobody"), "there is nothing to send"),
        (("--from", "yesterday"), "cannot replay from"),
        (("--speed", "fast"), "'fast' is no speed"),
        (("--to-topic", "a/+/b"), "makes no topic that can be published to"),
        (("--to-topic", "a/{nonsense}"), "{nonsense} stands for nothing"),
        (("--where", "true"), "add --dead-letters"),
        (("--dead-letters",), "there is nothing to send"),
    ],
)
def test_what_cannot_work_is_told(data: Path, spark: SparkSession, options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(tidegate, ["replay", "--data", str(data), "--port", "1", *options])
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_a_broker_that_is_not_there_is_told(data: Path, spark: SparkSession) -> None:
    result = CliRunner().invoke(tidegate, ["replay", "--data", str(data), "--port", "1"])
    assert (result.exit_code, "cannot connect to 127.0.0.1:1" in result.stderr) == (1, True)


def test_the_broker_and_the_data_are_found_through_the_configuration(
    data: Path, broker: BrokerProcess, subscriber: RawClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tidegate.toml").write_text(f"data = '{data}'\n[listen]\nhost = '0.0.0.0'\nport = {broker.port}\n")
    result = CliRunner().invoke(tidegate, ["replay", "--from", "400", "--to", "402"])
    assert result.exit_code == 0, result.stderr
    assert numbers(subscriber, 2) == [400, 401]


# ── pace ──


def test_the_pace_is_the_messages_own_or_an_even_one() -> None:
    times_us = np.array([5, 7, 6, 11], np.int64) * 1_000_000
    assert Speed.parse("max").due_s(times_us, 5_000_000, 0) is None
    double = Speed.parse("2x").due_s(times_us, 5_000_000, 0)
    assert double is not None and double.tolist() == [0, 1, 1, 3]  # a clock that went back
    even = Speed.parse("10/s").due_s(times_us, 0, 4)
    assert even is not None and even.tolist() == [0.4, 0.5, 0.6, 0.7]
    assert Speed.parse("10") == Speed.parse("10 msg/s") == Speed(per_second=10)
    assert Speed.parse("0.5x") == Speed(factor=0.5)
    for wrong in ("0x", "-1x", "x", "1y", "", "1e9x", "0"):
        with pytest.raises(ConfigError):
            Speed.parse(wrong)


def test_a_paced_replay_sends_the_same(send: Send, subscriber: RawClient) -> None:
    assert send("--speed", "20x").exit_code == 0  # four seconds of messages
    assert numbers(subscriber, 403) == list(range(403))
    assert send("--speed", "5000/s", "--from", 300).exit_code == 0
    assert numbers(subscriber, 103) == list(range(300, 403))


@pytest.mark.req("P.10")
@pytest.mark.parametrize(("speed", "least_s"), [("2x", 4 / 2), ("100/s", 403 / 100)], ids=["2x", "100 a second"])
def test_a_paced_replay_takes_as_long_as_was_asked_for(
    send: Send, broker: BrokerProcess, speed: str, least_s: float
) -> None:
    """By the times at which the broker took the messages; four seconds of them, at twice their pace or an even one."""
    assert send("--speed", speed).exit_code == 0
    times_ms = [record.run.time_ms for record in stored_messages(broker.data)]
    assert len(times_ms) == 403
    assert times_ms[-1] - times_ms[0] >= 0.75 * least_s * 1000
    middle_ms = times_ms[201] - times_ms[0]
    assert 0 < middle_ms < times_ms[-1] - times_ms[0]  # and not all at its end


# ── stopping ──


def batches_from(spark: SparkSession, data: Path, position: int) -> Iterator[object]:
    selection = Selection(Start("position", position))
    return job.in_order(spark, Lake(data / "lake"), selection, lambda rows: job.as_published(rows, None, None, False))


@pytest.mark.req("P.10")
def test_a_replay_that_was_stopped_goes_on_where_it_was(
    spark: SparkSession, data: Path, broker: BrokerProcess, subscriber: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SEND_ROWS", 30)
    stop = threading.Event()
    with BulkPublisher("127.0.0.1", broker.port) as publisher:
        reached = Replay(publisher, Speed(), stop).run(
            batches_from(spark, data, 0), lambda sent: stop.set() if sent >= 130 else None
        )
    assert reached.exact and reached.after == {"position": reached.sent - 1}
    assert 130 <= reached.sent < 200
    with BulkPublisher("127.0.0.1", broker.port) as publisher:
        rest = Replay(publisher, Speed(), threading.Event()).run(
            batches_from(spark, data, reached.sent), lambda sent: None
        )
    assert reached.sent + rest.sent == 403
    assert numbers(subscriber, 403) == list(range(403))


@pytest.mark.req("P.10")
def test_ctrl_c_stops_the_command_and_it_says_how_to_go_on(
    data: Path, send: Send, broker: BrokerProcess, subscriber: RawClient
) -> None:
    options = ["--data", str(data), "--port", str(broker.port), "--speed", "60/s"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate.cli", "replay", *options], stderr=subprocess.PIPE, text=True
    )
    first = subscriber.message(90.0).payload  # it has begun
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    found = re.search(r"stopped after (\d+) messages? in .*; go on with --from (\d+)", said)
    assert found is not None and found[1] == found[2], said
    assert send("--from", found[2]).exit_code == 0
    assert [int(first), *numbers(subscriber, 402)] == list(range(403))


@pytest.mark.req("P.10")
def test_a_broker_that_goes_away_for_good_is_told_with_where_to_go_on(
    spark: SparkSession, data: Path, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SEND_ROWS", 30)
    publisher = BulkPublisher("127.0.0.1", broker.port, patience_s=1.0)
    replay = Replay(publisher, Speed(), threading.Event())
    with pytest.raises(Exception, match="was not there for 1 s") as caught:
        replay.run(batches_from(spark, data, 0), lambda sent: broker.kill() if sent == 30 else None)
    publisher.close()
    reached = replay.reached(caught.value)
    assert not reached.exact
    assert (reached.sent, reached.after) == (0, None), "within one window nothing is certain"


def test_a_message_that_the_broker_refuses_is_named(
    start_broker: Callable[..., BrokerProcess], data: Path, spark: SparkSession
) -> None:
    broker = start_broker(mqtt__topic_levels_max=6)
    options = ["--from", "399", "--to-topic", "a/very/deep/{topic}/x"]
    result = CliRunner().invoke(tidegate, ["replay", "--data", str(data), "--port", str(broker.port), *options])
    assert result.exit_code == 1
    assert "a/very/deep/plant/0/temp/x" in result.stderr
    assert "go on with --from 400" in result.stderr


def test_the_template_says_what_it_needs() -> None:
    assert Template("a/{2}/{topic}").levels == 2
    assert Template("plain").levels == 0
    for wrong in ("", "$SYS/{topic}", "a/#", "a{", "}", "{0}", "{1001}"):
        with pytest.raises(ConfigError):
            Template(wrong)
