"""Retained messages: the latest message of each topic, in memory, within bounds.

    _messages   key → Retained             the key of `topic_order`
    _order      the same keys, sorted      for wildcards
    _due        heap of (expires_at_ms, key), with entries that later puts have made stale

A wildcard filter is answered by a `TopicScan` over the sorted keys: topics may come and go between its steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

from tidegate.router.topic_order import TopicOrder, key_of
from tidegate.router.topic_scan import TopicScan

# What a message costs besides its bytes: objects, dictionary and list slots, heap entry. A test measures it.
MESSAGE_OVERHEAD_BYTES: Final = 512

# Matches that `match` looks up at a time: enough to make the way into the order cheap for each.
_CHUNK: Final = 64

# The heap is rebuilt when it holds more stale entries than live ones and these.
_STALE_MIN: Final = 1_024


class Retained(NamedTuple):
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
            for found in scan.take(now_ms, _CHUNK):
                message = self.get(found.topic, now_ms)  # it may be gone by now, or another
                if message is not None:
                    yield message

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
    """The messages that match one filter, in chunks."""

    __slots__ = ("_messages", "_scan")

    def __init__(self, messages: dict[bytes, Retained], order: TopicOrder, filter: bytes) -> None:
        self._messages = messages
        self._scan = TopicScan(order, filter)

    @property
    def done(self) -> bool:
        return self._scan.done

    @property
    def steps(self) -> int:
        """Topics looked at so far."""
        return self._scan.steps

    def take(self, now_ms: int, matches_max: int = 100, steps_max: int | None = None) -> list[Retained]:
        """The next unexpired matches: fewer than `matches_max` if `steps_max` or the end is reached."""
        scan = self._scan
        message_of = self._messages.__getitem__
        before = scan.steps
        taken: list[Retained] = []
        while not scan.done and len(taken) < matches_max:
            steps_left = None if steps_max is None else steps_max - (scan.steps - before)
            if steps_left is not None and steps_left <= 0:
                break
            taken += [
                message
                for message in map(message_of, scan.take(matches_max - len(taken), steps_left))
                if (at_ms := message.expires_at_ms) is None or at_ms > now_ms
            ]
        return taken
