"""The commit log's format: runs, frames, segments, topic index, recovery and retention rules.

Everything here is pure except `files`, the one module that touches the disk.
May import: `errors`, `limits`.
"""
