"""Hands messages to readers: what the log announces to those that are live, what it has stored to those behind.

One mechanism for everyone. A live reader gets each announcement straight away. When its client has no room, it keeps
its cursors and from then on reads the log from there, in turns with all others that are behind, until it has reached
every partition's end again. A session that returns, a restart, and `$replay` are the same thing with other cursors.

A turn first sends again what was in flight when the connection broke (same packet ids, DUP set), for groups what came
back from members, and then goes on from the cursors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tidegate.delivery.gate import Gate, Job
from tidegate.delivery.group import Group
from tidegate.delivery.outbox import Outbox, Post
from tidegate.delivery.retained_rows import rows_of
from tidegate.delivery.routes import RouteTable, Target, Targets
from tidegate.delivery.tail import Tail, row_from
from tidegate.delivery.tick import Stretch
from tidegate.delivery.wanted import WantedFilters
from tidegate.limits import (
    CATCH_UP_BYTES,
    CATCH_UP_HELD_BYTES_MAX,
    CATCH_UP_ROWS,
    FANOUT_FREE,
    FANOUT_MAX,
    MATCHES_STEP,
    PACKET_IDS,
    PARTITION_SHIFT,
    READER_TARGETS_MAX,
)
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.rows import Rows, by_time
from tidegate.log.run import QOS_MASK
from tidegate.ports.commitlog import CommitLog
from tidegate.router import matches
from tidegate.session import changes
from tidegate.session.flights import Begun, Flight, State
from tidegate.session.link import OPEN
from tidegate.session.reader import AWAY, BEHIND, BLOCKED, GONE, LIVE, READING, RESENDING, Reader
from tidegate.session.session import Session, Subscription

# Up to this many filters a reader matches topics one by one; above, it asks the index of all subscriptions.
NAIVE_FILTERS_MAX = 32

# What a turn costs beside what it hands over, in the gate's units.
TURN_UNITS = 4

# What a stored message costs in memory beside its bytes, roughly: its share of lists and object headers.
ROW_OVERHEAD = 200
BATCH_OVERHEAD = 1000


class Delivery:
    def __init__(
        self,
        log: CommitLog,
        table: RouteTable,
        post: Post,
        gate: Gate,
        tail_bytes: int,
        on_overrun: Callable[[Reader, int, int], None],
        on_damage: Callable[[Reader, int, int, int], None],
    ) -> None:
        self.log = log
        self.table = table
        self.post = post
        self.gate = gate
        self.on_overrun = on_overrun  # (reader, first position lost, first position left)
        self.on_damage = on_damage  # (reader, messages lost at most, from this position, up to that)
        self.ends = list(log.ends)
        self.tails = [Tail(tail_bytes // len(self.ends), end) for end in self.ends]
        self.moved: set[Reader] = set()  # readers whose position is to be written
        self.later: list[Reader] = []  # their read failed for the moment: they ask again
        self._matches = 0  # filters that matched the topics of this step

    # ── live ──

    def announced(self, partition: int, rows: Rows, stretches: Sequence[Stretch] | None, size: int) -> None:
        """The log has these messages now: hand them to every live reader."""
        positions = rows.positions
        self.tails[partition].add(rows, 2 * size + ROW_OVERHEAD * len(rows) + BATCH_OVERHEAD)
        self.ends[partition] = positions[-1] + 1
        spare = FANOUT_MAX
        for stretch in stretches if stretches is not None else self._stretches(rows):
            a, b = stretch.start, stretch.stop
            targets = stretch.targets.list
            if len(targets) > FANOUT_FREE:
                # So many that others would wait: those that are left read it at the gate, in turns.
                for target in targets[spare:]:
                    if target.reader.live:
                        self._behind_from(target.reader, positions[a])
                targets, spare = targets[:spare], max(0, spare - len(targets))
            for target in targets:
                reader = target.reader
                if not reader.live:
                    continue
                if target.link is None:
                    reached = reader.deal(rows, a, b)  # type: ignore[attr-defined]
                    if reached == b and reader.redo:  # type: ignore[attr-defined]
                        self._behind_from(reader, positions[b - 1] + 1)
                else:
                    reached = target.link.outbox.send(target, rows, a, b, stretch)
                if reached < b:
                    self.block(reader, positions[reached])

    def _stretches(self, rows: Rows) -> list[Stretch]:
        """Of rows that come without: where to, is looked up."""
        found: list[Stretch] = []
        start = 0
        targets: Targets | None = None
        known: dict[bytes, Targets] = {}
        topics, flags, publishers = rows.topics, rows.flags, rows.publishers
        for row, topic in enumerate(topics):
            its = known.get(topic)
            if its is None:
                its = known[topic] = self.table.resolve(topic)
            if its is not targets or flags[row] != flags[start] or publishers[row] != publishers[start]:
                if targets is not None:
                    found.append(Stretch(start, row, targets, {}))
                start, targets = row, its
        if targets is not None:
            found.append(Stretch(start, len(rows), targets, {}))
        return found

    def unstored(self, rows: Rows, *, even_behind: bool = False) -> None:
        """QoS 0 messages that are kept out of the log: whoever is not live right now does not get them, unless order
        does not matter (`even_behind`) and its socket takes them."""
        rows.positions = [self.ends[0]] * len(rows)
        rows.time_ms = self.post.now_ms
        for stretch in self._stretches(rows):
            for target in stretch.targets.list:
                reader, link = target.reader, target.link
                reached = stretch.start
                if link is None:
                    if reader.live:
                        reached = reader.deal(rows, stretch.start, stretch.stop)  # type: ignore[attr-defined]
                        reached -= reader.give_up(self.ends[0])  # type: ignore[attr-defined]
                elif reader.live or even_behind:
                    reached = link.outbox.send(target, rows, stretch.start, stretch.stop, stretch)
                if reached < stretch.stop:
                    self.post.counters.dropped["not stored, reader behind"] += stretch.stop - reached

    # ── coming and going ──

    def attach(self, reader: Reader) -> None:
        """Its client is there."""
        if reader.standing is AWAY:
            if reader.seeking:
                reader.enter(READING)
            elif not isinstance(reader, Group) and self._at_end(reader):
                reader.enter(LIVE)
            else:
                reader.enter(BEHIND)
                self._queue(reader)

    def resend(self, reader: Reader) -> None:
        """Its client is there again, and had messages that it did not acknowledge."""
        reader.enter(RESENDING)
        self._queue(reader)

    def detach(self, reader: Reader) -> None:
        """Its client is gone; it keeps its place."""
        if reader.live:
            reader.cursors = list(self.ends)
        reader.enter(AWAY)
        self.release(reader)

    def end(self, reader: Reader) -> None:
        reader.enter(GONE)
        self.release(reader)
        self.moved.discard(reader)

    def release(self, reader: Reader) -> None:
        """Give back what only a reader with a client needs."""
        self.gate.held_bytes -= reader.held_bytes
        reader.held, reader.held_bytes = None, 0
        reader.targets = reader.wanted = None
        reader.reads += 1  # an answer that is on its way is of no use
        reader.again = None

    def behind(self, reader: Reader) -> None:
        """It has something to do before it is live."""
        if reader.live:
            reader.cursors = list(self.ends)
        if reader.standing in (LIVE, BLOCKED):
            reader.enter(BEHIND)
            self._queue(reader)

    def _behind_from(self, reader: Reader, position: int) -> None:
        """A live reader reads what was announced, from this position on, when it has a turn."""
        reader.cursors = list(self.ends)
        reader.cursors[position >> PARTITION_SHIFT] = position
        reader.enter(BEHIND)
        self._queue(reader)

    def block(self, reader: Reader, position: int) -> None:
        """Its client has no room. It goes on at `position` when there is some."""
        if reader.live:
            reader.cursors = list(self.ends)
        reader.cursors[position >> PARTITION_SHIFT] = position
        self._wait(reader)

    def _wait(self, reader: Reader) -> None:
        reader.enter(BLOCKED)
        if isinstance(reader, Group):
            links = [member.session.link for member in reader.members]
        else:
            links = [reader.session.link]  # type: ignore[union-attr]
        for link in links:
            if link is not None:
                link.outbox.waiting[reader] = None

    def unblock(self, outbox: Outbox) -> None:
        """The link has room: whoever waited for it gets a turn."""
        waiting, outbox.waiting = outbox.waiting, {}
        for reader in waiting:
            if reader.standing is BLOCKED:
                reader.enter(BEHIND if reader.again is None else RESENDING)
                self._queue(reader)

    def found(self, reader: Reader, cursors: list[int]) -> None:
        """The place where a reader is to begin."""
        if reader.standing is GONE:
            return
        reader.seeking = False
        reader.cursors = cursors
        self.moved.add(reader)
        if reader.standing is READING:
            reader.enter(BEHIND)
            self._queue(reader)

    def from_position(self, position: int) -> list[int]:
        """Cursors that begin at a position of one partition, and at the end of all others."""
        cursors = list(self.ends)
        partition = position >> PARTITION_SHIFT
        if partition < len(cursors):
            cursors[partition] = min(position, cursors[partition])
        return cursors

    def ask_again(self) -> None:
        """Reads that failed for the moment are tried once more."""
        later, self.later = self.later, []
        for reader in later:
            if reader.standing is READING:
                reader.enter(BEHIND if reader.again is None else RESENDING)
                self._queue(reader)

    def _queue(self, reader: Reader) -> None:
        if not reader.queued:
            reader.queued = True
            self.gate.add(self._turns(reader))

    def _turns(self, reader: Reader) -> Job:
        """A reader's turns, as long as it has something to do."""
        while reader.standing in (BEHIND, RESENDING) and self._attended(reader):
            yield TURN_UNITS + self._step(reader)
        reader.queued = False

    def _attended(self, reader: Reader) -> bool:
        if isinstance(reader, Group):
            return reader.attended
        link = reader.session.link  # type: ignore[union-attr]
        return link is not None and link.phase is OPEN

    def _at_end(self, reader: Reader) -> bool:
        return all(cursor >= end for cursor, end in zip(reader.cursors, self.ends, strict=True))

    # ── one step ──

    def _step(self, reader: Reader) -> int:
        """Do a little for a reader that is behind: what it cost."""
        self._matches = 0
        if reader.standing is RESENDING:
            return self._send_again(reader)
        if reader.subscription is not None:
            # What was in flight comes first, in its order; then this reader gets its turn again.
            if reader.session.reader.again is not None:  # type: ignore[union-attr]
                self._wait(reader)
                return 1
            self.moved.add(reader)  # replayed QoS 0 messages have no acknowledgement that would tell
        if isinstance(reader, Group) and reader.redo:
            return self._redo(reader)
        if reader.held is not None:
            return self._through_held(reader)
        for partition, (cursor, end) in enumerate(zip(reader.cursors, self.ends, strict=True)):
            if cursor < end:
                if cursor >= self.tails[partition].floor:
                    return self._through_tail(reader, partition)
                return self._read(reader, partition)
        reader.enter(LIVE)
        reader.targets = reader.wanted = None
        return 1

    def _through_tail(self, reader: Reader, partition: int) -> int:
        tail = self.tails[partition]
        # More than a tick brings, or it would never arrive.
        budget = most = max(CATCH_UP_ROWS, 2 * tail.newest())
        while budget > 0:
            found = tail.from_position(reader.cursors[partition])
            if found is None:
                reader.cursors[partition] = self.ends[partition]
                break
            rows, row = found
            stop = min(len(rows), row + budget)
            budget -= stop - row
            reached = self._offer(reader, rows, row, stop)
            if reached < stop:
                reader.cursors[partition] = rows.positions[reached]
                break
            reader.cursors[partition] = max(reader.cursors[partition], rows.positions[stop - 1] + 1)
        return most - budget + self._matches // 8

    def _offer(self, reader: Reader, rows: Rows, a: int, b: int) -> int:
        """Hand over what the reader wants of these rows: the row reached. If it had to stop within, it is blocked, or
        this step has had its share."""
        positions, topics, flags = rows.positions, rows.topics, rows.flags
        partition = positions[a] >> PARTITION_SHIFT
        group = reader if isinstance(reader, Group) else None
        own = reader.subscription
        session = reader.session
        live_from = -1  # below it QoS 0 messages are not owed
        since = -1  # below it some filter is younger than the message
        if group is not None:
            live_from = group.live_from[partition]
        elif own is None:
            assert session is not None
            live_from = session.live_from[partition]
            since = session.since_max[partition] if session.since_max else -1
        skip = reader.skip
        targets = reader.targets
        if targets is None:
            targets = reader.targets = {}
        row = a
        while row < b:
            if self._matches > MATCHES_STEP:
                return row
            if skip is not None and positions[row] in skip:
                row += 1
                continue
            target = self._target(reader, topics[row], positions[row] if positions[row] < since else -1)
            flag = flags[row]
            stop = row + 1
            if skip is None and positions[row] >= since:
                while stop < b and flags[stop] == flag:
                    topic = topics[stop]
                    if self._matches > MATCHES_STEP:
                        break
                    if (targets[topic] if topic in targets else self._target(reader, topic, -1)) is not target:
                        break
                    stop += 1
            if target is None:
                row = stop
                continue
            if positions[row] < live_from:
                qos = target.qos
                if target.no_local:
                    stop = row + 1  # whose it is decides
                    if rows.publishers[row] == session.client_id:  # type: ignore[union-attr]
                        narrowed = target.without_own()
                        qos = narrowed.qos if narrowed is not None else 0
                if not min(flag & QOS_MASK, qos):
                    row = min(stop, max(row + 1, row_from(positions, live_from)))
                    continue
            if group is not None:
                reached = group.deal(rows, row, stop)
            else:
                assert target.link is not None
                reached = target.link.outbox.send(target, rows, row, stop, replay=own is not None)
            if reached < stop:
                self.block(reader, positions[reached])
                return reached
            row = stop
        if skip is not None and positions[b - 1] >= skip.stops[-1]:
            reader.skip = None
        return b

    # ── what a reader wants ──

    def _target(self, reader: Reader, topic: bytes, position: int) -> Target | None:
        """How a topic's messages are put for a reader, None if it does not want them. `position`: of a message that is
        older than some filter of it; else -1."""
        targets: dict[Any, Target | None] = reader.targets  # type: ignore[assignment]
        if position < 0 and topic in targets:
            return targets[topic]
        if len(targets) >= READER_TARGETS_MAX:
            targets.clear()
        found: tuple[Subscription, ...]
        if isinstance(reader, Group):
            found = tuple(reader.members) if matches(reader.key[1], topic) else ()
        elif reader.subscription is not None:
            found = (reader.subscription,) if matches(reader.subscription.pattern, topic) else ()
        else:
            found = tuple(self.matching(reader.session, topic))  # type: ignore[arg-type]
            self._matches += len(found)
            if position >= 0:
                # Some filter is younger than this message: decide for this message alone (S2.16).
                partition = position >> PARTITION_SHIFT
                found = tuple(s for s in found if s.since[partition] <= position)
        target = targets.get(found) if found else None
        if found and target is None:
            link = reader.session.link if reader.session is not None else None
            target = targets[found] = Target(reader, link, found)
        if position < 0:
            targets[topic] = target
        return target

    def matching(self, session: Session, topic: bytes) -> list[Subscription]:
        """The session's plain subscriptions that match."""
        if len(session.subscriptions) <= NAIVE_FILTERS_MAX:
            return [s for s in session.subscriptions.values() if s.reader is None and matches(s.pattern, topic)]
        found = self.table.index.match(topic)
        self._matches += len(found)
        return [s for s in found if s.session is session and s.reader is None]

    def _wanted(self, reader: Reader) -> Wanted:
        """The reader's filters as the log's index takes them. Used on another thread: holds no live state."""
        if isinstance(reader, Group):
            patterns = [reader.key[1]]
        elif reader.subscription is not None:
            patterns = [reader.subscription.pattern]
        else:
            assert reader.session is not None
            patterns = [s.pattern for s in reader.session.subscriptions.values() if s.reader is None]
        return WantedFilters(patterns)

    def filters_changed(self, reader: Reader) -> None:
        reader.targets = reader.wanted = None

    # ── from disk ──

    def _read(self, reader: Reader, partition: int) -> int:
        """Ask for what follows the cursor in a partition."""
        cursor = reader.cursors[partition]
        floor = self.log.floors[partition]
        if cursor < floor:
            self.on_overrun(reader, cursor, floor)
            reader.cursors[partition] = floor
            return 1
        if reader.wanted is None:
            reader.wanted = self._wanted(reader)
        end = max(self.tails[partition].floor, cursor + 1)

        def take(read: Read) -> None:
            if read.damaged:
                self.on_damage(reader, read.damaged, cursor, read.next_position)
            self._hold(reader, by_time(read.runs), read.next_position)

        reader.reads_from = NEVER_COVERED  # what is not wanted is left out
        self._ask(reader, cursor, end, reader.wanted, take)
        return 16

    def _ask(
        self, reader: Reader, position: int, end: int, wanted: Wanted | None, take: Callable[[Read], None]
    ) -> None:
        reader.enter(READING)
        reader.reads += 1
        asked = reader.reads

        def done(read: Read) -> None:
            if reader.standing is not READING or reader.reads != asked:
                return  # so much has happened while it was read
            if not read.runs and read.next_position <= position:
                self.later.append(reader)  # it could not be read for the moment
                return
            take(read)
            reader.enter(BEHIND if reader.again is None else RESENDING)
            self._queue(reader)

        self.log.read(position, end, CATCH_UP_BYTES, wanted, done)

    def _hold(self, reader: Reader, batches: list[Rows], end: int) -> None:
        reader.held = deque(batches)
        reader.held_ends = end
        reader.held_bytes = sum(sum(map(len, rows.payloads)) + ROW_OVERHEAD * len(rows) for rows in batches)
        self.gate.held_bytes += reader.held_bytes

    def _let_go(self, reader: Reader) -> None:
        self.gate.held_bytes -= reader.held_bytes
        reader.held, reader.held_bytes = None, 0

    def _through_held(self, reader: Reader) -> int:
        held = reader.held
        assert held is not None
        partition = reader.held_ends >> PARTITION_SHIFT
        cost = 1
        while held and cost < CATCH_UP_ROWS:
            rows = held[0]
            row = row_from(rows.positions, reader.cursors[partition])
            if row < len(rows):
                cost += len(rows) - row
                reached = self._offer(reader, rows, row, len(rows))
                if reached < len(rows):
                    # What was read is kept for when it goes on, unless all readers together hold too much.
                    reader.cursors[partition] = rows.positions[reached]
                    if self.gate.held_bytes > CATCH_UP_HELD_BYTES_MAX:
                        self._let_go(reader)
                    return cost + self._matches // 8
                reader.cursors[partition] = max(reader.cursors[partition], rows.positions[-1] + 1)
            held.popleft()
        if not held:
            reader.cursors[partition] = max(reader.cursors[partition], reader.held_ends)
            self._let_go(reader)
        return cost

    def _find(self, reader: Reader, position: int, end: int) -> tuple[Rows, int] | None:
        """The row at a position: from memory; or None, and the reader waits for a read, or (rows, -1) if it is gone."""
        partition = position >> PARTITION_SHIFT
        found = self.tails[partition].find(position)
        if found is not None:
            return found
        for rows in reader.held or ():
            row = row_from(rows.positions, position)
            if row < len(rows) and rows.positions[row] == position:
                return rows, row
        covered = reader.held is not None and reader.held_ends > position >= reader.reads_from
        if covered or position < self.log.floors[partition] or position >= self.tails[partition].floor:
            return NOWHERE, -1
        self._let_go(reader)
        reader.reads_from = position

        def take(read: Read) -> None:
            self._hold(reader, by_time(read.runs), read.next_position)

        self._ask(reader, position, end, None, take)
        return None

    # ── again after a broken connection ──

    def _send_again(self, reader: Reader) -> int:
        """Send flights again with their packet ids [MQTT-4.4.0-1]."""
        session: Session = reader.session  # type: ignore[assignment]
        outbox: Outbox = session.link.outbox  # type: ignore[union-attr]
        flights = session.in_flight()
        cost = 1
        while cost < CATCH_UP_ROWS:
            flight = flights.from_number(reader.again or 0)
            if flight is None or flight.number >= reader.again_end:
                self._sent_again(reader)
                return cost
            at = max(0, (reader.again or 0) - flight.number)
            if flight.state is not State.SENT:
                reader.again = flight.number + flight.count
                continue
            if not outbox.room() or outbox.used >= outbox.window:
                self._wait(reader)
                return cost
            stop = min(flight.count, reader.again_end - flight.number)  # it may have grown since
            if at or stop < flight.count:
                flight = flights.cut(flight, at, stop - at)
            if flight.message is not None:
                found: tuple[Rows, int] | None = (rows_of([flight.message], self.post.now_ms), 0)
            else:
                last = flight.positions[-1]
                found = self._find(reader, flight.positions[0], max(last, flight.positions[0]) + 1)
            if found is None:
                return cost
            rows, row = found
            if row < 0:
                self.post.counters.dropped["no longer stored"] += 1
                self.post.tick.changes.append(done_record(session, flight, 0, 1))
                flights.finish(flight, 0, 1)
                cost += 1
                continue
            number = flight.number  # what is too large for the client is finished within
            target_of = partial(self._resend_target, session, flight.reader)
            sent = outbox.send_again(target_of, flight, rows, row, self._matched_enough)
            reader.again = number + sent
            cost += sent
            if self._matched_enough():
                break
        return cost + self._matches // 8

    def _matched_enough(self) -> bool:
        return self._matches > MATCHES_STEP

    def _resend_target(self, session: Session, reader: Reader, topic: bytes) -> Target | None:
        if isinstance(reader, Group):
            found = [member for member in reader.members if member.session is session]
        elif reader.number:
            if reader.targets is None:
                reader.targets = {}
            return self._target(reader, topic, -1)
        else:
            found = self.matching(session, topic)
        return Target(reader, session.link, found) if found else None

    def _sent_again(self, reader: Reader) -> None:
        session: Session = reader.session  # type: ignore[assignment]
        self._let_go(reader)
        reader.again = None
        reader.enter(BEHIND)
        self.unblock(session.link.outbox)  # type: ignore[union-attr]

    def _redo(self, group: Group) -> int:
        """Hand out again what members gave back."""
        cost = 0
        while group.redo and cost < CATCH_UP_ROWS:
            position = group.redo[0]
            found = self._find(group, position, group.redo[-1] + 1)
            if found is None:
                return cost + 16
            rows, row = found
            cost += 1
            if row < 0:
                self.post.counters.dropped["no longer stored"] += 1
                del group.redo[0]
                continue
            del group.redo[0]
            if group.deal(rows, row, row + 1) == row:
                group.redo.insert(0, position)
                self._wait(group)
                return cost
            for member in group.members:
                member.session.in_flight().scrambled = True
        if not group.redo and group.held is not None:
            self._let_go(group)
        return cost + 1

    # ── positions ──

    def positions(self, reader: Reader, begun: Begun | None = None) -> tuple[int, ...]:
        """Per partition: everything before it is acknowledged or not owed (I2). `begun` makes many of one session
        quick."""
        places = self.ends if reader.live else reader.cursors
        if isinstance(reader, Group):
            lows = [self._lowest(member.session, reader, 1, begun) for member in reader.members]
            for position in reader.redo:
                low: list[int | None] = [None] * len(places)
                low[position >> PARTITION_SHIFT] = position
                lows.append(low)
                if len(places) == 1:
                    break  # they are in order
        else:
            lows = [self._lowest(reader.session, reader, 2, begun)]  # type: ignore[arg-type]
        found = list(places)
        for low_of in lows:
            for partition, lowest in enumerate(low_of or ()):
                if lowest is not None and lowest < found[partition]:
                    found[partition] = lowest
        return tuple(found)

    def _lowest(
        self, session: Session, reader: Reader, qos_max: int, begun: Begun | None
    ) -> list[int | None] | None:
        flights = session.flights
        return flights.lowest(reader, len(self.ends), qos_max, begun) if flights is not None else None

    def finished_above(
        self, reader: Reader, positions: tuple[int, ...], begun: Begun | None = None
    ) -> list[tuple[int, int]]:
        """What is finished although it lies above the reader's position: everything up to its cursors but what is in
        flight, and what it is to skip."""
        places = self.ends if reader.live else reader.cursors
        skipped = reader.skip.ranges() if reader.skip is not None else []
        if all(place <= position for place, position in zip(places, positions, strict=True)):
            return skipped
        sessions = [m.session for m in reader.members] if isinstance(reader, Group) else [reader.session]
        busy: list[int] = list(reader.redo) if isinstance(reader, Group) else []
        spans: list[tuple[int, int]] = [(position, position + 1) for position in busy]
        for session in sessions:
            if session is not None and session.flights is not None:
                flights = session.flights
                for flight in begun.of(flights, reader) if begun is not None else flights.of(reader):
                    if flight.positions.step == 1:
                        spans.append((flight.positions.start, flight.positions.stop))
                    else:
                        spans += [(p, p + 1) for p in flight.positions]
        spans.sort()
        found = skipped
        at = dict(enumerate(positions))
        for first, after in spans:
            partition = first >> PARTITION_SHIFT
            if first >= places[partition]:
                continue  # sent before a restart; what lies between is still to be read
            if first > at[partition]:
                found.append((at[partition], first))
            at[partition] = max(at[partition], after)
        for partition, place in enumerate(places):
            if place > at[partition] and at[partition] > positions[partition]:
                found.append((at[partition], place))
        return found


NOWHERE = Rows()
NEVER_COVERED = 2**63


def done_record(session: Session, flight: Flight, at: int, count: int) -> bytes:
    pid = (flight.number + at - 1) % PACKET_IDS + 1
    return changes.flights(
        session.number, flight.reader.number, pid, flight.qos, State.DONE, flight.positions[at : at + count]
    )
