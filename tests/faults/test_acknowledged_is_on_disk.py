"""An acknowledgement leaves the broker only after the sync that covers what it acknowledges has returned (I1).

The disk's syncs are held up while the rest of the broker goes on: nothing that is a promise may come out, a PINGRESP
does. The broker is told nothing about durability, so this is also what it does by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_disk import Event, RecordedBroker

from harness import RawClient
from tidegate.wire import (
    FilterRequest,
    Packet,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)

HOUR = Properties(session_expiry=3600)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Callable[..., RecordedBroker]]:
    started: list[RecordedBroker] = []

    def start(durability: str = "", **settings: Any) -> RecordedBroker:
        broker = RecordedBroker(tmp_path / "data", durability, **settings)
        started.append(broker)
        broker.start()
        return broker

    yield start
    for broker in started:
        if broker.alive:
            broker.stop()


def join(broker: RecordedBroker, client_id: str) -> RawClient:
    client = RawClient(broker.port, 5)
    client.connect(client_id, clean=False, properties=HOUR)
    return client


def comes_after_the_sync(broker: RecordedBroker, client: RawClient, cause: Callable[[], object], answer: type) -> Any:
    """What `cause` leads to comes to `client` when the disk has it, and not before."""
    with broker.disk.blocked() as a_sync_waits:
        cause()
        a_sync_waits()
        client.nothing(0.2)
    return client.expect(answer)


# ── to a publisher ──


@pytest.mark.req("S0.7", "S1.24")
def test_puback_waits_for_the_disk(recorded):
    broker = recorded()
    publisher = join(broker, "publisher")
    publisher.publish("a", b"before", 1)
    comes_after_the_sync(broker, publisher, lambda: publisher.publish("a", b"m", 1, wait=False), Puback)


@pytest.mark.req("S0.7", "S1.24")
def test_pubrec_waits_for_the_disk(recorded):
    broker = recorded()
    publisher = join(broker, "publisher")
    publisher.publish("a", b"before", 1)
    comes_after_the_sync(broker, publisher, lambda: publisher.publish("a", b"m", 2, wait=False), Pubrec)


def test_pubrec_for_a_message_that_is_sent_again_waits_as_the_first_did(recorded):
    broker = recorded()
    publisher = join(broker, "publisher")

    def twice() -> None:
        publisher.publish("a", b"m", 2, packet_id=7, wait=False)
        publisher.publish("a", b"m", 2, packet_id=7, dup=True, wait=False)

    comes_after_the_sync(broker, publisher, twice, Pubrec)
    publisher.expect(Pubrec)


def test_pubcomp_waits_for_the_disk(recorded):
    """Else the publisher would use the packet id again, and after a loss of power its message would be taken for
    the old one."""
    broker = recorded()
    publisher = join(broker, "publisher")
    publisher.publish("a", b"m", 2, packet_id=7, wait=False)
    publisher.expect(Pubrec)
    comes_after_the_sync(broker, publisher, lambda: publisher.send(Pubrel(7)), Pubcomp)


@pytest.mark.req("S0.7")
def test_a_sync_answers_only_for_what_was_written_before_it_began(recorded):
    broker = recorded()
    first, second = join(broker, "first"), join(broker, "second")
    first.publish("a", b"before", 1)
    with broker.disk.blocked() as a_sync_waits:
        first.publish("a", b"written before the sync", 1, wait=False)
        a_sync_waits()
        second.publish("a", b"written during the sync", 1, wait=False)
        second.nothing(0.1)
        broker.disk.let_pass(broker.disk.waiting()[0])
        first.expect(Puback)
        second.nothing(0.2)
    second.expect(Puback)


# ── to a subscriber ──


@pytest.mark.req("S1.11", "S4.1")
@pytest.mark.parametrize("filter", ["b/#", "$share/g/b", "$replay/earliest/b"])
def test_suback_of_a_session_that_is_kept_waits_for_the_disk(recorded, filter: str):
    broker = recorded()
    reader = join(broker, "reader")
    reader.subscribe("a", qos=1)
    request: Packet = Subscribe(9, (FilterRequest(filter.encode(), 1),), Properties())
    comes_after_the_sync(broker, reader, lambda: reader.send(request), Suback)


@pytest.mark.req("S0.24")
def test_unsuback_of_a_session_that_is_kept_waits_for_the_disk(recorded):
    broker = recorded()
    reader = join(broker, "reader")
    reader.subscribe("a", qos=1)
    comes_after_the_sync(broker, reader, lambda: reader.send(Unsubscribe(9, (b"a",), Properties())), Unsuback)


def test_pubrel_waits_for_the_disk(recorded):
    """Else, after a loss of power, the broker would send the message again to a client that has forgotten its id."""
    broker = recorded()
    reader = join(broker, "reader")
    reader.subscribe("a", qos=2)
    join(broker, "publisher").publish("a", b"m", 2)
    message = reader.expect(Publish)
    comes_after_the_sync(broker, reader, lambda: reader.send(Pubrec(message.packet_id)), Pubrel)


@pytest.mark.parametrize("filter", ["a", "+", "$share/g/a", "$replay/earliest/a"])
def test_a_qos_2_message_goes_to_its_subscriber_only_when_it_is_on_disk(recorded, filter: str):
    """Else it could be handed on, lost with the power, published again by its publisher, and handed on once more."""
    broker = recorded()
    reader, publisher = join(broker, "reader"), join(broker, "publisher")
    reader.subscribe(filter, qos=2)
    publisher.publish("a", b"before", 1)
    reader.message()
    got = comes_after_the_sync(broker, reader, lambda: publisher.publish("a", b"m", 2, wait=False), Publish)
    assert (got.payload, got.qos) == (b"m", 2)


@pytest.mark.parametrize("filter", ["a", "$share/g/a"])
def test_a_session_that_returns_gets_a_qos_2_message_only_when_it_is_on_disk(recorded, filter: str):
    broker = recorded()
    reader, publisher = join(broker, "reader"), join(broker, "publisher")
    reader.subscribe(filter, qos=2)
    publisher.publish("a", b"before", 1)
    reader.message()
    reader.disconnect()
    publisher.publish("other", b"", 1)
    with broker.disk.blocked() as a_sync_waits:
        publisher.publish("a", b"m", 2, wait=False)
        a_sync_waits()
        publisher.nothing(0.1)
        back = RawClient(broker.port, 5)
        back.connect("reader", clean=False, properties=HOUR)
        back.nothing(0.2)
    assert back.message().payload == b"m"


def test_messages_of_qos_0_and_1_do_not_wait_for_the_disk(recorded):
    """They may come twice, or not be acknowledged to their publisher: nothing is promised by handing them on."""
    broker = recorded()
    reader, publisher = join(broker, "reader"), join(broker, "publisher")
    reader.subscribe("a", qos=1)
    with broker.disk.blocked() as a_sync_waits:
        publisher.publish("a", b"0", 0)
        publisher.publish("a", b"1", 1, wait=False)
        assert [reader.expect(Publish).payload for _ in range(2)] == [b"0", b"1"]
        a_sync_waits()
        publisher.nothing(0.1)
    publisher.expect(Puback)


# ── what is synced ──


def covered(events: list[Event], content: bytes, before_s: float) -> bool:
    """Whether a file with this content was on disk by then, and with it its name."""
    syncs = [event for event in events if event.operation == "sync" and event.time_s <= before_s]
    inodes = {event.inode for event in syncs if event.content is not None and content in event.content}
    named = {inode for event in syncs for inode, _ in (event.names or {}).values()}
    return bool(inodes & named)


@pytest.mark.req("S0.7")
def test_what_is_acknowledged_is_on_disk_with_the_name_of_its_file(recorded):
    """In many segments: a new file's name is in its folder for good before anything in it is acknowledged."""
    broker = recorded(log__segment_bytes=65536)
    publisher = join(broker, "publisher")
    acknowledged: list[tuple[bytes, float]] = []
    for i in range(60):
        content = b"message number %03d " % i
        publisher.publish("a", content + b"x" * 8000, 1)
        acknowledged.append((content, time.monotonic()))
    events = broker.disk.events()
    files = {event.path for event in events if event.operation == "sync" and event.path.suffix == ".log"}
    assert len(files) > 3
    assert [content for content, at_s in acknowledged if not covered(events, content, at_s)] == []


@pytest.mark.req("S0.7")
def test_what_is_acknowledged_is_on_disk_also_in_a_segment_that_was_sealed_meanwhile(recorded):
    """A message is written to one segment while a sync is under way, the next message to a new one: both are owed a
    sync. Whatever else began on the old segment meanwhile (its index wants it durable) is held up."""
    broker = recorded(log__segment_bytes=65536)
    clients = [join(broker, name) for name in ("first", "fills", "next")]
    clients[0].publish("a", b"before", 1)
    with broker.disk.blocked() as a_sync_waits:
        clients[0].publish("a", b"first", 1, wait=False)
        a_sync_waits()
        under_way = broker.disk.waiting()[0]
        clients[1].publish("a", b"this fills a segment " + b"x" * 70_000, 1, wait=False)
        clients[1].nothing(0.1)
        clients[2].publish("a", b"this begins another", 1, wait=False)
        clients[2].nothing(0.1)
        held_up = [sync for sync in broker.disk.waiting() if sync.path == under_way.path][1:]
        acknowledged_s = _acknowledged_with(broker, clients[1], {sync.number for sync in held_up})
    if not acknowledged_s:
        clients[1].expect(Puback)  # it waits for that very sync, which is as well
        acknowledged_s = time.monotonic()
    assert covered(broker.disk.events(), b"this fills a segment", acknowledged_s)


def _acknowledged_with(broker: RecordedBroker, client: RawClient, held_up: set[int]) -> float:
    """When the client's PUBACK came while all syncs but some go on; 0 if it did not."""
    for _ in range(40):
        for sync in broker.disk.waiting():
            if sync.number not in held_up:
                broker.disk.let_pass(sync)
        try:
            client.expect(Puback, 0.05)
        except TimeoutError:
            continue
        return time.monotonic()
    return 0.0


def test_the_index_of_a_segment_appears_only_when_the_segment_is_on_disk(recorded):
    """The next start takes an index that fits as proof that all of its segment is there."""
    broker = recorded("os", log__segment_bytes=65536)  # where nothing else waits for the disk
    broker.disk.take_at_least(0.02)
    publisher = join(broker, "publisher")
    for _ in range(50):
        publisher.publish("a", b"x" * 8000, 1)
    log = broker.data / "log"
    broker.disk.until(lambda: len(list(log.glob("*.index"))) > 3, "no index was written")
    events = broker.disk.events()
    indices = [event for event in events if event.target is not None and event.target.suffix == ".index"]
    assert len(indices) > 3
    for index in indices:
        assert index.target is not None
        segment = index.target.with_suffix(".log")
        synced = [e for e in events if e.operation == "sync" and e.path == segment and e.time_s <= index.time_s]
        assert [len(e.content or b"") for e in synced][-1:] == [segment.stat().st_size], segment.name


@pytest.mark.req("S0.7")
def test_a_new_data_folder_has_its_name_on_disk_before_anything_is_acknowledged(recorded, tmp_path: Path):
    broker = recorded()
    join(broker, "publisher").publish("a", b"m", 1)
    at_s = time.monotonic()
    synced = [event for event in broker.disk.events("sync") if event.names is not None and event.time_s <= at_s]
    for folder in (broker.data, broker.data / "log"):
        assert any(e.path == folder.parent and folder.name in (e.names or {}) for e in synced), (
            f"the name of {folder.name} is not on disk"
        )


# ── what the user may choose instead ──


def test_with_durability_os_nobody_waits_for_the_disk(recorded):
    broker = recorded("os")
    reader, publisher = join(broker, "reader"), join(broker, "publisher")
    with broker.disk.blocked():
        reader.subscribe("a", qos=2)
        publisher.publish("a", b"1", 1)
        publisher.publish("a", b"2", 2)
        assert sorted(reader.payloads(2)) == [b"1", b"2"]


def test_when_asked_to_wait_for_the_disk_it_does_as_when_not_asked(recorded):
    broker = recorded("fsync")
    publisher = join(broker, "publisher")
    publisher.publish("a", b"before", 1)
    comes_after_the_sync(broker, publisher, lambda: publisher.publish("a", b"m", 1, wait=False), Puback)
