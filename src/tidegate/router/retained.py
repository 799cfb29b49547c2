"""Retained messages: the latest message of each topic, in memory, within bounds.

    _messages   key → Retained             the key of `topic_order`
    _order      the same keys, sorted      for wildcards
    _due        heap of (expires_at_ms, key), with entries that later puts have made stale

A wildcard filter is answered by leaps through the sorted keys. At each key the scan knows the next key that
could match at all, and goes there:

    filter a/+/temp     at a/7/hum     go to a/7/temp
                        at a/7/temp    yield, go on
                        at a/7/volt    nothing more below a/7: go past it
                        at b           nothing more at all: done

So the cost follows the matches and the branches that `+` opens, not the number of topics. A scan holds one
key and no place in any structure: topics may come and go between its steps. What is there from beginning to
end is found exactly once; what comes or goes meanwhile may be found or not.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tidegate.router.filters import has_wildcard
from tidegate.router.topic_order import AFTER_SEPARATOR, SEPARATOR, TopicOrder, key_of

# What a message costs besides its bytes: objects, dictionary and list slots, heap entry. A test measures it.
MESSAGE_OVERHEAD_BYTES: Final = 512

# The heap is rebuilt when it holds more stale entries than live ones and these.
_STALE_MIN: Final = 1_024


@dataclass(frozen=True, slots=True)
class Retained:
    topic: bytes
    payload: bytes
    qos: int
    properties: bytes
    expires_at_ms: int | None
    time_ms: int
    position: int
    publisher: bytes

    @property
    def cost_bytes(self) -> int:
        """What it counts towards `bytes_max`: the topic twice, because its key is stored as well."""
        return (
            MESSAGE_OVERHEAD_BYTES
            + 2 * len(self.topic)
            + len(self.payload)
            + len(self.properties)
            + len(self.publisher)
        )

    def expired(self, now_ms: int) -> bool:
        return self.expires_at_ms is not None and self.expires_at_ms <= now_ms


class PutOutcome(Enum):
    STORED = "stored"
    REPLACED = "replaced"
    DELETED = "deleted"  # an empty payload, and there was a message
    ABSENT = "absent"  # an empty payload, and there was none
    REFUSED_MESSAGES = "refused_messages"  # `messages_max` reached
    REFUSED_BYTES = "refused_bytes"  # `bytes_max` would be passed; an older message of the topic stays

    @property
    def refused(self) -> bool:
        return self in (PutOutcome.REFUSED_MESSAGES, PutOutcome.REFUSED_BYTES)


class RetainedStore:
    """Topic → `Retained`. Topics must have passed `check_topic`, filters `check_filter`."""

    __slots__ = (
        "_due",
        "_messages",
        "_order",
        "_with_expiry",
        "bytes",
        "bytes_max",
        "expired",
        "messages_max",
        "refused_bytes",
        "refused_messages",
    )

    def __init__(self, *, messages_max: int, bytes_max: int) -> None:
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self.refused_messages = 0
        self.refused_bytes = 0
        self.expired = 0
        self._messages: dict[bytes, Retained] = {}
        self._order = TopicOrder()
        self._due: list[tuple[int, bytes]] = []
        self._with_expiry = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Retained) -> PutOutcome:
        """Keep `message` as the topic's latest; an empty payload deletes instead [MQTT-3.3.1-6]."""
        if not message.payload:
            return PutOutcome.ABSENT if self.delete(message.topic) is None else PutOutcome.DELETED
        key = key_of(message.topic)
        old = self._messages.get(key)
        if old is None and len(self._messages) >= self.messages_max:
            self.refused_messages += 1
            return PutOutcome.REFUSED_MESSAGES
        bytes_after = self.bytes + message.cost_bytes - (0 if old is None else old.cost_bytes)
        # A smaller successor is welcome even when a lowered bound is already passed.
        if bytes_after > self.bytes_max and bytes_after > self.bytes:
            self.refused_bytes += 1
            return PutOutcome.REFUSED_BYTES
        self.bytes = bytes_after
        self._messages[key] = message
        if old is None:
            self._order.add(key)
        elif old.expires_at_ms is not None:
            self._with_expiry -= 1
        if message.expires_at_ms is not None:
            self._with_expiry += 1
            if old is None or old.expires_at_ms != message.expires_at_ms:
                heapq.heappush(self._due, (message.expires_at_ms, key))
        self._drop_stale()
        return PutOutcome.STORED if old is None else PutOutcome.REPLACED

    def delete(self, topic: bytes) -> Retained | None:
        """Forget the topic's message and return it."""
        key = key_of(topic)
        old = self._messages.pop(key, None)
        if old is not None:
            self.bytes -= old.cost_bytes
            self._order.discard(key)
            if old.expires_at_ms is not None:
                self._with_expiry -= 1
                self._drop_stale()
        return old

    def get(self, topic: bytes, now_ms: int | None = None) -> Retained | None:
        """The topic's message; with `now_ms`, only if it has not expired by then."""
        message = self._messages.get(key_of(topic))
        if message is None or (now_ms is not None and message.expired(now_ms)):
            return None
        return message

    def match(self, filter: bytes, now_ms: int) -> Iterator[Retained]:
        """Every unexpired message whose topic matches, lazily; the store may change between two of them.

        A hostile filter can leap a million times without a match, so a loop that must not block uses `scan`.
        """
        scan = self.scan(filter)
        while not scan.done:
            yield from scan.take(now_ms, matches_max=1)

    def scan(self, filter: bytes) -> RetainedScan:
        return RetainedScan(self._messages, self._order, filter)

    def expire(self, now_ms: int, steps_max: int = 1_000) -> list[Retained]:
        """Delete messages that have expired by `now_ms`, looking at `steps_max` at most, and return them.

        Call it again while `due(now_ms)`.
        """
        gone: list[Retained] = []
        for _ in range(steps_max):
            if not self.due(now_ms):
                break
            at_ms, key = heapq.heappop(self._due)
            message = self._messages.get(key)
            if message is not None and message.expires_at_ms == at_ms:
                self.delete(message.topic)
                gone.append(message)
        self.expired += len(gone)
        return gone

    def due(self, now_ms: int) -> bool:
        """Whether `expire` has anything to do."""
        return bool(self._due) and self._due[0][0] <= now_ms

    def _drop_stale(self) -> None:
        # Replacing one message for ever must not grow the heap for ever.
        if len(self._due) > 2 * self._with_expiry + _STALE_MIN:
            self._due = [
                (message.expires_at_ms, key)
                for key, message in self._messages.items()
                if message.expires_at_ms is not None
            ]
            heapq.heapify(self._due)


class RetainedScan:
    """The messages that match one filter, in chunks. `steps` counts the keys looked at so far."""

    __slots__ = ("_cursor", "_levels", "_messages", "_order", "_skip_dollar", "done", "steps")

    def __init__(self, messages: dict[bytes, Retained], order: TopicOrder, filter: bytes) -> None:
        self._messages = messages
        self._order = order
        self._levels = filter.split(b"/")
        self._skip_dollar = filter.startswith((b"+", b"#"))
        # The smallest key that could match: the literal levels, up to the first wildcard.
        literal: list[bytes] = []
        for level in self._levels:
            if has_wildcard(level):
                break
            literal.append(level)
        self._cursor = SEPARATOR.join(literal)
        self.done = False
        self.steps = 0

    def take(self, now_ms: int, matches_max: int = 100, steps_max: int | None = None) -> list[Retained]:
        """The next unexpired matches: fewer than `matches_max` if `steps_max` or the end is reached."""
        taken: list[Retained] = []
        steps = 0
        while not self.done and len(taken) < matches_max and (steps_max is None or steps < steps_max):
            steps += 1
            key = self._order.first_from(self._cursor)
            if key is None:
                self.done = True
            elif self._look_at(key):
                message = self._messages[key]
                if not message.expired(now_ms):
                    taken.append(message)
        self.steps += steps
        return taken

    def _look_at(self, key: bytes) -> bool:
        """Whether `key` matches. Moves the cursor to the next key that could."""
        if self._skip_dollar and key.startswith(b"$"):
            self._cursor = b"%"  # the byte after `$` [MQTT-4.7.2-1]
            return False
        wanted = self._levels
        levels = key.split(SEPARATOR, len(wanted))
        for depth, want in enumerate(wanted):
            if want == b"#":
                self._cursor = key + SEPARATOR
                return True
            if depth == len(levels):
                # A parent of what is wanted. `a/#` matches `a` and has been answered above.
                self._cursor = key + SEPARATOR + (b"" if want == b"+" else want)
                return False
            if want == b"+" or want == levels[depth]:
                continue
            if levels[depth] < want:
                self._cursor = SEPARATOR.join([*levels[:depth], want])
            else:
                self._leave(levels, depth)
            return False
        # All levels fit. If the topic goes on it is too deep, and so is everything beside it down there.
        self._leave(levels, len(wanted))
        return len(levels) == len(wanted)

    def _leave(self, levels: list[bytes], depth: int) -> None:
        """Nothing more matches below the first `depth` levels: go past the last `+` among them."""
        while depth and self._levels[depth - 1] != b"+":
            depth -= 1
        if depth:
            self._cursor = SEPARATOR.join(levels[:depth]) + AFTER_SEPARATOR
        else:
            self.done = True
