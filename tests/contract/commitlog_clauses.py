"""What the clauses of the log's contract share: which logs they are for, what is written, what was told.

The clauses are in `test_commitlog_…`, each for every log there is; `log_drivers` has the logs, and `test_log_mutants`
breaks each of them and sees a clause fail.
"""

from __future__ import annotations

from random import Random

import pytest
from log_drivers import ALL, LASTING, LATE, ON_DISK, Announced, Driver, Message, Refused, many

everywhere = pytest.mark.parametrize("log", ALL, indirect=True)
lasting = pytest.mark.parametrize("log", LASTING, indirect=True)
on_disk = pytest.mark.parametrize("log", ON_DISK, indirect=True)
late = pytest.mark.parametrize("log", LATE, indirect=True)

TICKS = 12


def without_positions(messages: list[Message]) -> list[Message]:
    return [message._replace(position=None) for message in messages]


def appended(log: Driver) -> list[Message]:
    """All that was appended since the last start and not refused, in order, without positions."""
    refused = {event.ticket for event in log.of(Refused)}
    return [message for append in log.appends if append.ticket not in refused for message in append.messages]


def by_topic(messages: list[Message]) -> dict[bytes, list[Message]]:
    found: dict[bytes, list[Message]] = {}
    for message in messages:
        found.setdefault(message.topic, []).append(message)
    return found


def positions(messages: list[Message]) -> list[int]:
    return [message.position for message in messages if message.position is not None]


def ever_announced(log: Driver) -> list[int]:
    told = [*log.seen, *log.of(Announced)]
    return [position for event in told for position in positions(event.messages)]


async def write(log: Driver, *, ticks: int = TICKS, changes: bool = True, seed: int = 1, start: int = 0) -> list[bytes]:
    """Ticks of all sizes, some with changes, some with nothing else; announced and stored now and then. The changes."""
    random = Random(seed)
    n = start
    records: list[bytes] = []
    for i in range(ticks):
        count = random.choice((0, 1, 1, 2, 5, 9))
        its = [b"change %d.%d.%d" % (start, i, k) for k in range(random.randrange(3))] if changes else []
        log.append(many(n, count, qos=random.randrange(3), time_ms=1000 + 10 * i), its)
        n += count
        records += its
        if not random.randrange(4):
            await log.settle()
        if not random.randrange(4):
            await log.safe()
    await log.settle()
    return records
