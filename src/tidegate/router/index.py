"""The subscription index: which subscriptions match this topic, without looking at the others.

    exact filters      one dictionary, filter → entries
    wildcard filters   a trie, one node per level

        a/+/c, a/b/+/d, a/#, +/b      (root)
                                      │    └ plus ─▶ · tail b, entries {+/b}
                                      a
                                      ▼
                                      · beneath {a/#}
                                      │    └ plus ─▶ · tail c, entries {a/+/c}
                                      b
                                      ▼
                                      · tail +/d, entries {a/b/+/d}

`#` is always last, so it has no node: a node holds the entries of its own filter and, under `beneath`, those
of its filter followed by `/#`.

A path that only one filter goes on is not drawn out into nodes: its first node keeps the rest as a *tail*, of which
a match compares the literal levels and skips those that are `+`. When a second filter comes that way, the tail moves
down, level by level, to where they part.

A match walks the trie breadth first with one frontier of nodes per level, so there is no recursion. It visits
only nodes that exist and whose path fits the topic so far: each level of the topic at most doubles them, and
thanks to tails there are no more than two for each filter that fits so far. The topic is split no deeper than the
deepest filter, so that a topic of thousands of levels costs no more than one of that depth.

What makes a million filters small: tails; and that most nodes have one literal child and most filters one entry.
So a first child sits in the node itself, a first entry is a bare tuple, and only the second of either pays for a
dictionary. Nodes without use are pruned at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

from tidegate.router.filters import has_wildcard

K = TypeVar("K")
V = TypeVar("V")

# Literal levels of a filter: (which level, counted from the filter's first, and what it is).
_Checks = tuple[tuple[int, bytes], ...]

# The subscriptions that have the very same filter: one as a bare tuple, several as key → value.
_Entries = tuple[K, V] | dict[K, V]


class _Node(Generic[K, V]):
    """One level of a wildcard filter. One literal child is `label` and `child`; several are `children`."""

    __slots__ = ("beneath", "checks", "child", "children", "end", "entries", "label", "plus")

    def __init__(self) -> None:
        # The tail: up to which level the filter goes, 0 if there is none, and which literals are where. A node with
        # a tail has no children, and its entries belong to the tail's end.
        self.end = 0
        self.checks: _Checks = ()
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

    def push_down(self, depth: int) -> None:
        """Move the tail of a node at `depth`, and its entries, to a child."""
        checks = self.checks
        literal = bool(checks) and checks[0][0] == depth
        child = self.grow(checks[0][1] if literal else b"+")
        child.entries, self.entries = self.entries, None
        child.beneath, self.beneath = self.beneath, None
        if self.end > depth + 1:
            child.end, child.checks = self.end, checks[1:] if literal else checks
        self.end, self.checks = 0, ()

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
            node = self._reach(levels)
            if beneath:
                node.beneath, new = _with(node.beneath, key, value)
            else:
                node.entries, new = _with(node.entries, key, value)
            if new:
                self._depths.extend([0] * (depth - len(self._depths)))
                self._depths[depth - 1] += 1
        self._size += new
        return new

    def _reach(self, levels: list[bytes]) -> _Node[K, V]:
        """The node where a filter of these levels ends, made if it is not there."""
        node = self._root
        end = len(levels)
        checks: _Checks | None = None  # of the whole filter, as soon as there is a tail to compare it with
        for depth, level in enumerate(levels):
            if node.end:
                if node.end == end:
                    checks = checks or _literals(levels)
                    if node.checks == checks[bisect_left(checks, (depth, b"")) :]:
                        return node
                node.push_down(depth)
            child = node.get(level)
            if child is None:
                node = node.grow(level)
                if depth + 1 < end:
                    node.end, node.checks = end, _literals(levels, depth + 1)
                return node
            node = child
        if node.end:
            node.push_down(end)
        return node

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
        node = self._root
        path = [node]
        end = len(levels)
        for level in levels:
            if node.end:
                break
            child = node.get(level)
            if child is None:
                return False
            node = child
            path.append(node)
        if node.end and (node.end != end or node.checks != _literals(levels, len(path) - 1)):
            return False
        if beneath:
            node.beneath, found = _without(node.beneath, key)
        else:
            node.entries, found = _without(node.entries, key)
        if found:
            while len(path) > 1 and path.pop().unused:
                path[-1].cut(levels[len(path) - 1])
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
        size = len(levels)
        root = self._root
        frontier = [root]
        visits = depth = 0
        if topic.startswith(b"$"):
            # [MQTT-4.7.2-1] a leading wildcard does not match: enter by the literal child only.
            first = root.get(levels[0])
            frontier = [] if first is None else [first]
            visits = depth = 1
        for level in levels[depth:] if depth else levels:
            visits += len(frontier)
            following = []
            for node in frontier:
                end = node.end
                if end:
                    if size < end or (size > end and node.beneath is None):
                        continue
                    for at, literal in node.checks:
                        if levels[at] != literal:
                            break
                    else:
                        for entries in (node.beneath, node.entries if size == end else None):
                            if entries is not None:
                                if isinstance(entries, tuple):
                                    found.append(entries[1])
                                else:
                                    found.extend(entries.values())
                    continue
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
                if node.end:
                    continue  # the filter goes on
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
            if node.end:
                literals = dict(node.checks)
                path += b"".join(literals.get(at, b"+") + b"/" for at in range(path.count(b"/"), node.end))
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


def _literals(levels: list[bytes], begin: int = 0) -> _Checks:
    return tuple([(at, level) for at, level in enumerate(levels[begin:], begin) if level != b"+"])


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
