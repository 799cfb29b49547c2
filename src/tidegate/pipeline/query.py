"""SQL on the lake that can only look: queries, SHOW, DESCRIBE and EXPLAIN, and no table but the lake's."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from tidegate.errors import TidegateError
from tidegate.pipeline.lake import Lake

_PLANS = "org.apache.spark.sql.catalyst.plans.logical."
_LOOKING = re.compile(r"(Show(Tables|Views|Columns|Functions)|Describe\w+|Explain)(Command)?")
"""Commands that change nothing."""
_ACTING = re.compile(r"^[\s:+-]*'?(ScriptTransformation|InsertIntoDir|Call|UnresolvedExecuteImmediate)\b", re.MULTILINE)
"""What is no command to Spark, and acts all the same, wherever it stands in a plan."""
_REACHING_OUT = ("reflect", "try_reflect", "java_method")
"""Functions that call any method of any class."""


class BadQuery(TidegateError):
    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def query(spark: SparkSession, lake: Lake, text: str) -> DataFrame:
    """What `text` asks for, in a session of its own in which the lake's tables have their names. Raises BadQuery;
    what goes wrong later, while it runs, is for `explained`."""
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # it reports what it raises as well
    session = spark.newSession()
    session.conf.set("spark.sql.runSQLOnFiles", "false")
    _forget_functions(session)
    try:
        command = _check(session, text)
        for name in lake.names():
            # Only what is mentioned: a table with many files takes a while to list.
            if command or re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE):
                lake.read(session, name).createOrReplaceTempView(name)
        return session.sql(text)
    except ParseException as error:
        raise BadQuery(explained(error)) from error
    except AnalysisException as error:
        if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
            raise BadQuery(explained(error)) from error
        message = explained(error).partition(" Verify the spelling")[0]
        raise BadQuery(message, f"the lake's tables are {', '.join(lake.names())}") from error


def explained(error: PySparkException) -> str:
    """What is wrong, and where in the query, without anything of the machine below."""
    message = error.getMessage() or str(error)
    message = re.sub(r"^\s*\[[A-Z0-9_.]+\] | SQLSTATE: \w{5}", "", message).strip()
    where = re.search(r"^== SQL.*?==\n(.*?)(?=\n\n|\nJVM stacktrace|\Z)", str(error), re.MULTILINE | re.DOTALL)
    return f"{message}\n{where[1].rstrip()}" if where else message.partition("\n")[0]


def _check(session: SparkSession, text: str) -> bool:
    """Refuse what does more than look. Returns whether it is a command."""
    plan = session._jsparkSession.sessionState().sqlParser().parsePlan(text)
    root = plan.getClass().getSimpleName()
    jvm: Any = session._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    kinds = [jvm.java.lang.Class.forName(_PLANS + name, False, loader) for name in ("Command", "ParsedStatement")]
    command = bool(kinds[0].isInstance(plan))
    if command and _LOOKING.fullmatch(root):
        return True
    if _ACTING.search(plan.toString()) or any(kind.isInstance(node) for node in _nodes(plan) for kind in kinds):
        raise BadQuery("the lake can only be looked at", "allowed are queries, SHOW, DESCRIBE and EXPLAIN")
    return False


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    children = plan.children()
    for i in range(children.size()):
        yield from _nodes(children.apply(i))


def _forget_functions(session: SparkSession) -> None:
    jvm: Any = session._jvm
    registry = session._jsparkSession.sessionState().functionRegistry()
    schema, catalog = (jvm.scala.Some.apply(name) for name in ("builtin", "system"))
    for name in _REACHING_OUT:
        registry.dropFunction(jvm.org.apache.spark.sql.catalyst.FunctionIdentifier(name, schema, catalog))
