"""A reader's filters as the log's index takes them."""

from __future__ import annotations

from tidegate.log.index import Wanted, shortest
from tidegate.router import SubscriptionIndex, has_wildcard, literal_prefix


class WantedFilters(Wanted):
    """Used on another thread, where it is also made ready: it holds no live state, and ten thousand filters take a
    while. An index finds out about a topic without a look at each filter."""

    __slots__ = ("_index", "_patterns")

    def __init__(self, patterns: list[bytes]) -> None:
        super().__init__()
        self._patterns: list[bytes] | None = patterns
        self._index: SubscriptionIndex[None, None] = SubscriptionIndex()

    def begin(self) -> None:
        super().begin()
        patterns, self._patterns = self._patterns, None
        if patterns is None:
            return
        wild = [pattern for pattern in patterns if has_wildcard(pattern)]
        self.exact = frozenset(patterns).difference(wild)
        if wild:
            for pattern in wild:
                self._index.add(pattern, None, None)
            self.prefixes = shortest(map(literal_prefix, wild))
            self.match = self._match

    def _match(self, topic: bytes) -> bool:
        index = self._index
        before = index.visits
        found = len(index.match(topic))
        self.work += (index.visits - before) // 8 + found // 16
        return found > 0

    def __call__(self, topic: bytes) -> bool:
        if self._patterns is not None:
            self.begin()
        return super().__call__(topic)
