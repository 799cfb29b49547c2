"""Messages in flight: identifiers, acknowledgements in any order, and the lowest position still owed."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.limits import PACKET_IDS, PARTITION_SHIFT
from tidegate.session import flights as module
from tidegate.session.flights import PIDS, PUBACKS, PUBCOMPS, PUBRECS, PUBRELS, Flight, Flights, State
from tidegate.session.reader import Reader

READER, OTHER = Reader(1, None, [0]), Reader(2, None, [0])


def positions(first: int, count: int, step: int = 1) -> range:
    return range(first, first + count * step, step)


def sent(flights: Flights, count: int, base: int, reader: Reader = READER, qos: int = 1) -> Flight:
    pid = flights.add(positions(base, count), qos, reader)
    found = flights.find(pid)
    assert found is not None
    return found[0]


def in_flight(flights: Flights) -> dict[int, int]:
    """Identifier → position of everything unfinished."""
    return {f.pid + i: position for f in flights for i, position in enumerate(f.positions)}


def acknowledge(flights: Flights, pid: int, count: int = 1) -> range:
    found = flights.find(pid)
    assert found is not None
    return flights.finish(*found, count)


# ── one flight, or a new one ──


def test_messages_that_follow_the_last_flight_in_everything_are_counted_to_it():
    flights = Flights()
    assert flights.add(positions(100, 3), 1, READER) == 1
    assert flights.add(positions(103, 2), 1, READER) == 4
    (only,) = flights
    assert (only.pid, only.positions, only.count, flights.unfinished) == (1, range(100, 105), 5, 5)
    assert flights.contiguous


@pytest.mark.parametrize(
    ("first", "more", "qos", "reader", "message"),
    [
        (1, positions(104, 1), 1, READER, None),
        (1, positions(103, 1), 1, OTHER, None),
        (1, positions(103, 1), 2, READER, None),
        (1, positions(103, 2, step=5), 1, READER, None),
        (1, positions(103, 1), 1, READER, "a retained one"),
        (PACKET_IDS - 2, positions(103, 1), 1, READER, None),
    ],
    ids=["a gap between", "another reader", "QoS 2", "positions in steps", "its own message", "begins again"],
)
def test_other_messages_are_a_flight_of_their_own(first, more, qos, reader, message):
    flights = Flights(first)
    flights.add(positions(100, 3), 1, READER)
    flights.add(more, qos, reader, message)
    before, own = flights
    assert before.count == 3
    assert (own.positions, own.qos, own.reader, own.message) == (more, qos, reader, message)
    assert not flights.contiguous


def test_nothing_is_counted_to_a_flight_whose_beginning_is_all_that_is_left():
    """The last messages of a flight are finished: the next identifier is not the one after what is left."""
    flights = Flights()
    flights.add(positions(10, 3), 1, READER)
    acknowledge(flights, 3)
    flights.add(positions(12, 1), 1, READER)
    assert in_flight(flights) == {1: 10, 2: 11, 4: 12}


def test_nothing_is_counted_to_a_flight_that_is_released():
    flights = Flights()
    sent(flights, 2, 10, qos=2).state = State.RELEASED
    flights.add(positions(12, 1), 2, READER)
    assert [(f.pid, f.state) for f in flights] == [(1, State.RELEASED), (3, State.SENT)]


def test_positions_in_steps_keep_their_steps():
    flights = Flights()
    flights.add(positions(100, 4, step=3), 1, READER)
    assert acknowledge(flights, 2) == positions(103, 1, step=3)
    assert in_flight(flights) == {1: 100, 3: 106, 4: 109}


# ── identifiers ──


def test_identifiers_follow_each_other_and_begin_again_at_1():
    flights = Flights(PACKET_IDS - 1)
    assert [flights.add(positions(i, 1), 1, READER) for i in range(3)] == [PACKET_IDS - 1, PACKET_IDS, 1]
    assert in_flight(flights) == {PACKET_IDS - 1: 0, PACKET_IDS: 1, 1: 2}


def test_a_sequence_may_end_with_the_last_identifier_and_not_go_beyond():
    flights = Flights(PACKET_IDS - 1)
    assert flights.free(1) == 1
    assert flights.free(2) == flights.free(3) == 2
    flights.add(positions(0, 2), 1, READER)
    assert flights.next_pid == 1
    assert flights.free(7) == 7


@pytest.mark.attack("C10")
def test_when_all_identifiers_are_in_use_there_is_no_room():
    flights = Flights(100)
    first = flights.free(PACKET_IDS)
    assert first == PACKET_IDS - 99
    flights.add(positions(0, first), 1, READER)
    assert flights.free(PACKET_IDS) == 99
    flights.add(positions(first, 99), 1, READER)
    assert flights.unfinished == PACKET_IDS
    assert flights.free(1) == 0


@pytest.mark.attack("C10")
def test_whichever_identifier_is_free_is_given_out():
    flights = Flights()
    flights.add(positions(0, PACKET_IDS), 1, READER)
    acknowledge(flights, 40_000)
    assert flights.free(5) == 1
    assert flights.add(positions(PACKET_IDS, 1), 1, READER) == 40_000
    assert flights.free(1) == 0
    acknowledge(flights, 7, 3)
    assert flights.free(5) == 3
    assert flights.add(positions(PACKET_IDS + 1, 3), 1, READER) == 7
    assert flights.unfinished == PACKET_IDS


@pytest.mark.attack("C10")
def test_a_message_that_is_never_acknowledged_keeps_its_identifier_and_stops_nobody():
    """The sequence comes round a few times and steps over it each time."""
    flights = Flights()
    flights.add(positions(0, 10), 1, READER)
    acknowledge(flights, 1, 4)
    acknowledge(flights, 6, 5)  # 5 is stuck
    position, given = 10, []
    while position < 3 * PACKET_IDS:
        count = flights.free(1000)
        assert count
        pid = flights.add(positions(position, count), 1, READER)
        assert not pid <= 5 < pid + count
        given += range(pid, pid + count)
        assert acknowledge(flights, pid, count) == positions(position, count)
        position += count
        assert in_flight(flights) == {5: 4}
    assert given[: PACKET_IDS - 11] == list(range(11, PACKET_IDS))
    assert given[PACKET_IDS - 10 : PACKET_IDS - 5] == [1, 2, 3, 4, 6]
    assert flights.lowest(READER) == [4]
    assert acknowledge(flights, 5) == range(4, 5)
    assert not flights and flights.unfinished == 0


@pytest.mark.attack("C10")
@pytest.mark.timeout(20)
def test_many_stuck_messages_do_not_make_the_next_one_dear():
    """A client acknowledges every second message and no other: the sequence comes round, and steps over thousands."""
    flights = Flights()
    flights.add(positions(0, 16_384), 1, READER)
    for pid in range(2, 16_385, 2):
        acknowledge(flights, pid)
    position, given = 16_384, []
    while flights.next_number < 2 * PACKET_IDS:
        count = flights.free(100)
        pid = flights.add(positions(position, count), 1, READER)
        given += range(pid, pid + count)
        acknowledge(flights, pid, count)
        position += count
    stuck = set(range(1, 16_384, 2))
    assert set(in_flight(flights)) == stuck and not stuck.intersection(given)
    assert len(given) > 2 * PACKET_IDS - 16_384 - len(stuck) - 100


def test_whole_sequences_of_answers_are_one_slice():
    assert PUBACKS[4 * 7 : 4 * 9] == b"\x40\x02\x00\x07\x40\x02\x00\x08"
    assert PUBRECS[4 * 7 : 4 * 8] == b"\x50\x02\x00\x07"
    assert PUBRELS[4 * 258 : 4 * 259] == b"\x62\x02\x01\x02"
    assert PUBCOMPS[-4:] == b"\x70\x02\xff\xff"
    assert PIDS[258] == b"\x01\x02"


# ── finishing ──


def test_acknowledgements_in_order_leave_one_flight():
    flights = Flights()
    flights.add(positions(100, 1000), 1, READER)
    for pid in range(1, 1000):
        assert acknowledge(flights, pid) == range(99 + pid, 100 + pid)
        assert flights.contiguous
    assert in_flight(flights) == {1000: 1099}


def test_a_message_is_finished_once():
    flights = Flights()
    flights.add(positions(0, 3), 1, READER)
    acknowledge(flights, 2)
    assert flights.find(2) is None
    assert not flights.contiguous


def test_what_is_finished_behind_a_flight_leaves_a_gap_until_that_is_finished():
    flights = Flights()
    flights.add(positions(0, 3), 1, READER)
    acknowledge(flights, 2)
    acknowledge(flights, 3)
    assert in_flight(flights) == {1: 0}
    assert not flights.contiguous
    flights.add(positions(3, 2), 1, READER)
    acknowledge(flights, 1)
    assert in_flight(flights) == {4: 3, 5: 4}
    assert flights.contiguous


def test_a_flight_that_is_finished_altogether_says_so():
    flights = Flights()
    flight = sent(flights, 2, 0)
    assert flights.finish(flight, 0, 2) == range(2)
    assert flight.state is State.DONE
    assert not flights and list(flights) == []


def test_what_was_dropped_is_not_found_and_not_counted():
    flights = Flights()
    first, second = sent(flights, 2, 10), sent(flights, 1, 20)
    flights.drop(first)
    assert flights.find(1) is None
    assert flights.find(3) == (second, 0)
    assert flights.unfinished == 1
    assert flights.lowest(READER) == [20]


def test_cutting_keeps_order_identifiers_and_positions():
    flights = Flights()
    whole = sent(flights, 5, 100)
    alone = flights.cut(whole, 2, 1)
    assert [(f.pid, f.positions) for f in flights] == [(1, range(100, 102)), (3, range(102, 103)), (4, range(103, 105))]
    assert [f for f in flights if f in (whole, alone)] == [whole, alone]
    assert flights.unfinished == 5
    assert flights.cut(alone, 0, 1) is alone


def test_a_cut_flight_is_like_the_one_it_was_cut_from():
    flights = Flights()
    flights.add(positions(0, 3), 2, OTHER)
    own = flights.cut(*flights.find(2), 2)
    assert (own.qos, own.reader, own.state, own.message) == (2, OTHER, State.SENT, None)


def test_finished_flights_are_not_held_for_ever():
    flights = Flights()
    for position in range(0, 20_000, 2):
        flights.add(positions(position, 1), 1, READER)
    for pid in range(1, 9_001):
        acknowledge(flights, pid)
    assert len(flights._flights) < 2_000
    assert flights.find(9_001) is not None and flights.find(9_000) is None


# ── from a number on, and the lowest position ──


def test_from_a_number_on_there_is_the_flight_that_holds_it_or_the_next():
    flights = Flights()
    flights.add(positions(0, 3), 1, READER)
    flights.add(positions(10, 3), 1, READER)
    first, second = flights
    assert [flights.from_number(n) for n in range(8)] == [first] * 4 + [second] * 3 + [None]
    flights.drop(first)
    assert flights.from_number(0) is second


def test_the_lowest_position_is_found_also_when_flights_are_not_in_its_order():
    flights = Flights()
    flights.add(positions(50, 1), 2, READER)
    flights.add(positions(10, 3), 1, READER)
    flights.scrambled = True
    assert flights.lowest(READER) == [10]
    assert flights.lowest(OTHER) == [None]
    acknowledge(flights, 2, 3)
    assert flights.lowest(READER) == [50]
    assert flights.lowest(READER, qos_max=1) == [None]


def test_each_partition_has_its_own_lowest_position():
    flights = Flights()
    second = 1 << PARTITION_SHIFT
    flights.add(positions(second + 7, 2), 1, READER)
    flights.add(positions(30, 1), 1, READER)
    flights.add(positions(second + 5, 1), 1, READER)
    assert flights.lowest(READER, 3) == [30, second + 5, None]


# ── after a restart ──


def test_flights_that_were_written_down_have_their_identifiers_again():
    """In the order of sending, which is that of the identifiers but for where they start again at 1."""
    flights = Flights()
    for pid, position, state in ((65534, 7, State.RELEASED), (65535, 3, State.SENT), (1, 9, State.SENT)):
        flights.restore(pid, position, 2, READER, state)
    assert [(f.pid, f.positions[0], f.state) for f in flights] == [
        (65534, 7, State.RELEASED),
        (65535, 3, State.SENT),
        (1, 9, State.SENT),
    ]
    assert flights.next_pid == 2 and flights.unfinished == 3
    assert flights.lowest(READER) == [3]
    assert flights.find(65535)[0].positions == range(3, 4)


def test_an_identifier_from_before_a_restart_is_not_given_out_again():
    flights = Flights()
    flights.restore(9, 0, 2, READER, State.SENT)
    flights.restore(3, 1, 2, READER, State.SENT)
    assert flights.free(100) == 5
    assert flights.add(positions(10, 5), 1, READER) == 4
    assert flights.free(1) == 1
    assert flights.add(positions(15, 1), 1, READER) == 10


# ── against a plain dict ──


FEW = 23


class FlightsAreADict(RuleBasedStateMachine):
    """However sends, acknowledgements, cuts, drops and a restart mix: nothing is owed twice, lost, or under an
    identifier that is in use. There are only a few identifiers here, so they are often all in use."""

    def __init__(self) -> None:
        super().__init__()
        module.PACKET_IDS = FEW
        self.begin(1)

    def teardown(self) -> None:
        module.PACKET_IDS = PACKET_IDS

    @initialize(first=st.sampled_from([1, 5, FEW - 5, FEW, 3 * FEW - 2]))
    def begin(self, first: int) -> None:
        self.flights = Flights(first)
        self.plain: dict[int, tuple[int, Reader, int]] = {}  # identifier → (position, reader, QoS), oldest first
        self.overtaken: set[int] = set()  # identifiers that were in use when one after them was finished
        self.position = 0

    def pick(self, choice: int) -> int:
        return list(self.plain)[choice % len(self.plain)]

    @rule(
        wanted=st.integers(1, 6) | st.integers(1, 2 * FEW),
        reader=st.sampled_from([READER, OTHER]),
        qos=st.integers(1, 2),
        step=st.sampled_from([1, 1, 1, 3]),
        gap=st.integers(0, 1),
    )
    def send(self, wanted: int, reader: Reader, qos: int, step: int, gap: int) -> None:
        count = self.flights.free(wanted)
        assert 0 <= count <= wanted
        assert count or len(self.plain) == FEW
        if count:
            self.position += gap
            its = positions(self.position, count, step)
            pid = self.flights.add(its, qos, reader)
            new = range(pid, pid + count)
            self.overtaken.difference_update(new)
            assert new[0] >= 1 and new[-1] <= FEW and not any(each in self.plain for each in new)
            self.plain.update({each: (at, reader, qos) for each, at in zip(new, its, strict=True)})
            self.position = its[-1] + 1

    @precondition(lambda self: self.plain)
    @rule(choice=st.integers(0, FEW), count=st.integers(1, 4) | st.just(FEW))
    def acknowledge(self, choice: int, count: int) -> None:
        pid = self.pick(choice)
        flight, at = self.flights.find(pid)
        count = min(count, flight.count - at)
        self.overtaken.update(list(self.plain)[: list(self.plain).index(pid)])
        done = self.flights.finish(flight, at, count)
        assert list(done) == [self.plain.pop(pid + i)[0] for i in range(count)]

    @precondition(lambda self: self.plain)
    @rule(choice=st.integers(0, FEW), count=st.integers(1, 4))
    def cut(self, choice: int, count: int) -> None:
        pid = self.pick(choice)
        flight, at = self.flights.find(pid)
        count = min(count, flight.count - at)
        own = self.flights.cut(flight, at, count)
        assert (own.pid, own.count) == (pid, count)

    @precondition(lambda self: self.plain)
    @rule(choice=st.integers(0, FEW))
    def drop(self, choice: int) -> None:
        flight, _ = self.flights.find(self.pick(choice))
        for pid in range(flight.pid, flight.pid + flight.count):
            del self.plain[pid]
        self.flights.drop(flight)

    @rule()
    def restart(self) -> None:
        """QoS 2 is written down; QoS 1 is sent again with new identifiers."""
        before = {pid: kept for pid, kept in self.plain.items() if kept[2] == 2}
        self.flights, self.plain, self.overtaken = Flights(), {}, set()
        for pid, (position, reader, qos) in before.items():
            self.flights.restore(pid, position, qos, reader, State.SENT)
            self.plain[pid] = position, reader, qos

    @invariant()
    def the_same(self) -> None:
        found: dict[int, tuple[int, Reader, int]] = {}
        numbers = []
        for flight in self.flights:
            assert flight.count and flight.state is State.SENT
            assert flight.pid + flight.count - 1 <= FEW
            numbers.append(flight.number)
            its = zip(range(flight.pid, flight.pid + flight.count), flight.positions, strict=True)
            found.update({pid: (at, flight.reader, flight.qos) for pid, at in its})
        assert found == self.plain
        assert numbers == sorted(numbers) and len(found) == self.flights.unfinished
        assert bool(self.flights) == bool(self.plain)
        assert self.flights.contiguous == (len(numbers) <= 1 and self.overtaken.isdisjoint(self.plain))

    @invariant()
    def each_is_found(self) -> None:
        for pid in range(1, FEW + 1):
            found = self.flights.find(pid)
            if pid in self.plain:
                flight, at = found
                assert flight.positions[at] == self.plain[pid][0]
                assert self.flights.from_number(flight.number + at) is flight
            else:
                assert found is None

    @invariant()
    def the_lowest_is_the_lowest(self) -> None:
        for reader in (READER, OTHER):
            for qos_max in (1, 2):
                owed = [at for at, whose, qos in self.plain.values() if whose is reader and qos <= qos_max]
                assert self.flights.lowest(reader, 1, qos_max) == [min(owed, default=None)]


FlightsAreADict.TestCase.pytestmark = [pytest.mark.req("S0.13", "S2.18"), pytest.mark.attack("C10")]
FlightsAreADict.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFlightsAreADict = FlightsAreADict.TestCase


@pytest.mark.attack("C10")
def test_looking_for_an_identifier_that_nobody_holds_is_quick_however_long_one_has_been_stuck(monkeypatch):
    """A message of a thousand rounds ago is still out: an acknowledgement for nothing must not walk them all."""
    flights = Flights()
    flights.add(positions(0, 1), 1, READER)
    flights.next_number += 100_000 * PACKET_IDS
    looked = []
    monkeypatch.setattr(
        "tidegate.session.flights.bisect_right", lambda *a, **k: looked.append(1) or bisect_right(*a, **k)
    )
    assert flights.find(2) is None
    assert flights.find(1) is not None
    assert len(looked) < 100
