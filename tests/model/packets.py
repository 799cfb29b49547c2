"""Scripts for several clients: what they send, how it is cut, when ticks come, the log stores and time passes.

A script is a cast and a list of steps. Bytes are made here; acknowledgements are made when the script is played
(`play`), since they depend on what the client got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from forgiveness import TODAY
from hypothesis import strategies as st
from packet_strategies import packets as any_packets

from tidegate.wire import (
    NO_PROPERTIES,
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    Pingreq,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
    encode,
)

TOPICS = (b"a", b"a/b", b"c", "ä/€".encode(), b"w/x", b"w/y")
FILTERS = (b"a", b"a/#", b"+/b", b"#", b"c", "ä/+".encode(), b"+/+", b"m/+")
# Workers have these alone, and what one group gets is nothing to the other: else it would be open who got what.
SHARED = (b"$share/g/w/+", b"$share/h/c")
REFUSED_FILTERS = (b"$other/x", b"$replay/yesterday/a", b"$replay/earliest/", b"$share/g/$share/g/a", b"d/" * 9)
MALFORMED_FILTERS = (b"a/#/b", b"a+/b", b"$share/+/p", b"$share/g", b"$share/g/")
# Exact in binary, and no sum of less than 64 of these is a whole second: nothing is due at the very instant.
SECONDS = (23 / 64, 1 + 23 / 64, 1 + 23 / 64, 4 + 23 / 64, 60 + 23 / 64)
NOTHING_IDS = (60001, 60002)  # in flight nowhere

LEVELS_MAX = 8


# ── the cast ──


@dataclass(frozen=True)
class Actor:
    name: str
    version: int
    worker: bool = False
    window: int | None = None
    packet_max: int | None = None
    aliases: int = 0

    def say(self, *packets: Packet) -> bytes:
        return b"".join(encode(packet, self.version) for packet in packets)


def actors(number: int, *, worker: bool, limits: bool) -> st.SearchStrategy[Actor]:
    if not limits:
        return st.builds(Actor, st.just(f"c{number}"), st.sampled_from([3, 4, 5]), st.just(worker))
    old = st.builds(Actor, st.just(f"c{number}"), st.sampled_from([4, 4, 3]), st.just(worker))
    new = st.builds(
        Actor,
        st.just(f"c{number}"),
        st.just(5),
        st.just(worker),
        st.sampled_from([None, None, 1, 3]),
        st.none() if worker else st.sampled_from([None, None, None, 120]),
        st.sampled_from([0, 0, 1, 5]),
    )
    return old | new


# ── the steps ──


@dataclass(frozen=True)
class Cuts:
    """Where the bytes of a step are cut, and what happens there; the last piece may come with the next step."""

    at: tuple[int, ...] = ()
    between: tuple[str, ...] = ("",)
    keep_last: bool = False


@dataclass(frozen=True)
class Come:
    """A new connection. The client's earlier one, if there is one, stays open till the broker closes it."""

    actor: int
    connect: bytes
    cuts: Cuts = Cuts()


@dataclass(frozen=True)
class Send:
    actor: int
    data: bytes = field(repr=False)
    cuts: Cuts = Cuts()
    about: str = ""


@dataclass(frozen=True)
class Acknowledge:
    """Of what the client owes: places that are taken one after another; () for all in order."""

    actor: int
    places: tuple[int, ...] = ()
    cuts: Cuts = Cuts()
    refuse: bool = False  # with a reason of 0x80 and above


@dataclass(frozen=True)
class Break:
    actor: int


@dataclass(frozen=True)
class Around:
    """tick, store, settle, announce and the partition, or seconds that pass."""

    what: str
    seconds: float = 0.0


Step = Come | Send | Acknowledge | Break | Around


@dataclass(frozen=True)
class Script:
    actors: tuple[Actor, ...]
    steps: tuple[Step, ...]
    late: bool = True
    hurry: bool = False
    tail_bytes: int = 64 << 20
    receive_maximum: int = 8192
    packet_bytes_max: int = 4 << 20
    partitions: int = 1
    prompt: bool = True  # announced within the call


happenings = st.sampled_from(["", "", "tick", "tick", "tick store", "store"])
cuts = st.builds(
    Cuts,
    st.lists(st.integers(0, 300) | st.integers(0, 40_000), max_size=4).map(tuple),
    st.lists(happenings, min_size=1, max_size=3).map(tuple),
    st.sampled_from([False, False, True]),
)


@st.composite
def on_partitions(draw: st.DrawFn, scripts: st.SearchStrategy[Script], count: int = 3, *, prompt: bool) -> Script:
    """The same on a log with several partitions, which are announced within the call, or now and then: where a step
    ends, where its bytes are cut, and whenever the log stores."""
    script = replace(draw(scripts), partitions=count, prompt=prompt)
    if prompt:
        return script
    some = [f"announce{partition}" for partition in range(count)]
    announcements = st.sampled_from(["", "", *some, *(f"tick {one}" for one in some), "tick announce1 announce0 store"])
    steps: list[Step] = []
    for step in script.steps:
        if isinstance(step, Come | Send | Acknowledge) and step.cuts.at:
            between = tuple(f"{what} {draw(announcements)}" for what in step.cuts.between)
            step = replace(step, cuts=replace(step.cuts, between=between))
        steps += (step, *map(Around, draw(announcements).split()))
    return replace(script, steps=tuple(steps))


# ── publishes ──


@dataclass(frozen=True)
class Theme:
    """What a script is about: weights, so that rare things come in numbers and together."""

    workers_from: int = 3  # the first client of the cast that is a member of shared groups
    topics: tuple[bytes, ...] = TOPICS
    filters: tuple[bytes, ...] = FILTERS
    counts: tuple[int, ...] = (1, 1, 2, 3, 9, 12, 30)
    qos: tuple[tuple[int, ...], ...] = ((0,), (0,), (1,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
    oddities: tuple[str, ...] = ()  # beside the usual ones
    retained_in: int = 10  # one block out of so many
    expiring_in: int = 20  # likewise, of those with MQTT 5
    will_in: int = 4  # one CONNECT out of so many
    end_in: int = 12  # one step of bytes out of so many ends with what ends a connection
    ends: tuple[str, ...] = ("fault", "fault", "disconnect", "anything")
    content: tuple[str, ...] = ("publish",) * 9 + ("subscribe",) * 4 + ("unsubscribe", "stray")
    steps: tuple[str, ...] = ("send",) * 8 + ("ack",) * 5 + ("around",) * 4 + ("come", "break", "time", "return")


FEW = (1, 1, 2, 3, 9)
MANY = (6, 9, 12, 30, 60)
THEMES = (
    Theme(),
    Theme(
        topics=(b"a", b"a/b"),
        filters=(b"a/#", b"#", b"a", b"m/+"),
        counts=MANY,
        qos=((0,), (1,), (1,), (2,), (0, 1)),
        content=("publish",) * 6 + ("subscribe",),
        steps=("send",) * 6 + ("ack",) * 4 + ("around",) * 2 + ("return",),
    ),
    Theme(
        topics=(b"a", b"a/b"),
        filters=(b"a", b"a/#", b"#"),
        counts=FEW,
        qos=((1,), (1,), (2,), (1, 2), (0, 1)),
        steps=("send",) * 4 + ("ack",) * 3 + ("around",) * 2 + ("return",) * 4,
    ),
    Theme(workers_from=1, topics=(b"w/x", b"w/y", b"w/x", b"c"), counts=FEW),
    Theme(
        topics=(b"a", b"a/b"),
        filters=(b"a", b"a/#", b"#"),
        counts=FEW,
        oddities=("clear", "retain", "expiry"),
        retained_in=2,
        content=("publish",) * 4 + ("subscribe",) * 5 + ("unsubscribe",) * 2,
    ),
    Theme(
        topics=(b"a", b"c"),
        filters=(b"a", b"#"),
        counts=FEW,
        retained_in=4,
        expiring_in=2,
        will_in=2,
        end_in=4,
        ends=("disconnect", "disconnect", "fault"),
        steps=("send",) * 5 + ("ack",) + ("around",) * 2 + ("come", "break") + ("return",) * 4 + ("time",) * 3,
    ),
    Theme(
        topics=(b"a", b"a/b"),
        counts=FEW,
        qos=((2,), (2,), (1, 2)),
        oddities=("repeat",) * 8 + ("release",) * 4,
        steps=("send",) * 6 + ("ack",) * 6 + ("around",) * 3 + ("return",) * 3,
    ),
)


class Serial:
    """Makes every payload a new one, and every packet id that is not meant to be repeated."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.number = 0
        self.packet_ids: dict[int, int] = {}

    def payload(self, size: int) -> bytes:
        self.number += 1
        return (b"%d;" % self.number).ljust(size, b".")

    def packet_id(self, actor: int) -> int:
        self.packet_ids[actor] = self.packet_ids.get(actor, 0) % 200 + 1
        return self.packet_ids[actor]


# Where the remaining length of a packet takes another byte.
SIZES = (6, 6, 20, 60, 110, 118, 119, 120, 121, 122, 200)
LARGE_SIZES = (16370, 16380, 16400)
ODDITIES = (
    "properties",
    "properties",
    "expiry",
    "retain",
    "retain",
    "clear",
    "dup",
    "repeat",
    "topic",
    "size",
    "qos",
    "format",
    "bad format",
    "alias",
    "aliased",
    "dollar",
    "deep",
    "packet inside",
    "ping",
    "release",
    "long length",
)


@st.composite
def publish_blocks(draw: st.DrawFn, number: int, actor: Actor, serial: Serial) -> list[bytes]:
    """Publishes as fleets send them, in bulk and alike; and among them one or two that are not."""
    theme = serial.theme
    count = draw(st.sampled_from(theme.counts))
    topics = draw(st.sampled_from(["one", "one", "few", "many"]))
    qos_of = draw(st.sampled_from(theme.qos))
    large = st.sampled_from(LARGE_SIZES).map(lambda size: [size])
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3) | large)
    if sizes[0] > 10_000:
        count = min(count, 3)
    topic = draw(st.sampled_from(theme.topics))
    about = Properties(user=((b"k", b"v"),)) if actor.version == 5 and draw(st.integers(0, 4)) == 0 else NO_PROPERTIES
    if actor.version == 5 and draw(st.integers(1, theme.expiring_in)) == 1:
        about = replace(about, message_expiry=draw(st.sampled_from([0, 1, 3, 100])))
    retain = draw(st.integers(1, theme.retained_in)) == 1
    oddities = st.sampled_from(ODDITIES + theme.oddities)
    odd = dict(draw(st.lists(st.tuples(st.integers(0, count - 1), oddities), max_size=2)))
    made: list[bytes] = []
    for place in range(count):
        if topics != "one":
            topic = theme.topics[place % len(theme.topics)] if topics == "few" else b"m/%d" % (place % 7)
        qos = qos_of[place % len(qos_of)]
        packet = Publish(
            topic,
            serial.payload(sizes[place % len(sizes)]),
            qos,
            retain,
            packet_id=serial.packet_id(number) if qos else 0,
            properties=about,
        )
        made += _odd(odd.get(place), packet, number, actor, serial)
    return made


def _odd(kind: str | None, packet: Publish, number: int, actor: Actor, serial: Serial) -> list[bytes]:
    """The packet with something unlike the others."""
    v5 = actor.version == 5

    def with_(**properties: Any) -> list[bytes]:
        about = replace(packet.properties, **properties) if v5 else NO_PROPERTIES
        return [actor.say(replace(packet, properties=about))]

    plain = actor.say(packet)
    match kind:
        case "properties":
            return with_(user=((b"a", b"1"), (b"a", b"2")), content_type=b"t", correlation_data=b"\0")
        case "expiry":
            return with_(message_expiry=2)
        case "format":
            return with_(payload_format=1)
        case "bad format" if v5:
            about = Properties(payload_format=1)
            return [actor.say(replace(packet, payload=b"\xff" + packet.payload, properties=about))]
        case "retain":
            return [actor.say(replace(packet, retain=True))]
        case "clear":
            return [actor.say(replace(packet, retain=True, payload=b""))]
        case "dup" if packet.qos:
            return [actor.say(replace(packet, dup=True))]
        case "repeat" if packet.qos:
            return [plain, actor.say(replace(packet, dup=True))]
        case "topic":
            return [actor.say(replace(packet, topic=b"c"))]
        case "size":
            return [actor.say(replace(packet, payload=packet.payload + b"!"))]
        case "qos":
            qos = 1 if packet.qos != 1 else 2
            return [actor.say(replace(packet, qos=qos, packet_id=serial.packet_id(number)))]
        case "alias":
            return with_(topic_alias=3)
        case "aliased" if v5:
            first = replace(packet, properties=Properties(topic_alias=3))
            second = replace(packet, topic=b"", payload=serial.payload(6), properties=Properties(topic_alias=3))
            if packet.qos:
                second = replace(second, packet_id=serial.packet_id(number))
            return [actor.say(first), actor.say(second)]
        case "dollar":
            return [actor.say(replace(packet, topic=b"$own"))]
        case "deep":
            return [actor.say(replace(packet, topic=b"/" * LEVELS_MAX))]
        case "packet inside":
            inside = actor.say(replace(packet, payload=b"zz"))
            return [actor.say(replace(packet, payload=packet.payload + inside + inside))]
        case "ping":
            return [actor.say(Pingreq()), plain]
        case "release" if packet.qos == 2:
            return [plain, actor.say(Pubrel(packet.packet_id))]
        case "long length":  # MQTT 5 forbids it; we do so for 3.1.1 as well
            return [longer(plain)]
        case _:
            return [plain]


def longer(packet: bytes) -> bytes:
    """The same packet with a remaining length in more bytes than needed."""
    end = next(at for at in range(1, 5) if packet[at] < 0x80)
    return packet[:end] + bytes((packet[end] | 0x80, 0)) + packet[end + 1 :] if end < 4 else packet


# ── the other packets ──


SUBSCRIBES = ("plain",) * 9 + ("replay",) * 2 + ("refused", "malformed")


@st.composite
def subscribes(
    draw: st.DrawFn, number: int, actor: Actor, serial: Serial, kinds: tuple[str, ...] = SUBSCRIBES
) -> list[bytes]:
    v5 = actor.version == 5
    kind = draw(st.sampled_from(kinds))
    pool = {"refused": REFUSED_FILTERS, "malformed": MALFORMED_FILTERS}.get(kind, serial.theme.filters)
    if actor.worker and kind in ("plain", "replay"):
        kind, pool = "shared", SHARED
    requests = [
        FilterRequest(
            (b"$replay/earliest/" if kind == "replay" else b"") + filter,
            draw(st.integers(0, 2)),
            v5 and not filter.startswith(b"$share/") and draw(st.integers(0, 3)) == 0,
            v5 and draw(st.integers(0, 2)) == 0,
            draw(st.sampled_from([0, 0, 0, 1, 2])) if v5 else 0,
        )
        for filter in draw(st.lists(st.sampled_from(pool), min_size=1, max_size=2 if kind == "plain" else 1))
    ]
    about = NO_PROPERTIES
    if v5:
        identifiers = draw(st.sampled_from([(), (1,), (2,), (200,), (20_000,)]))
        start = kind == "plain" and draw(st.integers(0, 9)) == 0
        about = Properties(subscription_ids=identifiers, user=((b"tidegate-from", b"earliest"),) if start else ())
    return [actor.say(Subscribe(serial.packet_id(number), tuple(requests), about))]


@st.composite
def unsubscribes(draw: st.DrawFn, number: int, actor: Actor, serial: Serial) -> list[bytes]:
    plain = serial.theme.filters
    pool = SHARED if actor.worker else (*plain, *(b"$replay/earliest/" + filter for filter in plain))
    filters = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    return [actor.say(Unsubscribe(serial.packet_id(number), tuple(filters)))]


def strays(actor: Actor) -> st.SearchStrategy[list[bytes]]:
    """Well-formed, and about nothing."""
    some: list[Packet] = [kind(pid) for kind in (Puback, Pubrec, Pubrel, Pubcomp) for pid in NOTHING_IDS]
    if actor.version == 5:
        some.append(Pubrec(60001, 0x97))
    return st.lists(st.sampled_from([*some, Pingreq()]), min_size=1, max_size=3).map(lambda found: [actor.say(*found)])


def _raw(first: int, body: bytes) -> bytes:
    return bytes((first, len(body))) + body


def _publish_body(topic: bytes, packet_id: int | None, v5: bool, block: bytes = b"", payload: bytes = b"x") -> bytes:
    pid = b"" if packet_id is None else packet_id.to_bytes(2, "big")
    return len(topic).to_bytes(2, "big") + topic + pid + (bytes((len(block),)) + block if v5 else b"") + payload


def faults(actor: Actor) -> st.SearchStrategy[tuple[str, bytes]]:
    """What ends a connection, by name."""
    v5 = actor.version == 5

    def body(topic: bytes, packet_id: int | None = None, block: bytes = b"") -> bytes:
        return _publish_body(topic, packet_id, v5, block)

    # Packet id 0 within a run is a case of its own.
    apart = actor.say(Pingreq()) if "packet id 0 undoes its run" in TODAY else b""
    some = {
        "QoS 3": _raw(0x36, body(b"a", 1)),
        "DUP with QoS 0": _raw(0x38, body(b"a")),
        "id 0": apart + _raw(0x32, body(b"a", 0)),
        "id 0, QoS 2": apart + _raw(0x34, body(b"a", 0)),
        "wildcard": _raw(0x30, body(b"a/+")),
        "wildcard, QoS 1": _raw(0x32, body(b"a/#", 9)),
        "NUL": _raw(0x30, body(b"a\0b")),
        "not UTF-8": _raw(0x32, body(b"\xff\xfe", 9)),
        "no topic": _raw(0x30, body(b"")),
        "topic longer than the packet": _raw(0x30, b"\0\x09a"),
        "packet id missing": _raw(0x32, b"\0\x01a"),
        "type 0": _raw(0x00, b""),
        "CONNACK": _raw(0x20, b"\0\0"),
        "SUBACK": _raw(0x90, b"\0\1\0"),
        "AUTH": _raw(0xF0, b""),
        "PUBACK with flags": _raw(0x41, b"\0\1"),
        "PUBREL without its flag": _raw(0x60, b"\0\1"),
        "PUBACK for 0": _raw(0x40, b"\0\0"),
        "SUBSCRIBE without its flag": _raw(0x80, b"\0\1" + b"\0" * v5 + b"\0\1a\0"),
        "SUBSCRIBE for nothing": _raw(0x82, b"\0\1" + b"\0" * v5),
        "SUBSCRIBE with QoS 3": _raw(0x82, b"\0\1" + b"\0" * v5 + b"\0\1a\3"),
        "UNSUBSCRIBE for nothing": _raw(0xA2, b"\0\1" + b"\0" * v5),
        "PINGREQ with a body": _raw(0xC0, b"x"),
        "remaining length of five bytes": b"\x30\xff\xff\xff\xff\x01",
        "second CONNECT": actor.say(Connect(actor.version, b"other")),
        "too large": b"\x30\xff\xff\xff\x7f",
    }
    if v5:
        some |= {
            "alias 0": _raw(0x30, body(b"a", None, b"\x23\0\0")),
            "alias too large": _raw(0x32, body(b"a", 9, b"\x23\xff\xff")),
            "alias that was never set": _raw(0x30, body(b"", None, b"\x23\0\x3f")),
            "subscription identifier": _raw(0x30, body(b"a", None, b"\x0b\1")),
            "payload format twice": _raw(0x30, body(b"a", None, b"\x01\0\x01\0")),
            "unknown property": _raw(0x32, body(b"a", 9, b"\x7f\0")),
            "no local on a shared one": _raw(0x82, b"\0\1\0\0\x0a$share/g/a\4"),
            "AUTH for a method": _raw(0xF0, b"\x18\x04\x15\0\1m"),
        }
    return st.sampled_from(sorted(some.items()))


def anything(actor: Actor) -> st.SearchStrategy[list[bytes]]:
    """Any packet that is valid by itself, whoever may send it. Acknowledgements name packet ids that may be in use or
    not, and filters may overlap with groups: not what a script could be compared by."""
    apart = (Puback, Pubrec, Pubrel, Pubcomp, Subscribe, Unsubscribe)
    return any_packets(actor.version).filter(lambda p: not isinstance(p, apart)).map(lambda p: [actor.say(_short(p))])


def _short(packet: Packet) -> Packet:
    if isinstance(packet, Publish) and packet.properties.subscription_ids:
        return replace(packet, properties=replace(packet.properties, subscription_ids=()))
    return packet


@st.composite
def connects(draw: st.DrawFn, actor: Actor, serial: Serial) -> bytes:
    v5 = actor.version == 5
    will = None
    if draw(st.integers(1, serial.theme.will_in)) == 1:
        topics = [*(b"a", b"c", b"a/b", b"w/x") * 3, b"$no", b"a/+"]
        if "a will's topic is too deep" not in TODAY:
            topics.append(b"/" * LEVELS_MAX)
        topic = draw(st.sampled_from(topics))
        about = NO_PROPERTIES
        if v5:
            about = Properties(
                will_delay=draw(st.sampled_from([None, None, 1, 5])),
                message_expiry=draw(st.sampled_from([None, None, 3])),
                user=draw(st.sampled_from([(), ((b"w", b"1"),)])),
            )
        will = Will(topic, serial.payload(8), draw(st.integers(0, 2)), draw(st.booleans()), about)
    about = NO_PROPERTIES
    if v5:
        about = Properties(
            session_expiry=draw(st.sampled_from([1000, 1000, 1000, 1000, None, 0, 1, 3, 0xFFFFFFFF])),
            receive_maximum=actor.window,
            maximum_packet_size=actor.packet_max,
            topic_alias_maximum=actor.aliases or None,
            request_problem_info=draw(st.sampled_from([None, None, False])),
        )
    clean = draw(st.sampled_from([False, False, False, True]))
    return encode(Connect(actor.version, actor.name.encode(), clean, 0, will, properties=about), actor.version)


@st.composite
def disconnects(draw: st.DrawFn, actor: Actor) -> list[bytes]:
    packet = Disconnect()
    if actor.version == 5:
        expiry = draw(st.sampled_from([None, None, None, 0, 1, 100]))
        packet = Disconnect(draw(st.sampled_from([0, 0, 4, 0x81])), Properties(session_expiry=expiry))
    return [actor.say(packet), *draw(st.sampled_from([[], [actor.say(Publish(b"a", b"too late"))]]))]


# ── scripts ──

CONTENT: dict[str, Callable[[int, Actor, Serial], st.SearchStrategy[list[bytes]]]] = {
    "publish": lambda number, actor, serial: publish_blocks(number, actor, serial),
    "subscribe": subscribes,
    "unsubscribe": unsubscribes,
    "stray": lambda number, actor, serial: strays(actor),
    "fault": lambda number, actor, serial: faults(actor).map(lambda found: [found[1]]),
    "anything": lambda number, actor, serial: anything(actor),
    "disconnect": lambda number, actor, serial: disconnects(actor),
}


@st.composite
def sends(draw: st.DrawFn, number: int, actor: Actor, serial: Serial) -> Send:
    theme = serial.theme
    kinds = [draw(st.sampled_from(theme.content)) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.integers(1, theme.end_in)) == 1:
        kinds.append(draw(st.sampled_from(theme.ends)))
        kinds += draw(st.sampled_from([[], ["publish"]]))
    data = b"".join(b"".join(draw(CONTENT[kind](number, actor, serial))) for kind in kinds)
    return Send(number, data, draw(cuts), ", ".join(kinds))


@st.composite
def returns(draw: st.DrawFn, number: int, cast: tuple[Actor, ...], serial: Serial) -> list[Step]:
    """A client goes, something happens without it, and it comes back."""
    steps: list[Step] = [Around(what) for what in draw(st.lists(st.sampled_from(["tick", "settle"]), max_size=2))]
    if draw(st.booleans()):
        steps.append(Break(number))
    else:
        steps.append(Send(number, b"".join(draw(disconnects(cast[number]))), about="disconnect"))
    if draw(st.booleans()):
        other = draw(st.integers(0, len(cast) - 1))
        data = b"".join(draw(publish_blocks(other, cast[other], serial)))
        steps.append(Send(other, data, draw(cuts), "publish"))
    if draw(st.integers(0, 2)) == 0:
        steps.append(Around("advance", draw(st.sampled_from(SECONDS))))
    return [*steps, Come(number, draw(connects(cast[number], serial)), draw(cuts))]


@st.composite
def scripts(draw: st.DrawFn, *, steps_max: int = 14, limits: bool = True) -> Script:
    """`limits`: clients may have windows, packet limits and aliases."""
    theme = draw(st.sampled_from(THEMES))
    serial = Serial(theme)
    count = draw(st.integers(2, 5))
    cast = tuple(draw(actors(n, worker=n >= theme.workers_from, limits=limits)) for n in range(count))
    steps: list[Step] = []
    for number, actor in enumerate(cast):
        steps.append(Come(number, draw(connects(actor, serial)), draw(cuts)))
        if draw(st.integers(0, 5)):
            data = b"".join(draw(subscribes(number, actor, serial, ("plain", "plain", "plain", "replay"))))
            steps.append(Send(number, data, draw(cuts), "subscribe"))
    for _ in range(draw(st.integers(4, steps_max))):
        number = draw(st.integers(0, len(cast) - 1))
        actor = cast[number]
        kind = draw(st.sampled_from(theme.steps))
        if kind == "send":
            steps.append(draw(sends(number, actor, serial)))
        elif kind == "ack":
            places = draw(st.just(()) | st.lists(st.integers(0, 12), min_size=1, max_size=8).map(tuple))
            steps.append(Acknowledge(number, places, draw(cuts), actor.version == 5 and draw(st.integers(0, 7)) == 0))
        elif kind == "come":
            steps.append(Come(number, draw(connects(actor, serial)), draw(cuts)))
        elif kind == "break":
            steps.append(Break(number))
        elif kind == "return":
            steps += draw(returns(number, cast, serial))
        elif kind == "time":
            steps.append(Around("advance", draw(st.sampled_from(SECONDS))))
        else:
            steps.append(Around(draw(st.sampled_from(["tick", "store", "settle", "settle"]))))
    v5_only = all(actor.version == 5 for actor in cast)
    return Script(
        cast,
        tuple(steps),
        late=draw(st.booleans()),
        hurry=draw(st.booleans()),
        tail_bytes=draw(st.sampled_from([1, 3000, 64 << 20])),
        receive_maximum=draw(st.sampled_from([8192, 8192, 5])) if v5_only else 8192,
        packet_bytes_max=draw(st.sampled_from([4 << 20, 4 << 20, 17_000, 1000])),
    )
