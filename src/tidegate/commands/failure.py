"""The one way in which a command fails: a line that says what is wrong, a hint, and an exit code."""

from __future__ import annotations

import errno
from typing import IO, Any

import click

from tidegate.errors import ConfigError, FolderLocked, TidegateError


class Failure(click.ClickException):
    """What the user gave cannot work: configuration, port, folder."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(click.style("error: ", fg="red", bold=True) + self.message, file=file, err=True)
        if self.hint:
            click.echo(click.style("hint: ", fg="cyan") + self.hint, file=file, err=True)


class Refusal(Failure):
    """The broker or the log said no."""

    exit_code = 1


def failure_of(error: TidegateError | OSError) -> Failure:
    """An exception of the project or the system, in words."""
    if isinstance(error, ConfigError):
        return Failure(f"{error.path}: {error.message}", error.hint)
    if isinstance(error, FolderLocked):
        return Failure(str(error), "stop the other broker, or choose another folder with --data")
    if isinstance(error, TidegateError):
        return Refusal(str(error))
    reason = error.strerror or str(error)
    return Failure(f"{error.filename}: {reason}" if error.filename else reason)


def listen_failure(error: OSError, host: str, port: int) -> Failure | None:
    """Why a listener could not be opened, and the flag that changes it; None if it was something else."""
    if error.errno == errno.EADDRINUSE:
        return Failure(
            f"port {port} on {host} is in use", "choose another with --port, or stop what listens there"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return Failure(
            f"{host} is not an address of this machine", "choose one with --host, e.g. --host 0.0.0.0"
        )
    if error.errno in (errno.EACCES, errno.EPERM) and 0 < port < 1024 and not error.filename:
        return Failure(f"port {port} needs privileges", "choose one above 1023 with --port")
    return None
