"""What every attack needs: a broker under attack, bystanders that must not notice, and an eye on `$SYS`.

A `Scene` has its own broker, so the counters start at nothing and every count is exact. When the scene ends it looks
at what all attacks have in common: the process lives, its log holds no trace of an unexpected error, and the
bystanders have exchanged messages all the time, in order and nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import BrokerProcess, RawClient
from tidegate.wire import Disconnect, Packet, Pingreq, Publish

PATIENCE_S = 60.0  # for what takes long on a busy machine; `tests/heart/test_bystanders_of_attacks.py` measures time

REFUSED = "$SYS/broker/refused/"
DROPPED = "$SYS/broker/dropped/"

MIB = 1 << 20


class Bystanders(threading.Thread):
    """A pair of clients of both versions that exchange messages while the attack goes on."""

    def __init__(self, port: int) -> None:
        super().__init__(name="bystanders", daemon=True)
        self._publisher = RawClient(port, 5, PATIENCE_S)
        self._publisher.connect("bystander-publisher", keep_alive=0)
        self._subscriber = RawClient(port, 4, PATIENCE_S)
        self._subscriber.connect("bystander-subscriber", keep_alive=0)
        self._subscriber.subscribe("bystanders/talk", qos=1)
        self._leave = threading.Event()
        self._failure: BaseException | None = None
        self.exchanged = 0

    def run(self) -> None:
        try:
            while not self._leave.wait(0.005):
                self._exchange()
            self._exchange()  # once more after the attack
        except BaseException as failure:
            self._failure = failure

    def _exchange(self) -> None:
        words = b"%d" % self.exchanged
        assert self._publisher.publish("bystanders/talk", words, 1) == 0
        heard = self._subscriber.message()
        assert (heard.topic, heard.payload, heard.dup) == (b"bystanders/talk", words, False)
        self.exchanged += 1

    def noticed_nothing(self) -> None:
        self._leave.set()
        self.join()
        for raw in (self._publisher, self._subscriber):
            raw.close()
        assert self._failure is None, f"a bystander noticed after {self.exchanged} exchanges: {self._failure!r}"


class Observer:
    """Reads `$SYS/broker/#` and keeps the latest value of each topic."""

    def __init__(self, port: int) -> None:
        self._client = RawClient(port, 4, PATIENCE_S)
        self._client.connect("observer", keep_alive=0)
        self._client.subscribe("$SYS/broker/#")
        self._values: dict[str, str] = {}

    def until(self, holds: Callable[[dict[str, str]], bool], what: str) -> dict[str, str]:
        """Wait until the values are as expected."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds(self._values):
            assert time.monotonic() < deadline_s, f"{what}: still {self._values}"
            news = self._client.expect(Publish)
            self._values[news.topic.decode()] = news.payload.decode()
        return self._values

    def afresh(self) -> None:
        """Wait for an update that began after this call, and was not on its way yet."""
        self._client.send(Pingreq())
        while isinstance(news := self._client.receive(), Publish):
            self._values[news.topic.decode()] = news.payload.decode()
        for _ in range(2):  # the first may have begun before; every update brings a new uptime
            self._values.pop("$SYS/broker/uptime", None)
            self.until(lambda values: "$SYS/broker/uptime" in values, "an update")

    def counts(self) -> dict[str, int]:
        return {k: int(v) for k, v in self._values.items() if k.startswith((REFUSED, DROPPED))}

    def close(self) -> None:
        self._client.close()


class Scene:
    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.bystanders = Bystanders(broker.port)
        self.observer = Observer(broker.port)
        self.bystanders.start()
        self._opened: list[RawClient] = []

    def open(self, client_id: str | None = None, version: int = 4, **connect: Any) -> RawClient:
        """A raw client; connected if it has a name."""
        raw = RawClient(self.broker.port, version, PATIENCE_S)
        self._opened.append(raw)
        if client_id is not None:
            raw.connect(client_id, **connect)
        return raw

    def counted(self, topic: str, times: int) -> None:
        """The event has been counted exactly so often."""
        self.observer.until(lambda values: int(values.get(topic, 0)) >= times, f"{topic} counted {times} times")
        assert self.observer.counts()[topic] == times

    def shows(self, topic: str, value: int) -> None:
        """`$SYS/broker/<topic>` comes to a value."""
        self.observer.afresh()
        self.observer.until(lambda values: values["$SYS/broker/" + topic] == str(value), f"{topic} is {value}")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.broker.pid}/fd"))  # noqa: PTH208

    def descriptors_back_to(self, before: int) -> None:
        """Nothing is left of the connections that came since. Sealed segments may be open for a while."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.descriptors() > before:
            assert time.monotonic() < deadline_s, f"there were {before} descriptors, now {self.open_files()}"
            time.sleep(0.02)

    def open_files(self) -> list[str]:
        folder = Path(f"/proc/{self.broker.pid}/fd")
        return sorted(str(path.readlink()) for path in folder.iterdir())

    def clients_back_to(self, connected: int, sessions: int) -> None:
        def back(values: dict[str, str]) -> bool:
            now = (values["$SYS/broker/clients/connected"], values["$SYS/broker/clients/total"])
            return now == (str(connected), str(sessions))

        self.observer.afresh()
        self.observer.until(back, f"{connected} clients connected, {sessions} sessions")

    def end(self) -> None:
        try:
            self.bystanders.noticed_nothing()
            assert self.broker.alive
            assert "Traceback" not in self.broker.log(), self.broker.log()[-3000:]
        finally:
            self.observer.close()
            for raw in self._opened:
                raw.close()


def closed_with(client: RawClient, reason: int) -> None:
    """The connection ends: a v5 client is told why, an older one is not told anything."""
    assert fate(client) == (reason if client.version == 5 else None)


def fate(client: RawClient) -> int | None:
    """The reason in the DISCONNECT that ends the connection; None when it is closed without a word."""
    said: list[Packet] = client.until_closed()
    if not said:
        return None
    assert len(said) == 1 and isinstance(said[0], Disconnect), said
    return said[0].reason


def ask_until_ignored(scene: Scene, client: RawClient, question: bytes) -> int:
    """Send the same packet until the broker reads no more: the number of bytes sent."""
    chunk = question * (max(1, 65536 // len(question)))
    client.socket.settimeout(0.2)
    sent = 0
    while REFUSED + "answers not read" not in scene.observer.counts():
        try:
            sent += client.socket.send(chunk[sent % len(question) :])
        except TimeoutError:
            scene.observer.afresh()
    return sent
