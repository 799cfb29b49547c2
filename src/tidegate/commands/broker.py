"""`tidegate broker` and `tidegate up`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from tidegate.config import Config, Durability, LogLevel
from tidegate.config_sources import Value

from .config import config_file, configured, data_option
from .failure import listen_failure
from .pipeline import missing_packages


def _broker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--log-level", type=click.Choice(get_args(LogLevel)), help="The least severe events shown."
        ),
        config_file,
        click.option(
            "--durability",
            type=click.Choice(get_args(Durability)),
            help="Acknowledge publishers after fsync (default), after the write, or without files.",
        ),
        click.option("--host", help="Address to listen on (default 127.0.0.1)."),
        click.option("--port", type=int, help="TCP port for MQTT (default 1883)."),
        data_option,
    ):
        command = option(command)
    return command


def _run(config: Config) -> None:
    from tidegate.server import app

    try:
        sys.exit(app.run(config))
    except OSError as error:
        failure = listen_failure(error, config.listen.host, config.listen.port)
        if failure is None:
            raise
        raise failure from error


@click.command("broker")
@_broker_options
def broker(file: Path | None, **given: Value | None) -> None:
    """Run the broker alone, in the foreground.

    SIGTERM or Ctrl-C stops it cleanly: it flushes, tells its clients, and keeps their sessions.

    \b
    Examples:
      tidegate broker --data /var/lib/tidegate --port 1883 --host 0.0.0.0
      tidegate broker --data /tmp/try --port 1884 --durability memory
    """
    _run(configured(file, **given))


@click.command("up")
@_broker_options
def up(file: Path | None, **given: Value | None) -> None:
    """Start Tidegate and say what to try first: the broker, and beside it the Spark pipeline.

    \b
    Examples:
      tidegate up
      tidegate up --port 1884 --data my-data
    """
    config = configured(file, **given)
    _probe(config)
    without = _no_pipeline(config)
    _welcome(config, without)
    if without is not None:
        _run(config)
        return
    from tidegate.server.supervisor import Supervisor

    tidegate = [sys.executable, "-m", "tidegate.cli"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    both = [f"--config={file}"] if file is not None else []
    broker_command = [*tidegate, "broker", *both, *flags]
    pipeline_command = [*tidegate, "pipeline", "run", *both, f"--data={config.data}"]
    sys.exit(Supervisor(broker_command, pipeline_command, config.data).run())


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
    """Refuses before the welcome, not after it, when the address cannot be had."""
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


def _welcome(config: Config, no_pipeline: str | None) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    port = config.listen.port
    at = f" --port {port}" if port not in (0, 1883) else " --port PORT" if port == 0 else ""
    place = (
        f"mqtt://{config.listen.host}:{port}" if port else f"{config.listen.host}, on a free port named below"
    )
    kept = (
        "nothing is written (durability memory)"
        if config.log.durability == "memory"
        else str(config.data.resolve())
    )
    of = f" --data {config.data}" if config.data != Config().data else ""
    lines = [
        Text.assemble(("Listens on   ", "dim"), (place, "bold")),
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
