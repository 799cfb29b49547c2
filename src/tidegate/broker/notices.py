"""What the broker has to say to a client beside the protocol: messages on `$SYS/clients/<client id>/notice`.

They are not stored: who is connected and subscribed gets them, and the counters tell the rest.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tidegate.delivery.group import Group
from tidegate.log.rows import Rows
from tidegate.log.run import NO_EXPIRY
from tidegate.session.reader import Reader
from tidegate.session.session import DEFAULT_TENANT

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

CLIENTS = b"$SYS/clients/"


def overrun(broker: Broker, reader: Reader, first: int, left: int) -> None:
    """Messages between two positions are gone before the reader got to them."""
    for client_id in _clients(reader):
        broker.report("reader.overrun", {"client": client_id, "first": first, "left": left})
        tell(broker, client_id, {"event": "overrun", "lost_from": first, "lost_before": left})


def damaged(broker: Broker, reader: Reader, messages: int, first: int, left: int) -> None:
    """So many messages between two positions cannot be read; how many of them were for the reader nobody knows."""
    for client_id in _clients(reader):
        broker.report("reader.damage", {"client": client_id, "messages": messages, "first": first, "left": left})
        about = {"event": "damaged", "messages": messages, "lost_from": first, "lost_before": left}
        tell(broker, client_id, about)


def _clients(reader: Reader) -> list[bytes]:
    sessions = [m.session for m in reader.members] if isinstance(reader, Group) else [reader.session]
    return [session.client_id for session in sessions if session is not None]


def tell(broker: Broker, client_id: bytes, what: dict[str, object]) -> None:
    broker.counters.notices += 1
    topic = CLIENTS + safe(client_id) + b"/notice"
    publish_unstored(broker, topic, json.dumps(what).encode(), even_behind=True)


def safe(client_id: bytes) -> bytes:
    """A client id as a topic level: it may hold what a topic name may not."""
    return client_id.replace(b"%", b"%25").replace(b"+", b"%2B").replace(b"#", b"%23")


def unsafe(level: bytes) -> bytes:
    """The client id behind a topic level."""
    return level.replace(b"%23", b"#").replace(b"%2B", b"+").replace(b"%25", b"%")


def publish_unstored(broker: Broker, topic: bytes, payload: bytes, *, even_behind: bool = False) -> None:
    """A QoS 0 message of the broker's own to whoever is there."""
    if not broker.table.resolve(topic).list:
        return
    rows = Rows()
    rows.add(topic, b"", DEFAULT_TENANT, 0, payload, b"", NO_EXPIRY)
    broker.delivery.unstored(rows, even_behind=even_behind)
    broker.request_tick()
