"""Subscribing: once per filter, and in force when it is acknowledged."""

from __future__ import annotations

import pytest
from stored import KEPT

from tidegate.wire import FilterRequest, Properties, Publish, Suback, Subscribe, encode


@pytest.mark.req("S1.8")
@pytest.mark.parametrize("filter", ["{}/a", "{}/+", "$share/g/{}/a"])
def test_subscribing_again_never_delivers_twice(client, unique, filter):
    sub, pub = client(unique, 5), client(unique + "p", 5)
    for _ in range(3):
        sub.subscribe(filter.format(unique), qos=1)
    pub.publish(unique + "/a", b"once", 1)
    assert sub.message().payload == b"once"
    sub.nothing()


@pytest.mark.req("S1.8")
def test_subscribing_again_replaces_every_option(client, unique):
    sub, pub = client(unique, 5), client(unique + "p", 5)
    sub.subscribe(unique, qos=0, no_local=True, properties=Properties(subscription_ids=(1,)))
    sub.publish(unique, b"own", 1)
    sub.subscribe(unique, qos=2, retain_as_published=True, properties=Properties(subscription_ids=(2,)))
    sub.publish(unique, b"own again", 1)
    got = sub.message()
    assert (got.payload, got.qos, got.properties.subscription_ids) == (b"own again", 1, (2,))
    pub.publish(unique, b"retained", 2, True)
    got = sub.message()
    assert (got.payload, got.qos, got.retain) == (b"retained", 2, True)
    pub.publish(unique, b"", 1, True)


@pytest.mark.req("S1.8")
def test_twice_in_one_packet_is_one_subscription_with_the_later_options(client, unique):
    sub = client(unique, 5)
    name = unique.encode()
    sub.send(Subscribe(1, (FilterRequest(name, 0), FilterRequest(name, 1))))
    assert sub.expect(Suback).reasons == (0, 1)
    sub.publish(unique, b"once", 1)
    assert sub.message().qos == 1
    sub.nothing()


@pytest.mark.req("S1.8")
def test_subscribing_again_while_messages_are_waiting_loses_none_and_repeats_none(client, unique):
    pub = client(unique + "p")
    sub = client(unique, 5, clean=False, properties=Properties(session_expiry=3600, receive_maximum=2))
    sub.subscribe(unique, qos=1)
    for i in range(10):
        pub.publish(unique, b"%d" % i, 1)
    sub.subscribe(unique, qos=1)
    assert [int(p) for p in sub.payloads(10)] == list(range(10))
    sub.disconnect()
    for i in range(10, 20):
        pub.publish(unique, b"%d" % i, 1)
    sub = client(unique, 5, clean=False, properties=KEPT)
    sub.subscribe(unique, qos=1)
    assert [int(p) for p in sub.payloads(10)] == list(range(10, 20))
    sub.nothing()
    sub.disconnect(properties=Properties(session_expiry=0))


@pytest.mark.req("S1.8", "S1.19")
@pytest.mark.parametrize("version", [4, 5])
def test_overlapping_filters_of_one_client_deliver_once_with_the_highest_qos(client, unique, version):
    sub = client(unique, version)
    for qos, filter in enumerate((f"{unique}/#", f"{unique}/a", f"{unique}/+")):
        ids = Properties(subscription_ids=(qos + 1,)) if version == 5 else Properties()
        sub.subscribe(filter, qos=qos, properties=ids)
    client(unique + "p").publish(unique + "/a", b"once", 2)
    got = sub.message()
    assert got.qos == 2
    assert got.properties.subscription_ids == ((1, 2, 3) if version == 5 else ())
    sub.nothing()


@pytest.mark.req("S1.9", "S1.10", "S1.11")
@pytest.mark.parametrize("version", [4, 5])
def test_a_subscription_takes_effect_before_the_next_packet_of_the_same_client(client, unique, version):
    raw = client(unique, version)
    name = unique.encode()
    packets = [Subscribe(1, (FilterRequest(name, 0),)), Publish(name, b"right behind", 0)]
    raw.send_bytes(b"".join(encode(packet, version) for packet in packets))
    kinds = {type(packet): packet for packet in (raw.receive(), raw.receive())}
    assert kinds[Suback].reasons == (0,)
    assert kinds[Publish].payload == b"right behind"


@pytest.mark.req("S1.10")
def test_a_publish_before_the_subscription_in_the_same_bytes_is_not_delivered(client, unique):
    raw = client(unique)
    name = unique.encode()
    packets = [Publish(name, b"before", 0), Subscribe(1, (FilterRequest(name, 0),)), Publish(name, b"after", 0)]
    raw.send_bytes(b"".join(encode(packet, 4) for packet in packets))
    got = [packet for packet in (raw.receive(), raw.receive()) if isinstance(packet, Publish)]
    assert [packet.payload for packet in got] == [b"after"]
    raw.nothing()


@pytest.mark.req("S1.9", "S1.11")
def test_with_many_filters_the_one_suback_means_all_of_them(client, unique):
    sub, pub = client(unique, 5), client(unique + "p", 5)
    filters = [f"{unique}/{i}/{'#' if i % 3 else '+'}" for i in range(500)]
    assert sub.subscribe(*filters, qos=1).reasons == (1,) * 500
    reasons = {pub.publish(f"{unique}/{i}/x", b"%d" % i, 1) for i in range(500)}
    assert reasons == {0}
    assert [int(p) for p in sub.payloads(500)] == list(range(500))


@pytest.mark.req("S1.11")
@pytest.mark.parametrize(("version", "reason"), [(4, 0x80), (5, 0x8F)])
def test_a_filter_that_is_refused_is_not_in_force(client, unique, version, reason):
    sub, pub = client(unique, version), client(unique + "p", 5)
    assert sub.subscribe(f"$replay/nowhen/{unique}/a").reasons == (reason,)
    assert pub.publish(f"{unique}/a", b"", 1) == 0x10
