"""A broker whose disk is watched: what it synced and when, with a hand on the brake; and the data folder as it would be
after a loss of power at any of its moments. `inside/disk_recorder.py` does the watching, within the process.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import BrokerProcess

INSIDE = Path(__file__).parent / "inside"
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Event:
    """One operation on the disk. For a sync, `time_s` is when it returned, and `content` or `names` is what it covers:
    what was there when it began."""

    operation: str
    time_s: float
    path: Path
    began_s: float = 0.0
    inode: int = 0
    content: bytes | None = None
    names: dict[str, tuple[int, bool]] | None = None  # name → (inode, whether it is a folder)
    at: int = 0
    bytes: int = 0
    number: int = 0  # of a sync that begins
    target: Path | None = None


def events(folder: Path) -> list[Event]:
    """Everything that all processes have recorded so far, by time."""
    found: list[Event] = []
    for journal in folder.glob("*.journal"):
        blobs = journal.with_suffix(".blobs").read_bytes()
        known: dict[int, bytes] = {}
        whole = [line for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        found += [_event(json.loads(line), blobs, known) for line in whole]
    return sorted(found, key=lambda event: event.time_s)


def _event(line: dict[str, Any], blobs: bytes, known: dict[int, bytes]) -> Event:
    content = None
    if "blob" in line:
        start, size = line["blob"]
        content = blobs[start : start + size]
    if line["operation"] == "sync" and content is not None:
        content = known.get(line["inode"], b"")[: line["after"]] + content
        known[line["inode"]] = content
    names = {name: (inode, is_folder) for name, (inode, is_folder) in line.get("names", {}).items()}
    return Event(
        line["operation"],
        line["time"],
        Path(line["path"]),
        line.get("began", 0.0),
        line.get("inode", 0),
        content,
        names if "names" in line else None,
        line.get("at", 0),
        line.get("bytes", 0),
        line.get("number", 0),
        Path(line["target"]) if "target" in line else None,
    )


def with_inside() -> str:
    """A PYTHONPATH with which a process takes in what is in `inside`."""
    return os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])


class Recorder:
    """The folder of a recording, and the brake. Everything below `under` is watched."""

    def __init__(self, folder: Path, under: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.under = folder, under
        self._blocked_s = 0.0
        self._passed: set[int] = set()

    def environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": with_inside(),
            "RECORD_TO": str(self.folder.resolve()),
            "RECORD_UNDER": str(self.under.resolve()),
        }

    def events(self, operation: str = "", since_s: float = 0.0) -> list[Event]:
        found = (event for event in events(self.folder) if event.time_s >= since_s)
        return [event for event in found if not operation or event.operation == operation]

    def take_at_least(self, seconds: float) -> None:
        """From now on each sync takes so long."""
        (self.folder / "delay").write_text(str(seconds))

    @contextmanager
    def blocked(self) -> Iterator[Callable[[], None]]:
        """No sync that begins returns until the end. Yields what waits until there is one that begins."""
        self._blocked_s = time.monotonic()
        (self.folder / "block").touch()

        def waits() -> None:
            self.until(self.waiting, "no sync was begun")

        try:
            yield waits
        finally:
            (self.folder / "block").unlink()

    def waiting(self) -> list[Event]:
        """The syncs that are blocked, by their begin."""
        begun = self.events("sync begins", self._blocked_s)
        return [event for event in begun if event.number not in self._passed]

    def let_pass(self, sync: Event) -> None:
        """One of the syncs that are blocked; returns when it goes on."""
        passed = self.folder / f"pass-{sync.number}"
        passed.touch()
        self.until(lambda: not passed.exists(), "the sync does not wait")
        self._passed.add(sync.number)

    def until(self, look: Callable[[], object], otherwise: str, patience_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + patience_s
        while not look():
            assert time.monotonic() < deadline_s, otherwise
            time.sleep(0.01)


class RecordedBroker(BrokerProcess):
    """The real command, recorded. Without a durability it is not told of any."""

    def __init__(self, data: Path, durability: str = "", **settings: Any) -> None:
        super().__init__(data, durability, **settings)
        self.disk = Recorder(data.with_name(data.name + "-recorded"), data.parent)

    def arguments(self) -> list[str]:
        told = ["--durability", self.durability] if self.durability else []
        return ["--data", str(self.data), "--port", str(self.port), *told]

    def environment(self) -> dict[str, str]:
        return super().environment() | self.disk.environment()


# ── after a loss of power ──


@dataclass(slots=True)
class Disk:
    """A folder and what is below it, as far as it is on the disk for good, and what a kind kernel may have written
    beyond that."""

    root: Path
    contents: dict[int, bytes] = field(default_factory=dict)  # synced, by inode
    names: dict[Path, dict[str, int]] = field(default_factory=dict)  # synced: folder → name → inode
    newest: dict[int, bytearray] = field(default_factory=dict)  # in the page cache
    newest_names: dict[Path, dict[str, int]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if not event.path.is_relative_to(self.root):
            return
        match event.operation:
            case "sync" if event.names is not None:
                files = {name: inode for name, (inode, is_folder) in event.names.items() if not is_folder}
                self.names[event.path] = files
                self.newest_names.setdefault(event.path, {}).update(files)
            case "sync":
                assert event.content is not None
                self.contents[event.inode] = event.content
                if len(self.newest.get(event.inode, b"")) < len(event.content):
                    self.newest[event.inode] = bytearray(event.content)
            case "write":
                assert event.content is not None
                held = self.newest.setdefault(event.inode, bytearray())
                if len(held) < event.at:
                    held.extend(bytes(event.at - len(held)))
                held[event.at : event.at + len(event.content)] = event.content
            case "truncate":
                del self.newest.setdefault(event.inode, bytearray())[event.bytes :]
            case "rename":
                assert event.target is not None
                self.newest_names.setdefault(event.path.parent, {}).pop(event.path.name, None)
                self.newest_names.setdefault(event.target.parent, {})[event.target.name] = event.inode
            case "unlink":
                self.newest_names.setdefault(event.path.parent, {}).pop(event.path.name, None)

    def forget_removed(self) -> None:
        """The kernel was quick with names that were removed, and with nothing else."""
        for folder, safe in self.names.items():
            newest = self.newest_names.get(folder, {})
            self.names[folder] = {name: inode for name, inode in safe.items() if name in newest}

    def write(self, target: Path, kind: random.Random | None = None) -> None:
        """Make the folder as it would be found after a loss of power now: with nothing but what was synced; or, given
        a source of chance, with any part of the rest."""
        target.mkdir(parents=True, exist_ok=True)
        for folder in sorted({*self.names, *self.newest_names}):
            place = target / folder.relative_to(self.root)
            place.mkdir(parents=True, exist_ok=True)
            for name, inode in self._names_of(folder, kind).items():
                (place / name).write_bytes(self._content_of(inode, kind))

    def _names_of(self, folder: Path, kind: random.Random | None) -> dict[str, int]:
        safe, newest = self.names.get(folder, {}), self.newest_names.get(folder, {})
        if kind is None:
            return safe
        found: dict[str, int] = {}
        for name in sorted({*safe, *newest}):
            inode = kind.choice((safe, newest)).get(name)
            if inode is not None:
                found[name] = inode
        return found

    def _content_of(self, inode: int, kind: random.Random | None) -> bytes:
        safe, newest = self.contents.get(inode, b""), bytes(self.newest.get(inode, b""))
        if kind is None or len(newest) <= len(safe):
            return safe
        kept = kind.randint(len(safe), len(newest))
        zeros = kind.choice((0, 0, kind.randint(0, len(newest) - kept)))  # blocks that were allotted, but not written
        return newest[:kept] + bytes(zeros)
