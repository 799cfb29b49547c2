"""A session: an identity, its subscriptions, a position, and the few messages in flight.

Never a queue of messages. A session whose client is away is a position in the log and nothing else:
no copies, no work (S3.11). What it missed is read from the log when it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.session.flights import Flight, Flights

if TYPE_CHECKING:
    from tidegate.session.link import Link

NEVER = 0xFFFFFFFF  # session expiry: never


@dataclass(frozen=True, slots=True)
class StoredWill:
    """A will as it waits: the message, and how long after the connection's end it is sent."""

    topic: bytes
    payload: bytes
    qos: int
    retain: bool
    delay_s: int
    expiry_s: int | None
    properties: bytes


class Reader:
    """A place in the log and who reads there: a session's main reader, one per `$replay` subscription,
    one per shared group.

    `live`: it has everything up to the log's end and gets new messages as they arrive; `cursor` then means
    nothing. Otherwise `cursor` is the next position to read.
    """

    __slots__ = (
        "blocked",
        "cursor",
        "floor",
        "held",
        "held_bytes",
        "held_end",
        "key",
        "live",
        "number",
        "queued",
        "reading",
        "resend",
        "session",
        "skip",
        "subscription",
        "targets",
        "wanted",
    )

    def __init__(self, number: int, session: Session | None, cursor: int) -> None:
        self.number = number  # its name in the log
        self.session = session  # None: a shared group, whose members have sessions
        self.cursor = cursor
        self.floor = cursor  # position last written to the log for it
        self.live = False
        self.blocked = False  # waits for an acknowledgement or for its socket
        self.queued = False  # has its turn coming in the catch-up queue
        self.reading = False  # a read from disk is under way
        self.held: list[Any] | None = None  # runs read from disk and not yet sent
        self.held_bytes = 0
        self.held_end = 0  # the position after what is held
        self.resend: list[Flight] | None = None  # flights to send again after a reconnection
        self.skip: set[int] | None = None  # positions that must not be sent again (QoS 2 before a crash)
        self.subscription: Subscription | None = None  # for a $replay reader: the one it serves
        # While catching up: topic, and the subscriptions that match it → how to deliver it.
        self.targets: dict[bytes | tuple[Subscription, ...], Any] | None = None
        self.wanted: Any = None  # its filters as the log's index takes them, while it reads from disk
        self.key: tuple[bytes, bytes] | None = None  # for a shared group: (group, filter)

    def __repr__(self) -> str:
        return f"Reader({self.number}, cursor={self.cursor}, live={self.live}, blocked={self.blocked})"


class Subscription:
    """One filter of one session. `filter` is as the client wrote it; `pattern` is what is matched."""

    __slots__ = ("filter", "no_local", "pattern", "qos", "reader", "retain_as_published", "session", "since", "sub_id")

    def __init__(
        self,
        session: Session,
        filter: bytes,
        pattern: bytes,
        qos: int,
        since: int,
        *,
        no_local: bool = False,
        retain_as_published: bool = False,
        sub_id: int = 0,
        reader: Reader | None = None,
    ) -> None:
        self.session = session
        self.filter = filter
        self.pattern = pattern
        self.qos = qos
        self.since = since  # what was published before does not belong to it (S2.16)
        self.no_local = no_local
        self.retain_as_published = retain_as_published
        self.sub_id = sub_id
        self.reader = reader  # None: the session's main reader; else its $replay reader or its group


class Session:
    __slots__ = (
        "away_since_ms",
        "client_id",
        "expires_at_s",
        "expiry_s",
        "flights",
        "inbound",
        "link",
        "live_from",
        "next_pid",
        "number",
        "reader",
        "since_max",
        "subscriptions",
        "tenant",
        "will",
        "will_at_s",
    )

    def __init__(self, number: int, client_id: bytes, tenant: bytes, expiry_s: int, position: int) -> None:
        self.number = number
        self.client_id = client_id
        self.tenant = tenant
        self.expiry_s = expiry_s
        self.subscriptions: dict[bytes, Subscription] = {}
        self.reader = Reader(number, self, position)
        self.link: Link | None = None
        self.flights: Flights | None = None  # made when first needed: most sleeping sessions have none
        self.next_pid = 1
        self.inbound: set[int] | None = None  # QoS 2 packet ids received and not yet released
        self.since_max = 0  # the latest `since` of its subscriptions
        self.live_from = position  # QoS 0 from before its connection is not owed to it (S4.4)
        self.will: StoredWill | None = None
        self.will_at_s = 0.0  # when a delayed will is due, 0 if none is pending
        self.expires_at_s = 0.0  # when an absent session ends, 0 while connected
        self.away_since_ms = 0  # wall clock, 0 while connected

    @property
    def persistent(self) -> bool:
        return self.expiry_s > 0

    def in_flight(self) -> Flights:
        if self.flights is None:
            self.flights = Flights(self.next_pid)
        return self.flights

    def rest(self) -> None:
        """Give back what only a connected session needs."""
        if self.flights is not None and not self.flights.queue:
            self.next_pid = self.flights.next_pid
            self.flights = None
        if not self.inbound:
            self.inbound = None
        reader = self.reader
        reader.targets = reader.wanted = reader.held = reader.resend = None
        reader.held_bytes = 0
