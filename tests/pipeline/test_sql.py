"""`tidegate sql`: the lake for people and programs, to look at and nothing else."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from jobs_kit import archived, context_of
from log_writer import LogWriter, run
from pyspark.sql import SparkSession

from tidegate.cli import tidegate
from tidegate.session import changes

Ask = Callable[..., Result]


@pytest.fixture(scope="module")
def data(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sql")
    writer = LogWriter(folder / "log")
    writer.tick([run(b"demo/a", b"hello", "grüß\n\x1b[31m".encode()), run(b"demo/b", b"\xff\x00", publisher=b"q")])
    writer.tick([run(b"many/%d" % (i % 7), b"%d" % i) for i in range(250)], [changes.gone(1)])
    writer.close()
    archived(context_of(spark, folder))
    return folder


@pytest.fixture
def ask(data: Path) -> Ask:
    def asked(query: str, *options: object) -> Result:
        return CliRunner().invoke(tidegate, ["sql", query, "--data", str(data), *map(str, options)])

    return asked


def lines(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.req("P.1")
def test_programs_get_json_with_payloads_as_text_where_they_are(ask: Ask) -> None:
    found = lines(ask("select * from messages where topic like 'demo/%' order by position", "--format", "json"))
    assert [row.get("payload") for row in found] == ["hello", "grüß\n\x1b[31m", None]
    assert found[2]["payload_hex"] == "ff00"
    assert found[0] | {"payload": ""} == {
        "position": 0, "time": "2027-01-15T08:00:01.000Z", "tenant": "", "topic": "demo/a", "publisher": "p", "qos": 1,
        "retain": False, "payload": "", "uuid": None, "expiry": None, "properties": None,
    }  # fmt: skip


def test_programs_get_csv(ask: Ask) -> None:
    query = "select topic, payload, position from messages where position < 3 order by position desc"
    result = ask(query, "--format", "csv")
    rows = list(csv.reader(io.StringIO(result.stdout, newline="")))
    assert rows == [
        ["topic", "payload", "position"],
        ["demo/b", "0xff00", "2"],
        ["demo/a", "grüß\n\x1b[31m", "1"],
        ["demo/a", "hello", "0"],
    ]


def test_people_get_a_table_with_a_bound_in_which_content_is_only_text(ask: Ask) -> None:
    result = ask("select position, payload from messages order by position")
    assert result.exit_code == 0
    assert "grüß\\n\\u001b[31m" in result.stdout and "\x1b[31m" not in result.stdout
    assert "0xff00" in result.stdout
    assert " 99 " in result.stdout and " 100 " not in result.stdout
    assert "100 rows, and there are more" in result.stderr
    result = ask("select 1 as one, null as nothing, array('a', 'b') as some")
    assert '["a", "b"]' in result.stdout and "null" in result.stdout
    assert result.stderr.endswith("1 row\n")


def test_rows_come_in_the_order_asked_for_and_no_more_than_asked_for(ask: Ask) -> None:
    query = "select position from messages where topic like 'many/%' order by payload desc, position"
    every = lines(ask(query, "--format", "json"))
    assert len(every) == 250 and every[0] == {"position": 3 + 99}
    assert lines(ask(query, "--format", "json", "--limit", 5)) == every[:5]
    assert "5 rows, and there are more" in ask(query, "--limit", 5).stderr


def test_a_file_holds_the_result_when_it_is_whole(ask: Ask, tmp_path: Path) -> None:
    query = "select topic, count(*) as messages, max(time) as last, first(payload) as p from messages group by topic"
    for name in ("out.parquet", "out.csv", "out.jsonl"):
        result = ask(query, "--out", tmp_path / name)
        assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.jsonl", "out.parquet"]
    table = pq.read_table(tmp_path / "out.parquet")
    assert sorted(table.column("topic").to_pylist())[:2] == ["demo/a", "demo/b"]
    assert sum(table.column("messages").to_pylist()) == 253
    assert [str(field.type) for field in table.schema] == ["string", "int64", "timestamp[us, tz=UTC]", "binary"]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 9
    assert ask("select assert_true(false)", "--out", tmp_path / "bad.csv").exit_code == 1
    assert not list(tmp_path.glob("*bad*"))
    nothing = ask("select * from messages where false", "--out", tmp_path / "none.parquet")
    assert nothing.exit_code == 0 and pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_columns_of_the_same_name_are_told_apart(ask: Ask) -> None:
    assert lines(ask("select 1 as x, 2 as x, 3 as x", "--format", "json")) == [{"x": 1, "x_2": 2, "x_3": 3}]


@pytest.mark.parametrize(
    "statement",
    [
        "insert into messages select * from messages",
        "with x as (select * from messages) insert into messages select * from x",
        "from messages insert into a select * insert into b select *",
        "insert overwrite directory '/tmp/never' using parquet select 1",
        "create table t as select 1",
        "create temporary view messages as select 1",
        "drop view messages",
        "delete from messages",
        "update messages set qos = 0",
        "truncate table messages",
        "cache table messages",
        "set spark.sql.ansi.enabled = false",
        "add jar '/tmp/never.jar'",
        "use other",
        "call system.anything()",
        "execute immediate 'drop view messages'",
        "begin drop view messages; end",
        "select transform(topic) using 'cat' from messages",
        "select * from messages where topic in (select transform(topic) using 'cat' from messages)",
        "with x as (select transform(topic) using 'cat' as t from messages) select * from x",
    ],
)
def test_whatever_does_more_than_look_is_refused(ask: Ask, statement: str) -> None:
    result = ask(statement)
    assert result.exit_code == 2
    assert "the lake can only be looked at" in result.stderr
    assert "hint: allowed are queries, SHOW, DESCRIBE and EXPLAIN" in result.stderr


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("selec 1", "Syntax error at or near 'selec'"),
        ("select nonsense from messages", "`nonsense` cannot be resolved. Did you mean"),
        ("select * from mesages", "The table or view `mesages` cannot be found"),
        ("select * from parquet.`/etc/hostname`", "cannot be found"),
        ("select reflect('java.lang.System', 'lineSeparator')", "Cannot resolve routine `reflect`"),
        ("select 1; select 2", "Syntax error at or near 'select'"),
        ("", "empty statement"),
    ],
)
def test_mistakes_are_told_in_a_few_words(ask: Ask, query: str, message: str) -> None:
    result = ask(query)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "stacktrace" not in result.stderr and "org.apache" not in result.stderr and "SQLSTATE" not in result.stderr
    assert len(result.stderr.splitlines()) <= 6


def test_an_unknown_table_is_answered_with_those_there_are(ask: Ask) -> None:
    assert "hint: the lake's tables are messages, quarantine, sessions" in ask("select * from nope").stderr.replace(
        "dead_letters, ", ""
    )


def test_what_goes_wrong_while_it_runs_is_told_in_a_few_words(ask: Ask) -> None:
    result = ask("select qos / (position - 1) from messages")
    assert result.exit_code == 1
    assert "Division by zero" in result.stderr and "org.apache" not in result.stderr


def test_tables_and_columns_can_be_asked_for(ask: Ask) -> None:
    assert {"messages", "sessions"} <= {row["tableName"] for row in lines(ask("show tables", "--format", "json"))}
    described = lines(ask("describe messages", "--format", "json"))
    assert {"col_name": "payload", "data_type": "binary", "comment": None} in described
    assert "Physical Plan" in ask("explain select count(*) from messages", "--format", "csv").stdout


def test_options_that_do_not_go_together_are_refused(ask: Ask, tmp_path: Path) -> None:
    assert "name a file with --out" in ask("select 1", "--format", "parquet").stderr
    assert "add --format" in ask("select 1", "--out", tmp_path / "x.txt").stderr
    assert "is for people" in ask("select 1", "--format", "table", "--out", tmp_path / "x").stderr
    result = CliRunner().invoke(tidegate, ["sql", "select 1", "--data", str(tmp_path)])
    assert result.exit_code == 2 and "there is no lake in" in result.stderr


@pytest.mark.req("P.1")
def test_the_command_works_in_a_process_of_its_own(data: Path) -> None:
    query = "select count(*) as n from messages"
    command = [sys.executable, "-m", "tidegate.cli", "sql", query, "--format", "json", "--data", str(data)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, '{"n": 253}\n', "")
