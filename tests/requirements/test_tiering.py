"""A hot log that is small and a lake that is not: readers go from one to the other without noticing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from observing import publish_all, sys_until, sys_values, user_properties
from stored import attach, attach_kept, eventually

from harness import BrokerProcess, RawClient
from lake_tools import TestLake
from tidegate.wire import Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel

MIB = 1 << 20
SMALL = {
    "log__segment_bytes": 65536,
    "log__tail_bytes": 65536,
    "log__retention_bytes": MIB,
    "log__clean_interval_s": 1,
    "sys__interval_s": 1,
}
NO_ROOM = 0x97
OVERRUN = "dropped/overrun by retention"
ROWS_PER_FILE = 700

Start = Callable[..., BrokerProcess]


@pytest.fixture
def small(start_broker: Start) -> Callable[..., tuple[BrokerProcess, TestLake]]:
    """A broker whose log holds about a megabyte, and a lake that takes what the test archives."""

    def start(**more: Any) -> tuple[BrokerProcess, TestLake]:
        broker = start_broker(**{**SMALL, **more})
        return broker, TestLake(broker.data)

    return start


def numbered(first: int, count: int, size: int = 400) -> list[tuple[str, bytes]]:
    return [(f"a/{i % 7}", b"%06d" % i + b"x" * size) for i in range(first, first + count)]


def number(message: Publish) -> int:
    return int(message.payload[:6])


def fill(broker: BrokerProcess, first: int, count: int, qos: int = 1) -> None:
    """Publish in small portions: a segment never ends within a tick."""
    publisher = attach(broker, "filler")
    publish_all(publisher, numbered(first, count), qos, together=50)
    publisher.close()


def seam_behind(broker: BrokerProcess, position: int) -> dict[str, str]:
    """Wait until the hot log has let go of everything before some position."""
    return sys_until(broker, lambda values: int(values.get("log/seam", 0)) > position)


def archived_and_dropped(broker: BrokerProcess, lake: TestLake, position: int) -> None:
    lake.archive(rows_per_file=ROWS_PER_FILE)
    seam_behind(broker, position)


# ── sessions ──


@pytest.mark.req("S4.2", "S2.17", "S0.12", "P.10")
@pytest.mark.parametrize("version", [4, 5])
def test_a_session_away_for_longer_than_the_hot_log_gets_everything_in_order(small, version):
    broker, lake = small()
    sub = attach_kept(broker, "s", version)
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2000)
    fill(broker, 5000, 200)
    back = attach_kept(broker, "s", version)
    assert [number(back.message()) for _ in range(5200)] == list(range(5200))
    back.nothing(0.1)
    values = sys_values(broker)
    assert int(values["archive/messages/read"]) > 2000
    assert OVERRUN not in values


def next_message(client: RawClient) -> Publish:
    """Whose last PUBCOMP may have been on its way when the broker died."""
    while isinstance(packet := client.receive(), Pubrel):
        client.send(Pubcomp(packet.packet_id))
    client.waiting.insert(0, packet)
    return client.message()


@pytest.mark.req("P.10")
@pytest.mark.parametrize("moment", ["never", "in the lake", "in the log"])
def test_messages_of_qos_2_come_exactly_once_from_lake_and_log_also_after_kill_9(small, moment):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=2)
    sub.disconnect()
    publisher = attach(broker, "p", 5)
    for i in range(400):
        publisher.publish(f"a/{i % 3}", b"%06d" % i, 2)
    publisher.close()
    fill(broker, 400, 4000)
    archived_and_dropped(broker, lake, 400)
    publisher = attach(broker, "p", 5)
    for i in range(4400, 4500):
        publisher.publish(f"a/{i % 3}", b"%06d" % i, 2)
    publisher.close()
    kill_at = {"never": -1, "in the lake": 200, "in the log": 4420}[moment]
    back = attach_kept(broker, "s")
    got: list[tuple[int, int]] = []
    while len({i for i, _ in got}) < 4500:
        message = next_message(back)
        got.append((number(message), message.qos))
        if got[-1][0] == kill_at:
            broker.kill()
            broker.start()
            back = attach_kept(broker, "s")
            kill_at = -1
    # QoS 1 may come again after the crash, from the last position that was stored; QoS 2 never.
    attach(broker, "p", 5).publish("a/0", b"004500", 2)
    while got[-1][0] != 4500:
        message = next_message(back)
        got.append((number(message), message.qos))
    assert sorted(i for i, qos in got if qos == 2) == [*range(400), *range(4400, 4501)]  # each once
    if moment == "never":
        assert [i for i, _ in got] == list(range(4501))
    back.nothing(0.1)


@pytest.mark.req("P.10")
def test_what_was_in_flight_when_the_client_went_away_is_sent_again_from_the_lake(small):
    """The files end within what was sent at once."""
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    publisher = attach(broker, "p")
    publish_all(publisher, [("a", b"%06d" % i) for i in range(100)], together=100)
    first = [sub.message(acknowledge=False) for _ in range(100)]
    sub.close()
    fill(broker, 100, 4000)
    lake.archive(rows_per_file=30)
    seam_behind(broker, 1000)
    back = attach_kept(broker, "s")
    again = [back.message() for _ in range(100)]
    assert [(number(m), m.packet_id) for m in again] == [(number(m), m.packet_id) for m in first]
    assert all(message.dup for message in again)
    back.nothing(0.1)


@pytest.mark.req("S2.14", "P.10")
def test_a_shared_group_goes_on_in_the_lake(small):
    broker, lake = small()
    subs = [attach_kept(broker, f"s{i}") for i in range(2)]
    for sub in subs:
        sub.subscribe("$share/g/a/#", qos=1)
        sub.disconnect()
    fill(broker, 0, 4000)
    archived_and_dropped(broker, lake, 1500)
    back = attach_kept(broker, "s1")
    assert [number(back.message()) for _ in range(4000)] == list(range(4000))


@pytest.mark.req("S3.11")
def test_a_session_gets_only_what_it_wants_of_the_lake(small):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/3", "a/5", qos=1)
    sub.disconnect()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2000)
    back = attach_kept(broker, "s")
    wanted = [i for i in range(5000) if i % 7 in (3, 5)]
    assert [number(back.message()) for _ in wanted] == wanted
    back.nothing(0.1)


@pytest.mark.req("S4.13")
def test_a_message_that_expired_in_the_lake_is_not_delivered(small):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", "b", qos=1)
    sub.disconnect()
    attach(broker, "p", 5).publish("b", b"brief", 1, properties=Properties(message_expiry=1))
    attach(broker, "q", 5).publish("b", b"lasting", 1, properties=Properties(message_expiry=3600))
    fill(broker, 0, 4000)
    archived_and_dropped(broker, lake, 1000)
    back = attach_kept(broker, "s")
    first = back.message()
    assert first.payload == b"lasting"
    expiry = first.properties.message_expiry
    assert expiry is not None and 3500 < expiry < 3600
    assert number(back.message()) == 0


@pytest.mark.req("P.10")
def test_properties_and_flags_come_back_from_the_lake_as_they_were(small):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("b", qos=2, retain_as_published=True)
    sub.disconnect()
    said = Properties(content_type=b"text/plain", user=((b"k", b"v"),), correlation_data=b"\x00\x01")
    attach(broker, "p", 5).publish("b", b"with", 2, True, properties=said)
    fill(broker, 0, 4000)
    archived_and_dropped(broker, lake, 1000)
    message = attach_kept(broker, "s").message()
    assert (message.payload, message.qos, message.retain) == (b"with", 2, True)
    got = message.properties
    assert (got.content_type, got.user, got.correlation_data) == (said.content_type, said.user, said.correlation_data)


@pytest.mark.req("P.10")
def test_a_broker_that_starts_anew_serves_from_the_lake_at_once(small):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    fill(broker, 0, 4000)
    archived_and_dropped(broker, lake, 1500)
    broker.stop()
    broker.start()
    back = attach_kept(broker, "s")
    assert [number(back.message()) for _ in range(4000)] == list(range(4000))


# ── going back in time ──


@pytest.mark.req("S3.12", "P.10")
@pytest.mark.parametrize("qos", [0, 1])
def test_a_replay_from_the_earliest_begins_in_the_lake_and_stays_live(small, qos):
    broker, lake = small()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2000)
    sub = attach(broker, "s", 5)
    sub.subscribe("$replay/earliest/#", qos=qos)
    got = [sub.message() for _ in range(5000)]
    assert [number(message) for message in got] == list(range(5000))
    places = [int(user_properties(message)["tidegate-position"]) for message in got]
    assert places == sorted(set(places))
    fill(broker, 5000, 10)
    assert [number(sub.message()) for _ in range(10)] == list(range(5000, 5010))


@pytest.mark.req("S3.12", "P.10")
@pytest.mark.parametrize("version", [4, 5])
def test_a_replay_from_a_position_begins_there_on_either_side_of_the_seam(small, version):
    broker, lake = small()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2000)
    seam = int(sys_values(broker)["log/seam"])
    for start in (0, 1, 699, 700, seam - 1, seam, seam + 1, 4999):
        sub = attach(broker, f"s{start}", version)
        sub.subscribe(f"$replay/{start}/a/+")
        assert [number(sub.message()) for _ in range(start, 5000)] == list(range(start, 5000))
        sub.close()


@pytest.mark.req("S3.12", "P.10")
def test_a_replay_from_a_time_begins_with_its_first_message_on_either_side_of_the_seam(small):
    broker, lake = small()
    for first in range(0, 5000, 250):
        fill(broker, first, 250)
    archived_and_dropped(broker, lake, 2000)
    seam = int(sys_values(broker)["log/seam"])
    times = [time_of(message) for message in replayed(broker, "earliest", 5000)]
    for at in (1, 1000, seam // 2, seam - 1, seam, 4500):
        first = times.index(times[at])  # several share a millisecond
        sub = attach(broker, f"s{at}", 5)
        sub.subscribe(f"$replay/{times[at]}/#")
        got = [sub.message() for _ in range(first, 5000)]
        assert [number(message) for message in got] == list(range(first, 5000))
        sub.close()


def replayed(broker: BrokerProcess, start: str, count: int) -> list[Publish]:
    sub = attach(broker, "reader", 5)
    sub.subscribe(f"$replay/{start}/#")
    return [sub.message() for _ in range(count)]


def time_of(message: Publish) -> str:
    return user_properties(message)["tidegate-time"]


@pytest.mark.req("S3.12", "P.10")
def test_a_persistent_replay_from_a_time_in_the_lake_goes_on_after_kill_9(small):
    broker, lake = small()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2000)
    before = replayed(broker, "earliest", 1001)
    moment = time_of(before[1000])
    first = next(number(message) for message in before if time_of(message) == moment)
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=3600, receive_maximum=20))
    sub.subscribe(f"$replay/{moment}/#", qos=1)
    got = [number(sub.message()) for _ in range(500)]
    time.sleep(0.3)  # positions are written ten times a second
    broker.kill()
    broker.start()
    back = attach_kept(broker, "s")
    while got[-1] != 4999:
        got.append(number(back.message()))
    assert got[0] == first  # of all that the broker accepted in that millisecond
    new = sorted(set(got))
    assert new == list(range(first, 5000))
    assert len(got) - len(new) < 600  # and not all over again


@pytest.mark.req("S3.14")
@pytest.mark.attack("C7")
def test_a_reader_that_even_the_lake_has_forgotten_is_told(small):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", "$SYS/clients/s/notice", qos=1)
    sub.disconnect()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2000)
    lake.remove(lake.files()[:2])
    back = attach_kept(broker, "s")
    got = [back.message() for _ in range(100)]
    told = [json.loads(m.payload) for m in got if m.topic.startswith(b"$SYS")]
    assert told == [{"event": "overrun", "lost_from": 0, "lost_before": 2 * ROWS_PER_FILE}]
    assert next(number(m) for m in got if not m.topic.startswith(b"$SYS")) == 2 * ROWS_PER_FILE


# ── retention ──


@pytest.mark.req("P.6", "S0.5")
def test_a_segment_goes_only_when_it_is_in_the_lake(small):
    broker, lake = small()
    lake.table()
    lake.tell()  # there is an archive, and it has nothing yet
    sys_until(broker, lambda values: values.get("archive/position") == "0")
    fill(broker, 0, 5000)
    values = sys_until(broker, lambda values: int(values["uptime"].split()[0]) > 8)  # it has looked often by then
    assert (values["log/seam"], values["archive/lag"]) == ("0", "5000")
    assert int(values["store/messages/bytes"]) > 2 * MIB
    segments = int(values["log/segments"])
    lake.archive(segments=5)
    values = sys_until(broker, lambda values: int(values["log/segments"]) == segments - 5)
    assert int(values["log/seam"]) == lake.position
    values = sys_until(broker, lambda values: int(values["archive/lag"]) == 5000 - lake.position)
    assert values["archive/segment"] == str(lake.segment)
    lake.archive()
    sys_until(broker, lambda values: int(values["store/messages/bytes"]) < MIB + 2 * 65536)
    assert [number(message) for message in replayed(broker, "earliest", 5000)] == list(range(5000))


@pytest.mark.req("S2.22")
def test_without_an_archive_what_sessions_need_is_kept_as_before(small):
    broker, _ = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    fill(broker, 0, 5000)
    values = sys_until(broker, lambda values: int(values["uptime"].split()[0]) > 4)
    assert values["log/floor"] == "0" and "archive/position" not in values
    back = attach_kept(broker, "s")
    assert [number(back.message()) for _ in range(5000)] == list(range(5000))
    sys_until(broker, lambda values: int(values["log/floor"]) > 1000)  # acknowledged, they go


@pytest.mark.req("S4.13", "P.6", "S1.25")
@pytest.mark.attack("C5")
def test_above_the_hard_limit_publishers_are_refused_until_the_archive_has_caught_up(small):
    broker, lake = small(log__hard_bytes=2 * MIB)
    lake.tell()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    watcher = attach(broker, "w")
    watcher.subscribe("$SYS/broker/archive/full")
    publisher = attach(broker, "p", 5)
    accepted = 0
    while publisher.publish("a/0", b"%06d" % accepted + b"x" * 4000, 1) != NO_ROOM:
        accepted += 1
        assert accepted < 20_000, "the log grows and grows"
    while watcher.message().payload != b"1":
        pass
    assert "log.hard_bytes" in broker.log()
    old = attach(broker, "old")
    old.publish("a/0", b"x", 1, wait=False)
    assert not [packet for packet in old.until_closed() if isinstance(packet, Puback)]
    back = attach_kept(broker, "s")  # readers go on
    assert [number(back.message()) for _ in range(accepted)] == list(range(accepted))
    lake.archive()
    eventually(lambda: publisher.publish("a/0", b"%06d" % accepted, 1) != NO_ROOM)
    assert number(back.message()) == accepted
    assert watcher.message().payload == b"0"
    sys_until(broker, lambda values: int(values["store/messages/bytes"]) < 2 * MIB)
    assert [number(message) for message in replayed(broker, "earliest", accepted + 1)] == list(range(accepted + 1))


def test_a_log_at_its_hard_limit_takes_turns_with_the_archive(small):
    """Again and again full, archived, and open: everything that was acknowledged is there in the end."""
    broker, lake = small(log__hard_bytes=MIB)
    lake.tell()
    publisher = attach(broker, "p", 5)
    accepted = 0
    for _ in range(3):
        while publisher.publish("a/0", b"%06d" % accepted + b"x" * 8000, 1) != NO_ROOM:
            accepted += 1
        lake.archive(rows_per_file=50)
        eventually(lambda: publisher.publish("b", b"", 1) != NO_ROOM)
    sub = attach(broker, "s", 5)
    sub.subscribe("$replay/earliest/a/#")
    assert [number(sub.message()) for _ in range(accepted)] == list(range(accepted))


@pytest.mark.req("S4.1")
def test_sessions_and_retained_messages_outlive_the_segments_that_told_of_them(small):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/0", qos=1)
    sub.disconnect()
    attach(broker, "p").publish("kept", b"value", 1, True)
    fill(broker, 0, 4000)
    archived_and_dropped(broker, lake, 1500)
    broker.kill()
    broker.start()
    back = attach_kept(broker, "s")
    assert back.connack is not None and back.connack.session_present
    assert [number(back.message()) for _ in range(0, 4000, 7)] == list(range(0, 4000, 7))
    other = attach(broker, "o")
    other.subscribe("kept")
    assert other.message().payload == b"value"


# ── the lake's files ──


@pytest.mark.attack("C12")
@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_a_lost_file_is_counted_and_what_lies_behind_it_is_delivered(small, damage):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2 * ROWS_PER_FILE)
    path = lake.files()[1]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:5000])
    back = attach_kept(broker, "s")
    left = [i for i in range(5000) if not ROWS_PER_FILE <= i < 2 * ROWS_PER_FILE]
    assert [number(back.message()) for _ in left] == left
    values = sys_until(broker, lambda values: values.get("archive/messages/damaged") == str(ROWS_PER_FILE))
    assert values["dropped/damaged on disk"] == str(ROWS_PER_FILE)
    assert "lake.damaged" in broker.log() and path.name in broker.log()


@pytest.mark.attack("C12")
def test_a_client_is_told_what_it_cannot_get_because_a_file_was_damaged(small):
    """Also after the pipeline has taken the file out of the table, and nothing but a gap is left."""
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.subscribe("$SYS/clients/s/notice")
    sub.disconnect()
    fill(broker, 0, 5000)
    archived_and_dropped(broker, lake, 2 * ROWS_PER_FILE)
    first, last = ROWS_PER_FILE, 2 * ROWS_PER_FILE - 1
    lake.lost = [{"first": first, "last": last, "messages": ROWS_PER_FILE}]
    lake.tell()
    lake.remove(lake.files()[1:2])
    broker.stop()
    broker.start()
    back = attach_kept(broker, "s")
    left = [i for i in range(5000) if not first <= i <= last]
    got = [back.message() for _ in range(len(left) + 1)]
    (notice,) = [json.loads(each.payload) for each in got if each.topic.startswith(b"$SYS/")]
    assert [number(each) for each in got if not each.topic.startswith(b"$SYS/")] == left
    assert (notice["event"], notice["messages"]) == ("damaged", ROWS_PER_FILE)
    assert notice["lost_from"] <= first and last < notice["lost_before"]


@pytest.mark.attack("C12")
def test_while_the_table_cannot_be_read_readers_wait_and_lose_nothing(small):
    """As after a power cut, until the pipeline has put its table in order."""
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    fill(broker, 0, 4000)
    archived_and_dropped(broker, lake, 1500)
    broker.stop()
    commit = max((lake.folder / "_delta_log").glob("*.json"))
    content = commit.read_bytes()
    commit.write_bytes(content[: len(content) // 2])
    broker.start()
    back = attach_kept(broker, "s")
    back.nothing(1.5)
    assert "lake.unreadable" in broker.log()
    commit.write_bytes(content)
    assert [number(back.message()) for _ in range(4000)] == list(range(4000))


@pytest.mark.req("P.10")
def test_a_reader_does_not_notice_that_its_files_are_compacted(small):
    broker, lake = small()
    fill(broker, 0, 5000)
    lake.archive(rows_per_file=100)
    seam_behind(broker, 2000)
    sub = attach(broker, "s", 5, properties=Properties(receive_maximum=10))
    sub.subscribe("$replay/earliest/#", qos=1)
    got = [number(sub.message()) for _ in range(50)]
    lake.compact(lake.files())
    got += [number(sub.message()) for _ in range(4950)]
    assert got == list(range(5000))
    assert "damaged" not in broker.log()


def test_a_qos_2_message_begun_before_its_segment_was_dropped_is_finished(small):
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("b", qos=2)
    attach(broker, "p", 5).publish("b", b"000000", 2)
    begun = sub.expect(Publish)
    sub.close()
    fill(broker, 0, 4000)
    archived_and_dropped(broker, lake, 1500)
    back = attach_kept(broker, "s")
    again = back.expect(Publish)
    assert (again.packet_id, again.payload, again.dup) == (begun.packet_id, b"000000", True)
    back.send(Pubrec(again.packet_id))
    assert back.expect(Pubrel).packet_id == begun.packet_id
    back.nothing(0.1)


# ── what a broker without a lake is spared ──


def loads_arrow(broker: BrokerProcess) -> bool:
    return "libarrow" in Path(f"/proc/{broker.pid}/maps").read_text()


def test_a_broker_without_a_lake_does_not_load_what_reads_one(small):
    broker, lake = small()
    fill(broker, 0, 3000)
    assert not loads_arrow(broker)
    lake.archive()
    eventually(lambda: loads_arrow(broker))


def test_without_the_packages_the_broker_says_what_to_install_and_keeps_what_sessions_need(
    small, tmp_path, monkeypatch
):
    package = tmp_path / "hidden" / "deltalake"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('No module named deltalake', name='deltalake')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    broker, lake = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    fill(broker, 0, 3000)
    lake.archive()
    eventually(lambda: "pip install 'tidegate[pipeline]'" in broker.log())
    values = sys_until(broker, lambda values: values.get("archive/readable") == "0")
    start_s = int(values["uptime"].split()[0])
    values = sys_until(broker, lambda values: int(values["uptime"].split()[0]) > start_s + 4)
    assert values["log/seam"] == "0"
    back = attach_kept(broker, "s")
    assert [number(back.message()) for _ in range(3000)] == list(range(3000))
    sys_until(broker, lambda values: int(values["log/floor"]) > 500)  # acknowledged and archived


# ── verdicts ──


def verdict(id: str, client: str, rule: str = "topics", minute: int = 0) -> dict[str, object]:
    said = {"id": id, "time": f"2026-01-01T00:{minute:02d}:00+00:00", "client": client, "tenant": "default"}
    return said | {"rule": rule, "observed": 1234, "limit": 1000}


def test_verdicts_of_the_pipeline_are_shown_once_each_and_kept_for_who_asks_later(small):
    broker, lake = small()
    watcher = attach(broker, "w")
    watcher.subscribe("$SYS/broker/abuse/#")
    lake.verdicts = [verdict("1", "noisy")]
    lake.tell()
    first = watcher.message()
    assert first.topic == b"$SYS/broker/abuse/topics/noisy"
    assert json.loads(first.payload) == lake.verdicts[0]
    lake.verdicts.append(verdict("2", "other", "connects", 1))
    lake.tell()
    assert watcher.message().topic == b"$SYS/broker/abuse/connects/other"
    lake.segment = 1
    lake.tell()  # nothing new
    sys_until(broker, lambda values: values.get("archive/segment") == "1")
    watcher.nothing(1.2)
    later = attach(broker, "l")
    later.subscribe("$SYS/broker/abuse/#")
    kept = {later.message().topic for _ in range(2)}
    assert kept == {b"$SYS/broker/abuse/topics/noisy", b"$SYS/broker/abuse/connects/other"}
    lake.verdicts = lake.verdicts[1:]
    lake.tell()

    def only_one() -> bool:
        with RawClient(broker.port) as asking:
            asking.connect()
            asking.subscribe("$SYS/broker/abuse/#")
            found = {asking.message().topic}
            try:
                found.add(asking.message(0.2).topic)
            except TimeoutError:
                pass
            return found == {b"$SYS/broker/abuse/connects/other"}

    eventually(only_one)


@pytest.mark.attack("A15")
def test_a_client_id_that_is_no_topic_level_is_made_one(small):
    broker, lake = small()
    watcher = attach(broker, "w")
    watcher.subscribe("$SYS/broker/abuse/#")
    names = ["a/b", "+", "#", "c\x00d\n", "50%", "gerät", "", "\ud800", "x" * 5000]
    lake.verdicts = [verdict(f"v{i}", name, minute=i) for i, name in enumerate(names)]
    lake.tell()
    got = [watcher.message() for _ in names]
    levels = [message.topic.removeprefix(b"$SYS/broker/abuse/topics/").decode() for message in got]
    assert levels == ["a%2Fb", "%2B", "%23", "c%00d%0A", "50%25", "gerät", "", "%3F", "x" * 1024]
    assert broker.alive


# ── the pipeline itself ──


@pytest.mark.req("P.10")
@pytest.mark.timeout(400)
def test_what_the_pipeline_has_archived_is_read_back(small):
    """With Spark, once: all other tests here fill the lake by themselves."""
    broker, _ = small()
    sub = attach_kept(broker, "s")
    sub.subscribe("a/#", qos=1)
    sub.disconnect()
    fill(broker, 0, 4000)
    command = [sys.executable, "-m", "tidegate.cli", "pipeline", "run", "--once", "--data", str(broker.data)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    seam_behind(broker, 1000)
    fill(broker, 4000, 100)
    back = attach_kept(broker, "s")
    assert [number(back.message()) for _ in range(4100)] == list(range(4100))
    assert int(sys_values(broker)["archive/messages/read"]) > 1000
