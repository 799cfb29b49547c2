"""What a client has been sent and has not acknowledged, in the order it was sent.

Packet identifiers are given out in sequence, so messages that leave one after the other have identifiers that do so
too, and one `Flight` describes them all: the identifiers from `pid` on carry `positions`, one each.

    number   1 2 3 … 65535 65536 65537 …     counts every identifier ever given to the session
    pid      1 2 3 … 65535     1     2 …     what the client sees of it

Flights are kept by their first number, which only grows, so a flight is found by bisection, and acknowledgements that
come in order and in bulk move one integer. What is finished leaves at once. A message that its client never answers
keeps its identifier; the sequence steps over it when it comes round again (C10).
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tidegate.limits import PACKET_IDS, PARTITION_SHIFT

if TYPE_CHECKING:
    from tidegate.session.reader import Reader

# Packet identifiers as their two bytes, and whole packets for all of them in one string: slices of these replace a
# loop over messages.
PIDS: list[bytes] = [i.to_bytes(2, "big") for i in range(PACKET_IDS + 1)]
PUBACKS: bytes = b"".join(b"\x40\x02" + pid for pid in PIDS)
PUBRECS: bytes = b"".join(b"\x50\x02" + pid for pid in PIDS)
PUBRELS: bytes = b"".join(b"\x62\x02" + pid for pid in PIDS)
PUBCOMPS: bytes = b"".join(b"\x70\x02" + pid for pid in PIDS)

# The lists are shortened when so many finished flights stand at their front.
_SLACK = 512


class State(IntEnum):
    SENT = 1  # PUBLISH sent (QoS 2: its packet id is stored)
    RELEASED = 2  # QoS 2: PUBREC is stored, PUBREL sent
    DONE = 3


SENT, RELEASED, DONE = State


class Flight:
    __slots__ = ("message", "number", "positions", "qos", "reader", "state")

    def __init__(
        self,
        number: int,
        positions: range,
        qos: int,
        reader: Reader,
        state: State = SENT,
        message: Any = None,
    ) -> None:
        self.number = number
        self.positions = positions
        self.qos = qos
        self.reader = reader
        self.state = state
        self.message = message  # of a retained message: it, for it need not be in the log

    @property
    def pid(self) -> int:
        return (self.number - 1) % PACKET_IDS + 1

    @property
    def count(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"Flight(pid={self.pid}, {self.positions}, qos={self.qos}, {self.state.name})"


class Flights:
    """The flights of one session. `unfinished` counts messages."""

    __slots__ = (
        "_beyond",
        "_busy",
        "_flights",
        "_front",
        "_numbers",
        "_round",
        "next_number",
        "scrambled",
        "unfinished",
    )

    def __init__(self, next_number: int = 1) -> None:
        self._flights: list[Flight] = []
        self._numbers: list[int] = []  # each flight's first number, increasing
        self._front = 0  # flights before it are finished
        self._round = -1  # the round of the sequence for which `_busy` lists identifiers in use, last ones first
        self._busy: list[tuple[int, int]] = []
        self._beyond = 0  # the number after the last one that was finished before an earlier one
        self.unfinished = 0
        self.next_number = next_number
        self.scrambled = False  # a later flight may hold an earlier position: after recovery, or what a group redid

    def __iter__(self) -> Any:
        """Those that are not finished, oldest first; they must not change meanwhile."""
        return iter(self._flights[self._front :] if self._front else self._flights)

    def __bool__(self) -> bool:
        return self._front < len(self._flights)

    @property
    def contiguous(self) -> bool:
        """Nothing is acknowledged beyond a gap."""
        left = len(self._flights) - self._front
        return not left or (left == 1 and self._numbers[self._front] >= self._beyond)

    @property
    def next_pid(self) -> int:
        return (self.next_number - 1) % PACKET_IDS + 1

    def free(self, wanted: int) -> int:
        """How many identifiers, `wanted` at most, can be given out in sequence now. Steps over those in use."""
        while self.unfinished < PACKET_IDS:
            number = self.next_number
            round, before = divmod(number - 1, PACKET_IDS)
            room = min(wanted, PACKET_IDS - before)  # before the sequence starts again at 1
            # Only flights that begin so long ago can have identifiers that come round again within `room`.
            if self._front == len(self._flights) or self._numbers[self._front] >= number + room - PACKET_IDS:
                return room
            if self._round != round:
                # Listed once a round, and not kept up to date: what is finished meanwhile is free in the next.
                self._round = round
                self._busy = sorted(((f.pid, f.pid + len(f.positions)) for f in self), reverse=True)
            pid = before + 1
            busy = self._busy
            while busy and busy[-1][1] <= pid:
                busy.pop()
            if not busy or busy[-1][0] >= pid + room:
                return room
            if busy[-1][0] > pid:
                return busy[-1][0] - pid
            self.next_number += busy[-1][1] - pid
        return 0

    def _holder(self, number: int) -> Flight | None:
        """The flight that holds this number, or one of the same identifier from an earlier round."""
        at = bisect_right(self._numbers, number, lo=self._front) - 1
        while at >= self._front:
            flight = self._flights[at]
            last = flight.number + len(flight.positions) - 1
            # The newest number of this identifier that the flight could hold.
            number = min(number, last - (last - number) % PACKET_IDS)
            if number >= flight.number:
                return flight
            at = bisect_right(self._numbers, number, lo=self._front, hi=at) - 1
        return None

    def from_number(self, number: int) -> Flight | None:
        """The flight that holds this number, or the next one."""
        at = max(self._front, bisect_right(self._numbers, number, lo=self._front) - 1)
        if at < len(self._flights):
            flight = self._flights[at]
            if number < flight.number + len(flight.positions):
                return flight
            at += 1
        return self._flights[at] if at < len(self._flights) else None

    def add(self, positions: range, qos: int, reader: Reader, message: Any = None) -> int:
        """Messages go out with the next identifiers, of which there are enough (`free`): the first one's. They are
        more of the last flight if they follow it in everything."""
        number = self.next_number
        count = len(positions)
        self.next_number = number + count
        self.unfinished += count
        if self._front < len(self._flights):
            last = self._flights[-1]
            before = last.positions
            if (
                reader is last.reader
                and qos == last.qos
                and last.state is SENT
                and number == last.number + len(before)
                and (number - 1) % PACKET_IDS  # a flight's identifiers do not start again at 1
                and positions.start == before.stop
                and before.step == 1
                and positions.step == 1
                and message is None
                and last.message is None
            ):
                last.positions = range(before.start, positions.stop)
                return (number - 1) % PACKET_IDS + 1
        self._flights.append(Flight(number, positions, qos, reader, SENT, message))
        self._numbers.append(number)
        return (number - 1) % PACKET_IDS + 1

    def restore(
        self, pid: int, position: int, qos: int, reader: Reader, state: State, message: Any = None
    ) -> None:
        """A flight that was written down before a restart, in the order of sending."""
        number = self.next_number + (pid - self.next_pid) % PACKET_IDS
        self._flights.append(Flight(number, range(position, position + 1), qos, reader, state, message))
        self._numbers.append(number)
        self.next_number = number + 1
        self.unfinished += 1
        self.scrambled = True  # QoS 1 messages before it are sent again after it

    def find(self, pid: int) -> tuple[Flight, int] | None:
        """The flight that holds an identifier, and where in it."""
        if self._front == len(self._flights):
            return None
        number = self.next_number - 1
        number -= ((number - 1) % PACKET_IDS + 1 - pid) % PACKET_IDS
        first = self._flights[self._front]
        if 0 <= number - first.number < len(first.positions):
            return first, number - first.number  # as most are
        flight = self._holder(number)
        if flight is None:
            return None
        return flight, (number - flight.number) % PACKET_IDS

    def finish(self, flight: Flight, at: int, count: int) -> range:
        """`count` messages of a flight, from `at` on, are finished: their positions."""
        positions = flight.positions
        self.unfinished -= count
        size = len(positions)
        if at or flight is not self._flights[self._front]:
            self._beyond = max(self._beyond, flight.number + at + count)
        if count == size:
            self._remove(flight)
            flight.state = DONE
            return positions
        if at == 0:
            place = self._place(flight)
            flight.positions = positions[count:]
            flight.number += count
            self._numbers[place] = flight.number
        else:
            if at + count < size:
                self._insert_rest(flight, at + count)
            flight.positions = positions[:at]
        return positions[at : at + count]

    def cut(self, flight: Flight, at: int, count: int) -> Flight:
        """Split so that `count` messages from `at` on are a flight of their own: that one."""
        if at + count < len(flight.positions):
            self._insert_rest(flight, at + count)
            flight.positions = flight.positions[: at + count]
        if at:
            own = self._insert_rest(flight, at)
            flight.positions = flight.positions[:at]
            return own
        return flight

    def _insert_rest(self, flight: Flight, at: int) -> Flight:
        rest = Flight(
            flight.number + at, flight.positions[at:], flight.qos, flight.reader, flight.state, flight.message
        )
        place = self._place(flight) + 1
        self._flights.insert(place, rest)
        self._numbers.insert(place, rest.number)
        return rest

    def _place(self, flight: Flight) -> int:
        return bisect_right(self._numbers, flight.number, lo=self._front) - 1

    def _remove(self, flight: Flight) -> None:
        front = self._flights[self._front] is flight
        place = self._front if front else self._place(flight)
        if front:
            self._front += 1
            if self._front > _SLACK or self._front == len(self._flights):
                del self._flights[: self._front], self._numbers[: self._front]
                self._front = 0
        else:
            del self._flights[place], self._numbers[place]
        if not self._flights:
            self.scrambled = False

    def drop(self, flight: Flight) -> None:
        """Forget an unfinished flight altogether (its message went to somebody else, or is gone)."""
        self.unfinished -= len(flight.positions)
        self._remove(flight)

    def lowest(
        self, reader: Reader, partitions: int = 1, qos_max: int = 2, begun: Begun | None = None
    ) -> list[int | None]:
        """The lowest position of `reader` that is not finished, per partition; None where there is none."""
        found: list[int | None] = [None] * partitions
        first_is_lowest = partitions == 1 and not self.scrambled
        flights, first = self._flights, self._front
        if begun is not None and begun.asked_before(self):
            flights, first = begun.of(self, reader), 0
        for i in range(first, len(flights)):
            flight = flights[i]
            if flight.reader is reader and flight.qos <= qos_max:
                base = flight.positions[0]
                if first_is_lowest:
                    return [base]
                of = base >> PARTITION_SHIFT
                known = found[of]
                if known is None or base < known:
                    found[of] = base
        return found

    def of(self, reader: Reader) -> list[Flight]:
        return [flight for flight in self if flight.reader is reader]

    def by_reader(self) -> dict[Reader, list[Flight]]:
        """What `of` says of each reader, in one go: one client may be a member of thousands of groups."""
        found: dict[Reader, list[Flight]] = {}
        for flight in self:
            found.setdefault(flight.reader, []).append(flight)
        return found

    def __len__(self) -> int:
        """Flights, not messages: what it costs to look at each."""
        return len(self._flights) - self._front


class Begun:
    """What readers have in flight, for a step that asks for many of them and changes nothing meanwhile. A session's
    flights are gone through once, when it is asked for a second reader of it."""

    __slots__ = ("_asked", "_found")

    def __init__(self) -> None:
        self._asked: set[Flights] = set()
        self._found: dict[Flights, dict[Reader, list[Flight]]] = {}

    def asked_before(self, flights: Flights) -> bool:
        asked = flights in self._asked
        self._asked.add(flights)
        return asked

    def of(self, flights: Flights, reader: Reader) -> list[Flight]:
        known = self._found.get(flights)
        if known is None:
            known = self._found[flights] = flights.by_reader()
        return known.get(reader, [])
