"""Hands messages to readers: new ones to those that are live, stored ones to those that are behind.

One mechanism for everyone. A reader at the log's end gets each tick's runs straight away. When its window is
full or its socket does not drain, it stops being live: it keeps a cursor, and from then on reads the log from
there, in turns with all others that are behind, until it reaches the end again.

`dirty` are the links with bytes to send, `held` what may be sent only when the log has stored this tick,
`changes` the state records of this tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

from tidegate.counters import Counters
from tidegate.delivery.encode import (
    TOPIC_ALIAS,
    USER_PROPERTY,
    blob,
    encode_one,
    lone,
    parts,
    property_block,
)
from tidegate.delivery.group import Group, can_take
from tidegate.delivery.routes import Route, RouteTable, Target
from tidegate.delivery.tail import Tail
from tidegate.limits import PACKET_IDS, SEND_BYTES_MAX
from tidegate.log.run import NO_EXPIRY, QOS_MASK, RETAIN, Run
from tidegate.ports.commitlog import CommitLog
from tidegate.session import changes
from tidegate.session.flights import PIDS, Flight, Flights, State
from tidegate.session.link import Link, Phase
from tidegate.session.session import Reader, Session

# Messages that are joined before the next look at how much is on its way to the socket.
LONE_MAX = 512

# Retained messages in flight belong to no place in the log; this stands in for their reader.
RETAINED_READER = Reader(0, None, 0)


class Dispatcher:
    def __init__(
        self, log: CommitLog, tail: Tail, table: RouteTable, counters: Counters, wake: Callable[[], None]
    ) -> None:
        self.log = log
        self.tail = tail
        self.table = table
        self.counters = counters
        self.request_tick = wake
        self.now_ms = 0
        self.now_s = 0.0
        self.dirty: list[Link] = []
        self.held: list[tuple[Link, bytes | Callable[[], None]]] = []
        self.changes: list[bytes] = []
        self.behind: deque[Reader] = deque()

    # ── output ──

    def send(self, link: Link, data: bytes) -> None:
        if not link.out:
            self.dirty.append(link)
        link.out.append(data)
        link.out_bytes += len(data)

    def emit(self, link: Link, data: bytes) -> None:
        """Send a message that need not wait for the log, but must not overtake one that does (I3)."""
        if link.holding:
            link.out_bytes += len(data)
            self.emit_stored(link, data)  # and the next one must not overtake this one
        else:
            self.send(link, data)

    def emit_stored(self, link: Link, data: bytes) -> None:
        """Send a message when the log has stored this tick."""
        link.holding += 1
        self.held.append((link, data))
        self.held.append((link, link.let_go))
        self.request_tick()

    def hold(self, link: Link, data: bytes | Callable[[], None]) -> None:
        """Send, or call, when everything appended up to the end of this tick is stored."""
        self.held.append((link, data))
        self.request_tick()

    # ── live delivery ──

    def deliver(self, runs: list[Run]) -> None:
        """Hand this tick's runs, which have just been given positions, to every live reader.

        The loop serves plain QoS 0 and 1 runs in line; everything else goes through `deliver_plainly`,
        which the tests hold to the same results."""
        dirty = self.dirty
        sent = 0
        # The flight that was last added to, and what would go on with it.
        tip: Flight | None = None
        tip_reader: Reader | None = None
        tip_pid = tip_base = 0
        for run in runs:
            flags = run.flags
            count = run.count
            simple = flags < 2 and run.expiries is None
            route: Route = run.route  # type: ignore[assignment]
            for target in route.targets:
                reader = target.reader
                if not reader.live:
                    continue
                if not simple or not target.fast:
                    reached = self.deliver_plainly(reader, target, run, 0, False)
                    if reached < count:
                        self.block(reader, run.base + reached)
                    continue
                link: Link = target.link  # type: ignore[assignment]
                if flags and target.qos:
                    flights = reader.session.flights  # type: ignore[union-attr]
                    on_wire = link.on_wire
                    if flights is None or on_wire + count > link.window or not flights.fits(count):
                        reached = self.send_run(reader, target, run, 0, 1)
                        if reached < count:
                            self.block(reader, run.base + reached)
                        continue
                    # What `take` and `sent` do, without the calls.
                    pid = flights.next_pid
                    flights.next_pid = pid + count if pid + count <= PACKET_IDS else 1
                    if pid == tip_pid and reader is tip_reader and run.base == tip_base:
                        flights.unfinished += count
                        tip.count += count  # type: ignore[union-attr]
                    else:
                        tip = flights.sent(pid, count, run.base, reader)
                        tip_reader = reader
                    tip_pid, tip_base = pid + count, run.base + count
                    if not on_wire:
                        link.ack_seen_s = self.now_s
                    link.on_wire = on_wire + count
                    if count == 1 and run.properties is None:
                        data = lone(1, route.head, PIDS[pid], target.block, run.payloads[0])
                    else:
                        pieces = parts(run, target.key1)
                        pieces[1::3] = PIDS[pid : pid + count]
                        data = b"".join(pieces)
                elif count == 1 and run.properties is None and run.variants is None and len(route.targets) == 1:
                    data = lone(0, route.head, b"", target.block, run.payloads[0])
                else:
                    data = blob(run, target.key0)
                sent += count
                if link.holding:
                    self.emit(link, data)
                    continue
                out = link.out
                if not out:
                    dirty.append(link)
                out.append(data)
                link.out_bytes += len(data)
                if link.out_bytes > SEND_BYTES_MAX:
                    self.block(reader, run.base + count)
        self.counters.publishes_sent += sent

    def deliver_unstored(self, runs: list[Run], *, even_behind: bool = False) -> None:
        """QoS 0 runs that are kept out of the log: whoever is not live right now does not get them, unless
        order does not matter (`even_behind`) and its socket takes them."""
        for run in runs:
            run.base = self.log.end
            run.time_ms = self.now_ms
            route: Route = run.route  # type: ignore[assignment]
            for target in route.targets:
                reader = target.reader
                link = target.link
                takes = reader.live or (even_behind and link is not None and not link.paused)
                reached = self.deliver_plainly(reader, target, run, 0, False) if takes else 0
                if reached < run.count:
                    self.counters.dropped["not stored, reader behind"] += run.count - reached

    def send_run(self, reader: Reader, target: Target, run: Run, start: int, qos: int) -> int:
        """Send messages of a run with packet ids, as far as the window reaches: the index reached."""
        link: Link = target.link  # type: ignore[assignment]
        session: Session = reader.session  # type: ignore[assignment]
        flights = session.in_flight()
        pieces = parts(run, target.key1 if qos == 1 else target.key2)
        while start < run.count:
            pid, count = self._take(link, flights, run.count - start)
            if not count:
                break
            some = pieces[3 * start : 3 * (start + count)]
            some[1::3] = PIDS[pid : pid + count]
            if qos == 1:
                flights.sent(pid, count, run.base + start, reader)
                self.emit(link, b"".join(some))
            else:
                self._begin_qos2(session, reader, pid, count, run.base + start)
                self.emit_stored(link, b"".join(some))
            self.counters.publishes_sent += count
            start += count
        return start

    def _take(self, link: Link, flights: Flights, wanted: int) -> tuple[int, int]:
        """Packet ids in sequence for up to `wanted` messages, as far as the window reaches: the first, how many."""
        count = min(wanted, link.window - link.on_wire, flights.unbroken(), flights.room())
        if count <= 0:
            return 0, 0
        if not link.on_wire:
            link.ack_seen_s = self.now_s
        link.on_wire += count
        return flights.take(count), count

    def send_lone(self, reader: Reader, some: list[tuple[Target, Run]]) -> int:
        """Send messages with QoS 1 and no properties, each a run of its own, as far as the window reaches: how many
        were sent."""
        link: Link = some[0][0].link  # type: ignore[assignment]
        flights = reader.session.in_flight()  # type: ignore[union-attr]
        sent = 0
        while sent < len(some) and link.out_bytes <= SEND_BYTES_MAX:
            pid, count = self._take(link, flights, min(len(some) - sent, LONE_MAX))
            if not count:
                break
            out = []
            for number, (target, run) in enumerate(some[sent : sent + count], pid):
                topic = run.topic
                head = len(topic).to_bytes(2, "big") + topic
                out.append(lone(1, head, PIDS[number], target.block, run.payloads[0]))
                flights.sent(number, 1, run.base, reader)
            self.emit(link, b"".join(out))
            sent += count
        self.counters.publishes_sent += sent
        return sent

    def _begin_qos2(self, session: Session, reader: Reader, pid: int, count: int, base: int) -> None:
        """Packet ids of QoS 2 messages are stored before they are used: after a crash the same message must
        come with the same id, or the client could not tell it from a new one (I4)."""
        flights = session.in_flight()
        for i in range(count):
            flights.add(Flight(pid + i, 1, base + i, 2, reader))
            self.changes.append(
                changes.flight(
                    session.number, reader.number, pid + i, 2, State.SENT, base + i, self.floor_of(reader)
                )
            )

    def deliver_plainly(self, reader: Reader, target: Target, run: Run, start: int, behind: bool) -> int:
        """Hand over a run message by message, with every rule applied: the index reached."""
        if isinstance(reader, Group):
            return self._deliver_to_group(reader, run, start, behind)
        narrowed = target.without_own(run.publisher)
        if narrowed is None:
            return run.count
        link: Link = target.link  # type: ignore[assignment]
        session: Session = reader.session  # type: ignore[assignment]
        qos = min(run.flags & QOS_MASK, narrowed.qos)
        replaying = behind and reader.subscription is not None
        live_from = session.live_from if behind and not replaying else 0
        for index in range(start, run.count):
            if not self._owed(reader, run, index, qos, live_from):
                continue
            if qos:
                if link.on_wire >= link.window or session.in_flight().room() <= 0:
                    return index
            elif link.out_bytes > SEND_BYTES_MAX:
                return index
            self.send_message(link, session, reader, narrowed, run, index, qos, replaying=replaying)
        return run.count

    def _owed(self, reader: Reader, run: Run, index: int, qos: int, live_from: int) -> bool:
        position = run.base + index
        if reader.skip is not None and position in reader.skip:
            return False
        if run.expiries is not None:
            expiry = run.expiries[index]
            if expiry != NO_EXPIRY and self.now_ms - run.time_ms > expiry * 1000:
                self.counters.dropped["expired"] += 1  # [MQTT-3.3.2-5]
                return False
        return qos > 0 or position >= live_from

    def send_message(
        self,
        link: Link,
        session: Session,
        reader: Reader,
        target: Target,
        run: Run,
        index: int,
        qos: int,
        *,
        replaying: bool = False,
        retained: bool = False,
    ) -> None:
        """One message to one client, which has room for it."""
        retain = retained or (bool(run.flags & RETAIN) and target.retain)
        v5 = link.v5
        block = b""
        topic: bytes | None = None
        new_alias = 0
        if v5:
            elapsed_s = max(0, self.now_ms - run.time_ms) // 1000
            block = property_block(run, index, target.sub_ids, elapsed_s)
            if replaying:
                block += replay_properties(run.time_ms, run.base + index)
            if link.aliases_out_max and qos < 2:  # a held message must not define what a later one uses
                alias = link.aliases_out.get(run.topic)
                if alias is not None:
                    topic = b""
                elif len(link.aliases_out) < link.aliases_out_max:
                    alias = new_alias = len(link.aliases_out) + 1
                if alias is not None:
                    block = TOPIC_ALIAS + alias.to_bytes(2, "big") + block
        data = encode_one(
            run, index, v5=v5, qos=qos, retain=retain, dup=False, pid=b"\0\0", block=block, topic=topic
        )
        if link.packet_max and len(data) > link.packet_max:
            self.counters.dropped["larger than the client takes"] += 1  # [MQTT-3.1.2-25]
            return
        if new_alias:
            link.aliases_out[run.topic] = new_alias
        self.counters.publishes_sent += 1
        if not qos:
            self.emit(link, data)
            return
        flights = session.in_flight()
        pid = flights.take(1)
        if not link.on_wire:
            link.ack_seen_s = self.now_s
        link.on_wire += 1
        at = _pid_offset(data)
        data = data[:at] + PIDS[pid] + data[at + 2 :]
        if qos == 1:
            flights.add(Flight(pid, 1, run.base + index, 1, reader))
            if retained:
                self.changes.append(
                    changes.flight(
                        session.number, 0, pid, 1, State.SENT, run.base + index, self.position(session.reader)
                    )
                )
            self.emit(link, data)
        else:
            self._begin_qos2(session, reader, pid, 1, run.base + index)
            self.emit_stored(link, data)

    # ── shared groups ──

    def _deliver_to_group(self, group: Group, run: Run, start: int, behind: bool) -> int:
        qos = run.flags & QOS_MASK
        for index in range(start, run.count):
            if not self._owed(group, run, index, qos, group.live_from if behind else 0):
                continue
            if not self.hand_to_member(group, run, index, qos):
                return index
        return run.count

    def hand_to_member(self, group: Group, run: Run, index: int, qos: int) -> bool:
        member = group.strategy.pick(group.members, run.publisher, run.topic, lambda m: can_take(m, qos))
        if member is None:
            return False
        link: Link = member.session.link  # type: ignore[assignment]
        target = Target(group, link, [member])
        self.send_message(link, member.session, group, target, run, index, min(qos, member.qos))
        return True

    # ── being behind ──

    def block(self, reader: Reader, cursor: int) -> None:
        """The reader cannot take more now. It goes on at `cursor` when its client has room again."""
        reader.live = False
        reader.cursor = cursor
        reader.blocked = True
        if isinstance(reader, Group):
            for member in reader.members:
                link = member.session.link
                if link is not None and reader not in link.waiting:
                    link.waiting.append(reader)
        else:
            link = reader.session.link  # type: ignore[union-attr]
            if link is not None and reader not in link.waiting:
                link.waiting.append(reader)

    def unblock(self, link: Link) -> None:
        """The link has room: whoever waited for it gets a turn."""
        waiting, link.waiting = link.waiting, []
        for reader in waiting:
            reader.blocked = False
            self.queue(reader)

    def queue(self, reader: Reader) -> None:
        if not reader.queued and not reader.live:
            reader.queued = True
            self.behind.append(reader)
            self.request_tick()

    def attached(self, reader: Reader) -> bool:
        if isinstance(reader, Group):
            return reader.attended
        link = reader.session.link  # type: ignore[union-attr]
        return link is not None and link.phase is Phase.OPEN

    # ── positions ──

    def floor_of(self, reader: Reader) -> int:
        """The position to write beside a flight; a group's as last written, since finding it takes all members."""
        if not reader.number or isinstance(reader, Group):
            return reader.floor
        return self.position(reader)

    def position(self, reader: Reader) -> int:
        """Everything before it is acknowledged or not owed (I2)."""
        end = self.log.end
        if isinstance(reader, Group):
            return reader.position(end)
        position = end if reader.live else reader.cursor
        session: Session = reader.session  # type: ignore[assignment]
        if session.flights is not None:
            lowest = session.flights.lowest(reader)
            if lowest is not None and lowest < position:
                return lowest
        return position


def replay_properties(time_ms: int, position: int) -> bytes:
    """When and where a replayed message was first stored, as MQTT 5 user properties."""
    return _replay_time(time_ms) + _user_property(b"tidegate-position", b"%d" % position)


@lru_cache(1024)  # messages of one tick share it
def _replay_time(time_ms: int) -> bytes:
    stamp = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return _user_property(b"tidegate-time", stamp.encode())


def _user_property(name: bytes, value: bytes) -> bytes:
    return USER_PROPERTY + len(name).to_bytes(2, "big") + name + len(value).to_bytes(2, "big") + value


def _pid_offset(packet: bytes) -> int:
    """Where the packet id of a PUBLISH stands: after the fixed header and the topic."""
    at = 1
    while packet[at] & 0x80:
        at += 1
    at += 1
    return at + 2 + int.from_bytes(packet[at : at + 2], "big")
