"""The topic index finds what a scan finds, growing and finished alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.log.index import FrameTable, IndexBuilder, TopicIndex, Wanted

topic_names = st.binary(min_size=1, max_size=4)
frames = st.lists(
    st.tuples(
        st.integers(0, 3),  # gap before
        st.integers(1, 5),  # messages
        st.lists(topic_names, min_size=1, max_size=4),
        st.integers(0, 50),  # time
    ),
    max_size=30,
)


def built(
    rows: list[tuple[int, int, list[bytes], int]],
) -> tuple[IndexBuilder, list[tuple[int, int, int, list[bytes], int]]]:
    builder = IndexBuilder()
    facts = []
    offset, position = 64, 1000
    for gap, count, topics, time_ms in rows:
        position += gap
        builder.add(offset, position, count, topics, 80, time_ms)
        facts.append((offset, position, count, topics, time_ms))
        offset += 80
        position += count
    return builder, facts


def both(builder: IndexBuilder) -> tuple[FrameTable, FrameTable]:
    index = TopicIndex.load(builder.build(3, 1000, 2000, 4096, 7))
    assert index is not None
    return builder, index


@given(frames)
def test_an_index_equals_a_scan(rows: list[tuple[int, int, list[bytes], int]]) -> None:
    builder, facts = built(rows)
    names = {topic for fact in facts for topic in fact[3]}
    for table in both(builder):
        for topic in names | {b"never"}:
            assert table.exact(topic) == [fact[0] for fact in facts if topic in fact[3]]
        for prefix in {name[:1] for name in names} | {b"", b"zzzz"}:
            assert set(table.prefix_topics(prefix)) == {n for n in names if n.startswith(prefix)}
        some = sorted(names)[::2]
        assert table.frames_for(some) == [f[0] for f in facts if set(some) & set(f[3])]
        last = facts[-1][1] + facts[-1][2] if facts else 1000
        for position in range(998, last + 2):
            held = [f[0] for f in facts if f[1] + f[2] > position]
            assert table.frame_at(position) == (held[0] if held else None)
        for time_ms in range(52):
            newer = [f[1] for f in facts if f[4] >= time_ms]
            assert table.position_at_time(time_ms) == (newer[0] if newer else None)


@given(frames, st.data())
def test_a_damaged_or_cut_index_is_refused(rows: list[tuple[int, int, list[bytes], int]], data: st.DataObject) -> None:
    content = bytearray(built(rows)[0].build())
    at = data.draw(st.integers(0, len(content) - 1))
    assert TopicIndex.load(bytes(content[:at])) is None
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    assert TopicIndex.load(bytes(content)) is None


def test_wanted_accepts_exact_topics_and_matches_under_its_prefixes() -> None:
    wanted = Wanted(frozenset((b"x",)), (b"a/",), lambda topic: topic.endswith(b"z"))
    assert [t for t in (b"x", b"a/z", b"a/y", b"b/z") if wanted(t)] == [b"x", b"a/z"]
    assert not Wanted(frozenset(), (b"a/",))(b"a/z")
