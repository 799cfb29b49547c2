"""`tidegate sessions`."""

from __future__ import annotations

import json

import click

from tidegate.config import Config

from .config import data_option, with_config
from .text import safe

FIELDS = ("client_id", "connected", "persistent", "subscriptions", "position", "expires")


@click.command("sessions")
@with_config(data=data_option)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
def sessions(config: Config, as_json: bool) -> None:
    """List the stored sessions. Only reads; works beside a running broker.

    \b
    Example:
      tidegate sessions --data data
    """
    from tidegate.broker.inspect import sessions as sessions_in
    from tidegate.log.snapshot import state_beside

    from .log import segment_files

    data = config.data
    segment_files(data)  # says what is wrong if there is no log
    facts = sessions_in(state_beside(data / "log"))
    if as_json:
        for each in facts:
            click.echo(json.dumps({name: getattr(each, name) for name in FIELDS}))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "client id", "connected", "persistent", "subscriptions", "position", "expires", header_style="bold"
    )
    for each in facts:
        table.add_row(
            Text(safe(each.client_id)),
            "yes" if each.connected else "no",
            "yes" if each.persistent else "no",
            Text(safe(" ".join(each.subscriptions))),
            str(each.position),
            each.expires,
        )
    Console().print(table)
