"""Which topics of an order match a filter: leaps through the sorted keys.

At each key that does not match, the scan knows the next one that could match at all, and goes there:

    filter a/+/temp     at a/7/hum     go to a/7/temp
                        at a/7/temp    found, go on
                        at a/7/volt    nothing more below a/7: go past it
                        at b           nothing more at all: done

So the cost follows the matches and the branches that `+` opens, not the number of topics. Where one key matches
the following one mostly does too, so a scan walks within the run of keys that it is in; and everything that a last
`#` stands for is one contiguous range, which is taken as a slice.

Between two calls a scan holds one key and no place in any structure: topics may come and go. What is there from
beginning to end is found exactly once; what comes or goes meanwhile may be found or not.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from tidegate.router.topic_order import AFTER_SEPARATOR, SEPARATOR, TopicOrder

_DOLLAR: Final = ord("$")
_AFTER_DOLLAR: Final = b"%"
_NO_BOUND: Final = 1 << 62


class TopicScan:
    """The keys of `order` that match `filter`, in order and in pieces. `steps` counts the keys looked at so far."""

    __slots__ = ("_beneath", "_checks", "_cursor", "_order", "_past", "_skip_dollar", "_wanted", "done", "steps")

    def __init__(self, order: TopicOrder, filter: bytes) -> None:
        self._order = order
        wanted = filter.split(b"/")
        self._skip_dollar = wanted[0] in (b"+", b"#")
        self._beneath = wanted[-1] == b"#"
        if self._beneath:
            wanted.pop()
        self._wanted = wanted
        literal = wanted.index(b"+") if b"+" in wanted else len(wanted)
        # Everything that matches lies from the literal levels in front up to, not including, what follows below them.
        self._cursor = SEPARATOR.join(wanted[:literal])
        self._past = self._cursor + AFTER_SEPARATOR if literal else None
        # What is left to compare there.
        self._checks = [(at, level) for at, level in enumerate(wanted) if at >= literal and level != b"+"]
        self.done = False
        self.steps = 0

    def take(self, matches_max: int, steps_max: int | None = None) -> list[bytes]:
        """The next keys that match: fewer than `matches_max` if `steps_max` or the end is reached."""
        found: list[bytes] = []
        if self.done:
            return found
        room, steps_left = matches_max, _NO_BOUND if steps_max is None else steps_max
        runs, lasts = self._order.runs, self._order.lasts
        wanted, beneath, checks, skip_dollar = self._wanted, self._beneath, self._checks, self._skip_dollar
        depth = len(wanted)
        cursor, past = self._cursor, self._past
        at = 0
        while room > 0 and steps_left > 0:
            at = bisect_left(lasts, cursor, at)
            if at == len(runs):
                self.done = True
                break
            run = runs[at]
            place = bisect_left(run, cursor)
            end = len(run) if past is None else bisect_left(run, past, place)
            if place == end:
                self.done = True
                break
            while room > 0 and steps_left > 0:
                key = run[place]
                steps_left -= 1
                if skip_dollar and key[0] == _DOLLAR:
                    leap: bytes | None = _AFTER_DOLLAR  # [MQTT-4.7.2-1]
                else:
                    levels = key.split(SEPARATOR, depth) if depth else []
                    size = len(levels)
                    fits = size == depth or (beneath and size > depth)
                    if fits:
                        for level_at, level in checks:
                            if levels[level_at] != level:
                                fits = False
                                break
                    if fits:
                        if not beneath:
                            found.append(key)
                            room -= 1
                            place += 1
                        else:
                            # All that lies below the same levels matches as well.
                            upto = end
                            if depth:
                                upto = bisect_left(run, SEPARATOR.join(levels[:depth]) + AFTER_SEPARATOR, place, end)
                            elif key[0] < _DOLLAR:
                                upto = bisect_left(run, b"$", place, end)
                            upto = min(upto, place + room, place + steps_left + 1)
                            found += run[place:upto]
                            room -= upto - place
                            steps_left -= upto - place - 1
                            place = upto
                        if place == end:
                            break
                        continue
                    leap = self._leap(key, levels)
                if leap is None:
                    self.done = True
                    break
                cursor = leap
                place += 1
                if place < end and run[place] < cursor:
                    place = bisect_left(run, cursor, place, end)
                if place == end:
                    break
            if self.done:
                break
            # Where it leapt to, or directly behind the last key that it has seen.
            cursor = max(cursor, run[place - 1] + SEPARATOR)
        self._cursor = cursor
        self.steps += (_NO_BOUND if steps_max is None else steps_max) - steps_left
        return found

    def _leap(self, key: bytes, levels: list[bytes]) -> bytes | None:
        """The next key that could match after one that does not; None if there is none."""
        wanted = self._wanted
        fitting = 0
        for want in wanted:
            if fitting == len(levels):
                # A parent of what is wanted.
                return key + SEPARATOR + (b"" if want == b"+" else want)
            level = levels[fitting]
            if want != b"+" and want != level:
                if level < want:
                    return SEPARATOR.join([*levels[:fitting], want])
                break
            fitting += 1
        # Nothing more matches below these levels: past the last `+` among them.
        while fitting and wanted[fitting - 1] != b"+":
            fitting -= 1
        return SEPARATOR.join(levels[:fitting]) + AFTER_SEPARATOR if fitting else None
