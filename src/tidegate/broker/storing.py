"""Between the tick and the log: what has been handed over, what was promised on it, and what happens when the log says
no.

While the log refuses (a full disk), messages are refused with a reason, and nothing that needs a record is promised. A
change that happens all the same (a connection ends, a message is acknowledged) is not written down one by one: its
session is noted, once, and written as it then is when there is room again. What was in the refused ticks is kept, and
is the first thing to be written then. So what waits is bounded by what there is, not by how much happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from tidegate.delivery.tick import (
    ANSWER,
    CALL,
    MESSAGE,
    PUBACK,
    PUBCOMP,
    PUBREC,
    TAKEN_PUBACK,
    TAKEN_PUBREC,
    Kind,
    Promise,
    Tick,
)
from tidegate.errors import DiskFull, StorageError
from tidegate.limits import TICK_CHANGES_MAX, UNSTORED_BYTES_MAX
from tidegate.session import changes
from tidegate.session.link import CLOSED, OPEN, Link, Stop

if TYPE_CHECKING:
    from tidegate.broker.core import Broker
    from tidegate.session.session import Session


class Storing:
    def __init__(self, broker: Broker, report: Callable[[str, Mapping[str, object]], None]) -> None:
        self._broker = broker
        self._report = report
        self.log = broker.log
        self.on = True  # False while the log takes no more
        self._trying = False  # it did when it was last asked, and is asked again
        self.behind = False  # the disk has not caught up with what was written: who adds to it is not read from
        self.full = ""  # why the log may not grow, although a write would succeed
        self.changes_bytes = 0  # state changes written since the last snapshot began
        self._ticks: deque[tuple[int, Tick]] = deque()  # appended, and what is promised on them not yet kept
        self._behind: Tick | None = None  # the first of these, stored, if it waits for the records of what it retains
        self._ticket = 0  # of the last append that was taken
        self.appending: Tick | None = None  # what the log is being given right now
        self._unwritten: list[bytes] = []  # state changes that the log refused
        self._waiting: list[Promise] = []  # … and what was promised on them
        self._unnoted: dict[int, Session | None] = {}  # sessions to be written when there is room; None: ended
        self._throttled: set[Link] = set()
        # Packet ids of QoS 2 messages that were refused: of those that came again meanwhile; and of those that were
        # refused late, so that something that was written since may list them as received.
        self._taken_back: dict[Session, set[bytes]] = {}
        self._unreleased: dict[Session, set[bytes]] = {}

    @property
    def idle(self) -> bool:
        """Whether everything appended is stored; but for changes that wait until the log may grow again, which are true
        and will be written once more."""
        return not self.unstored and (not self._unwritten or bool(self.full))

    @property
    def may_write(self) -> bool:
        """Whether there is room on the disk, be it the reserve: for a snapshot, without which no segment goes."""
        return self.on or bool(self.full)

    @property
    def unstored(self) -> bool:
        """Whether the log has something that is not stored."""
        return bool(self._ticks) and self.log.stored < self._ticks[-1][0] < UNKNOWN

    def append(self, tick: Tick) -> None:
        """Give a tick to the log."""
        broker = self._broker
        if self.on:
            broker.room.spend(tick.bytes)
        if not self.on and not self._probe(tick):
            return
        self.appending = tick
        ticket = self.log.append(tick.rows, tick.changes, broker.now_ms)
        if self.appending is None:
            return  # refused within the call
        self.appending = None
        self._ticket = ticket
        if self._ticks and self._ticks[0][0] == UNKNOWN:
            self._ticks[0] = (ticket, self._ticks[0][1])
        if tick.changes:
            self.changes_bytes += sum(map(len, tick.changes))
        if tick.retained and (tick.announced or self.log.stored >= ticket):
            self._follow(tick)
        if self.log.stored >= ticket and not self._ticks:
            self._keep(tick.promises)
        else:
            self._ticks.append((ticket, tick))
        if self.log.unstored_bytes > UNSTORED_BYTES_MAX:
            self.behind = True
            for promise in tick.promises:
                if promise.kind <= PUBREC:
                    self.throttle(promise.link)

    def _probe(self, tick: Tick) -> bool:
        """While the log refuses: messages are refused at once; the rest waits for `retry`."""
        self._refuse(tick, DiskFull(self.full or "no room"), late=False)
        return False

    def stored(self, ticket: int) -> None:
        """The log has made more of what was appended safe: keep the promises that waited for it."""
        ticks = self._ticks
        while ticks and ticks[0][0] <= ticket:
            tick = ticks[0][1]
            if tick.retained:
                # Its records were collected when it was announced. Those behind it wait as well: answers keep their
                # order [MQTT-4.6.0-2].
                tick.retained, self._behind = False, tick
                ticks[0] = (UNKNOWN if self._broker.post.tick.changes or self._unwritten else self._ticket, tick)
            else:
                self._behind = None
                ticks.popleft()
                self._keep(tick.promises)
        if not ticks and self.on:
            self._taken_back.clear()
        if self.behind and self.log.unstored_bytes < UNSTORED_BYTES_MAX // 2:
            self.behind = False
            for link in self._throttled:
                link.go_on(Stop.DISK, self._broker.now_s)
            self._throttled.clear()

    def _follow(self, tick: Tick) -> None:
        """The records of retained messages are written once these are announced: what was promised waits for them. All
        of the tick has been announced within its append, so that they are the next to be appended."""
        following = self._broker.post.tick
        taken = [
            promise._replace(kind=TAKEN[promise.kind]) if promise.kind in TAKEN else promise
            for promise in tick.promises
        ]
        tick.promises, following.promises = [], taken + following.promises
        tick.retained = False
        self._broker.request_tick()

    def refused(self, ticket: int, why: StorageError) -> None:
        """The log did not take an append."""
        late = self.appending is None
        if self.appending is not None:
            tick, self.appending = self.appending, None
        else:
            behind = self._behind
            found = next((entry for entry in self._ticks if entry[0] == ticket and entry[1] is not behind), None)
            if found is None:
                return
            self._ticks.remove(found)
            tick = found[1]
            if behind is not None and ticket <= self._ticks[0][0]:
                self._ticks[0] = (UNKNOWN, behind)
        self._lost(why)
        self._refuse(tick, why, late=late)

    def _refuse(self, tick: Tick, why: StorageError, *, late: bool) -> None:
        """Nobody gets the messages, and their publishers are told (C5, S1.25)."""
        broker = self._broker
        if tick.rows.payloads:
            broker.counters.dropped["refused by the log"] += len(tick.rows.payloads)
            # That they were received is no longer so.
            self._unwritten += [record for record in tick.changes if record[0] != changes.INBOUNDS]
        elif tick.changes != [NOTHING]:
            self._unwritten += tick.changes
        for kind, link, pids, _ in tick.promises:
            if kind is PUBREC:  # before any connection is closed, which parts it from its session
                session = link.session or broker.sessions.get(link.client_id)
                if session is not None and session.inbound is not None:
                    session.inbound.difference_update(pids)
                    asked = session.link.asked.keys() & pids if session.link is not None else None
                    if asked:
                        self._taken_back.setdefault(session, set()).update(asked)
                    if late:
                        self._unreleased.setdefault(session, set()).update(pids)
        for promise in tick.promises:
            kind, link, pids, _ = promise
            if kind > PUBREC:
                self._waiting.append(promise)
                continue
            link.receiving -= len(pids)
            if link.phase is not OPEN:
                continue
            if link.v5:
                first = b"\x40\x03" if kind is PUBACK else b"\x50\x03"
                link.outbox.put(b"".join([first + pid + b"\x97" for pid in pids]))
            else:
                # MQTT 3 has no negative acknowledgement: without one the client keeps the message.
                broker.close(link, 0x97, "the log takes no more messages")

    def took_back(self, session: Session, pid: bytes) -> bool:
        """Whether a QoS 2 message of which the publisher has heard nothing was refused."""
        return pid in self._taken_back.get(session, ())

    def released(self, session: Session, pids: list[bytes]) -> None:
        """The publisher lets go of messages that were taken, perhaps after earlier ones with their ids were refused."""
        if session in self._taken_back:
            self._taken_back[session].difference_update(pids)

    def ended(self, session: Session) -> None:
        self._taken_back.pop(session, None)
        self._unreleased.pop(session, None)

    def _keep(self, promises: list[Promise]) -> None:
        gone: set[Link] | None = None
        counters = self._broker.counters
        for kind, link, what, reason in promises:
            if link.phase is CLOSED:
                if kind is not CALL:
                    gone = gone or set()
                    gone.add(link)
                continue
            if kind is MESSAGE:
                link.outbox.message_stored(what)
            elif kind is ANSWER:
                link.outbox.kept(what)
            elif kind is CALL:
                what()
            else:
                if kind not in UNFINISHED:
                    link.receiving = max(0, link.receiving - len(what))  # an earlier connection's are not counted
                counters.messages_sent += len(what)
                link.outbox.put(_acknowledgements(kind, what, reason))
        for link in gone or ():
            self._report("answer.undeliverable", {"client": link.client_id, "peer": link.peer})  # S1.12

    # ── no room ──

    def note(self, session: Session) -> None:
        """While the log refuses: a session has changed, and is to be written as it then is."""
        self._unnoted[session.number] = session

    def note_end(self, session: Session) -> None:
        if session.known:
            self._unnoted[session.number] = None
        else:
            self._unnoted.pop(session.number, None)

    def limit(self, full: str) -> None:
        """From now on the log may not grow, for the reason given; or it may again, for an empty one."""
        self.full = full
        if full:
            self._lost(DiskFull(full))
        elif not self.on:
            self.retry()

    def _lost(self, error: StorageError) -> None:
        if self.on:
            self.on = False
            if not self._trying:
                self._report("log.refused", {"error": str(error)})

    def retry(self) -> None:
        """Is there room now? What could not be written is what is tried."""
        if self.on:
            return
        self._forget_closed()
        if self.full:
            return
        self._broker.settle()  # what sessions are about to receive is not theirs yet
        tick = Tick()
        tick.changes, self._unwritten = self._unwritten, []
        tick.promises, self._waiting = self._waiting, []
        for records in self._catch_up():
            tick.changes += records
            if len(tick.changes) > TICK_CHANGES_MAX:
                break
        unreleased, self._unreleased = self._unreleased, {}
        for session, pids in unreleased.items():
            free = pids - (session.inbound or set())
            if free:
                tick.changes.append(changes.releases(session.number, free))
        if not tick.changes:
            tick.changes.append(NOTHING)  # an append of nothing is always taken
        self.on = self._trying = True
        self.append(tick)
        self._trying = False
        if self.on:
            self._report("log.accepted", {})
            while self._unnoted and self.on:
                more = Tick()
                for records in self._catch_up():
                    more.changes += records
                    if len(more.changes) > TICK_CHANGES_MAX:
                        break
                self.append(more)
        self._broker.request_tick()

    def _forget_closed(self) -> None:
        """Answers that wait for connections that are gone: clients may come and go as long as the log refuses."""
        left = [promise for promise in self._waiting if promise.link.phase is not CLOSED]
        if len(left) < len(self._waiting):
            gone = [promise for promise in self._waiting if promise.link.phase is CLOSED]
            self._waiting = left
            self._keep(gone)  # tells that they cannot be

    def _catch_up(self) -> Iterator[list[bytes]]:
        from tidegate.broker.state import session_records

        while self._unnoted:
            number, session = self._unnoted.popitem()
            if session is None:
                yield [changes.gone(number)]
                continue
            for reader in session.readers():
                reader.written = self._broker.delivery.positions(reader)
            yield session_records(self._broker, session)

    # ── the disk is behind ──

    def throttle(self, link: Link) -> None:
        """Read nothing more from a link, whose packets made something to store, until the disk has caught up."""
        if link.phase is OPEN:
            self._throttled.add(link)
            link.stop(Stop.DISK)

    def forget(self, link: Link) -> None:
        self._throttled.discard(link)


def _acknowledgements(kind: Kind, pids: list[bytes], reason: int) -> bytes:
    """PUBACKs, PUBRECs or PUBCOMPs for many packet ids at once."""
    first = _FIRST[kind]
    if not reason:
        return first + b"\x02" + (first + b"\x02").join(pids)
    end = bytes((reason,))
    return first + b"\x03" + (end + first + b"\x03").join(pids) + end


NOTHING = changes.positions(())  # a record that says nothing: whether the log takes one
UNKNOWN = 1 << 62  # the ticket of an append that is still to be made
_FIRST = {
    PUBACK: b"\x40",
    PUBREC: b"\x50",
    PUBCOMP: b"\x70",
    TAKEN_PUBACK: b"\x40",
    TAKEN_PUBREC: b"\x50",
}
UNFINISHED = (PUBREC, TAKEN_PUBREC)  # PUBREL and PUBCOMP follow
TAKEN = {PUBACK: TAKEN_PUBACK, PUBREC: TAKEN_PUBREC}
