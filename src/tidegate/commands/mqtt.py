"""The connection that `pub`, `sub` and `trace` share: paho's client, driven by one thread, with refusals in words."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from tidegate.config import Config

from .config import with_config
from .failure import Failure, Refusal
from .text import safe

PROTOCOLS = {"3.1.1": MQTTProtocolVersion.MQTTv311, "5": MQTTProtocolVersion.MQTTv5}
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
WINDOW_DEFAULT = 65535  # [MQTT 5, 3.2.2.3.3] a server that names no Receive Maximum allows this many
NEVER_EXPIRES = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom to connect to, and as whom."""

    host: str
    port: int
    client_id: str
    user: str | None
    password: str | None
    protocol: str

    @property
    def is_v5(self) -> bool:
        return self.protocol == "5"


EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to listen on that are no addresses to connect to, and where such a broker is found from here."""

host_option = click.option("--host", help="The broker's address (default: as configured, or 127.0.0.1).")
port_option = click.option(
    "--port", type=click.IntRange(1, 65535), help="The broker's port (default: as configured, or 1883)."
)


def address_of(config: Config) -> tuple[str, int]:
    """Where a client finds the broker that this configuration is for."""
    if config.listen.port == 0:
        raise Failure("listen.port is 0: the broker has some free port", "name the one it told with --port")
    return EVERY_INTERFACE.get(config.listen.host, config.listen.host), config.listen.port


def connects(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options that say whom to connect to; what it gets is `peer`."""

    @wraps(command)
    def connected(
        config: Config, client_id: str, user: str | None, password: str | None, protocol: str, **given: Any
    ) -> Any:
        host, port = address_of(config)
        return command(peer=Peer(host, port, client_id, user, password, protocol), **given)

    decorated: Callable[..., Any] = connected
    for option in (
        click.option(
            "--protocol",
            type=click.Choice(list(PROTOCOLS)),
            default="5",
            show_default=True,
            help="The version of MQTT to speak.",
        ),
        click.option("-P", "--password", help="Password, for a broker that asks for one."),
        click.option("-u", "--user", metavar="NAME", help="User name, for a broker that asks for one."),
        click.option(
            "-i", "--id", "client_id", default="", metavar="ID", help="Client id (default: the broker gives one)."
        ),
    ):
        decorated = option(decorated)
    return with_config(host=host_option, port=port_option)(decorated)


def reason_text(code: ReasonCode, properties: Properties | None) -> str:
    """A reason code in words, with the broker's own explanation if it gave one."""
    words = str(code)
    explained = getattr(properties, "ReasonString", None)
    return f"{words} ({safe(explained)})" if explained else words


class Unreachable(Refusal):
    """There is no connection, or it did not last; another try may go well."""


# Refusals of a connection that the broker may take back; every other one would only be repeated.
PASSING_REFUSALS = {0x88, 0x89, 0x97, 0x9F}  # server unavailable, server busy, quota, connection rate

# Ends of a connection that are meant to last. Somebody else with our client id would be thrown out in turn.
LASTING_ENDS = {0x87, 0x8A, 0x8E, 0x98, 0x9C, 0x9D}  # not authorized, banned, taken over, administrative, moved


class Connection:
    """A connected client. Callbacks only note what happened; the command's own loop acts on it."""

    def __init__(self, peer: Peer, *, keep_session: bool = False, window: int | None = None) -> None:
        self.peer = peer
        self.window = WINDOW_DEFAULT
        self.session_present = False
        self._connack: tuple[ReasonCode, Properties | None] | None = None
        self._ended: str | None = None
        self._ended_for_good = False
        self.client = client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=peer.client_id,
            protocol=PROTOCOLS[peer.protocol],
            clean_session=None if peer.is_v5 else not keep_session,
        )
        client.max_inflight_messages = window or WINDOW_DEFAULT
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        if peer.user is not None or peer.password is not None:
            client.username_pw_set(peer.user or "", peer.password)
        self.keep_session = keep_session

    def open(self) -> None:
        """Connect, or connect again. Raises Unreachable and Refusal."""
        peer, client = self.peer, self.client
        self._connack = self._ended = None
        where = f"{peer.host}:{peer.port}"
        try:
            if peer.is_v5:
                properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
                properties.SessionExpiryInterval = NEVER_EXPIRES if self.keep_session else 0
                client.connect(
                    peer.host, peer.port, clean_start=not self.keep_session, properties=properties
                )
            else:
                client.connect(peer.host, peer.port)
        except ConnectionRefusedError as error:
            hint = "start a broker with: tidegate up; or name another with --host and --port"
            raise Unreachable(f"nothing listens on {where}", hint) from error
        except socket.gaierror as error:
            hint = "check --host, or listen.host in the configuration"
            raise Unreachable(f"{peer.host} has no address: {error.strerror}", hint) from error
        except OSError as error:
            hint = "check --host and --port, and the network between"
            raise Unreachable(f"cannot connect to {where}: {error.strerror or error}", hint) from error
        until = time.monotonic() + CONNECT_TIMEOUT_S
        while self._connack is None and time.monotonic() < until:
            if client.loop(timeout=0.2) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                break
        if self._connack is None:
            why = self._ended or "no answer to CONNECT"
            raise Unreachable(f"{where} did not accept the connection: {why}", "is it an MQTT broker?")
        code, answer = self._connack
        if code.is_failure:
            kind = Unreachable if code.value in PASSING_REFUSALS else Refusal
            raise kind(f"{where} refused the connection: {reason_text(code, answer)}")
        self.window = getattr(answer, "ReceiveMaximum", WINDOW_DEFAULT)

    def turn(self, timeout_s: float = 0.5) -> None:
        """Reads and writes what is due; raises when the connection is gone."""
        if self.client.loop(timeout=timeout_s) != MQTTErrorCode.MQTT_ERR_SUCCESS or self._ended is not None:
            kind = Refusal if self._ended_for_good else Unreachable
            raise kind(f"the connection was lost: {self._ended or 'closed by the broker'}")

    def close(self) -> None:
        """Says goodbye, and waits for the broker to hang up.

        paho closes its socket at once. If bytes were unread then, the kernel would reset the connection, and
        the broker might never see our last acknowledgements. So a second handle on it reads to the end.
        """
        connected = self.client.socket()
        if not isinstance(connected, socket.socket):
            return
        with connected.dup() as rest:
            rest.settimeout(CLOSE_TIMEOUT_S)
            until = time.monotonic() + CLOSE_TIMEOUT_S
            self.client.disconnect()
            while self.client.want_write() and time.monotonic() < until:
                if self.client.loop(timeout=0.1) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                    break
            try:
                rest.shutdown(socket.SHUT_WR)
                while time.monotonic() < until and rest.recv(65536):
                    pass
            except OSError:
                pass  # it hung up first, or never will

    def _on_connect(self, _c: Any, _u: Any, flags: Any, code: ReasonCode, properties: Properties | None) -> None:
        self._connack = (code, properties)
        self.session_present = flags.session_present

    def _on_disconnect(
        self, _c: Any, _u: Any, flags: Any, code: ReasonCode, properties: Properties | None
    ) -> None:
        told = flags.is_disconnect_packet_from_server
        self._ended = reason_text(code, properties) if told else "closed without a reason"
        self._ended_for_good = told and code.value in LASTING_ENDS
