from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from topic_strategies import filters, topics

from tidegate.errors import MalformedPacket, PeerError, ProtocolViolation, Refused
from tidegate.router import (
    ParsedFilter,
    Start,
    check_filter,
    check_form,
    check_topic,
    has_wildcard,
    literal_prefix,
    matches,
    parse,
    parse_start,
)

NOW_MS = 1_800_000_000_000
# A stray byte, a cut sequence, a surrogate, an overlong slash, beyond U+10FFFF.
NOT_UTF8 = [b"\xff", b"a/\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]


def refusal(filter: bytes) -> str:
    """Why this broker declines a filter that the standard allows."""
    check_form(filter)
    with pytest.raises(Refused) as refused:
        parse(filter)
    assert refused.value.reason == 0x8F
    return str(refused.value)


def malformation(filter: bytes) -> str:
    """Why the standard forbids a filter: said in SUBSCRIBE and UNSUBSCRIBE alike."""
    with pytest.raises(MalformedPacket) as subscribing:
        parse(filter)
    with pytest.raises(MalformedPacket) as unsubscribing:
        check_form(filter)
    assert subscribing.value.reason == unsubscribing.value.reason == 0x81
    assert str(subscribing.value) == str(unsubscribing.value)
    return str(subscribing.value)


# --- topics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topic", [b"a", b"/", b"/a", b"a//b", b"$SYS/x", "größe/温度".encode(), b"x" * 65_535, b"a b"]
)
def test_a_well_formed_topic_passes(topic: bytes) -> None:
    check_topic(topic)


@pytest.mark.attack("A8")
@pytest.mark.parametrize(
    "topic", [b"a/+", b"a+", b"#", b"a/#/b", "é/+".encode()], ids=lambda topic: repr(topic[:9])
)
def test_a_bad_topic_is_a_violation_with_its_own_reason(topic: bytes) -> None:
    with pytest.raises(ProtocolViolation) as violation:
        check_topic(topic)
    assert violation.value.reason == 0x90


@pytest.mark.parametrize(
    "topic", [b"", b"a\0b", b"a\0/#", b"x" * 65_536, *NOT_UTF8], ids=lambda topic: repr(topic[:9])
)
def test_what_is_no_topic_name_is_malformed(topic: bytes) -> None:
    """[MQTT-4.7.3-1], [MQTT-4.7.3-2], [MQTT-4.7.3-3], [MQTT-1.5.4-1]"""
    with pytest.raises(MalformedPacket) as malformed:
        check_topic(topic)
    assert malformed.value.reason == 0x81


@pytest.mark.attack("A8")
@given(st.binary(max_size=20))
def test_any_bytes_are_a_topic_or_a_violation(topic: bytes) -> None:
    try:
        check_topic(topic)
    except PeerError:
        return
    text = topic.decode()
    assert text
    assert not set(text) & set("+#\0")


# --- filters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filter",
    [
        b"a",
        b"#",
        b"+",
        b"+/+",
        b"/+",
        b"a/+/b/#",
        b"sport/tennis/#",
        b"+/tennis/#",
        b"/",
        b"//#",
        b"$SYS/#",
        b"$x",
    ],
)
def test_a_well_formed_filter_passes(filter: bytes) -> None:
    check_filter(filter)
    assert parse(filter) == ParsedFilter("plain", b"", b"", filter)


@pytest.mark.attack("A8")
@pytest.mark.parametrize(
    "filter",
    [
        b"",
        b"sport+",
        b"+a/b",
        b"a/b+",
        b"sport/tennis#",
        b"sport/tennis/#/ranking",
        b"##",
        b"++",
        b"#/",
        b"a\0b",
        b"x" * 65_536,
        *NOT_UTF8,
    ],
    ids=lambda filter: repr(filter[:9]),
)
def test_a_bad_filter_is_refused_with_its_own_reason(filter: bytes) -> None:
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.7.3-1], [MQTT-4.7.3-2], [MQTT-1.5.4-1]"""
    with pytest.raises(MalformedPacket) as malformed:
        check_filter(filter)
    assert malformed.value.reason == 0x81
    assert malformation(filter) == str(malformed.value)


@given(st.text(alphabet="a/+#é\n", min_size=1, max_size=8))
def test_wildcards_are_where_the_standard_wants_them_or_the_filter_is_malformed(text: str) -> None:
    levels = text.split("/")
    whole = all(level in ("+", "#") or not set(level) & set("+#") for level in levels)
    if whole and "#" not in levels[:-1]:
        check_form(text.encode())
    else:
        malformation(text.encode())


def test_a_malformed_filter_is_malformed_however_deep_it_is() -> None:
    with pytest.raises(MalformedPacket):
        check_filter(b"a/" * 200 + b"b#")


@pytest.mark.attack("A13")
def test_the_number_of_levels_is_bounded() -> None:
    check_filter(b"+/" * 127 + b"#")
    with pytest.raises(Refused):
        check_filter(b"+/" * 128 + b"#")
    check_filter(b"a/b/c", levels_max=3)
    with pytest.raises(Refused, match="more than 2 levels"):
        check_filter(b"a/b/c", levels_max=2)


# Sections 4.7.1.2, 4.7.1.3 and 4.7.2, example by example.
@pytest.mark.parametrize(
    ("filter", "topic", "expected"),
    [
        (b"sport/tennis/player1/#", b"sport/tennis/player1", True),
        (b"sport/tennis/player1/#", b"sport/tennis/player1/ranking", True),
        (b"sport/tennis/player1/#", b"sport/tennis/player1/score/wimbledon", True),
        (b"sport/tennis/player1/#", b"sport/tennis/player10", False),
        (b"sport/#", b"sport", True),
        (b"#", b"sport", True),
        (b"#", b"/finance", True),
        (b"sport/tennis/+", b"sport/tennis/player1", True),
        (b"sport/tennis/+", b"sport/tennis/player1/ranking", False),
        (b"sport/+", b"sport", False),
        (b"sport/+", b"sport/", True),
        (b"+/+", b"/finance", True),
        (b"/+", b"/finance", True),
        (b"+", b"/finance", False),
        (b"+/tennis/#", b"sport/tennis", True),
        (b"sport/+/player1", b"sport/tennis/player1", True),
        (b"sport/+/#", b"sport", False),
        (b"#", b"$SYS/broker", False),
        (b"+/monitor/Clients", b"$SYS/monitor/Clients", False),
        (b"$SYS/#", b"$SYS/monitor", True),
        (b"$SYS/monitor/+", b"$SYS/monitor/Clients", True),
        (b"a/#", b"a/$b", True),
        (b"a/+", b"a/$b", True),
        (b"ACCOUNTS", b"Accounts", False),
        (b"/finance", b"finance", False),
        (b"a/b", b"a/b/c", False),
        (b"a/b/c", b"a/b", False),
    ],
)
def test_matching_follows_the_examples_of_the_standard(filter: bytes, topic: bytes, expected: bool) -> None:
    assert matches(filter, topic) is expected


@given(topics)
def test_without_wildcards_only_the_same_topic_matches(topic: bytes) -> None:
    assert matches(topic, topic)
    assert not matches(topic, topic + b"/")
    assert not has_wildcard(topic)


@pytest.mark.parametrize(
    ("filter", "prefix"),
    [
        (b"a/b", b"a/b"),
        (b"a/b/#", b"a/b"),
        (b"a/+/c", b"a/"),
        (b"a/+/#", b"a/"),
        (b"#", b""),
        (b"+/a", b""),
        (b"/+", b"/"),
        (b"$SYS/#", b"$SYS"),
    ],
)
def test_the_literal_prefix_ends_before_the_first_wildcard_level(filter: bytes, prefix: bytes) -> None:
    assert literal_prefix(filter) == prefix


@given(filters, topics)
@example(b"a/b/#", b"a/b")
def test_every_topic_that_matches_starts_with_the_literal_prefix(filter: bytes, topic: bytes) -> None:
    if matches(filter, topic):
        assert topic.startswith(literal_prefix(filter))


# --- $share ---------------------------------------------------------------------------------------


@pytest.mark.req("S2.14")
@pytest.mark.parametrize(
    ("filter", "group", "rest"),
    [
        (b"$share/g/a/b", b"g", b"a/b"),
        (b"$share/g/#", b"g", b"#"),
        (b"$share/g//finance", b"g", b"/finance"),
        (b"$share/$g/$SYS/#", b"$g", b"$SYS/#"),
        (b"$share/g/$share", b"g", b"$share"),
    ],
)
def test_a_shared_filter_is_a_group_and_a_filter(filter: bytes, group: bytes, rest: bytes) -> None:
    assert parse(filter) == ParsedFilter("shared", group, b"", rest)


@pytest.mark.parametrize(
    ("filter", "why"),
    [
        (b"$share/", "needs a group"),
        (b"$share//a", "needs a group"),
        (b"$share/g", "needs a filter"),
        (b"$share/g/", "needs a filter"),
        (b"$share/+/a", "wildcards"),
        (b"$share/g#/a", "wildcards"),
        (b"$share/\xff/a", "UTF-8"),
        (b"$share/\0/a", "U+0000"),
        (b"$share/g/a#", "whole level"),
        (b"$share/g/#/a", "last level"),
    ],
)
def test_a_malformed_shared_filter_is_malformed_with_why(filter: bytes, why: str) -> None:
    """[MQTT-4.8.2-1], [MQTT-4.8.2-2]"""
    assert why in malformation(filter)


@pytest.mark.parametrize(
    ("filter", "why"), [(b"$share/g/$share/h/a", "another"), (b"$share/g/$replay/earliest/a", "`$replay`")]
)
def test_a_bad_shared_filter_is_refused_with_why(filter: bytes, why: str) -> None:
    assert why in refusal(filter)


def test_the_levels_of_a_special_filter_are_those_of_the_filter_inside() -> None:
    assert parse(b"$share/g/a/b", levels_max=2).filter == b"a/b"
    with pytest.raises(Refused):
        parse(b"$share/g/a/b/c", levels_max=2)


# --- $replay --------------------------------------------------------------------------------------


@pytest.mark.req("S3.12")
@pytest.mark.parametrize("start", [b"earliest", b"42", b"2026-01-31T12:00:00+01:00", b"@1738324800", b"-15m"])
def test_a_replay_filter_is_a_start_and_a_filter(start: bytes) -> None:
    assert parse(b"$replay/" + start + b"/a/+/#") == ParsedFilter("replay", b"", start, b"a/+/#")


@pytest.mark.parametrize(
    ("filter", "why"),
    [
        (b"$replay/", "allowed are"),
        (b"$replay/yesterday/a", "allowed are"),
        (b"$replay//a", "allowed are"),
        (b"$replay/+/a", "allowed are"),
        (b"$replay/earliest", "needs a filter"),
        (b"$replay/earliest/", "needs a filter"),
        (b"$replay/earliest/$share/g/a", "shared subscription cannot be replayed"),
        (b"$replay/earliest/$replay/earliest/a", "another"),
    ],
)
def test_a_bad_replay_filter_is_refused_with_why(filter: bytes, why: str) -> None:
    assert why in refusal(filter)


@pytest.mark.parametrize("filter", [b"$replay/earliest/a#", b"$replay/yesterday/a#", b"$replay/earliest/#/a"])
def test_a_replay_filter_that_the_standard_forbids_is_malformed(filter: bytes) -> None:
    assert "level" in malformation(filter)


def ms(*fields: int) -> int:
    return int(datetime(*fields, tzinfo=UTC).timestamp()) * 1_000  # type: ignore[misc,arg-type]


@pytest.mark.req("S3.12")
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"earliest", Start("earliest", 0)),
        (b"0", Start("position", 0)),
        (b"20260131", Start("position", 20_260_131)),
        (b"9223372036854775807", Start("position", 2**63 - 1)),
        (b"2026-01-31", Start("time", ms(2026, 1, 31))),
        (b"2026-01-31T12:00", Start("time", ms(2026, 1, 31, 12))),
        (b"2026-01-31T12:00:00", Start("time", ms(2026, 1, 31, 12))),
        (b"2026-01-31T12:00:00Z", Start("time", ms(2026, 1, 31, 12))),
        (b"2026-01-31T12:00:00.25Z", Start("time", ms(2026, 1, 31, 12) + 250)),
        (b"2026-01-31T12:00:00.123999Z", Start("time", ms(2026, 1, 31, 12) + 123)),
        (b"2026-01-31T12:00:00+02:00", Start("time", ms(2026, 1, 31, 10))),
        (b"2026-01-31T12:00:00-0530", Start("time", ms(2026, 1, 31, 17, 30))),
        (b"1969-12-31", Start("time", 0)),
        (b"0001-01-01T00:00:00+14:00", Start("time", 0)),
        (b"9999-12-31T23:59:59-14:00", Start("time", 253_402_351_199_000)),
        (b"@1738324800", Start("time", 1_738_324_800_000)),
        (b"@1738324800123", Start("time", 1_738_324_800_123)),
        (b"@0", Start("time", 0)),
        (b"-30s", Start("time", NOW_MS - 30_000)),
        (b"-15m", Start("time", NOW_MS - 900_000)),
        (b"-2h", Start("time", NOW_MS - 7_200_000)),
        (b"-7d", Start("time", NOW_MS - 604_800_000)),
        (b"-4w", Start("time", NOW_MS - 4 * 604_800_000)),
        (b"-999999999w", Start("time", 0)),
    ],
)
def test_a_start_is_understood(start: bytes, expected: Start) -> None:
    assert parse_start(start, NOW_MS) == expected


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"latest",
        b"-",
        b"-5",
        b"-5y",
        b"+5m",
        b"1.5",
        b"1e3",
        b"9223372036854775808",
        b"1" * 5_000,
        b"@",
        b"@x",
        b"@" + b"1" * 16,
        b"2026-13-01",
        b"2026-02-30",
        b"2026-01-31T25:00",
        b"2026-01-31T12:00:00+99:00",
        b"2026-W05-5",
        b"20260131T120000Z",
        b"12:00",
        b"Earliest",
        b" 1",
        b"1\n",
        b"\xff",
        "１".encode(),
    ],
    ids=lambda start: repr(start[:30]),
)
def test_a_bad_start_is_refused_with_a_list_of_what_is_allowed(start: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parse_start(start, NOW_MS)
    assert refused.value.reason == 0x8F
    message = str(refused.value)
    for form in ("earliest", "position", "2026-01-31T12:00:00Z", "@", "-15m"):
        assert form in message
    assert message.isprintable()
    assert message.isascii()
    assert len(message) < 600


@given(st.binary(max_size=30), st.integers(0, 2**48))
def test_any_start_is_understood_or_refused(start: bytes, now_ms: int) -> None:
    try:
        assert parse_start(start, now_ms).value >= 0
    except Refused:
        pass


@given(st.one_of(st.binary(max_size=30), filters.map(lambda filter: b"$share/g/" + filter)))
def test_any_filter_is_parsed_or_refused_and_what_is_parsed_is_well_formed(filter: bytes) -> None:
    try:
        parsed = parse(filter)
    except (MalformedPacket, Refused):
        return
    check_filter(parsed.filter)
    assert filter.endswith(parsed.filter)
