"""Publishing in bulk over one connection: thousands of packets a write, their acknowledgements compared as one.

    publish ──→ waiting ──→ sent, not acknowledged ──→ done
                   ↑               │
                   └── lost ───────┘   the connection broke: connect again, send again with DUP

A message counts as done with its PUBACK, or with its PUBREC for QoS 2: from then on the broker has it. So every
message with QoS 1 or 2 arrives at least once, in order. QoS 0 messages are handed to the connection, and `flush` makes
sure that the broker has read them.

One thread drives it; nothing happens between the calls.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NoReturn, Self

from tidegate.client.batch import Layouts, Messages, answers, releases
from tidegate.errors import BrokerRefused, BrokerUnreachable, ClientError, PeerError, PublishRefused
from tidegate.limits import PACKET_IDS
from tidegate.wire import (
    MQTT_5,
    Connack,
    Connect,
    Disconnect,
    PacketStream,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Pubrec,
    Reason,
    decode,
    encode,
)

CHUNK_MESSAGES_MAX: Final = 2048
CHUNK_BYTES_MAX: Final = 512 << 10
"""What is laid out and written at once: enough to make the cost per call small, and a part of the window."""

UNACKNOWLEDGED_BYTES_MAX: Final = 16 << 20
"""Payloads kept to be sent again."""

PATIENCE_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 2.0
BACK_OFF_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
ANSWER_BYTES_MAX: Final = 1 << 20
"""No packet that a broker sends to a publisher is this long."""

_RECEIVE_BYTES: Final = 20 * 4096  # a multiple of both lengths of a plain PUBACK
_PUBACK, _PUBREC, _PUBCOMP = 0x40, 0x50, 0x70
_PINGREQ = b"\xc0\x00"
_KIND: Final = {Puback: _PUBACK, Pubrec: _PUBREC, Pubcomp: _PUBCOMP}

# With these reasons a broker means "not now"; with any other it would refuse the next connection as well.
_PASSING: Final = frozenset(
    (
        Reason.SERVER_UNAVAILABLE,
        Reason.SERVER_BUSY,
        Reason.SERVER_SHUTTING_DOWN,
        Reason.KEEP_ALIVE_TIMEOUT,
        Reason.CONNECTION_RATE_EXCEEDED,
    )
)


class _Lost(Exception):
    """The connection ended. Never leaves this module."""


@dataclass(slots=True)
class _Sent:
    """Messages on their way; `first` is the running number of the first one's packet id."""

    messages: Messages
    first: int
    bytes: int

    @property
    def after(self) -> int:
        return self.first + len(self.messages.firsts)


class BulkPublisher:
    """A connection for publishing. As a context manager it flushes at the end, unless there was an error."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 1883, client_id: str = "", *, patience_s: float = PATIENCE_S
    ) -> None:
        """Connects. Raises BrokerUnreachable and BrokerRefused. `patience_s`: how long a broker may be gone, or
        silent, before that is raised later on."""
        self._address = (host, port)
        self._client_id = client_id.encode()
        self._patience_s = patience_s
        self._layouts = Layouts()
        self._given = 0  # messages, since the start
        self._waiting: deque[Messages] = deque()
        self._sent: deque[_Sent] = deque()
        self._sent_bytes = 0
        # Packet ids go round: number n has id n % 65535 + 1.
        self._next = self._oldest = 0  # the next number, and the oldest that is not acknowledged
        self._early: set[int] = set()  # acknowledged before an older one
        self._kind = _PUBACK  # of the acknowledgements that are awaited
        self._tables: dict[int, tuple[tuple[int, bytes], ...]] = {}
        self._out = memoryview(b"")
        self._unread = False  # QoS 0 messages were sent that the broker may not have read
        self._pinged = False
        self._failure: Exception | None = None
        self._heard_s = time.monotonic()
        self._connect()

    # ── what it is for ──

    def publish(
        self,
        topics: Sequence[bytes],
        payloads: Sequence[bytes],
        qos: int | Sequence[int] = 1,
        retains: Sequence[bool] | None = None,
        properties: Sequence[bytes | None] | None = None,
        expiries: Sequence[int | None] | None = None,
    ) -> None:
        """Send messages, in order; returns when all are written, of which a window may not be acknowledged yet.

        `properties` are property blocks as in a PUBLISH, without their length; `expiries` are seconds. Raises
        ValueError for a message that no broker would take (nothing of the call is sent then), PublishRefused when
        the broker refuses one, also one of an earlier call, BrokerUnreachable when it is gone for too long. After
        a ClientError the publisher can only be closed."""
        self._check()
        if not topics:
            return
        messages = self._layouts.messages(
            self._given, topics, payloads, qos, retains, properties, expiries, self._packet_bytes_max
        )
        self._given += len(topics)
        if not self._busy:
            self._heard_s = time.monotonic()
        self._waiting.extend(messages.chunks(CHUNK_MESSAGES_MAX))
        while self._waiting or self._out:
            self._turn()

    def flush(self) -> None:
        """Return when everything is acknowledged, and the broker has read every QoS 0 message."""
        self._check()
        if not self._busy:
            self._heard_s = time.monotonic()
        while self._busy:
            self._turn()
        if self._unread:
            self._unread = False
            self._pinged = True
            self._out = memoryview(_PINGREQ)
            while self._pinged:
                self._turn()

    @property
    def given(self) -> int:
        """How many messages `publish` took so far."""
        return self._given

    def close(self) -> None:
        """Say goodbye. What is not acknowledged is forgotten."""
        if self._socket.fileno() < 0:
            return
        try:
            if self._failure is None and not self._out:
                # Until the broker hangs up, so that no unread byte makes the kernel reset the connection.
                self._socket.settimeout(CLOSE_TIMEOUT_S)
                self._socket.sendall(encode(Disconnect(), MQTT_5))
                self._socket.shutdown(socket.SHUT_WR)
                while self._socket.recv(_RECEIVE_BYTES):
                    pass
        except OSError:
            pass
        finally:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self.close()

    # ── one step ──

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._out or self._oldest < self._next)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._socket.fileno() < 0:
            raise ValueError("the publisher is closed")

    def _turn(self) -> None:
        """Write and read what is possible at once; if nothing is, wait for it."""
        try:
            try:
                if not self._out and self._waiting:
                    self._lay_out()
                moved = self._write() if self._out else False
                if not (self._read() or moved):
                    self._wait()
            except (_Lost, OSError) as error:
                self._resume(error)
        except (ClientError, PeerError) as error:
            self._failure = error
            raise

    def _lay_out(self) -> None:
        """Take the next waiting messages if the window allows."""
        waiting = self._waiting[0]
        kind = _PUBREC if waiting.is_qos2 else _PUBACK
        flying = self._next - self._oldest
        if kind != self._kind or kind == _PUBREC:
            # QoS 2 goes chunk by chunk, with nothing else on its way: PUBACKs and PUBRECs have no common order.
            if flying:
                return
            self._kind = kind
        total = len(waiting.firsts)
        number = self._next % PACKET_IDS
        count = min(total, self._window - flying, PACKET_IDS - number)
        worth = min(total, max(1, self._window // 4), PACKET_IDS - number)
        if count < worth or self._sent_bytes > UNACKNOWLEDGED_BYTES_MAX:
            return
        count, size = _within(waiting.sizes, count, CHUNK_BYTES_MAX)
        chunk = waiting.cut(0, count) if count < total else waiting
        self._out = memoryview(self._layouts.encode(chunk, number + 1))
        if count < total:
            self._waiting[0] = waiting.cut(count, total)
        else:
            self._waiting.popleft()
        kept = chunk.acknowledged()
        self._unread = self._unread or len(kept.firsts) < count
        if kept.firsts:
            self._sent.append(_Sent(kept, self._next, size))
            self._sent_bytes += size
            self._next += len(kept.firsts)

    def _write(self) -> bool:
        try:
            written = self._socket.send(self._out)
        except BlockingIOError:
            return False
        self._out = self._out[written:]
        return True

    def _read(self) -> bool:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise _Lost("it closed the connection")
        self._heard_s = time.monotonic()
        if self._stream.pending_bytes or not self._plain(data):
            for first, body in self._stream.feed(data):
                self._packet(first, body)
        self._settle()
        return True

    def _wait(self) -> None:
        left_s = self._heard_s + self._patience_s - time.monotonic()
        if left_s <= 0:
            self._give_up("it acknowledges nothing")
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        poll.poll(left_s * 1000)

    # ── acknowledgements ──

    def _plain(self, data: bytes) -> bool:
        """Whether these are the next acknowledgements in order, all alike and without a complaint: then they are
        taken."""
        tables = self._tables.get(self._kind)
        if tables is None:
            unmatched = Reason.NO_MATCHING_SUBSCRIBERS
            tables = (4, answers(self._kind)), (5, answers(self._kind, unmatched))
            self._tables[self._kind] = tables
        at = self._oldest % PACKET_IDS
        for size, table in tables:
            count, odd = divmod(len(data), size)
            if not odd and count <= self._next - self._oldest and data == table[at * size : (at + count) * size]:
                self._oldest += count
                return True
        return False

    def _packet(self, first: int, body: bytes) -> None:
        packet = decode(first, body, MQTT_5, from_server=True)
        match packet:
            case Puback() | Pubrec() | Pubcomp() if _KIND[type(packet)] == self._kind:
                number = self._oldest + (packet.packet_id - 1 - self._oldest) % PACKET_IDS
                if number >= self._next or number in self._early:
                    return  # of a message that was sent again, or none of ours
                if packet.reason >= 0x80 and self._kind != _PUBCOMP:
                    self._refused(number, packet.reason, packet.properties.reason_string)
                self._early.add(number)
                while self._oldest in self._early:
                    self._early.remove(self._oldest)
                    self._oldest += 1
            case Pingresp():
                self._pinged = False
            case Disconnect(reason, properties):
                if reason in _PASSING:
                    raise _Lost(f"it closed the connection: {_words(reason, properties)}")
                raise BrokerRefused(f"{self._where} closed the connection: {_words(reason, properties)}", reason)
            case _:
                pass  # nothing else concerns a publisher

    def _settle(self) -> None:
        """Let go of what is acknowledged."""
        while self._sent and self._sent[0].after <= self._oldest:
            done = self._sent.popleft()
            self._sent_bytes -= done.bytes
            if self._kind == _PUBREC:
                # The broker has them. The ids are free again after PUBREL and PUBCOMP. [MQTT-4.3.3-4]
                count = done.after - done.first
                self._out = memoryview(releases(done.first % PACKET_IDS + 1, count))
                self._kind, self._oldest = _PUBCOMP, done.first

    def _refused(self, number: int, reason: int, explained: bytes | None) -> NoReturn:
        sent = next(sent for sent in self._sent if number < sent.after)
        i = number - sent.first
        topic = sent.messages.topic(i)
        which = sent.messages.numbers[i]
        shown = topic[:80].decode("utf-8", "backslashreplace")
        words = _words(reason, Properties(reason_string=explained))
        raise PublishRefused(f"{self._where} refused message {which} to {shown!r}: {words}", reason, which, topic)

    # ── the connection ──

    @property
    def _where(self) -> str:
        host, port = self._address
        return f"{host}:{port}"

    def _connect(self) -> None:
        """Open a connection. Raises BrokerUnreachable, or BrokerRefused for a refusal that is final."""
        self._stream = PacketStream(ANSWER_BYTES_MAX)
        try:
            self._socket = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
        except OSError as error:
            raise BrokerUnreachable(f"cannot connect to {self._where}: {error.strerror or error}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(encode(Connect(MQTT_5, self._client_id), MQTT_5))
            connack = self._connack()
        except (OSError, PeerError) as error:
            self._socket.close()
            raise BrokerUnreachable(f"{self._where} did not answer as an MQTT 5 broker: {error}") from error
        if connack.reason:
            self._socket.close()
            message = f"{self._where} refused the connection: {_words(connack.reason, connack.properties)}"
            if connack.reason in _PASSING:
                raise BrokerUnreachable(message)
            raise BrokerRefused(message, connack.reason)
        self._window = connack.properties.receive_maximum or PACKET_IDS
        self._packet_bytes_max = connack.properties.maximum_packet_size or 1 << 28
        self._socket.setblocking(False)

    def _connack(self) -> Connack:
        until_s = time.monotonic() + CONNECT_TIMEOUT_S
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            data = self._socket.recv(4096)
            if not data:
                raise ConnectionError("it closed the connection")
            for first, body in self._stream.feed(data):
                packet = decode(first, body, MQTT_5, from_server=True)
                if isinstance(packet, Connack):
                    return packet
                raise ConnectionError(f"it sent a {type(packet).__name__} before a CONNACK")
        raise TimeoutError("no CONNACK")

    def _resume(self, cause: Exception) -> None:
        """Connect again, and put what is not acknowledged back in front of what is waiting."""
        self._socket.close()
        self._out = memoryview(b"")
        self._pinged = False
        for sent in reversed(self._sent):  # none of the messages that only lack their PUBCOMP
            unfinished = sent.messages.cut(max(0, self._oldest - sent.first), len(sent.messages.firsts))
            self._waiting.appendleft(unfinished.repeated())
        self._sent.clear()
        self._early.clear()
        self._sent_bytes = 0
        self._next = self._oldest = 0
        self._kind = _PUBACK
        why: Exception = cause
        for pause_s in _pauses():
            if time.monotonic() + pause_s > self._heard_s + self._patience_s:
                self._give_up(str(why))
            time.sleep(pause_s)
            try:
                self._connect()
                return
            except BrokerUnreachable as error:
                why = error

    def _give_up(self, why: str) -> NoReturn:
        unfinished = self._next - self._oldest + sum(len(waiting.firsts) for waiting in self._waiting)
        raise BrokerUnreachable(
            f"{self._where} was not there for {self._patience_s:g} s, {unfinished} messages are not acknowledged: {why}"
        )


def _within(sizes: Sequence[int], count: int, bytes_max: int) -> tuple[int, int]:
    """How many of the first `count` packets have `bytes_max` together, but at least one, and their bytes."""
    total = 0
    for taken, size in enumerate(sizes[:count]):
        if taken and total + size > bytes_max:
            return taken, total
        total += size
    return count, total


def _pauses() -> Iterator[float]:
    yield from BACK_OFF_S
    while True:
        yield BACK_OFF_S[-1]


def _words(reason: int, properties: Properties) -> str:
    try:
        name = Reason(reason).name.replace("_", " ").lower()
    except ValueError:
        name = "unknown reason"
    explained = properties.reason_string
    said = f", {explained.decode('utf-8', 'replace')}" if explained else ""
    return f"{name} (0x{reason:02X}{said})"
