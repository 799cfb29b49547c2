"""Readers: who reads where in the log. A session has one, each `$replay` subscription one, each shared group one.

Everything that leaves for a client is read by a reader, and a reader is in one state at a time:

    AWAY       nobody is there to read for: a cursor, no work (S3.11)
    RESENDING  what was in flight when the connection broke goes out again, with its packet ids
    BEHIND     it has a turn coming: from its cursor on, some messages at a time, from memory or from disk
    READING    it waits for a read from disk
    BLOCKED    it waits for its client: the window is full, or the socket does not drain
    LIVE       it has everything that was announced, and gets what is announced as it comes; its cursors mean nothing
    GONE       its subscription or session has ended

                    ┌──────────── announced rows do not all fit ───────────┐
                    ▼                                                       │
    AWAY ──▶ BEHIND ⇄ BLOCKED                  BEHIND ── at every end ──▶ LIVE
      │        ⇅                                 ▲
      │      READING                             │
      └──▶ RESENDING ⇄ BLOCKED, READING ── all sent again

Any state but GONE may become AWAY (the connection ends) or GONE. `TRANSITIONS` is the whole table; anything else is a
bug, and stops the process. `enter` is the only way to change a state.

A reader has one cursor per partition. A position names its partition, so positions of one partition are compared with
each other and with nothing else.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tidegate.session.skip import Skip

if TYPE_CHECKING:
    from tidegate.session.session import Session, Subscription


class Standing(IntEnum):
    AWAY = 0
    RESENDING = 1
    BEHIND = 2
    READING = 3
    BLOCKED = 4
    LIVE = 5
    GONE = 6


AWAY, RESENDING, BEHIND, READING, BLOCKED, LIVE, GONE = Standing

TRANSITIONS: dict[Standing, frozenset[Standing]] = {
    AWAY: frozenset((RESENDING, BEHIND, READING, LIVE, GONE)),
    RESENDING: frozenset((BEHIND, READING, BLOCKED, AWAY, GONE)),
    BEHIND: frozenset((READING, BLOCKED, LIVE, AWAY, GONE)),
    READING: frozenset((RESENDING, BEHIND, AWAY, GONE)),
    BLOCKED: frozenset((RESENDING, BEHIND, AWAY, GONE)),
    LIVE: frozenset((BLOCKED, BEHIND, AWAY, GONE)),
    GONE: frozenset(),
}


class Reader:
    __slots__ = (
        "again",
        "again_end",
        "cursors",
        "held",
        "held_bytes",
        "held_ends",
        "live",
        "noted",
        "noted_s",
        "number",
        "queued",
        "reads",
        "reads_from",
        "seeking",
        "session",
        "skip",
        "standing",
        "subscription",
        "targets",
        "wanted",
        "written",
    )

    def __init__(self, number: int, session: Session | None, cursors: list[int]) -> None:
        self.number = number  # its name in the log
        self.session = session  # None: a shared group, whose members have sessions
        self.standing = AWAY
        self.live = False  # standing is LIVE: asked for each message, so kept beside it
        self.cursors = cursors  # the next position to read, per partition
        self.written: tuple[int, ...] = tuple(cursors)  # the positions last written to the log for it
        self.noted: list[tuple[int, int]] = []  # what was last written as finished above them, and when
        self.noted_s = 0.0
        self.queued = False  # has its turn coming
        self.reads = 0  # counts reads from disk: an answer that is not the newest one's is of no use
        self.held: deque[Any] | None = None  # rows read from disk and not yet sent
        self.held_bytes = 0
        self.held_ends = 0  # the position after what is held
        self.seeking = False  # its place is being looked for: it waits, also when its client comes back
        self.reads_from = 0  # where the read began whose rows are held
        # After a reconnection: the number from which on flights are sent again, and where that ends.
        self.again: int | None = None
        self.again_end = 0
        self.skip: Skip | None = None  # positions above the cursor that are finished
        self.subscription: Subscription | None = None  # for a $replay reader: the one it serves
        # While catching up: topic, and the subscriptions that match it → how to deliver it.
        self.targets: dict[Any, Any] | None = None
        self.wanted: Any = None  # its filters as the log's index takes them, while it reads from disk

    def enter(self, standing: Standing) -> None:
        if standing is not self.standing:
            if standing not in TRANSITIONS[self.standing]:
                raise AssertionError(f"{self} cannot become {standing.name}")
            self.standing = standing
            self.live = standing is LIVE

    def __repr__(self) -> str:
        return f"Reader({self.number}, {self.standing.name}, {self.cursors})"
