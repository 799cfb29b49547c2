"""Clients of a broker that the project itself needs. They know MQTT and sockets, nothing of the broker behind them.

May import: `wire`, `errors`, `limits`.

    batch      many messages as the bytes of their PUBLISH packets; pure
    publisher  sends them over one connection, and sees to it that each is acknowledged
"""
