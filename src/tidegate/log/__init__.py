"""The commit log's format: runs, frames, segments, topic index, recovery and retention rules.

Everything here is pure except `files` and `snapshot`, which alone touch the disk.
May import: `errors`, `limits`.
"""
