"""One TCP connection: a link with a transport."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, cast

from tidegate.broker import timers
from tidegate.broker.ingest import ingest
from tidegate.errors import PeerError
from tidegate.limits import ANSWERS_BYTES_MAX, LINGER_S, SEND_BYTES_MAX
from tidegate.session.link import Link, Phase

if TYPE_CHECKING:
    from tidegate.broker.core import Broker


class Connection(Link, asyncio.Protocol):
    __slots__ = ("broker", "buffered", "descriptor", "ignored", "open_connections", "transport")

    def __init__(self, broker: Broker, open_connections: set[Connection]) -> None:
        super().__init__()
        self.broker = broker
        self.open_connections = open_connections
        self.transport: asyncio.Transport | None = None
        self.descriptor = -1
        self.buffered = False  # the transport holds bytes that the socket did not take
        self.ignored = False  # not read from until it has taken its answers

    # ── what the event loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if len(self.open_connections) >= self.broker.config.listen.connections_max or self.broker.closing:
            self.broker.counters.refused["too many connections"] += 1
            self.phase = Phase.CLOSED
            self.transport.abort()
            return
        self.open_connections.add(self)
        self.descriptor = transport.get_extra_info("socket").fileno()
        self.peer = ":".join(str(part) for part in (transport.get_extra_info("peername") or ("?",))[:2])
        self.transport.set_write_buffer_limits(high=SEND_BYTES_MAX, low=SEND_BYTES_MAX // 4)
        timers.watch_new(self.broker, self)

    def data_received(self, data: bytes) -> None:
        if self.phase is not Phase.CLOSED:
            try:
                ingest(self.broker, self, data)
            except PeerError as error:
                self.broker.fault(self, error)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        if self.ignored:
            self.ignored = False
            if self.transport is not None and not self.transport.is_closing() and self not in self.broker.throttled:
                self.transport.resume_reading()
        self.broker.drained(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.open_connections.discard(self)
        self.broker.lost(self)
        self.transport = None

    # ── what the core calls ──

    def write(self, data: bytes) -> None:
        """Straight into the socket, while it takes everything; the transport keeps what it does not."""
        transport = self.transport
        if transport is None:
            return
        if self.buffered:
            waiting_bytes = transport.get_write_buffer_size()
            if waiting_bytes:
                transport.write(data)
                if waiting_bytes > ANSWERS_BYTES_MAX and not self.ignored:
                    # Messages stop coming long before: it asks and asks and takes no answer.
                    self.ignored = True
                    self.broker.counters.refused["answers not read"] += 1
                    transport.pause_reading()
                return
            self.buffered = False
        try:
            sent = os.write(self.descriptor, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            transport.abort()
            return
        if sent < len(data):
            self.buffered = True
            transport.write(data[sent:])

    def close(self) -> None:
        transport = self.transport
        if transport is not None:
            if transport.get_write_buffer_size() and not transport.is_closing():
                # A peer that reads no more must not keep its place for ever.
                asyncio.get_running_loop().call_later(LINGER_S, transport.abort)
            transport.close()

    def throttle(self, on: bool) -> None:
        if self.transport is not None and not self.transport.is_closing():
            if on:
                self.transport.pause_reading()
            elif not self.ignored:
                self.transport.resume_reading()
