"""mosquitto_pub and mosquitto_sub against the broker."""

from __future__ import annotations

import hashlib

import pytest

VERSIONS = ("mqttv31", "mqttv311", "mqttv5")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", "012")
def test_messages_go_through_with_every_qos(mosquitto, unique, version, qos):
    sub = mosquitto.sub("-V", version, "-i", unique, "-t", unique + "/#", "-q", qos, "-F", "%t %q %p")
    for i in range(3):
        assert mosquitto.pub("-V", version, "-t", f"{unique}/{i}", "-q", qos, "-m", f"m{i}").returncode == 0
    assert sub.lines(3) == [f"{unique}/{i} {qos} m{i}" for i in range(3)]


@pytest.mark.parametrize("publisher", VERSIONS)
@pytest.mark.parametrize("subscriber", VERSIONS)
def test_versions_mix(mosquitto, unique, publisher, subscriber):
    sub = mosquitto.sub("-V", subscriber, "-t", unique, "-q", "2", "-F", "%q %p")
    mosquitto.pub("-V", publisher, "-t", unique, "-q", "2", "-m", "hello")
    assert sub.line() == "2 hello"


@pytest.mark.req("S4.2")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_gets_what_it_missed(mosquitto, client, unique, version):
    session = ["-V", version, "-i", unique, "-c", "-t", unique, "-q", "1"]
    if version == "mqttv5":
        session += ["-x", "600"]
    mosquitto.sub(*session).close()
    mosquitto.pub("-t", unique, "-q", "1", "-l", stdin="one\ntwo\nthree\n")
    assert mosquitto.sub(*session).lines(3) == ["one", "two", "three"]
    client(unique)  # ends the session


def test_retained_messages_stay_and_are_removed(mosquitto, unique):
    mosquitto.pub("-t", unique, "-q", "1", "-r", "-m", "kept")
    assert mosquitto.sub("-t", unique, "-F", "%r %p").line() == "1 kept"
    mosquitto.pub("-t", unique, "-q", "1", "-r", "-n")
    late = mosquitto.sub("-t", unique, "-F", "%r %p")
    mosquitto.pub("-t", unique, "-q", "1", "-m", "live")
    assert late.line() == "0 live"


@pytest.mark.req("S0.20")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_killed_client_leaves_its_will(mosquitto, unique, version):
    watcher = mosquitto.sub("-t", unique + "/will", "-q", "1", "-F", "%q %p")
    will = ["--will-topic", unique + "/will", "--will-payload", "gone", "--will-qos", "1"]
    mosquitto.sub("-V", version, "-t", unique, *will).process.kill()
    assert watcher.line() == "1 gone"


def test_v5_properties_arrive(mosquitto, unique):
    sub = mosquitto.sub("-V", "5", "-t", unique, "-q", "1", "-F", "%C|%R|%D|%P|%F|%p")
    properties = [
        ("content-type", "text/plain"),
        ("response-topic", "answer/here"),
        ("correlation-data", "id-7"),
        ("payload-format-indicator", "1"),
        ("message-expiry-interval", "1000"),
    ]
    arguments = [a for name, value in properties for a in ("-D", "publish", name, value)]
    arguments += ["-D", "publish", "user-property", "b", "1", "-D", "publish", "user-property", "a", "2"]
    mosquitto.pub("-V", "5", "-t", unique, "-q", "1", "-m", "text", *arguments)
    assert sub.line() == "text/plain|answer/here|id-7|b:1 a:2|1|text"


def test_shared_subscriptions_divide_the_messages(mosquitto, unique):
    subs = [mosquitto.sub("-V", "5", "-t", f"$share/g/{unique}", "-q", "1") for _ in range(2)]
    mosquitto.pub("-t", unique, "-q", "1", "-l", stdin="".join(f"{i}\n" for i in range(20)))
    received = [sub.lines(10) for sub in subs]
    assert sorted(int(line) for lines in received for line in lines) == list(range(20))


@pytest.mark.req("S3.12")
def test_any_client_can_go_back_in_time(mosquitto, unique):
    mosquitto.pub("-t", unique, "-q", "1", "-l", stdin="one\ntwo\n")
    sub = mosquitto.sub("-V", "mqttv311", "-t", f"$replay/earliest/{unique}", "-q", "1")
    assert sub.lines(2) == ["one", "two"]
    mosquitto.pub("-t", unique, "-q", "1", "-m", "three")
    assert sub.line() == "three"


@pytest.mark.req("S3.12")
def test_v5_clients_are_told_when_a_replayed_message_was_stored(mosquitto, unique):
    mosquitto.pub("-t", unique, "-q", "1", "-m", "old")
    sub = mosquitto.sub("-V", "5", "-t", f"$replay/-1h/{unique}", "-F", "%p %P")
    line = sub.line()
    assert line.startswith("old ")
    assert "tidegate-position:" in line and "tidegate-time:" in line


@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_a_megabyte_goes_through(mosquitto, unique, version, tmp_path):
    payload = hashlib.shake_256(b"seed").digest(1 << 20)
    (tmp_path / "payload").write_bytes(payload)
    sub = mosquitto.sub("-V", version, "-t", unique, "-q", "1", "-F", "%l %x")
    assert mosquitto.pub("-V", version, "-t", unique, "-q", "1", "-f", str(tmp_path / "payload")).returncode == 0
    length, content = sub.line().split()
    assert int(length) == 1 << 20
    assert bytes.fromhex(content) == payload


@pytest.mark.parametrize("qos", "012")
def test_many_lines_stay_in_order(mosquitto, unique, qos):
    sub = mosquitto.sub("-t", unique, "-q", qos)
    mosquitto.pub("-t", unique, "-q", qos, "-l", stdin="".join(f"{i}\n" for i in range(1000)))
    assert [int(line) for line in sub.lines(1000)] == list(range(1000))


def test_overlapping_subscriptions_deliver_once(mosquitto, unique):
    sub = mosquitto.sub("-t", unique + "/#", "-t", unique + "/+", "-q", "1")
    for payload in ("one", "two"):
        mosquitto.pub("-t", unique + "/a", "-q", "1", "-m", payload)
    assert sub.lines(2) == ["one", "two"]


def test_the_broker_tells_of_itself_under_sys(mosquitto):
    assert mosquitto.sub("-t", "$SYS/broker/version").line().startswith("tidegate")


def test_a_v5_publisher_may_use_topic_aliases(mosquitto, unique):
    sub = mosquitto.sub("-t", unique, "-q", "1")
    mosquitto.pub(
        *("-V", "5", "-t", unique, "-q", "1", "-l", "-D", "publish", "topic-alias", "3"), stdin="one\ntwo\n"
    )
    assert sub.lines(2) == ["one", "two"]


def test_a_v5_publisher_hears_that_nobody_subscribed(mosquitto, unique):
    done = mosquitto.pub("-V", "5", "-d", "-t", unique, "-q", "1", "-m", "x")
    assert b"RC:16" in done.stdout
