"""Every exception of the project, in one tree.

    TidegateError
    ├── PeerError            the other side broke a rule; carries the MQTT reason code to answer with
    │   ├── MalformedPacket  bytes that are not the packet they claim to be (0x81)
    │   ├── ProtocolViolation  well-formed, but not allowed here (0x82 unless said otherwise)
    │   └── Refused          allowed by the standard, declined by this broker (quota, rights, size …)
    ├── ClientError          a broker did not do what a client of ours asked
    │   ├── BrokerUnreachable  no connection, or none that lasts; retriable
    │   └── BrokerRefused    it said no to the connection; carries its reason code
    │       └── PublishRefused  … to one message; says which
    ├── ConfigError          a wrong key or value, with its path and what would be right
    └── StorageError         the log could not do what was asked
        ├── DiskFull         no room; retriable
        ├── CorruptLog       bytes on disk that fail their checksum or cannot be what they claim
        └── FolderLocked     another process owns the data folder

A `PeerError` is never a bug of ours; everything else that escapes is.
"""

from __future__ import annotations


class TidegateError(Exception):
    """Root of the tree."""

    retriable = False


class PeerError(TidegateError):
    """The peer's fault. `reason` is the MQTT 5 reason code that tells it so."""

    reason = 0x80

    def __init__(self, message: str, reason: int | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class MalformedPacket(PeerError):
    reason = 0x81


class ProtocolViolation(PeerError):
    reason = 0x82


class Refused(PeerError):
    reason = 0x83


class ClientError(TidegateError):
    pass


class BrokerUnreachable(ClientError):
    retriable = True


class BrokerRefused(ClientError):
    def __init__(self, message: str, reason: int) -> None:
        super().__init__(message)
        self.reason = reason


class PublishRefused(BrokerRefused):
    """`number` counts the messages that the client was given, from 0."""

    def __init__(self, message: str, reason: int, number: int, topic: bytes) -> None:
        super().__init__(message, reason)
        self.number, self.topic = number, topic


class ConfigError(TidegateError):
    """`path` names the setting (``log.segment_bytes``); `hint` says what would be right."""

    def __init__(self, path: str, message: str, hint: str = "") -> None:
        self.path, self.message, self.hint = path, message, hint
        super().__init__(f"{path}: {message}" + (f" ({hint})" if hint else ""))


class StorageError(TidegateError):
    pass


class DiskFull(StorageError):
    retriable = True


class CorruptLog(StorageError):
    pass


class FolderLocked(StorageError):
    pass
