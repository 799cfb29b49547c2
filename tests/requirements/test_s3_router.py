"""The router over the commit log: connections, appended publishes, batches from each reader's own offset."""

from __future__ import annotations

import pytest
from observing import process_figures, publish_all, sys_until
from stored import attach, attach_kept, copies, eventually, stored_messages, stored_session

from harness import RawClient
from tidegate.wire import Pingreq, Pingresp, Properties, Puback, Publish, Pubrec, Pubrel


@pytest.mark.req("S3.1")
def test_the_router_reaches_every_active_connection_and_no_other(start_broker):
    broker = start_broker(sys__interval_s=1)
    subs = [attach(broker, f"s{i}") for i in range(20)]
    for sub in subs:
        sub.subscribe("a")
    for sub in subs[10:]:
        sub.disconnect()
    pub = attach(broker, "p")
    pub.publish("a", b"m", 1)
    assert [sub.message().payload for sub in subs[:10]] == [b"m"] * 10
    sys_until(broker, lambda values: values["clients/connected"] == "12")  # ten, the publisher and who asks


@pytest.mark.req("S3.1")
def test_a_connection_that_breaks_is_let_go_of(start_broker):
    broker = start_broker(sys__interval_s=1)
    subs = [attach(broker, f"s{i}") for i in range(10)]
    for sub in subs:
        sub.close()
    sys_until(broker, lambda values: values["clients/connected"] == values["clients/total"] == "1")


@pytest.mark.req("S3.2", "S3.3")
def test_a_publish_is_in_the_log_once_however_many_connections_wait_for_it(broker):
    subs = [attach_kept(broker, f"s{i}") for i in range(30)]
    for sub in subs:
        sub.subscribe("a", qos=1)  # and acknowledges nothing
    attach(broker, "p").publish("a", b"only once in all the files", 1)
    assert copies(broker.data, b"only once in all the files") == 1


@pytest.mark.req("S3.3")
def test_publishes_of_every_quality_are_appended_in_the_order_they_came(broker):
    pub = attach(broker, "p", 5)
    for i in range(30):
        pub.publish(f"a/{i % 3}", b"%d" % i, i % 3)
    stored = stored_messages(broker.data)
    assert [record.run.payloads[record.at] for record in stored] == [b"%d" % i for i in range(30)]
    assert [record.run.topic for record in stored] == [b"a/%d" % (i % 3) for i in range(30)]
    assert [record.run.flags & 3 for record in stored] == [i % 3 for i in range(30)]
    assert {record.run.publisher for record in stored} == {b"p"}


@pytest.mark.req("S3.4")
def test_a_subscriber_gets_the_next_n_messages_each_time_it_has_room(client, unique):
    sub = client(unique + "-s", 5, properties=Properties(receive_maximum=7))
    sub.subscribe(unique, qos=1)
    publish_all(client(unique + "-p"), [(unique, b"%d" % i) for i in range(21)])
    for start in range(0, 21, 7):
        batch = [sub.message(acknowledge=False) for _ in range(7)]
        assert [int(message.payload) for message in batch] == list(range(start, start + 7))
        sub.nothing(0.05)
        for message in batch:
            sub.send(Puback(message.packet_id))


@pytest.mark.req("S3.4")
def test_each_subscriber_reads_on_from_its_own_offset(client, unique):
    quick, slow = (client(f"{unique}-{i}", 5, properties=Properties(receive_maximum=10)) for i in range(2))
    for sub in (quick, slow):
        sub.subscribe(unique, qos=1)
    publish_all(client(unique + "-p"), [(unique, b"%d" % i) for i in range(50)])
    assert [int(payload) for payload in quick.payloads(50)] == list(range(50))
    assert [int(payload) for payload in slow.payloads(50)] == list(range(50))


@pytest.mark.req("S3.5")
def test_quality_and_packet_id_belong_to_the_delivery_and_not_to_the_stored_message(client, unique):
    used = client(unique + "-used")  # has given out packet ids before
    used.subscribe(unique + "/before", qos=1)
    pub = client(unique + "-p")
    publish_all(pub, [(unique + "/before", b"")] * 5)
    used.payloads(5)
    fresh, plain, exact = client(unique + "-1"), client(unique + "-0"), client(unique + "-2")
    used.subscribe(unique, qos=1)
    fresh.subscribe(unique, qos=1)
    plain.subscribe(unique, qos=0)
    exact.subscribe(unique, qos=2)
    pub.publish(unique, b"m", 2, packet_id=999)
    got = [sub.message(acknowledge=False) for sub in (used, fresh, plain, exact)]
    assert [(m.qos, m.packet_id) for m in got] == [(1, 6), (1, 1), (0, 0), (2, 1)]


@pytest.mark.req("S3.6")
@pytest.mark.parametrize("qos", [0, 1])
def test_messages_that_came_together_leave_in_one_write_per_subscriber(broker, qos):
    subs = [attach(broker, f"s{i}") for i in range(5)]
    for sub in subs:
        sub.subscribe("a", qos=qos)
    pub = attach(broker, "p")
    before = process_figures(broker)["syscw"]
    publish_all(pub, [("a", b"." * 20)] * 1000, qos)
    for sub in subs:
        for _ in range(1000):
            sub.expect(Publish)
    # One by one it would be 5000 writes. The kernel may split the publisher's bytes into a few reads.
    assert process_figures(broker)["syscw"] - before < 100


@pytest.mark.req("S3.6")
def test_what_a_session_missed_travels_in_batches(broker):
    sub = attach_kept(broker, "s")
    sub.subscribe("a", qos=1)
    sub.disconnect()
    publish_all(attach(broker, "p"), [("a", b"." * 20)] * 4000)
    before = process_figures(broker)["syscw"]
    back = attach_kept(broker, "s")
    for _ in range(4000):
        back.expect(Publish)
    assert process_figures(broker)["syscw"] - before < 200


@pytest.mark.req("S3.7", "S3.8")
@pytest.mark.parametrize("read", [0, 1, 100, 199])
def test_a_batch_that_broke_off_is_delivered_again_from_the_first_message_not_accepted(client, unique, read):
    sub = client(unique, 4, clean=False)
    sub.subscribe(unique, qos=1)
    publish_all(client(unique + "-p"), [(unique, b"%d" % i) for i in range(200)])
    assert len(sub.payloads(read)) == read
    _hear(sub)
    sub.close()
    back = client(unique, 4, clean=False)
    assert [int(payload) for payload in back.payloads(200 - read)] == list(range(read, 200))
    back.nothing(0.05)


@pytest.mark.req("S3.7")
def test_the_offset_does_not_move_while_a_batch_is_unacknowledged(broker):
    sub = attach_kept(broker, "s", properties=Properties(session_expiry=60, receive_maximum=5))
    sub.subscribe("a", qos=1)
    pub = attach(broker, "p")
    publish_all(pub, [("a", b"%d" % i) for i in range(20)])
    batch = [sub.message(acknowledge=False) for _ in range(5)]
    sub.close()
    assert eventually(lambda: stored_session(broker.data, "s").connected is False)
    assert stored_session(broker.data, "s").position == 0
    back = attach_kept(broker, "s", properties=Properties(session_expiry=60, receive_maximum=5))
    assert [m.payload for m in batch] == back.payloads(5)


@pytest.mark.req("S3.7")
def test_the_release_of_a_qos_2_message_that_broke_off_is_what_comes_again(client, unique):
    sub = client(unique, 4, clean=False)
    sub.subscribe(unique, qos=2)
    client(unique + "-p").publish(unique, b"m", 2)
    message = sub.expect(Publish)
    sub.send(Pubrec(message.packet_id))
    sub.expect(Pubrel)
    sub.close()
    back = client(unique, 4, clean=False)
    assert back.expect(Pubrel).packet_id == message.packet_id
    back.nothing(0.05)


@pytest.mark.req("S3.8")
@pytest.mark.parametrize("version", [4, 5])
def test_a_reconnection_resumes_at_its_offset_among_messages_of_others(start_broker, version):
    broker = start_broker(log__tail_bytes=65536, log__segment_bytes=65536)
    sub = attach_kept(broker, "s", version)
    sub.subscribe("mine/#", qos=1)
    pub = attach(broker, "p")
    for _ in range(3):
        publish_all(pub, ((f"{'mine' if i % 3 else 'other'}/{i % 5}", b"%d" % i + b"." * 100) for i in range(900)))
        got = sub.payloads(200)
        sub.disconnect()
        publish_all(pub, [("other/x", b"." * 100)] * 900)
        sub = attach_kept(broker, "s", version)
        got += sub.payloads(400)
        assert [int(payload.rstrip(b".")) for payload in got] == [i for i in range(900) if i % 3]
    sub.nothing(0.05)


def _hear(sub: RawClient) -> None:
    """The broker has read everything that was sent so far."""
    sub.send(Pingreq())
    sub.amid(Pingresp)
