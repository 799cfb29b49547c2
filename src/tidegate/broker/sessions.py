"""The table of sessions: who is known, who is connected; coming, going, ending."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tidegate.broker import state, tracing
from tidegate.delivery.gate import Job
from tidegate.errors import PeerError
from tidegate.limits import FILTERS_STEP
from tidegate.log.run import NO_EXPIRY, NOT_KEPT, RETAIN
from tidegate.session import changes
from tidegate.session.link import Link
from tidegate.session.session import NEVER, Session, StoredWill, Subscription

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# Whose readers are those of sessions that have ended.
NOBODY = Session(0, b"", b"", 0, [0])


class Sessions:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._by_client: dict[bytes, Session] = {}
        self.links: set[Link] = set()  # accepted, and open

    def __len__(self) -> int:
        return len(self._by_client)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._by_client

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_client.values())

    def get(self, client_id: bytes) -> Session | None:
        return self._by_client.get(client_id)

    def add(self, session: Session) -> None:
        self._by_client[session.client_id] = session

    def forget(self, session: Session) -> None:
        if self._by_client.get(session.client_id) is session:
            del self._by_client[session.client_id]

    @property
    def away(self) -> int:
        return len(self._by_client) - len(self.links)

    # ── records ──

    def record(self, session: Session) -> None:
        """The session is so now."""
        if self._broker.storing.on:
            for record in state.session_record(self._broker, session):
                self._broker.change(record)
            session.reader.written = self._broker.delivery.positions(session.reader)
        else:
            self._broker.storing.note(session)

    def change(self, session: Session, record: bytes) -> None:
        """Something of the session has changed."""
        if self._broker.storing.on:
            self._broker.change(record)
        else:
            self._broker.storing.note(session)

    # ── the end of a connection ──

    def leave(self, link: Link, *, send_will: bool, why: str, reason: int = 0) -> None:
        """Part a connection from its session: the session stays, or ends with it."""
        broker = self._broker
        self.links.discard(link)
        broker.storing.forget(link)
        session, link.session = link.session, None
        if session is None or session.link is not link:
            return
        about = {"client": session.client_id, "peer": link.peer, "reason": f"0x{reason:02X}", "why": why}
        broker.report("client.disconnected", about)
        broker.settle()
        delivery = broker.delivery
        for reader in session.readers():
            delivery.detach(reader)
            broker.table.left(reader)
            if reader.subscription is not None:
                delivery.moved.add(reader)
        link.outbox.waiting = {}
        broker.retaining.left(link, session)
        session.link = None
        broker.groups.absent(session)
        session.away_since_ms = broker.now_ms
        if not send_will:
            session.will = None
        if session.will is not None:
            delay_s = min(session.will.delay_s, session.expiry_s)
            if delay_s:
                session.will_at_s = broker.now_s + delay_s
            else:
                self.send_will(session)
        if not session.persistent:
            self.end(session, "connection closed")
            return
        session.expires_at_s = broker.now_s + session.expiry_s if session.expiry_s != NEVER else 0.0
        session.rest()
        self.record(session)
        broker.deadlines.expect(session)

    def look_at_absent(self, session: Session) -> None:
        """A deadline of it is over."""
        broker = self._broker
        if session.will_at_s and session.will_at_s <= broker.now_s:
            self.send_will(session)
        if self.expired(session):
            broker.counters.clients_expired += 1
            self.end(session, "expired")
        else:
            broker.deadlines.expect(session)

    def expired(self, session: Session) -> bool:
        """By the clock, not by when a timer gets to it [MQTT-4.1.0-2]."""
        return session.link is None and 0 < session.expires_at_s <= self._broker.now_s

    def send_will(self, session: Session) -> None:
        broker = self._broker
        will, session.will, session.will_at_s = session.will, None, 0.0
        if will is None:
            return
        try:
            self._publish(will, session)
            broker.counters.wills_sent += 1
        except PeerError as error:
            # It was set under other limits. It costs nobody else anything.
            broker.counters.dropped["will refused"] += 1
            broker.report("will.refused", {"client": session.client_id, "why": str(error)})
        if self._by_client.get(session.client_id) is session:
            self.record(session)

    def _publish(self, will: StoredWill, session: Session) -> None:
        broker = self._broker
        route = broker.table.routes.get(will.topic) or broker.table.admit(will.topic)
        flags = will.qos | (RETAIN if will.retain else 0)
        if will.retain and not broker.retaining.admit(will.topic, len(will.payload)):
            flags |= NOT_KEPT
            broker.counters.refused["retained"] += 1
        tick = broker.post.tick
        row = len(tick.rows)
        expiry = NO_EXPIRY if will.expiry_s is None else will.expiry_s
        tick.rows.add(route.topic, session.client_id, session.tenant, flags, will.payload, will.properties, expiry)
        tick.stretches.append(state.stretch(row, route.targets))
        tick.bytes += len(will.payload) + len(will.topic)
        tick.retained = tick.retained or flags & (RETAIN | NOT_KEPT) == RETAIN
        broker.request_tick()

    # ── the end of a session ──

    def end(self, session: Session, why: str) -> None:
        """Its subscriptions, its flights, its name. A will still pending is sent now [MQTT-3.1.3-9]."""
        broker = self._broker
        if session.will is not None and session.link is None:
            self.send_will(session)
        broker.settle()
        broker.report("session.ended", {"client": session.client_id, "why": why})
        session.ended = True
        self.forget(session)
        broker.deadlines.returned(session.client_id)
        broker.storing.ended(session)
        if broker.storing.on:
            broker.change(changes.gone(session.number))
        else:
            broker.storing.note_end(session)
        for reader in session.readers():
            broker.delivery.end(reader)
            broker.table.left(reader)
        job = self._take_out(session, list(session.subscriptions.values()))
        if next(job, None) is not None:
            broker.gate.add(job)

    def _take_out(self, session: Session, subscriptions: Iterable[Subscription]) -> Job:
        """What a session that has ended subscribed to leaves the index, some filters at a time."""
        broker = self._broker
        begun = session.flights.by_reader() if session.flights is not None else {}  # nothing is sent to it any more
        for number, subscription in enumerate(subscriptions, 1):
            broker.table.unsubscribe(subscription)
            broker.groups.left(subscription, begun)
            tracing.unwatched(broker, subscription)
            if number % FILTERS_STEP == 0:
                yield 2 * FILTERS_STEP
        for reader in session.readers():
            reader.session = NOBODY  # no circle is left for the garbage collector, which seldom looks
            reader.subscription = None
        session.subscriptions = {}
        session.own_readers = None
