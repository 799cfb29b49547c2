"""Names that are not allowed, and filters made to confuse, to fill the memory or to make matching slow."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import vectors
from attack_kit import DROPPED, MIB, REFUSED, Scene, ask_until_ignored, closed_with

from harness import RawClient
from packet_bytes import publish_bytes, subscribe_bytes, unsubscribe_bytes
from tidegate.wire import Connack, Connect, FilterRequest, Publish, Suback, Subscribe, Unsubscribe, Will

BAD_TOPICS = [b"", b"a\0b", b"a/+/b", b"#", b"a/#", b"+", b"a/\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"a\xf4\x90\x80\x80"]

FILTERS_MAX = 10_000  # mqtt.subscriptions_per_session_max


# ── topics ──


@pytest.mark.attack("A8")
def test_a_topic_that_is_no_topic_reaches_nobody_and_ends_the_connection(scene: Scene, version: int) -> None:
    listener = scene.open("listener", 5)
    listener.subscribe("#", "+/#", "attack/#")
    for topic, qos in itertools.product(BAD_TOPICS, (0, 1, 2)):
        attacker = scene.open("attacker", version)
        attacker.send_bytes(publish_bytes(topic, b"evil", qos, version=version))
        said = attacker.until_closed()
        if version == 5:
            assert [p.reason for p in said] in ([0x81], [0x82], [0x90]), topic  # each one exactly: see the vectors
        else:
            assert said == [], topic
    scene.open("friend").publish("attack/end", b"end")
    while (heard := listener.expect(Publish)).topic != b"attack/end":
        assert heard.topic == b"bystanders/talk"


@pytest.mark.attack("A8")
def test_messages_in_front_of_a_bad_topic_in_one_write_are_delivered(scene: Scene, version: int) -> None:
    listener = scene.open("listener")
    listener.subscribe("attack/#")
    attacker = scene.open("attacker", version)
    good = b"".join(publish_bytes(b"attack/%d" % (i % 3), b"%d" % i, version=version) for i in range(50))
    attacker.send_bytes(good + publish_bytes(b"attack/+", b"evil", version=version) + good)
    closed_with(attacker, 0x90)
    assert listener.payloads(50) == [b"%d" % i for i in range(50)]
    listener.nothing()


@pytest.mark.attack("A8")
def test_a_topic_of_very_many_levels_is_refused_and_the_connection_goes_on(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    deep = b"/".join([b"a"] * 30_000)
    for _ in range(20):
        assert attacker.publish(deep, b"x", 1) == (0x90 if version == 5 else 0)
    attacker.publish(deep, b"x", 0)
    attacker.publish(deep, b"x" * 20_000, 0)
    assert attacker.publish("attack/shallow", b"x", 2) == (0x10 if version == 5 else 0)
    scene.counted(REFUSED + "PUBLISH 0x90", 22)
    scene.counted(DROPPED + "refused", 22)


@pytest.mark.attack("A9")
def test_nobody_can_publish_to_the_brokers_own_topics(scene: Scene, version: int) -> None:
    topics = ["$SYS/broker/version", "$SYS/broker/uptime", "$SYS/attack", "$attack", "$", "$share/g/a", "$replay/0/a"]
    listener = scene.open("listener")
    listener.subscribe("$SYS/broker/version", "$SYS/attack", "#", "$share/g/a", "a")
    attacker = scene.open("attacker", version)
    for topic, qos in itertools.product(topics, (0, 1, 2)):
        for payload, retain in ((b"forged", False), (b"forged" * 4000, False), (b"forged", True), (b"", True)):
            reason = attacker.publish(topic, payload, qos, retain)
            assert reason == (0x90 if version == 5 and qos else 0), topic
    attacker.publish("attack/end")
    heard: list[Publish] = []
    while not heard or heard[-1].topic != b"attack/end":
        heard.append(listener.message())
    assert {m.topic for m in heard} <= {b"$SYS/broker/version", b"bystanders/talk", b"attack/end"}
    assert not any(b"forged" in m.payload for m in heard)
    late = scene.open("late")
    late.subscribe("$SYS/broker/version")
    assert late.message().payload.startswith(b"tidegate version")
    late.subscribe("$replay/earliest/$SYS/#", "$replay/earliest/$attack/#")
    late.nothing()
    scene.counted(REFUSED + "PUBLISH 0x90", 3 * 4 * len(topics))


@pytest.mark.attack("A9")
def test_unknown_dollar_filters_are_refused_and_known_ones_show_nothing_else(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    unknown = ["$attack", "$attack/#", "$", "$/+", "$SYSTEM/#", "$queue/a"]
    unknown += ["$share/g/$attack/#", "$replay/x/a", "$replay/0/$attack/#"]
    bad = 0x8F if version == 5 else 0x80
    answer = attacker.subscribe(*unknown, qos=1)
    assert dict(zip(unknown, answer.reasons, strict=True)) == dict.fromkeys(unknown, bad)
    scene.counted(REFUSED + "SUBSCRIBE 0x8F", len(unknown))


@pytest.mark.attack("A9")
def test_wildcards_never_reach_the_brokers_own_topics(scene: Scene) -> None:
    attacker = scene.open("attacker")
    attacker.subscribe("#", "+/#", "+/broker/#", "+/+/+", "$share/g/#", "$share/g/+/broker/uptime")
    scene.observer.afresh()  # two updates of $SYS have gone out
    attacker.send_bytes(b"\xc0\x00")
    assert {m.topic for m in until_pong(attacker)} == {b"bystanders/talk"}


def until_pong(client: RawClient) -> list[Publish]:
    heard: list[Publish] = []
    while isinstance(packet := client.receive(), Publish):
        heard.append(packet)
    return heard


@pytest.mark.attack("A9", "A10")
def test_a_will_on_the_brokers_own_topics_is_refused_at_connect(scene: Scene, version: int) -> None:
    for topic in (b"$SYS/broker/version", b"$attack", b"$share/g/a"):
        attacker = scene.open(None, version)
        attacker.send(Connect(version, b"attacker", will=Will(topic, b"forged", 1, True)))
        answers = attacker.until_closed()  # an older CONNACK has no word for it
        assert [p.reason for p in answers if isinstance(p, Connack)] == ([0x90] if version == 5 else [])
    scene.counted(REFUSED + "Refused 0x90", 3)
    scene.clients_back_to(connected=3, sessions=3)


@pytest.mark.attack("A10")
def test_a_client_that_tries_bad_wills_for_ever_costs_nothing_and_displaces_nobody(scene: Scene) -> None:
    victim = scene.open("x", 5)  # the vectors connect with this client id
    wills = [v.raw for v in vectors.INVALID_CONNECTS if "A10" in v.attacks]
    descriptors = scene.descriptors()
    storm(scene, wills, rounds=5)
    before = scene.broker.rss_bytes()
    storm(scene, wills, rounds=50)
    assert scene.broker.rss_bytes() - before < 16 * MIB
    victim.nothing()
    scene.clients_back_to(connected=4, sessions=4)
    scene.descriptors_back_to(descriptors)


def storm(scene: Scene, packets: list[bytes], rounds: int) -> None:
    for _ in range(rounds):
        for packet in packets:
            with RawClient(scene.broker.port, 5) as attacker:
                attacker.send_bytes(packet)
                attacker.until_closed()


# ── filters ──


@pytest.mark.attack("A12")
def test_a_refused_filter_among_others_is_refused_alone(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    filters = ["attack/a", "$attack/b", "attack/b", "$replay/x/attack/b", "attack/+", "$replay/x/#"]
    bad = 0x8F if version == 5 else 0x80
    assert attacker.subscribe(*filters, qos=1).reasons == (1, bad, 1, bad, 1, bad)
    attacker.publish("attack/a", b"in", 1)
    assert attacker.message().payload == b"in"
    attacker.nothing()
    scene.counted(REFUSED + "SUBSCRIBE 0x8F", 3)


@pytest.mark.attack("A12", "A14")
def test_a_malformed_filter_among_others_ends_the_connection_and_none_is_in_force(scene: Scene, version: int) -> None:
    friend = scene.open("friend", 5)
    malformed = ["attack/#/b", "attack/b+", "$share//x", "$share/g+/x", "$share/g/", "#/", "a\0b"]
    for invalid in malformed:
        attacker = scene.open("attacker", version)
        requests = [FilterRequest(filter.encode(), 1) for filter in ("attack/a", invalid, "attack/b")]
        attacker.send(Subscribe(1, tuple(requests)))
        closed_with(attacker, 0x81)
        assert friend.publish("attack/a", b"", 1) == 0x10
    scene.counted(REFUSED + "MalformedPacket 0x81", len(malformed))


@pytest.mark.attack("A12")
def test_a_subscribe_of_thousands_of_filters_stops_at_the_limit(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    asked = FILTERS_MAX + 5_000
    filters = [b"attack/%d/+" % i for i in range(asked)]
    for some in (filters[: asked // 2], filters[asked // 2 :]):
        attacker.send_bytes(subscribe_bytes(some, version=version))
    reasons = attacker.amid(Suback).reasons + attacker.amid(Suback).reasons
    full = 0x97 if version == 5 else 0x80
    assert reasons == (0,) * FILTERS_MAX + (full,) * 5_000
    friend = scene.open("friend")
    friend.publish("attack/7/x", b"kept")
    friend.publish(f"attack/{asked - 1}/x", b"refused")
    assert attacker.message().payload == b"kept"
    attacker.nothing()
    scene.counted(REFUSED + "SUBSCRIBE 0x97", 5_000)
    scene.shows("subscriptions/count", FILTERS_MAX + 2)
    attacker.disconnect()
    scene.shows("subscriptions/count", 2)


@pytest.mark.attack("A12")
@pytest.mark.parametrize("about", [subscribe_bytes, unsubscribe_bytes])
def test_more_filters_in_a_packet_than_a_session_may_hold_end_the_connection(
    scene: Scene, version: int, about: Callable[..., bytes]
) -> None:
    before = scene.broker.rss_bytes()
    attacker = scene.open("attacker", version)
    count = 4 * MIB // 9 - 10  # as many as the largest packet takes
    attacker.send_bytes(about([b"%06d" % i for i in range(count)], version=version))
    closed_with(attacker, 0x97)
    assert scene.broker.rss_bytes() - before < 64 * MIB
    scene.counted(REFUSED + "Refused 0x97", 1)
    scene.shows("subscriptions/count", 2)


@pytest.mark.attack("A12")
def test_subscribing_again_and_again_without_reading_does_not_pile_up_retained_messages(scene: Scene) -> None:
    friend = scene.open("friend")
    friend.publish("attack/r", b"r" * 100_000, 1, retain=True)
    attacker = scene.open("attacker")
    again = subscribe_bytes([b"attack/r", b"attack/+", b"attack/#", b"+/r"] * 250)
    before = scene.broker.rss_bytes()
    ask_until_ignored(scene, attacker, again)
    assert scene.broker.rss_bytes() - before < 64 * MIB


@pytest.mark.attack("A12")
def test_subscribing_and_unsubscribing_in_a_storm_leaves_nothing_behind(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    filters = [b"attack/%d/+/#" % i for i in range(2_000)] + [b"$share/g/attack/%d" % i for i in range(500)]
    requests = tuple(FilterRequest(f, 1) for f in filters)

    def cycle(times: int) -> None:
        for _ in range(times):
            attacker.send(Subscribe(attacker.packet_id(), requests))
            attacker.send(Unsubscribe(attacker.packet_id(), tuple(filters)))
            assert attacker.amid(Suback).reasons == (1,) * len(filters)

    cycle(3)
    before = scene.broker.rss_bytes()
    cycle(15)
    assert scene.broker.rss_bytes() - before < 32 * MIB
    scene.shows("subscriptions/count", 2)
    scene.shows("shared_subscriptions/count", 0)


# ── filters that make matching slow ──


@pytest.mark.attack("A13")
@pytest.mark.req("S0.1")
def test_filters_built_to_make_matching_slow_do_not(scene: Scene, version: int) -> None:
    attacker = scene.open("attacker", version)
    depth = 11
    mixed = [b"/".join(levels) + b"/#" for levels in itertools.product((b"a", b"+"), repeat=depth)]
    deep = [b"+/" * n + b"#" for n in range(12, 128)] + [b"/".join([b"+"] * n) for n in range(1, 129)]
    for start in range(0, len(mixed), 500):
        attacker.send_bytes(subscribe_bytes(mixed[start : start + 500], version=version))
        assert set(attacker.amid(Suback).reasons) == {0}
    attacker.send_bytes(subscribe_bytes(deep, version=version))
    assert set(attacker.amid(Suback).reasons) == {0}
    friend = scene.open("friend", 4)
    topics = [b"/".join([b"a"] * depth) + b"/%d" % i for i in range(100)] + [b"/".join([b"a"] * 128), b"b" + b"/" * 127]
    friend.send_bytes(b"".join(publish_bytes(t, b"x") for t in topics))
    heard: list[bytes] = []
    while len(heard) < len(topics):  # once each, however many filters match
        topic = attacker.message().topic
        if topic != b"bystanders/talk":
            heard.append(topic)
    assert heard == topics


@pytest.mark.attack("A13")
def test_slow_filters_over_many_retained_messages_let_others_go_on(scene: Scene) -> None:
    friend = scene.open("friend")
    count = 20_000
    friend.send_bytes(
        b"".join(publish_bytes(b"a/%d/b/%d/c" % (i % 100, i), b"x", retain=True) for i in range(count))
    )
    friend.publish("a/end", b"", 1)
    attacker = scene.open("attacker")
    hostile = ["+/+/+/+/z", "+/+/b/+/+/#", "a/+/+/+/d", "+/" * 100 + "#", "a/+/b/+/z"]
    attacker.subscribe(*hostile)
    attacker.subscribe("+/+/b/+/c")
    got = {attacker.message().topic for _ in range(2 * count)}
    assert len(got) == count


# ── shared and plain together ──


@pytest.mark.attack("A14")
def test_shared_and_plain_filters_in_one_subscribe_are_subscriptions_of_their_own(scene: Scene, version: int) -> None:
    mixed = scene.open("mixed", version)
    filters = ["attack/a", "$share/g/attack/a", "$share/h/attack/+", "$share/g/$attack/a", "attack/b"]
    answer = mixed.subscribe(*filters, qos=1)
    bad = 0x8F if version == 5 else 0x80
    assert answer.reasons == (1, 1, 1, bad, 1)
    friend = scene.open("friend", version)
    friend.publish("attack/a", b"m", 1)
    assert mixed.payloads(3) == [b"m"] * 3  # the plain one, and each group's
    mixed.nothing()

    gone = mixed.unsubscribe("attack/a", "$share/g/attack/nothing", "$share/h/attack/+", "attack/never")
    if version == 5:
        assert gone.reasons == (0, 0x11, 0, 0x11)
    friend.publish("attack/a", b"n", 1)
    assert mixed.payloads(1) == [b"n"]  # group g is left
    mixed.nothing()
    assert mixed.unsubscribe("$share/g/attack/a").reasons == ((0,) if version == 5 else ())
    friend.publish("attack/a", b"o", 1)
    friend.publish("attack/b", b"p", 1)
    assert mixed.payloads(1) == [b"p"]
    mixed.nothing()
    scene.shows("shared_subscriptions/count", 0)


@pytest.mark.attack("A14")
@pytest.mark.req("S2.14")
def test_leaving_a_group_in_the_same_packet_as_a_plain_filter_takes_nothing_from_the_others(scene: Scene) -> None:
    leaver, stayer, friend = (scene.open(name, 5) for name in ("leaver", "stayer", "friend"))
    for member in (leaver, stayer):
        member.subscribe("$share/g/attack/#", "attack/own", qos=1)
    for i in range(20):
        friend.publish("attack/x", b"%d" % i, 1)
    taken = [stayer.message(acknowledge=False).payload for _ in range(10)]
    assert leaver.unsubscribe("$share/g/attack/#", "attack/own").reasons == (0, 0)
    handed_on = [stayer.message(acknowledge=False).payload for _ in range(10)]
    assert sorted(int(p) for p in taken + handed_on) == list(range(20))
