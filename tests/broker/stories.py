"""Random stories for `SessionFlows`, told from a seed: the same seed is the same story, for ever.

A story is a list of (rule, arguments). Its moods weigh the rules, so that rare things come in numbers: broken
connections around crashes, acknowledgements around full windows. `shorten` leaves out what a failure does not need.
Flows with more rules have stories of their own, which derive from these.
"""

from __future__ import annotations

import time
import traceback
from random import Random
from typing import Any

from session_flows import PATTERNS, PUBLISHERS, SURROUNDINGS, TOPICS, WORKERS, SessionFlows

Story = list[tuple[str, dict[str, Any]]]

EVERYONE = PUBLISHERS + WORKERS
MOODS: tuple[dict[str, int], ...] = (
    {
        "connect": 5, "come_and_subscribe": 3, "go": 4, "subscribe": 2, "unsubscribe": 2, "publish": 12,
        "acknowledge": 12, "acknowledge_late": 2, "socket": 1, "surroundings": 14, "pass_time": 3, "snapshot": 1,
        "crash": 2,
    },
    {
        "connect": 6, "go": 6, "publish": 10, "acknowledge": 10, "acknowledge_late": 3, "surroundings": 16,
        "pass_time": 3, "snapshot": 1, "crash": 4,
    },
    {
        "connect": 3, "come_and_subscribe": 1, "go": 2, "unsubscribe": 3, "publish": 12, "acknowledge": 14,
        "socket": 3, "surroundings": 14, "pass_time": 3,
    },
)  # fmt: skip


class Stories:
    flows: type[SessionFlows] = SessionFlows
    moods = MOODS
    present = 4  # clients that are there from the begin on

    def must_go_well(self, seeds: range, steps: int) -> None:
        """Raises what goes wrong in the first story that does not, with the story as short as it can be."""
        for seed in seeds:
            story = self.tell(seed, steps)
            error = self.play(story)
            if error is not None:
                story = self.shorten(story, error)
                raise AssertionError(f"seed {seed}:\n{as_text(story)}") from self.play(story)

    # ── telling ──

    def tell(self, seed: int, steps: int) -> Story:
        random = Random(seed)
        mood = random.choice(self.moods)
        names = random.sample(EVERYONE, self.present)
        present = [(name, random.choice(PATTERNS), random.choice((1, 2, 2))) for name in names]
        begin = {**self.begin(random), "present": present}
        rules = random.choices(list(mood), list(mood.values()), k=steps)
        return [("begin", begin), *((name, self._arguments(name, random)) for name in rules)]

    def begin(self, random: Random) -> dict[str, Any]:
        return {
            "late": random.random() < 0.7,
            "tail_bytes": random.choice((1, 3000, 1 << 20)),
            "partitions": random.choice((1, 1, 3)),
        }

    def _arguments(self, rule: str, random: Random) -> dict[str, Any]:
        place, qos, pattern = random.randrange(7), random.randrange(3), random.choice(PATTERNS)
        return self.arguments(rule, place, qos, pattern, random)

    def arguments(self, rule: str, place: int, qos: int, pattern: bytes, random: Random) -> dict[str, Any]:
        match rule:
            case "connect":
                return {"name": random.choice(EVERYONE)}
            case "come_and_subscribe":
                return {"name": random.choice(EVERYONE), "pattern": pattern, "qos": qos}
            case "go":
                return {"place": place, "graceful": random.random() < 0.4, "unseen": random.random() < 0.4}
            case "subscribe":
                return {"place": place, "pattern": pattern, "qos": qos}
            case "unsubscribe":
                return {"place": place, "pattern": pattern}
            case "publish":
                count, hurry = random.randint(1, 5), random.random() < 0.4
                return {"place": place, "topic": random.choice(TOPICS), "qos": qos, "count": count, "hurry": hurry}
            case "acknowledge":
                return {"place": place, "which": random.choice((0, 0, 0, 1, 2)), "count": random.randint(1, 4)}
            case "acknowledge_late":
                return {"place": place, "which": random.randrange(3)}
            case "socket":
                return {"place": place, "paused": random.random() < 0.5}
            case "surroundings":
                return {"what": [random.choice(SURROUNDINGS)]}
            case "crash":
                return {"kept": random.randrange(4)}
            case _:
                return {}

    # ── playing ──

    def play(self, story: Story) -> Exception | None:
        """What goes wrong in the story, if anything."""
        flows = self.flows()
        try:
            for rule, arguments in story:
                getattr(flows, rule)(**arguments)
                flows.what_must_hold()
            flows.teardown()
        except Exception as error:
            return error
        return None

    def shorten(self, story: Story, error: Exception, seconds: float = 60) -> Story:
        """Leave out all that is not needed to go wrong at the same place."""
        deadline = time.monotonic() + seconds
        place = _place(error)
        size = len(story) // 2
        while size and time.monotonic() < deadline:
            at = 1
            while at < len(story):
                shorter = story[:at] + story[at + size :]
                wrong = self.play(shorter)
                if wrong is not None and _place(wrong) == place:
                    story = shorter
                else:
                    at += size
            size //= 2
        return story


def _place(error: Exception) -> tuple[str, str, int | None]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, last.filename, last.lineno


def as_text(story: Story) -> str:
    lines = (f"  {rule}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for rule, arguments in story)
    return "\n".join(lines)
