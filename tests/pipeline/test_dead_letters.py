"""Messages that were given up: in the lake they are rows with a reason, for triage by SQL, and can be sent again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from jobs_kit import archived, context_of, table
from log_writer import START_MS, LogWriter, run
from pyspark.sql import SparkSession

from harness import BrokerProcess, RawClient
from tidegate.cli import tidegate
from tidegate.session import changes
from tidegate.session.changes import NEVER_STORED, Dead, DeadReason


def letter(reason: DeadReason, payload: bytes, **fields: object) -> bytes:
    dead = Dead(reason, 3, 7, START_MS, 1, False, b"pump", b"", b"a/b", b"p", b"why", b"", payload)
    return changes.dead(dead._replace(**fields))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def data(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dead")
    writer = LogWriter(folder / "log")
    writer.tick([run(b"a/b", b"fine")], [letter(DeadReason.EXPIRED, b"1"), letter(DeadReason.TOO_LARGE, b"2")])
    writer.tick(
        [],
        [
            letter(DeadReason.DELIVERY_FAILED, b"3", topic=b"c", time_ms=START_MS + 60_000, retain=True),
            letter(DeadReason.EXPIRED, b"4", client=b"lamp", position=NEVER_STORED),
            b"\x0cjunk",
        ],
    )
    writer.close()
    context = archived(context_of(spark, folder))
    assert len(table(context, "dead_letters")) == 4
    assert [reason for (reason,) in table(context, "quarantine", "reason")] == ["unreadable record"]
    return folder


@pytest.fixture
def subscriber(broker: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(broker.port, 5) as raw:
        raw.connect("subscriber")
        raw.subscribe("#", qos=1)
        yield raw


def command(name: str, *arguments: object) -> Result:
    return CliRunner().invoke(tidegate, [name, *map(str, arguments)])


@pytest.mark.req("P.7")
def test_dead_letters_are_triaged_by_sql(data: Path) -> None:
    query = "select reason, count(*) as n, max(attempts) as most from dead_letters group by reason order by reason"
    result = command("sql", query, "--format", "json", "--data", data)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"reason": "delivery_failed", "n": 1, "most": 3},
        {"reason": "expired", "n": 2, "most": 3},
        {"reason": "too_large", "n": 1, "most": 3},
    ]


@pytest.mark.req("P.7")
def test_chosen_dead_letters_are_sent_again_in_order(data: Path, broker: BrokerProcess, subscriber: RawClient) -> None:
    def send(*options: object) -> Result:
        return command("replay", "--dead-letters", "--data", data, "--port", broker.port, *options)

    assert send().exit_code == 0
    assert subscriber.payloads(4) == [b"1", b"2", b"3", b"4"]
    assert send("--where", "reason = 'expired' and client = 'lamp'").exit_code == 0
    assert subscriber.payloads(1) == [b"4"]
    assert send("--filter", "c", "--to-topic", "requeued/{topic}").exit_code == 0
    assert subscriber.message().topic == b"requeued/c"
    assert send("--from", f"@{START_MS + 30_000}").exit_code == 0
    assert subscriber.payloads(1) == [b"3"]
    for where, message in (
        ("reasn = 'x'", "--where: A column, variable, or function parameter with name `reasn` cannot be resolved"),
        ("reason = ", "--where: Syntax error"),
        ("true; drop view dead_letters", "--where: Syntax error"),
        ("reason = 'none'", "there is nothing to send"),
    ):
        result = send("--where", where)
        assert result.exit_code in (1, 2)
        assert message in result.stderr
    subscriber.nothing(0.1)
