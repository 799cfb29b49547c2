"""What one client asks for within the limits is done in pieces, and holds its share of memory: counted, not timed."""

from __future__ import annotations

from simulated import SimulatedBroker, SimulatedClient, SimulatedLog

from tidegate.wire import FilterRequest, Subscribe

FILTERS = 10_000


def subscribe(client: SimulatedClient, filters: list[bytes], qos: int = 1) -> None:
    for start in range(0, len(filters), 1000):
        some = filters[start : start + 1000]
        client.send(Subscribe(1, tuple(FilterRequest(filter, qos) for filter in some)))
        client.simulated.rest()
    client.received()


def test_what_a_session_wants_is_found_out_without_a_look_at_each_of_its_filters():
    simulated = SimulatedBroker(SimulatedLog(late=False))
    client = simulated.client("c", clean=False)
    subscribe(client, [b"+/%d/+/x" % i for i in range(1, FILTERS)] + [b"plain"])
    wanted = simulated.broker.delivery._wanted(client.link.session.reader)
    assert [wanted(topic) for topic in (b"a/77/b/x", b"a/b/c/d", b"plain", b"a/77/b")] == [True, False, True, False]
    wanted.begin()
    for i in range(100):
        assert not wanted(b"a/b/c/%d" % i)
    assert wanted.work < 1000
    assert wanted.prefixes == (b"",)
