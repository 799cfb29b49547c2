"""Shared subscriptions: which member of a group gets this message (MQTT 5, section 4.8.2).

One strategy object belongs to one group and holds that group's memory (whose turn it is, who is the
favourite). Members come in with every call, in an order that the caller keeps stable: the order of joining,
where absent members keep their place. So the same calls with the same seed give the same picks.

    round_robin     everyone in turn; the turn of an absent member is not given to its neighbour twice
    random          uniform over those who are there
    sticky          one favourite until it is absent, then a new one
    hash_publisher  a publisher's messages stay with one member, and so in order
    hash_topic      a topic's messages stay with one member, and so in order

The hash strategies are modulo over the member order: O(1) for each message. While the chosen member is absent
its share goes to the next one that is there, and comes back with it; when the number of members changes,
shares move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, Generic, Protocol, TypeVar
from zlib import crc32

from tidegate.errors import ConfigError

M = TypeVar("M")


class Strategy(Protocol[M]):
    def pick(
        self, members: Sequence[M], publisher: bytes, topic: bytes, available: Callable[[M], bool]
    ) -> M | None:
        """The member that gets the message, or None if nobody is available."""
        ...

    def share(
        self, members: Sequence[M], count: int, publisher: bytes, credits: Mapping[M, int]
    ) -> list[tuple[M, range]] | None:
        """Who gets which of `count` messages of one publisher, as `pick` would decide one by one; None where that has
        to be decided one by one. `credits`: how many each member can take, found out when it is asked for."""
        ...


class RoundRobin(Generic[M]):
    __slots__ = ("_turn",)

    def __init__(self, seed: int) -> None:
        self._turn = 0

    def pick(
        self, members: Sequence[M], publisher: bytes, topic: bytes, available: Callable[[M], bool]
    ) -> M | None:
        place = _next_available(members, self._turn, available)
        if place is None:
            return None
        # From the one picked, not from the one whose turn it was: else the neighbour of an absent member
        # would get a double share.
        self._turn = place + 1
        return members[place]

    def share(
        self, members: Sequence[M], count: int, publisher: bytes, credits: Mapping[M, int]
    ) -> list[tuple[M, range]] | None:
        size = len(members)
        start = self._turn % size
        order: list[int] = []
        for place in range(start, start + size):
            if credits[members[place % size]] > 0:
                order.append(place)
                if len(order) == count:  # one for each: what the others could take does not matter
                    self._turn = place % size + 1
                    return [(members[place % size], range(i, i + 1)) for i, place in enumerate(order)]
        each = len(order)
        if not each or min(credits[members[place % size]] for place in order) * each < count + each:
            return None
        self._turn = order[(count - 1) % each] % size + 1
        return [(members[place % size], range(i, count, each)) for i, place in enumerate(order[:count])]


class Uniform(Generic[M]):
    __slots__ = ("_random",)

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pick(
        self, members: Sequence[M], publisher: bytes, topic: bytes, available: Callable[[M], bool]
    ) -> M | None:
        if not members:
            return None
        # Nearly always everyone is there: one draw decides. If it fails, draw among those who are, which
        # leaves the choice uniform over them.
        member = members[self._random.randrange(len(members))]
        if available(member):
            return member
        present = [member for member in members if available(member)]
        return self._random.choice(present) if present else None

    def share(
        self, members: Sequence[M], count: int, publisher: bytes, credits: Mapping[M, int]
    ) -> list[tuple[M, range]] | None:
        return None


class Sticky(Generic[M]):
    __slots__ = ("_favourite", "_place", "_random")

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._favourite: M | None = None
        self._place = 0

    def pick(
        self, members: Sequence[M], publisher: bytes, topic: bytes, available: Callable[[M], bool]
    ) -> M | None:
        favourite = self._favourite
        if favourite is not None and self._is_member(favourite, members) and available(favourite):
            return favourite
        self._favourite = None
        if members:
            # A random first place, so that the favourites of many groups do not pile up on one client.
            place = _next_available(members, self._random.randrange(len(members)), available)
            if place is not None:
                self._favourite, self._place = members[place], place
        return self._favourite

    def share(
        self, members: Sequence[M], count: int, publisher: bytes, credits: Mapping[M, int]
    ) -> list[tuple[M, range]] | None:
        favourite = self.pick(members, publisher, b"", lambda member: credits[member] >= 1)
        return [(favourite, range(count))] if favourite is not None and credits[favourite] >= count else None

    def _is_member(self, favourite: M, members: Sequence[M]) -> bool:
        if self._place < len(members) and members[self._place] == favourite:
            return True
        if favourite not in members:
            return False
        self._place = members.index(favourite)
        return True


class HashPublisher(Generic[M]):
    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        self._seed = seed & 0xFFFF_FFFF

    def pick(
        self, members: Sequence[M], publisher: bytes, topic: bytes, available: Callable[[M], bool]
    ) -> M | None:
        place = _next_available(members, crc32(publisher, self._seed), available)
        return None if place is None else members[place]

    def share(
        self, members: Sequence[M], count: int, publisher: bytes, credits: Mapping[M, int]
    ) -> list[tuple[M, range]] | None:
        chosen = self.pick(members, publisher, b"", lambda member: credits[member] >= 1)
        return [(chosen, range(count))] if chosen is not None and credits[chosen] >= count else None


class HashTopic(Generic[M]):
    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        self._seed = seed & 0xFFFF_FFFF

    def pick(
        self, members: Sequence[M], publisher: bytes, topic: bytes, available: Callable[[M], bool]
    ) -> M | None:
        place = _next_available(members, crc32(topic, self._seed), available)
        return None if place is None else members[place]

    def share(
        self, members: Sequence[M], count: int, publisher: bytes, credits: Mapping[M, int]
    ) -> list[tuple[M, range]] | None:
        return None


STRATEGIES: Final = ("round_robin", "random", "sticky", "hash_publisher", "hash_topic")


def make_strategy(name: str, seed: int = 0) -> Strategy[M]:
    """A strategy for one group. `seed` decides the draws and, for the hashes, how shares are laid out."""
    match name:
        case "round_robin":
            return RoundRobin(seed)
        case "random":
            return Uniform(seed)
        case "sticky":
            return Sticky(seed)
        case "hash_publisher":
            return HashPublisher(seed)
        case "hash_topic":
            return HashTopic(seed)
        case _:
            hint = "one of " + ", ".join(STRATEGIES)
            raise ConfigError("shared.strategy", f"unknown strategy {name!r}", hint)


def _next_available(members: Sequence[M], start: int, available: Callable[[M], bool]) -> int | None:
    """The place of the first available member from `start` on, once around."""
    count = len(members)
    for step in range(count):
        place = (start + step) % count
        if available(members[place]):
            return place
    return None
