"""The subscription index: which subscriptions match this topic, without looking at the others.

    exact filters      one dictionary, filter → entries
    wildcard filters   a trie, one node per level

        a/+/c, a/#, +/b            (root)
                                   │    └ plus ─▶ ·
                                   a              └ b ─▶ · entries {+/b}
                                   ▼
                                   · beneath {a/#}
                                   └ plus ─▶ ·
                                             └ c ─▶ · entries {a/+/c}

`#` is always last, so it has no node: a node holds the entries of its own filter and, under `beneath`, those
of its filter followed by `/#`.

A match walks the trie breadth first with one frontier of nodes per level, so there is no recursion. It visits
only nodes that exist and whose path fits the topic so far: at each level no more than there are filters,
never 2^depth. The topic is split no deeper than the deepest filter, so that a topic of thousands of levels
costs no more than one of that depth.

What makes a million filters small: most nodes have one literal child and most filters one entry. So a first
child sits in the node itself, a first entry is a bare tuple, and only the second of either pays for a
dictionary. Nodes without use are pruned at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from tidegate.router.filters import has_wildcard

K = TypeVar("K")
V = TypeVar("V")

# The subscriptions that have the very same filter: one as a bare tuple, several as key → value.
_Entries = tuple[K, V] | dict[K, V]


class _Node(Generic[K, V]):
    """One level of a wildcard filter. One literal child is `label` and `child`; several are `children`."""

    __slots__ = ("beneath", "child", "children", "entries", "label", "plus")

    def __init__(self) -> None:
        self.label: bytes | None = None
        self.child: _Node[K, V] | None = None
        self.children: dict[bytes, _Node[K, V]] | None = None
        self.plus: _Node[K, V] | None = None
        self.entries: _Entries[K, V] | None = None
        self.beneath: _Entries[K, V] | None = None

    def get(self, level: bytes) -> _Node[K, V] | None:
        if level == b"+":
            return self.plus
        if self.children is not None:
            return self.children.get(level)
        return self.child if self.label == level else None

    def grow(self, level: bytes) -> _Node[K, V]:
        node: _Node[K, V] = _Node()
        if level == b"+":
            self.plus = node
        elif self.children is not None:
            self.children[level] = node
        elif self.child is None:
            self.label, self.child = level, node
        else:
            assert self.label is not None
            self.children = {self.label: self.child, level: node}
            self.label = self.child = None
        return node

    def cut(self, level: bytes) -> None:
        if level == b"+":
            self.plus = None
        elif self.children is None:
            self.label = self.child = None
        else:
            del self.children[level]
            if len(self.children) == 1:
                [(self.label, self.child)] = self.children.items()
                self.children = None

    def literals(self) -> list[tuple[bytes, _Node[K, V]]]:
        if self.children is not None:
            return list(self.children.items())
        return [] if self.label is None or self.child is None else [(self.label, self.child)]

    @property
    def unused(self) -> bool:
        return (
            self.entries is None
            and self.beneath is None
            and self.plus is None
            and self.child is None
            and self.children is None
        )


class SubscriptionIndex(Generic[K, V]):
    """Entries (filter, key) → value. Filters must have passed `check_filter`.

    `visits` counts the trie nodes that all matches so far have looked at: the cost of matching without a
    clock.
    """

    __slots__ = ("_depths", "_exact", "_root", "_size", "visits")

    def __init__(self) -> None:
        self._exact: dict[bytes, _Entries[K, V]] = {}
        self._root: _Node[K, V] = _Node()
        self._depths: list[int] = []  # how many wildcard filters end at depth i + 1; no zeros at the end
        self._size = 0
        self.visits = 0

    def __len__(self) -> int:
        """Entries, not filters: two keys with the same filter are two."""
        return self._size

    def add(self, filter: bytes, key: K, value: V) -> bool:
        """Put the entry in place; False if (filter, key) was there and only its value is replaced."""
        if not has_wildcard(filter):
            entries, new = _with(self._exact.get(filter), key, value)
            self._exact[filter] = entries
        else:
            levels = filter.split(b"/")
            depth = len(levels)
            beneath = levels[-1] == b"#"
            if beneath:
                levels.pop()
            node = self._root
            for level in levels:
                node = node.get(level) or node.grow(level)
            if beneath:
                node.beneath, new = _with(node.beneath, key, value)
            else:
                node.entries, new = _with(node.entries, key, value)
            if new:
                self._depths.extend([0] * (depth - len(self._depths)))
                self._depths[depth - 1] += 1
        self._size += new
        return new

    def remove(self, filter: bytes, key: K) -> bool:
        """Take the entry out; False if there was none."""
        if not has_wildcard(filter):
            entries, found = _without(self._exact.get(filter), key)
            if entries is None:
                self._exact.pop(filter, None)
            else:
                self._exact[filter] = entries
        else:
            found = self._remove_wildcard(filter.split(b"/"), key)
        self._size -= found
        return found

    def _remove_wildcard(self, levels: list[bytes], key: K) -> bool:
        depth = len(levels)
        beneath = levels[-1] == b"#"
        if beneath:
            levels.pop()
        path = [self._root]
        for level in levels:
            child = path[-1].get(level)
            if child is None:
                return False
            path.append(child)
        node = path[-1]
        if beneath:
            node.beneath, found = _without(node.beneath, key)
        else:
            node.entries, found = _without(node.entries, key)
        if found:
            while levels and path.pop().unused:
                path[-1].cut(levels.pop())
            self._depths[depth - 1] -= 1
            while self._depths and not self._depths[-1]:
                self._depths.pop()
        return found

    def match(self, topic: bytes) -> list[V]:
        """The value of every entry whose filter matches; a key with several such filters has several values.

        The hot path: flat on purpose. `filters.matches` is its plain twin.
        """
        found: list[V] = []
        entries = self._exact.get(topic)
        if entries is not None:
            if isinstance(entries, tuple):
                found.append(entries[1])
            else:
                found.extend(entries.values())
        depth_max = len(self._depths)
        if not depth_max:
            return found

        # One more piece than the deepest filter has levels: it says that the topic goes on, and no node is
        # left to be compared with it.
        levels = topic.split(b"/", depth_max)
        root = self._root
        frontier = [root]
        visits = 0
        if topic.startswith(b"$"):
            # [MQTT-4.7.2-1] a leading wildcard does not match: enter by the literal child only.
            first = root.get(levels[0])
            frontier = [] if first is None else [first]
            del levels[0]
            visits = 1
        for level in levels:
            visits += len(frontier)
            following = []
            for node in frontier:
                entries = node.beneath
                if entries is not None:
                    if isinstance(entries, tuple):
                        found.append(entries[1])
                    else:
                        found.extend(entries.values())
                children = node.children
                if children is not None:
                    child = children.get(level)
                    if child is not None:
                        following.append(child)
                elif node.label == level:
                    following.append(node.child)  # type: ignore[arg-type]  # set together with its label
                plus = node.plus
                if plus is not None:
                    following.append(plus)
            frontier = following
            if not frontier:
                break
        else:
            # The topic ends here: filters that end here too, and `a/#`, which matches `a`.
            visits += len(frontier)
            for node in frontier:
                for entries in (node.entries, node.beneath):
                    if entries is not None:
                        if isinstance(entries, tuple):
                            found.append(entries[1])
                        else:
                            found.extend(entries.values())
        self.visits += visits
        return found

    def filters(self) -> Iterator[bytes]:
        """Every distinct filter once, in no particular order. The index must not change meanwhile."""
        yield from self._exact
        pending: list[tuple[bytes, _Node[K, V]]] = [(b"", self._root)]  # the path with its trailing slash
        while pending:
            path, node = pending.pop()
            if node.entries is not None:
                yield path[:-1]
            if node.beneath is not None:
                yield path + b"#"
            if node.plus is not None:
                pending.append((path + b"+/", node.plus))
            pending.extend((path + level + b"/", child) for level, child in node.literals())

    def nodes(self) -> int:
        """How many trie nodes there are, the root included: what pruning keeps small. Walks them all."""
        count, pending = 0, [self._root]
        while pending:
            node = pending.pop()
            count += 1
            if node.plus is not None:
                pending.append(node.plus)
            pending.extend(child for _, child in node.literals())
        return count


def _with(entries: _Entries[K, V] | None, key: K, value: V) -> tuple[_Entries[K, V], bool]:
    if entries is None:
        return (key, value), True
    if isinstance(entries, tuple):
        if entries[0] == key:
            return (key, value), False
        return {entries[0]: entries[1], key: value}, True
    new = key not in entries
    entries[key] = value
    return entries, new


def _without(entries: _Entries[K, V] | None, key: K) -> tuple[_Entries[K, V] | None, bool]:
    if entries is None:
        return None, False
    if isinstance(entries, tuple):
        return (None, True) if entries[0] == key else (entries, False)
    if key not in entries:
        return entries, False
    del entries[key]
    if len(entries) == 1:
        [(last_key, last_value)] = entries.items()
        return (last_key, last_value), True
    return entries, True
