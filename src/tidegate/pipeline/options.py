"""The options of `format("tidegate")`: strings from a user, checked where the query is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.errors import ConfigError

# What Spark itself puts among the options.
_SPARKS = frozenset({"checkpointlocation", "queryname"})


class Options:
    """Names are case-insensitive, as in Spark. Raises ConfigError for a wrong name or value, saying what is right."""

    def __init__(self, given: Mapping[str, str], known: Sequence[str]) -> None:
        self._given = {name.lower(): str(value).strip() for name, value in given.items()}
        spelled = {name.lower() for name in known}
        for name in given:
            if name.lower() not in spelled | _SPARKS:
                raise ConfigError(f"option {name}", "there is no such option", "known are " + ", ".join(known))

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name.lower(), default)

    def number(self, name: str, default: int, low: int, high: int) -> int:
        given = self._given.get(name.lower())
        if given is None:
            return default
        try:
            value = int(given)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ConfigError(f"option {name}", f"{given!r} is not allowed", f"a number from {low} to {high}")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """The first one is the default."""
        given = self._given.get(name.lower(), allowed[0])
        if given not in allowed:
            raise ConfigError(f"option {name}", f"{given!r} is not allowed", "one of " + ", ".join(allowed))
        return given
