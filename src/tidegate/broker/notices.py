"""What the broker has to say to a client beside the protocol: messages on `$SYS/clients/<client id>/notice`.

They are not stored: who is connected and subscribed gets them, and the counters tell the rest.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tidegate.delivery.group import Group
from tidegate.log.run import Run
from tidegate.session.session import Reader

if TYPE_CHECKING:
    from tidegate.broker.core import Broker


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
    # A client id may hold what a topic name may not.
    name = client_id.replace(b"+", b"%2B").replace(b"#", b"%23")
    topic = b"$SYS/clients/" + name + b"/notice"
    publish_unstored(broker, topic, json.dumps(what).encode(), even_behind=True)


def publish_unstored(broker: Broker, topic: bytes, payload: bytes, *, even_behind: bool = False) -> None:
    """A QoS 0 message of the broker's own to whoever is there."""
    route = broker.table.routes.get(topic) or broker.table.resolve(topic)
    if not route.targets:
        return
    run = Run(topic, b"", broker.tenant, 0, [payload])
    run.route = route
    broker.dispatcher.deliver_unstored([run], even_behind=even_behind)
    broker.request_tick()
