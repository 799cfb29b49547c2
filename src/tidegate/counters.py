"""What the broker counts. Plain integers, added to once per batch; read by `$SYS` and later by metrics."""

from __future__ import annotations

from collections import Counter


class Counters:
    __slots__ = (
        "bytes_received",
        "bytes_sent",
        "clients_expired",
        "clients_max",
        "connects",
        "dropped",
        "messages_received",
        "messages_sent",
        "messages_stored",
        "notices",
        "publish_bytes_received",
        "publish_bytes_sent",
        "publishes_received",
        "publishes_sent",
        "refused",
        "takeovers",
        "wills_sent",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)
        self.dropped: Counter[str] = Counter()  # messages, by why they were not delivered
        self.refused: Counter[str] = Counter()  # connections, packets and requests, by why
        self.bytes_received: int = 0
        self.bytes_sent: int = 0
        self.messages_received: int = 0  # MQTT packets of any type
        self.messages_sent: int = 0
        self.publishes_received: int = 0
        self.publishes_sent: int = 0
        self.publish_bytes_received: int = 0
        self.publish_bytes_sent: int = 0
        self.messages_stored: int = 0
        self.connects: int = 0
        self.clients_max: int = 0
        self.clients_expired: int = 0
        self.takeovers: int = 0
        self.wills_sent: int = 0
        self.notices: int = 0
