"""Messages in flight: identifiers, acknowledgements in any order, and the lowest position still owed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.limits import PACKET_IDS
from tidegate.session.flights import PIDS, PUBACKS, Flight, Flights, State
from tidegate.session.session import Reader

READER, OTHER = Reader(1, None, 0), Reader(2, None, 0)


def sent(flights: Flights, count: int, base: int, reader: Reader = READER, qos: int = 1) -> Flight:
    flight = Flight(flights.take(count), count, base, qos, reader)
    flights.add(flight)
    return flight


def in_flight(flights: Flights) -> dict[int, int]:
    """Identifier → position of everything unfinished."""
    return {f.pid + i: f.base + i for f in flights.queue if f.state is not State.DONE for i in range(f.count)}


def acknowledge(flights: Flights, pid: int) -> None:
    flight = flights.find(pid)
    assert flight is not None
    flights.finish(flights.isolate(flight, pid))


def test_messages_that_follow_the_last_flight_in_everything_are_counted_to_it():
    flights = Flights()
    first = flights.sent(flights.take(3), 3, 100, READER)
    assert flights.sent(flights.take(2), 2, 103, READER) is first
    assert (first.pid, first.base, first.count, flights.unfinished) == (1, 100, 5, 5)


@pytest.mark.parametrize(
    ("next_pid", "before", "base", "reader"),
    [
        (1, Flight(1, 3, 100, 1, READER), 104, READER),
        (1, Flight(1, 3, 100, 1, READER), 103, OTHER),
        (1, Flight(1, 3, 100, 2, READER), 103, READER),
        (1, Flight(1, 3, 100, 1, READER, State.DONE), 103, READER),
        (PACKET_IDS - 2, Flight(PACKET_IDS - 2, 3, 100, 1, READER), 103, READER),
    ],
    ids=["a gap between", "another reader", "QoS 2", "finished", "identifiers begin again"],
)
def test_other_messages_are_a_flight_of_their_own(next_pid, before, base, reader):
    flights = Flights(next_pid)
    flights.take(3)
    flights.add(before)
    own = flights.sent(flights.take(1), 1, base, reader)
    assert own is not before and before.count == 3
    assert (own.count, own.base, own.reader) == (1, base, reader) and list(flights.queue) == [before, own]


def test_identifiers_follow_each_other_and_begin_again_at_1():
    flights = Flights(next_pid=PACKET_IDS - 1)
    assert [flights.take(1) for _ in range(3)] == [PACKET_IDS - 1, PACKET_IDS, 1]


def test_a_sequence_may_end_with_the_last_identifier_and_not_go_beyond():
    flights = Flights(next_pid=PACKET_IDS - 1)
    assert flights.unbroken() == 2
    assert flights.fits(2)
    assert not flights.fits(3)
    flights.take(2)
    assert flights.next_pid == 1


@pytest.mark.attack("C10")
def test_when_all_identifiers_are_in_use_there_is_no_room():
    flights = Flights(next_pid=100)
    sent(flights, flights.unbroken(), 0)
    sent(flights, 99, flights.unfinished)
    assert flights.unfinished == PACKET_IDS
    assert flights.room() == 0
    assert not flights.fits(1)


@pytest.mark.attack("C10")
def test_an_identifier_is_free_again_only_when_all_before_it_are():
    flights = Flights()
    sent(flights, PACKET_IDS, 0)
    acknowledge(flights, 2)
    assert flights.room() == 0
    acknowledge(flights, 1)
    assert flights.room() == 2
    assert flights.take(2) == 1


def test_the_pubacks_of_a_sequence_are_one_slice():
    assert PUBACKS[4 * 7 : 4 * 9] == b"\x40\x02\x00\x07\x40\x02\x00\x08"
    assert PIDS[258] == b"\x01\x02"


def test_what_was_dropped_is_not_found_and_not_counted():
    flights = Flights()
    first, second = sent(flights, 2, 10), sent(flights, 1, 20)
    flights.drop(first)
    assert flights.find(1) is None
    assert flights.find(3) is second
    assert flights.unfinished == 1
    assert flights.lowest(READER) == 20


def test_a_message_is_finished_once():
    flights = Flights()
    sent(flights, 3, 0)
    acknowledge(flights, 2)
    assert flights.find(2) is None


def test_splitting_keeps_order_identifiers_and_positions():
    flights = Flights()
    whole = sent(flights, 5, 100)
    alone = flights.isolate(whole, 3)
    assert [(f.pid, f.count, f.base) for f in flights.queue] == [(1, 2, 100), (3, 1, 102), (4, 2, 103)]
    assert flights.queue[1] is alone


@pytest.mark.req("S0.13", "S2.18")
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.booleans(), st.integers(1, 2))
        | st.tuples(st.just("ack"), st.integers(0, 30), st.just(0))
        | st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
        max_size=60,
    ),
    st.sampled_from([1, 40, PACKET_IDS - 5, PACKET_IDS]),
)
def test_flights_agree_with_a_plain_list_of_messages(steps, first_pid):
    """However sends and acknowledgements mix: nothing is owed twice, lost, or under an identifier in use."""
    flights = Flights(first_pid)
    plain: dict[int, tuple[int, Reader, int]] = {}  # identifier → (position, reader, QoS)
    position = 0
    for what, choice, qos in steps:
        if isinstance(what, int):
            reader = OTHER if choice else READER
            count = min(what, flights.unbroken(), flights.room())
            assert flights.fits(count)
            flight = sent(flights, count, position, reader, qos)
            new = range(flight.pid, flight.pid + count)
            assert not plain.keys() & set(new)
            plain.update({pid: (position + i, reader, qos) for i, pid in enumerate(new)})
            position += count
        elif plain:
            pid = list(plain)[choice % len(plain)]
            if what == "ack":
                acknowledge(flights, pid)
                del plain[pid]
            else:
                flight = flights.find(pid)
                for gone in range(flight.pid, flight.pid + flight.count):
                    del plain[gone]
                flights.drop(flight)
        assert in_flight(flights) == {pid: at for pid, (at, _, _) in plain.items()}
        assert flights.unfinished == len(plain)
        for reader in (READER, OTHER):
            for qos_max in (1, 2):
                owed = [at for at, whose, q in plain.values() if whose is reader and q <= qos_max]
                assert flights.lowest(reader, qos_max) == min(owed, default=None)
        for pid in plain:
            assert flights.find(pid) is not None
    assert bool(flights.queue) == bool(plain)


def test_the_lowest_position_is_found_also_when_flights_are_not_in_its_order():
    flights = Flights()
    sent(flights, 1, 50, qos=2)
    sent(flights, 3, 10)
    flights.scrambled = True
    assert flights.lowest(READER) == 10
    for pid in (2, 3, 4):
        acknowledge(flights, pid)
    assert flights.lowest(READER) == 50
