"""Where the broker listens, and how whoever started it is told: in a line of text, or through a pipe.

The word comes when the data folder is locked and loaded and the address is bound; not before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Only programs on this machine reach it."""
        return ip_address(self.host).is_loopback


Announce = Callable[[Address], None]


def in_words(where: str) -> Announce:
    """For people, on standard output. `where` is where the data is kept."""
    return lambda address: print(f"tidegate: listening on {address}, data in {where}", flush=True)


def through(pipe: int) -> Announce:
    """For the process at the other end, once."""

    def announce(address: Address) -> None:
        os.write(pipe, json.dumps([address.host, address.port]).encode() + b"\n")
        os.close(pipe)

    return announce


def announced(content: bytes) -> Address | None:
    """What came through the pipe; None if it ended before the word."""
    if not content.endswith(b"\n"):
        return None
    host, port = json.loads(content)
    return Address(host, port)
