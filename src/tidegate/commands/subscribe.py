"""`tidegate sub`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable

import click
from paho.mqtt.client import MQTTMessage

from .mqtt import Connection, Peer, connects
from .subscription import Subscription
from .text import parse_place, payload_text, safe, utc

TIMED_OUT = 3


@click.command("sub")
@connects
@click.option(
    "-t",
    "--topic",
    "filters",
    required=True,
    multiple=True,
    metavar="FILTER",
    help="Topics to watch, with + and # as wildcards. May be given more than once.",
)
@click.option(
    "-q",
    "--qos",
    type=click.IntRange(0, 2),
    default=0,
    show_default=True,
    help="The highest QoS in which messages are sent here.",
)
@click.option(
    "--from",
    "origin",
    metavar="PLACE",
    help="Go back: earliest, a position, a time such as 2026-01-31T12:00:00Z, or an age such as -15m.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option(
    "--timeout", type=click.FloatRange(0), metavar="SECONDS", help=f"End after this; exit code {TIMED_OUT}."
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Show topics, and the time and position of replayed messages."
)
@click.option(
    "--format", "shape", metavar="FORMAT", help="text, json, or a template such as '%t %p' (see above)."
)
@click.option("--raw", is_flag=True, help="Write the payloads' bytes and nothing else.")
@click.option("--keep-session", is_flag=True, help="Keep the session when this ends; needs -i.")
@click.option(
    "--reconnect/--no-reconnect",
    default=True,
    show_default=True,
    help="Whether a connection that is lost is made again, after pauses of 0.5 s to 30 s, or is an error.",
)
def sub(
    peer: Peer,
    filters: tuple[str, ...],
    qos: int,
    origin: str | None,
    count: int | None,
    timeout: float | None,
    verbose: bool,
    shape: str | None,
    raw: bool,
    keep_session: bool,
    reconnect: bool,
) -> None:
    """Subscribe and show messages, one per line, as they come.

    Payloads that are not UTF-8 are shown as hexadecimal digits, and control characters escaped; --raw
    writes the bytes as they are.

    When the connection is lost it is made again. A session that is kept (-i ID --keep-session, with -q 1 or 2) goes on
    where it was, and so does --from; other subscriptions miss what is published meanwhile.

    \b
    Templates:  %t topic    %p payload   %x payload in hexadecimal   %l its length
                %q QoS      %r retained (1 or 0)    %T time   %o position   %% a percent sign

    \b
    Examples:
      tidegate sub -t 'demo/#' -v
      tidegate sub -t 'demo/#' --from earliest --format json
      tidegate sub -t 'demo/#' --from -15m --count 100 --timeout 5
      tidegate sub -t '$share/workers/jobs/#' -q 1
      tidegate sub -t 'demo/#' -q 1 -i laptop --keep-session
    """
    if keep_session and not peer.client_id:
        raise click.UsageError(
            "--keep-session needs a client id to find the session again: give one with -i."
        )
    if raw and (shape or verbose):
        raise click.UsageError("--raw writes payloads only; leave out -v and --format.")
    subscription = Subscription(
        Connection(peer, keep_session=keep_session),
        filters,
        qos,
        _writer(shape, verbose, raw),
        place=None if origin is None else replay_place(origin),
        count=count,
        reconnect=reconnect,
    )
    shown_until_the_end(subscription, timeout)


def shown_until_the_end(subscription: Subscription, timeout_s: float | None) -> None:
    """Until its count or the timeout is reached, Ctrl-C, or nobody reads what is shown."""
    try:
        ended = subscription.run(timeout_s)
    except KeyboardInterrupt:
        subscription.connection.close()
        return
    except BrokenPipeError:
        # The reader of our output (head, grep -q …) has seen enough. Keep the interpreter's last flush quiet.
        sys.stdout = None
        return
    if not ended:
        sys.exit(TIMED_OUT)


def replay_place(origin: str) -> str:
    """The `<from>` of `$replay/<from>/<filter>`. Times go in UTC: the `+` of an offset is a wildcard."""
    start = parse_place(origin, time.time_ns() // 1_000_000)
    return utc(start.value) if start.kind == "time" else origin


def _writer(shape: str | None, verbose: bool, raw: bool) -> Callable[[MQTTMessage], None]:
    out = sys.stdout

    def write_raw(message: MQTTMessage) -> None:
        out.buffer.write(message.payload)
        out.buffer.flush()

    def write_line(message: MQTTMessage) -> None:
        out.write(line(message) + "\n")
        out.flush()

    if raw:
        return write_raw
    if shape == "json":
        line = json_line
    elif shape is None or shape == "text":
        line = verbose_line if verbose else _payload_line
    else:
        template = shape

        def line(message: MQTTMessage) -> str:
            return template_line(template, message)

    return write_line


def user_properties(message: MQTTMessage) -> list[tuple[str, str]]:
    return list(getattr(message.properties, "UserProperty", []))


def _origin_of(message: MQTTMessage) -> tuple[str | None, str | None]:
    """Time and position, which the broker adds to replayed messages. The last ones are the broker's."""
    added = dict(user_properties(message))
    return added.get("tidegate-time"), added.get("tidegate-position")


def _payload_line(message: MQTTMessage) -> str:
    return payload_text(message.payload)


def verbose_line(message: MQTTMessage) -> str:
    moment, position = _origin_of(message)
    origin = f"{safe(moment or '?')} @{safe(position or '?')} " if moment or position else ""
    return f"{origin}{safe(message.topic)} {payload_text(message.payload)}"


def json_line(message: MQTTMessage) -> str:
    row: dict[str, object] = {"topic": message.topic, "qos": message.qos, "retain": bool(message.retain)}
    try:
        row["payload"] = message.payload.decode("utf-8")
    except UnicodeDecodeError:
        row["payload_hex"] = message.payload.hex()
    moment, position = _origin_of(message)
    if moment:
        row["time"] = moment
    if position:
        row["position"] = int(position) if position.isascii() and position.isdigit() else position
    for name, key in (
        ("ContentType", "content_type"),
        ("ResponseTopic", "response_topic"),
        ("MessageExpiryInterval", "expiry_s"),
    ):
        if hasattr(message.properties, name):
            row[key] = getattr(message.properties, name)
    if correlation := getattr(message.properties, "CorrelationData", None):
        row["correlation_hex"] = correlation.hex()
    if user := user_properties(message):
        row["user_properties"] = user
    return json.dumps(row, ensure_ascii=True)


def template_line(template: str, message: MQTTMessage) -> str:
    moment, position = _origin_of(message)
    parts: dict[str, str] = {
        "t": safe(message.topic),
        "p": payload_text(message.payload),
        "x": message.payload.hex(),
        "l": str(len(message.payload)),
        "q": str(message.qos),
        "r": "1" if message.retain else "0",
        "T": safe(moment or ""),
        "o": safe(position or ""),
        "%": "%",
    }
    return re.sub("%(.)", lambda found: parts.get(found[1], found[0]), template)
