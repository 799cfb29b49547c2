"""The core put together: what happens on each packet, each tick and each second.

Pure: bytes come in through `Broker.receive`, bytes go out through links, storage is a port, time is an argument.
May import: `session`, `delivery`, `router`, `log`, `wire`, `ports`, `config`, `counters`, `errors`, `limits`.
"""
