"""Stored sessions as people want to see them, from the same records that the broker recovers from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from struct import error as StructError

from tidegate.errors import CorruptLog
from tidegate.session import changes
from tidegate.session.session import NEVER


@dataclass(slots=True)
class SessionFacts:
    client_id: str
    connected: bool
    persistent: bool
    position: int
    expires: str
    subscriptions: list[str] = field(default_factory=list)


def sessions(frames: Iterable[list[bytes]]) -> list[SessionFacts]:
    """The sessions that a stretch of state records describes, by client id."""
    found: dict[int, SessionFacts] = {}
    for records in frames:
        for record in records:
            try:
                _apply(found, record)
            except (IndexError, StructError, CorruptLog):
                continue  # `tidegate log verify` is for damage
    return sorted(found.values(), key=lambda facts: facts.client_id)


def _apply(found: dict[int, SessionFacts], record: bytes) -> None:
    kind = record[0]
    if kind == changes.SESSION:
        number, connected, _, expiry_s, away_ms, position, client_id, _, _ = changes.read_session(record)
        facts = found.get(number)
        name = client_id.decode("utf-8", "backslashreplace")
        if facts is None:
            facts = found[number] = SessionFacts(name, connected, False, position, "")
        facts.connected, facts.persistent, facts.position = connected, expiry_s > 0, position
        facts.expires = _expires(connected, expiry_s, away_ms)
    elif kind == changes.GONE:
        found.pop(changes.read_number(record), None)
    elif kind == changes.POSITIONS:
        for number, position in changes.read_positions(record):
            if number in found:
                found[number].position = position
    elif kind in (changes.SUBSCRIBED, changes.UNSUBSCRIBED):
        if kind == changes.SUBSCRIBED:
            number, *_, filter = changes.read_subscribed(record)
        else:
            number, filter = changes.read_unsubscribed(record)
        facts = found.get(number)
        if facts is not None:
            text = filter.decode("utf-8", "backslashreplace")
            facts.subscriptions = [f for f in facts.subscriptions if f != text]
            if kind == changes.SUBSCRIBED:
                facts.subscriptions.append(text)


def _expires(connected: bool, expiry_s: int, away_ms: int) -> str:
    if connected:
        return "while connected" if not expiry_s else f"{timedelta(seconds=expiry_s)} after it leaves"
    if expiry_s == NEVER:
        return "never"
    end = datetime.fromtimestamp(away_ms / 1000, UTC) + timedelta(seconds=expiry_s)
    return end.isoformat(timespec="seconds").replace("+00:00", "Z")
