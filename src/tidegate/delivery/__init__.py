"""From positions in the log to bytes for clients: live delivery, catch-up, shared groups, time travel.

Pure: what must be read from disk is asked of the commit log port, and answered by a call back.
May import: `session`, `router`, `log`, `wire`, `ports`, `errors`, `limits`.
"""
