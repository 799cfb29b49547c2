"""`tidegate pub`."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from .failure import Failure, Refusal
from .mqtt import Connection, Peer, connects, reason_text

# How many messages may be on their way at once, however many the broker would allow.
IN_FLIGHT_MAX = 1000

_PROPERTIES = {
    "content-type": "ContentType",
    "response-topic": "ResponseTopic",
    "correlation-data": "CorrelationData",
    "payload-format": "PayloadFormatIndicator",
}


@click.command("pub")
@connects
@click.option("-t", "--topic", required=True, help="Topic to publish to.")
@click.option("-m", "--message", metavar="TEXT", help="The payload, as text.")
@click.option(
    "-f",
    "--file",
    "payload_file",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The payload, from a file.",
)
@click.option("--stdin-lines", is_flag=True, help="One message per line of standard input.")
@click.option(
    "-q",
    "--qos",
    type=click.IntRange(0, 2),
    default=0,
    show_default=True,
    help="0: send it. 1: at least once. 2: exactly once.",
)
@click.option("-r", "--retain", is_flag=True, help="Keep it as the topic's retained message.")
@click.option(
    "--property",
    "named",
    multiple=True,
    metavar="NAME=VALUE",
    help=f"A property of MQTT 5: {', '.join(_PROPERTIES)}. May be given more than once.",
)
@click.option(
    "--user-property",
    "user_pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="A user property of MQTT 5. May be given more than once.",
)
@click.option("--expiry", type=click.IntRange(0), metavar="SECONDS", help="The message expires after this.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="Send it N times.")
@click.option(
    "--repeat", type=click.FloatRange(0), metavar="SECONDS", help="Send it again and again, after this pause."
)
def pub(
    peer: Peer,
    topic: str,
    message: str | None,
    payload_file: Path | None,
    stdin_lines: bool,
    qos: int,
    retain: bool,
    named: tuple[str, ...],
    user_pairs: tuple[str, ...],
    expiry: int | None,
    count: int | None,
    repeat: float | None,
) -> None:
    """Publish messages, and wait until the broker has them.

    With QoS 1 and 2 the command ends when the broker has acknowledged every message; a refusal is shown
    and makes the exit code 1. An empty message with -r deletes the retained one.

    \b
    Examples:
      tidegate pub -t demo/hello -m 'hi'
      tidegate pub -t demo/state -m on -q 1 -r
      sensors | tidegate pub -t demo/lines --stdin-lines -q 1
      tidegate pub -t demo/tick -m tick --repeat 1
      tidegate pub -t demo/doc -f doc.json --property content-type=application/json --expiry 60
    """
    if sum((message is not None, payload_file is not None, stdin_lines)) != 1:
        raise click.UsageError("Give the payload with one of -m, -f or --stdin-lines.")
    properties = _properties(peer, named, user_pairs, expiry)
    if stdin_lines:
        payloads: Iterator[bytes] = (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
    else:
        payload = payload_file.read_bytes() if payload_file is not None else (message or "").encode()
        times = count or (1 if repeat is None else None)
        payloads = itertools.repeat(payload) if times is None else itertools.repeat(payload, times)
    publication = _Publication(Connection(peer), qos)
    try:
        publication.run(topic, payloads, retain, properties, repeat)
    except KeyboardInterrupt:
        publication.connection.close()


class _Publication:
    def __init__(self, connection: Connection, qos: int) -> None:
        self.connection = connection
        self._qos = qos
        self._unfinished: set[int] = set()
        self._finished_early: set[int] = set()
        self._refused: dict[str, int] = {}
        connection.client.on_publish = self._on_publish

    def run(
        self,
        topic: str,
        payloads: Iterator[bytes],
        retain: bool,
        properties: Properties | None,
        pause_s: float | None,
    ) -> None:
        connection = self.connection
        connection.open()
        limit = min(IN_FLIGHT_MAX, connection.window)
        for number, payload in enumerate(payloads):
            if number and pause_s is not None:
                self._wait(pause_s)
            while len(self._unfinished) >= limit:
                connection.turn()
            self._publish(topic, payload, retain, properties)
        while self._unfinished or connection.client.want_write():
            connection.turn()
        connection.close()
        if self._refused:
            words = "; ".join(f"{reason}: {times}" for reason, times in self._refused.items())
            raise Refusal(f"the broker refused messages: {words}")

    def _publish(self, topic: str, payload: bytes, retain: bool, properties: Properties | None) -> None:
        try:
            sent = self.connection.client.publish(topic, payload, self._qos, retain, properties)
        except ValueError as error:
            raise Failure(f"cannot publish: {error}") from error
        # QoS 0 is finished as soon as it is written, which may be before publish() returns.
        if sent.mid in self._finished_early:
            self._finished_early.discard(sent.mid)
        else:
            self._unfinished.add(sent.mid)

    def _wait(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while (left := until - time.monotonic()) > 0:
            self.connection.turn(min(left, 0.5))

    def _on_publish(
        self, _c: Any, _u: Any, mid: int, code: ReasonCode, properties: Properties | None
    ) -> None:
        if mid in self._unfinished:
            self._unfinished.discard(mid)
        else:
            self._finished_early.add(mid)
        if code.is_failure:
            reason = reason_text(code, properties)
            self._refused[reason] = self._refused.get(reason, 0) + 1


def _properties(
    peer: Peer, named: tuple[str, ...], user_pairs: tuple[str, ...], expiry: int | None
) -> Properties | None:
    if not (named or user_pairs or expiry is not None):
        return None
    if not peer.is_v5:
        raise click.UsageError("--property, --user-property and --expiry need --protocol 5.")
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    for given in named:
        name, value = _pair(given)
        if name not in _PROPERTIES:
            raise click.UsageError(f'"{name}" is not a property; it is one of {", ".join(_PROPERTIES)}.')
        if name == "payload-format" and value not in ("0", "1"):
            raise click.UsageError("payload-format is 0 (bytes) or 1 (UTF-8).")
        typed: object = value
        if name == "payload-format":
            typed = int(value)
        elif name == "correlation-data":
            typed = value.encode()
        setattr(properties, _PROPERTIES[name], typed)
    if user_pairs:
        properties.UserProperty = [_pair(given) for given in user_pairs]
    if expiry is not None:
        properties.MessageExpiryInterval = expiry
    return properties


def _pair(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not equals:
        raise click.UsageError(f'"{given}" has no "="; write NAME=VALUE.')
    return name, value
