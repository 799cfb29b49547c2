"""The log for Spark and other columnar readers. Knows the documented log format, never the broker's objects.

May import: the format modules of `log`, `errors`, `limits`.
"""
