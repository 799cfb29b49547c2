"""Readers that are behind: each turn takes a bounded step through the log, from memory or from disk.

A turn first sends again what was in flight when the connection broke (same packet ids, DUP set), for groups what
came back from members, and then goes on from the cursor. Whoever reaches the end is live again.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.delivery.dispatcher import Dispatcher, replay_properties
from tidegate.delivery.encode import blob, encode_one, property_block
from tidegate.delivery.group import Group
from tidegate.delivery.routes import Target
from tidegate.delivery.tail import run_at
from tidegate.limits import (
    CATCH_UP_BYTES,
    CATCH_UP_HELD_BYTES_MAX,
    CATCH_UP_READERS,
    CATCH_UP_RUNS,
    READER_TARGETS_MAX,
    SEND_BYTES_MAX,
)
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.log.run import QOS_MASK, RETAIN, Run
from tidegate.router import has_wildcard, literal_prefix, matches
from tidegate.session.flights import PIDS, Flight, State
from tidegate.session.link import Link
from tidegate.session.session import Reader, Session, Subscription

# A topic that is being published to has its targets ready; among so many the reader's own is soon found.
ROUTE_TARGETS_MAX = 8

# Up to this many filters a reader matches topics one by one; above, it asks the index of all subscriptions.
NAIVE_FILTERS_MAX = 32


class CatchUp:
    def __init__(
        self,
        dispatcher: Dispatcher,
        on_overrun: Callable[[Reader, int, int], None],
        on_damage: Callable[[Reader, int, int, int], None],
        retained_at: Callable[[int], Run | None],
        moved: set[Reader],
    ) -> None:
        self.dispatcher = dispatcher
        self.on_overrun = on_overrun  # (reader, first position lost, first position left)
        self.on_damage = on_damage  # (reader, messages lost at most, from this position, up to that)
        self.retained_at = retained_at
        self.moved = moved  # readers whose position is to be written
        self.held_bytes = 0

    def turn(self) -> None:
        """One step for the next few readers that wait for one."""
        behind = self.dispatcher.behind
        for _ in range(min(len(behind), CATCH_UP_READERS)):
            reader = behind.popleft()
            reader.queued = False
            if not reader.live and not reader.blocked and not reader.reading and self.dispatcher.attached(reader):
                self._step(reader)
        if behind:
            self.dispatcher.request_tick()

    def release(self, reader: Reader) -> None:
        """The reader is going away: give back what it holds."""
        self.held_bytes -= reader.held_bytes
        reader.held, reader.held_bytes = None, 0
        reader.targets = reader.wanted = None

    # ── one step ──

    def _step(self, reader: Reader) -> None:
        dispatcher = self.dispatcher
        if reader.resend is not None and not self._resend(reader):
            return
        if reader.subscription is not None:
            # What was in flight comes first, in its order; then this reader gets its turn again.
            if reader.session.reader.resend is not None:  # type: ignore[union-attr]
                return
            self.moved.add(reader)  # replayed QoS 0 messages have no acknowledgement that would tell
        if isinstance(reader, Group) and reader.redo and not self._redo(reader):
            return
        if reader.held is not None:
            runs, reader.held = reader.held, None
            self.held_bytes -= reader.held_bytes
            reader.held_bytes = 0
            self._through_held(reader, runs, reader.held_end)
        elif reader.cursor >= dispatcher.log.end:
            self._arrive(reader)
        elif reader.cursor >= dispatcher.tail.floor:
            self._through_tail(reader)
        else:
            self._read(reader)

    def _arrive(self, reader: Reader) -> None:
        reader.live = True
        reader.targets = reader.wanted = None

    def _through_tail(self, reader: Reader) -> None:
        tail = self.dispatcher.tail
        # More than a tick brings, or it would never arrive.
        budget = max(CATCH_UP_RUNS, 2 * len(tail.batches[-1]))
        index = tail.batch_at(reader.cursor)
        while index < len(tail.batches):
            batch = tail.batches[index]
            first = run_at(batch, reader.cursor)
            some = batch[first : first + budget]
            if not self._offer_all(reader, some):
                return
            reader.cursor = max(reader.cursor, some[-1].base + some[-1].count)
            budget -= len(some)
            if not budget:
                self.dispatcher.queue(reader)
                return
            index += 1
        reader.cursor = self.dispatcher.log.end
        self._arrive(reader)

    def _offer_all(self, reader: Reader, runs: list[Run]) -> bool:
        """Hand over what the reader wants of these runs; False if it had to stop within.

        Plain messages with QoS 1 that are runs of their own are collected and sent together."""
        together = reader.session is not None and reader.skip is None and reader.subscription is None
        lowest = reader.cursor
        some: list[tuple[Target, Run]] = []
        for run in runs:
            if (
                together
                and run.flags == 1
                and run.count == 1
                and run.base >= lowest
                and run.properties is None
                and run.expiries is None
            ):
                target = self._target(reader, run)
                if target is None:
                    continue
                if target.fast and target.qos:
                    some.append((target, run))
                    continue
            if some and not self._send_lone(reader, some):
                return False
            if not self._offer(reader, run):
                return False
            some = []
        return not some or self._send_lone(reader, some)

    def _send_lone(self, reader: Reader, some: list[tuple[Target, Run]]) -> bool:
        sent = self.dispatcher.send_lone(reader, some)
        if sent < len(some):
            self.dispatcher.block(reader, some[sent][1].base)
        return sent == len(some)

    def _offer(self, reader: Reader, run: Run) -> bool:
        """Hand over what the reader wants of a run; False if it had to stop within."""
        start = reader.cursor - run.base
        if start >= run.count:
            return True
        start = max(start, 0)
        target = self._target(reader, run)
        if target is None:
            return True
        reached = self._deliver(reader, target, run, start)
        if reached < run.count:
            self.dispatcher.block(reader, run.base + reached)
            return False
        return True

    def _deliver(self, reader: Reader, target: Target, run: Run, start: int) -> int:
        dispatcher = self.dispatcher
        qos = min(run.flags & QOS_MASK, target.qos)
        fast = target.fast and not run.flags & RETAIN and run.expiries is None and reader.skip is None
        if fast and reader.subscription is not None:
            fast = not target.v5  # else each message tells its own time and position
        elif fast:
            fast = qos > 0 or run.base + start >= reader.session.live_from  # type: ignore[union-attr]
        if not fast:
            return dispatcher.deliver_plainly(reader, target, run, start, True)
        link: Link = target.link  # type: ignore[assignment]
        if link.out_bytes > SEND_BYTES_MAX:
            return start
        if qos:
            return dispatcher.send_run(reader, target, run, start, qos)
        if start or run.count == 1:  # a variant of one message is not worth keeping
            return dispatcher.deliver_plainly(reader, target, run, start, True)
        dispatcher.emit(link, blob(run, target.key0))
        dispatcher.counters.publishes_sent += run.count
        return run.count

    # ── what a reader wants ──

    def _target(self, reader: Reader, run: Run) -> Target | None:
        session = reader.session
        own = reader.subscription
        if isinstance(reader, Group):
            assert reader.key is not None
            return Target(reader, None, reader.members) if matches(reader.key[1], run.topic) else None
        assert session is not None
        if own is not None:
            if not matches(own.pattern, run.topic):
                return None
            if reader.targets is None:
                reader.targets = {b"": Target(reader, session.link, [own])}  # one for all topics
            return reader.targets[b""]  # type: ignore[no-any-return]
        if run.base < session.since_max:
            # Some filter is younger than this message: decide for this message alone (S2.16).
            found = [s for s in self._matching(session, run.topic) if s.since <= run.base]
            return Target(reader, session.link, found) if found else None
        route = self.dispatcher.table.routes.get(run.topic)
        if route is not None and len(route.targets) <= ROUTE_TARGETS_MAX:
            for target in route.targets:
                if target.reader is reader:
                    return target
            return None
        targets = reader.targets
        if targets is None or len(targets) >= READER_TARGETS_MAX:
            targets = reader.targets = {}
        if run.topic in targets:
            known: Target | None = targets[run.topic]
            return known
        matching = tuple(self._matching(session, run.topic))
        if matching not in targets:
            targets[matching] = Target(reader, session.link, matching) if matching else None
        targets[run.topic] = targets[matching]
        return targets[matching]  # type: ignore[no-any-return]

    def _matching(self, session: Session, topic: bytes) -> list[Subscription]:
        if len(session.subscriptions) <= NAIVE_FILTERS_MAX:
            return [s for s in session.subscriptions.values() if s.reader is None and matches(s.pattern, topic)]
        return [s for s in self.dispatcher.table.index.match(topic) if s.session is session and s.reader is None]

    def wanted(self, reader: Reader) -> Wanted:
        """The reader's filters as the log's index takes them. Used on another thread: holds no live state."""
        if isinstance(reader, Group):
            assert reader.key is not None
            patterns = [reader.key[1]]
        elif reader.subscription is not None:
            patterns = [reader.subscription.pattern]
        else:
            assert reader.session is not None
            patterns = [s.pattern for s in reader.session.subscriptions.values() if s.reader is None]
        exact = frozenset(p for p in patterns if not has_wildcard(p))
        wild = [p for p in patterns if has_wildcard(p)]
        return Wanted(
            exact,
            tuple(literal_prefix(p) for p in wild),
            lambda topic: topic in exact or any(matches(p, topic) for p in wild),
        )

    # ── from disk ──

    def _read(self, reader: Reader) -> None:
        dispatcher = self.dispatcher
        floor = dispatcher.log.floor
        if reader.cursor < floor:
            self.on_overrun(reader, reader.cursor, floor)
            reader.cursor = floor
            dispatcher.queue(reader)
            return
        reader.reading = True
        asked = reader.cursor

        def done(read: Read) -> None:
            reader.reading = False
            if not dispatcher.attached(reader) or reader.cursor != asked or reader.held is not None:
                dispatcher.queue(reader)
                return
            if read.damaged:
                self.on_damage(reader, read.damaged, asked, read.next_position)
            self._hold(reader, read.runs, read.next_position)
            dispatcher.queue(reader)

        end = max(dispatcher.tail.floor, reader.cursor + 1)
        if reader.wanted is None:
            reader.wanted = self.wanted(reader)
        dispatcher.log.read(reader.cursor, end, CATCH_UP_BYTES, reader.wanted, done)

    def _through_held(self, reader: Reader, runs: list[Run], end: int) -> None:
        if not self._offer_all(reader, runs):
            # Keep what was read for when the window opens, unless all readers together hold too much.
            if self.held_bytes < CATCH_UP_HELD_BYTES_MAX:
                self._hold(reader, runs[run_at(runs, reader.cursor) :], end)
            return
        reader.cursor = max(reader.cursor, end)
        self.dispatcher.queue(reader)

    def _hold(self, reader: Reader, runs: list[Run], end: int) -> None:
        reader.held = runs
        reader.held_end = end
        reader.held_bytes = sum(map(len, [p for run in runs for p in run.payloads])) + 200 * len(runs)
        self.held_bytes += reader.held_bytes

    def _fetch(self, reader: Reader, position: int, count: int, use: Callable[[list[Run]], None]) -> None:
        """Runs from `position` on, as they follow each other: from memory now, or from disk later. An empty
        list if that position is no longer stored."""
        run = self.dispatcher.tail.find(position)
        if run is not None:
            use([run])
            return
        if position < self.dispatcher.log.floor:
            use([])
            return
        reader.reading = True

        def done(read: Read) -> None:
            reader.reading = False
            if self.dispatcher.attached(reader):
                if read.next_position > position:  # else it was not read, and is asked for again
                    use(_following(read.runs, position))
                self.dispatcher.queue(reader)

        self.dispatcher.log.read(position, position + count, CATCH_UP_BYTES, None, done)

    # ── again after a broken connection ──

    def _resend(self, reader: Reader) -> bool:
        """Send flights again with their packet ids [MQTT-4.4.0-1]; True when all have been."""
        session: Session = reader.session  # type: ignore[assignment]
        link: Link = session.link  # type: ignore[assignment]
        pending: list[Flight] = reader.resend  # type: ignore[assignment]
        while pending:
            flight = pending[0]
            if flight.state is not State.SENT or flight.count == 0:
                pending.pop(0)
                continue
            if link.on_wire >= link.window or link.out_bytes > SEND_BYTES_MAX:
                self.dispatcher.block(reader, reader.cursor)
                return False

            def use(runs: list[Run], flight: Flight = flight) -> None:
                if session.link is not link or pending[:1] != [flight]:
                    return  # so much has happened while it was read
                retained = None if runs else self.retained_at(flight.base)
                for run in runs or (retained,):
                    if not pending or flight is not pending[0] or link.on_wire >= link.window:
                        return
                    pending.pop(0)
                    rest = self._send_again(session, link, flight, run)
                    if rest is not None:
                        pending.insert(0, rest)
                        flight = rest

            self._fetch(reader, flight.base, flight.count, use)
            if reader.reading:
                return False
        reader.resend = None
        for subscription in session.subscriptions.values():
            if subscription.reader is not None and subscription.reader.session is session:
                self.dispatcher.queue(subscription.reader)
        return True

    def _send_again(self, session: Session, link: Link, flight: Flight, run: Run | None) -> Flight | None:
        """Send what the flight has of the run in which it begins; returns the rest of the flight."""
        dispatcher = self.dispatcher
        flights = session.in_flight()
        rest = None
        if run is None:
            if flight.count > 1:  # it may be the only one
                rest = flights.split(flight, 1)
            dispatcher.counters.dropped["no longer stored"] += 1
            flights.drop(flight)
            return rest
        reader = flight.reader
        if isinstance(reader, Group):
            found = [member for member in reader.members if member.session is session]
        elif reader.subscription is not None:
            found = [reader.subscription]
        else:
            found = self._matching(session, run.topic)
        target = Target(reader, link, found) if found else None
        if not link.on_wire:
            link.ack_seen_s = dispatcher.now_s
        room = min(max(1, link.window - link.on_wire), run.base + run.count - flight.base)
        if flight.count > room:
            rest = flights.split(flight, room)
        elapsed_s = max(0, dispatcher.now_ms - run.time_ms) // 1000
        retain = flight.reader.number == 0 or bool(target and target.retain and run.flags & RETAIN)
        too_large: list[int] = []
        for i in range(flight.count):
            index = flight.base + i - run.base
            block = property_block(run, index, target.sub_ids if target else b"", elapsed_s)
            if flight.reader.subscription is not None:
                block += replay_properties(run.time_ms, run.base + index)
            data = encode_one(
                run, index, v5=link.v5, qos=flight.qos, retain=retain, dup=True, pid=PIDS[flight.pid + i], block=block
            )
            if link.packet_max and len(data) > link.packet_max:
                too_large.append(flight.pid + i)
            elif flight.qos == 2:
                dispatcher.emit_stored(link, data)  # its record may still be on its way, if the client is quickly back
            else:
                dispatcher.emit(link, data)
        sent = flight.count - len(too_large)
        link.on_wire += sent
        dispatcher.counters.publishes_sent += sent
        dispatcher.counters.dropped["larger than the client takes"] += len(too_large)  # [MQTT-3.1.2-25]
        for pid in too_large:
            holder = flights.find(pid)
            if holder is not None:
                flights.finish(flights.isolate(holder, pid))
        return rest

    def _redo(self, group: Group) -> bool:
        """Hand out again what members gave back; True when all has been."""
        while group.redo:
            position = group.redo[0]
            taken = False

            def use(runs: list[Run], position: int = position) -> None:
                nonlocal taken
                if not runs:
                    self.dispatcher.counters.dropped["no longer stored"] += 1
                    taken = True
                else:
                    run = runs[0]
                    taken = self.dispatcher.hand_to_member(group, run, position - run.base, run.flags & QOS_MASK)
                    for member in group.members:
                        member.session.in_flight().scrambled = True
                if taken:
                    group.redo.remove(position)
                else:
                    self.dispatcher.block(group, group.cursor)

            self._fetch(group, position, 1, use)
            if group.reading or not taken:
                return False
        return True


def _following(runs: list[Run], position: int) -> list[Run]:
    """Those from the one that holds `position` on, up to the first gap."""
    found: list[Run] = []
    for run in runs:
        if run.base <= position < run.base + run.count:
            found.append(run)
            position = run.base + run.count
        elif found:
            break
    return found
