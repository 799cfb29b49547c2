"""The power goes: what was written and not synced is lost, and names whose folder was not synced are absent (I1, I4).

A recorded broker serves clients that note what they were promised, and when. From the recording the data folder is made
as it would be found after a loss of power at many of its moments; a broker is started on each, and the clients go on
from where they were at that moment.
"""

from __future__ import annotations

import os
import random
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from recorded_disk import Disk, Event, RecordedBroker

from harness import BrokerProcess, Closed, RawClient
from tidegate.wire import Packet, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel

TORTURE = bool(os.environ.get("TORTURE"))
POINTS = 300 if TORTURE else 18  # with nothing but what was synced
MIXED = 300 if TORTURE else 10  # with a random part of what was not
SEED = int(os.environ.get("TORTURE_SEED", "1"))
PHASE_S = 1.2  # how long clients are busy in each of the two runs
SYNC_S = 0.004  # long enough for an answer that does not wait for it to be there first
HOUR = Properties(session_expiry=3600)
PADDING = b" " + b"x" * 1500
SETTINGS = {"log__segment_bytes": 65536}

pytestmark = pytest.mark.timeout(3600 if TORTURE else 240)


@dataclass(slots=True)
class Notes:
    """What clients saw, with the time: (seconds, what, number or packet id, payload)."""

    lines: list[tuple[float, str, int, str]] = field(default_factory=list)

    def note(self, what: str, number: int = 0, payload: str = "") -> None:
        self.lines.append((time.monotonic(), what, number, payload))

    def until(self, time_s: float) -> Known:
        known = Known()
        for line in sorted(self.lines):
            if line[0] >= time_s:
                break
            known.learn(*line[1:])
        return known


@dataclass(slots=True)
class Known:
    """What the clients know at a moment."""

    subscribed: set[str] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)  # QoS 1
    kept: int = 0  # the retained message, as far as it was acknowledged
    begun: dict[int, str] = field(default_factory=dict)  # QoS 2: number → how far it got
    handed_on: list[str] = field(default_factory=list)  # by the live reader
    unreleased: dict[int, str] = field(default_factory=dict)

    def learn(self, what: str, number: int, payload: str) -> None:
        match what:
            case "subscribed":
                self.subscribed.add(payload)
            case "acknowledged":
                self.acknowledged.add(number)
            case "kept":
                self.kept = number
            case "sent" | "received" | "completed":
                self.begun[number] = what
            case "message":
                if number and number in self.unreleased:
                    assert self.unreleased[number] == payload, "a packet id that is not released means another message"
                    return
                if number:
                    self.unreleased[number] = payload
                self.handed_on.append(payload)
            case "release":
                self.unreleased.pop(number, None)


def text(message: Publish) -> str:
    return message.payload.split(b" x")[0].decode()


def rejoin(broker: BrokerProcess, client_id: str) -> RawClient:
    client = RawClient(broker.port, 5)
    client.connect(client_id, clean=False, properties=HOUR, keep_alive=0)
    return client


# ── the clients while the power is on ──


class Clients:
    def __init__(self, broker: BrokerProcess, notes: Notes) -> None:
        self.broker, self.notes = broker, notes
        self.stop = threading.Event()
        self.numbers = {"one": 0, "two": 0}
        self.failures: list[BaseException] = []

    def subscribe(self) -> None:
        for client_id in ("live", "sleeper"):
            client = rejoin(self.broker, client_id)
            client.subscribe("one", "two", qos=2)
            self.notes.note("subscribed", payload=client_id)
            client.disconnect()

    def busy(self, seconds: float) -> None:
        self.stop.clear()
        parts: list[Callable[[], None]] = [self.publish_one, self.publish_two, self.read]
        threads = [threading.Thread(target=self._guarded, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join(30)
        assert not self.failures, self.failures

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            self.failures.append(error)
            self.stop.set()

    def publish_one(self) -> None:
        """QoS 1, some at a time; now and then a retained one."""
        client = rejoin(self.broker, "publisher of one")
        while not self.stop.is_set():
            for _ in range(3):
                self.numbers["one"] += 1
                number = self.numbers["one"]
                client.publish("one", b"one %d" % number + PADDING, 1, packet_id=number % 60000 + 1, wait=False)
            last = self.numbers["one"]
            for number in range(last - 2, last + 1):
                assert client.expect(Puback).packet_id == number % 60000 + 1
                self.notes.note("acknowledged", number)
            client.publish("kept", b"%d" % last, 1, True, packet_id=65000)
            self.notes.note("kept", last)
        client.close()

    def publish_two(self) -> None:
        """QoS 2, one after the other."""
        client = rejoin(self.broker, "publisher of two")
        while not self.stop.is_set():
            self.numbers["two"] += 1
            number = self.numbers["two"]
            self.notes.note("sent", number)
            client.publish("two", b"two %d" % number + PADDING, 2, packet_id=number, wait=False)
            client.expect(Pubrec)
            self.notes.note("received", number)
            client.send(Pubrel(number))
            client.expect(Pubcomp)
            self.notes.note("completed", number)
        client.close()

    def read(self) -> None:
        """Takes part in every exchange to its end."""
        client = rejoin(self.broker, "live")
        while not self.stop.is_set():
            try:
                packet = client.receive(0.2)
            except TimeoutError:
                continue
            self.notes.note(*seen(packet))
            client.send(answer(packet))
        client.close()


def seen(packet: Packet) -> tuple[str, int, str]:
    if isinstance(packet, Publish):
        return "message", packet.packet_id if packet.qos == 2 else 0, text(packet)
    assert isinstance(packet, Pubrel), packet
    return "release", packet.packet_id, ""


def answer(packet: Packet) -> Packet:
    if isinstance(packet, Publish):
        return Pubrec(packet.packet_id) if packet.qos == 2 else Puback(packet.packet_id)
    assert isinstance(packet, Pubrel)
    return Pubcomp(packet.packet_id)


# ── and when it is on again ──


def look_at(broker: BrokerProcess, known: Known) -> None:
    """All that `known` was promised is there, and nothing of QoS 2 twice."""
    publisher = RawClient(broker.port, 5)
    there = publisher.connect("publisher of two", clean=False, properties=HOUR).session_present
    assert there or not {"received", "completed"} & set(known.begun.values()), "the publisher's session is gone"
    for number, state in known.begun.items():
        if state == "sent":
            publisher.publish("two", b"two %d" % number + PADDING, 2, packet_id=number, dup=True)
        elif state == "received":
            publisher.send(Pubrel(number))
            publisher.amid(Pubcomp)
    publisher.publish("one", b"one end", 1, packet_id=65001)
    publisher.publish("two", b"two end", 2, packet_id=65002)
    for client_id in sorted(known.subscribed):
        live = client_id == "live"
        got = Counter(read_to_the_end(broker, client_id, known if live else Known()))
        for number in known.acknowledged:
            assert got[f"one {number}"] >= 1, f"{client_id}: one {number} was acknowledged and is lost"
        wrong = {number: got[f"two {number}"] for number in known.begun if got[f"two {number}"] != 1}
        assert not wrong, f"{client_id}: how often QoS 2 messages came that should come once: {wrong}"
    if known.kept:
        publisher.subscribe("kept")
        assert int(publisher.message().payload) >= known.kept, "a retained message is older than the last acknowledged"


def read_to_the_end(broker: BrokerProcess, client_id: str, known: Known) -> list[str]:
    """What a reader has handed on in the end, with what it had already."""
    client = RawClient(broker.port, 5)
    there = client.connect(client_id, clean=False, properties=HOUR).session_present
    assert there, f"the session of {client_id} is gone"
    known.handed_on = [*known.handed_on]
    while not {"one end", "two end"} <= set(known.handed_on) or known.unreleased:
        try:
            packet = client.receive(5)
        except (TimeoutError, Closed) as error:
            raise AssertionError(f"{client_id} waits in vain, unreleased: {known.unreleased}") from error
        known.learn(*seen(packet))
        client.send(answer(packet))
    client.close()
    return known.handed_on


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event], Notes]:
    """Two runs, of which the first ends cleanly and the second does not."""
    folder = tmp_path_factory.mktemp("recorded")
    broker = RecordedBroker(folder / "data", "fsync", **SETTINGS)
    broker.disk.take_at_least(SYNC_S)
    notes = Notes()
    clients = Clients(broker, notes)
    broker.start()
    clients.subscribe()
    clients.busy(PHASE_S)
    assert broker.stop() == 0
    broker.start()
    clients.busy(PHASE_S)
    broker.kill()
    events = broker.disk.events()
    assert len([event for event in events if event.operation == "sync"]) > 50
    return broker.data, events, notes


def moments(events: list[Event], count: int, chance: random.Random) -> list[int]:
    """After which events the power goes: after syncs, the rarer kinds first."""
    syncs = [at for at, event in enumerate(events) if event.operation == "sync"]
    rare = [at for at in syncs if events[at].names is not None or events[at].path.suffix != ".log"]
    first = chance.sample(rare, min(len(rare), count // 2))
    others = [at for at in syncs if at not in set(first)]
    return sorted(first + chance.sample(others, min(len(others), count - len(first))))


def next_sync_s(events: list[Event], at: int) -> float:
    """Until then nothing more is on disk than after event `at`."""
    return next((e.time_s for e in events[at + 1 :] if e.operation == "sync"), events[-1].time_s)


@pytest.mark.req("S0.7", "S0.13", "S4.1", "S4.2", "S4.7")
def test_after_a_loss_of_power_everything_that_was_acknowledged_is_there(recording, tmp_path: Path):
    data, events, notes = recording
    for at in moments(events, POINTS, random.Random(SEED)):
        disk = Disk(data)
        for event in events[: at + 1]:
            disk.apply(event)
        restarted(disk, tmp_path / f"after-{at}", notes.until(next_sync_s(events, at)), None)


@pytest.mark.req("S0.7")
@pytest.mark.attack("C4")
def test_also_if_the_kernel_had_written_some_of_the_rest(recording, tmp_path: Path):
    data, events, notes = recording
    times = [event.time_s for event in events]
    for point in range(MIXED):
        chance = random.Random(SEED * 1000 + point)
        time_s = chance.uniform(times[0], times[-1])
        at = bisect_left(times, time_s)
        disk = Disk(data)
        for event in events[:at]:
            disk.apply(event)
        restarted(disk, tmp_path / f"mixed-{point}", notes.until(time_s), chance)


@pytest.mark.req("S0.5", "S4.1")
def test_a_segment_goes_only_when_the_state_in_it_is_on_disk_elsewhere(tmp_path: Path):
    """A loss of power right after a segment was deleted, when that is all that the kernel had time for."""
    small = {**SETTINGS, "log__retention_s": 3, "log__clean_interval_s": 1, "log__tail_bytes": 65536}
    broker = RecordedBroker(tmp_path / "data", "fsync", **small)
    broker.start()
    try:
        sleeper, publisher = rejoin(broker, "sleeper"), rejoin(broker, "publisher")
        sleeper.subscribe("rare", qos=1)
        sleeper.disconnect()
        publisher.publish("kept", b"value", 1, True)
        for _ in range(100):
            publisher.publish("bulk", b"x" * 8000, 1)
        # From here on it is quiet: no new segment makes the folder durable by the way.
        broker.disk.until(lambda: _deletions(broker.disk.events()), "nothing was trimmed", 30)
        events = broker.disk.events()
    finally:
        broker.kill()
    deletions = _deletions(events)
    for at in deletions[:: max(1, len(deletions) // 4)]:
        disk = Disk(broker.data)
        for event in events[: at + 1]:
            disk.apply(event)
        disk.forget_removed()
        folder = tmp_path / f"deleted-{at}"
        disk.write(folder)
        with BrokerProcess(folder, "os", **small) as again:
            assert rejoin(again, "sleeper").connack.session_present, "the session went with the segment"
            reader = rejoin(again, "reader")
            reader.subscribe("kept")
            assert reader.message(3).payload == b"value"


def _deletions(events: list[Event]) -> list[int]:
    return [at for at, event in enumerate(events) if event.operation == "unlink" and event.path.suffix == ".log"]


def restarted(disk: Disk, folder: Path, known: Known, chance: random.Random | None) -> None:
    disk.write(folder, chance)
    broker = BrokerProcess(folder, "os", **SETTINGS)
    try:
        broker.start()
        look_at(broker, known)
    except Exception as error:
        raise AssertionError(f"{folder.name}, seed {SEED}: {error}\n{broker.log()[-1500:]}") from error
    finally:
        if broker.alive:
            broker.kill()
