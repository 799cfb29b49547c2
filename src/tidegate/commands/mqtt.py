"""The connection that `pub` and `sub` share: paho's client, driven by one thread, with refusals in words."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from .failure import Refusal
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


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--protocol", type=click.Choice(list(PROTOCOLS)), default="5", show_default=True),
        click.option("-P", "--password", help="Password."),
        click.option("-u", "--user", help="User name."),
        click.option(
            "-i", "--id", "client_id", default="", help="Client id (default: the broker gives one)."
        ),
        click.option("--port", type=click.IntRange(1, 65535), default=1883, show_default=True),
        click.option("--host", default="127.0.0.1", show_default=True),
    ):
        command = option(command)
    return command


def reason_text(code: ReasonCode, properties: Properties | None) -> str:
    """A reason code in words, with the broker's own explanation if it gave one."""
    words = str(code)
    explained = getattr(properties, "ReasonString", None)
    return f"{words} ({safe(explained)})" if explained else words


class Connection:
    """A connected client. Callbacks only note what happened; the command's own loop acts on it."""

    def __init__(self, peer: Peer, *, keep_session: bool = False, window: int | None = None) -> None:
        self.peer = peer
        self.window = WINDOW_DEFAULT
        self._connack: tuple[ReasonCode, Properties | None] | None = None
        self._ended: str | None = None
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
        self._keep_session = keep_session

    def open(self) -> None:
        peer, client = self.peer, self.client
        where = f"{peer.host}:{peer.port}"
        try:
            if peer.is_v5:
                properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
                properties.SessionExpiryInterval = NEVER_EXPIRES if self._keep_session else 0
                client.connect(
                    peer.host, peer.port, clean_start=not self._keep_session, properties=properties
                )
            else:
                client.connect(peer.host, peer.port)
        except ConnectionRefusedError as error:
            raise Refusal(
                f"nothing listens on {where}",
                "start a broker with: tidegate up",
            ) from error
        except socket.gaierror as error:
            raise Refusal(f"{peer.host} has no address: {error.strerror}") from error
        except OSError as error:
            raise Refusal(f"cannot connect to {where}: {error.strerror or error}") from error
        until = time.monotonic() + CONNECT_TIMEOUT_S
        while self._connack is None and time.monotonic() < until:
            if client.loop(timeout=0.2) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                break
        if self._connack is None:
            why = self._ended or "no answer to CONNECT"
            raise Refusal(f"{where} did not accept the connection: {why}", "is it an MQTT broker?")
        code, answer = self._connack
        if code.is_failure:
            raise Refusal(f"{where} refused the connection: {reason_text(code, answer)}")
        self.window = getattr(answer, "ReceiveMaximum", WINDOW_DEFAULT)

    def turn(self, timeout_s: float = 0.5) -> None:
        """Reads and writes what is due; raises when the connection is gone."""
        if self.client.loop(timeout=timeout_s) != MQTTErrorCode.MQTT_ERR_SUCCESS or self._ended is not None:
            raise Refusal(f"the connection was lost: {self._ended or 'closed by the broker'}")

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

    def _on_connect(self, _c: Any, _u: Any, _f: Any, code: ReasonCode, properties: Properties | None) -> None:
        self._connack = (code, properties)

    def _on_disconnect(
        self, _c: Any, _u: Any, flags: Any, code: ReasonCode, properties: Properties | None
    ) -> None:
        told = flags.is_disconnect_packet_from_server
        self._ended = reason_text(code, properties) if told else "closed without a reason"
