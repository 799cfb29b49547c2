"""`tidegate broker` and `tidegate up`."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, get_args

import click

from tidegate.config import Config, Durability, LogFormat, LogLevel
from tidegate.errors import TidegateError

from .config import data_option, with_config
from .failure import Failure, failure_of, listen_failure
from .pipeline import missing_packages

if TYPE_CHECKING:
    from tidegate.server.listening import Address


_broker_options = with_config(
    data=data_option,
    port=click.option(
        "--port", type=int, help="TCP port for MQTT (default: as configured, or 1883); 0 for a free one."
    ),
    host=click.option(
        "--host", help="Address to listen on (default: as configured, or 127.0.0.1); 0.0.0.0 for every interface."
    ),
    durability=click.option(
        "--durability",
        type=click.Choice(get_args(Durability)),
        help="Acknowledge publishers after fsync (default), after the write, or without files.",
    ),
    log_level=click.option(
        "--log-level", type=click.Choice(get_args(LogLevel)), help="The least severe events shown (default: info)."
    ),
    log_format=click.option(
        "--log-format", type=click.Choice(get_args(LogFormat)), help="Events as text (default), or as JSON lines."
    ),
)


@click.command("broker")
@_broker_options
@click.option("--ready-fd", type=int, hidden=True, help="Tell this descriptor where the broker listens.")
def broker(config: Config, ready_fd: int | None) -> None:
    """Run the broker alone, in the foreground.

    SIGTERM or Ctrl-C stops it cleanly: it flushes, tells its clients, and keeps their sessions. There is no
    authentication: on an address that others can reach, everybody may read and write everything.

    \b
    Exit codes:  0 it was stopped
                 1 it failed: another start may go well
                 2 it refused to start: the configuration, the address or the folder has to be mended

    \b
    Examples:
      tidegate broker --data /var/lib/tidegate --port 1883 --host 0.0.0.0
      tidegate broker --data /tmp/try --port 1884 --durability memory
    """
    from tidegate.server import app
    from tidegate.server.events import Events
    from tidegate.server.listening import through

    try:
        code = app.run(config, through(ready_fd) if ready_fd is not None else None)
    except (TidegateError, OSError) as error:
        failure = _failure(error, config)
        if config.log_format == "text":
            raise failure from error
        events = Events(config.log_level, config.log_format)
        events.report("broker.refused", {"error": failure.message, "hint": failure.hint})
        code = failure.exit_code
    sys.exit(code)


def _failure(error: TidegateError | OSError, config: Config) -> Failure:
    listening = listen_failure(error, config.listen.host, config.listen.port) if isinstance(error, OSError) else None
    return listening or failure_of(error)


@click.command("up")
@_broker_options
@click.pass_context
def up(context: click.Context, config: Config) -> None:
    """Start the broker, and beside it the Spark pipeline.

    It says where the broker listens and what to try first. Both are started again when they die, after pauses of 1 s
    to 60 s. A broker that cannot run as it is configured ends `up` with exit code 2. SIGTERM or Ctrl-C stops both
    cleanly.

    \b
    Examples:
      tidegate up
      tidegate up --port 1884 --data my-data
    """
    _probe(config)
    without = _no_pipeline(config)
    from tidegate.server.listening import in_words
    from tidegate.server.supervisor import Supervisor

    def welcome(address: Address) -> None:
        _welcome(config, address, without)

    tidegate = [sys.executable, "-m", "tidegate.cli"]
    flags = {
        each.opts[0]: context.params[each.name]
        for each in context.command.params
        if each.name is not None and context.params.get(each.name) is not None
    }
    broker_command = [*tidegate, "broker", *(f"{name}={value}" for name, value in flags.items())]
    file = [f"--config={flags['--config']}"] if "--config" in flags else []
    pipeline_command = [*tidegate, "pipeline", "run", *file, f"--data={config.data}"]
    kept = "memory" if config.log.durability == "memory" else str(config.data)
    supervisor = Supervisor(
        broker_command,
        pipeline_command if without is None else None,
        config.data,
        welcome=welcome,
        announce=in_words(kept),
    )
    sys.exit(supervisor.run())


def _no_pipeline(config: Config) -> str | None:
    """Why the broker runs alone; None if it does not."""
    if config.log.durability == "memory":
        return "none: it reads the log's files, and durability memory keeps none"
    if not config.pipeline.enabled:
        return "off (pipeline.enabled)"
    if missing := missing_packages():
        return f"none without {' and '.join(missing)}: pip install 'tidegate[pipeline]' brings it"
    return None


def _probe(config: Config) -> None:
    """Refuses at once when the address cannot be had; the broker itself would load its data first."""
    host, port = config.listen.host, config.listen.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            failure = listen_failure(error, host, port)
            if failure is not None:
                raise failure from error


def _welcome(config: Config, address: Address, no_pipeline: str | None) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    at = f" --port {address.port}" if address.port != Config().listen.port else ""
    kept = (
        "nothing is written (durability memory)"
        if config.log.durability == "memory"
        else str(config.data.resolve())
    )
    of = f" --data {config.data}" if config.data != Config().data else ""
    lines = [
        Text.assemble(("Listens on   ", "dim"), (f"mqtt://{address}", "bold")),
        Text.assemble(("Data folder  ", "dim"), kept),
        Text.assemble(("Pipeline     ", "dim"), no_pipeline or f"Spark on {config.spark['spark.master']}"),
        Text(""),
        Text("Try, in other terminals:", "dim"),
        Text(f"  tidegate sub{at} -t 'demo/#'"),
        Text(f"  tidegate pub{at} -t demo/hello -m 'hi'"),
        Text("and then go back in time:", "dim"),
        Text(f"  tidegate sub{at} -t 'demo/#' --from earliest -v"),
    ]
    if no_pipeline is None:
        lines += [
            Text("and, once the pipeline has archived them, ask Spark:", "dim"),
            Text(f'  tidegate sql{of} "select topic, count(*) from messages group by topic"'),
            Text(f"  tidegate pipeline status{of}"),
        ]
    lines += [Text(""), Text("Ctrl-C stops it; sessions and messages stay.", "dim")]
    console = Console()
    console.print(Panel(Group(*lines), title="Tidegate", title_align="left", expand=False, padding=(1, 2)))
    console.file.flush()
