"""The state of one client: what it subscribed to, what is in flight, its will, its connection.

Pure: no sockets, files or clocks; time comes in as an argument. May import: `wire`, `errors`, `limits`
(and the configuration's types).
"""
