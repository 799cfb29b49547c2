"""The broker: its state, and the tick that carries everything out.

Within a tick packets only collect work: runs to append, acknowledgements that wait for it, state changes. `flush`
then does it all once: one append, delivery, one write per connection. A handler that changes who gets what
(subscribe, connect, disconnect) first settles what has been collected, so that every message sees the state it was
published in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from tidegate.broker import acks, connect, notices, publish, subscribe, timers
from tidegate.broker.ingest import ingest
from tidegate.broker.retaining import RetainedDelivery
from tidegate.config import Config
from tidegate.counters import Counters
from tidegate.delivery.catchup import CatchUp
from tidegate.delivery.dispatcher import Dispatcher
from tidegate.delivery.group import Group
from tidegate.delivery.routes import RouteTable
from tidegate.delivery.tail import Tail
from tidegate.errors import DiskFull, MalformedPacket, PeerError, ProtocolViolation, StorageError
from tidegate.limits import OWN_TOPICS_MAX, UNSTORED_BYTES_MAX
from tidegate.log.run import Run
from tidegate.ports.archive import Archive, Archived
from tidegate.ports.commitlog import CommitLog
from tidegate.router import RetainedStore
from tidegate.session.flights import Flight, Flights, State
from tidegate.session.link import Link, Phase
from tidegate.session.session import Reader, Session
from tidegate.wire import (
    NO_PROPERTIES,
    Ack,
    Disconnect,
    Packet,
    Properties,
    Pubrec,
    Suback,
    Unsuback,
    decode,
    encode,
    peek_version,
)

Held = bytes | Callable[[], None]

DEFAULT_TENANT = b"default"

# What a stored message costs in memory beside its bytes, roughly: its share of lists and object headers.
RUN_OVERHEAD = 600
BYTES_FACTOR = 3


class Broker:
    def __init__(
        self,
        config: Config,
        log: CommitLog,
        archive: Archive | None = None,
        *,
        now_s: float,
        now_ms: int,
        wake: Callable[[], None],
        report: Callable[[str, Mapping[str, object]], None],
    ) -> None:
        self.config = config
        self.log = log
        self.archive = archive
        self.report = report  # structured events for the log of the server, never per message
        self.tenant = DEFAULT_TENANT
        self.now_s = now_s
        self.now_ms = now_ms
        self.started_s = now_s
        self.counters = Counters()
        self.table = RouteTable(config.mqtt.topic_levels_max)
        self.tail = Tail(config.log.tail_bytes, log.end)
        self.dispatcher = Dispatcher(log, self.tail, self.table, self.counters, self.request_tick)
        self.retained = RetainedStore(
            messages_max=config.retained.messages_max, bytes_max=config.retained.bytes_max
        )
        self.own_retained = RetainedStore(messages_max=OWN_TOPICS_MAX, bytes_max=OWN_TOPICS_MAX << 10)
        self.retained_delivery = RetainedDelivery(
            self.dispatcher, self.retained, self.own_retained, config.log.store_qos0
        )
        self.moved: set[Reader] = set()  # readers whose position is to be written
        self.catch_up = CatchUp(self.dispatcher, self._overrun, self._damaged, self._retained_at, self.moved)
        self.sessions: dict[bytes, Session] = {}
        self.groups: dict[tuple[bytes, bytes], Group] = {}
        self.groups_by_number: dict[int, Group] = {}
        self.links: set[Link] = set()
        self.numbers = count(1)
        self.deadlines = timers.Deadlines(now_s)
        self.store_qos0 = config.log.store_qos0
        # This tick.
        self.ticking = False
        self._wake = wake
        self.hurry: Callable[[], bool] = lambda: False  # flushes at once if the server sees no reason to wait
        self.runs: list[Run] = []
        self.run_changes: list[bytes] = []  # state changes that stand or fall with these runs
        self.pending = 0  # messages in `runs`
        self.pending_bytes = 0
        # Handed to the live readers, and now to be appended.
        self.delivered: list[Run] = []
        self.delivered_messages = 0
        self.delivered_bytes = 0
        self.acks: list[tuple[Link, list[bytes], bool]] = []  # QoS 1: (publisher, packet ids, anyone interested)
        self.pubrecs: list[tuple[Link, int, int]] = []  # QoS 2: (publisher, packet id, reason)
        self.on_refusal: list[Callable[[], None]] = []  # what takes back a publish that could not be stored
        # What waits for the log.
        self.ticket = 0  # of the last append
        self.unstored: deque[tuple[int, list[tuple[Link, Held]]]] = deque()
        self.throttled: set[Link] = set()
        self.storing = True  # False while the log takes no more
        self.full = ""  # why the log may not grow, although there is room on the disk
        self.closing = False
        self.changes_bytes = 0  # state changes written since the last snapshot began
        self.packet_max = config.mqtt.packet_bytes_max
        self.fast = config.mqtt.packet_bytes_max > 0x4003  # the fast path does not look at the limit
        log.on_stored = self.stored

    @property
    def archived(self) -> Archived | None:
        return self.archive.archived if self.archive is not None else None

    # ── what the server calls ──

    def receive(self, link: Link, data: bytes) -> None:
        try:
            ingest(self, link, data)
        except PeerError as error:
            self.fault(link, error)

    def lost(self, link: Link) -> None:
        """The connection ended without a DISCONNECT."""
        if link.phase is not Phase.CLOSED:
            connect.leave(self, link, send_will=True)
            link.phase = Phase.CLOSED
            self.deadlines.forget(link)

    def drained(self, link: Link) -> None:
        """The socket takes bytes again."""
        link.paused = False
        self.unblock(link)

    def request_tick(self) -> None:
        if not self.ticking:
            self.ticking = True
            self._wake()

    def flush(self) -> None:
        """Carry out everything this tick collected."""
        self.ticking = False
        dispatcher = self.dispatcher
        dispatcher.now_ms = self.now_ms
        dispatcher.now_s = self.now_s
        if self.runs or self.delivered:
            self.settle()
        if dispatcher.behind:
            self.catch_up.turn()
        if self.retained_delivery.links:
            self.retained_delivery.turn(self.now_ms)
        if dispatcher.changes and not self._append_changes():
            return self._write()  # what is held waits until the log takes changes again
        log = self.log
        if self.ticket > log.stored:
            log.commit()
        held = dispatcher.held
        if held:
            dispatcher.held = []
            if self.ticket <= log.stored:
                self._release(held)
            else:
                self.unstored.append((self.ticket, held))
        self._write()
        return None

    def hand_over(self) -> bool:
        """Give the collected runs to the live readers ahead of the append: it is not theirs to wait for.

        Only for plain QoS 0 and 1 messages, which do not wait for the log. Returns whether that was possible."""
        if not self.storing:
            return False  # what the log is going to refuse goes to nobody
        runs = self.runs
        for run in runs:
            if run.flags > 1 or run.expiries is not None or not self.store_qos0:
                return False
        dispatcher = self.dispatcher
        dispatcher.now_ms = self.now_ms
        dispatcher.now_s = self.now_s
        base = self.log.end + self.delivered_messages
        for run in runs:
            run.base = base
            run.time_ms = self.now_ms
            base += run.count
        self.runs = []
        self.delivered += runs
        self.delivered_messages += self.pending
        self.delivered_bytes += self.pending_bytes
        self.pending = self.pending_bytes = 0
        dispatcher.deliver(runs)
        self._write()
        return True

    def settle(self) -> None:
        """Append what has been collected and hand it to the live readers."""
        early, runs = self.delivered, self.runs
        if not runs and not early:
            return
        dispatcher = self.dispatcher
        messages = self.pending + self.delivered_messages
        size = self.pending_bytes + self.delivered_bytes
        counters = self.counters
        counters.publishes_received += messages
        counters.publish_bytes_received += size
        self.runs = []
        self.pending = self.pending_bytes = 0
        undelivered = runs
        if early:
            runs = early + runs
            self.delivered = []
            self.delivered_messages = self.delivered_bytes = 0
        acknowledge = self.acks
        if acknowledge:
            self.acks = []
        records = dispatcher.changes
        if self.run_changes:
            records = records + self.run_changes
            self.run_changes = []
        stored = runs if self.store_qos0 else [r for r in runs if r.flags]
        try:
            self.ticket = self._append(stored, records)
        except StorageError as error:
            if early:
                self.log.skip(messages)  # their positions have been seen: nobody else gets them (I10)
            self._refuse(acknowledge, runs, error)
            return
        if not self.storing:
            self._storage_back()
        if records:
            dispatcher.changes = []
            self.changes_bytes += sum(map(len, records))
        if self.on_refusal:
            self.on_refusal.clear()
        if stored:
            self.tail.add(stored[0].base, stored, BYTES_FACTOR * size + RUN_OVERHEAD * len(runs))
        if stored is not runs:
            dispatcher.deliver_unstored([r for r in runs if not r.flags])
            dispatcher.deliver(stored)
        elif undelivered:
            dispatcher.deliver(undelivered)
        for run in runs:
            if run.count == 1:
                run.variants = None  # quickly made again, and the tail holds many of these
        held = dispatcher.held
        if self.pubrecs:
            held += [(link, encode(Pubrec(pid, reason), link.version)) for link, pid, reason in self.pubrecs]
            self.pubrecs.clear()
        if acknowledge:
            for link, pids, matched in acknowledge:
                held.append((link, acks.pubacks(pids, 0 if matched or not link.v5 else 0x10)))
                counters.messages_sent += len(pids)
            if self.log.unstored_bytes > UNSTORED_BYTES_MAX:
                self._throttle(link for link, _, _ in acknowledge)

    def stored(self) -> None:
        """The log has made more of what was appended safe: keep the promises that waited for it."""
        stored = self.log.stored
        unstored = self.unstored
        while unstored and unstored[0][0] <= stored:
            self._release(unstored.popleft()[1])
        if self.throttled and self.log.unstored_bytes < UNSTORED_BYTES_MAX // 2:
            for link in self.throttled:
                link.throttle(False)
            self.throttled.clear()
        if self.ticket > stored:
            self.log.commit()
        self._write()

    # ── packets ──

    def handle(self, link: Link, first: int, body: bytes) -> None:
        """One packet that the fast path did not take."""
        if link.phase is Phase.NEW:
            if first >> 4 != 1:
                raise ProtocolViolation("the first packet must be CONNECT")  # [MQTT-3.1.0-1]
            link.version = peek_version(body) or 4  # so that a refusal can be understood
            link.v5 = link.version == 5
            connect.on_connect(self, link, decode(first, body, 4))
            return
        handler = HANDLERS.get(first >> 4)
        if handler is None:
            if first < 0x10:
                raise MalformedPacket("packet type 0 is reserved")
            raise ProtocolViolation(f"a client must not send packet type {first >> 4}")
        handler(self, link, decode(first, body, link.version))

    def fault(self, link: Link, error: PeerError) -> None:
        """The peer broke a rule: say so with the reason code, close, count."""
        if link.phase is Phase.CLOSED:
            return
        self.counters.refused[f"{type(error).__name__} 0x{error.reason:02X}"] += 1
        about = {"client": link.client_id, "peer": link.peer, "reason": f"0x{error.reason:02X}", "why": str(error)}
        self.report("peer.fault", about)
        if link.phase is Phase.NEW:
            connect.refuse(self, link, error.reason, str(error))
        else:
            self.close(link, error.reason, str(error))

    def send(self, link: Link, packet: Packet) -> None:
        self.counters.messages_sent += 1
        self.dispatcher.send(link, encode(packet, link.version))
        self.request_tick()

    def hold(self, link: Link, packet: Ack | Suback | Unsuback) -> None:
        """Send when the log has stored this tick."""
        self.counters.messages_sent += 1
        data = encode(packet, link.version)
        if link.packet_max and len(data) > link.packet_max:
            data = encode(replace(packet, properties=NO_PROPERTIES), link.version)  # [MQTT-3.4.2-2]
        self.dispatcher.hold(link, data)

    def why(self, link: Link, error: PeerError) -> Properties:
        """The reason string, for a client that wants to know [MQTT-3.1.2-29]."""
        return Properties(reason_string=str(error).encode()) if link.v5 and link.problem_info else NO_PROPERTIES

    def next_position(self) -> int:
        """The position that the next message of this tick will have."""
        if self.store_qos0:
            return self.log.end + self.delivered_messages + self.pending
        return self.log.end + sum(run.count for run in self.runs if run.flags)

    def change(self, record: bytes) -> None:
        self.dispatcher.changes.append(record)
        self.request_tick()

    def close(self, link: Link, reason: int, why: str = "", *, send_will: bool = True) -> None:
        """End a connection from our side. An MQTT 5 client is told why [MQTT-4.13.1-1]."""
        if link.phase is Phase.CLOSED:
            return
        if link.v5 and link.phase is Phase.OPEN:
            told = Properties(reason_string=why.encode()) if why and link.problem_info else NO_PROPERTIES
            data = encode(Disconnect(reason, told), 5)
            if link.packet_max and len(data) > link.packet_max:
                data = encode(Disconnect(reason), 5)  # [MQTT-3.14.2-3]
            self.dispatcher.send(link, data)
        connect.leave(self, link, send_will=send_will)
        self.shut(link)

    def shut(self, link: Link) -> None:
        """Close the socket once what has been written is out."""
        link.phase = Phase.CLOSED
        self.deadlines.forget(link)
        if not link.out:
            self.dispatcher.dirty.append(link)
        self.request_tick()

    def acknowledged(self, link: Link, flights: Flights, flight: Flight, count: int) -> None:
        """The first `count` messages of the oldest flight, QoS 1, came back acknowledged in order."""
        reader = flight.reader
        self.counters.messages_received += count
        if not reader.number:
            # A retained message on its way was written down, so its end is as well.
            acks.finished(self, link, flights, flights.isolate(flight, flight.pid))
            for _ in range(count - 1):
                acks.finished(self, link, flights, flights.isolate(flights.queue[0], flights.queue[0].pid))
            return
        if count == flight.count:
            queue = flights.queue
            queue.popleft()
            while queue and queue[0].state is State.DONE:
                queue.popleft()
        else:
            flight.pid += count
            flight.base += count
            flight.count -= count
        flights.unfinished -= count
        link.on_wire -= count
        link.ack_seen_s = self.now_s
        if reader.session is None or reader.session.expiry_s:
            self.moved.add(reader)
        if link.waiting or link.retained_streams:
            self.unblock(link)

    # ── the rest of a tick ──

    def unblock(self, link: Link) -> None:
        if link.paused:
            return  # an acknowledgement makes no room in a socket that is full
        if link.waiting:
            self.dispatcher.unblock(link)
        if link.retained_streams:
            self.retained_delivery.resume(link)

    def _append(self, runs: list[Run], records: list[bytes]) -> int:
        if self.full:
            raise DiskFull(self.full)
        return self.log.append(runs, records, self.now_ms)

    def limit(self, full: str) -> None:
        """From now on the log may not grow, for the reason given; or it may again, for an empty one."""
        if full and self.storing:
            self._storage_lost(DiskFull(full))
        elif not full and self.full and not self.storing:
            self._storage_back()
        self.full = full

    def _append_changes(self) -> bool:
        try:
            self.ticket = self._append([], self.dispatcher.changes)
        except StorageError as error:
            self._storage_lost(error)
            return False
        self.changes_bytes += sum(map(len, self.dispatcher.changes))
        self.dispatcher.changes = []
        if not self.storing:
            self._storage_back()
        return True

    def _release(self, held: list[tuple[Link, Held]]) -> None:
        dirty = self.dispatcher.dirty
        gone: set[Link] | None = None
        for link, what in held:
            if link.phase is Phase.CLOSED:
                gone = gone or set()
                gone.add(link)
                continue
            if type(what) is bytes:
                if not link.out:
                    dirty.append(link)
                link.out.append(what)
            else:
                what()  # type: ignore[operator]
        for link in gone or ():
            self.report("answer.undeliverable", {"client": link.client_id, "peer": link.peer})  # S1.12

    def _write(self) -> None:
        """One write per connection."""
        dirty = self.dispatcher.dirty
        if not dirty:
            return
        self.dispatcher.dirty = []
        sent = 0
        for link in dirty:
            out = link.out
            if out:
                data = out[0] if len(out) == 1 else b"".join(out)
                out.clear()
                link.out_bytes = 0
                sent += len(data)
                link.write(data)
                if link.paused and link.session is not None:
                    self._stall(link.session)
            if link.phase is Phase.CLOSED:
                link.close()
            elif not link.paused and (link.waiting or link.retained_streams):
                self.unblock(link)
        self.counters.bytes_sent += sent

    def _stall(self, session: Session) -> None:
        """The socket is full: its live readers go on from the log when it has drained."""
        for reader in connect.readers(session):
            if reader.live:
                self.dispatcher.block(reader, self.log.end + self.delivered_messages)

    def _throttle(self, links: Iterable[Link]) -> None:
        """The disk is behind: stop reading from those who publish until it has caught up."""
        for link in links:
            if link not in self.throttled and link.phase is Phase.OPEN:
                self.throttled.add(link)
                link.throttle(True)

    def _refuse(self, acknowledge: list[tuple[Link, list[bytes], bool]], runs: list[Run], error: StorageError) -> None:
        """The log did not take the messages: nobody gets them, and their publishers are told (C5, S1.25)."""
        self._storage_lost(error)
        self.pubrecs.clear()
        self.counters.dropped["refused by the log"] += sum(run.count for run in runs)
        undo, self.on_refusal = self.on_refusal, []
        for take_back in reversed(undo):
            take_back()
        for link, pids, _ in acknowledge:
            if link.v5:
                self.dispatcher.send(link, acks.pubacks(pids, 0x97))
            else:
                # MQTT 3 has no negative acknowledgement: without one the client keeps the message.
                self.close(link, 0x97)

    def _storage_lost(self, error: StorageError) -> None:
        if self.storing:
            self.storing = False
            self.report("log.refused", {"error": str(error)})

    def _storage_back(self) -> None:
        self.storing = True
        self.report("log.accepted", {})

    def _overrun(self, reader: Reader, first: int, left: int) -> None:
        """Retention has passed a reader: it is told what it cannot get any more (S3.14)."""
        self.counters.dropped["overrun by retention"] += 1
        notices.overrun(self, reader, first, left)

    def _damaged(self, reader: Reader, messages: int, first: int, left: int) -> None:
        """A reader passes what cannot be read any more."""
        self.counters.dropped["damaged on disk"] += messages
        notices.damaged(self, reader, messages, first, left)

    def _retained_at(self, position: int) -> Run | None:
        return self.retained_delivery.at(position)


HANDLERS: dict[int, Callable[[Broker, Link, Any], None]] = {
    1: connect.on_second_connect,
    3: publish.on_publish,
    4: acks.on_puback,
    5: acks.on_pubrec,
    6: acks.on_pubrel,
    7: acks.on_pubcomp,
    8: subscribe.on_subscribe,
    10: subscribe.on_unsubscribe,
    12: connect.on_ping,
    14: connect.on_disconnect,
    15: connect.on_auth,
}
