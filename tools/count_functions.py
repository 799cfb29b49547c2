"""How many functions of the core a message passes, by kind of message: python tools/count_functions.py [CHECKOUT]

Counts what `Broker.receive` and the tick after it call, from a publisher's bytes to a live subscriber's and back to the
acknowledgement, on a simulated log; codec and router are left out. For a look at the shape of the code, not its speed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
sys.path[:0] = [str(CHECKOUT / part) for part in ("src", "tests", "tests/broker")]

from simulated import SimulatedBroker, SimulatedLog  # noqa: E402

from tidegate.wire import FilterRequest, Properties, Publish, Subscribe, encode  # noqa: E402

KINDS = {
    "QoS 1, alone": [Publish(b"a", b"x", 1, packet_id=1)],
    "QoS 1, sizes vary": [Publish(b"a", b"x" * i, 1, packet_id=i) for i in range(1, 6)],
    "QoS 1, a block": [Publish(b"a", b"xxxx", 1, packet_id=i) for i in range(1, 40)],
    "QoS 1, many topics": [Publish(b"a/%d" % i, b"xxxx", 1, packet_id=i) for i in range(1, 40)],
    "QoS 0, a block": [Publish(b"a", b"xxxx")] * 40,
    "QoS 2": [Publish(b"a", b"x", 2, packet_id=1)],
    "a user property": [Publish(b"a", b"x", 1, packet_id=1, properties=Properties(user=((b"k", b"v"),)))],
    "retained": [Publish(b"a", b"x", 1, retain=True, packet_id=1)],
}
LEFT_OUT = ("<", "__")


def passed(packets: list[Publish]) -> set[tuple[str, str]]:
    simulated = SimulatedBroker(SimulatedLog(late=False))
    subscriber = simulated.client("subscriber", 5)
    subscriber.send(Subscribe(1, (FilterRequest(b"#", 2),)))
    publisher = simulated.client("publisher", 5)
    for i in range(40):
        publisher.send(Publish(b"a/%d" % i if i else b"a", b"warm", 1, packet_id=99))
        simulated.rest()
    found: set[tuple[str, str]] = set()

    def look(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(CHECKOUT / "src/tidegate") and not code.co_name.startswith(LEFT_OUT):
            room = path.relative_to(CHECKOUT / "src/tidegate").parts[0]
            if room not in ("wire", "router"):
                found.add((path.name, code.co_name))

    data = b"".join(encode(packet, 5) for packet in packets)
    sys.setprofile(look)
    simulated.broker.receive(publisher.link, data)
    simulated.tick()
    sys.setprofile(None)
    return found


def main() -> None:
    kinds = {name: passed(packets) for name, packets in KINDS.items()}
    for name, found in kinds.items():
        print(f"{name:20} {len(found):3}")
    print(f"{'in all':20} {len(set.union(*kinds.values())):3}")
    print(f"{'every kind passes':20} {len(set.intersection(*kinds.values())):3}")


if __name__ == "__main__":
    main()
