"""Rules of the standard that random scripts seldom meet, one example each. The reference knows what must come of it;
what matters most is written out besides."""

from __future__ import annotations

import pytest
from stage import Stage, acknowledged, payloads

from tidegate.wire import (
    Disconnect,
    FilterRequest,
    Properties,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
)

LOGS = {
    "stored late": {"late": True},
    "stored at once": {"late": False},
    "three partitions": {"late": False, "partitions": 3},
    "three partitions, announced late": {"partitions": 3, "prompt": False},
}


@pytest.fixture(params=LOGS)
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(**LOGS[request.param])


def message(text: bytes, qos: int = 1, **more: object) -> Publish:
    return Publish(b"t", text, qos, packet_id=1 if qos else 0, **more)  # type: ignore[arg-type]


def test_what_is_left_of_an_expiry_is_told(stage):
    publisher, client = stage.connect("p"), stage.connect("c", session_expiry=100)
    stage.subscribe(client, b"t", 1)
    stage.agreement.lost(client)
    stage.say(publisher, message(b"x", properties=Properties(message_expiry=10)))
    stage.agreement.advance(4.25)
    client = stage.connect("c", clean=False, session_expiry=100)
    stage.agreement.settle()
    assert [p.properties.message_expiry for p in client.transcript if isinstance(p, Publish)] == [6]


def test_what_has_expired_is_not_sent(stage):
    publisher, client = stage.connect("p"), stage.connect("c", session_expiry=100, receive_maximum=1)
    stage.subscribe(client, b"t", 1)
    # The first fills the window, the second expires behind it; so does one that is retained.
    about = Properties(message_expiry=2)
    stage.say(publisher, message(b"first"), message(b"second", properties=about, retain=True), message(b"third"))
    stage.agreement.advance(2.5)
    stage.subscribe(stage.connect("late"), b"t", 1)
    stage.acknowledge(client)
    assert payloads(client) == [b"first", b"third"]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("handling", [0, 1, 2])
def test_retained_messages_come_as_the_retain_handling_says(stage, handling, qos):
    publisher, client = stage.connect("p"), stage.connect("c")
    stage.say(publisher, message(b"kept", qos, retain=True))
    stage.published()
    stage.subscribe(client, b"t", qos, retain_handling=handling)
    stage.subscribe(client, b"t", qos, retain_handling=handling)
    stage.acknowledge(client)
    assert len(payloads(client)) == (2, 1, 0)[handling]


def test_an_empty_retained_message_takes_the_last_one_back(stage):
    publisher, client = stage.connect("p", 4), stage.connect("c", 4)
    stage.say(publisher, message(b"kept", retain=True), message(b"", retain=True))
    stage.published()
    stage.subscribe(client, b"t", 1)
    assert payloads(client) == []


@pytest.mark.parametrize(("alias", "reason"), [(65, 0x94), (0xFFFF, 0x94), (7, 0x82)])
def test_a_topic_alias_that_is_not_allowed_ends_the_connection(stage, alias, reason):
    client = stage.connect("c")
    topic = b"" if reason == 0x82 else b"t"
    stage.say(client, Publish(topic, b"x", properties=Properties(topic_alias=alias)))
    stage.agreement.settle()
    assert [p.reason for p in client.transcript if isinstance(p, Disconnect)] == [reason]


def test_overlapping_subscriptions_bring_one_copy_with_the_highest_qos_and_all_identifiers(stage):
    publisher, client = stage.connect("p"), stage.connect("c")
    stage.subscribe(client, b"t", 0, 7)
    stage.subscribe(client, b"#", 2, 300)
    stage.subscribe(client, b"+", 1)
    stage.say(publisher, message(b"x", 1), message(b"y", 0))
    stage.acknowledge(client)
    got = [p for p in client.transcript if isinstance(p, Publish)]
    assert [(p.qos, sorted(p.properties.subscription_ids)) for p in got] == [(1, [7, 300]), (0, [7, 300])]


def test_nobody_gets_their_own_message_who_does_not_want_it(stage):
    client = stage.connect("c")
    stage.subscribe(client, b"t", 1, 1, no_local=True)
    stage.say(client, message(b"own"))
    stage.agreement.settle()
    assert payloads(client) == []
    stage.subscribe(client, b"#", 0, 2)
    stage.say(client, message(b"own, but asked for"))
    stage.agreement.settle()
    assert payloads(client) == [b"own, but asked for"]


@pytest.mark.parametrize("goes", ["breaks", "disconnects", "disconnects with its will", "violates"])
@pytest.mark.parametrize("version", [4, 5])
def test_a_will_is_sent_unless_the_client_says_goodbye(stage, goes, version):
    reader = stage.connect("r")
    stage.subscribe(reader, b"t", 2)
    client = stage.connect("c", version, will=Will(b"t", b"bye", 2))
    if goes == "breaks":
        stage.agreement.lost(client)
    elif goes == "violates":
        stage.agreement.feed(client, b"\0\0")
    else:
        stage.say(client, Disconnect(4 if goes.endswith("will") and version == 5 else 0))
    stage.acknowledge(reader)
    silent = goes == "disconnects" or (version == 4 and goes.startswith("disconnects"))
    assert payloads(reader) == ([] if silent else [b"bye"])


@pytest.mark.parametrize(("qos", "gets"), [(0, []), (1, [b"bye"])])
def test_what_is_qos_0_without_the_no_local_filter_is_not_owed_to_who_was_away(stage, qos, gets):
    """A client's own will comes by `#` alone, with its QoS, if the client does not want its own by the other filter."""
    client = stage.connect("c", will=Will(b"t", b"bye", 1), session_expiry=100)
    stage.subscribe(client, b"#", qos)
    stage.subscribe(client, b"t", 2, no_local=True)
    stage.agreement.lost(client)
    stage.agreement.settle()
    again = stage.connect("c", clean=False, session_expiry=100)
    stage.acknowledge(again)
    assert payloads(again) == gets


@pytest.mark.parametrize("returns_after", [1.5, 4.5])
def test_a_delayed_will_waits_for_its_client(stage, returns_after):
    reader = stage.connect("r")
    stage.subscribe(reader, b"t", 1)
    will = Will(b"t", b"bye", 1, properties=Properties(will_delay=3))
    stage.agreement.lost(stage.connect("c", will=will, session_expiry=100))
    stage.agreement.advance(returns_after)
    stage.connect("c", clean=False, session_expiry=100)
    stage.agreement.advance(5)
    stage.acknowledge(reader)
    assert payloads(reader) == ([b"bye"] if returns_after > 3 else [])


@pytest.mark.parametrize(("away_s", "present"), [(1.5, True), (2.5, False)])
def test_a_session_ends_when_its_time_is_over(stage, away_s, present):
    client = stage.connect("c", session_expiry=100)
    stage.subscribe(client, b"t", 1)
    stage.say(client, Disconnect(0, Properties(session_expiry=2)))
    stage.agreement.advance(away_s)
    back = stage.connect("c", clean=False)
    stage.agreement.settle()
    assert back.transcript[0].session_present == present


def test_each_message_goes_to_one_member_and_what_it_leaves_to_another(stage):
    publisher, *members = [stage.connect(name, session_expiry=100) for name in "pabc"]
    for member in members:
        stage.subscribe(member, b"$share/g/t", 1)
    stage.say(publisher, *(Publish(b"t", b"%d" % n, n % 3, packet_id=(n + 1) * (n % 3 > 0)) for n in range(30)))
    stage.agreement.settle()
    got = [text for member in members for text in payloads(member)]
    assert sorted(got, key=int) == [b"%d" % n for n in range(30)]
    stage.agreement.lost(members[0])
    stage.acknowledge(*members[1:])


def test_a_replay_brings_everything_and_then_goes_on(stage):
    publisher, client = stage.connect("p"), stage.connect("c", receive_maximum=2)
    stage.say(publisher, *(message(b"%d" % n, n % 2) for n in range(12)))
    stage.agreement.settle()
    stage.subscribe(client, b"$replay/earliest/t", 1)
    stage.say(publisher, message(b"12"))
    stage.acknowledge(client)
    assert payloads(client) == [b"%d" % n for n in range(13)]
    stage.say(client, Unsubscribe(9, (b"$replay/earliest/t",)))
    stage.say(publisher, message(b"13"))
    stage.acknowledge(client)
    assert len(payloads(client)) == 13


@pytest.mark.parametrize("acknowledged_first", [0, 3, 7])
@pytest.mark.parametrize("backwards", [False, True])
def test_what_was_not_acknowledged_comes_again_with_its_id_and_in_its_order(stage, acknowledged_first, backwards):
    publisher, client = stage.connect("p"), stage.connect("c", session_expiry=100)
    stage.subscribe(client, b"t", 2)
    stage.say(publisher, *(Publish(b"t", b"%d" % n, 1 + n % 2, packet_id=n + 1) for n in range(10)))
    stage.agreement.settle()
    owed = client.to_acknowledge[::-1] if backwards else client.to_acknowledge
    stage.say(client, *owed[:acknowledged_first])
    stage.agreement.settle()
    stage.agreement.lost(client)
    again = stage.connect("c", clean=False, session_expiry=100, receive_maximum=4)
    stage.acknowledge(again)
    assert len(payloads(again)) == 10 - acknowledged_first
    assert all(p.dup for p in again.transcript if isinstance(p, Publish))


@pytest.mark.parametrize("qos", [1, 2])
def test_what_comes_again_is_put_as_each_topic_wants_it(stage, qos):
    """Messages of one flight, with different topics and flags."""
    publisher, client = stage.connect("p"), stage.connect("c", session_expiry=100)
    stage.subscribe(client, b"#", 2, identifier=1)
    stage.subscribe(client, b"a", 2, identifier=2, retain_as_published=True)
    topics = (b"b", b"a", b"a", b"c", b"a")
    stage.say(
        publisher, *(Publish(t, b"%d" % n, qos, retain=n % 2 == 0, packet_id=n + 1) for n, t in enumerate(topics))
    )
    stage.agreement.settle()
    stage.agreement.lost(client)
    again = stage.connect("c", clean=False, session_expiry=100)
    stage.acknowledge(again)
    got = sorted((p for p in again.transcript if isinstance(p, Publish)), key=lambda p: p.payload)
    assert [p.properties.subscription_ids for p in got] == [(1,), (1, 2), (1, 2), (1,), (1, 2)]
    assert [p.retain for p in got] == [False, False, True, False, True]


def test_a_qos_2_message_that_is_repeated_is_stored_once(stage):
    publisher, client = stage.connect("p", session_expiry=100), stage.connect("c")
    stage.subscribe(client, b"t", 2)
    once = Publish(b"t", b"once", 2, packet_id=5)
    stage.say(publisher, once, Publish(b"t", b"once", 2, dup=True, packet_id=5))
    stage.agreement.lost(publisher)
    publisher = stage.connect("p", clean=False)
    stage.say(publisher, Publish(b"t", b"once", 2, dup=True, packet_id=5), Pubrel(5), Pubrel(5))
    stage.agreement.settle()
    stage.say(publisher, once)
    stage.acknowledge(client)
    assert payloads(client) == [b"once", b"once"]
    assert acknowledged(publisher, Pubrec) == [(5, 0), (5, 0)]


def test_answers_are_about_what_was_asked(stage):
    client = stage.connect("c")
    stage.say(client, message(b"nobody is interested"))
    filters = (FilterRequest(b"t", 2), FilterRequest(b"$no/such"), FilterRequest(b"/" * 200), FilterRequest(b"u"))
    stage.say(client, Subscribe(3, filters), Unsubscribe(4, (b"t", b"never")), message(b"nor now"))
    stage.agreement.settle()
    assert acknowledged(client, Puback) == [(1, 0x10), (1, 0x10)]
