"""Deadlines: when a connection must be looked at, a will sent, a session ended.

Connections and absent sessions wait in buckets of one second, each in one, and leave it when they go or come back.
Nothing is moved when a client shows a sign of life: whoever comes due is looked at, and put in again for when there
would next be something to do.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tidegate.errors import PeerError
from tidegate.limits import ANSWERS_UNREAD_S
from tidegate.session.link import Link, Phase, Stop
from tidegate.session.session import Session
from tidegate.wire import Reason

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# Looked at one after another before the loop gets its turn again.
DUE_PER_CALL_MAX = 500


class Deadlines:
    __slots__ = ("_absent", "_absent_at", "_buckets", "_next", "_overdue")

    def __init__(self, now_s: float) -> None:
        self._buckets: dict[int, set[Link]] = {}
        self._absent: dict[int, set[bytes]] = {}  # client ids
        self._absent_at: dict[bytes, int] = {}
        self._next = int(now_s)
        self._overdue: list[Link | bytes] = []

    def __len__(self) -> int:
        return len(self._absent_at) + sum(map(len, self._buckets.values()))

    def watch(self, link: Link, when_s: float) -> None:
        bucket = link.watched = max(int(when_s) + 1, self._next)
        self._buckets.setdefault(bucket, set()).add(link)

    def forget(self, link: Link) -> None:
        links = self._buckets.get(link.watched)
        if links is not None:
            links.discard(link)
            if not links:
                del self._buckets[link.watched]

    def expect(self, session: Session) -> None:
        """An absent session's will or end, whichever comes first."""
        self.returned(session.client_id)
        due = [when_s for when_s in (session.will_at_s, session.expires_at_s) if when_s]
        if due:
            bucket = max(ceil(min(due)), self._next)
            self._absent_at[session.client_id] = bucket
            self._absent.setdefault(bucket, set()).add(session.client_id)

    def returned(self, client_id: bytes) -> None:
        bucket = self._absent_at.pop(client_id, None)
        if bucket is not None:
            waiting = self._absent[bucket]
            waiting.discard(client_id)
            if not waiting:
                del self._absent[bucket]

    def due(self, now_s: float) -> list[Link | bytes]:
        """Some of what is due: connections, and client ids of absent sessions."""
        while self._next <= now_s:
            self._overdue += self._buckets.pop(self._next, ())
            for client_id in self._absent.pop(self._next, ()):
                del self._absent_at[client_id]
                self._overdue.append(client_id)
            self._next += 1
        due, self._overdue = self._overdue[:DUE_PER_CALL_MAX], self._overdue[DUE_PER_CALL_MAX:]
        return due


def run(broker: Broker) -> bool:
    """Look at what is due: some of it, and whether there is more. What goes wrong with one costs no other."""
    due = broker.deadlines.due(broker.now_s)
    for who in due:
        try:
            if isinstance(who, Link):
                _look_at(broker, who)
            else:
                session = broker.sessions.get(who)
                if session is not None and session.link is None:
                    broker.sessions.look_at_absent(session)
        except PeerError as error:
            name = who.client_id if isinstance(who, Link) else who
            broker.counters.refused[f"timer 0x{error.reason:02X}"] += 1
            broker.report("timer.failed", {"client": name, "why": str(error)})
    return len(due) == DUE_PER_CALL_MAX


def watch_new(broker: Broker, link: Link) -> None:
    """A connection has a while to send its CONNECT (S1.2)."""
    broker.deadlines.watch(link, broker.now_s + broker.config.listen.connect_timeout_s)


def watch(broker: Broker, link: Link) -> None:
    """Keep-alive [MQTT-3.1.2-22] and acknowledgements (S1.21) of an open connection."""
    broker.deadlines.forget(link)
    broker.deadlines.watch(link, _next_look_s(broker, link))


def _next_look_s(broker: Broker, link: Link) -> float:
    ack_timeout_s = broker.config.mqtt.ack_timeout_s
    next_s = (link.outbox.ack_seen_s if link.outbox.used else broker.now_s) + ack_timeout_s
    if link.keep_alive_s:
        seen_s = broker.now_s if link.stopped else link.seen_s
        next_s = min(next_s, seen_s + 1.5 * link.keep_alive_s)
    if link.stopped & Stop.ANSWERS_UNREAD:
        next_s = min(next_s, link.outbox.taken_s + _unread_s(link))
    return float(next_s)


def _unread_s(link: Link) -> float:
    """How long a client that sends and sends may take nothing of what it is answered."""
    return 1.5 * link.keep_alive_s or ANSWERS_UNREAD_S


def _look_at(broker: Broker, link: Link) -> None:
    now_s = broker.now_s
    if link.phase is Phase.CLOSED:
        return
    if link.phase is Phase.NEW:
        broker.counters.refused["no CONNECT in time"] += 1
        broker.shut(link)
    elif link.stopped & Stop.ANSWERS_UNREAD and now_s >= link.outbox.taken_s + _unread_s(link):
        broker.counters.refused["answers not read in time"] += 1
        broker.close(link, Reason.QUOTA_EXCEEDED, "answers are not read")
    elif link.stopped:
        broker.deadlines.watch(link, _next_look_s(broker, link))  # it is not silent, it is not heard
    elif link.keep_alive_s and now_s >= link.seen_s + 1.5 * link.keep_alive_s:
        broker.counters.refused["keep-alive"] += 1
        broker.close(link, Reason.KEEP_ALIVE_TIMEOUT, "keep-alive")
    elif link.outbox.used and now_s >= link.outbox.ack_seen_s + broker.config.mqtt.ack_timeout_s:
        if link.outbox.holding or link.outbox.answers_bytes:
            # What it would acknowledge waits for the log, with a full disk for long.
            link.outbox.delayed = True
            link.outbox.ack_seen_s = now_s
            broker.deadlines.watch(link, _next_look_s(broker, link))
            return
        broker.counters.refused["no acknowledgement in time"] += 1
        why = f"nothing acknowledged for {broker.config.mqtt.ack_timeout_s} s"
        broker.close(link, Reason.UNSPECIFIED_ERROR, why)
    else:
        broker.deadlines.watch(link, _next_look_s(broker, link))
