"""`tidegate`: the command line. Each command lives in `tidegate.commands`."""

from __future__ import annotations

import sys
from typing import Any

import click

from tidegate import __version__
from tidegate.commands.broker import broker, up
from tidegate.commands.config import config_group
from tidegate.commands.failure import failure_of
from tidegate.commands.log import log_group
from tidegate.commands.pipeline import pipeline_group
from tidegate.commands.publish import pub
from tidegate.commands.replay import replay
from tidegate.commands.sessions import sessions
from tidegate.commands.sql import sql
from tidegate.commands.subscribe import sub
from tidegate.commands.trace import trace
from tidegate.errors import TidegateError

VERSION = f"tidegate {__version__} (Python {'.'.join(map(str, sys.version_info[:3]))})"


class _Commands(click.Group):
    """Shows what goes wrong as a line and a hint; a traceback means a bug of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly when the reader of our output has left
        except (TidegateError, OSError) as error:
            raise failure_of(error) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of the help, not of the alphabet


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)
@click.version_option(__version__, message=VERSION, help="Show the version and exit.")
@click.pass_context
def tidegate(ctx: click.Context) -> None:
    """A durable MQTT broker whose message log is a Spark table.

    \b
    Start here:
      tidegate up                                  start broker and pipeline here
      tidegate sub -t 'demo/#'                     watch messages
      tidegate pub -t demo/hello -m 'hi'           send one
      tidegate sub -t 'demo/#' --from earliest -v  see them again

    Commands take their settings from tidegate.toml in the current folder (or --config FILE), then from TIDEGATE_…
    variables, then from flags; `tidegate config show` prints them. `tidegate COMMAND --help` has examples.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command("version")
def version() -> None:
    """Print the version."""
    click.echo(VERSION)


for command in (up, broker, pub, sub, log_group, sessions, trace, sql, replay, pipeline_group, config_group, version):
    tidegate.add_command(command)


def main() -> None:
    tidegate(prog_name="tidegate")


if __name__ == "__main__":
    main()
