"""What is measured, and the bars Tidegate is held to. Values only: nothing here starts a process."""

from __future__ import annotations

from dataclasses import dataclass, replace

PAYLOAD_BYTES = 64
RATE_KEPT_MIN = 0.98  # a latency counts only if the broker kept up with the offered rate


@dataclass(frozen=True, slots=True)
class Load:
    topology: str
    pubs: int
    subs: int
    qos: int
    rate_per_s: int = 0
    """0: as fast as the closed loop of the load generator allows."""

    def arguments(self) -> list[str]:
        return [
            "--topology", self.topology, "--pubs", str(self.pubs), "--subs", str(self.subs),
            "--qos", str(self.qos), "--rate", str(self.rate_per_s), "--payload", str(PAYLOAD_BYTES),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of a scenario: a broker, with what it is asked to do there."""

    label: str
    broker: str
    mqtt_version: int = 4
    durability: str = "os"


@dataclass(frozen=True, slots=True)
class Bar:
    """Tidegate's `metric` divided by that of `against`, at least (or at most) `factor`."""

    metric: str
    against: str
    factor: float
    at_least: bool

    def text(self) -> str:
        sign = "≥" if self.at_least else "≤"
        short = {"delivered_per_s": "", "cpu_us_per_delivery": "CPU ", "p50_us": "p50 ", "p99_us": "p99 "}
        return f"{short[self.metric]}{sign}{self.factor:g}×"

    def met(self, ratio: float) -> bool:
        return ratio >= self.factor if self.at_least else ratio <= self.factor


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    load: Load
    bars: tuple[Bar, ...] = ()
    durability: str = "os"
    own_versions: bool = False
    """Tidegate against itself: MQTT 5 beside 3.1.1."""

    only: tuple[str, ...] = ()
    """The brokers it is about; empty: all."""

    def contenders(self, brokers: list[str]) -> list[Contender]:
        if self.own_versions:
            if "tidegate" not in brokers:
                return []
            return [Contender("tidegate", "tidegate", 5), Contender("tidegate 3.1.1", "tidegate", 4)]
        chosen = [name for name in brokers if not self.only or name in self.only]
        return [Contender(name, name, durability=self.durability) for name in chosen]

    @property
    def is_throughput(self) -> bool:
        return self.load.rate_per_s == 0


def _faster(factor: float) -> tuple[Bar, ...]:
    return (Bar("delivered_per_s", "mosquitto", factor, at_least=True),)


_ONE = Load("pairs", 1, 1, 0)
_FANOUT = Load("fanout", 1, 10, 0)
_PAIRS = Load("pairs", 10, 10, 0)

_AGAINST_PEERS = (
    Scenario("1-1-q0", "1 → 1, QoS 0", _ONE, _faster(6)),
    Scenario("1-10-q0", "1 → 10, QoS 0", _FANOUT, _faster(20)),
    Scenario("10-pairs-q0", "10 pairs, QoS 0", _PAIRS, _faster(7)),
    Scenario("1-1-q1", "1 → 1, QoS 1", replace(_ONE, qos=1), _faster(5)),
    Scenario("10-pairs-q1", "10 pairs, QoS 1", replace(_PAIRS, qos=1), _faster(6)),
)

SCENARIOS: tuple[Scenario, ...] = (
    *_AGAINST_PEERS,
    Scenario(
        "10-pairs-q1-fsync",
        "10 pairs, QoS 1, fsync (mosquitto: in memory)",
        replace(_PAIRS, qos=1),
        _faster(5),
        durability="fsync",
        only=("tidegate", "mosquitto"),
    ),
    Scenario("1-1-q2", "1 → 1, QoS 2", replace(_ONE, qos=2)),
    Scenario(
        "1000-sparse-q1",
        "1000 pairs, QoS 1, 10 k msg/s",
        Load("pairs", 1000, 1000, 1, rate_per_s=10_000),
        (
            Bar("cpu_us_per_delivery", "mosquitto", 1.2, at_least=False),
            Bar("p99_us", "mosquitto", 1.0, at_least=False),
        ),
    ),
    Scenario(
        "10-pairs-q1-5k",
        "10 pairs, QoS 1, 5 k msg/s",
        Load("pairs", 10, 10, 1, rate_per_s=5_000),
        (Bar("p50_us", "mosquitto", 1.2, at_least=False),),
    ),
    *(
        replace(
            base,
            name=f"v5-{base.name}",
            title=f"{base.title}, MQTT 5",
            bars=(Bar("delivered_per_s", "tidegate 3.1.1", 0.8, at_least=True),),
            own_versions=True,
        )
        for base in _AGAINST_PEERS
    ),
)
