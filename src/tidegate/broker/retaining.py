"""Retained messages on their way to new subscribers: some at a time, within the client's window.

A match over a million topics is a scan that is continued tick by tick; what cannot be sent yet is not read yet.
"""

from __future__ import annotations

from collections import deque

from tidegate.delivery.dispatcher import RETAINED_READER, Dispatcher
from tidegate.delivery.routes import Target
from tidegate.limits import RETAINED_PER_TICK, RETAINED_STREAMS_MAX, SEND_BYTES_MAX
from tidegate.log.run import NO_EXPIRY, RETAIN, Run
from tidegate.router import Retained, RetainedStore
from tidegate.router.retained import RetainedScan
from tidegate.session.link import Link, Phase
from tidegate.session.session import Subscription

# Keys looked at per turn: a filter that matches little among a million topics must not hold the loop either.
STEPS_PER_TURN = 4 * RETAINED_PER_TICK


class Stream:
    __slots__ = ("before", "scan", "target")

    def __init__(self, scan: RetainedScan, target: Target, before: int) -> None:
        self.scan = scan
        self.target = target
        self.before = before  # what was stored from here on reaches the subscription as itself


class RetainedDelivery:
    def __init__(
        self, dispatcher: Dispatcher, store: RetainedStore, own: RetainedStore, store_qos0: bool = True
    ) -> None:
        self.dispatcher = dispatcher
        self.store = store
        self.own = own  # the broker's own topics, which begin with $
        self.stored_qos = 0 if store_qos0 else 1  # messages below it have no position of their own
        self.links: deque[Link] = deque()  # have a turn coming

    def start(self, link: Link, subscription: Subscription, before: int) -> None:
        """Begin to hand over what matches a new subscription and was stored before that position."""
        store = self.own if subscription.pattern.startswith(b"$") else self.store
        if not len(store):
            return
        target = Target(RETAINED_READER, link, [subscription])
        if link.retained_streams is None:
            link.retained_streams = []
        if len(link.retained_streams) >= RETAINED_STREAMS_MAX:
            # Subscribes again and again and does not take what it gets.
            self.dispatcher.counters.dropped["retained, too many asked for at once"] += 1
            return
        link.retained_streams.append(Stream(store.scan(subscription.pattern), target, before))
        self.resume(link)

    def resume(self, link: Link) -> None:
        if link not in self.links:
            self.links.append(link)
        self.dispatcher.request_tick()

    def turn(self, now_ms: int) -> None:
        for _ in range(len(self.links)):
            link = self.links.popleft()
            if link.phase is Phase.OPEN and link.retained_streams:
                self._step(link, now_ms)

    def _step(self, link: Link, now_ms: int) -> None:
        session = link.session
        assert session is not None and link.retained_streams is not None
        stream: Stream = link.retained_streams[0]
        # QoS is known only per message, so take no more than the window could carry.
        room = min(link.window - link.on_wire, session.in_flight().room(), RETAINED_PER_TICK)
        if room <= 0 or link.paused or link.out_bytes > SEND_BYTES_MAX:
            return  # goes on when the client acknowledges or its socket drains
        for message in stream.scan.take(now_ms, room, STEPS_PER_TURN):
            if message.position >= stream.before and message.qos >= self.stored_qos:
                continue
            qos = min(message.qos, stream.target.qos)
            self.dispatcher.send_message(
                link, session, RETAINED_READER, stream.target, run_of(message), 0, qos, retained=True
            )
        if stream.scan.done:
            link.retained_streams.pop(0)
        if link.retained_streams:
            self.resume(link)
        else:
            link.retained_streams = None

    def at(self, position: int) -> Run | None:
        """The retained message that was stored at `position`, when the log has let go of it."""
        for message in self.store.match(b"#", 0):
            if message.position == position:
                return run_of(message)
        return None


def run_of(message: Retained) -> Run:
    expiry = NO_EXPIRY
    if message.expires_at_ms is not None:
        expiry = max(0, message.expires_at_ms - message.time_ms) // 1000
    return Run(
        message.topic,
        message.publisher,
        b"",
        message.qos | RETAIN,
        [message.payload],
        [message.properties] if message.properties else None,
        None if expiry == NO_EXPIRY else [expiry],
        base=message.position,
        time_ms=message.time_ms,
    )
