"""Logs that break the contract, each in one way: what it is called, which log it is made of, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simulated
from pytest import MonkeyPatch
from simulated import SimulatedLog

from tidegate.adapters.embedded import commitlog
from tidegate.adapters.embedded.commitlog import EmbeddedLog, FileSnapshot
from tidegate.adapters.embedded.tiered import TieredLog
from tidegate.log.files import SegmentedLog, segmented
from tidegate.log.memory import MemoryLog
from tidegate.log.reading import Read, ShelvedLog

Break = Callable[[MonkeyPatch], None]
MUTANTS: list[tuple[str, str, Break]] = []


def mutant(kind: str) -> Callable[[Break], Break]:
    """The function's name says what is wrong with it."""

    def add(how: Break) -> Break:
        MUTANTS.append((how.__name__.replace("_", " "), kind, how))
        return how

    return add


def around(patch: MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """`wrapper` gets the original, then the arguments."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **named: wrapper(original, *given, **named))


class Muffled:
    """A listener that holds back what is announced."""

    def __init__(self, to: Any) -> None:
        self.to, self.held = to, []  # type: ignore[var-annotated]

    def announced(self, partition: int, rows: Any) -> None:
        self.held.append((partition, rows))

    def stored(self, ticket: int) -> None:
        self.to.stored(ticket)

    def refused(self, ticket: int, why: Any) -> None:
        self.to.refused(ticket, why)


# ── announcing and storing ──


@mutant("disk-fsync")
def announces_after_it_has_stored(patch: MonkeyPatch) -> None:
    held: list[Any] = []

    def append(original: Any, self: Any, *what: Any) -> int:
        ears, self.listener = self.listener, Muffled(self.listener)
        try:
            return int(original(self, *what))
        finally:
            held.extend(self.listener.held)
            self.listener = ears

    def synced(original: Any, self: Any, *what: Any) -> None:
        original(self, *what)
        while held:
            self.listener.announced(*held.pop(0))

    around(patch, EmbeddedLog, "append", append)
    around(patch, EmbeddedLog, "_synced", synced)


@mutant("disk-fsync")
def tells_that_it_stored_within_commit(patch: MonkeyPatch) -> None:
    patch.setattr(EmbeddedLog, "commit", lambda self: self._synced(self._ticket, self._written[1]))


@mutant("disk-fsync")
def tells_a_later_ticket_than_it_has(patch: MonkeyPatch) -> None:
    around(patch, EmbeddedLog, "_synced", lambda original, self, ticket, size: original(self, ticket + 1, size))


@mutant("disk-os")
def tells_what_the_append_itself_made_safe(patch: MonkeyPatch) -> None:
    def append(original: Any, self: Any, *what: Any) -> int:
        ticket = int(original(self, *what))
        self._loop.call_soon(self.listener.stored, ticket)
        return ticket

    around(patch, EmbeddedLog, "append", append)


@mutant("disk-fsync")
def says_at_once_that_it_is_safe(patch: MonkeyPatch) -> None:
    def append(original: Any, self: Any, *what: Any) -> int:
        self.stored = int(original(self, *what))
        return self.stored

    around(patch, EmbeddedLog, "append", append)


@mutant("memory")
def announces_a_tick_twice(patch: MonkeyPatch) -> None:
    def append(original: Any, self: Any, rows: Any, *what: Any) -> int:
        ticket = int(original(self, rows, *what))
        if len(rows) == 9:
            self.listener.announced(0, rows)
        return ticket

    around(patch, EmbeddedLog, "append", append)


@mutant("memory")
def moves_its_end_after_it_has_announced(patch: MonkeyPatch) -> None:
    def append(original: Any, self: Any, *what: Any) -> int:
        ends, ears = self.ends, self.listener
        self.listener = Muffled(ears)
        ticket = int(original(self, *what))
        held, self.listener, after = self.listener.held, ears, self.ends
        self.ends = ends
        for told in held:
            ears.announced(*told)
        self.ends = after
        return ticket

    around(patch, EmbeddedLog, "append", append)


# ── refusing ──


def _on_refusal(patch: MonkeyPatch, then: Callable[[Any, tuple[int, ...]], None]) -> None:
    def append(original: Any, self: Any, *what: Any) -> int:
        ends, ears = self.ends, self.listener
        refused: list[int] = []

        class Aside(Muffled):
            def announced(self, partition: int, rows: Any) -> None:
                ears.announced(partition, rows)

            def refused(self, ticket: int, why: Any) -> None:
                refused.append(ticket)
                ears.refused(ticket, why)

        self.listener = Aside(ears)
        ticket = int(original(self, *what))
        self.listener = ears
        if refused:
            then(self, ends)
        return ticket

    around(patch, EmbeddedLog, "append", append)


@mutant("disk-os")
def gives_the_positions_of_a_refused_tick_again(patch: MonkeyPatch) -> None:
    _on_refusal(patch, lambda log, ends: setattr(log, "ends", ends))


@mutant("disk-os")
def gives_the_ticket_of_a_refused_append_again(patch: MonkeyPatch) -> None:
    _on_refusal(patch, lambda log, ends: setattr(log, "_ticket", log._ticket - 1))


@mutant("disk-os")
def announces_many_messages_before_it_knows_that_there_is_room(patch: MonkeyPatch) -> None:
    patch.setattr(commitlog, "EARLY_ROWS_MAX", 1 << 30)


@mutant("disk-fsync")
def leaves_half_of_what_it_refused_in_the_file(patch: MonkeyPatch) -> None:
    patch.setattr(SegmentedLog, "_take_back", lambda self, segment: None)


@mutant("tiered")
def says_nothing_of_a_refusal(patch: MonkeyPatch) -> None:
    def append(original: Any, self: Any, *what: Any) -> int:
        ears, self.listener = self.listener, Muffled(self.listener)
        self.listener.refused = lambda ticket, why: None
        self.listener.announced = ears.announced
        ticket = int(original(self, *what))
        self.listener = ears
        return ticket

    around(patch, EmbeddedLog, "append", append)


# ── standing or falling together, and coming back ──


@mutant("disk-fsync")
def writes_messages_that_are_valid_without_their_changes(patch: MonkeyPatch) -> None:
    around(patch, commitlog, "encode_rows", lambda original, *what, followed: original(*what, followed=False))


@mutant("disk-os")
def drops_the_changes_of_ticks_with_messages(patch: MonkeyPatch) -> None:
    around(
        patch, EmbeddedLog, "append",
        lambda original, self, rows, changes, time_ms: original(self, rows, [] if len(rows) else changes, time_ms),
    )  # fmt: skip


@mutant("disk-fsync")
def goes_on_after_a_crash_where_the_file_ends(patch: MonkeyPatch) -> None:
    patch.setattr(segmented, "POSITION_GAP", 0)


@mutant("disk-os")
def forgets_its_snapshot(patch: MonkeyPatch) -> None:
    patch.setattr(commitlog, "load_snapshot", lambda folder: (0, iter(()), []))


@mutant("disk-os")
def replays_from_behind_the_snapshot(patch: MonkeyPatch) -> None:
    around(
        patch, ShelvedLog, "changes_from",
        lambda original, self, position: original(self, position + 1 if position else 0),
    )  # fmt: skip


@mutant("disk-os")
def says_that_a_snapshot_worked_and_throws_it_away(patch: MonkeyPatch) -> None:
    def commit(self: Any, done: Callable[[bool], None]) -> None:
        self.abort()
        self._log._loop.call_soon(done, True)

    patch.setattr(FileSnapshot, "commit", commit)


@mutant("disk-fsync")
def commits_a_snapshot_that_was_aborted(patch: MonkeyPatch) -> None:
    patch.setattr(FileSnapshot, "abort", lambda self: self._writer.commit())


@mutant("disk-os")
def hands_changes_over_in_another_order(patch: MonkeyPatch) -> None:
    around(
        patch, ShelvedLog, "changes_from",
        lambda original, self, position: reversed(list(original(self, position))),
    )  # fmt: skip


# ── reading ──


@mutant("disk-os")
def reads_beyond_the_end_that_was_asked_for(patch: MonkeyPatch) -> None:
    around(
        patch, SegmentedLog, "read", lambda original, self, *what, end, **how: original(self, *what, end=1 << 60, **how)
    )


@mutant("memory")
def reads_what_nobody_wanted(patch: MonkeyPatch) -> None:
    around(
        patch, MemoryLog, "read",
        lambda original, self, *what, wanted=None, **how: original(self, *what, wanted=None, **how),
    )  # fmt: skip


@mutant("tiered")
def reads_as_much_as_there_is(patch: MonkeyPatch) -> None:
    around(
        patch, TieredLog, "read",
        lambda original, self, position, end, bytes_max, *what: original(self, position, end, 1 << 40, *what),
    )  # fmt: skip


@mutant("tiered")
def says_that_it_is_done_when_it_had_enough(patch: MonkeyPatch) -> None:
    around(
        patch, TieredLog, "read",
        lambda original, self, position, end, bytes_max, wanted, done: original(
            self, position, end, bytes_max, wanted, lambda read: done(read._replace(next_position=end))
        ),
    )  # fmt: skip


@mutant("memory")
def steps_over_what_is_still_to_come(patch: MonkeyPatch) -> None:
    around(
        patch, EmbeddedLog, "read",
        lambda original, self, position, end, bytes_max, wanted, done: original(
            self, position, end, bytes_max, wanted,
            lambda read: done(read._replace(next_position=max(read.next_position, end))),
        ),
    )  # fmt: skip


@mutant("memory")
def answers_a_read_within_the_call(patch: MonkeyPatch) -> None:
    def read(self: Any, position: int, end: int, bytes_max: int, wanted: Any, done: Callable[[Read], None]) -> None:
        done(self._store.read(position, bytes_max=bytes_max, wanted=wanted, end=end))

    patch.setattr(EmbeddedLog, "read", read)


@mutant("disk-os")
def answers_a_read_on_another_thread(patch: MonkeyPatch) -> None:
    patch.setattr(EmbeddedLog, "_call", lambda self, function, *what: function(*what))


def _without(column: str) -> Break:
    def how(patch: MonkeyPatch) -> None:
        def encode(original: Any, rows: Any, *what: Any, **more: Any) -> Any:
            kept = getattr(rows, column)
            setattr(rows, column, None)
            try:
                return original(rows, *what, **more)
            finally:
                setattr(rows, column, kept)

        around(patch, commitlog, "encode_rows", encode)

    return how


MUTANTS += [(f"does not write {column}", "disk-os", _without(column)) for column in ("properties", "expiries", "uuids")]


@mutant("memory")
def forgets_what_is_not_kept(patch: MonkeyPatch) -> None:
    def encode(original: Any, rows: Any, *what: Any, **more: Any) -> Any:
        flags, rows.flags = rows.flags, bytearray(flag & 7 for flag in rows.flags)
        try:
            return original(rows, *what, **more)
        finally:
            rows.flags = flags

    around(patch, commitlog, "encode_rows", encode)


@mutant("disk-os")
def finds_the_message_after_the_time(patch: MonkeyPatch) -> None:
    around(patch, ShelvedLog, "position_at_time", lambda original, self, time_ms: original(self, time_ms + 1))


@mutant("disk-os")
def has_its_floor_at_its_end(patch: MonkeyPatch) -> None:
    patch.setattr(EmbeddedLog, "floors", property(lambda self: self.ends))


@mutant("disk-os")
def drops_a_segment_that_is_not_to_go(patch: MonkeyPatch) -> None:
    around(
        patch, SegmentedLog, "drop",
        lambda original, self, segments: original(self, self.segments()[: len(segments) + 1]),
    )  # fmt: skip


# ── the simulated log: what the broker's tests believe ──


@mutant("simulated-partitions")
def stores_what_it_has_not_announced(patch: MonkeyPatch) -> None:
    def store(self: Any) -> None:
        if self._requested is not None:
            self.stored, self._requested = self._requested, None
            self.listener.stored(self.stored)

    patch.setattr(SimulatedLog, "store", store)


@mutant("simulated-partitions")
def lets_a_topic_wander_between_partitions(patch: MonkeyPatch) -> None:
    def share(original: Any, self: Any, rows: Any) -> Any:
        return [((p + self._ticket) % self.partitions, part) for p, part in original(self, rows)]

    around(patch, SimulatedLog, "_share", share)


@mutant("simulated-partitions")
def announces_the_newest_first(patch: MonkeyPatch) -> None:
    def announce(original: Any, self: Any, partition: int | None = None) -> None:
        for queue in self._unannounced:
            queue.reverse()
        original(self, partition)

    around(patch, SimulatedLog, "announce", announce)


@mutant("simulated-partitions")
def reads_what_it_has_not_announced(patch: MonkeyPatch) -> None:
    def read(self: Any, position: int, end: int, bytes_max: int, wanted: Any, done: Any) -> None:
        self._reads.append(lambda: done(self._read(position, end, bytes_max, wanted)))

    patch.setattr(SimulatedLog, "read", read)


@mutant("simulated-late")
def gives_positions_again_after_a_crash(patch: MonkeyPatch) -> None:
    def crashed(original: Any, self: Any, kept: int = 0) -> Any:
        after = original(self, kept)
        after._given = [max((e.end for e in after.entries), default=0)]
        after.ends = tuple(after._given)
        return after

    around(patch, SimulatedLog, "crashed", crashed)


@mutant("simulated-late")
def keeps_changes_of_what_it_refused(patch: MonkeyPatch) -> None:
    def append(original: Any, self: Any, rows: Any, changes: Any, time_ms: int) -> int:
        ticket = int(original(self, rows, changes, time_ms))
        if self.refusing:
            self.entries.append(simulated.Entry(ticket, self._given[0], [], list(changes)))
        return ticket

    around(patch, SimulatedLog, "append", append)


@mutant("simulated-late")
def loses_messages_in_a_crash_and_keeps_their_changes(patch: MonkeyPatch) -> None:
    def crashed(original: Any, self: Any, kept: int = 0) -> Any:
        after = original(self, kept)
        if kept:
            after.entries[-1] = simulated.Entry(
                after.entries[-1].ticket, after.entries[-1].end, [], after.entries[-1].changes
            )
        return after

    around(patch, SimulatedLog, "crashed", crashed)


@mutant("simulated-late")
def counts_as_stored_what_nobody_asked_it_to_store(patch: MonkeyPatch) -> None:
    def crashed(original: Any, self: Any, kept: int = 0) -> Any:
        self.stored = max(0, self.stored - 1)
        return original(self, kept)

    around(patch, SimulatedLog, "crashed", crashed)


@mutant("simulated-at-once")
def announces_what_it_refuses(patch: MonkeyPatch) -> None:
    def append(original: Any, self: Any, rows: Any, changes: Any, time_ms: int) -> int:
        if self.refusing and len(rows):
            rows.positions = range(self.ends[0], self.ends[0] + len(rows))
            self.listener.announced(0, rows)
        return int(original(self, rows, changes, time_ms))

    around(patch, SimulatedLog, "append", append)


@mutant("simulated-at-once")
def reads_the_whole_run_that_an_end_lies_in(patch: MonkeyPatch) -> None:
    around(
        patch, SimulatedLog, "_read",
        lambda original, self, position, end, *what: original(self, position, end + 1, *what),
    )  # fmt: skip
