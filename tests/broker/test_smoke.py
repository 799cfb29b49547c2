"""The journey of a message, end to end, in each version and with each QoS."""

from __future__ import annotations

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("sub_version", [3, 4, 5])
def test_a_message_arrives(client, unique, version, qos, sub_version):
    sub = client(unique + "-s", sub_version)
    pub = client(unique + "-p", version)
    assert sub.subscribe(unique + "/#", qos=2).reasons == (2,)
    pub.publish(unique + "/a", b"hello", qos)
    got = sub.message()
    assert (got.topic.decode(), got.payload, got.qos) == (unique + "/a", b"hello", qos)


def test_sessions_survive_kill(start_broker):
    broker: BrokerProcess = start_broker("fsync")
    sub = RawClient(broker.port, 5)
    sub.connect("s", clean=False, properties=Properties(session_expiry=1000))
    sub.subscribe("a/#", qos=2)
    sub.close()
    pub = RawClient(broker.port, 4)
    pub.connect("p")
    for i in range(30):
        pub.publish("a/b", b"%d" % i, 1 + i % 2)
    broker.kill()
    broker.start()
    sub = RawClient(broker.port, 5)
    assert sub.connect("s", clean=False, properties=Properties(session_expiry=1000)).session_present
    assert sorted(int(p) for p in sub.payloads(30)) == list(range(30))


def test_catch_up_from_disk_and_memory(start_broker):
    broker = start_broker("os", log__tail_bytes=65536, log__segment_bytes=65536, log__retention_bytes=1 << 30)
    sub = RawClient(broker.port, 4)
    sub.connect("s", clean=False)
    sub.subscribe("a/#", qos=1)
    sub.close()
    pub = RawClient(broker.port, 4)
    pub.connect("p")
    for i in range(3000):
        pub.publish(f"a/{i % 7}", b"%06d" % i + b"x" * 100, 1, wait=False)
        pub.publish("b", b"y" * 100, 1, wait=False)
    for _ in range(6000):
        pub.receive()
    sub = RawClient(broker.port, 4)
    assert sub.connect("s", clean=False).session_present
    assert [int(p[:6]) for p in sub.payloads(3000)] == list(range(3000))
    pub.publish("a/x", b"live", 1)
    assert sub.message().payload == b"live"


def test_replay(start_broker):
    broker = start_broker("os", log__tail_bytes=65536, log__segment_bytes=65536, log__retention_bytes=1 << 30)
    pub = RawClient(broker.port, 4)
    pub.connect("p")
    for i in range(2000):
        pub.publish(f"a/{i % 7}", b"%06d" % i + b"x" * 100, i % 2, wait=False)
    for _ in range(1000):
        pub.receive()
    sub = RawClient(broker.port, 5)
    sub.connect("s")
    sub.subscribe("$replay/earliest/a/#", qos=1)
    got = [sub.message() for _ in range(2000)]
    assert [int(p.payload[:6]) for p in got] == list(range(2000))
    assert dict(got[0].properties.user)[b"tidegate-position"] == b"0"
    pub.publish("a/x", b"live", 1)
    assert sub.message().payload == b"live"


def test_retained(client, unique):
    pub = client(unique + "p", 5)
    pub.publish(unique + "/r", b"kept", 1, True)
    sub = client(unique + "s", 5)
    sub.subscribe(unique + "/+", qos=1)
    got = sub.message()
    assert got.retain and got.payload == b"kept"


def test_shared(client, unique):
    members = [client(f"{unique}m{i}", 5) for i in range(3)]
    for m in members:
        m.subscribe(f"$share/g/{unique}/#", qos=1)
    pub = client(unique + "p", 5)
    for i in range(30):
        pub.publish(f"{unique}/x", b"%d" % i, 1)
    got = [m.payloads(10) for m in members]
    assert sorted(int(p) for g in got for p in g) == list(range(30))
