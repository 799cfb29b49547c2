"""Retained messages: kept when the log announces them, handed to new subscribers some at a time, within their room.

A match over a million topics is a scan that goes on step by step at the gate; what cannot be sent yet is not read yet.
What a persistent session had not been handed when it left is handed over when it returns, also after a restart (S0.31).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.broker import state
from tidegate.delivery.gate import Job
from tidegate.delivery.outbox import RETAINED_READER
from tidegate.delivery.retained_rows import rows_of
from tidegate.delivery.routes import Target
from tidegate.limits import OWN_TOPICS_MAX, PARTITION_SHIFT, RETAINED_STEP, RETAINED_STREAMS_MAX
from tidegate.log.rows import Rows
from tidegate.log.run import NO_EXPIRY, NOT_KEPT, QOS_MASK, RETAIN
from tidegate.router import Retained, RetainedStore, has_wildcard
from tidegate.router.retained import MESSAGE_OVERHEAD_BYTES, RetainedScan
from tidegate.router.topic_order import key_of
from tidegate.session import changes
from tidegate.session.link import Link, Phase
from tidegate.session.session import Session, Subscription

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# Keys looked at per step: a filter that matches little among a million topics must not hold the loop either.
KEYS_STEP = 4 * RETAINED_STEP


class Due:
    """What is still to be handed over for a subscription: the matches from the scan's place on that were announced
    before it was made; what came after reaches it as itself.

    How far it has come is written together with the packet ids given out on the way: after a crash it goes on from
    there, and what was in flight comes again with its packet id. With QoS 1, what left and was not stored by then comes
    once more."""

    __slots__ = ("before", "passed", "scan", "subscription", "taken")

    def __init__(self, subscription: Subscription, before: tuple[int, ...]) -> None:
        self.subscription = subscription
        self.before = before
        self.passed = b""  # the topic up to which it has come
        self.scan: RetainedScan | None = None  # begun when its turn comes
        self.taken: list[Retained] = []  # read, and not yet sent


class Retaining:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        limits = broker.config.retained
        self.store = RetainedStore(messages_max=limits.messages_max, bytes_max=limits.bytes_max)
        # The broker's own topics, which begin with $.
        self.own = RetainedStore(messages_max=OWN_TOPICS_MAX, bytes_max=OWN_TOPICS_MAX << 10)
        self._stored_qos = 0 if broker.config.log.store_qos0 else 1  # messages below it have no position of their own
        self._pending_messages = 0  # accepted in this tick, and not yet announced
        self._pending_bytes = 0
        self._active: set[Link] = set()  # have a job at the gate

    # ── keeping ──

    def admit(self, topic: bytes, payload_bytes: int) -> bool:
        """Whether there is room to keep one more."""
        if not payload_bytes:
            return True
        store = self.store
        cost = MESSAGE_OVERHEAD_BYTES + 2 * len(topic) + payload_bytes
        new = len(store) + self._pending_messages < store.messages_max
        if store.bytes + self._pending_bytes + cost > store.bytes_max or not new:
            old = store.get(topic)
            room = store.bytes + self._pending_bytes + cost - (old.cost_bytes if old is not None else 0)
            if (old is None and not new) or (room > store.bytes_max and room > store.bytes):
                return False
        self._pending_messages += 1
        self._pending_bytes += cost
        return True

    def settled(self) -> None:
        """What was pending is being appended."""
        self._pending_messages = self._pending_bytes = 0

    def announced(self, rows: Rows) -> None:
        """Messages with the retain flag are their topics' from now on."""
        tick = self._broker.post.tick
        topics = rows.topics
        # Of several for a topic, the last one is kept.
        last = {topics[row]: row for row, flag in enumerate(rows.flags) if flag & (RETAIN | NOT_KEPT) == RETAIN}
        for topic, row in last.items():
            flags, payload = rows.flags[row], rows.payloads[row]
            if not payload:
                if self.store.delete(topic) is not None:
                    tick.changes.append(changes.unretained(topic))
                continue
            expiry = rows.expiries[row] if rows.expiries is not None else NO_EXPIRY
            message = Retained(
                topic,
                payload,
                flags & QOS_MASK,
                rows.properties[row] if rows.properties is not None else b"",
                None if expiry == NO_EXPIRY else rows.time_ms + expiry * 1000,
                rows.time_ms,
                rows.positions[row],
                rows.publishers[row],
            )
            if self.store.put(message).refused:
                self._broker.counters.refused["retained"] += 1
            else:
                tick.changes.append(state.retained_record(message))
        self._broker.request_tick()

    def expire(self) -> None:
        now_ms = self._broker.now_ms
        if self.store.due(now_ms) and self._broker.storing.on:
            for message in self.store.expire(now_ms):
                self._broker.change(changes.unretained(message.topic))

    # ── handing over ──

    def wanted(self, session: Session, subscription: Subscription, before: tuple[int, ...]) -> bool:
        """A new subscription wants what is retained: whether there may be something. It is handed over from `begin` on.
        """
        store = self._store_of(subscription)
        if not len(store) or (not has_wildcard(subscription.pattern) and store.get(subscription.pattern) is None):
            return False
        if session.due is None:
            session.due = {}
        if len(session.due) >= RETAINED_STREAMS_MAX:
            # Subscribes again and again and does not take what it gets.
            self._broker.counters.dropped["retained, too many asked for at once"] += 1
            return False
        session.due[subscription.filter] = Due(subscription, before)
        if session.persistent and subscription.qos and store is self.store:
            self._broker.sessions.change(session, changes.due(session.number, subscription.filter, before))
        return True

    def unwanted(self, session: Session, filter: bytes) -> None:
        """Unsubscribed: nothing more comes of it [MQTT-3.10.4-2]."""
        if session.due is not None:
            session.due.pop(filter, None)

    def _store_of(self, subscription: Subscription) -> RetainedStore:
        return self.own if subscription.pattern.startswith(b"$") else self.store

    def go_on(self, link: Link) -> None:
        """The link may have room; or its session came back, with something still due."""
        session = link.session
        if session is not None and session.due and link not in self._active and link.phase is Phase.OPEN:
            self._active.add(link)
            self._broker.gate.add(self._steps(link, session))

    def left(self, link: Link, session: Session) -> None:
        if session.due:
            # With QoS 0 nothing is owed to who is away (S4.4).
            left = {filter: due for filter, due in session.due.items() if due.subscription.qos and session.persistent}
            session.due = left or None
        self._active.discard(link)

    def _steps(self, link: Link, session: Session) -> Job:
        """Hand over until there is no more room, or nothing more is due."""
        now = self._broker
        while session.due and link.session is session and link in self._active:
            due: Due = next(iter(session.due.values()))
            outbox = link.outbox
            if not outbox.room() or not outbox.credit(1):
                break  # goes on when the client acknowledges or its socket drains
            if due.scan is None:
                due.scan = self._store_of(due.subscription).scan(due.subscription.pattern)
            cost = 1
            sent = 0
            if not due.taken:
                seen = due.scan.steps
                passed = key_of(due.passed) if due.passed else b""
                due.taken = [
                    m
                    for m in due.scan.take(now.now_ms, RETAINED_STEP, KEYS_STEP)
                    if (m.qos < self._stored_qos or m.position < due.before[m.position >> PARTITION_SHIFT])
                    and (not passed or key_of(m.topic) > passed)  # a scan begins anew after a restart
                ]
                cost += (due.scan.steps - seen) // 4
            if due.taken:
                target = Target(RETAINED_READER, link, [due.subscription])
                sent = outbox.send_retained(target, rows_of(due.taken, now.now_ms), due.taken)
                if sent:
                    due.passed = due.taken[sent - 1].topic
                del due.taken[:sent]
                cost += 3 * sent
            filter = due.subscription.filter
            written = session.persistent and due.subscription.qos and self._store_of(due.subscription) is self.store
            # Also while the log refuses: what was given out goes with it, and no more becomes due then.
            if due.scan.done and not due.taken:
                if session.due.get(filter) is due:
                    del session.due[filter]
                if written:
                    now.change(changes.handed(session.number, filter))
            elif sent and written:
                now.change(changes.passed(session.number, filter, due.passed))
            yield cost
        self._active.discard(link)
        if not session.due:
            session.due = None
