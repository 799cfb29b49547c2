"""A filter as a Spark condition gives the same answers as the router's own `matches`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from router.topic_strategies import filters, topics
from tidegate.pipeline.topics import topic_matches
from tidegate.router.filters import matches

# What a regular expression, or a string on its way to one, might take for something else.
NASTY = ["a", ".", "a.c", "^", "a$", "(a", "a)", "[a]", "{2}", "a*", "a?", "|", "\\", "\\Qa\\E", "\\d"]
NASTY += ["a\nb", "\n", "a\n", "\r", "\u2028", "\u0085", "%", "_", "'", '"', "`"]
NASTY += ["${a}", "é", "e\u0301", "🌊", " ", "\t", "A", "&&", "-"]


def answers(spark: SparkSession, wanted: list[str], names: list[str]) -> list[tuple[str, list[bool]]]:
    frame = spark.createDataFrame([(name,) for name in names], "topic string").coalesce(1)
    rows = frame.select("topic", f.array(*[topic_matches(f.col("topic"), each) for each in wanted]).alias("is"))
    return [(row["topic"], row["is"]) for row in rows.collect()]


def expected(wanted: list[str], names: list[str]) -> list[tuple[str, list[bool]]]:
    return [(name, [matches(each.encode(), name.encode()) for each in wanted]) for name in names]


def text(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[str]]:
    return st.lists(values.map(bytes.decode), min_size=20, max_size=60)


@pytest.mark.req("P.4", "P.10")
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(wanted=text(filters), names=text(topics))
def test_a_condition_matches_what_the_router_matches(spark: SparkSession, wanted: list[str], names: list[str]) -> None:
    assert answers(spark, wanted, names) == expected(wanted, names)


@pytest.mark.req("P.4", "P.10")
def test_nothing_in_a_filter_but_its_wildcards_means_anything_else(spark: SparkSession) -> None:
    levels = [each for each in NASTY if "+" not in each and "#" not in each]
    names = levels + [f"{each}/x" for each in levels] + [f"x/{each}" for each in levels] + ["x", "abc", "$", "$a/x"]
    wanted = ["#", "+", "+/x", "x/+", "+/#", "$a/#", "$a/+", "/#"]
    for each in levels:
        wanted += [each, f"{each}/#", f"{each}/+", f"+/{each}", f"x/{each}/#"]
    assert answers(spark, wanted, names) == expected(wanted, names)
