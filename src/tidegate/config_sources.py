"""Fills the configuration tree from a TOML file, the environment and flags.

Later sources win: default < file < environment < flag, and where each value came from is remembered. Every
value is checked where it enters, against the type and the bounds that its field in `config` declares, so that
a refusal can name the place to mend.

    file         [log]                    environment  TIDEGATE_LOG_SEGMENT_BYTES=64MiB
                 segment_bytes = "64MiB"  flag         --port 1884

Sizes (`…_bytes`, `…bytes_max`) may be written with a unit: KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB,
TB (powers of 1000). Durations (`…_s`) may be written with s, m, h or d.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tidegate.config import Config
from tidegate.errors import ConfigError

FILE_NAME = "tidegate.toml"
ENVIRONMENT_PREFIX = "TIDEGATE_"

Value = str | int | bool | Path

# Flags whose name is not the setting's path with dashes.
FLAG_NAMES = {"listen.host": "--host", "listen.port": "--port", "log.durability": "--durability"}

_SIZE_UNITS = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"\s*(\d+)\s*([A-Za-z]*)\s*")
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree: its dotted path and what its field declares."""

    path: str
    kind: Any
    default: Value
    doc: str
    low: int | None
    high: int | None

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.path.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        return FLAG_NAMES.get(self.path, "--" + self.path.replace(".", "-").replace("_", "-"))

    @property
    def is_size(self) -> bool:
        words = self.path.rpartition(".")[2].removesuffix("_max").split("_")
        return words[-1] == "bytes"

    @property
    def is_duration(self) -> bool:
        return self.path.endswith("_s")


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    sources: dict[str, str]


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its path, in the order of the tree."""
    return {each.path: each for each in _walk(Config, "")}


def _walk(tree: type[Any], prefix: str) -> Iterator[Setting]:
    kinds = get_type_hints(tree)
    for each in fields(tree):
        kind = kinds[each.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _walk(kind, f"{prefix}{each.name}.")
        else:
            about = each.metadata
            default: Any = each.default
            yield Setting(prefix + each.name, kind, default, about["doc"], about["low"], about["high"])


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Value]) -> Loaded:
    """The configuration from all sources. `flags` maps dotted paths to what the user gave.

    Without `file`, `tidegate.toml` in the current folder is read if there is one.
    """
    if file is None and Path(FILE_NAME).is_file():
        file = Path(FILE_NAME)
    values = {path: each.default for path, each in settings().items()}
    sources = dict.fromkeys(values, "default")

    def take(path: str, raw: object, source: str) -> None:
        values[path] = parse(settings()[path], raw, source)
        sources[path] = source

    if file is not None:
        source = f"file {file}"
        for path, raw in _read_file(file, source):
            take(path, raw, source)
    for path, variable in _read_environment(environ):
        take(path, environ[variable], f"environment {variable}")
    for path, raw in flags.items():
        if path not in settings():
            raise ConfigError(path, "no flag sets this", _nearest(path, settings()))
        take(path, raw, f"flag {settings()[path].flag}")

    config: Config = _build(Config, values, "")
    check(config)
    return Loaded(config, sources)


def check(config: Config) -> None:
    """What must hold between settings."""
    log = config.log
    if log.retention_bytes < log.segment_bytes:
        raise ConfigError(
            "log.retention_bytes",
            f"{show('log.retention_bytes', log.retention_bytes)} is less than log.segment_bytes, "
            f"{show('log.segment_bytes', log.segment_bytes)}; the log is trimmed by whole segments",
            "raise log.retention_bytes or lower log.segment_bytes",
        )
    if log.hard_bytes < log.retention_bytes:
        raise ConfigError(
            "log.hard_bytes",
            f"{show('log.hard_bytes', log.hard_bytes)} is less than log.retention_bytes, "
            f"{show('log.retention_bytes', log.retention_bytes)}; "
            "what sessions need would go before what nobody needs",
            "raise log.hard_bytes or lower log.retention_bytes",
        )


def parse(setting: Setting, raw: object, source: str) -> Value:
    """`raw` as the setting's type, within its bounds."""
    kind = setting.kind
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if raw in choices:
            return str(raw)
        hint = _nearest(str(raw), choices) if isinstance(raw, str) else ""
        raise _refusal(setting, raw, source, " or ".join(choices), hint)
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and source.startswith("environment") and raw.lower() in _TRUE | _FALSE:
            return raw.lower() in _TRUE
        raise _refusal(setting, raw, source, "true or false")
    if kind is int:
        return _whole_number(setting, raw, source)
    if isinstance(raw, str | Path) and str(raw).strip():
        return Path(raw) if kind is Path else str(raw)
    raise _refusal(setting, raw, source, "a path" if kind is Path else "text")


def _whole_number(setting: Setting, raw: object, source: str) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        number = raw
    elif isinstance(raw, str) and (read := _quantity(setting, raw, source)) is not None:
        number = read
    else:
        raise _refusal(setting, raw, source, _expected(setting))
    low, high = setting.low, setting.high
    if (low is not None and number < low) or (high is not None and number > high):
        raise _refusal(setting, raw, source, _expected(setting))
    return number


def _quantity(setting: Setting, raw: str, source: str) -> int | None:
    """Digits with a unit; digits alone only where the source has nothing but text to offer."""
    match = _QUANTITY.fullmatch(raw)
    if match is None:
        return int(raw) if re.fullmatch(r"\s*-\d+\s*", raw) else None
    digits, unit = int(match[1]), match[2].lower()
    if not unit:
        return None if source.startswith("file") else digits
    units = _SIZE_UNITS if setting.is_size else _DURATION_UNITS if setting.is_duration else {}
    factor = units.get(unit)
    return None if factor is None else digits * factor


def _expected(setting: Setting) -> str:
    if setting.is_size:
        words = 'bytes, or a size like "64MiB" or "2GB"'
    elif setting.is_duration:
        words = 'seconds, or a duration like "10s", "15m", "2h" or "7d"'
    else:
        words = "a whole number"
    low = None if setting.low is None else show(setting.path, setting.low)
    high = None if setting.high is None else show(setting.path, setting.high)
    if low is not None and high is not None:
        return f"{words}, from {low} to {high}"
    if low is not None:
        return f"{words}, at least {low}"
    return words


def _refusal(setting: Setting, raw: object, source: str, expected: str, hint: str = "") -> ConfigError:
    given = f'"{raw}"' if isinstance(raw, str | Path) else str(raw).lower()
    return ConfigError(setting.path, f"{given} from {source} is not {expected}", hint)


def _read_file(file: Path, source: str) -> Iterator[tuple[str, object]]:
    try:
        tree = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            str(file), f"cannot be read: {error.strerror}", "--config names the file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), "is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), f"is not TOML: {error}") from error
    return _leaves(tree, "", source)


def _leaves(table: dict[str, Any], prefix: str, source: str) -> Iterator[tuple[str, object]]:
    groups = {path.rpartition(".")[0] for path in settings()} - {""}
    for key, value in table.items():
        path = prefix + key
        if path in settings():
            yield path, value
        elif path in groups and isinstance(value, dict):
            yield from _leaves(value, path + ".", source)
        elif path in groups:
            raise ConfigError(path, f"in {source} must be a table of settings", f"a line [{path}]")
        else:
            raise ConfigError(path, f"unknown setting in {source}", _nearest(path, [*settings(), *groups]))


def _read_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    known = {each.variable: path for path, each in settings().items()}
    for variable in sorted(environ):
        if variable in known:
            yield known[variable], variable
        elif variable.startswith(ENVIRONMENT_PREFIX):
            raise ConfigError(variable, "unknown environment variable", _nearest(variable, known))


def _nearest(wrong: str, right: Mapping[str, object] | list[str] | tuple[str, ...]) -> str:
    """The closest right name; for a misplaced key, the setting of that name in another group."""
    close = difflib.get_close_matches(wrong, list(right), n=1, cutoff=0.6)
    last = wrong.rpartition(".")[2]
    close = close or [each for each in right if each.rpartition(".")[2] == last][:1]
    return f"did you mean {close[0]}?" if close else "see `tidegate config show` for every setting"


def _build(tree: type[Any], values: Mapping[str, Value], prefix: str) -> Any:
    kinds = get_type_hints(tree)
    return tree(
        **{
            each.name: _build(kinds[each.name], values, f"{prefix}{each.name}.")
            if is_dataclass(kinds[each.name])
            else values[prefix + each.name]
            for each in fields(tree)
        }
    )


def value_of(config: Config, path: str) -> Value:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value  # type: ignore[no-any-return]


def show(path: str, value: Value) -> str:
    """A value as people write it: sizes and durations in the largest unit that divides them."""
    setting = settings()[path]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value > 0:
        units = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10} if setting.is_size else {}
        if setting.is_duration:
            units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        for unit, factor in units.items():
            if value % factor == 0:
                return f"{value // factor}{unit}"
    return str(value)
