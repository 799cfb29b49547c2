"""One measurement: a fresh broker, one run of mqttload, and the broker's CPU time in the measured window."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from brokers import Peer, Running, machine_cpu_s, start
from scenarios import OTHER_CPU_SHARE_MAX, Contender, Drain, Load

HERE = Path(__file__).resolve().parent
GENERATORS = ("mqttload", "mqttdrain")
QUIET_SAMPLE_S = 0.5
EXIT_FAULTS = 1  # measured, and found messages of QoS 1 or 2 lost, or of QoS 2 doubled or not finished


class MeasurementError(Exception):
    """The load generator could not be built or did not come to a result."""


@dataclass(frozen=True, slots=True)
class Measurement:
    delivered_per_s: float
    published_per_s: float
    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    cpu_us_per_delivery: float | None
    broker_cpu_share: float | None
    """Cores used by the broker: 1.0 is one core."""
    generator_cpu_share: float
    """Cores used by mqttload; it has one thread, so near 1.0 it would be the bottleneck."""
    other_cpu_share: float | None
    """Cores used by everything else on the machine: the figure is worth little if this is not near 0."""
    lost: int
    duplicated: int
    out_of_order: int
    unfinished: int = 0
    """QoS 2 deliveries that the broker never released."""
    aliased: int = 0
    """Deliveries whose topic was, or set, an alias."""

    @property
    def disturbed(self) -> bool:
        return self.other_cpu_share is not None and self.other_cpu_share > OTHER_CPU_SHARE_MAX


def build_generators() -> None:
    for name in GENERATORS:
        build(HERE / f"{name}.c", HERE / "out" / name)


def build(source: Path, program: Path) -> None:
    newest = max(path.stat().st_mtime for path in (source, *source.parent.glob("*.h")))
    if program.exists() and program.stat().st_mtime >= newest:
        return
    program.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["cc", "-O2", "-o", str(program), str(source)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise MeasurementError("no C compiler: apt-get install gcc libc6-dev") from error
    if done.returncode:
        raise MeasurementError(f"cannot compile {source.name}:\n{done.stderr}")


def wait_for_quiet(patience_s: float) -> None:
    """Return once the rest of the machine is idle, or when patience ends: the measurement will say so."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before, began = machine_cpu_s(), time.monotonic()
        time.sleep(QUIET_SAMPLE_S)
        if machine_cpu_s() - before <= OTHER_CPU_SHARE_MAX * (time.monotonic() - began):
            return


def measure(peer: Peer, contender: Contender, data_root: Path, seconds: float, warmup_s: float) -> Measurement:
    with start(peer, data_root, contender.durability) as broker:
        return run_load(broker, contender.mqtt_version, contender.load, seconds, warmup_s)


def run_load(
    broker: Running,
    mqtt_version: int,
    load: Load | Drain,
    seconds: float,
    warmup_s: float,
    on_event: Callable[[str], None] | None = None,
) -> Measurement:
    """One run of a load generator against a broker that runs. `on_event` hears of the begin and the end of the measured
    window as they happen."""
    command = [
        str(HERE / "out" / load.program), "--host", broker.host, "--port", str(broker.port),
        *(("--port5", str(broker.port5)) if broker.port5 else ()), "--version", str(mqtt_version),
        *load.arguments(seconds, warmup_s),
    ]  # fmt: skip
    cpu_at: dict[str, tuple[float | None, float]] = {}
    complaints: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            # The generator bounds its own time, so this loop ends; its one line of output fits the pipe.
            for line in process.stderr:
                if line.startswith("event "):
                    name = line.split()[1]
                    cpu_at[name] = (broker.cpu_s(), machine_cpu_s())
                    if on_event is not None:
                        on_event(name)
                else:
                    complaints.append(line.strip())
            output = process.stdout.read()
        except BaseException:
            process.kill()  # else leaving the `with` would wait for its end
            raise
    if process.returncode not in (0, EXIT_FAULTS):
        raise MeasurementError("; ".join(complaints) or f"{load.program} ended with code {process.returncode}")
    return _measurement(json.loads(output), cpu_at["measure-start"], cpu_at["measure-end"])


def _measurement(
    result: dict[str, object], cpu_start: tuple[float | None, float], cpu_end: tuple[float | None, float]
) -> Measurement:
    latency = result["latency_us"] or dict.fromkeys(("p50", "p90", "p99"))  # a drain has none
    assert isinstance(latency, dict)

    def number(name: str) -> float:
        value = result[name]
        assert isinstance(value, int | float)
        return value

    cpu_us = share = others = None
    if cpu_start[0] is not None and cpu_end[0] is not None:
        broker_s = cpu_end[0] - cpu_start[0]
        share = broker_s / number("seconds")
        whole = (cpu_end[1] - cpu_start[1]) / number("seconds")
        others = max(0.0, whole - share - number("generator_cpu_share"))
        if number("delivered"):
            cpu_us = broker_s * 1e6 / number("delivered")
    return Measurement(
        delivered_per_s=number("delivered_per_s"),
        published_per_s=number("published_per_s"),
        p50_us=latency["p50"],
        p90_us=latency["p90"],
        p99_us=latency["p99"],
        cpu_us_per_delivery=cpu_us,
        broker_cpu_share=share,
        generator_cpu_share=number("generator_cpu_share"),
        other_cpu_share=others,
        lost=int(number("lost")),
        duplicated=int(number("duplicated")),
        out_of_order=int(number("out_of_order")),
        unfinished=int(number("unfinished")) if "unfinished" in result else 0,
        aliased=int(number("aliased")) if "aliased" in result else 0,
    )


def median_of(runs: Sequence[Measurement]) -> Measurement:
    """Each metric's own median, over the undisturbed runs if there are any.

    Faults are summed over all runs, since one is one too many.
    """
    every = runs
    runs = [run for run in every if not run.disturbed] or every

    def mid(values: list[float]) -> float:
        return statistics.median(values)

    def mid_known(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return Measurement(
        delivered_per_s=mid([run.delivered_per_s for run in runs]),
        published_per_s=mid([run.published_per_s for run in runs]),
        p50_us=mid_known([run.p50_us for run in runs]),
        p90_us=mid_known([run.p90_us for run in runs]),
        p99_us=mid_known([run.p99_us for run in runs]),
        cpu_us_per_delivery=mid_known([run.cpu_us_per_delivery for run in runs]),
        broker_cpu_share=mid_known([run.broker_cpu_share for run in runs]),
        generator_cpu_share=mid([run.generator_cpu_share for run in runs]),
        other_cpu_share=mid_known([run.other_cpu_share for run in runs]),
        lost=sum(run.lost for run in every),
        duplicated=sum(run.duplicated for run in every),
        out_of_order=sum(run.out_of_order for run in every),
        unfinished=sum(run.unfinished for run in every),
        aliased=sum(run.aliased for run in every),
    )
