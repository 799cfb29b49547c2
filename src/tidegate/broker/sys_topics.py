"""`$SYS/broker/…` in the tree that mosquitto uses, so that existing exporters and dashboards work.

Values are retained in memory for new subscribers and sent to present ones; they are never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

from tidegate import __version__
from tidegate.broker.notices import publish_unstored
from tidegate.log.segment import SegmentFacts
from tidegate.router import Retained

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

PREFIX = b"$SYS/broker/"
NAME_MAX = 1024  # characters of a client id that a topic of ours shows
NOWHERE = -1  # the position of what is not in the log: before everything that is
AVERAGES = ((1, b"1min"), (5, b"5min"), (15, b"15min"))
RATES = (
    (b"messages/received", "messages_received"),
    (b"messages/sent", "messages_sent_total"),
    (b"publish/received", "publishes_received"),
    (b"publish/sent", "publishes_sent"),
    (b"bytes/received", "bytes_received"),
    (b"bytes/sent", "bytes_sent"),
    (b"sockets", "connects"),
    (b"connections", "connects"),
    (b"publish/dropped", "dropped_total"),
)


class SysTopics:
    def __init__(self, broker: Broker, memory_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        self.broker = broker
        self._memory_bytes = memory_bytes  # of the process: now, and at most so far
        self._last_s = broker.now_s
        self._last: dict[str, float] = {}
        self._rates: dict[tuple[str, int], float] = {}
        self._shown: dict[bytes, bytes] = {}
        self._verdicts: dict[str, bytes] = {}  # id → topic of those that are shown
        if broker.config.sys.interval_s:
            self.update()

    def each_second(self, now_s: float) -> None:
        interval_s = self.broker.config.sys.interval_s
        if interval_s:
            self._show_verdicts()
        if interval_s and now_s - self._last_s >= interval_s:
            self.update()

    def update(self) -> None:
        broker = self.broker
        values = self.values()
        self._last_s = broker.now_s
        for topic, payload in values.items():
            if self._shown.get(topic) == payload:
                continue
            self._shown[topic] = payload
            self._show(topic, payload)

    def _show(self, topic: bytes, payload: bytes) -> None:
        broker = self.broker
        broker.retaining.own.put(Retained(topic, payload, 0, b"", None, broker.now_ms, NOWHERE, b""))
        publish_unstored(broker, topic, payload)

    def _show_verdicts(self) -> None:
        """New verdicts of the pipeline about clients, once each; those that it no longer names are forgotten."""
        archived = self.broker.archived
        verdicts = archived.verdicts if archived is not None else ()
        if [verdict.id for verdict in verdicts] == list(self._verdicts):
            return
        before, self._verdicts = self._verdicts, {}
        for verdict in verdicts:
            topic = PREFIX + b"abuse/" + _safe(verdict.rule) + b"/" + _safe(verdict.client)
            self._verdicts[verdict.id] = topic
            if verdict.id not in before:
                self._show(topic, verdict.told)
        for topic in set(before.values()) - set(self._verdicts.values()):
            self.broker.retaining.own.delete(topic)

    def values(self) -> dict[bytes, bytes]:
        broker = self.broker
        counters = broker.counters
        connected = len(broker.sessions.links)
        persistent_away = broker.sessions.away
        segments = broker.log.segments()
        # Positions jump after a crash; within segments they count messages.
        stored = sum(segment.end - segment.base for segment in segments)
        heap_bytes, heap_bytes_max = self._memory_bytes()
        totals: dict[str, float] = {
            "messages_received": counters.messages_received,
            "messages_sent_total": counters.messages_sent + counters.publishes_sent,
            "publishes_received": counters.publishes_received,
            "publishes_sent": counters.publishes_sent,
            "bytes_received": counters.bytes_received,
            "bytes_sent": counters.bytes_sent,
            "connects": counters.connects,
            "dropped_total": sum(counters.dropped.values()),
        }
        found: dict[bytes, bytes] = {
            b"version": b"tidegate version " + __version__.encode(),
            b"uptime": b"%d seconds" % (broker.now_s - broker.started_s),
            b"clients/total": b"%d" % len(broker.sessions),
            b"clients/connected": b"%d" % connected,
            b"clients/active": b"%d" % connected,
            b"clients/disconnected": b"%d" % persistent_away,
            b"clients/inactive": b"%d" % persistent_away,
            b"clients/maximum": b"%d" % counters.clients_max,
            b"clients/expired": b"%d" % counters.clients_expired,
            b"subscriptions/count": b"%d" % len(broker.table.index),
            b"shared_subscriptions/count": b"%d" % broker.groups.members,
            b"retained messages/count": b"%d" % (len(broker.retaining.store) + len(broker.retaining.own)),
            b"messages/stored": b"%d" % stored,
            b"store/messages/count": b"%d" % stored,
            b"store/messages/bytes": b"%d" % sum(segment.bytes for segment in segments),
            b"messages/received": b"%d" % totals["messages_received"],
            b"messages/sent": b"%d" % totals["messages_sent_total"],
            b"publish/messages/received": b"%d" % counters.publishes_received,
            b"publish/messages/sent": b"%d" % counters.publishes_sent,
            b"publish/messages/dropped": b"%d" % totals["dropped_total"],
            b"publish/bytes/received": b"%d" % counters.publish_bytes_received,
            b"publish/bytes/sent": b"%d" % counters.publish_bytes_sent,
            b"bytes/received": b"%d" % counters.bytes_received,
            b"bytes/sent": b"%d" % counters.bytes_sent,
            b"heap/current": b"%d" % heap_bytes,
            b"heap/maximum": b"%d" % heap_bytes_max,
            b"log/floor": b"%d" % broker.log.floors[0],
            b"log/end": b"%d" % broker.log.ends[0],
            b"log/segments": b"%d" % len(segments),
        }
        found.update(self._archive(segments))
        for reason, count in counters.dropped.items():
            found[b"dropped/" + _level(reason)] = b"%d" % count
        for reason, count in counters.refused.items():
            found[b"refused/" + _level(reason)] = b"%d" % count
        found.update(self._averages(totals))
        return {PREFIX + name: value for name, value in found.items()}

    def _archive(self, segments: list[SegmentFacts]) -> dict[bytes, bytes]:
        archive, archived = self.broker.archive, self.broker.archived
        if archive is None or archived is None:
            return {}
        # Positions jump after a crash; within segments they count messages.
        lag = sum(max(0, segment.end - max(segment.base, archived.position)) for segment in segments)
        return {
            b"archive/position": b"%d" % archived.position,
            b"archive/segment": b"%d" % archived.segment,
            b"archive/readable": b"%d" % archived.readable,
            b"archive/lag": b"%d" % lag,
            b"archive/messages/read": b"%d" % archive.messages_read,
            b"archive/messages/damaged": b"%d" % archive.damaged,
            b"archive/full": b"%d" % bool(self.broker.storing.full),
            b"log/seam": b"%d" % (segments[0].base if segments else self.broker.log.ends[0]),
        }

    def _averages(self, totals: dict[str, float]) -> dict[bytes, bytes]:
        """Per-minute rates over 1, 5 and 15 minutes, as exponential averages."""
        elapsed_s = max(self.broker.now_s - self._last_s, 0.001)
        for counter, total in totals.items():
            per_minute = (total - self._last.get(counter, 0)) * 60 / elapsed_s
            self._last[counter] = total
            for minutes, _ in AVERAGES:
                weight = min(1.0, elapsed_s / (60 * minutes))
                before = self._rates.get((counter, minutes), 0.0)
                self._rates[counter, minutes] = before + (per_minute - before) * weight
        return {
            b"load/" + name + b"/" + label: b"%.2f" % self._rates[counter, minutes]
            for name, counter in RATES
            for minutes, label in AVERAGES
        }


def _safe(name: str) -> bytes:
    """A name from outside as a topic level: what may not stand in one is written as %XX."""
    name = name[:NAME_MAX]
    safe = "".join(c if c.isprintable() and c not in "/+#%" else quote(c, "", errors="replace") for c in name)
    return safe.encode()


def _level(text: str) -> bytes:
    """A reason as a topic level."""
    return text.replace("/", "-").replace("+", "-").replace("#", "-").encode()
