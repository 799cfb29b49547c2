"""Fills the configuration tree from a TOML file, the environment and flags.

Later sources win: default < file < environment < flag, and where each value came from is remembered. Every
value is checked where it enters, against the type and the bounds that its field in `config` declares, so that
a refusal can name the place to mend.

    file         [log]                    environment  TIDEGATE_LOG_SEGMENT_BYTES=64MiB
                 segment_bytes = "64MiB"  flag         --port 1884

Three tables have keys that the user chooses. A file is the place for them:

    [spark]                      [extract.climate]                        [pipeline.tenant_retention_s]
    master = "spark://host:7077" filter = "sensors/#"                     acme = "30d"
    executor.memory = "2g"       columns = "value double, unit string"

Sizes (`…_bytes`, `…bytes_max`) may be written with a unit: KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB,
TB (powers of 1000). Durations (`…_s`) may be written with s, m, h or d.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tidegate.config import Config
from tidegate.errors import ConfigError, PeerError
from tidegate.router.filters import check_filter

FILE_NAME = "tidegate.toml"
ENVIRONMENT_PREFIX = "TIDEGATE_"

Value = str | int | bool | Path

# Flags whose name is not the setting's path with dashes.
FLAG_NAMES = {"listen.host": "--host", "listen.port": "--port", "log.durability": "--durability"}

SPARK = "spark"  # the table whose keys are Spark's own, which begin with its name

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

_SPARK_MASTER = re.compile(r"local(\[(\d+|\*)(\s*,\s*\d+)?\])?|local-cluster\[.+\]|(spark|k8s)://.+|yarn")
_SECRET = re.compile(r"secret|password|token|access[.-]?key|credential", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_TYPES = (
    "boolean|byte|tinyint|short|smallint|int|integer|long|bigint|float|real|double|decimal|dec|numeric|string|char|"
    "varchar|binary|date|timestamp|timestamp_ntz|timestamp_ltz|interval|array|map|struct|variant"
)
_COLUMN = re.compile(rf"\s*(`[^`]+`|[A-Za-z_]\w*)\s*[:\s]\s*({_TYPES})\b.*", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree: its dotted path and what its field declares."""

    path: str
    name: str
    kind: Any
    default: Any
    doc: str
    low: int | None
    high: int | None

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.path.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        if self.name == SPARK:
            return "--conf"
        return FLAG_NAMES.get(self.path, "--" + self.path.replace(".", "-").replace("_", "-"))

    @property
    def is_size(self) -> bool:
        return self.name.removesuffix("_max").split("_")[-1] == "bytes"

    @property
    def is_duration(self) -> bool:
        return self.name.endswith("_s")

    @property
    def is_secret(self) -> bool:
        return self.name == SPARK and _SECRET.search(self.path) is not None

    def text(self, value: Value) -> str:
        """A value as people write it: sizes and durations in the largest unit that divides them."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int) and value > 0:
            units = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10} if self.is_size else {}
            if self.is_duration:
                units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
            for unit, factor in units.items():
                if value % factor == 0:
                    return f"{value // factor}{unit}"
        return str(value)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The value that won, and where it came from."""

    setting: Setting
    value: Value
    source: str


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    chosen: dict[str, Chosen]

    @property
    def sources(self) -> dict[str, str]:
        return {path: each.source for path, each in self.chosen.items()}


@cache
def settings() -> dict[str, Setting]:
    """Every setting that is always there, by its path, in the order of the tree."""
    found: dict[str, Setting] = {}
    for each in _walk(Config, ""):
        if get_origin(each.kind) is not Mapping:
            found[each.path] = each
        else:
            found |= {path: _entry(each, path, value) for path, value in each.default.items()}
    return found


@cache
def tables() -> dict[str, Setting]:
    """The tables whose keys the user chooses."""
    return {each.path: each for each in _walk(Config, "") if get_origin(each.kind) is Mapping}


def _entry(table: Setting, path: str, default: Value | None = None) -> Setting:
    return replace(table, path=path, kind=get_args(table.kind)[1], default=default)


def _walk(tree: type[Any], prefix: str) -> Iterator[Setting]:
    kinds = get_type_hints(tree)
    for each in fields(tree):
        kind = kinds[each.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _walk(kind, f"{prefix}{each.name}.")
        else:
            about = each.metadata
            default: Any = each.default_factory() if callable(each.default_factory) else each.default
            yield Setting(
                prefix + each.name, each.name, kind, default, about["doc"], about["low"], about["high"]
            )


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Value]) -> Loaded:
    """The configuration from all sources. `flags` maps dotted paths to what the user gave.

    Without `file`, `tidegate.toml` in the current folder is read if there is one.
    """
    if file is None and Path(FILE_NAME).is_file():
        file = Path(FILE_NAME)
    chosen = {path: Chosen(each, each.default, "default") for path, each in settings().items()}

    def take(setting: Setting, raw: object, source: str) -> None:
        chosen[setting.path] = Chosen(setting, parse(setting, raw, source), source)

    if file is not None:
        source = f"file {file}"
        for setting, raw in _read_file(file, source):
            take(setting, raw, source)
    for path, variable in _read_environment(environ):
        take(settings()[path], environ[variable], f"environment {variable}")
    for path, raw in flags.items():
        given = _entry(tables()[SPARK], path) if path.startswith(SPARK + ".") else settings().get(path)
        if given is None:
            raise ConfigError(path, "no flag sets this", _nearest(path, settings()))
        take(given, raw, f"flag {given.flag}")

    config: Config = _build(Config, {path: each.value for path, each in chosen.items()}, "")
    check(config)
    sections = [each.name for each in fields(Config)]
    return Loaded(config, dict(sorted(chosen.items(), key=lambda each: sections.index(each[0].partition(".")[0]))))


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
    if not _SPARK_MASTER.fullmatch(config.spark["spark.master"]):
        raise ConfigError(
            "spark.master",
            f'"{config.spark["spark.master"]}" is no place where Spark runs',
            "local[*], local[N], spark://HOST:PORT, k8s://URL or yarn",
        )
    for name, extract in config.extract.items():
        try:
            check_filter(extract.filter.encode())
        except PeerError as error:
            raise ConfigError(
                f"extract.{name}.filter", str(error), 'a topic filter such as "sensors/#"'
            ) from error
        wrong = _wrong_column(extract.columns)
        if wrong is not None:
            raise ConfigError(
                f"extract.{name}.columns",
                f'"{wrong}" is not a column\'s name and its type',
                'for example "value double, unit string"',
            )


def _wrong_column(columns: str) -> str | None:
    """The first that is not `name type`. Spark judges the rest of it, once it runs; this finds what people mistype."""
    depth, parts = 0, [""]
    for each in columns:
        depth += (each in "<(") - (each in ">)")
        if each == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += each
    for part in parts:
        if not _COLUMN.fullmatch(part):
            return part.strip()
    return None if depth == 0 else columns


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
    may_be_empty = setting.default == "" or setting.name == SPARK
    if isinstance(raw, str | Path) and (may_be_empty or str(raw).strip()):
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
    low = None if setting.low is None else setting.text(setting.low)
    high = None if setting.high is None else setting.text(setting.high)
    if low is not None and high is not None:
        return f"{words}, from {low} to {high}"
    if low is not None:
        return f"{words}, at least {low}"
    return words


def _refusal(setting: Setting, raw: object, source: str, expected: str, hint: str = "") -> ConfigError:
    given = f'"{raw}"' if isinstance(raw, str | Path) else str(raw).lower()
    return ConfigError(setting.path, f"{given} from {source} is not {expected}", hint)


def _read_file(file: Path, source: str) -> Iterator[tuple[Setting, object]]:
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


def _leaves(values: dict[str, Any], prefix: str, source: str) -> Iterator[tuple[Setting, object]]:
    groups = {path.rpartition(".")[0] for path in settings()} - {""} | set(tables())
    for key, value in values.items():
        path = prefix + key
        if path in settings():
            yield settings()[path], value
        elif path not in groups:
            raise ConfigError(path, f"unknown setting in {source}", _nearest(path, [*settings(), *groups]))
        elif not isinstance(value, dict):
            raise ConfigError(path, f"in {source} must be a table of settings", f"a line [{path}]")
        elif path == SPARK:
            yield from _spark_leaves(value, "spark.", source)
        elif path in tables():
            yield from _entries(tables()[path], value, source)
        else:
            yield from _leaves(value, path + ".", source)


def _spark_leaves(values: dict[str, Any], prefix: str, source: str) -> Iterator[tuple[Setting, object]]:
    """Nested tables make dotted keys; numbers and switches are text to Spark."""
    for key, value in values.items():
        path = prefix + key
        if path.startswith("spark.spark."):
            short = path.removeprefix("spark.spark.")
            raise ConfigError(path, f"in {source} names spark twice", f'below [spark] write "{short}"')
        if isinstance(value, dict):
            yield from _spark_leaves(value, path + ".", source)
        else:
            text = str(value).lower() if isinstance(value, bool) else value
            text = str(text) if isinstance(text, int | float) else text
            yield _entry(tables()[SPARK], path), text


def _entries(table: Setting, values: dict[str, Any], source: str) -> Iterator[tuple[Setting, object]]:
    entry = get_args(table.kind)[1]
    for key, value in values.items():
        path = f"{table.path}.{key}"
        if not is_dataclass(entry):
            yield _entry(table, path), value
            continue
        if not _NAME.fullmatch(key):
            raise ConfigError(
                path, f"in {source} is no name for a table", "letters, digits and _, a letter first, at most 64"
            )
        if not isinstance(value, dict):
            raise ConfigError(path, f"in {source} must be a table of settings", f"a line [{path}]")
        assert isinstance(entry, type)
        parts = {each.path: each for each in _walk(entry, path + ".")}
        for name in value:
            if f"{path}.{name}" not in parts:
                raise ConfigError(
                    f"{path}.{name}", f"unknown setting in {source}", _nearest(f"{path}.{name}", parts)
                )
        for each in parts.values():
            if each.name not in value:
                raise ConfigError(each.path, f"is missing in {source}", f"it is {each.doc}")
            yield each, value[each.name]


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

    def part(name: str) -> Any:
        path, kind = prefix + name, kinds[name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            return _build(kind, values, path + ".")
        if get_origin(kind) is Mapping:
            return _build_table(path, get_args(kind)[1], values)
        return values[path]

    return tree(**{each.name: part(each.name) for each in fields(tree)})


def _build_table(path: str, kind: Any, values: Mapping[str, Value]) -> dict[str, Any]:
    start = "" if path == SPARK else path + "."
    found = {key.removeprefix(start): value for key, value in values.items() if key.startswith(path + ".")}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return {name: _build(kind, found, name + ".") for name in dict.fromkeys(key.partition(".")[0] for key in found)}
    return found


def show(path: str, value: Value) -> str:
    return settings()[path].text(value)
