"""Stored sessions as people want to see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tidegate.session.session import NEVER
from tidegate.session.stored import StoredSession, StoredState


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
    state = StoredState(frames)
    found = [
        SessionFacts(
            _text(session.client_id),
            session.connected,
            session.persistent,
            state.positions[session.number],
            _expires(session),
            [_text(filter) for filter in session.subscriptions],
        )
        for session in state.sessions.values()
    ]
    return sorted(found, key=lambda facts: facts.client_id)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _expires(session: StoredSession) -> str:
    if session.connected:
        return f"{timedelta(seconds=session.expiry_s)} after it leaves" if session.persistent else "while connected"
    if session.expiry_s == NEVER:
        return "never"
    end = datetime.fromtimestamp(session.away_since_ms / 1000, UTC) + timedelta(seconds=session.expiry_s)
    return end.isoformat(timespec="seconds").replace("+00:00", "Z")
