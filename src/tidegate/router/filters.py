"""Topic names and topic filters: what is well formed, what matches what, and the two special forms.

    sensors/+/temp              plain: `+` is one level, a last `#` is the parent and everything below it
    $share/<group>/<filter>     shared: one member of the group gets each message    [MQTT-4.8.2-1]
    $replay/<from>/<filter>     replay: the subscription starts in the past, then goes on live

A filter can be wrong in two ways. What breaks the standard is a `MalformedPacket` and ends the connection; what
the standard allows and this broker does not (too deep, a replay from nowhere) is `Refused`, filter by filter.

`matches` is the plain twin of `SubscriptionIndex.match` and `TopicScan`: short enough to be checked against the
standard by eye, and what the property tests compare those two to.

Section numbers are those of MQTT 5.0.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple, NoReturn

from tidegate.errors import MalformedPacket, ProtocolViolation, Refused

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
    """Raise `MalformedPacket` (0x81) for what is no topic name, `ProtocolViolation` (0x90) for a topic name that no
    PUBLISH may carry."""
    _check_text(topic, "topic")
    if b"+" in topic or b"#" in topic:
        raise ProtocolViolation("the topic contains a wildcard", TOPIC_NAME_INVALID)  # [MQTT-3.3.2-2]


def check_form(filter: bytes) -> None:
    """Raise `MalformedPacket` (0x81) unless the standard allows `filter`, as a client sends it, at all.

    In an UNSUBSCRIBE this is all that can be wrong with one.
    """
    _check_text(filter, "filter")
    _take_apart(filter)


def check_filter(filter: bytes, levels_max: int = LEVELS_MAX) -> None:
    """Whether `filter`, freed of any `$share` or `$replay`, may be subscribed to.

    Raises `MalformedPacket` (0x81) if it is no filter, `Refused` (0x8F) if it has too many levels for us.
    """
    _check_text(filter, "filter")
    _check_wildcards(filter)
    _check_levels(filter, levels_max)


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
    """Take a filter of a SUBSCRIBE apart and check every part of it.

    Raises `MalformedPacket` (0x81) for what the standard forbids, `Refused` (0x8F) for what we do not offer.
    """
    _check_text(filter, "filter")
    parsed = _take_apart(filter)
    inner = parsed.filter
    if parsed.kind == "shared" and inner.startswith((_SHARE, _REPLAY)):
        _refuse("a `$share` filter cannot hold another `$share` or a `$replay`")
    if parsed.kind == "replay":
        parse_start(parsed.start, now_ms=0)
        if not inner:
            _refuse("`$replay` needs a filter after the start: $replay/<from>/<filter>")
        if inner.startswith(_SHARE):
            _refuse("a shared subscription cannot be replayed: a group has one position, not one per member")
        if inner.startswith(_REPLAY):
            _refuse("a `$replay` filter cannot hold another `$replay`")
    _check_levels(inner, levels_max)
    return parsed


def _take_apart(filter: bytes) -> ParsedFilter:
    if filter.startswith(_SHARE):
        group, _, rest = filter[len(_SHARE) :].partition(b"/")
        if not group:
            raise MalformedPacket("`$share` needs a group: $share/<group>/<filter>")  # [MQTT-4.8.2-1]
        if has_wildcard(group):
            raise MalformedPacket("the group of a `$share` filter cannot contain wildcards")  # [MQTT-4.8.2-2]
        if not rest:
            # [MQTT-4.8.2-2]
            raise MalformedPacket("`$share` needs a filter after the group: $share/<group>/<filter>")
        parsed = ParsedFilter("shared", group, b"", rest)
    elif filter.startswith(_REPLAY):
        # To the standard this is an ordinary filter. Its start is judged as such, by `parse_start`: the `+` of a time
        # zone is no wildcard.
        start, _, rest = filter[len(_REPLAY) :].partition(b"/")
        parsed = ParsedFilter("replay", b"", start, rest)
    else:
        parsed = ParsedFilter("plain", b"", b"", filter)
    _check_wildcards(parsed.filter)
    return parsed


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


def _check_text(text: bytes, what: str) -> None:
    """What holds for topics and filters alike."""
    if not text:
        raise MalformedPacket(f"the {what} is empty")  # [MQTT-4.7.3-1]
    if len(text) > TOPIC_BYTES_MAX:
        raise MalformedPacket(f"the {what} is longer than 65535 bytes")  # [MQTT-4.7.3-3]
    if b"\0" in text:
        raise MalformedPacket(f"the {what} contains U+0000")  # [MQTT-4.7.3-2]
    if not text.isascii():
        try:
            text.decode()  # strict: surrogates and overlong forms are errors
        except UnicodeDecodeError:
            raise MalformedPacket(f"the {what} is not UTF-8") from None  # [MQTT-1.5.4-1]


# A wildcard with a neighbour in its level, or `#` with anything behind it.
_MISPLACED = re.compile(rb"[^/][+#]|\+[^/]|#.", re.DOTALL)


def _check_wildcards(filter: bytes) -> None:
    if _MISPLACED.search(filter) is None:
        return
    for level in filter.split(b"/"):
        for wildcard in (b"+", b"#"):
            if wildcard in level and level != wildcard:
                # [MQTT-4.7.1-1], [MQTT-4.7.1-2]
                raise MalformedPacket(f"`{wildcard.decode()}` must be a whole level")
    raise MalformedPacket("`#` must be the last level")  # [MQTT-4.7.1-1]


def _check_levels(filter: bytes, levels_max: int) -> None:
    if filter.count(b"/") >= levels_max:
        _refuse(f"the filter has more than {levels_max} levels")
