"""A tick: what one pass of the loop has collected, as data. Handlers add to it, the log takes it whole, and nobody
reaches into it after that.

    rows        the messages, as columns
    stretches   ranges of rows that go the same way: one publisher, the same flags, the same targets
    changes     state records that stand or fall with the messages
    promises    who is owed which answer once the log has stored all of it
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.log.rows import Rows

if TYPE_CHECKING:
    from tidegate.delivery.encode import Key
    from tidegate.delivery.routes import Targets
    from tidegate.session.link import Link


class Kind(IntEnum):
    """What is promised. The first two stand or fall with messages of the tick: refused if it is."""

    PUBACK = 0  # packet ids, reason
    PUBREC = 1  # packet ids, reason
    ANSWER = 2  # bytes of a packet
    MESSAGE = 3  # bytes of PUBLISH packets, behind which later messages wait
    CALL = 4  # a function
    PUBCOMP = 5  # packet ids
    TAKEN_PUBACK = 6  # as PUBACK and PUBREC, of messages that are in the log: they wait for their retained records only
    TAKEN_PUBREC = 7


PUBACK, PUBREC, ANSWER, MESSAGE, CALL, PUBCOMP, TAKEN_PUBACK, TAKEN_PUBREC = Kind


class Promise(NamedTuple):
    kind: Kind
    link: Link
    what: Any  # bytes | list[bytes] | Callable[[], None]
    reason: int = 0


class Stretch:
    """Rows start … stop-1. `variants`: ready-made encodings by kind of subscriber."""

    __slots__ = ("start", "stop", "targets", "variants")

    def __init__(self, start: int, stop: int, targets: Targets, variants: dict[Key, Any]) -> None:
        self.start = start
        self.stop = stop
        self.targets = targets
        self.variants = variants


class Tick:
    __slots__ = ("announced", "bytes", "changes", "promises", "retained", "rows", "stretches")

    def __init__(self) -> None:
        self.rows = Rows()
        self.stretches: list[Stretch] = []
        self.changes: list[bytes] = []
        self.promises: list[Promise] = []
        self.bytes = 0  # of the messages
        self.announced = False  # its messages have been
        self.retained = False  # some message is to be kept as its topic's

    def __bool__(self) -> bool:
        return bool(self.rows.payloads or self.changes or self.promises)

    @property
    def weight(self) -> tuple[Tick, int]:
        """Differs when something has been added, or another tick has begun."""
        return self, len(self.rows.payloads) + len(self.changes) + len(self.promises)

    def promise(self, kind: Kind, link: Link, what: bytes | list[bytes] | Callable[[], None], reason: int = 0) -> None:
        self.promises.append(Promise(kind, link, what, reason))
