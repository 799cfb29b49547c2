"""`tidegate config check` and `tidegate config show`; and how every other command comes by its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from tidegate.config import Config
from tidegate.config_sources import Value, load, settings

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

config_file = click.option(
    "--config",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Configuration file (default: tidegate.toml in the current folder, if there is one).",
)

data_option = click.option(
    "--data",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="The broker's data folder (default: as configured, or data).",
)

HIDDEN = "(hidden)"

_PATHS = {"port": "listen.port", "host": "listen.host", "durability": "log.durability"}


def configured(file: Path | None, **given: Value | None) -> Config:
    """The configuration, with the flags that the user gave."""
    flags = {_PATHS.get(name, name): value for name, value in given.items() if value is not None}
    return load(file, os.environ, flags).config


def with_config(**options: Decorator) -> Decorator:
    """Gives a command `--config` and these options, named like the settings they are flags of. What it gets is
    `config`, filled from the file, then the environment, then the flags."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def filled(file: Path | None, **given: Any) -> Any:
            flags = {name: given.pop(name) for name in options}
            return command(config=configured(file, **flags), **given)

        decorated: Callable[..., Any] = config_file(filled)
        for option in reversed(options.values()):
            decorated = option(decorated)
        return decorated

    return decorate


@click.group("config")
def config_group() -> None:
    """Check and show the configuration."""


@config_group.command("check")
@config_file
def check(file: Path | None) -> None:
    """Check the file and the environment, without starting anything.

    \b
    Example:
      tidegate config check --config /etc/tidegate.toml
    """
    loaded = load(file, os.environ, {})
    known = settings()
    changed = sum(loaded.chosen[path].value != each.default for path, each in known.items())
    differ = "differs from its default" if changed == 1 else "differ from their defaults"
    own = len(loaded.chosen) - len(known)
    added = "" if not own else ", and 1 entry is your own" if own == 1 else f", and {own} entries are your own"
    click.echo(f"The configuration is right: {changed} of {len(known)} settings {differ}{added}.")


@config_group.command("show")
@config_file
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def show_all(file: Path | None, as_json: bool) -> None:
    """Show every setting, its value and where it came from.

    \b
    Examples:
      tidegate config show
      TIDEGATE_LOG_SEGMENT_BYTES=64MiB tidegate config show --json
    """
    loaded = load(file, os.environ, {})
    if as_json:
        rows = {
            path: {
                "value": HIDDEN if each.setting.is_secret else _plain(each.value),
                "source": each.source,
                "doc": each.setting.doc,
            }
            for path, each in loaded.chosen.items()
        }
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", "what it is", header_style="bold")
    for path, each in loaded.chosen.items():
        value = HIDDEN if each.setting.is_secret else each.setting.text(each.value)
        cells = (Text(text) for text in (path, value, each.source, each.setting.doc))
        table.add_row(*cells, style="dim" if each.source == "default" else None)
    Console().print(table)


def _plain(value: Value) -> str | int:
    return str(value) if isinstance(value, Path) else value
