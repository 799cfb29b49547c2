"""A broker takes over the data folder of every earlier version: `tests/fixtures/make_data.py` made them, and the JSON
beside each says what its clients are owed."""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import BrokerProcess, RawClient
from tidegate.wire import Properties, Pubcomp, Publish, Pubrec, Pubrel

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = sorted(FIXTURES.glob("data-*/*.tar.gz"))
FOREVER = Properties(session_expiry=0xFFFFFFFF)
NO_SUBSCRIBERS = 0x10


class Taken:
    """A broker on a copy of such a folder."""

    def __init__(self, archive: Path, data: Path) -> None:
        with tarfile.open(archive) as content:
            content.extractall(data, filter="data")
        self.owed: dict[str, Any] = json.loads(archive.with_name(archive.name.replace(".tar.gz", ".json")).read_text())
        self.broker = BrokerProcess(data, "os", **self.owed["settings"])
        self.broker.start()

    def back(self, client_id: str, present: bool = True) -> RawClient:
        client = RawClient(self.broker.port, 5)
        connack = client.connect(client_id, clean=False, properties=FOREVER, keep_alive=0)
        assert connack.session_present == present
        return client

    def new(self, client_id: str = "new") -> RawClient:
        client = RawClient(self.broker.port, 5)
        client.connect(client_id, clean=True, keep_alive=0)
        return client


@pytest.fixture(params=FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name.removesuffix('.tar.gz')}")
def taken(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Taken]:
    found = Taken(request.param, tmp_path / "data")
    yield found
    if found.broker.alive:
        found.broker.stop()


def by_topic(messages: list[tuple[str, str, int]]) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for topic, payload, qos in messages:
        found[topic].append((payload, qos))
    return found


def drained(client: RawClient, count: int) -> list[Publish]:
    """So many messages, and no more."""
    got = [client.message() for _ in range(count)]
    client.nothing(0.1)
    return got


def plain(message: Publish) -> tuple[str, str, int]:
    return message.topic.decode(), message.payload.decode(), message.qos


def test_there_are_folders_of_earlier_versions():
    assert [path.parent.name for path in FOLDERS].count("data-0.1") == 2


@pytest.mark.req("S4.1", "S4.2", "S2.15")
def test_each_session_gets_what_it_had_not_acknowledged(taken: Taken):
    for client_id, messages in taken.owed["sessions"].items():
        if client_id == "wild":
            continue  # also a member of the group
        got = drained(taken.back(client_id), len(messages))
        assert by_topic([plain(m) for m in got]) == by_topic([tuple(m) for m in messages]), client_id
        for message in got:
            ids = taken.owed["subscription_ids"].get(message.topic.decode(), []) if client_id == "plain" else []
            assert list(message.properties.subscription_ids) == ids


@pytest.mark.req("S4.1", "S4.2")
def test_a_group_gets_what_its_members_had_not_acknowledged_once(taken: Taken):
    first, second = (taken.back(name) for name in taken.owed["group"]["members"])
    messages = [tuple(message) for message in taken.owed["group"]["messages"]]
    own = [tuple(message) for message in taken.owed["sessions"]["wild"]]
    got: list[tuple[str, str, int]] = []
    clients = [first, second]
    while len(got) < len(messages) + len(own):
        for client in clients:
            try:
                got.append(plain(client.message(0.1)))
            except TimeoutError:
                continue
    for client in clients:
        client.nothing(0.1)
    assert sorted(got) == sorted([*messages, *own])


@pytest.mark.req("S4.1")
def test_subscriptions_go_on(taken: Taken):
    readers = {name: taken.back(name) for name in ("plain", "replayer", "outgoing")}
    publisher = taken.new()
    for topic in ("plain/a", "plain/b", "plain/given up", "out"):
        reason = publisher.publish(topic, "new " + topic, 1)
        assert (reason == NO_SUBSCRIBERS) == (topic == "plain/given up"), topic
    wanted = {"plain": {"plain/a", "plain/b"}, "replayer": {"plain/a"}, "outgoing": {"out"}}
    for name, reader in readers.items():
        found: set[str] = set()
        while found != wanted[name]:
            packet = reader.receive()
            if isinstance(packet, Publish):
                if packet.payload.startswith(b"new"):
                    assert packet.topic.decode() in wanted[name]
                    found.add(packet.topic.decode())
                answer: Any = Pubrec(packet.packet_id)
                if packet.qos == 1:
                    reader.send_bytes(b"\x40\x02" + packet.packet_id.to_bytes(2, "big"))
                    continue
                reader.send(answer)
            elif isinstance(packet, Pubrel):
                reader.send(Pubcomp(packet.packet_id))


@pytest.mark.attack("C2")
def test_qos_2_messages_towards_a_client_go_on_where_they_were(taken: Taken):
    owed = taken.owed["outgoing"]
    client = taken.back("outgoing")
    sent: dict[int, str] = {}
    released: list[int] = []
    waiting: list[str] = []
    while len(waiting) < len(owed["waiting"]) or len(released) < len(owed["released"] + owed["waiting"]) + len(sent):
        packet = client.receive()
        if isinstance(packet, Publish):
            if packet.dup:
                sent[packet.packet_id] = packet.payload.decode()
            else:
                waiting.append(packet.payload.decode())
            client.send(Pubrec(packet.packet_id))
        else:
            assert isinstance(packet, Pubrel), packet
            released.append(packet.packet_id)
            client.send(Pubcomp(packet.packet_id))
    client.nothing(0.1)
    assert sent == {int(pid): payload for pid, payload in owed["sent"].items()}
    assert waiting == owed["waiting"]
    assert set(owed["released"]) <= set(released)


@pytest.mark.attack("C2")
def test_qos_2_messages_of_a_client_are_not_taken_twice_and_their_ids_become_free(taken: Taken):
    owed = taken.owed["incoming"]
    client, reader = taken.back("incoming"), taken.new("reader")
    topics = sorted({*owed["unreleased"].values(), *owed["complete"].values()})
    reader.subscribe(*topics, qos=2)
    for pid, topic in owed["unreleased"].items():
        client.publish(topic, b"again", 2, packet_id=int(pid), dup=True)  # to its end
    reader.nothing(0.1)
    for pid, topic in (owed["unreleased"] | owed["complete"]).items():
        client.publish(topic, b"another", 2, packet_id=int(pid))
        assert reader.message().payload == b"another"


@pytest.mark.req("S0.4")
def test_retained_messages_are_there_with_all_that_was_said_of_them(taken: Taken):
    client = taken.new()
    client.subscribe("kept/#", qos=2)
    got = {message.topic.decode(): message for message in drained(client, len(taken.owed["retained"]))}
    assert set(got) == set(taken.owed["retained"])
    for topic, about in taken.owed["retained"].items():
        message = got[topic]
        assert message.retain
        assert (message.payload.decode(), message.qos) == (about["payload"], about["qos"])
        properties = message.properties
        assert properties.content_type == (about["content_type"].encode() if "content_type" in about else None)
        assert properties.response_topic == (about["response_topic"].encode() if "response_topic" in about else None)
        assert list(properties.correlation_data or b"") == about.get("correlation_data", [])
        assert [[k.decode(), v.decode()] for k, v in properties.user] == about.get("user", [])
        assert properties.payload_format == about.get("payload_format")
        assert bool(properties.message_expiry) == about.get("expires", False)


@pytest.mark.req("S0.20")
def test_wills_that_wait_are_sent_when_their_sessions_end(taken: Taken):
    watcher = taken.new("another watcher")
    watcher.subscribe("wills/#", qos=2)
    for client_id, about in taken.owed["wills"].items():
        watcher.nothing(0.1)
        taken.new(client_id)  # a clean start ends the old session [MQTT-3.1.2-4], and its will is due
        message = watcher.message()
        assert plain(message) == (about["topic"], about["payload"], about["qos"])
        assert [[k.decode(), v.decode()] for k, v in message.properties.user] == about["user"]


@pytest.mark.req("S0.18", "S0.21")
def test_sessions_that_had_ended_do_not_return(taken: Taken):
    for client_id in taken.owed["gone"]:
        taken.back(client_id, present=False).nothing(0.05)


@pytest.mark.req("S3.12")
def test_the_whole_log_can_be_read(taken: Taken):
    for topic, payloads in taken.owed["replay_earliest"].items():
        client = taken.new(f"reader of {topic}")
        client.subscribe(f"$replay/earliest/{topic}", qos=1)
        assert [m.payload.decode() for m in drained(client, len(payloads))] == payloads


@pytest.mark.req("S4.5")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_after_another_restart_nothing_that_was_acknowledged_comes_again(taken: Taken, end: str):
    for client_id in ("plain", "watcher"):
        client = taken.back(client_id)
        drained(client, len(taken.owed["sessions"][client_id]))
        client.disconnect()  # which stores its position
    getattr(taken.broker, end)()
    taken.broker.start()
    for client_id in ("plain", "watcher"):
        taken.back(client_id).nothing(0.1)
