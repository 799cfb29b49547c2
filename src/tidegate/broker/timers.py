"""Deadlines: when a connection must be looked at, a will sent, a session ended.

Connections wait in buckets of one second and leave them when they close; absent sessions, of which there may be many
more, wait in a heap by client id. Nothing is moved when a client shows a sign of life: whoever comes due is looked at,
and put in again for when there would next be something to do.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from tidegate.session.link import Link, Phase
from tidegate.session.session import Session
from tidegate.wire import Reason

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# Looked at one after another before the loop gets its turn again.
DUE_PER_CALL_MAX = 2000


class Deadlines:
    __slots__ = ("_absent", "_buckets", "_next_bucket")

    def __init__(self, now_s: float) -> None:
        self._buckets: dict[int, set[Link]] = {}
        self._next_bucket = int(now_s)
        self._absent: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._absent) + sum(map(len, self._buckets.values()))

    def watch(self, link: Link, when_s: float) -> None:
        bucket = link.watched = max(int(when_s) + 1, self._next_bucket)
        self._buckets.setdefault(bucket, set()).add(link)

    def forget(self, link: Link) -> None:
        links = self._buckets.get(link.watched)
        if links is not None:
            links.discard(link)

    def links_due(self, now_s: float) -> list[Link]:
        due: list[Link] = []
        while self._next_bucket <= now_s and len(due) < DUE_PER_CALL_MAX:
            due += self._buckets.pop(self._next_bucket, ())
            self._next_bucket += 1
        return due

    def expect(self, client_id: bytes, when_s: float) -> None:
        heapq.heappush(self._absent, (when_s, client_id))

    def absent_due(self, now_s: float) -> list[bytes]:
        due: list[bytes] = []
        while self._absent and self._absent[0][0] <= now_s and len(due) < DUE_PER_CALL_MAX:
            due.append(heapq.heappop(self._absent)[1])
        return due


def run(broker: Broker) -> None:
    """Look at everything that is due."""
    for link in broker.deadlines.links_due(broker.now_s):
        _look_at(broker, link)
    for client_id in broker.deadlines.absent_due(broker.now_s):
        session = broker.sessions.get(client_id)
        if session is not None and session.link is None:
            _look_at_absent(broker, session)


def watch_new(broker: Broker, link: Link) -> None:
    """A connection has a while to send its CONNECT (S1.2)."""
    broker.deadlines.watch(link, broker.now_s + broker.config.listen.connect_timeout_s)


def watch(broker: Broker, link: Link) -> None:
    """Keep-alive [MQTT-3.1.2-22] and acknowledgements (S1.21) of an open connection."""
    broker.deadlines.forget(link)
    broker.deadlines.watch(link, _next_look_s(broker, link))


def watch_absent(broker: Broker, session: Session) -> None:
    """An absent session's will and end."""
    for when_s in {session.will_at_s, session.expires_at_s} - {0.0}:
        broker.deadlines.expect(session.client_id, when_s)


def _next_look_s(broker: Broker, link: Link) -> float:
    ack_timeout_s = broker.config.mqtt.ack_timeout_s
    next_s = (link.ack_seen_s if link.on_wire else broker.now_s) + ack_timeout_s
    if link.keep_alive_s:
        next_s = min(next_s, link.seen_s + 1.5 * link.keep_alive_s)
    return next_s


def _look_at(broker: Broker, link: Link) -> None:
    if link.phase is Phase.CLOSED:
        return
    if link.phase is Phase.NEW:
        broker.counters.refused["no CONNECT in time"] += 1
        broker.shut(link)
    elif link.keep_alive_s and broker.now_s >= link.seen_s + 1.5 * link.keep_alive_s:
        broker.counters.refused["keep-alive"] += 1
        broker.close(link, Reason.KEEP_ALIVE_TIMEOUT)
    elif link.on_wire and broker.now_s >= link.ack_seen_s + broker.config.mqtt.ack_timeout_s:
        broker.counters.refused["no acknowledgement in time"] += 1
        why = f"nothing acknowledged for {broker.config.mqtt.ack_timeout_s} s"
        broker.close(link, Reason.UNSPECIFIED_ERROR, why)
    else:
        broker.deadlines.watch(link, _next_look_s(broker, link))


def _look_at_absent(broker: Broker, session: Session) -> None:
    from tidegate.broker import connect  # which itself sets deadlines

    if session.will_at_s and session.will_at_s <= broker.now_s:
        connect.send_will_of(broker, session)
    if session.expires_at_s and session.expires_at_s <= broker.now_s:
        broker.counters.clients_expired += 1
        connect.remove(broker, session)
