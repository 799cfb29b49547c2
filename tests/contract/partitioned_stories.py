"""Random stories for `PartitionedFlows`, told from a seed: the same seed is the same story, for ever."""

from __future__ import annotations

from random import Random
from typing import Any

from partitioned import PARTITIONS, TOPICS, PartitionedFlows
from stories import Stories

MOODS: tuple[dict[str, int], ...] = (
    {  # partitions that answer one by one, and clients that come and go meanwhile
        "connect": 6, "come_and_subscribe": 2, "go": 5, "subscribe": 2, "unsubscribe": 2, "publish": 14,
        "acknowledge": 14, "acknowledge_late": 2, "socket": 2, "surroundings": 10, "announce": 14, "pass_time": 3,
        "snapshot": 1, "crash": 2,
    },
    {  # a log that is full now and then
        "connect": 8, "come_and_subscribe": 2, "go": 3, "unsubscribe": 1, "publish": 14, "acknowledge": 12,
        "surroundings": 12, "announce": 8, "no_room": 2, "room": 4, "refuse": 4, "pass_time": 3, "crash": 2,
    },
    {  # … and crashes
        "connect": 8, "come_and_subscribe": 3, "go": 4, "subscribe": 2, "unsubscribe": 2, "publish": 10,
        "acknowledge": 10, "acknowledge_late": 2, "surroundings": 10, "announce": 8, "no_room": 1, "room": 4,
        "refuse": 4, "pass_time": 3, "snapshot": 1, "crash": 6,
    },
)  # fmt: skip


class PartitionedStories(Stories):
    flows = PartitionedFlows
    moods = MOODS
    present = 5

    def begin(self, random: Random) -> dict[str, Any]:
        return {"tail_bytes": random.choice((1, 3000, 1 << 20))}

    def arguments(self, rule: str, place: int, qos: int, pattern: bytes, random: Random) -> dict[str, Any]:
        match rule:
            case "publish":
                topics = random.choices(TOPICS, k=random.randint(1, 4))
                count, hurry = random.randint(1, 3), random.random() < 0.3
                return {"place": place, "topics": topics, "qos": qos, "count": count, "hurry": hurry}
            case "announce":
                return {"partition": random.randrange(PARTITIONS), "times": random.randint(1, 3)}
            case "refuse":
                return {"count": random.randint(1, 3)}
            case _:
                return super().arguments(rule, place, qos, pattern, random)
