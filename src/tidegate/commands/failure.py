"""The one way in which a command fails: a line that says what is wrong, a hint, and an exit code."""

from __future__ import annotations

import errno
import socket
from typing import IO, Any

import click

from tidegate.errors import ConfigError, FolderLocked, StorageError, TidegateError
from tidegate.exit_codes import FAILED, REFUSED

# Of the system's errors, those that may be gone at the next try.
SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EIO}
SHORTAGES |= {errno.EAGAIN, errno.EBUSY}


class Failure(click.ClickException):
    """What the user gave cannot work: configuration, port, folder."""

    exit_code = REFUSED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(click.style("error: ", fg="red", bold=True) + self.message, file=file, err=True)
        if self.hint:
            click.echo(click.style("hint: ", fg="cyan") + self.hint, file=file, err=True)


class Refusal(Failure):
    """The broker or the log said no, or something was short."""

    exit_code = FAILED


def failure_of(error: TidegateError | OSError) -> Failure:
    """An exception of the project or the system, in words."""
    if isinstance(error, ConfigError):
        return Failure(f"{error.path}: {error.message}", error.hint)
    if isinstance(error, FolderLocked):
        return Failure(str(error), "stop the other broker, or choose another folder with --data")
    if isinstance(error, StorageError) and isinstance(error.__cause__, OSError):
        kind = Refusal if error.__cause__.errno in SHORTAGES else Failure
        return kind(str(error), "choose another folder with --data, or mend this one")
    if isinstance(error, TidegateError):
        return Refusal(str(error))
    reason = error.strerror or str(error)
    kind = Refusal if error.errno in SHORTAGES else Failure
    return kind(f"{error.filename}: {reason}" if error.filename else reason)


def listen_failure(error: OSError, host: str, port: int) -> Failure | None:
    """Why a listener could not be opened, and the flag that changes it; None if it was something else."""
    if isinstance(error, socket.gaierror):
        kind = Refusal if error.errno == socket.EAI_AGAIN else Failure
        return kind(f"{host} has no address: {error.strerror}", "choose one with --host, e.g. --host 127.0.0.1")
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
