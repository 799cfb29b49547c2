"""One TCP connection: a link with a transport.

How it ends. Closing a socket that holds bytes nobody has read makes the kernel send a reset, and a reset can overtake
what was written last: the DISCONNECT that says why. So the write side is shut first, and what the peer still sends is
read and thrown away until it closes too, or until a limit is reached.

    open ──close()──▶ lingering ──the peer closes──▶ lost
                          └──LINGER_S or LINGER_BYTES_MAX──▶ cut off
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, cast

from tidegate.broker.deadlines import watch_new
from tidegate.limits import LINGER_S, READ_TURN_BYTES, SEND_BYTES_MAX
from tidegate.session.link import CLOSED, Link, Stop

# What is read from a connection that is being closed: more than the buffers of both its sockets hold (Linux: 6 and
# 4 MB), so that all that was under way when the peer could learn of the end is taken from it.
LINGER_BYTES_MAX = 16 << 20

# How long each may linger when the broker itself is about to end: a round trip to the other side of the world.
LINGER_STOPPING_S = 0.25

if TYPE_CHECKING:
    from tidegate.broker.core import Broker


class Connection(Link, asyncio.Protocol):
    __slots__ = (
        "broker",
        "buffered",
        "cut_off",
        "descriptor",
        "discarded_bytes",
        "open_connections",
        "transport",
        "turn_bytes",
    )

    def __init__(self, broker: Broker, open_connections: set[Connection]) -> None:
        super().__init__()
        self.broker = broker
        self.open_connections = open_connections
        self.transport: asyncio.Transport | None = None
        self.descriptor = -1
        self.buffered = False  # the transport holds bytes that the socket did not take
        self.cut_off: asyncio.TimerHandle | None = None  # set while it lingers
        self.discarded_bytes = 0
        self.turn_bytes = 0

    # ── what the event loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.peer = ":".join(str(part) for part in (transport.get_extra_info("peername") or ("?",))[:2])
        if len(self.open_connections) >= self.broker.config.listen.connections_max or self.broker.closing:
            self.broker.counters.refused["too many connections"] += 1
            why = "the broker is shutting down" if self.broker.closing else "too many connections"
            self.broker.report("connection.refused", {"peer": self.peer, "why": why})
            self.phase = CLOSED
            self.transport.abort()
            return
        self.open_connections.add(self)
        self.descriptor = transport.get_extra_info("socket").fileno()
        self.transport.set_write_buffer_limits(high=SEND_BYTES_MAX // 2, low=SEND_BYTES_MAX // 8)
        self.broker.accept(self)
        watch_new(self.broker, self)

    def data_received(self, data: bytes) -> None:
        if self.phase is CLOSED or self.cut_off is not None:
            self.discarded_bytes += len(data)
            if self.discarded_bytes > LINGER_BYTES_MAX and self.transport is not None:
                self.transport.abort()
            return
        self.turn_bytes += len(data)
        if self.turn_bytes > READ_TURN_BYTES:
            # The event loop would go on reading as long as there is something: others get their turn first.
            self.turn_bytes = 0
            self.stop(Stop.TURN)
            asyncio.get_running_loop().call_soon(self.go_on, Stop.TURN, self.broker.now_s)
        try:
            self.broker.receive(self, data)
        except OSError as error:
            # The event loop would take it for the peer's, and close the connection: this one is ours.
            raise RuntimeError("an error of the system that nobody foresaw") from error
        self.seen_s = time.monotonic()  # the broker's own time may be older, after a pause of the machine

    def pause_writing(self) -> None:
        self.outbox.paused = True

    def resume_writing(self) -> None:
        self.broker.drained(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.open_connections.discard(self)
        if self.cut_off is not None:
            self.cut_off.cancel()
            self.cut_off = None
        self.broker.lost(self)
        self.transport = None

    # ── what the core calls ──

    def write(self, data: bytes) -> int:
        """Straight into the socket, while it takes everything; the transport keeps what it does not."""
        transport = self.transport
        if transport is None or self.cut_off is not None:
            return 0
        if self.buffered:
            waiting_bytes = transport.get_write_buffer_size()
            if waiting_bytes:
                transport.write(data)
                return transport.get_write_buffer_size()
            self.buffered = False
        try:
            sent = os.write(self.descriptor, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            transport.abort()
            return 0
        if sent < len(data):
            self.buffered = True
            transport.write(data[sent:])
            return transport.get_write_buffer_size()
        return 0

    def unsent(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def close(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self.cut_off is None:
            transport.write_eof()  # goes out behind what is buffered
            self.rest = bytearray()
            transport.resume_reading()  # it may have been throttled, or ignored
        elif self.broker.closing:
            self.cut_off.cancel()
        else:
            return
        # A peer that reads no more, sends without end or never closes must not keep its place for ever.
        linger_s = LINGER_STOPPING_S if self.broker.closing else LINGER_S
        self.cut_off = asyncio.get_running_loop().call_later(linger_s, transport.abort)

    def throttle(self, on: bool) -> None:
        if self.transport is not None and not self.transport.is_closing() and self.cut_off is None:
            if on:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
