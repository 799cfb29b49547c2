"""What is measured, and the bars Tidegate is held to. Values only: nothing here starts a process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

PAYLOAD_BYTES = 64
# mosquitto 2.0.11 drains this many, but with 100,000 it closed the reader's connection for a "protocol error".
DRAIN_MESSAGES = 60_000
OTHER_CPU_SHARE_MAX = 0.15  # cores that other processes may use before a measurement counts as disturbed
RATE_KEPT_MIN = 0.98  # a latency counts only if the broker kept up with the offered rate


@dataclass(frozen=True, slots=True)
class Load:
    """What mqttload is asked to do."""

    topology: str
    pubs: int
    subs: int
    qos: int
    rate_per_s: int = 0
    """0: as fast as the closed loop of the load generator allows."""
    topics: int = 1
    """Of each publisher, chosen at random for each message."""
    payload_bytes_max: int = PAYLOAD_BYTES
    """Above PAYLOAD_BYTES: sizes at random between the two."""
    window: int = 0
    """Unacknowledged messages per publisher; 0: the load generator's own choice."""
    retain: bool = False
    user_property: bool = False
    expiry: bool = False
    aliases: bool = False

    program: ClassVar[str] = "mqttload"

    def arguments(self, seconds: float, warmup_s: float) -> list[str]:
        flags = ("retain", "user_property", "expiry", "aliases")
        return [
            "--seconds", str(seconds), "--warmup", str(warmup_s),
            "--topology", self.topology, "--pubs", str(self.pubs), "--subs", str(self.subs),
            "--qos", str(self.qos), "--rate", str(self.rate_per_s), "--payload", str(PAYLOAD_BYTES),
            "--payload-max", str(self.payload_bytes_max), "--topics", str(self.topics),
            *(("--window", str(self.window)) if self.window else ()),
            *(f"--{flag.replace('_', '-')}" for flag in flags if getattr(self, flag)),
        ]  # fmt: skip

    def needs(self) -> set[str]:
        """What a broker must be able to do, beside MQTT itself."""
        wanted = {f"QoS {self.qos}"}
        wanted |= {"shared subscriptions"} if self.topology == "shared" else set()
        wanted |= {"subscription identifiers"} if self.topology == "kinds" else set()
        wanted |= {"topic aliases"} if self.aliases else set()
        wanted |= {"retained messages"} if self.retain else set()
        wanted |= {"user properties"} if self.user_property else set()
        wanted |= {"message expiry"} if self.expiry else set()
        return wanted


@dataclass(frozen=True, slots=True)
class Drain:
    """What mqttdrain is asked to do: QoS 1 and 2 in turn, missed by a session that comes back."""

    messages: int
    qos: int = 2
    rate_per_s: int = 0

    program: ClassVar[str] = "mqttdrain"

    def arguments(self, _seconds: float, _warmup_s: float) -> list[str]:
        return ["--messages", str(self.messages), "--payload", str(PAYLOAD_BYTES)]

    def needs(self) -> set[str]:
        return {"QoS 2", "persistent sessions"}


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of a scenario: a broker, with what it is asked to do there."""

    label: str
    broker: str
    mqtt_version: int
    durability: str
    load: Load | Drain


@dataclass(frozen=True, slots=True)
class Bar:
    """The `metric` of `own` divided by that of `against`, at least (or at most) `factor`. Without `against`: the metric
    itself. An aim, printed beside what was measured."""

    metric: str
    against: str | None
    factor: float
    at_least: bool
    own: str = "tidegate"

    def text(self) -> str:
        sign = "≥" if self.at_least else "≤"
        short = {"delivered_per_s": "", "cpu_us_per_delivery": "CPU ", "p50_us": "p50 ", "p99_us": "p99 "}
        limit = f"{self.factor:.2g}×" if self.against else f"{self.factor:,.0f}"
        return f"{short[self.metric]}{sign}{limit}"

    def met(self, ratio: float) -> bool:
        return ratio >= self.factor if self.at_least else ratio <= self.factor


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    load: Load | Drain
    bars: tuple[Bar, ...] = ()
    durability: str = "os"
    mqtt_version: int = 4
    own_versions: bool = False
    """Tidegate against itself: MQTT 5 beside 3.1.1."""
    durable_too: bool = False
    """Tidegate a second time, with fsync."""
    plain: Load | None = None
    """Tidegate a second time, with this load and in 3.1.1: what the scenario's feature costs."""

    only: tuple[str, ...] = ()
    """The brokers it is about; empty: all."""

    def contenders(self, brokers: list[str]) -> list[Contender]:
        if self.own_versions:
            if "tidegate" not in brokers:
                return []
            return [
                Contender("tidegate", "tidegate", 5, self.durability, self.load),
                Contender("tidegate 3.1.1", "tidegate", 4, self.durability, self.load),
            ]
        found = []
        for name in brokers:
            if not self.only or name in self.only:
                found.append(Contender(name, name, self.mqtt_version, self.durability, self.load))
                if name == "tidegate" and self.durable_too:
                    found.append(Contender("tidegate fsync", name, self.mqtt_version, "fsync", self.load))
                if name == "tidegate" and self.plain:
                    found.append(Contender("tidegate plain", name, 4, self.durability, self.plain))
        return found

    @property
    def is_throughput(self) -> bool:
        return self.load.rate_per_s == 0


def _faster(factor: float) -> tuple[Bar, ...]:
    return (Bar("delivered_per_s", "mosquitto", factor, at_least=True),)


def _ahead() -> tuple[Bar, ...]:
    """Of the peers that are named for no factor."""
    return tuple(Bar("delivered_per_s", peer, 1, at_least=True) for peer in ("nats", "rumqttd"))


def _of_plain(share: float) -> tuple[Bar, ...]:
    return (Bar("delivered_per_s", "tidegate plain", share, at_least=True), *_ahead())


def _at_most(metric: str, factor: float, own: str = "tidegate") -> tuple[Bar, ...]:
    """A factor to mosquitto; the other peers are to be behind."""
    peers = (("mosquitto", factor), ("nats", 1.0), ("rumqttd", 1.0))
    return tuple(Bar(metric, peer, most, at_least=False, own=own) for peer, most in peers)


_ONE = Load("pairs", 1, 1, 0)
_FANOUT = Load("fanout", 1, 10, 0)
_PAIRS = Load("pairs", 10, 10, 0)
_MIXED = {"topics": 1000, "payload_bytes_max": 264}

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
    Scenario("10-pairs-q2", "10 pairs, QoS 2", replace(_PAIRS, qos=2), (*_faster(5), *_ahead()), "fsync"),
    Scenario(
        "mixed-1-1-q0",
        "1 → 1, QoS 0, 1,000 topics at random, 64–264 B",
        replace(_ONE, **_MIXED),
        (*_faster(5), *_ahead()),
        "fsync",
    ),
    Scenario(
        "mixed-10-pairs-q1",
        "10 pairs, QoS 1, 1,000 topics each at random, 64–264 B",
        replace(_PAIRS, qos=1, **_MIXED),
        (*_faster(5), *_ahead()),
        "fsync",
    ),
    Scenario(
        "500-lockstep-q1",
        "500 pairs, QoS 1, each message after the PUBACK of the last",
        Load("pairs", 500, 500, 1, window=1),
        (*_faster(2.5), *_ahead()),
        "fsync",
    ),
    Scenario(
        "drain-q1-q2",
        f"drain of {DRAIN_MESSAGES:,} missed messages, QoS 1 and 2 in turn",
        Drain(DRAIN_MESSAGES),
        (Bar("delivered_per_s", None, 150_000, at_least=True), *_ahead()),
        "fsync",
        mqtt_version=5,
    ),
    Scenario(
        "v5-user-property",
        "10 pairs, QoS 1, MQTT 5, a user property on each",
        replace(_PAIRS, qos=1, user_property=True),
        _of_plain(1 / 3),
        "fsync",
        mqtt_version=5,
        plain=replace(_PAIRS, qos=1),
    ),
    Scenario(
        "retained-1-1-q1",
        "1 → 1, QoS 1, retained, 1,000 topics at random",
        replace(_ONE, qos=1, retain=True, topics=1000),
        _of_plain(1 / 3),
        "fsync",
        plain=replace(_ONE, qos=1, topics=1000),  # the same topics, not retained
    ),
    Scenario(
        "v5-aliases",
        "10 pairs, QoS 1, MQTT 5, topic aliases in and out",
        replace(_PAIRS, qos=1, aliases=True),
        _of_plain(1 / 3),
        "fsync",
        mqtt_version=5,
        plain=replace(_PAIRS, qos=1),
    ),
    Scenario(
        "v5-expiry",
        "10 pairs, QoS 1, MQTT 5, an expiry interval on each",
        replace(_PAIRS, qos=1, expiry=True),
        _of_plain(1 / 3),
        "fsync",
        mqtt_version=5,
        plain=replace(_PAIRS, qos=1),
    ),
    Scenario(
        "three-kinds",
        "1 → 3.1.1 with QoS 0, 5 with QoS 1, 5 with QoS 1 and a subscription identifier",
        Load("kinds", 1, 3, 1),
        _of_plain(1 / 3),
        "fsync",
        mqtt_version=5,
        plain=replace(_ONE, qos=1),
    ),
    Scenario(
        "shared-10-10-q1",
        "10 → a shared group of 10, QoS 1, MQTT 5",
        Load("shared", 10, 10, 1),
        _of_plain(1 / 2),
        "fsync",
        mqtt_version=5,
        plain=replace(_PAIRS, qos=1),
    ),
    Scenario(
        "1000-sparse-q1",
        "1000 pairs, QoS 1, 10 k msg/s",
        Load("pairs", 1000, 1000, 1, rate_per_s=10_000),
        (
            *_at_most("cpu_us_per_delivery", 1.6),
            *_at_most("p99_us", 2),
            *_at_most("cpu_us_per_delivery", 2, own="tidegate fsync"),
            *_at_most("p99_us", 2, own="tidegate fsync"),
        ),
        durable_too=True,
    ),
    Scenario(
        "10-pairs-q1-5k",
        "10 pairs, QoS 1, 5 k msg/s",
        Load("pairs", 10, 10, 1, rate_per_s=5_000),
        (
            *_at_most("cpu_us_per_delivery", 1.6),
            *_at_most("p50_us", 1.2),
            *_at_most("cpu_us_per_delivery", 2.5, own="tidegate fsync"),
            *_at_most("p50_us", 1.2, own="tidegate fsync"),
        ),
        durable_too=True,
    ),
    *(
        replace(
            base,
            name=f"v5-{base.name}",
            title=f"{base.title}, MQTT 5",
            bars=(Bar("delivered_per_s", "tidegate 3.1.1", 0.8, at_least=True),),
            mqtt_version=5,
            own_versions=True,
        )
        for base in _AGAINST_PEERS
    ),
)
