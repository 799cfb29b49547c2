"""The core's side of one connection: what the client negotiated, and the bytes that wait to be sent.

A link knows no socket. The server derives its connection class from it and supplies the three actions at
the end (`write`, `close`, `throttle`); tests and the simulator supply their own.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.session.session import Reader, Session, StoredWill


class Phase(IntEnum):
    """The life of a connection. Only CONNECT is accepted in NEW, and never again after it [MQTT-3.1.0-1, -2].

    NEW ──CONNECT──▶ OPEN ──DISCONNECT, error, takeover, time-out──▶ CLOSED
    """

    NEW = 0
    OPEN = 1
    CLOSED = 2


class Link:
    __slots__ = (
        "ack_seen_s",
        "acks",
        "aliases_in",
        "aliases_in_max",
        "aliases_out",
        "aliases_out_max",
        "client_id",
        "connected_at_s",
        "holding",
        "keep_alive_s",
        "more",
        "on_wire",
        "out",
        "out_bytes",
        "packet_max",
        "paused",
        "peer",
        "phase",
        "problem_info",
        "refused",
        "rest",
        "retained_streams",
        "seen_s",
        "session",
        "simple",
        "v5",
        "version",
        "waiting",
        "watched",
        "will",
        "window",
    )

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self.session: Session | None = None
        self.client_id = b""
        self.version = 4
        self.v5 = False
        self.peer = ""
        self.will: StoredWill | None = None
        # Incoming: bytes of a packet that is not complete yet; `more` is how many bytes it takes to be so.
        self.rest = bytearray()
        self.more = 0
        self.seen_s = 0.0
        self.keep_alive_s = 0
        self.watched = 0  # the second at which it is looked at next
        self.connected_at_s = 0.0
        self.acks: list[bytes] = []  # packet ids of QoS 1 messages whose PUBACK waits for the log
        self.aliases_in: dict[int, bytes] = {}
        self.aliases_in_max = 0
        # Outgoing: `out` is written once per tick.
        self.out: list[bytes] = []
        self.out_bytes = 0
        self.holding = 0  # QoS 2 messages that wait for the log; later messages wait behind them
        self.paused = False  # the socket does not take more at the moment
        self.window = 0  # unacknowledged messages the client takes at a time
        self.on_wire = 0  # … and how many there are
        self.ack_seen_s = 0.0  # when it last acknowledged something, or got something to acknowledge
        self.packet_max = 0  # 0: no limit
        self.aliases_out: dict[bytes, int] = {}
        self.aliases_out_max = 0
        self.simple = True  # neither aliases nor a packet limit: ready-made bytes can be sent as they are
        self.problem_info = True
        self.waiting: list[Reader] = []  # readers that go on when it acknowledges or its socket drains
        self.retained_streams: list[Any] | None = None  # retained matches that are being handed over
        self.refused = False  # a message of it was, and that has been reported

    def let_go(self) -> None:
        """A message that waited for the log has been sent."""
        self.holding -= 1

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Send what has been written, then close."""
        raise NotImplementedError

    def throttle(self, on: bool) -> None:
        """Stop or resume reading from the client."""
        raise NotImplementedError
