"""A set of topics that can be asked which of them match a filter, as `SubscriptionIndex` is asked the other way round.

What is kept by topic, such as ready-made routes, is found again with it when a filter changes, at a cost that grows
with what the filter matches and not with what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tidegate.router.topic_order import SEPARATOR, TopicOrder, key_of
from tidegate.router.topic_scan import TopicScan

# Matches that `matching` looks up at a time: enough to make the way into the order cheap for each.
_CHUNK: Final = 64


class TopicSet:
    """Topics must have passed `check_topic`, filters `check_filter`."""

    __slots__ = ("_order", "_topics")

    def __init__(self) -> None:
        self._topics: set[bytes] = set()
        self._order = TopicOrder()

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, topic: bytes) -> bool:
        return topic in self._topics

    def add(self, topic: bytes) -> None:
        if topic not in self._topics:
            self._topics.add(topic)
            self._order.add(key_of(topic))

    def discard(self, topic: bytes) -> None:
        if topic in self._topics:
            self._topics.remove(topic)
            self._order.discard(key_of(topic))

    def clear(self) -> None:
        """Scans that are under way find nothing more."""
        self._topics.clear()
        self._order.clear()

    def matching(self, filter: bytes) -> Iterator[bytes]:
        """Every topic that matches, lazily; the set may change between two of them. What is gone is not found.

        A filter can leap over many topics without a match, so a loop that must not block uses `scan`.
        """
        scan = self.scan(filter)
        while not scan.done:
            for topic in scan.take(_CHUNK):
                if topic in self._topics:
                    yield topic

    def scan(self, filter: bytes) -> TopicSetScan:
        return TopicSetScan(self._order, filter)


class TopicSetScan:
    """The topics that match one filter, in pieces of bounded work."""

    __slots__ = ("_scan",)

    def __init__(self, order: TopicOrder, filter: bytes) -> None:
        self._scan = TopicScan(order, filter)

    @property
    def done(self) -> bool:
        return self._scan.done

    @property
    def steps(self) -> int:
        """Topics looked at so far."""
        return self._scan.steps

    def take(self, matches_max: int, steps_max: int | None = None) -> list[bytes]:
        """The next matches: fewer than `matches_max` if `steps_max` or the end is reached."""
        return [key.replace(SEPARATOR, b"/") for key in self._scan.take(matches_max, steps_max)]
