"""The archive port on two things that the pipeline leaves in the data folder: a note to the broker, and the lake.

    <data>/pipeline/to-broker.json    replaced as a whole whenever there is news:
        version             1
        archived_segment    sequence number of the first segment that is not yet in the lake as a whole, durably
        archived_position   all messages below it are there
        lake                the lake's folder; its table `messages` is read
        lost                what was there and is gone, for its file was damaged: first and last position, messages
        verdicts            the newest of what the pipeline found out about clients, each with
                            id, rule, client, time and whatever else it has to say

The note is looked at once a second on a thread of asyncio's. The lake is read on a thread of its own, so that neither
the loop nor reads from the hot log ever wait for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tidegate.adapters.embedded.asking_again import Report
from tidegate.adapters.embedded.lake import Lake, Listing, Lost, NoPackages
from tidegate.adapters.embedded.worker import Worker
from tidegate.errors import StorageError
from tidegate.limits import ARCHIVE_NOTE_BYTES_MAX, LOST_MAX, VERDICTS_MAX
from tidegate.log.index import Wanted
from tidegate.log.reading import Read
from tidegate.ports.archive import NOTHING, Archived, Verdict

LISTING_AGE_S = 60.0
"""How long the lake's lowest position may be out of date; nothing else waits for it."""
RETRY_S = 1.0
"""A read that failed for a reason that may pass is tried again after this."""
CLOSE_S = 5.0
"""How long a stop waits for the read that is under way."""

PASSING = (OSError, StorageError, MemoryError)
"""What may be different at the next attempt."""

Signature = tuple[int, int, int]


class Note(NamedTuple):
    """`to-broker.json`."""

    segment: int
    position: int
    lake: Path | None
    lost: tuple[Lost, ...]
    verdicts: tuple[Verdict, ...]


NOT_UNDERSTOOD = Note(0, 0, None, (), ())
"""There is a pipeline, and nobody knows how far it is: nothing counts as archived."""


class LakeArchive:
    """`log_end` tells where the log ends: a note that speaks of more belongs to another log."""

    def __init__(
        self, data: Path, log_end: Callable[[], int], *, loop: asyncio.AbstractEventLoop, report: Report
    ) -> None:
        self.messages_read = 0
        self._data = data
        self._log_end = log_end
        self._path = data / "pipeline" / "to-broker.json"
        self._loop = loop
        self._report = report
        self._signature: Signature | None = None  # of the file as last read
        self._note: Note | None = None
        self._lake: Lake | None = None
        self._listing: Listing | None = None  # None: the lake has not been read, or cannot be
        self._missing = False  # what reads the lake is not installed
        self._waiting: list[Callable[[], None]] = []  # until the lake can be read
        self._listed_s = 0.0
        self._looking = self._refreshing = False
        self._said: dict[str, str] = {}  # event → the last thing reported of it
        self._worker = Worker("tidegate-lake")

    @property
    def archived(self) -> Archived | None:
        note, listing = self._note, self._listing
        if note is None:
            return None
        if listing is None or self._unknown:
            return Archived(note.segment, note.position, NOTHING if self._missing else 0, False, note.verdicts)
        return Archived(note.segment, note.position, listing.floor, True, note.verdicts)

    @property
    def _unknown(self) -> bool:
        """Whether the lake has not been read, cannot be at the moment, or has only now begun to fill."""
        if self._note is None or self._missing:
            return False
        return self._listing is None or self._listing.outgrown(self._note.position)

    @property
    def damaged(self) -> int:
        return sum(self._lake.lost.copy().values()) if self._lake is not None else 0

    # ── the note ──

    def open(self) -> None:
        """Look for the first time, before anybody is served."""
        self._signature, note = self._look()
        self._take(note)
        lake = self._lake
        if lake is not None and note is not None:
            self._refreshed(lake, _refresh(lake, note.position))

    def poll(self) -> None:
        """Look for news; called about once a second."""
        if not self._looking:
            self._looking = True
            # What nobody foresaw is raised again, on the loop.
            self._loop.run_in_executor(None, self._poll).add_done_callback(lambda polled: polled.result())

    def _poll(self) -> None:
        self._call(self._looked, *self._look())

    def _looked(self, signature: Signature | None, note: Note | None) -> None:
        self._looking = False
        self._signature = signature
        if note is not self._note:
            self._take(note)
        if note is None or self._lake is None or self._refreshing:
            return
        aged = self._loop.time() - self._listed_s > LISTING_AGE_S
        if aged or self._missing or self._unknown:
            lake, position = self._lake, note.position
            self._refreshing = True
            self._worker.do(lambda: self._call(self._refreshed, lake, _refresh(lake, position)))

    def _look(self) -> tuple[Signature | None, Note | None]:
        """What the file says; what it said before if it cannot be understood."""
        try:
            found = self._path.stat()
            signature = found.st_mtime_ns, found.st_ino, found.st_size
            if signature == self._signature:
                return signature, self._note
            with self._path.open("rb") as file:
                content = file.read(ARCHIVE_NOTE_BYTES_MAX + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except OSError as error:
            self._call(self._tell, "archive.unreadable", str(error))
            return self._signature, self._note or NOT_UNDERSTOOD
        try:
            note = _parse(content, self._data)
            if note.position > self._log_end():
                raise ValueError(f"archived_position is {note.position}, which this log has not reached")
            return signature, note
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            self._call(self._report, "archive.malformed", {"file": self._path, "why": why})
            return signature, self._note or NOT_UNDERSTOOD

    def _take(self, note: Note | None) -> None:
        self._note = note
        folder = note.lake / "messages" if note is not None and note.lake is not None else None
        if folder != (self._lake.folder if self._lake is not None else None):
            self._lake = Lake(folder, self._lake_reports) if folder is not None else None
            self._listing = None
            self._missing = False
        if self._lake is not None and note is not None and self._lake.gone != note.lost:
            self._lake.gone = note.lost
            self._listed_s = -LISTING_AGE_S  # to be listed again, with the gaps
        self._release()

    def _refreshed(self, lake: Lake, failure: Exception | None) -> None:
        self._refreshing = False
        if lake is not self._lake:
            return
        self._missing = isinstance(failure, NoPackages)
        if failure is None:
            self._listing = lake.listing
            self._listed_s = self._loop.time()
            self._said.pop("lake.unreadable", None)
        elif self._note is not None and self._note.position:  # else there may be no table yet
            self._tell("lake.unreadable", str(failure))
        self._release()

    def _release(self) -> None:
        """Those who waited for the lake ask again, once there is an answer."""
        if not self._unknown:
            waiting, self._waiting = self._waiting, []
            for ask in waiting:
                ask()

    # ── the lake ──

    def read(
        self, position: int, end: int, bytes_max: int, wanted: Wanted | None, done: Callable[[Read], None]
    ) -> None:
        lake, note = self._lake, self._note
        nothing = Read([], position, 0)
        if self._unknown:
            self._waiting.append(lambda: done(nothing))
            return
        if lake is None or note is None:
            self._loop.call_soon(done, nothing)  # it was there a moment ago: the caller compares again
            return

        def work() -> None:
            try:
                found = lake.read(position, end, bytes_max, wanted, note.position)
            except PASSING as error:
                # Not the content's fault, so it is not given up: the reader stays where it is.
                self._call(self._later, error, lambda: done(nothing))
            else:
                self._call(self._found, lake, lake.listing, found, done)

        self._worker.do(work)

    def _found(self, lake: Lake, listing: Listing, found: Read, done: Callable[[Read], None]) -> None:
        if lake is self._lake:
            self._listing = listing
        self.messages_read += sum([run.count for run in found.runs])
        done(found)

    def before(self, time_ms: int) -> int | None:
        listing, note = self._listing, self._note
        if self._unknown:
            return 0
        if listing is None or note is None:
            return None
        file = next(listing.since(time_ms), None)
        if file is not None:
            return file.first
        return listing.end if listing.archived < note.position else None

    def seek(self, time_ms: int, done: Callable[[int | None], None]) -> None:
        lake, note = self._lake, self._note
        if self._unknown:
            self._waiting.append(lambda: self.seek(time_ms, done))
            return
        if lake is None or note is None or self._missing:
            self._loop.call_soon(done, None)
            return

        def work() -> None:
            try:
                found = lake.position_at_time(time_ms, note.position)
            except PASSING as error:
                self._call(self._later, error, lambda: self.seek(time_ms, done))
            else:
                self._call(done, found)

        self._worker.do(work)

    def _later(self, error: Exception, ask: Callable[[], None]) -> None:
        self._tell("lake.unreadable", str(error))
        self._loop.call_later(RETRY_S, ask)

    # ── the rest ──

    def close(self) -> None:
        self._worker.abandon(CLOSE_S)

    def _tell(self, event: str, why: str) -> None:
        """Report what is wrong, once for as long as it stays the same."""
        if self._said.get(event) != why:
            self._said[event] = why
            self._report(event, {"why": why})

    def _lake_reports(self, event: str, fields: Mapping[str, object]) -> None:
        self._call(self._report, event, fields)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more


def _refresh(lake: Lake, archived: int) -> Exception | None:
    """Read the table's log; why that was not possible, if it was not."""
    try:
        lake.refresh(archived)
    except PASSING as error:
        return error
    return None


def _parse(content: bytes, data: Path) -> Note:
    """Raises ValueError, TypeError or KeyError for what is not such a note."""
    if len(content) > ARCHIVE_NOTE_BYTES_MAX:
        raise ValueError(f"it is larger than {ARCHIVE_NOTE_BYTES_MAX} bytes")
    said = json.loads(content)
    if said["version"] != 1:
        raise ValueError(f"its version is {said['version']!r}; this broker knows 1")
    segment, position = _count(said, "archived_segment"), _count(said, "archived_position")
    verdicts = sorted(said["verdicts"], key=lambda verdict: _text(verdict, "time"))[-VERDICTS_MAX:]
    lost = tuple(Lost(*(_count(each, name) for name in Lost._fields)) for each in said.get("lost", [])[-LOST_MAX:])
    return Note(segment, position, data / _text(said, "lake"), lost, tuple(map(_verdict, verdicts)))


def _verdict(said: dict[str, Any]) -> Verdict:
    told = json.dumps(said, ensure_ascii=False).encode("utf-8", "replace")
    return Verdict(_text(said, "id"), _text(said, "rule"), _text(said, "client"), told)


def _count(said: dict[str, Any], name: str) -> int:
    value = said[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number that counts")
    return value


def _text(said: dict[str, Any], name: str) -> str:
    value = said[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not text")
    return value
