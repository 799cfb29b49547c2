"""Rows: messages as columns that grow in step, one entry per message in each.

What a tick has collected, what the log announces, what a read from disk brings, and a handful of retained messages are
all rows; whoever hands them on names a range of them. A *run* is a range of rows that follow each other and share
topic, publisher, tenant and flags: `cuts` says where each begins, because the disk stores those names once per run.

`positions` gives each row's place in the log: a range where rows follow each other, a list where a filter left gaps.
All rows of one object were accepted in the same tick, and share its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tidegate.log.run import NO_EXPIRY, Run

NO_UUID = bytes(16)


class Rows:
    """`properties`, `expiries` and `uuids` are None while no row has any."""

    __slots__ = (
        "cuts",
        "expiries",
        "flags",
        "payloads",
        "positions",
        "properties",
        "publishers",
        "tenants",
        "time_ms",
        "topics",
        "uuids",
    )

    def __init__(self, time_ms: int = 0) -> None:
        self.topics: list[bytes] = []
        self.publishers: list[bytes] = []
        self.tenants: list[bytes] = []
        self.flags = bytearray()  # QoS in bits 0–1, retain in bit 2, not kept in bit 3
        self.payloads: list[bytes] = []
        self.properties: list[bytes] | None = None  # MQTT 5 property bytes to pass on, without their length prefix
        self.expiries: list[int] | None = None  # seconds from time_ms; NO_EXPIRY where a message has none
        self.uuids: list[bytes] | None = None  # 16 bytes each, zeros where a message has none
        self.cuts: list[int] = []
        self.positions: Sequence[int] = ()  # given by the log
        self.time_ms = time_ms  # when the broker accepted them, Unix milliseconds

    def __len__(self) -> int:
        return len(self.payloads)

    def add(
        self, topic: bytes, publisher: bytes, tenant: bytes, flags: int, payload: bytes, properties: bytes, expiry: int
    ) -> None:
        """One message that stands alone."""
        row = len(self.payloads)
        self.cuts.append(row)
        self.topics.append(topic)
        self.publishers.append(publisher)
        self.tenants.append(tenant)
        self.flags.append(flags)
        self.payloads.append(payload)
        if properties or self.properties is not None:
            self.with_properties(row).append(properties)
        if expiry != NO_EXPIRY or self.expiries is not None:
            self.with_expiries(row).append(expiry)
        if self.uuids is not None:
            self.uuids.append(NO_UUID)

    def with_properties(self, rows: int) -> list[bytes]:
        """The column of properties, made if there was none, for so many rows."""
        if self.properties is None:
            self.properties = [b""] * rows
        return self.properties

    def with_expiries(self, rows: int) -> list[int]:
        if self.expiries is None:
            self.expiries = [NO_EXPIRY] * rows
        return self.expiries

    def take(self, places: Sequence[int]) -> Rows:
        """The rows at these places, in this order, as rows of their own that cannot be stored."""
        some = Rows(self.time_ms)
        if isinstance(places, range):
            part = slice(places.start, places.stop, places.step)
            some.topics, some.publishers = self.topics[part], self.publishers[part]
            some.tenants, some.flags = self.tenants[part], self.flags[part]
            some.payloads = self.payloads[part]
            some.properties = self.properties and self.properties[part]
            some.expiries = self.expiries and self.expiries[part]
            some.uuids = self.uuids and self.uuids[part]
            some.positions = self.positions[part]
            return some
        some.topics = [self.topics[i] for i in places]
        some.publishers = [self.publishers[i] for i in places]
        some.tenants = [self.tenants[i] for i in places]
        some.flags = bytearray([self.flags[i] for i in places])
        some.payloads = [self.payloads[i] for i in places]
        some.properties = self.properties and [self.properties[i] for i in places]
        some.expiries = self.expiries and [self.expiries[i] for i in places]
        some.uuids = self.uuids and [self.uuids[i] for i in places]
        some.positions = [self.positions[i] for i in places] if self.positions else ()
        return some

    def runs(self) -> Iterator[Run]:
        """The rows run by run, for whoever wants objects."""
        for a, b in pairwise((*self.cuts, len(self.payloads))):
            yield Run(
                self.topics[a],
                self.publishers[a],
                self.tenants[a],
                self.flags[a],
                self.payloads[a:b],
                self.properties and self.properties[a:b],
                self.expiries and self.expiries[a:b],
                self.uuids and self.uuids[a:b],
                self.positions[a] if self.positions else -1,
                self.time_ms,
            )

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Rows:
        """Runs of one time as rows. Positions are those of the runs."""
        rows = cls(runs[0].time_ms if runs else 0)
        positions: list[int] = []
        size = 0
        plain = all(r.properties is None and r.expiries is None and r.uuids is None for r in runs)
        for run in runs:
            n = run.count
            rows.cuts.append(size)
            if n == 1:
                rows.topics.append(run.topic)
                rows.publishers.append(run.publisher)
                rows.tenants.append(run.tenant)
                rows.flags.append(run.flags)
                positions.append(run.base)
            else:
                rows.topics += [run.topic] * n
                rows.publishers += [run.publisher] * n
                rows.tenants += [run.tenant] * n
                rows.flags += bytes((run.flags,)) * n
                positions += range(run.base, run.base + n)
            rows.payloads += run.payloads
            size += n
            if plain:
                continue
            if run.properties is not None or rows.properties is not None:
                rows.with_properties(size - n).extend(run.properties or [b""] * n)
            if run.expiries is not None or rows.expiries is not None:
                rows.with_expiries(size - n).extend(run.expiries or [NO_EXPIRY] * n)
            if run.uuids is not None or rows.uuids is not None:
                if rows.uuids is None:
                    rows.uuids = [NO_UUID] * (size - n)
                rows.uuids.extend(run.uuids or [NO_UUID] * n)
        dense = size and positions[-1] - positions[0] == size - 1 and positions[0] >= 0
        rows.positions = range(positions[0], positions[0] + size) if dense else positions
        return rows


def by_time(runs: Sequence[Run]) -> list[Rows]:
    """Runs as they were read, as rows: one object for those of one tick."""
    found: list[Rows] = []
    start = 0
    for i in range(1, len(runs) + 1):
        if i == len(runs) or runs[i].time_ms != runs[start].time_ms:
            found.append(Rows.of(runs[start:i]))
            start = i
    return found
