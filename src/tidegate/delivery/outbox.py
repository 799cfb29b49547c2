"""The outbox of a link: everything that leaves goes through it, and it owns all that limits what may.

    window      unacknowledged messages the client takes at a time, and how many there are (`used`)
    flights     packet ids and what they carry; they belong to the session and outlive the link
    bytes       waiting for this tick's write, and behind a socket that does not drain
    order       a QoS 2 message waits until its packet id is stored; what comes after it waits behind it (I3)

Live, catch-up, resend, retained, group and notice differ in what they offer, not in how it leaves: `send` for rows that
have not been sent, `send_again` for a flight, `put` and `hold` for answers. Nothing is encoded for a link without room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidegate.counters import Counters
from tidegate.delivery.encode import NO_PID, TOPIC_ALIAS, Key, aliased, block_of, key_of, packet, pieces, replay_block
from tidegate.delivery.routes import Target
from tidegate.delivery.tick import ANSWER, MESSAGE, Stretch, Tick
from tidegate.limits import (
    ANSWERS_BYTES_MAX,
    ANSWERS_UNREAD_BYTES_MAX,
    SEND_BYTES_MAX,
    SENDING_BYTES_MAX,
    SENDING_SHARE_BYTES,
)
from tidegate.log.rows import Rows
from tidegate.log.run import NO_EXPIRY, QOS_MASK, RETAIN
from tidegate.session import changes
from tidegate.session.flights import PIDS, SENT, Flight, Flights
from tidegate.session.link import Link, Stop
from tidegate.session.reader import Reader
from tidegate.session.session import Session

# Retained messages in flight belong to no place in the log; this stands in for their reader.
RETAINED_READER = Reader(0, None, [0])


class Post:
    """What all outboxes share: the tick whose storing they wait for, who has bytes to write, and the time."""

    __slots__ = ("counters", "dirty", "now_ms", "now_s", "request_tick", "sending_bytes", "stuck", "tick")

    def __init__(self, counters: Counters, request_tick: Callable[[], None]) -> None:
        self.counters = counters
        self.request_tick = request_tick
        self.tick = Tick()
        self.dirty: list[Outbox] = []
        self.stuck: set[Outbox] = set()  # their sockets did not take everything
        self.now_ms = 0
        self.now_s = 0.0
        self.sending_bytes = 0  # on their way to all links: waiting for a write, or behind a full socket


class Outbox:
    __slots__ = (
        "_post",
        "ack_seen_s",
        "aliases",
        "aliases_max",
        "answers_bytes",
        "delayed",
        "full",
        "holding",
        "link",
        "out",
        "out_bytes",
        "packet_max",
        "paused",
        "session",
        "stuck_bytes",
        "taken_s",
        "unread_bytes",
        "used",
        "v5",
        "waiting",
        "window",
    )

    def __init__(self, post: Post, link: Link) -> None:
        self._post = post
        self.link = link
        self.session: Session | None = None
        self.v5 = False
        self.window = 0
        self.used = 0
        self.ack_seen_s = 0.0  # when the client last acknowledged something, or got something to acknowledge
        self.out: list[bytes] = []
        self.out_bytes = 0
        self.stuck_bytes = 0  # behind the socket
        self.unread_bytes = 0  # answers that came when it was full
        self.taken_s = 0.0  # when the socket last took something
        self.paused = False  # the socket does not take more at the moment
        self.holding = 0  # messages that wait for the log; later ones wait behind them
        self.answers_bytes = 0  # answers that wait for the log
        self.delayed = False  # they still did when the client's acknowledgement was due
        self.packet_max = 0  # 0: no limit
        self.aliases: dict[bytes, int] = {}
        self.aliases_max = 0
        self.waiting: dict[Any, None] = {}  # readers that go on when the client acknowledges or its socket drains
        self.full = False  # somebody was told that there is no room

    def open(self, session: Session, *, window: int, packet_max: int, aliases_max: int, now_s: float) -> None:
        """The client has been accepted, and said what it takes."""
        self.session = session
        self.v5 = self.link.v5
        self.window = window
        self.packet_max = packet_max
        self.aliases_max = aliases_max
        self.ack_seen_s = now_s

    # ── room ──

    def room(self) -> bool:
        """Whether the socket may be given more."""
        if not self.paused and self.out_bytes <= SEND_BYTES_MAX:
            share = self.out_bytes + self.stuck_bytes < SENDING_SHARE_BYTES
            if share or self._post.sending_bytes < SENDING_BYTES_MAX:
                return True
        self.full = True
        return False

    def credit(self, wanted: int) -> int:
        """How many messages, `wanted` at most, may go out with packet ids that follow each other."""
        count = min(wanted, self.window - self.used)
        return self.session.in_flight().free(count) if count > 0 else 0  # type: ignore[union-attr]

    # ── answers ──

    def put(self, data: bytes) -> None:
        post = self._post
        if not self.out:
            post.dirty.append(self)
        self.out.append(data)
        self.out_bytes += len(data)
        post.sending_bytes += len(data)

    def hold(self, data: bytes) -> None:
        """Send an answer when everything collected up to the end of this tick is stored."""
        self._post.tick.promise(ANSWER, self.link, data)
        self.owe(len(data))
        self._post.request_tick()

    def kept(self, data: bytes) -> None:
        """An answer that waited for the log may go."""
        self.given(len(data))
        if self.delayed:
            self._left()
        self.put(data)

    def owe(self, count: int) -> None:
        """Answers of so many bytes wait for the log; who has too many of them is not listened to."""
        self.answers_bytes += count
        if self.answers_bytes > ANSWERS_BYTES_MAX:
            self.link.stop(Stop.ANSWERS_HELD)

    def given(self, count: int) -> None:
        self.answers_bytes -= count
        if self.answers_bytes < ANSWERS_BYTES_MAX // 2:
            self.link.go_on(Stop.ANSWERS_HELD, self._post.now_s)

    def _left(self) -> None:
        """Something that waited long for the log may go: from now on its client has the time to acknowledge."""
        self.delayed = False
        self.ack_seen_s = self._post.now_s

    # ── messages ──

    def send(
        self, target: Target, rows: Rows, a: int, b: int, stretch: Stretch | None = None, *, replay: bool = False
    ) -> int:
        """Rows a … b-1, which have the same flags, for a target of this link: the row reached.

        `stretch`: they are among its rows, and just announced. `replay`: each tells its time and position."""
        if not self.room():
            return a
        flags = rows.flags[a]
        qos = min(flags & QOS_MASK, target.qos)
        keys = target.kept_keys if flags & RETAIN and target.retain else target.keys
        apart = self.packet_max or (replay and self.v5) or target.no_local
        if apart or (rows.expiries is not None and not self._fresh(rows, a, b)):
            return self._send_each(target, rows, a, b, qos, keys is target.kept_keys, replay)
        key = keys[qos]
        if self.aliases_max and qos < 2:  # a message that waits for the log must not define what others use
            return self._send_aliased(target, rows, a, b, qos, key)
        made: Any
        if stretch is not None:
            made = stretch.variants.get(key)
            if made is None:
                made = pieces(rows, stretch.start, stretch.stop, key)
                if not qos:
                    made = b"".join(made)
                if not qos or stretch.stop - stretch.start > 1:  # one message is soon encoded again, and may be large
                    stretch.variants[key] = made
            if not qos:
                return self._put_messages(made, b - a, b)
            if a != stretch.start or b != stretch.stop:
                made = made[3 * (a - stretch.start) : 3 * (b - stretch.start)]
        else:
            if qos:
                count = self.window - self.used
                if b - a > count:
                    b = a + count  # no more than can leave is encoded
                    if count <= 0:
                        return a
            made = pieces(rows, a, b, key)
            if not qos:
                return self._put_messages(b"".join(made), b - a, b)
        return self._send_pieces(target.reader, rows.positions, a, b, qos, made)

    def _fresh(self, rows: Rows, a: int, b: int) -> bool:
        """Whether none of these messages has expired, nor has less time left than when it came."""
        elapsed_ms = self._post.now_ms - rows.time_ms
        return elapsed_ms <= 0 or (elapsed_ms < 1000 and min(rows.expiries[a:b]) > 0)  # type: ignore[index]

    def _send_aliased(self, target: Target, rows: Rows, a: int, b: int, qos: int, key: Key) -> int:
        if qos:
            b = min(b, a + self.window - self.used)  # no more than can leave is encoded
            if b <= a:
                return a
        known = len(self.aliases)
        made = aliased(rows, a, b, key, self.aliases, self.aliases_max)
        if not qos:
            return self._put_messages(b"".join(made), b - a, b)
        reached = self._send_pieces(target.reader, rows.positions, a, b, qos, made)
        if reached < b:
            # Packet ids ran out: what did not leave has defined nothing.
            sent = set(rows.topics[a:reached])
            for topic in list(self.aliases)[known:]:
                if topic not in sent:
                    del self.aliases[topic]
        return reached

    def _put_messages(self, data: bytes, count: int, reached: int) -> int:
        self._post.counters.publishes_sent += count
        self._message(data)
        return reached

    def _message(self, data: bytes) -> None:
        """A message that need not wait for the log, but must not overtake one that does (I3)."""
        if self.holding:
            self._hold_message(data)
        else:
            self._post.counters.publish_bytes_sent += len(data)
            self.put(data)

    def _hold_message(self, data: bytes) -> None:
        post = self._post
        self.holding += 1
        self.out_bytes += len(data)
        post.sending_bytes += len(data)
        post.counters.publish_bytes_sent += len(data)
        post.tick.promise(MESSAGE, self.link, data)
        post.request_tick()

    def message_stored(self, data: bytes) -> None:
        """A message that waited for the log may go."""
        self.holding -= 1
        if self.delayed:
            self._left()
        if not self.out:
            self._post.dirty.append(self)
        self.out.append(data)

    def _send_pieces(
        self, reader: Reader, positions: Sequence[int], a: int, b: int, qos: int, made: list[bytes], message: Any = None
    ) -> int:
        """Messages with packet ids, as far as the window reaches: the row reached. `made` has three pieces for each."""
        begun = a
        flights = self.session.in_flight()  # type: ignore[union-attr]
        while a < b:
            count = min(b - a, self.window - self.used)
            if count <= 0 or not (count := flights.free(count)):
                break
            some = made if count == b - begun else made[3 * (a - begun) : 3 * (a - begun + count)]
            pid = self._begin(flights, reader, positions, a, a + count, qos, message)
            if count == 1:
                some[1] = PIDS[pid]
            else:
                some[1::3] = PIDS[pid : pid + count]
            data = b"".join(some)
            if qos == 1:
                self._message(data)
            else:
                self._hold_message(data)
            a += count
        self._post.counters.publishes_sent += a - begun
        return a

    def _begin(
        self, flights: Flights, reader: Reader, positions: Sequence[int], a: int, b: int, qos: int, message: Any
    ) -> int:
        """Give packet ids to rows a … b-1: the first one. There is credit for all."""
        session: Session = self.session  # type: ignore[assignment]
        if not self.used:
            self.ack_seen_s = self._post.now_s
        self.used += b - a
        if qos == 1 and reader.number and isinstance(positions, range):
            return flights.add(positions[a:b], 1, reader, message)
        first = 0
        # A session that ends with its connection has no flights after a crash; what it has begun for a group goes to
        # nobody else all the same [MQTT-4.8.2-5].
        written = recorded(session, reader)
        for span in _spans(positions, a, b):
            pid = flights.add(span, qos, reader, message)
            first = first or pid
            if written and (qos == 2 or not reader.number):
                # Packet ids of QoS 2 messages are stored before they are used: after a crash the same message must
                # come with the same id, or the client could not tell it from a new one (I4).
                self._post.tick.changes.append(
                    changes.flights(session.number, reader.number, pid, qos, SENT, span)
                )
        return first

    def _send_each(
        self, target: Target, rows: Rows, a: int, b: int, qos: int, retain: bool, replay: bool
    ) -> int:
        """`send` where messages differ: no-local, expiry, a limit on packets, aliases, what a replay tells."""
        own = b""
        narrowed: Target | None = target
        if target.no_local:
            own = self.session.client_id  # type: ignore[union-attr]
            narrowed = target.without_own()
        elapsed_s = max(0, self._post.now_ms - rows.time_ms) // 1000
        expired_ms = self._post.now_ms - rows.time_ms
        expiries = rows.expiries
        row = a
        while row < b:
            # One message after the other, so that those that are left out cost no credit.
            if qos and not self.credit(1):
                return row
            if not self.room():
                return row
            how = target
            if own and rows.publishers[row] == own:
                if narrowed is None:
                    row += 1
                    continue
                how = narrowed
            if expiries is not None and expiries[row] != NO_EXPIRY and expired_ms > expiries[row] * 1000:
                self._post.counters.dropped["expired"] += 1  # [MQTT-3.3.2-5]
                row += 1
                continue
            # The narrowed target of a client's own messages may have a lower QoS.
            level = min(qos, how.qos)
            kept = retain and how.retain if how is not target else retain
            block: bytes | None = None
            if self.v5:
                block = block_of(rows, row, elapsed_s) + how.sub_ids
                if replay:
                    block += replay_block(rows.time_ms, rows.positions[row])
            self._send_one(how.reader, rows.positions, row, level, kept, rows.topics[row], block, rows.payloads[row])
            row += 1
        return b

    def _send_one(
        self,
        reader: Reader,
        positions: Sequence[int],
        row: int,
        qos: int,
        retain: bool,
        topic: bytes,
        block: bytes | None,
        payload: bytes,
        message: Any = None,
    ) -> None:
        """One message, for which there is room and credit. Dropped if it is larger than the client takes."""
        new_alias = 0
        name = topic
        if self.aliases_max and qos < 2:  # a message that waits for the log must not define what others use
            alias = self.aliases.get(topic)
            if alias is not None:
                name = b""
            elif len(self.aliases) < self.aliases_max:
                alias = new_alias = len(self.aliases) + 1
            if alias is not None:
                block = TOPIC_ALIAS + PIDS[alias] + (block or b"")
        first = 0x30 | qos << 1 | retain
        pid = NO_PID if qos else b""
        head, tail = packet(first, name, pid, block, payload)
        if self.packet_max and len(head) + len(pid) + len(tail) > self.packet_max:
            self._post.counters.dropped["larger than the client takes"] += 1  # [MQTT-3.1.2-25]
            return
        if new_alias:
            self.aliases[topic] = new_alias
        if qos:
            self._send_pieces(reader, positions, row, row + 1, qos, [head, pid, tail], message)
        else:
            self._put_messages(head + tail, 1, 0)

    def send_retained(self, target: Target, rows: Rows, messages: Sequence[Any]) -> int:
        """Retained messages for a new subscription, one row each: how many, as far as there is room."""
        for row in range(len(rows)):
            qos = min(rows.flags[row] & QOS_MASK, target.qos)
            if not self.room() or (qos and not self.credit(1)):
                return row
            block = block_of(rows, row, 0) + target.sub_ids if self.v5 else None
            self._send_one(
                RETAINED_READER, rows.positions, row, qos, True, rows.topics[row], block, rows.payloads[row],
                messages[row],
            )  # fmt: skip
        return len(rows)

    def send_again(
        self,
        target_of: Callable[[bytes], Target | None],
        flight: Flight,
        rows: Rows,
        row: int,
        enough: Callable[[], bool],
    ) -> int:
        """Messages of a flight, from its first on, with their packet ids [MQTT-4.4.0-1]; `row` is the first one's, and
        the rows after it are the following. How many were sent, as far as there is room. `target_of`: how messages of a
        topic are put for this client now, None if it no longer wants them. `enough`: whether to leave the rest."""
        post = self._post
        flights: Flights = self.session.flights  # type: ignore[union-attr,assignment]
        elapsed_s = max(0, post.now_ms - rows.time_ms) // 1000
        handed_over = not flight.reader.number  # a retained message for a new subscription
        topic: bytes | None = None
        target: Target | None = None
        sub_ids = b""
        replay = flight.reader.subscription is not None and self.v5
        positions = rows.positions
        count = 0
        data: list[bytes] = []
        too_large: list[int] = []
        most = min(flight.count, max(1, self.window - self.used), len(positions) - row)
        while count < most and positions[row + count] == flight.positions[count]:
            at = row + count
            if rows.topics[at] != topic:
                if count and enough():
                    break
                topic = rows.topics[at]
                target = target_of(topic)
                sub_ids = target.sub_ids if target is not None else b""
            retain = handed_over or bool(target and target.retain and rows.flags[at] & RETAIN)
            if replay:
                block = block_of(rows, at, elapsed_s) + sub_ids + replay_block(rows.time_ms, positions[at])
                head, tail = packet(0x38 | flight.qos << 1 | retain, rows.topics[at], NO_PID, block, rows.payloads[at])
            else:
                key = key_of(self.v5, flight.qos, retain, sub_ids)
                head, _, tail = pieces(rows, at, at + 1, key, elapsed_s, dup=True)
            if self.packet_max and len(head) + 2 + len(tail) > self.packet_max:
                too_large.append(flight.pid + count)
            else:
                data += (head, PIDS[flight.pid + count], tail)
            count += 1
        sent = count - len(too_large)
        if sent:
            if not self.used:
                self.ack_seen_s = post.now_s
            self.used += sent
            joined = b"".join(data)
            if flight.qos == 2:
                self._hold_message(joined)  # its record may still be on its way, if the client is quickly back
            else:
                self._message(joined)
            post.counters.publishes_sent += sent
        for pid in too_large:
            post.counters.dropped["larger than the client takes"] += 1  # [MQTT-3.1.2-25]
            found = flights.find(pid)
            if found is not None:
                flights.finish(*found, 1)
        return count

    # ── the socket ──

    def write(self) -> int:
        """Hand this tick's bytes to the socket: how many."""
        out = self.out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        size = len(data)
        was_full = self.paused
        waiting = self.link.write(data)
        self.out_bytes -= size
        if waiting or self.stuck_bytes:
            self._stuck(waiting, waiting - self.stuck_bytes - size)
            if was_full:
                self.unread_bytes += size  # messages do not come then: it asks and asks and takes no answer
            self._judge()
        else:
            self._post.sending_bytes -= size
        return size

    def _judge(self) -> None:
        """Whether the client may ask for more."""
        link = self.link
        many = self._post.sending_bytes >= SENDING_BYTES_MAX and self.stuck_bytes >= SENDING_SHARE_BYTES
        if many or self.unread_bytes > ANSWERS_UNREAD_BYTES_MAX:
            if not link.stopped & Stop.ANSWERS_UNREAD:
                self._post.counters.refused["answers not read"] += 1
                link.stop(Stop.ANSWERS_UNREAD)
        elif link.stopped & Stop.ANSWERS_UNREAD:
            link.go_on(Stop.ANSWERS_UNREAD, self._post.now_s)

    def look(self) -> None:
        """Some of what was stuck may have left by itself."""
        waiting = self.link.unsent()
        self._stuck(waiting, waiting - self.stuck_bytes)
        self._judge()

    def _stuck(self, waiting: int, more: int) -> None:
        self._post.sending_bytes += more
        if more < 0 or not self.stuck_bytes:
            self.taken_s = self._post.now_s
        self.stuck_bytes = waiting
        if waiting:
            self._post.stuck.add(self)
        else:
            self._post.stuck.discard(self)

    def drained(self) -> None:
        """The socket takes bytes again."""
        self.paused = False
        self.unread_bytes = 0
        self.look()

    def closed(self) -> None:
        """The link is gone, and all that waited for it."""
        self._stuck(0, -self.out_bytes - self.stuck_bytes)
        self.out_bytes = 0
        self.out = []
        self.waiting = {}
        self.paused = True


def recorded(session: Session, reader: Reader) -> bool:
    """Whether flights of the session for a reader are to be known after a crash."""
    return session.persistent or (reader.number != 0 and reader.session is not session)


def _spans(positions: Sequence[int], a: int, b: int) -> list[range]:
    """The positions of rows a … b-1 as ranges."""
    if isinstance(positions, range):
        return [positions[a:b]]
    spans: list[range] = []
    start = a
    for i in range(a + 1, b + 1):
        if i == b or positions[i] != positions[i - 1] + 1:
            spans.append(range(positions[start], positions[i - 1] + 1))
            start = i
    return spans
