"""The log on disk and in memory: what was appended is read, through filters, rolls, gaps and restarts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_strategies import TOPICS, Message, kept, messages, simple_run, tick, ticks

from tidegate.errors import FolderLocked
from tidegate.limits import SEARCH_WORK_MAX
from tidegate.log.files import SegmentedLog
from tidegate.log.files import segmented as segmented_module
from tidegate.log.index import Wanted
from tidegate.log.memory import MemoryLog
from tidegate.log.reading import Unfinished
from tidegate.log.recovery import POSITION_GAP
from tidegate.log.run import Run
from tidegate.log.segment import SEGMENT_HEADER_BYTES, index_name, segment_name

AnyLog = SegmentedLog | MemoryLog


def add(log: AnyLog, runs: list[Run], records: list[bytes] | None = None, time_ms: int = 1) -> list[Message]:
    log.append(*tick(runs, records or [], log.end, time_ms))
    return messages(runs)


def add_many(log: AnyLog, count: int, topic: Callable[[int], bytes] = lambda i: b"t") -> list[Message]:
    rows = []
    for i in range(count):
        rows += add(log, [simple_run(topic(i), b"%d" % i)], time_ms=i)
    return rows


def read_all(
    log: AnyLog, wanted: Wanted | None = None, start: int = 0, end: int | None = None, bytes_max: int = 1
) -> tuple[list[Message], int]:
    """Rows and lost messages, read in small steps."""
    rows: list[Message] = []
    lost = 0
    end = log.end if end is None else end
    while start < min(end, log.end):
        found = log.read(start, bytes_max=bytes_max, wanted=wanted, end=end)
        assert found.next_position > start
        rows += messages(found.runs)
        lost += found.damaged
        start = found.next_position
    return rows, lost


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("before", [0, 3])
def test_positions_that_are_given_up_lie_between_segments(folder: Path, before: int) -> None:
    log = SegmentedLog.open(folder)
    payloads = [row[6] for row in add_many(log, before)]
    if not before:
        log.roll()  # a segment without a message, which has its base already
    for jump in (1, 5):
        log.append(*tick([simple_run(b"t", b"behind %d" % jump)], [b"change"], log.end + jump, 1))
        payloads.append(b"behind %d" % jump)
    assert sum(each.end - each.base for each in log.segments()) == len(payloads)
    log.sync()
    log.close()
    again = SegmentedLog.open(folder)
    assert again.clean and again.report == []
    assert list(again.verify()) == []
    rows, lost = read_all(again)
    assert ([row[6] for row in rows], lost) == (payloads, 0)
    assert again.end == before + 2 + 6
    again.close()


@pytest.fixture(params=["files", "memory"])
def log(request: pytest.FixtureRequest, folder: Path) -> Iterator[AnyLog]:
    made = SegmentedLog.open(folder, segment_bytes=2000) if request.param == "files" else MemoryLog(1 << 20)
    yield made
    made.close()


def test_an_empty_log_reads_nothing(log: AnyLog) -> None:
    found = log.read(0, bytes_max=100, wanted=None, end=10)
    assert (found.runs, found.damaged, log.end, log.floor) == ([], 0, 0, 0)
    assert log.position_at_time(0) == 0
    assert list(log.changes_from(0)) == []


@given(
    st.lists(ticks, max_size=12),
    st.lists(st.sampled_from(["roll", "restart", "crash", ""]), max_size=12),
    st.frozensets(st.sampled_from(TOPICS), max_size=2),
    st.lists(st.sampled_from([b"a/", b"b", b""]), max_size=2).map(tuple),
    st.integers(1, 600),
)
@settings(max_examples=150, deadline=None)
def test_reading_through_filters_equals_the_naive_way(
    many: list[list[Run]], events: list[str], exact: frozenset[bytes], prefixes: tuple[bytes, ...], step: int
) -> None:
    wanted = Wanted(exact, prefixes, lambda topic: topic.startswith(prefixes) and b"c" not in topic)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidegate.log.reading.PLAIN_FRAMES", 0)  # always ask the index
        log = SegmentedLog.open(Path(name), segment_bytes=700)
        memory = MemoryLog()
        rows: list[Message] = []
        for i, runs in enumerate(many):
            memory.append(*tick(runs, [], memory.end, i))
            rows += add(log, runs, [b"r%d" % i], i)
            read_all(log, wanted)  # so that what it remembers must grow
            event = events[i] if i < len(events) else ""
            if event == "roll":
                log.roll()
            elif event in ("restart", "crash"):
                log.close(clean=event == "restart")
                log = SegmentedLog.open(Path(name), segment_bytes=700)
                assert log.clean == (event == "restart") and not log.report
        for bytes_max in (1, step, 1 << 30):
            assert read_all(log, wanted, bytes_max=bytes_max) == (kept(rows, wanted), 0)
            assert read_all(log, None, bytes_max=bytes_max) == (rows, 0)
        for start, end in ((0, log.end // 2), (log.end // 2, log.end), (3, 9)):
            part = [row for row in rows if start <= row[0] < end]
            assert read_all(log, wanted, start, end) == (kept(part, wanted), 0)
        assert [r for records in log.changes_from(0) for r in records] == [b"r%d" % i for i in range(len(many))]
        assert list(log.verify()) == []
        log.close()
        bare = [row[2:] for row in kept(rows, wanted)]
        assert [row[2:] for row in read_all(memory, wanted)[0]] == bare


def test_few_of_many_are_found_by_jumping(log: AnyLog) -> None:
    rows = add_many(log, 400, lambda i: b"rare" if i % 100 == 7 else b"common/%d" % (i % 5))
    wanted = Wanted(frozenset((b"rare",)))
    assert read_all(log, wanted) == (kept(rows, wanted), 0)
    first = log.read(0, bytes_max=1 << 20, wanted=wanted, end=log.end)
    assert len(first.runs) <= 4 and first.next_position > 7


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("named", [False, True], ids=["by wildcards", "in full"])
def test_a_search_among_many_topics_lets_others_have_their_turns(folder: Path, sealed: bool, named: bool) -> None:
    """There is one thread for all reads: one of ten thousand topics must not keep the others for seconds."""
    log = SegmentedLog.open(folder)
    rows: list[Message] = []
    for i in range(100):
        rows += add(log, [simple_run(b"t/%d" % (100 * i + j), b"x") for j in range(100)])
    if sealed:
        log.roll()
    asked = 0

    def match(topic: bytes) -> bool:
        nonlocal asked
        asked += 1
        return topic in (b"t/7", b"t/9999")

    exact = frozenset([*(b"n/%d" % i for i in range(10_000)), b"t/7", b"t/9999"])
    wanted = Wanted(exact) if named else Wanted(frozenset(), (b"t/", b"t/1", b"t/2"), match)
    turns, found = 0, None
    while found is None:
        turns, asked = turns + 1, 0
        try:
            found = log.read(0, bytes_max=1 << 20, wanted=wanted, end=log.end, in_turns=True)
        except Unfinished:
            pass
        assert asked < 2 * SEARCH_WORK_MAX and wanted.work < 2 * SEARCH_WORK_MAX
    assert turns > 3
    assert messages(found.runs) == [row for row in rows if row[2] in (b"t/7", b"t/9999")]
    log.close()


@pytest.mark.req("S3.12")
def test_a_time_finds_the_first_position_not_before_it_although_the_clock_jumps(log: AnyLog) -> None:
    times = [10, 20, 5, 5, 30, 1, 40, 40, 2]
    for i, time_ms in enumerate(times):
        add(log, [simple_run(b"t", b"x" * 300)], time_ms=time_ms)
        assert log.end == i + 1
    for wanted in range(45):
        newer = [i for i, time_ms in enumerate(times) if time_ms >= wanted]
        assert log.position_at_time(wanted) == (newer[0] if newer else log.end)


def test_changes_from_a_position_come_in_order(log: AnyLog) -> None:
    for i in range(30):
        add(log, [simple_run(b"t", b"x" * 100)] if i % 3 else [], [b"%d" % i])
    every = [record for records in log.changes_from(0) for record in records]
    assert every == [b"%d" % i for i in range(30)]
    late = [record for records in log.changes_from(10) for record in records]
    assert late == every[-len(late) :] and 0 < len(late) < 30


def test_segments_tell_their_facts_and_the_oldest_can_be_dropped(log: AnyLog) -> None:
    rows = add_many(log, 60)
    log.roll()
    log.append(*tick([simple_run(b"t", b"last")], [], log.end, 99))
    before = log.segments()
    assert len(before) > 1 and not before[-1].sealed and before[-1].last_time_ms == 99
    assert [s.base for s in before[1:]] == [s.end for s in before[:-1]]
    log.drop(before)  # the newest stays
    assert [s.sequence for s in log.segments()] == [before[-1].sequence]
    assert log.floor == 60 and log.end == 61
    found = log.read(0, bytes_max=100, wanted=None, end=log.end)
    assert messages(found.runs)[0][0] == 60 and found.damaged == 0
    assert len(rows) == 60


def test_dropping_stops_at_a_segment_that_shall_stay(folder: Path) -> None:
    with_close = SegmentedLog.open(folder, segment_bytes=300)
    add_many(with_close, 20)
    facts = with_close.segments()
    with_close.drop(facts[1:])
    assert with_close.segments() == facts
    with_close.drop(facts[:2])
    assert with_close.segments() == facts[2:]
    assert not (folder / segment_name(1)).exists() and not (folder / index_name(1)).exists()
    with_close.close()
    again = SegmentedLog.open(folder)
    assert again.clean and again.report == [] and again.floor == facts[2].base
    again.close()


# Restarts ------------------------------------------------------------------------------------------


@pytest.mark.req("S4.1")
def test_a_clean_restart_goes_on_where_it_was(folder: Path) -> None:
    log = SegmentedLog.open(folder)
    assert log.clean and log.end == 0
    rows = add_many(log, 5)
    log.close()
    log = SegmentedLog.open(folder)
    assert log.clean and log.end == 5
    rows += add_many(log, 2)
    assert read_all(log) == (rows, 0)
    log.close()


@pytest.mark.req("S4.1")
def test_positions_are_never_given_twice_however_often_it_crashes(folder: Path) -> None:
    given_out: set[int] = set()
    files = 0
    for crash in range(6):
        log = SegmentedLog.open(folder)
        start = log.end
        if crash % 2:
            add_many(log, 3)
        given_out_now = set(range(start, log.end))
        assert not given_out & given_out_now
        given_out |= given_out_now
        log.close(clean=False)
        if crash == 1:  # the machine died as well: a segment that was not synced is gone
            newest = max(path for path in folder.glob("*.log"))
            newest.write_bytes(newest.read_bytes()[:SEGMENT_HEADER_BYTES])
        files = len(list(folder.glob("*.log")))
    assert files <= 4
    log = SegmentedLog.open(folder)
    assert not log.clean and log.end >= max(given_out) + POSITION_GAP
    log.close()


def test_a_crash_before_the_first_append_still_moves_the_end(folder: Path) -> None:
    SegmentedLog.open(folder).close()
    log = SegmentedLog.open(folder)
    add_many(log, 1)
    log.close(clean=False)
    ends = []
    for _ in range(3):
        log = SegmentedLog.open(folder)
        ends.append(log.end)
        log.close(clean=False)
    assert ends == [1 + POSITION_GAP, 1 + 2 * POSITION_GAP, 1 + 3 * POSITION_GAP]
    assert len(list(folder.glob("*.log"))) == 2


@pytest.mark.attack("C13")
def test_a_second_process_is_refused_with_the_owner_named(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tidegate.log.files import SegmentedLog\n"
        f"log = SegmentedLog.open(Path({str(folder)!r})); print('open', flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "open\n"
        with pytest.raises(FolderLocked) as refused:
            SegmentedLog.open(folder)
        assert str(folder) in str(refused.value) and str(owner.pid) in str(refused.value)
    finally:
        owner.kill()
        owner.communicate()
    SegmentedLog.open(folder).close()  # the lock dies with its owner


@pytest.mark.attack("C13")
def test_the_same_process_cannot_open_it_twice_either(folder: Path) -> None:
    log = SegmentedLog.open(folder)
    with pytest.raises(FolderLocked):
        SegmentedLog.open(folder)
    log.close()
    SegmentedLog.open(folder).close()


@pytest.mark.attack("C1")
def test_what_was_appended_survives_kill_9(folder: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tidegate.log.files import SegmentedLog
from tidegate.log.frame import encode_rows
from tidegate.log.rows import Rows
from tidegate.log.run import Run
log = SegmentedLog.open(Path({str(folder)!r}), segment_bytes=5000)
for i in range(200):
    log.append(encode_rows(Rows.of([Run(b"t", b"p", b"x", 1, [b"%d" % i])]), i, i)[0], i + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    log = SegmentedLog.open(folder)
    assert not log.clean and log.report == []
    assert [row[6] for row in read_all(log)[0]] == [b"%d" % i for i in range(200)]
    log.close()


# Damage to files -----------------------------------------------------------------------------------


def three_segments(folder: Path) -> tuple[list[Message], list[int]]:
    """Thirty messages in three segments, closed cleanly; rows and the segments' ends."""
    log = SegmentedLog.open(folder)
    rows = []
    for part in range(3):
        rows += add_many(log, 10)
        if part < 2:
            log.roll()
    ends = [s.end for s in log.segments()]
    log.close()
    return rows, ends


@pytest.mark.attack("C4")
@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_segment_is_told_and_the_rest_served(folder: Path, with_index: bool) -> None:
    rows, ends = three_segments(folder)
    (folder / segment_name(2)).unlink()
    if not with_index:
        (folder / index_name(2)).unlink()
    log = SegmentedLog.open(folder)
    (damage,) = log.report
    assert (damage.segment, damage.first_position, damage.last_position) == (segment_name(2), 10, 19)
    assert read_all(log) == ([row for row in rows if not 10 <= row[0] < 20], 10)
    assert read_all(log, start=15) == (rows[20:], 5)
    assert log.end == ends[-1] and log.clean
    assert [d.segment for d in log.verify()] == [segment_name(2)]
    log.close()


@pytest.mark.attack("C4")
@pytest.mark.parametrize("keep", [0, 10, 64])
def test_a_last_segment_that_lost_its_end_since_a_clean_stop_is_told(folder: Path, keep: int) -> None:
    rows, ends = three_segments(folder)
    path = folder / segment_name(3)
    path.write_bytes(path.read_bytes()[:keep])
    log = SegmentedLog.open(folder)
    assert not log.clean and log.end >= ends[-1] + POSITION_GAP
    assert any(d.last_position == ends[-1] - 1 for d in log.report)
    assert read_all(log)[0] == rows[:20]
    fresh = add_many(log, 3)
    assert read_all(log)[0] == rows[:20] + fresh
    log.close()


@pytest.mark.attack("C4")
def test_a_last_segment_that_is_gone_since_a_clean_stop_is_told(folder: Path) -> None:
    rows, ends = three_segments(folder)
    (folder / segment_name(3)).unlink()
    log = SegmentedLog.open(folder)
    assert not log.clean and log.end >= ends[-1] + POSITION_GAP and log.report
    assert read_all(log)[0] == rows[:20]
    log.close()


@pytest.mark.attack("C4")
@pytest.mark.parametrize("damage", ["cut", "flip body", "flip head", "remove", "empty"])
def test_a_damaged_index_is_made_anew(folder: Path, damage: str) -> None:
    rows, _ = three_segments(folder)
    path = folder / index_name(2)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-5])
    elif damage == "remove":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        content[140 if damage == "flip body" else 20] ^= 1
        path.write_bytes(content)
    log = SegmentedLog.open(folder)
    wanted = Wanted(frozenset((b"t",)))
    assert log.clean and log.report == []
    assert read_all(log, wanted) == (rows, 0)
    log.close()
    log = SegmentedLog.open(folder)
    assert read_all(log, wanted) == (rows, 0)
    log.close()


@pytest.mark.attack("C4")
def test_a_flipped_bit_under_an_intact_index_is_counted_and_verified(folder: Path) -> None:
    rows, _ = three_segments(folder)
    path = folder / segment_name(1)
    for at in range(SEGMENT_HEADER_BYTES, 400):
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        path.write_bytes(content)
        log = SegmentedLog.open(folder)
        found, lost = read_all(log)
        assert lost == 1 and len(found) == 29 and set(found) < set(rows)
        assert [d.segment for d in log.verify()] == [segment_name(1)]
        log.close()
        content[at] ^= 4
        path.write_bytes(content)


@pytest.mark.attack("C4")
@pytest.mark.parametrize("sequence", [1, 2, 3, 4])
def test_a_foreign_file_is_told_and_left_as_it_is(folder: Path, sequence: int) -> None:
    rows, ends = three_segments(folder)
    path = folder / segment_name(sequence)
    path.write_bytes(b"holiday pictures" * 100)
    log = SegmentedLog.open(folder)
    lost = [row for row in rows if (sequence - 1) * 10 <= row[0] < sequence * 10]
    assert read_all(log)[0] == [row for row in rows if row not in lost]
    assert any(d.segment == path.name for d in log.report)
    fresh = add_many(log, 2)
    assert read_all(log)[0][-2:] == fresh and fresh[0][0] >= ends[-1]
    log.close()
    assert path.read_bytes() == b"holiday pictures" * 100


def test_an_empty_file_after_the_last_segment_is_no_obstacle(folder: Path) -> None:
    rows, _ = three_segments(folder)
    (folder / "CLEAN").unlink()
    (folder / segment_name(4)).touch()
    log = SegmentedLog.open(folder)
    fresh = add_many(log, 2)
    assert read_all(log) == (rows + fresh, 0)
    log.close()
    assert (folder / segment_name(4)).stat().st_size > SEGMENT_HEADER_BYTES
    log = SegmentedLog.open(folder)
    assert log.clean and log.report == []
    log.close()


def test_a_copy_of_a_segment_under_another_number_is_not_served_twice(folder: Path) -> None:
    rows, _ = three_segments(folder)
    (folder / segment_name(4)).write_bytes((folder / segment_name(1)).read_bytes())
    log = SegmentedLog.open(folder)
    assert read_all(log)[0] == rows and log.report
    log.close()


# Threads -------------------------------------------------------------------------------------------


def test_readers_and_syncs_beside_an_appender_see_a_prefix(folder: Path) -> None:
    log = SegmentedLog.open(folder, segment_bytes=4000)
    stop = threading.Event()
    failures: list[BaseException] = []

    def watch(work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failures.append(error)

    wanted = Wanted(frozenset((b"t/3",)), (b"t/1",), lambda topic: True)

    def read() -> None:
        end = log.end
        rows, lost = read_all(log, wanted, end=end, bytes_max=5000)
        wanted_rows = [i for i in range(end) if i % 20 == 3 or (b"t/%d" % (i % 20) >= b"t/1" and str(i % 20)[0] == "1")]
        assert lost == 0 and [row[0] for row in rows] == wanted_rows

    threads = [threading.Thread(target=watch, args=(work,)) for work in (read, log.sync)]
    for thread in threads:
        thread.start()
    rows = add_many(log, 3000, lambda i: b"t/%d" % (i % 20))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert read_all(log, bytes_max=1 << 20) == (rows, 0)
    log.close()
    assert not any(path.suffix == ".tmp" for path in folder.iterdir())


def test_a_reader_of_a_segment_that_is_dropped_goes_on_behind_it(folder: Path) -> None:
    log = SegmentedLog.open(folder, segment_bytes=1000)
    add_many(log, 100)
    shelf = log._shelves[0]
    fetch = type(shelf).fetch

    def drop_first(self: object, offset: int, size: int) -> bytes:
        log.drop(log.segments()[:2])
        return fetch(shelf, offset, size) if self is shelf else fetch(self, offset, size)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(shelf), "fetch", drop_first)
        found = log.read(0, bytes_max=1, wanted=None, end=log.end)
    assert found.runs[0].base >= log.segments()[0].base - 50 and found.damaged == 0
    log.close()


def test_many_topics_seal_a_segment_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmented_module, "TOPICS_MAX", 10)
    log = SegmentedLog.open(folder)
    rows = add_many(log, 55, lambda i: b"t/%d" % i)
    assert len(log.segments()) == 6
    assert read_all(log) == (rows, 0)
    log.close()


def test_a_memory_log_holds_no_more_than_its_bytes() -> None:
    log = MemoryLog(bytes_max=20_000)
    rows = add_many(log, 500)
    assert sum(s.bytes for s in log.segments()) <= 20_000
    assert log.floor > 0
    assert read_all(log)[0] == rows[log.floor :]


@pytest.mark.attack("C4")
def test_a_segment_that_vanishes_while_the_log_is_open_is_counted_as_lost(folder: Path) -> None:
    rows, _ = three_segments(folder)
    log = SegmentedLog.open(folder)
    (folder / segment_name(2)).unlink()
    (folder / index_name(2)).unlink()
    assert read_all(log) == (rows[:10] + rows[20:], 10)
    log.close()
