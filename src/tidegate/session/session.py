"""A session: an identity, its subscriptions, a position, and the few messages in flight.

Never a queue of messages. A session whose client is away is a position in the log and nothing else:
no copies, no work (S3.11). What it missed is read from the log when it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.session.flights import Flights
from tidegate.session.reader import Reader

if TYPE_CHECKING:
    from tidegate.session.link import Link

NEVER = 0xFFFFFFFF  # session expiry: never
DEFAULT_TENANT = b"default"


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


class Subscription:
    """One filter of one session. `filter` is as the client wrote it; `pattern` is what is matched."""

    __slots__ = ("filter", "no_local", "pattern", "qos", "reader", "retain_as_published", "session", "since", "sub_id")

    def __init__(
        self,
        session: Session,
        filter: bytes,
        pattern: bytes,
        qos: int,
        since: tuple[int, ...],
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
        self.since = since  # per partition: what was announced before does not belong to it (S2.16)
        self.no_local = no_local
        self.retain_as_published = retain_as_published
        self.sub_id = sub_id
        self.reader = reader  # None: the session's main reader; else its $replay reader or its group


class Session:
    __slots__ = (
        "away_since_ms",
        "client_id",
        "due",
        "ended",
        "expires_at_s",
        "expiry_s",
        "flights",
        "inbound",
        "known",
        "link",
        "live_from",
        "next_number",
        "number",
        "own_readers",
        "reader",
        "since_max",
        "subscriptions",
        "tenant",
        "will",
        "will_at_s",
    )

    def __init__(self, number: int, client_id: bytes, tenant: bytes, expiry_s: int, cursors: list[int]) -> None:
        self.number = number
        self.client_id = client_id
        self.tenant = tenant
        self.expiry_s = expiry_s
        self.subscriptions: dict[bytes, Subscription] = {}
        self.reader = Reader(number, self, cursors)
        self.own_readers: dict[Reader, None] | None = None  # of its $replay subscriptions, in their order
        self.link: Link | None = None
        self.flights: Flights | None = None  # made when first needed: most sleeping sessions have none
        self.next_number = 1
        self.inbound: set[bytes] | None = None  # QoS 2 packet ids received and not yet released
        self.since_max: tuple[int, ...] = ()  # the latest `since` of its subscriptions
        self.live_from: tuple[int, ...] = tuple(cursors)  # QoS 0 from before its connection is not owed to it (S4.4)
        self.due: dict[bytes, Any] | None = None  # filter → retained messages that are still to be handed over
        self.will: StoredWill | None = None
        self.will_at_s = 0.0  # when a delayed will is due, 0 if none is pending
        self.expires_at_s = 0.0  # when an absent session ends, 0 while connected
        self.away_since_ms = 0  # wall clock, 0 while connected
        self.known = False  # there is, or will be, a record of it in the log or a snapshot
        self.ended = False  # its subscriptions are still being taken out of the index

    @property
    def persistent(self) -> bool:
        return self.expiry_s > 0

    def in_flight(self) -> Flights:
        if self.flights is None:
            self.flights = Flights(self.next_number)
        return self.flights

    def readers(self) -> list[Reader]:
        """Its own: the main one, and those of its $replay subscriptions."""
        return [self.reader, *self.own_readers] if self.own_readers else [self.reader]

    def rest(self) -> None:
        """Give back what only a connected session needs."""
        if self.flights is not None and not self.flights:
            self.next_number = self.flights.next_number
            self.flights = None
        if not self.inbound:
            self.inbound = None
