"""`tidegate trace`."""

from __future__ import annotations

import json
import sys

import click
from paho.mqtt.client import MQTTMessage

from tidegate.server.events import word
from tidegate.wire import Reason

from .mqtt import Connection, Peer, connects
from .subscribe import TIMED_OUT, shown_until_the_end
from .subscription import Subscription
from .text import payload_text, safe

PACKET_WIDTH = len("UNSUBSCRIBE")


@click.command("trace")
@click.argument("watched", metavar="CLIENT_ID")
@connects
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N packets.")
@click.option(
    "--timeout", type=click.FloatRange(0), metavar="SECONDS", help=f"End after this; exit code {TIMED_OUT}."
)
def trace(peer: Peer, watched: str, as_json: bool, count: int | None, timeout: float | None) -> None:
    """Show the packets between the broker and a client.

    One per line, as they come: `in` is what the client sent, `out` what the broker sent to it. Of messages it
    shows the length, not the content; of a password, that there was one. The client need not be connected yet.

    \b
    Examples:
      tidegate trace pump-7
      tidegate trace pump-7 --json --timeout 60
    """

    if not watched:
        raise click.BadParameter("a client id is not empty.", param_hint="CLIENT_ID")
    last = 0

    def write(message: MQTTMessage) -> None:
        nonlocal last
        number = number_of(message.payload)
        if 0 < last < number - 1:
            missing = number - 1 - last
            click.echo(f"tidegate: {missing} packets are missing here: there were more than could be shown", err=True)
        last = number
        sys.stdout.write((json_line if as_json else line)(message.payload) + "\n")
        sys.stdout.flush()

    def granted() -> None:
        click.echo(f"tidegate: waiting for packets of {safe(watched)}; Ctrl-C ends", err=True)

    subscription = Subscription(Connection(peer), (topic_of(watched),), 0, write, count=count, granted=granted)
    shown_until_the_end(subscription, timeout)


def topic_of(client_id: str) -> str:
    """Where the broker tells of a client's packets. A client id may hold what a topic may not."""
    level = client_id.replace("%", "%25").replace("+", "%2B").replace("#", "%23")
    return f"$SYS/clients/{level}/trace"


def number_of(payload: bytes | bytearray) -> int:
    """Packets are numbered from the CONNECT, or the begin of the trace, on."""
    number = (_packet(payload) or {}).get("number")
    return number if isinstance(number, int) else 0


def line(payload: bytes | bytearray) -> str:
    """A packet for people: when, which way, what, and its details."""
    packet = _packet(payload)
    if packet is None:
        return payload_text(payload)
    at, direction, name = (safe(str(packet.pop(key, "?"))) for key in ("at", "direction", "packet"))
    told = {key: value for key, value in packet.items() if _says_something(key, value)}
    details = "".join(f" {safe(key)}={_shown(key, value)}" for key, value in told.items())
    return f"{at} {direction:<3} {name:<{PACKET_WIDTH}}{details}".rstrip()


def _says_something(key: str, value: object) -> bool:
    return key != "number" and value is not False and value != [] and (key, value) != ("reason", 0)


def _shown(key: str, value: object) -> str:
    """Reasons as the standard writes and names them."""
    if key == "reason" and isinstance(value, int):
        try:
            return f"0x{value:02X} ({Reason(value).name.lower().replace('_', ' ')})"
        except ValueError:
            return f"0x{value:02X}"
    if key == "reasons" and isinstance(value, list) and all(isinstance(reason, int) for reason in value):
        return "[" + ", ".join(str(reason) if reason < 0x80 else f"0x{reason:02X}" for reason in value) + "]"
    return word(value)


def json_line(payload: bytes | bytearray) -> str:
    packet = _packet(payload)
    return json.dumps({"payload": payload_text(payload)} if packet is None else packet)


def _packet(payload: bytes | bytearray) -> dict[str, object] | None:
    try:
        packet = json.loads(payload)
    except ValueError:
        return None
    return packet if isinstance(packet, dict) else None
