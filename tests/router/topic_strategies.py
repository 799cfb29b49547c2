"""Topics and filters for property tests: few distinct levels, so that they meet often."""

from __future__ import annotations

from hypothesis import strategies as st

# Neighbours of `/` and NUL in byte order, empty levels and `$` are where matchers go wrong.
LEVELS = [b"a", b"b", b"a-b", b"a0", b"", b"$", b"$a", b"%", b"\x01", "é".encode()]

levels = st.sampled_from(LEVELS)


def _topic(parts: list[bytes]) -> bytes:
    return b"/".join(parts)


topics = st.lists(levels, min_size=1, max_size=5).map(_topic).filter(bool)


@st.composite
def _filters(draw: st.DrawFn) -> bytes:
    parts = draw(st.lists(st.one_of(levels, st.just(b"+")), max_size=5))
    if not parts or draw(st.booleans()):
        parts.append(b"#")
    return b"/".join(parts)


filters = _filters().filter(bool)
