"""The broker: its parts, and the tick that carries everything out.

Within a tick packets only collect work: rows to append, promises that wait for it, state changes. `flush` then does it
all once: one append, delivery of what the log announces, a share for the jobs at the gate, one write per connection. A
handler that changes who gets what (subscribe, connect, disconnect) first settles what has been collected, so that every
message sees the state it was published in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from tidegate.broker import acks, connect, ingest, notices, subscribe, tracing
from tidegate.broker.deadlines import Deadlines
from tidegate.broker.groups import Groups
from tidegate.broker.retaining import Retaining
from tidegate.broker.room import Room
from tidegate.broker.sessions import Sessions
from tidegate.broker.storing import Storing
from tidegate.config import Config
from tidegate.counters import Counters
from tidegate.delivery.delivery import Delivery
from tidegate.delivery.gate import Gate, Job
from tidegate.delivery.outbox import Outbox, Post
from tidegate.delivery.routes import RouteTable
from tidegate.delivery.tick import Tick
from tidegate.errors import MalformedPacket, PeerError, ProtocolViolation, Refused, StorageError
from tidegate.limits import SPENT_MAX
from tidegate.log.rows import Rows
from tidegate.log.run import QOS_MASK
from tidegate.ports.archive import Archive, Archived
from tidegate.ports.commitlog import CommitLog
from tidegate.session.link import CLOSED, NEW, Link, Stop
from tidegate.wire import (
    NO_PROPERTIES,
    Ack,
    Disconnect,
    Packet,
    Properties,
    Suback,
    Unsuback,
    decode,
    encode,
    more_filters_than,
    peek_packet_max,
    peek_version,
)


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
        self.now_s = self.started_s = now_s
        self.now_ms = now_ms
        self.counters = Counters()
        self.closing = False
        self.numbers = count(1)  # names of sessions and readers in the log
        self._wake = wake
        self.ticking = False  # a tick has been asked for
        self.look_at_clock: Callable[[], None] = lambda: None  # tells the time as it is, by `at`
        self.hurry: Callable[[], bool] = lambda: False  # flushes at once if the server sees no reason to wait
        self.tracers: dict[bytes, set[tuple[int, bytes]]] = {}  # topics of traces, and the subscriptions to each
        self.spent = 0  # on packets since the last tick, in units of about 10 µs
        self.halted = False  # the process is about to end: nothing leaves any more
        self.hurrying = False  # what is announced is written to sockets at once
        self.flushing = False  # packets that are taken now are those of links that had to wait; theirs is the next tick

        self.table = RouteTable(config.mqtt.topic_levels_max)
        self.post = Post(self.counters, self.request_tick)
        self.gate = Gate(self.request_tick)
        self.delivery = Delivery(
            log, self.table, self.post, self.gate, config.log.tail_bytes, self._overrun, self._damaged
        )
        self.storing = Storing(self, report)
        self.room = Room(self)
        self.retaining = Retaining(self)
        self.sessions = Sessions(self)
        self.groups = Groups(self)
        self.deadlines = Deadlines(now_s)
        log.listener = self

    @property
    def archived(self) -> Archived | None:
        return self.archive.archived if self.archive is not None else None

    # ── what the server calls ──

    def accept(self, link: Link) -> None:
        """A new connection: nothing is known of it yet."""
        link.outbox = Outbox(self.post, link)
        link.seen_s = self.now_s

    def receive(self, link: Link, data: bytes) -> None:
        if self.tracers:
            tracing.coming(link, len(data))
        try:
            ingest.ingest(self, link, data)
        except PeerError as error:
            self.fault(link, error)

    def lost(self, link: Link) -> None:
        """The connection ended without a DISCONNECT."""
        if link.phase is not CLOSED:
            self.sessions.leave(link, send_will=True, why="connection lost")
            link.phase = CLOSED
            self.deadlines.forget(link)
        if link.outbox is not None:  # None: it was turned away before it was accepted
            link.outbox.closed()
        link.outbox = None  # no circle is left for the garbage collector, which seldom looks

    def drained(self, link: Link) -> None:
        """The socket takes bytes again."""
        link.outbox.drained()
        self.unblock(link.outbox)

    def at(self, now_s: float, now_ms: int) -> None:
        """What time it is."""
        self.now_s = self.post.now_s = now_s
        self.now_ms = self.post.now_ms = now_ms

    def request_tick(self) -> None:
        if not self.ticking:
            self.ticking = True
            self._wake()

    def flush(self) -> None:
        """Carry out everything this tick collected."""
        self.ticking = False
        self.flushing = True
        self.spent = 0
        self.settle()
        if self.gate.jobs:
            self.gate.turn()
        if self.post.tick:
            self._append()
        if self.storing.unstored:
            self.log.commit()
        self._write()
        self.flushing = False

    def settle(self) -> None:
        """Append what has been collected, if there are messages among it."""
        if self.post.tick.rows.payloads:
            self._append()

    def _append(self) -> None:
        post = self.post
        tick, post.tick = post.tick, Tick()
        rows = tick.rows
        if rows.payloads:
            self.counters.publishes_received += len(rows.payloads)
            self.counters.publish_bytes_received += tick.bytes
            rows.time_ms = self.now_ms
            if tick.retained:
                self.retaining.settled()
            if not self.config.log.store_qos0:
                self._keep_out(tick)
        self.storing.append(tick)

    def _keep_out(self, tick: Tick) -> None:
        """QoS 0 messages are not stored: they go to whoever is there."""
        flags = tick.rows.flags
        plain = [row for row, flag in enumerate(flags) if not flag & QOS_MASK]
        if plain:
            rows = tick.rows
            kept = [row for row, flag in enumerate(flags) if flag & QOS_MASK]
            tick.rows, tick.stretches = rows.take(kept), []
            tick.rows.cuts = list(range(len(kept)))
            tick.rows.positions = ()
            out = rows.take(plain)
            self.delivery.unstored(out)
            self.retaining.announced(out)

    # ── what the log says ──

    def announced(self, partition: int, rows: Rows) -> None:
        tick = self.storing.appending
        if tick is not None and tick.rows is rows:
            # Announced within the append: what was found out about these rows on their way in still holds.
            tick.announced = True
            stretches, tick.stretches = tick.stretches, []
            self.delivery.announced(partition, rows, stretches or None, tick.bytes)
            kept = tick.retained
        else:
            self.delivery.announced(partition, rows, None, sum(map(len, rows.payloads)))
            kept = max(rows.flags) > QOS_MASK
        if kept:
            self.retaining.announced(rows)
        if self.hurrying:
            self._write()
        elif tick is None:
            self.request_tick()  # it came on its own

    def stored(self, ticket: int) -> None:
        self.storing.stored(ticket)
        if self.post.tick:
            self._append()  # what is written below may tell of it: a CONNACK, of its session
        if self.storing.unstored:
            self.log.commit()
        self._write()

    def refused(self, ticket: int, why: StorageError) -> None:
        self.storing.refused(ticket, why)
        self.request_tick()

    # ── packets ──

    def handle(self, link: Link, first: int, body: bytes) -> None:
        """One packet that is neither a PUBLISH nor a plain acknowledgement."""
        if link.phase is NEW:
            if first >> 4 != 1:
                raise ProtocolViolation("the first packet must be CONNECT")  # [MQTT-3.1.0-1]
            link.version = peek_version(body) or 4  # so that a refusal can be understood
            link.v5 = link.version == 5
            self.look_at_clock()
            link.outbox.packet_max = peek_packet_max(body)
            connect.on_connect(self, link, decode(first, body, 4))
            return
        self.spent += 1
        handler = HANDLERS.get(first >> 4)
        if handler is None:
            if first < 0x10:
                raise MalformedPacket("packet type 0 is reserved")
            raise ProtocolViolation(f"a client must not send packet type {first >> 4}")
        if first >> 4 in FILTERS:
            most = self.config.mqtt.subscriptions_per_session_max
            if more_filters_than(most, body, link.version, FILTERS[first >> 4]):
                raise Refused(f"more than the {most} filters that a session may hold", reason=0x97)
        job = handler(self, link, decode(first, body, link.version))
        if job is not None:
            self._work(link, job)

    def _work(self, link: Link, job: Job) -> None:
        """A packet that takes steps: what its client sends after it waits until it is done."""
        if next(job, None) is None:
            return
        self.wait(link)

        def steps() -> Iterator[int]:
            try:
                yield from job
            except PeerError as error:
                self.fault(link, error)
            self.go_on(link)
            yield 1

        self.gate.add(steps())

    def park(self, link: Link) -> None:
        """Its packets have had their share of this tick: the rest of what it sent waits for the next."""
        self.wait(link)
        self.queue(link)

    def queue(self, link: Link) -> None:
        """A link that waits gets a turn of its own, never one within another's packets."""

        def turn() -> Iterator[int]:
            self.go_on(link)
            yield SPENT_MAX

        self.gate.add(turn())

    def wait(self, link: Link) -> None:
        """Nothing more is taken from the link until `go_on`."""
        link.busy = True
        link.stop(Stop.BUSY)

    def go_on(self, link: Link) -> None:
        link.busy = False
        if link.phase is not CLOSED:
            link.go_on(Stop.BUSY, self.now_s)
            self.receive(link, b"")

    def fault(self, link: Link, error: PeerError) -> None:
        """The peer broke a rule: say so with the reason code, close, count."""
        if link.phase is CLOSED:
            return
        self.counters.refused[f"{type(error).__name__} 0x{error.reason:02X}"] += 1
        about = {"client": link.client_id, "peer": link.peer, "reason": f"0x{error.reason:02X}", "why": str(error)}
        self.report("peer.fault", about)
        if link.phase is NEW:
            connect.refuse(self, link, error)
        else:
            self.close(link, error.reason, str(error))

    def send(self, link: Link, packet: Packet) -> None:
        data = self.fitting(link, packet)
        if data is not None:
            self.counters.messages_sent += 1
            link.outbox.put(data)
            self.request_tick()

    def hold(self, link: Link, packet: Ack | Suback | Unsuback) -> None:
        """Send when the log has stored this tick."""
        data = self.fitting(link, packet)
        if data is not None:
            self.counters.messages_sent += 1
            link.outbox.hold(data)

    def fitting(self, link: Link, packet: Any) -> bytes | None:
        """The packet's bytes, if the client takes so many; without its properties, where it does not [MQTT-3.1.2-24].
        None, and the connection is closed, where even that is too much."""
        data = encode(packet, link.version)
        limit = link.outbox.packet_max
        if limit and len(data) > limit:
            data = encode(replace(packet, properties=NO_PROPERTIES), link.version)  # [MQTT-3.4.2-2]
            if len(data) > limit:
                self.counters.dropped["larger than the client takes"] += 1
                self.close(link, 0x95, "an answer is larger than the client takes")
                return None
        return data

    def why(self, link: Link, error: PeerError) -> Properties:
        """The reason string, for a client that wants to know [MQTT-3.1.2-29]."""
        return Properties(reason_string=str(error).encode()) if link.v5 and link.problem_info else NO_PROPERTIES

    def change(self, record: bytes) -> None:
        """A state record of this tick."""
        self.post.tick.changes.append(record)
        self.request_tick()

    def close(self, link: Link, reason: int, why: str = "", *, send_will: bool = True) -> None:
        """End a connection from our side. An MQTT 5 client is told why [MQTT-4.13.1-1]."""
        if link.phase is CLOSED:
            return
        while self.post.tick:
            self._append()  # what it is owed for its messages comes before the last word
        if link.v5 and link.greeted:
            told = Properties(reason_string=why.encode()) if why and link.problem_info else NO_PROPERTIES
            data = encode(Disconnect(reason, told), 5)
            limit = link.outbox.packet_max
            if limit and len(data) > limit:
                data = encode(Disconnect(reason), 5)  # [MQTT-3.14.2-3]
            if not limit or len(data) <= limit:
                link.outbox.put(data)
        self.sessions.leave(link, send_will=send_will, why=why or f"0x{reason:02X}", reason=reason)
        self.shut(link)

    def shut(self, link: Link) -> None:
        """Close the socket once what has been written is out."""
        link.phase = CLOSED
        self.deadlines.forget(link)
        if not link.outbox.out:
            self.post.dirty.append(link.outbox)
        self.request_tick()

    # ── the rest of a tick ──

    def unblock(self, outbox: Outbox) -> None:
        """The client may have room now."""
        if outbox.paused:
            return  # an acknowledgement makes no room in a socket that is full
        if outbox.waiting:
            self.delivery.unblock(outbox)
        self.retaining.go_on(outbox.link)

    def _write(self) -> None:
        """One write per connection."""
        dirty = self.post.dirty
        if not dirty or self.halted:
            return
        self.post.dirty = []
        sent = 0
        for outbox in dirty:
            link = outbox.link
            if outbox.out:
                if link.trace is not None:
                    tracing.sent(self, link, outbox.out)
                sent += outbox.write()
            if link.phase is CLOSED:
                link.close()
                outbox.closed()
            elif outbox.full and not outbox.paused:
                outbox.full = False
                self.unblock(outbox)
        self.counters.bytes_sent += sent

    def _overrun(self, reader: Any, first: int, left: int) -> None:
        """Retention has passed a reader: it is told what it cannot get any more (S3.14)."""
        self.counters.dropped["overrun by retention"] += 1
        notices.overrun(self, reader, first, left)

    def _damaged(self, reader: Any, messages: int, first: int, left: int) -> None:
        """A reader passes what cannot be read any more."""
        self.counters.dropped["damaged on disk"] += messages
        notices.damaged(self, reader, messages, first, left)


# Packets that name filters, and how many bytes of options follow each.
FILTERS = {8: 1, 10: 0}

HANDLERS: dict[int, Callable[[Broker, Link, Any], Job | None]] = {
    1: connect.on_second_connect,
    3: ingest.on_publish,
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
