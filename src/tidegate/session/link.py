"""The core's side of one connection: what the client negotiated, and what has come of a packet so far.

What leaves is the outbox's (`delivery/outbox`). A link knows no socket. The server derives its connection class from it
and supplies the three actions at the end (`write`, `close`, `throttle`); tests and the simulator supply their own.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.session.session import Session


class Phase(IntEnum):
    """The life of a connection. Only CONNECT is accepted in NEW, and never again after it [MQTT-3.1.0-1, -2].

    NEW ──CONNECT──▶ OPEN ──DISCONNECT, error, takeover, time-out──▶ CLOSED
    """

    NEW = 0
    OPEN = 1
    CLOSED = 2


NEW, OPEN, CLOSED = Phase  # where they are asked for each message: an enumeration's attributes are slow to look up


class Stop(IntFlag):
    """Why the broker reads nothing from a client at the moment. Such a client is not silent: it is not heard."""

    BUSY = 1  # a packet of it is being worked on in steps
    DISK = 2  # its messages are more than the disk has taken
    ANSWERS_HELD = 4  # its answers wait for the log
    ANSWERS_UNREAD = 8  # it does not read its answers
    TURN = 16  # others are read first


class Link:
    __slots__ = (
        "aliases_in",
        "aliases_in_max",
        "asked",
        "blocks",
        "busy",
        "client_id",
        "connected_at_s",
        "greeted",
        "keep_alive_s",
        "more",
        "outbox",
        "peer",
        "phase",
        "problem_info",
        "receiving",
        "refused",
        "rest",
        "routes",
        "seen_s",
        "session",
        "stopped",
        "tenant",
        "trace",
        "v5",
        "version",
        "watched",
    )

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self.session: Session | None = None
        self.outbox: Any = None  # an Outbox, from the first answer on
        self.client_id = b""
        self.tenant = b""
        self.routes: dict[bytes, Any] = {}  # those of its tenant: topic → where its messages go
        self.version = 4
        self.v5 = False
        self.peer = ""
        # Bytes of a packet that is not complete yet; `more` is how many it takes to be so.
        self.rest = bytearray()
        self.more = 0
        self.stopped = Stop(0)  # why nothing is read from it
        self.busy = False  # a packet of it is being worked on: what has been read after it waits in `rest`
        self.seen_s = 0.0
        self.keep_alive_s = 0
        self.watched = 0  # the second at which it is looked at next
        self.connected_at_s = 0.0
        self.greeted = False  # its CONNACK is on its way: before it there is no other word [MQTT-3.2.0-1]
        self.receiving = 0  # QoS 1 and 2 messages of the client that have not been answered to the end
        self.asked: dict[bytes, int] = {}  # QoS 2 packet ids that came again, and how often: answers wait for the log
        self.aliases_in: dict[int, bytes] = {}
        self.aliases_in_max = 0
        self.blocks: dict[bytes, Any] = {}  # property blocks it sent lately, and what they mean
        self.problem_info = True
        self.refused = False  # a message of it was, and that has been reported
        self.trace: Any = None  # a Trace, while somebody watches its packets

    def stop(self, why: Stop) -> None:
        if not self.stopped:
            self.throttle(True)
        self.stopped |= why

    def go_on(self, why: Stop, now_s: float) -> None:
        if self.stopped & why:
            self.stopped &= ~why
            if not self.stopped:
                self.seen_s = now_s
                self.throttle(False)

    def write(self, data: bytes) -> int:
        """Send; returns how many bytes wait because the socket does not take them."""
        raise NotImplementedError

    def unsent(self) -> int:
        """How many bytes wait at the moment."""
        raise NotImplementedError

    def close(self) -> None:
        """Send what has been written, then close."""
        raise NotImplementedError

    def throttle(self, on: bool) -> None:
        """Stop or resume reading from the client."""
        raise NotImplementedError
