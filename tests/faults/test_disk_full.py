"""A disk without room: publishers are told, readers go on, and it ends by itself (C5, S1.25).

Once on a real file system of two megabytes, where mounting one is permitted, and once with a limit on the size of
the broker's files, which the kernel reports in the same way and which works everywhere.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness import BrokerProcess, Closed, RawClient
from peers import small_disk
from tidegate.wire import FilterRequest, Properties, Puback, Pubrec, Suback, Subscribe

DAY = Properties(session_expiry=86_400)
LARGE = b"x" * 16_000
NO_ROOM = 0x97
BACKLOG = 50


class SmallDisk:
    """A file system of its own under the data folder; a second file takes the room."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.ballast = broker.data / "ballast"

    def fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def relieve(self) -> None:
        self.ballast.unlink()


class SmallFiles:
    """No file of the broker may grow beyond what the log's newest has now."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.hard = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)[1]

    def fill(self) -> None:
        newest = max((self.broker.data / "log").glob("*.log"))
        resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE, (newest.stat().st_size + 1000, self.hard))

    def relieve(self) -> None:
        resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE, (self.hard, self.hard))


Scarcity = SmallDisk | SmallFiles


@pytest.fixture(params=["small disk", "small files"])
def scarcity(request: pytest.FixtureRequest, start_broker, tmp_path: Path) -> Iterator[Scarcity]:
    """A running broker with a backlog for an absent session, and the means to take its room away."""
    if request.param == "small files":
        yield SmallFiles(prepared(start_broker("fsync")))
        return
    data = tmp_path / "data"
    with small_disk(data, "2m"):
        yield SmallDisk(prepared(start_broker("fsync")))


def prepared(broker: BrokerProcess) -> BrokerProcess:
    absent = RawClient(broker.port, 5)
    absent.connect("absent", clean=False, properties=DAY)
    absent.subscribe("a/#", qos=1)
    absent.disconnect()
    publisher = publisher_on(broker)
    publisher.publish("kept", b"before", 1, True)
    for i in range(BACKLOG):
        publisher.publish("a/b", b"%d" % i + b"." * 2000, 1)
    publisher.disconnect()
    return broker


def publisher_on(broker: BrokerProcess, version: int = 5) -> RawClient:
    client = RawClient(broker.port, version)
    client.connect("publisher")
    return client


def fill_until_refused(scarcity: Scarcity, publisher: RawClient) -> None:
    """There may be a last corner left: publish until it is gone."""
    scarcity.fill()
    for _ in range(50):
        if publisher.publish("other", LARGE, 1) == NO_ROOM:
            return
    raise AssertionError("the disk is full and nobody is refused")


@pytest.mark.req("S1.25")
@pytest.mark.attack("C5")
def test_an_mqtt_5_publisher_is_refused_with_the_reason_and_stays_connected(scarcity):
    publisher = publisher_on(scarcity.broker)
    fill_until_refused(scarcity, publisher)
    assert publisher.publish("a/b", LARGE, 1) == NO_ROOM
    assert publisher.publish("a/b", LARGE, 2) == NO_ROOM
    assert "log.refused" in scarcity.broker.log()


@pytest.mark.req("S1.25")
@pytest.mark.attack("C5")
@pytest.mark.parametrize("qos", [1, 2])
def test_an_mqtt_3_publisher_is_not_acknowledged_but_closed(scarcity, qos: int):
    fill_until_refused(scarcity, publisher_on(scarcity.broker))
    old = RawClient(scarcity.broker.port, 4)
    old.connect("old")
    old.publish("a/b", LARGE, qos, wait=False)
    answers = old.until_closed()
    assert not [packet for packet in answers if isinstance(packet, Puback | Pubrec)]


@pytest.mark.attack("C5")
def test_readers_go_on_while_the_disk_is_full(scarcity):
    fill_until_refused(scarcity, publisher_on(scarcity.broker))
    reader = RawClient(scarcity.broker.port, 5)
    assert reader.connect("absent", clean=False, properties=DAY).session_present
    got = [reader.message().payload.split(b".")[0] for _ in range(BACKLOG)]
    assert got == [b"%d" % i for i in range(BACKLOG)]


@pytest.mark.attack("C5")
def test_a_subscription_is_refused_while_nothing_can_be_stored(scarcity):
    client = RawClient(scarcity.broker.port, 5)
    client.connect("new", clean=False, properties=DAY)
    publisher = publisher_on(scarcity.broker)
    fill_until_refused(scarcity, publisher)
    assert client.subscribe("b", qos=1).reasons == (NO_ROOM,)


@pytest.mark.attack("C5")
def test_a_subscription_is_acknowledged_only_when_it_is_stored(scarcity):
    """One that the log has no room for waits for its SUBACK: it is not promised and then forgotten."""
    broker = scarcity.broker
    scarcity.fill()
    publisher = publisher_on(broker)
    while publisher.publish("other", b"x" * 900, 1) != NO_ROOM:
        pass  # now there is only room for the smallest of things
    client = RawClient(broker.port, 5)
    client.connect("new", clean=False, properties=DAY)
    long = FilterRequest(b"b/" + b"x" * 16_000, 1)
    client.send(Subscribe(1, (long,)))
    try:
        answer = client.expect(Suback, 0.5)
    except TimeoutError:
        scarcity.relieve()
        answer = client.expect(Suback)
        assert answer.reasons == (1,)
        broker.kill()
        broker.start()
        publisher_on(broker).publish(long.filter, b"kept", 1)
        client = RawClient(broker.port, 5)
        assert client.connect("new", clean=False, properties=DAY).session_present
        assert client.message().payload == b"kept"
    else:
        assert answer.reasons == (NO_ROOM,)


PATIENCE_S = 10.0


def publish_until_accepted(publisher: RawClient, payload: bytes, qos: int) -> None:
    """The broker looks once a second whether there is room again."""
    deadline_s = time.monotonic() + PATIENCE_S
    while publisher.publish("a/b", payload, qos) >= 0x80:
        assert time.monotonic() < deadline_s, "refused for ever"
        time.sleep(0.1)


@pytest.mark.attack("C5")
def test_it_recovers_by_itself_and_keeps_exactly_what_it_acknowledged(scarcity):
    broker = scarcity.broker
    publisher = publisher_on(broker)
    fill_until_refused(scarcity, publisher)
    for i in range(5):
        assert publisher.publish("a/b", b"refused %d" % i + LARGE, 1 + i % 2) == NO_ROOM
    assert publisher.publish("kept", b"refused" + LARGE, 1, True) == NO_ROOM
    scarcity.relieve()
    publish_until_accepted(publisher, b"accepted 1." + LARGE, 1)
    assert publisher.publish("a/b", b"accepted 2." + LARGE, 2) < 0x80
    assert "log.accepted" in broker.log()
    broker.kill()
    broker.start()
    reader = RawClient(broker.port, 5)
    assert reader.connect("absent", clean=False, properties=DAY).session_present
    got = [reader.message().payload.split(b".")[0] for _ in range(BACKLOG + 2)]
    assert got == [*(b"%d" % i for i in range(BACKLOG)), b"accepted 1", b"accepted 2"]
    reader.nothing()
    reader.subscribe("kept")
    assert reader.message().payload == b"before"
    command = [sys.executable, "-m", "tidegate.cli", "log", "verify", "--data", str(broker.data)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.attack("C5")
def test_an_mqtt_3_publisher_that_was_refused_succeeds_by_trying_again(scarcity):
    broker = scarcity.broker
    fill_until_refused(scarcity, publisher_on(broker))
    old = RawClient(broker.port, 4)
    old.connect("old", clean=False)
    old.publish("a/b", b"patience." + LARGE, 2, packet_id=9, wait=False)
    with pytest.raises(Closed):
        old.expect(Pubrec)
    scarcity.relieve()
    taken = False
    deadline_s = time.monotonic() + PATIENCE_S
    while not taken:
        assert time.monotonic() < deadline_s, "refused for ever"
        with suppress(Closed, ConnectionError):
            old = RawClient(broker.port, 4)
            old.connect("old", clean=False)
            old.publish("a/b", b"patience." + LARGE, 2, packet_id=9, dup=True)
            taken = True
        time.sleep(0.1)
    reader = RawClient(broker.port, 5)
    reader.connect("absent", clean=False, properties=DAY)
    got = [reader.message().payload.split(b".")[0] for _ in range(BACKLOG + 1)]
    assert got[-1] == b"patience"
    reader.nothing()


@pytest.mark.attack("C5")
def test_a_broker_starts_and_serves_on_a_full_disk(scarcity):
    if isinstance(scarcity, SmallFiles):
        pytest.skip("a limit on file sizes ends with the process: needs a small file system")
    broker = scarcity.broker
    fill_until_refused(scarcity, publisher_on(broker))
    broker.kill()
    broker.start()
    reader = RawClient(broker.port, 5)
    assert reader.connect("absent", clean=False, properties=DAY).session_present
    got = [reader.message().payload.split(b".")[0] for _ in range(BACKLOG)]
    assert got == [b"%d" % i for i in range(BACKLOG)]
    publisher = publisher_on(broker)
    assert publisher.publish("a/b", LARGE, 1) == NO_ROOM
    scarcity.relieve()
    publish_until_accepted(publisher, b"room.", 1)
    assert reader.message().payload == b"room."
