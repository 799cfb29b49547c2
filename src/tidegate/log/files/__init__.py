"""The segmented log on disk: the only part of the log, with `snapshot`, that touches files.

    LOCK                  held by the process that owns the folder; its pid
    CLEAN                 written by a clean stop, removed at the next start
    %020d.log, .index     segments and their topic indices
    %020d.snapshot        state, see `snapshot`

One thread appends. Any thread may sync or read meanwhile. What `append` took is in the page cache, so
it survives the death of the process; what a later `sync` returned for survives the machine's.
"""

from tidegate.log.files.segmented import SEGMENT_BYTES, IndexEntry, Progress, SegmentedLog

__all__ = ["SEGMENT_BYTES", "IndexEntry", "Progress", "SegmentedLog"]
