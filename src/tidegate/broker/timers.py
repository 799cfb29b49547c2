"""Deadlines: when a connection must be looked at, a will sent, a session ended.

A heap of (when, order, what). Entries are not removed when things change: whoever is called looks whether there is
something to do, and says when to look again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from tidegate.session.link import Link, Phase
from tidegate.session.session import Session
from tidegate.wire import Reason

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

# Looked at one after another before the loop gets its turn again.
DUE_PER_CALL_MAX = 2000


class Deadlines:
    __slots__ = ("_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when_s, next(self._order), what))

    def run(self, now_s: float) -> None:
        for _ in range(DUE_PER_CALL_MAX):
            if not self._heap or self._heap[0][0] > now_s:
                return
            heapq.heappop(self._heap)[2]()

    def __len__(self) -> int:
        return len(self._heap)


def watch_new(broker: Broker, link: Link) -> None:
    """A connection has a while to send its CONNECT (S1.2)."""

    def check() -> None:
        if link.phase is Phase.NEW:
            broker.counters.refused["no CONNECT in time"] += 1
            broker.shut(link)

    broker.deadlines.at(broker.now_s + broker.config.listen.connect_timeout_s, check)


def watch(broker: Broker, link: Link) -> None:
    """Keep-alive [MQTT-3.1.2-22] and acknowledgements (S1.21) of an open connection."""
    ack_timeout_s = broker.config.mqtt.ack_timeout_s

    def check() -> None:
        if link.phase is not Phase.OPEN:
            return
        now_s = broker.now_s
        again_s = now_s + ack_timeout_s
        if link.keep_alive_s:
            silent_until_s = link.seen_s + 1.5 * link.keep_alive_s
            if now_s >= silent_until_s:
                broker.counters.refused["keep-alive"] += 1
                broker.close(link, Reason.KEEP_ALIVE_TIMEOUT)
                return
            again_s = min(again_s, silent_until_s)
        if link.on_wire:
            owed_until_s = link.ack_seen_s + ack_timeout_s
            if now_s >= owed_until_s:
                broker.counters.refused["no acknowledgement in time"] += 1
                broker.close(link, Reason.UNSPECIFIED_ERROR, f"nothing acknowledged for {ack_timeout_s} s")
                return
            again_s = min(again_s, owed_until_s)
        broker.deadlines.at(again_s, check)

    first_s = min(1.5 * link.keep_alive_s or ack_timeout_s, ack_timeout_s)
    broker.deadlines.at(broker.now_s + first_s, check)


def watch_absent(broker: Broker, session: Session) -> None:
    """An absent session's will and end."""
    for when_s in {session.will_at_s, session.expires_at_s} - {0.0}:
        broker.deadlines.at(when_s, lambda: _absent_due(broker, session))


def _absent_due(broker: Broker, session: Session) -> None:
    from tidegate.broker import connect

    if session.link is not None or broker.sessions.get(session.client_id) is not session:
        return
    if session.will_at_s and session.will_at_s <= broker.now_s:
        connect.send_will_of(broker, session)
    if session.expires_at_s and session.expires_at_s <= broker.now_s:
        broker.counters.clients_expired += 1
        connect.remove(broker, session)
