"""A broker that does what a test tells it to: for answers that a real one gives once in a blue moon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType

from tidegate.wire import Connack, Connect, Packet, PacketStream, Properties, Publish, decode, encode

Script = Callable[["Dialogue"], None]


class Dialogue:
    """One connection, seen from the broker's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = PacketStream(1 << 28)
        self._waiting: list[Packet] = []

    def receive(self) -> Packet | None:
        """The next packet; None at the end of the connection."""
        while not self._waiting:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._waiting += [decode(first, body, 5) for first, body in self._stream.feed(data)]
        return self._waiting.pop(0)

    def publishes(self, count: int) -> list[Publish]:
        found = [self.receive() for _ in range(count)]
        assert all(isinstance(packet, Publish) for packet in found), found
        return found  # type: ignore[return-value]

    def more_has_come(self, within_s: float = 0.2) -> bool:
        if self._waiting:
            return True
        self._connection.settimeout(within_s)
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self._connection.settimeout(None)

    def send(self, *packets: Packet) -> None:
        self._connection.sendall(b"".join(encode(packet, 5) for packet in packets))

    def send_bytes(self, data: bytes) -> None:
        self._connection.sendall(data)

    def accept(self, reason: int = 0, **properties: int) -> None:
        """Answer the CONNECT."""
        assert isinstance(self.receive(), Connect)
        self.send(Connack(False, reason, Properties(**properties)))  # type: ignore[arg-type]

    def read_to_the_end(self) -> None:
        while self.receive() is not None:
            pass


class ScriptedBroker:
    """Plays one script per connection, then accepts no more. Raises at the end what a script raised."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._play, daemon=True)

    def _play(self) -> None:
        try:
            for script in self._scripts:
                connection, _ = self._listener.accept()
                with connection:
                    script(Dialogue(connection))
        except BaseException as error:
            self._failure = error
        finally:
            self._listener.close()

    def __enter__(self) -> ScriptedBroker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(20)
        if self._failure is not None:
            raise self._failure
        assert not self._thread.is_alive(), "the script did not come to its end"
