"""The subscription index and the retained store with a million entries: memory and time.

    python bench/index.py [--filters 1000000] [--without-peer] [--out bench/out/index.json]

Half of the filters have wildcards. The peer, measured in the same run with the same filters and topics, is
`MQTTMatcher` of paho-mqtt, the trie that Python's MQTT clients use. Bytes are growth of the resident set;
client ids and values exist before and are not counted, the filters' own bytes are.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import quantiles
from typing import TypeVar

import psutil
from paho.mqtt.matcher import MQTTMatcher
from rich.console import Console
from rich.table import Table

from tidegate.router import Retained, RetainedStore, SubscriptionIndex

SITES = 1_000
PROBE_TOPICS = 2_000
ROUNDS = 5
KINDS = ("0 matches", "1 match, exact", "1 match, wildcard", "10 matches", "100 matches")

T = TypeVar("T")
Figures = dict[str, float]


def filters(count: int) -> Iterator[bytes]:
    """Distinct filters as a fleet has them: every other one exact, the rest of four wildcard shapes."""
    shapes = (b"site/%d/dev/%d/+", b"site/%d/dev/%d/#", b"site/%d/+/%d/temp", b"+/%d/dev/%d/state/#")
    for i in range(count):
        site, device = i % SITES, i // SITES
        if i // SITES % 2:
            yield b"site/%d/dev/%d/temp" % (site, device)
        else:
            yield shapes[i // SITES // 2 % 4] % (site, device)
    for number in (10, 100):
        yield from itertools.islice(overlapping(b"probe%d" % number), number)


def overlapping(first: bytes) -> Iterator[bytes]:
    """128 distinct filters that all match the topics `first/b/c/d/e/f/g/<anything>`."""
    choices = [(level, b"+") for level in (b"b", b"c", b"d", b"e", b"f", b"g")]
    for levels in itertools.product((first,), *choices, (b"+", b"#")):
        yield b"/".join(levels)


def topics(kind: str, filters: int) -> list[bytes]:
    devices = max(8, filters // SITES) // 8 * 8
    made = []
    for i in range(PROBE_TOPICS):
        site, device = i * 7 % SITES, i * 8 % devices
        made.append(
            {
                "0 matches": b"site/%d/dev/%d/hum/x" % (site, device + 1),
                "1 match, exact": b"site/%d/dev/%d/temp" % (site, device + 1),
                "1 match, wildcard": b"site/%d/dev/%d/hum" % (site, device),
                "10 matches": b"probe10/b/c/d/e/f/g/%d" % i,
                "100 matches": b"probe100/b/c/d/e/f/g/%d" % i,
            }[kind]
        )
    return made


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def time_each(match: Callable[[T], object], probes: list[T]) -> Figures:
    """Microseconds of single calls, the clock's own cost taken off."""
    clock = time.perf_counter_ns
    bare = min(-clock() + clock() for _ in range(10_000))
    took = []
    for _ in range(ROUNDS):
        for probe in probes:
            begin = clock()
            match(probe)
            took.append(max(0, clock() - begin - bare) / 1_000)
    percentiles = quantiles(took, n=100)
    return {"p50_us": round(percentiles[49], 2), "p99_us": round(percentiles[98], 2)}


def measure_index(count: int) -> dict[str, Figures]:
    clients = [b"client-%d" % i for i in range(1_000)]
    before = resident_bytes()
    begin = time.perf_counter()
    index: SubscriptionIndex[bytes, bytes] = SubscriptionIndex()
    for i, filter in enumerate(filters(count)):
        index.add(filter, clients[i % 1_000], clients[i % 1_000])
    seconds = time.perf_counter() - begin
    size = len(index)
    figures = {"filter": {"bytes": (resident_bytes() - before) / size, "add_us": seconds / size * 1e6}}
    gc.freeze()  # no collection walks the index while single calls are timed; the same for the peer
    for kind in KINDS:
        probes = topics(kind, count)
        expected = int(kind.split()[0])
        assert all(len(index.match(topic)) == expected for topic in probes), kind
        figures[kind] = time_each(index.match, probes)
    return figures


def measure_peer(count: int) -> dict[str, Figures]:
    clients = [b"client-%d" % i for i in range(1_000)]
    before = resident_bytes()
    begin = time.perf_counter()
    matcher = MQTTMatcher()  # type: ignore[no-untyped-call]
    for i, filter in enumerate(filters(count)):
        matcher[filter.decode()] = clients[i % 1_000]
    seconds = time.perf_counter() - begin
    figures = {"filter": {"bytes": (resident_bytes() - before) / count, "add_us": seconds / count * 1e6}}
    gc.freeze()
    for kind in KINDS:
        probes = [topic.decode() for topic in topics(kind, count)]
        expected = int(kind.split()[0])
        assert all(len(list(matcher.iter_match(topic))) == expected for topic in probes), kind  # type: ignore[no-untyped-call]
        figures[kind] = time_each(lambda topic: list(matcher.iter_match(topic)), probes)  # type: ignore[no-untyped-call]
    return figures


def measure_retained(count: int) -> Figures:
    payload = b"21.5"
    before = resident_bytes()
    begin = time.perf_counter()
    store = RetainedStore(messages_max=count, bytes_max=1 << 40)
    for i in range(count):
        # A stride that is no divisor: topics do not come in order.
        site, device = i * 7_919 % SITES, i * 7_919 // SITES % 1_000_003
        store.put(
            Retained(
                b"site/%d/dev/%d/temp" % (site, device), payload, 1, b"", None, 10**12 + i, i, b"publisher"
            )
        )
    put_s = time.perf_counter() - begin
    size = len(store)
    held = (resident_bytes() - before) / size
    gc.freeze()
    begin = time.perf_counter()
    streamed = sum(1 for _ in store.match(b"#", 0))
    match_s = time.perf_counter() - begin
    assert streamed == size
    return {"bytes": held, "put_us": put_s / count * 1e6, "match_all_us_each": match_s / size * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filters", type=int, default=1_000_000)
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "index.json")
    options = parser.parse_args()
    if options.filters < 16 * SITES:
        parser.error(f"--filters must be at least {16 * SITES}: the probe topics need every shape")

    ours = measure_index(options.filters)
    peer = None if options.without_peer else measure_peer(options.filters)
    retained = measure_retained(options.filters)

    table = Table(title=f"Subscription index, {options.filters:,} filters, half with wildcards")
    for heading in ("", "tidegate", "paho MQTTMatcher", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")

    def row(name: str, kind: str, figure: str, unit: str) -> None:
        mine = ours[kind][figure]
        theirs = peer[kind][figure] if peer else None
        ratio = f"{theirs / mine:.1f} ×" if theirs is not None and mine else "-"
        table.add_row(name, f"{mine:,.1f} {unit}", "-" if theirs is None else f"{theirs:,.1f} {unit}", ratio)

    row("memory per filter", "filter", "bytes", "B")
    row("add", "filter", "add_us", "µs")
    for kind in KINDS:
        row(f"{kind}, p50", kind, "p50_us", "µs")
        row(f"{kind}, p99", kind, "p99_us", "µs")
    console = Console()
    console.print(table)
    console.print(
        f"Retained store, {options.filters:,} topics: {retained['bytes']:,.0f} B each, "
        f"put {retained['put_us']:.1f} µs, `#` streams at {retained['match_all_us_each']:.1f} µs each"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "cpus": psutil.cpu_count()}
    report = {
        "filters": options.filters,
        "machine": machine,
        "tidegate": ours,
        "paho": peer,
        "retained": retained,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
