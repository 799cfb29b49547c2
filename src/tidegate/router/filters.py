"""Topic names and topic filters: what is well formed, what matches what, and the two special forms.

    sensors/+/temp              plain: `+` is one level, a last `#` is the parent and everything below it
    $share/<group>/<filter>     shared: one member of the group gets each message    [MQTT-4.8.2-1]
    $replay/<from>/<filter>     replay: the subscription starts in the past, then goes on live

`matches` is the plain twin of `SubscriptionIndex.match` and `RetainedStore.match`: short enough to be
checked against the standard by eye, and what the property tests compare those two to.

Section numbers are those of MQTT 5.0.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple, NoReturn

from tidegate.errors import ProtocolViolation, Refused

TOPIC_NAME_INVALID: Final = 0x90
TOPIC_FILTER_INVALID: Final = 0x8F

TOPIC_BYTES_MAX: Final = 65_535  # a UTF-8 string carries a two-byte length, section 1.5.4
LEVELS_MAX: Final = 128  # a trie path costs memory per level; real filters have about ten
POSITION_MAX: Final = 2**63 - 1

_SHARE: Final = b"$share/"
_REPLAY: Final = b"$replay/"

START_FORMS: Final = (
    "allowed are `earliest`; a position such as `1234`; a time such as `2026-01-31`, `2026-01-31T12:00:00Z` "
    "or `2026-01-31T12:00:00-05:00` (UTC when no offset is given); `@` and unix seconds or milliseconds; "
    "an age such as `-30s`, `-15m`, `-2h`, `-7d`, `-4w`"
)


class ParsedFilter(NamedTuple):
    """What a client subscribed to. `group` is empty unless shared, `start` is empty unless replay."""

    kind: Literal["plain", "shared", "replay"]
    group: bytes
    start: bytes
    filter: bytes


class Start(NamedTuple):
    """Where a replay begins. `value` is 0 for earliest, a log position, or unix milliseconds."""

    kind: Literal["earliest", "position", "time"]
    value: int


def check_topic(topic: bytes) -> None:
    """Raise `ProtocolViolation` (0x90) unless `topic` may stand in a PUBLISH."""
    if not topic:
        raise ProtocolViolation("the topic is empty", TOPIC_NAME_INVALID)  # [MQTT-4.7.3-1]
    if len(topic) > TOPIC_BYTES_MAX:
        raise ProtocolViolation("the topic is longer than 65535 bytes", TOPIC_NAME_INVALID)  # [MQTT-4.7.3-3]
    if b"+" in topic or b"#" in topic:
        raise ProtocolViolation("the topic contains a wildcard", TOPIC_NAME_INVALID)  # [MQTT-3.3.2-2]
    if b"\0" in topic:
        raise ProtocolViolation("the topic contains U+0000", TOPIC_NAME_INVALID)  # [MQTT-4.7.3-2]
    if not _is_utf8(topic):
        raise ProtocolViolation("the topic is not UTF-8", TOPIC_NAME_INVALID)  # [MQTT-1.5.4-1]


def check_filter(filter: bytes, levels_max: int = LEVELS_MAX) -> None:
    """Raise `Refused` (0x8F) unless `filter`, freed of any `$share` or `$replay`, may be subscribed to."""
    if not filter:
        _refuse("the filter is empty")  # [MQTT-4.7.3-1]
    if len(filter) > TOPIC_BYTES_MAX:
        _refuse("the filter is longer than 65535 bytes")  # [MQTT-4.7.3-3]
    if b"\0" in filter:
        _refuse("the filter contains U+0000")  # [MQTT-4.7.3-2]
    if not _is_utf8(filter):
        _refuse("the filter is not UTF-8")  # [MQTT-1.5.4-1]
    if filter.count(b"/") >= levels_max:
        _refuse(f"the filter has more than {levels_max} levels")
    if has_wildcard(filter):
        levels = filter.split(b"/")
        for level in levels:
            if b"+" in level and level != b"+":
                _refuse("`+` must be a whole level")  # [MQTT-4.7.1-2]
            if b"#" in level and level != b"#":
                _refuse("`#` must be a whole level")  # [MQTT-4.7.1-1]
        if b"#" in levels[:-1]:
            _refuse("`#` must be the last level")  # [MQTT-4.7.1-1]


def matches(filter: bytes, topic: bytes) -> bool:
    """Whether a message on `topic` belongs to the plain `filter`. Both must be well formed."""
    if topic.startswith(b"$") and filter.startswith((b"+", b"#")):
        return False  # [MQTT-4.7.2-1]
    wanted, levels = filter.split(b"/"), topic.split(b"/")
    for depth, want in enumerate(wanted):
        if want == b"#":
            return True  # the parent as well: section 4.7.1.2, `sport/#` matches `sport`
        if depth == len(levels) or want not in (b"+", levels[depth]):
            return depth == len(levels) and wanted[depth:] == [b"#"]
    return len(wanted) == len(levels)


def has_wildcard(filter: bytes) -> bool:
    return b"+" in filter or b"#" in filter


def literal_prefix(filter: bytes) -> bytes:
    """The longest bytes that every topic matching `filter` starts with, up to a level's edge.

    A range scan over topics that start with it misses nothing: `a/+/c` gives `a/`, but `a/b/#` gives `a/b`
    without the slash, because the topic `a/b` matches too. A filter without wildcards is its own prefix.
    """
    levels = filter.split(b"/")
    for depth, level in enumerate(levels):
        if level == b"#":
            return b"/".join(levels[:depth])
        if level == b"+":
            return b"".join(literal + b"/" for literal in levels[:depth])
    return filter


def parse(filter: bytes, levels_max: int = LEVELS_MAX) -> ParsedFilter:
    """Take a filter of a SUBSCRIBE or UNSUBSCRIBE apart and check every part of it (`Refused`, 0x8F)."""
    if filter.startswith(_SHARE):
        group, _, rest = filter[len(_SHARE) :].partition(b"/")
        if not group:
            _refuse("`$share` needs a group: $share/<group>/<filter>")  # [MQTT-4.8.2-1]
        if has_wildcard(group):
            _refuse("the group of a `$share` filter cannot contain wildcards")  # [MQTT-4.8.2-2]
        if b"\0" in group or not _is_utf8(group):
            _refuse("the group of a `$share` filter is not UTF-8 without U+0000")
        if not rest:
            _refuse("`$share` needs a filter after the group: $share/<group>/<filter>")  # [MQTT-4.8.2-2]
        if rest.startswith((_SHARE, _REPLAY)):
            _refuse("a `$share` filter cannot hold another `$share` or a `$replay`")
        check_filter(rest, levels_max)
        return ParsedFilter("shared", group, b"", rest)
    if filter.startswith(_REPLAY):
        start, _, rest = filter[len(_REPLAY) :].partition(b"/")
        parse_start(start, now_ms=0)
        if not rest:
            _refuse("`$replay` needs a filter after the start: $replay/<from>/<filter>")
        if rest.startswith(_SHARE):
            _refuse("a shared subscription cannot be replayed: a group has one position, not one per member")
        if rest.startswith(_REPLAY):
            _refuse("a `$replay` filter cannot hold another `$replay`")
        check_filter(rest, levels_max)
        return ParsedFilter("replay", b"", start, rest)
    check_filter(filter, levels_max)
    return ParsedFilter("plain", b"", b"", filter)


_DIGITS = re.compile(rb"[0-9]{1,19}")
_UNIX = re.compile(rb"@([0-9]{1,15})")
_AGE = re.compile(rb"-([0-9]{1,9})([smhdw])")
_ISO = re.compile(
    rb"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    rb"(?:T[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNIT_MS: Final = {b"s": 1_000, b"m": 60_000, b"h": 3_600_000, b"d": 86_400_000, b"w": 604_800_000}
# Below this a unix time is in seconds: 10^11 s is the year 5138, 10^11 ms is March 1973.
_UNIX_MS_MIN: Final = 10**11


def parse_start(start: bytes, now_ms: int) -> Start:
    """Where `$replay/<start>/…` begins. A time before 1970 counts as 1970: before everything stored.

    An ISO time with a `+` offset is understood, but some client libraries refuse to send it, since `+` looks
    like a wildcard to them: `Z` and `@` always pass.
    """
    if start == b"earliest":
        return Start("earliest", 0)
    if _DIGITS.fullmatch(start) and int(start) <= POSITION_MAX:
        return Start("position", int(start))
    if unix := _UNIX.fullmatch(start):
        number = int(unix[1])
        return Start("time", number if number >= _UNIX_MS_MIN else number * 1_000)
    if age := _AGE.fullmatch(start):
        return Start("time", max(0, now_ms - int(age[1]) * _UNIT_MS[age[2]]))
    if _ISO.fullmatch(start):
        try:
            moment = datetime.fromisoformat(start.decode())
        except ValueError:
            pass  # the form of a time, but no such day, hour or offset
        else:
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return Start("time", max(0, (moment - _EPOCH) // timedelta(milliseconds=1)))
    shown = start[:40].decode("utf-8", "backslashreplace")
    raise Refused(f"cannot replay from {shown!a}: {START_FORMS}", TOPIC_FILTER_INVALID)


def _refuse(message: str) -> NoReturn:
    raise Refused(message, TOPIC_FILTER_INVALID)


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()  # strict: surrogates and overlong forms are errors
    except UnicodeDecodeError:
        return False
    return True
