"""Topic filters as Spark conditions: the same answers as `router.filters.matches`, from the JVM.

A filter becomes a regular expression, and its literal beginning a condition of its own: Spark hands that one down to
the Parquet reader, which skips what cannot match by its statistics.
"""

from __future__ import annotations

import re

from pyspark.sql import Column

from tidegate.router.filters import has_wildcard, literal_prefix


def topic_matches(topic: Column, filter: str) -> Column:
    """Whether `topic` belongs to the plain, well-formed `filter`."""
    if not has_wildcard(filter.encode()):
        return topic == filter
    prefix = literal_prefix(filter.encode()).decode()
    found = topic.rlike(_pattern(filter))
    return topic.startswith(prefix) & found if prefix else found


def _pattern(filter: str) -> str:
    r"""For Java's `find`. Not `^` and `$`: a topic may contain line breaks, and `$` matches before the last one."""
    levels = filter.split("/")
    below = levels[-1] == "#"
    if below:
        levels.pop()
    body = "/".join("[^/]*" if level == "+" else re.escape(level) for level in levels)
    start = r"\A(?!\$)" if filter[0] in "+#" else r"\A"  # [MQTT-4.7.2-1]
    if not below:
        return start + body + r"\z"
    # `a/#` is `a` as well, section 4.7.1.2; `#` alone is everything.
    return start + body + (r"(?:/|\z)" if levels else "")
