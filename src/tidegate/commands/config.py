"""`tidegate config check` and `tidegate config show`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from tidegate.config_sources import load, settings, show, value_of

config_file = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="Configuration file (default: tidegate.toml in the current folder, if it exists).",
)


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
    changed = sum(source != "default" for source in loaded.sources.values())
    click.echo(
        f"The configuration is right: {changed} of {len(loaded.sources)} settings differ from a plain start."
    )


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
        rows = {}
        for path, about in settings().items():
            value = value_of(loaded.config, path)
            plain = str(value) if isinstance(value, Path) else value
            rows[path] = {"value": plain, "source": loaded.sources[path], "doc": about.doc}
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", "what it is", header_style="bold")
    for path, about in settings().items():
        source = loaded.sources[path]
        style = "dim" if source == "default" else None
        table.add_row(path, show(path, value_of(loaded.config, path)), source, about.doc, style=style)
    Console().print(table)
