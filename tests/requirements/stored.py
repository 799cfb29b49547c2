"""What the tests of requirements share: opening clients in one line, and looking into a running broker's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from harness import BrokerProcess, RawClient
from tidegate.broker import inspect
from tidegate.commands.log import Record, records
from tidegate.log.snapshot import state_beside
from tidegate.router.filters import Start
from tidegate.wire import Properties

KEPT = Properties(session_expiry=3600)  # an MQTT 5 session that outlives its connection

T = TypeVar("T")


def attach(broker: BrokerProcess, client_id: str = "", version: int = 4, **connect: Any) -> RawClient:
    """A connected client."""
    raw = RawClient(broker.port, version)
    raw.connect(client_id, **connect)
    return raw


def attach_kept(broker: BrokerProcess, client_id: str, version: int = 5, **connect: Any) -> RawClient:
    """A client with a session that outlives the connection, connected without a clean start."""
    properties = connect.pop("properties", KEPT if version == 5 else Properties())
    return attach(broker, client_id, version, clean=False, properties=properties, **connect)


def eventually(look: Callable[[], T], timeout_s: float = 20.0) -> T:
    """What `look` returns as soon as it is true: for what happens beside the protocol and is announced to nobody."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)
    return found


# ── the data folder, as other programs read it ──


def stored_messages(data: Path, topic: bytes | None = None) -> list[Record]:
    wanted = None if topic is None else topic.__eq__
    return list(records(data, wanted, Start("earliest", 0), None))


def stored_payloads(data: Path, topic: bytes | None = None) -> list[bytes]:
    return [record.run.payloads[record.at] for record in stored_messages(data, topic)]


def state_of(data: Path, *kinds: int) -> Iterator[bytes]:
    """The state records of some kinds, in the order a recovery would apply them."""
    for batch in state_beside(data / "log"):
        yield from (record for record in batch if record[0] in kinds)


def stored_session(data: Path, client_id: str) -> inspect.SessionFacts | None:
    return next((facts for facts in inspect.sessions(state_beside(data / "log")) if facts.client_id == client_id), None)


def copies(data: Path, content: bytes) -> int:
    """How often some bytes stand in all files of the folder."""
    found = 0
    for path in data.rglob("*"):
        try:
            found += path.read_bytes().count(content)
        except (IsADirectoryError, FileNotFoundError):
            continue  # the second: trimmed since the folder was read
    return found
