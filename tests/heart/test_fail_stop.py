"""An error that nobody foresaw ends the process before another promise is kept; one that passes costs nothing."""

from __future__ import annotations

import subprocess

import pytest
from heart_kit import FaultyBroker, attach, attach_kept, eventually, publish_all, sync, sys_until

from harness import Closed, RawClient
from packet_bytes import publish_bytes
from tidegate.wire import Properties, Puback, Pubrec

SMALL = {"log__tail_bytes": 65536, "log__segment_bytes": 1 << 20, "sys__interval_s": 1}
TRIMMED = {"log__segment_bytes": 1 << 20, "log__clean_interval_s": 1, "log__retention_bytes": 1 << 20}


def ended(broker: FaultyBroker) -> int:
    """The exit code of a broker that ends by itself."""
    assert broker.process is not None
    try:
        return broker.process.wait(10)
    except subprocess.TimeoutExpired:
        raise AssertionError("the broker goes on") from None


def answers(client: RawClient) -> set[int]:
    """The packet ids of everything that is still acknowledged up to the end of the connection."""
    try:
        return {p.packet_id for p in client.until_closed(5) if isinstance(p, Puback | Pubrec)}
    except TimeoutError:
        raise AssertionError("the connection goes on") from None


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("qos", [1, 2])
def test_an_unforeseen_error_in_a_tick_ends_the_broker_with_a_report(start_faulty, durability, qos):
    """A bug in the middle of a tick leaves half of it done. Nothing that comes after could be promised: the process
    ends with an exit code that is not 0 and a traceback, and acknowledges nothing more. What it had acknowledged is
    there when it is started again."""
    broker: FaultyBroker = start_faulty(durability)
    session = attach_kept(broker, "session")
    session.subscribe("a", qos=2)
    session.disconnect()
    publisher = attach(broker, "publisher")
    for i in range(100):
        publisher.publish("a", b"%d" % i, qos)
    broker.fault("crash-write")
    try:
        for i in range(100, 200):
            publisher.send_bytes(publish_bytes(b"a", b"%d" % i, qos, 1000 + i))
    except ConnectionError:
        pass
    acknowledged = {pid - 1000 for pid in answers(publisher)}
    assert not broker.pending("crash-write"), "the injected error was never met"
    assert ended(broker) != 0
    assert "Traceback" in broker.log() and "an injected bug" in broker.log()
    broker.start()
    session = attach_kept(broker, "session")
    assert session.connack is not None and session.connack.session_present
    wanted = {b"%d" % i for i in {*range(100), *acknowledged}}
    got: set[bytes] = set()
    while not wanted <= got:
        got.add(session.message().payload)


def test_nobody_is_acknowledged_after_an_unforeseen_error(start_faulty):
    """Other clients' promises are not kept either: what was written after the error may stand on sand."""
    broker: FaultyBroker = start_faulty("fsync")
    clients = [attach(broker, f"client-{i}", 4 + i % 2) for i in range(10)]
    broker.fault("crash-write")
    try:
        for client in clients:
            client.send_bytes(publish_bytes(b"a", b"x", 1, 1, version=client.version))
        eventually(lambda: not broker.pending("crash-write"))
        for client in clients:
            client.send_bytes(publish_bytes(b"a", b"x", 1, 2, version=client.version))
    except ConnectionError:
        pass
    late = [client for client in clients if 2 in answers(client)]
    assert not late, f"{len(late)} clients were acknowledged after the error"
    assert ended(broker) != 0


@pytest.mark.parametrize("packet", [b"\x00\x00", b"\xf0\x00", b"\x30\x00", b"\x82\x00", b"\x36\x03\x00\x00\x00"])
def test_bad_input_is_foreseen_and_ends_nobody_but_its_sender(shared_broker, packet):
    """Fail-stop is for the broker's own mistakes: no packet can cause it."""
    client = attach(shared_broker, "", 5)
    client.send_bytes(packet)
    client.until_closed()
    assert shared_broker.alive
    assert attach(shared_broker).publish("a", b"x", 1) == 0


CRASHES = {
    "the sync thread": ("fsync", "crash-sync", "tidegate-sync", {}),
    "a job of the disk's thread": ("os", "crash-sync", "tidegate-disk", {}),
    "the indexer": ("os", "crash-sync", "tidegate-index", {}),
    "keeping promises": ("fsync", "crash-call", "stored", {}),
    "a timer": ("fsync", "crash-call", "timer", {}),
    "a job of the gate": ("fsync", "crash-call", "gate", {"log__clean_interval_s": 1}),
    "a packet": ("fsync", "crash-call", "packet", {}),
}


@pytest.mark.parametrize("where", CRASHES)
def test_an_unforeseen_error_anywhere_ends_the_broker_with_a_report(start_faulty, where):
    """On whichever thread it happens: nobody is left waiting for a thread that is no more, and nothing that was
    acknowledged is lost."""
    durability, fault, content, settings = CRASHES[where]
    broker: FaultyBroker = start_faulty(durability, log__segment_bytes=1 << 20, **settings)
    session = attach_kept(broker, "session", properties=Properties(session_expiry=86_400, receive_maximum=65535))
    session.subscribe("a", qos=1)
    session.disconnect()
    publisher = attach(broker, "publisher")
    acknowledged: list[int] = []
    with publisher:
        for i in range(10):
            publisher.publish("a", b"%d" % i, 1)
            acknowledged.append(i)
        broker.fault(fault, content)
        late = 0  # acknowledged although the error had happened by then
        try:
            for i in range(10, 10_000):
                happened = not broker.pending(fault)
                publisher.publish("a", b"%d" % i, 1)
                acknowledged.append(i)
                late += happened
                publisher.publish("other", bytes(20_000), 1)  # segments fill
                sync(publisher)
        except (Closed, ConnectionError, TimeoutError):
            pass
    assert not broker.pending(fault), "the injected error was never met"
    assert ended(broker) == 1
    assert "broker.crashed" in broker.log() and "an injected bug" in broker.log() and "Traceback" in broker.log()
    assert late <= 1, f"{late} messages were acknowledged after the error"
    broker.start()
    session = attach_kept(broker, "session", properties=Properties(session_expiry=86_400, receive_maximum=65535))
    wanted = {b"%d" % i for i in acknowledged}
    while wanted:
        wanted.discard(session.message().payload)


def test_a_failing_fdatasync_ends_the_broker_and_acknowledges_nothing(start_faulty):
    """The kernel forgets what it could not write: nothing after that could be promised. What was acknowledged before
    is served by the next start."""
    broker: FaultyBroker = start_faulty("fsync")
    session = attach_kept(broker, "session")
    session.subscribe("a", qos=1)
    session.disconnect()
    publisher = attach(broker, "publisher")
    for i in range(100):
        publisher.publish("a", b"%d" % i, 1)
    broker.fault("fail-sync", "EIO")
    try:
        for i in range(100, 200):
            publisher.send_bytes(publish_bytes(b"a", b"%d" % i, 1, 1000 + i))
    except ConnectionError:
        pass
    assert not answers(publisher)
    assert ended(broker) == 1
    assert "log.failed" in broker.log()
    broker.mend("fail-sync")
    broker.start()
    session = attach_kept(broker, "session")
    wanted = {b"%d" % i for i in range(100)}
    while wanted:
        wanted.discard(session.message().payload)


def test_a_failing_sync_of_sealed_segments_ends_the_broker(start_faulty):
    """With durability "os" too: the log takes nothing more until it is opened anew, so it is."""
    broker: FaultyBroker = start_faulty("os", log__segment_bytes=1 << 20)
    broker.fault("fail-sync", "EIO")
    with attach(broker, "publisher") as publisher:
        publish_all(publisher, [(b"a", bytes(1000))] * 3000)
    assert ended(broker) == 1
    assert "log.failed" in broker.log()


def test_a_bug_in_deleting_segments_ends_the_broker(start_faulty):
    broker: FaultyBroker = start_faulty("os", **TRIMMED)
    broker.fault("crash-unlink")
    with attach(broker, "publisher") as publisher:
        publish_all(publisher, [(b"a", bytes(1000))] * 5000)
    assert ended(broker) == 1
    assert not broker.pending("crash-unlink"), "the injected error was never met"
    assert "broker.crashed" in broker.log() and "an injected bug" in broker.log()
    broker.start()
    assert attach(broker).publish("a", b"x", 1) == 0


def test_segments_that_cannot_be_deleted_for_the_moment_are_deleted_later(start_faulty):
    """Somebody hears of it, and it is tried again; nothing else stops."""
    broker: FaultyBroker = start_faulty("os", **TRIMMED)
    broker.fault("fail-unlink", "EACCES 2")
    publisher = attach(broker, "publisher")
    publish_all(publisher, [(b"a", bytes(1000))] * 5000)
    eventually(lambda: len(list((broker.data / "log").glob("*.log"))) <= 2, what="segments were never deleted")
    assert not broker.pending("fail-unlink"), "the injected error was never met"
    assert "log.untrimmed" in broker.log()
    assert publisher.publish("a", b"x", 1) == 0


# ── reads ──


def backlog(broker: FaultyBroker, filter: str, qos: int = 1, count: int = 3000) -> list[bytes]:
    """A session that is away, and messages for it that are on disk only."""
    session = attach_kept(broker, "session", properties=Properties(session_expiry=86_400, receive_maximum=100))
    session.subscribe(filter, qos=qos)
    session.disconnect()
    payloads = [b"%06d" % i + bytes(994) for i in range(count)]
    with attach(broker, "publisher") as publisher:
        publish_all(publisher, [(b"a/%d" % (i % 7), payload) for i, payload in enumerate(payloads)], 1, together=100)
    return payloads


def nothing_lost(broker: FaultyBroker) -> None:
    values = sys_until(broker, lambda values: "uptime" in values and "messages/stored" in values)
    assert not [name for name in values if name.startswith("dropped/")], values


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("error", ["EIO", "EMFILE"])
@pytest.mark.parametrize("filter", ["a/#", "$share/group/a/#"], ids=["own", "shared"])
def test_a_read_that_fails_for_a_while_is_tried_again(start_faulty, filter, error, times):
    """An error of the disk or of the machine that passes costs time, never messages: the reader does not stay where it
    is for ever, and nothing is counted as lost."""
    broker: FaultyBroker = start_faulty("os", **SMALL)
    payloads = backlog(broker, filter)
    broker.fault("fail-read", f"{error} {times}")
    session = attach_kept(broker, "session")
    got: list[bytes] = []
    try:
        while len(got) < len(payloads):
            got.append(session.message(10).payload)
    except (TimeoutError, Closed):
        pass
    missing = len(set(payloads) - set(got))
    assert not broker.pending("fail-read"), "the injected error was never met"
    assert not missing, f"{missing} of {len(payloads)} messages never came"
    assert got == payloads
    nothing_lost(broker)


@pytest.mark.parametrize("error", ["EIO", "EMFILE"])
def test_a_replay_whose_read_fails_for_a_while_goes_on(start_faulty, error):
    """The same for `$replay`."""
    broker: FaultyBroker = start_faulty("os", **SMALL)
    payloads = backlog(broker, "other")
    broker.fault("fail-read", f"{error} 2")
    reader = attach(broker, "reader", 5)
    reader.subscribe("$replay/earliest/a/#", qos=1)
    got: list[bytes] = []
    try:
        while len(got) < len(payloads):
            got.append(reader.message(10).payload)
    except (TimeoutError, Closed):
        pass
    assert not broker.pending("fail-read"), "the injected error was never met"
    missing = len(set(payloads) - set(got))
    assert not missing, f"{missing} of {len(payloads)} messages never came"
    assert got == payloads
    nothing_lost(broker)


@pytest.mark.parametrize("error", ["EMFILE", "ENOMEM", "EACCES", "EIO"])
def test_a_read_that_fails_for_seconds_costs_time_and_no_messages(start_faulty, error):
    """However long the machine is short of something, the files are as they were: the reader goes on when it has
    passed. Until then an event says what cannot be read, once and not with every try."""
    broker: FaultyBroker = start_faulty("os", **SMALL)
    payloads = backlog(broker, "a/#")
    broker.fault("fail-read", f"{error} 1000000")
    session = attach_kept(broker, "session")
    with pytest.raises(TimeoutError):
        session.message(5)
    broker.mend("fail-read")
    got: list[bytes] = []
    try:
        while len(got) < len(payloads):
            got.append(session.message(10).payload)
    except (TimeoutError, Closed):
        pass
    missing = len(set(payloads) - set(got))
    assert not missing, f"{missing} of {len(payloads)} messages never came"
    assert got == payloads
    nothing_lost(broker)
    assert broker.log().count("log.unreadable") == 1 and "0001.log" in broker.log(), broker.log()
    assert broker.log().count("log.readable") == 1


def test_a_time_that_cannot_be_looked_up_for_the_moment_is_looked_up_later(start_faulty):
    """Nor does it end anything when the log's index cannot be opened for a `$replay` from a time."""
    broker: FaultyBroker = start_faulty("os", **SMALL)
    payloads = backlog(broker, "other")
    broker.stop()
    for index in (broker.data / "log").glob("*.index"):
        index.write_bytes(b"")  # it is made anew from its segment, when somebody asks
    broker.start()
    for index in (broker.data / "log").glob("*.index"):
        index.unlink()
    broker.fault("fail-read", "EMFILE 1000000")
    reader = attach(broker, "reader", 5)
    reader.subscribe("$replay/2020-01-01T00:00:00Z/a/#", qos=1)
    with pytest.raises(TimeoutError):
        reader.message(2)
    broker.mend("fail-read")
    assert [reader.message().payload for _ in payloads] == payloads
    nothing_lost(broker)


def test_a_bug_in_a_read_ends_the_broker_and_skips_nothing(start_faulty):
    """What the broker cannot read for a mistake of its own is not damaged."""
    broker: FaultyBroker = start_faulty("os", **SMALL)
    payloads = backlog(broker, "a/#")
    broker.fault("crash-read")
    attach_kept(broker, "session")
    assert ended(broker) == 1
    assert not broker.pending("crash-read"), "the injected error was never met"
    assert "broker.crashed" in broker.log() and "TypeError: an injected bug" in broker.log()
    broker.start()
    session = attach_kept(broker, "session")
    assert [session.message().payload for _ in payloads] == payloads
    nothing_lost(broker)
