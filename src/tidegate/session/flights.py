"""What a client has been sent and has not acknowledged, in the order it was sent.

Packet identifiers are given out in sequence, so messages that follow each other in the log take identifiers that
do so too, and one `Flight` describes them all, whatever runs they belong to: identifiers `pid` … `pid + count - 1`
carry positions `base` … `base + count - 1`.
Acknowledgements nearly always come in the same order and in bulk; then the bytes received are compared
with the bytes expected and one integer moves. Anything else is found by search and splits its flight.

A flight that is finished out of order stays as DONE until everything before it is finished: the first
flight's `base` is therefore the lowest position the client still owes an answer for (invariant I2).
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING

from tidegate.limits import PACKET_IDS

if TYPE_CHECKING:
    from tidegate.session.session import Reader

# Packet identifiers as their two bytes, and the PUBACKs for all of them in one string: slices of these
# replace a loop over messages.
PIDS: list[bytes] = [i.to_bytes(2, "big") for i in range(PACKET_IDS + 1)]
PUBACKS: bytes = b"".join(b"\x40\x02" + pid for pid in PIDS)


class State(IntEnum):
    SENT = 1  # PUBLISH sent (QoS 2: its packet id is stored)
    RELEASED = 2  # QoS 2: PUBREC is stored, PUBREL sent
    DONE = 3


class Flight:
    __slots__ = ("base", "count", "pid", "qos", "reader", "state")

    def __init__(self, pid: int, count: int, base: int, qos: int, reader: Reader, state: State = State.SENT) -> None:
        self.pid = pid
        self.count = count
        self.base = base
        self.qos = qos
        self.reader = reader
        self.state = state

    def __repr__(self) -> str:
        return f"Flight(pid={self.pid}+{self.count}, base={self.base}, qos={self.qos}, {self.state.name})"


class Flights:
    """The ordered flights of one session. `unfinished` counts messages that are not DONE."""

    __slots__ = ("next_pid", "queue", "scrambled", "unfinished")

    def __init__(self, next_pid: int = 1) -> None:
        self.queue: deque[Flight] = deque()
        self.unfinished = 0
        self.next_pid = next_pid
        self.scrambled = False  # a later flight may hold an earlier position: after recovery, or what a group redid

    def room(self) -> int:
        """How many more identifiers can be given out without meeting one that is in use."""
        if not self.queue:
            return PACKET_IDS
        span = (self.next_pid - self.queue[0].pid) % PACKET_IDS
        # next_pid meeting the oldest identifier means that all are in use, not none.
        return PACKET_IDS - span if span else 0

    def fits(self, count: int) -> bool:
        """Whether `count` identifiers can be taken in one sequence."""
        following = self.next_pid + count
        if following > PACKET_IDS + 1:
            return False
        queue = self.queue
        if not queue:
            return True
        oldest = queue[0].pid
        # The oldest lies behind, and nothing is in the way up to the end; or it lies ahead, and is in the way.
        return oldest < self.next_pid or following <= oldest

    def take(self, count: int) -> int:
        """Reserve `count` identifiers in sequence (the caller stays within `unbroken`): the first one."""
        first = self.next_pid
        following = first + count
        self.next_pid = following if following <= PACKET_IDS else 1
        return first

    def unbroken(self) -> int:
        """How many identifiers follow in sequence before they start again at 1."""
        return PACKET_IDS + 1 - self.next_pid

    def add(self, flight: Flight) -> None:
        self.queue.append(flight)
        self.unfinished += flight.count

    def sent(self, pid: int, count: int, base: int, reader: Reader) -> Flight:
        """QoS 1 messages have gone out: they are more of the last flight, if they follow it in everything, or a
        flight of their own. Returns it."""
        self.unfinished += count
        if self.queue:
            last = self.queue[-1]
            if (
                base == last.base + last.count
                and pid == last.pid + last.count
                and reader is last.reader
                and last.qos == 1
                and last.state is State.SENT
            ):
                last.count += count
                return last
        flight = Flight(pid, count, base, 1, reader)
        self.queue.append(flight)
        return flight

    def find(self, pid: int) -> Flight | None:
        """The unfinished flight that holds this identifier."""
        for flight in self.queue:
            if flight.pid <= pid < flight.pid + flight.count:
                return flight if flight.state is not State.DONE else None
        return None

    def isolate(self, flight: Flight, pid: int) -> Flight:
        """Split the flight so that `pid` stands alone; returns its own flight."""
        offset = pid - flight.pid
        if offset:
            flight = self.split(flight, offset)
        if flight.count > 1:
            self.split(flight, 1)
        return flight

    def split(self, flight: Flight, count: int) -> Flight:
        """Leave `count` messages in the flight and put the others into one of their own: that one."""
        rest = Flight(
            flight.pid + count, flight.count - count, flight.base + count, flight.qos, flight.reader, flight.state
        )
        flight.count = count
        self.queue.insert(self.queue.index(flight) + 1, rest)
        return rest

    def finish(self, flight: Flight) -> None:
        """Mark a single-message flight DONE, and let go of what is finished at the front."""
        flight.state = State.DONE
        self.unfinished -= flight.count
        queue = self.queue
        while queue and queue[0].state is State.DONE:
            queue.popleft()

    def drop(self, flight: Flight) -> None:
        """Forget an unfinished flight altogether (its message went to somebody else, or is gone)."""
        self.unfinished -= flight.count
        self.queue.remove(flight)
        queue = self.queue
        while queue and queue[0].state is State.DONE:
            queue.popleft()

    def lowest(self, reader: Reader, qos_max: int = 2) -> int | None:
        """The lowest position of `reader` that is not finished, or None."""
        if self.scrambled:
            self.scrambled = bool(self.queue)
            unfinished = [f for f in self.queue if f.reader is reader and f.state is not State.DONE]
            return min([f.base for f in unfinished if f.qos <= qos_max], default=None)
        for flight in self.queue:
            if flight.reader is reader and flight.state is not State.DONE and flight.qos <= qos_max:
                return flight.base
        return None
