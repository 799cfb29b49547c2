"""A client that does nothing but ping, in a process of its own, so that the test's own work is not in its figures.

    python bystander_process.py <port>

Sends PINGREQ about every two milliseconds and notes how long each PINGRESP takes. For every line on standard input
it prints how many there were since the last, and their p99 and longest wait in milliseconds.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time

PAUSE_S = 0.002
CONNECT = b"\x10\x15\x00\x04MQTT\x04\x02\x00\x00\x00\x09bystander"


def main() -> None:
    gc.disable()
    peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(CONNECT)
    assert peer.recv(4) == b"\x20\x02\x00\x00"
    waits_s: list[float] = []
    while True:
        began_s = time.perf_counter()
        peer.sendall(b"\xc0\x00")
        if peer.recv(2) != b"\xd0\x00":
            sys.exit("no PINGRESP")
        waits_s.append(time.perf_counter() - began_s)
        if select.select([0], [], [], PAUSE_S)[0]:
            if not os.read(0, 100):
                return
            waits_s.sort()
            p99_s = waits_s[int(len(waits_s) * 0.99)]
            print(len(waits_s), p99_s * 1000, waits_s[-1] * 1000, flush=True)
            waits_s = []


if __name__ == "__main__":
    main()
