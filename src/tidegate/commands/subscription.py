"""A subscription that outlives its connection, for `sub` and `trace`.

When the connection is lost it is made again, after pauses that grow. What happens to the subscription then:

    the session was kept, and is there      nothing: it has its subscriptions and its place
    a replay (`--from`)                     subscribed anew from after the last message that was shown
    otherwise                               subscribed anew; what was published meanwhile is missed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
from paho.mqtt.client import MQTTMessage
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from tidegate.server.backoff import Backoff

from .failure import Failure, Refusal
from .mqtt import Connection, Unreachable, reason_text
from .text import safe

RETRY_MIN_S, RETRY_MAX_S = 0.5, 30.0
SETTLED_S = 30.0  # a connection that lasted so long was well; the next pause is the shortest again
TURN_S = 0.5


class Subscription:
    """`place` is the `<from>` of a replay. `write` shows a message; after `count` of them it ends. `granted` is called
    when the broker has taken the subscription for the first time."""

    def __init__(
        self,
        connection: Connection,
        filters: tuple[str, ...],
        qos: int,
        write: Callable[[MQTTMessage], None],
        *,
        place: str | None = None,
        count: int | None = None,
        reconnect: bool = True,
        granted: Callable[[], None] | None = None,
    ) -> None:
        self.connection = connection
        self._filters, self._qos = filters, qos
        self._places = [place] * len(filters)
        self._write = write
        self._left = count
        self._reconnect = reconnect
        self._granted = granted
        self._backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, SETTLED_S)
        self._asked: dict[int, list[int]] = {}  # packet id of a SUBSCRIBE → the filters in it, by number
        self._answers: list[tuple[int, list[ReasonCode], Properties | None]] = []
        # Acknowledged by hand: a message that was not written out must not count as received.
        connection.client.manual_ack_set(True)
        connection.client.on_message = self._on_message
        connection.client.on_subscribe = self._on_subscribe

    def run(self, timeout_s: float | None = None) -> bool:
        """True when the wanted number of messages came, False at the timeout."""
        self.connection.open()
        began_s = time.monotonic()
        until_s = None if timeout_s is None else began_s + timeout_s
        self._subscribe()
        while self._left != 0 and not _over(until_s):
            try:
                self.connection.turn(_at_most(TURN_S, until_s))
            except Unreachable as lost:
                if not self._reconnect:
                    raise
                if not self._open_again(lost, time.monotonic() - began_s, until_s):
                    break
                began_s = time.monotonic()
            self._check_granted()
        self.connection.close()
        return self._left == 0

    # ── subscribing ──

    def _subscribe(self) -> None:
        self._asked.clear()
        self._answers.clear()
        if self._places[0] is None:
            self._ask(list(range(len(self._filters))), list(self._filters), None)
            return
        for number, (place, each) in enumerate(zip(self._places, self._filters, strict=True)):
            # Each with an identifier, so that a message tells how far its subscription has come.
            properties = None
            if self.connection.peer.is_v5:
                properties = Properties(PacketTypes.SUBSCRIBE)  # type: ignore[no-untyped-call]
                properties.SubscriptionIdentifier = number + 1
            self._ask([number], [f"$replay/{place}/{each}"], properties)

    def _ask(self, numbers: list[int], filters: list[str], properties: Properties | None) -> None:
        try:
            _, mid = self.connection.client.subscribe([(each, self._qos) for each in filters], properties=properties)
        except ValueError as error:
            raise Failure(f"cannot subscribe: {error}", "see MQTT's rules for + and #; quote '#' in a shell") from error
        if mid is not None:
            self._asked[mid] = numbers

    def _check_granted(self) -> None:
        refused: list[str] = []
        for mid, codes, properties in self._answers:
            refused += [
                f"{safe(self._filters[number])}: {reason_text(code, properties)}"
                for number, code in zip(self._asked.pop(mid, []), codes, strict=False)
                if code.is_failure
            ]
        answered = bool(self._answers) and not self._asked
        self._answers.clear()
        if answered and not refused and self._granted is not None:
            self._granted()
            self._granted = None
        if refused:
            self.connection.close()
            raise Refusal("the broker refused the subscription to " + "; ".join(refused))

    # ── connecting again ──

    def _open_again(self, lost: Unreachable, lasted_s: float, until_s: float | None) -> bool:
        """False if the timeout came first."""
        blind = self._places[0] is not None and not self.connection.peer.is_v5  # messages of a replay lack positions
        if blind and not self.connection.keep_session:
            raise Refusal(lost.message, "with --protocol 5 a replay goes on where it was")
        while True:
            pause_s = self._backoff.pause_s(lasted_s)
            click.echo(f"tidegate: {lost.message}; connecting again in {pause_s:g} s", err=True)
            time.sleep(_at_most(pause_s, until_s))
            if _over(until_s):
                return False
            try:
                self.connection.open()
            except Unreachable as again:
                lost, lasted_s = again, 0.0
            else:
                break
        click.echo("tidegate: connected again", err=True)
        if self._asked or not self.connection.session_present:
            if blind:
                raise Refusal("the broker does not have the session any more", "with --protocol 5 a replay would go on")
            self._subscribe()
        return True

    # ── what paho calls ──

    def _on_message(self, client: Any, _u: Any, message: MQTTMessage) -> None:
        if self._left == 0:
            return
        self._write(message)
        client.ack(message.mid, message.qos)
        if self._left is not None:
            self._left -= 1
        position = dict(getattr(message.properties, "UserProperty", [])).get("tidegate-position", "")
        if self._places[0] is not None and position.isdecimal():
            for identifier in getattr(message.properties, "SubscriptionIdentifier", []):
                self._places[identifier - 1] = str(int(position) + 1)

    def _on_subscribe(
        self, _c: Any, _u: Any, mid: int, codes: list[ReasonCode], properties: Properties | None
    ) -> None:
        self._answers.append((mid, codes, properties))


def _over(until_s: float | None) -> bool:
    return until_s is not None and time.monotonic() >= until_s


def _at_most(span_s: float, until_s: float | None) -> float:
    return span_s if until_s is None else max(0.0, min(span_s, until_s - time.monotonic()))
