"""How each broker under measurement is started, watched and stopped.

A `Peer` is a recipe; `start()` turns it into a `Running` broker on a free loopback port with a data folder of
its own. Only processes started here are ever stopped, by their pid.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scenarios import Contender

HERE = Path(__file__).resolve().parent
READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
INSTALL_HINT = "apt-get install mosquitto nats-server"
LOG_TAIL_BYTES = 2000


class BrokerError(Exception):
    """A broker could not be found, started or kept running."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a recipe needs to know to write its command line."""

    port: int
    port5: int
    """For MQTT 5, where a broker takes it on a port of its own."""
    data: Path
    durability: str


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    command: Callable[[Place], list[str]] | None
    """None: the broker runs already, at `address`."""
    version: str
    mqtt_versions: tuple[int, ...] = (4, 5)
    lacks: tuple[str, ...] = ()
    """What loads may need and it has not."""
    two_ports: bool = False
    """MQTT 5 on a port of its own."""
    source: Path | None = None
    """Tidegate: the checkout's src folder."""
    address: tuple[str, int] | None = None
    pid: int | None = None

    def lacking(self, contender: Contender) -> str | None:
        """Why it cannot take part; None: it can."""
        missing = sorted(contender.load.needs().intersection(self.lacks))
        if contender.mqtt_version not in self.mqtt_versions:
            missing.insert(0, "MQTT 5" if contender.mqtt_version == 5 else "MQTT 3.1.1")
        return f"no {', no '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    host: str
    port: int
    pid: int | None
    data: Path | None = None
    port5: int | None = None

    def cpu_s(self) -> float | None:
        """CPU seconds of the broker's process tree so far; None where the pid is unknown."""
        return None if self.pid is None else process_tree_cpu_s(self.pid)


def process_tree_cpu_s(pid: int) -> float:
    """utime + stime of the process and its descendants, with those it has waited for (cutime, cstime)."""
    ticks = 0
    pending = [pid]
    while pending:
        current = pending.pop()
        try:
            # The second field, the command in parentheses, may itself hold spaces and parentheses.
            stat = Path(f"/proc/{current}/stat").read_text().rpartition(")")[2].split()
            for task in Path(f"/proc/{current}/task").iterdir():
                pending.extend(int(child) for child in (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile: its parent's cutime has it
        ticks += sum(int(field) for field in stat[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """CPU seconds of the whole machine so far, all cores, without idle and waiting for the disk."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (
        int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# ---- recipes ----


# The newest version that was seen to build and run; its lock file names a crate that newer compilers refuse.
RUMQTTD_VERSION = "0.20.0"
RUMQTTD_FOLDER = HERE / "out" / "rumqttd"
RUMQTTD_BUILD_TIMEOUT_S = 1800.0


def _tidegate_command(place: Place) -> list[str]:
    return [
        sys.executable, "-m", "tidegate.cli", "broker",
        "--data", str(place.data), "--port", str(place.port), "--durability", place.durability,
    ]  # fmt: skip


def _mosquitto_program() -> str | None:
    # Debian puts it in sbin, which is not on everybody's PATH.
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def _mosquitto_command(place: Place) -> list[str]:
    config = place.data / "mosquitto.conf"
    # 0 means "no limit": mosquitto must neither drop messages nor hold back for a small in-flight window.
    config.write_text(
        f"listener {place.port} 127.0.0.1\n"
        "allow_anonymous true\npersistence false\nset_tcp_nodelay true\n"
        "max_queued_messages 0\nmax_queued_bytes 0\nmax_inflight_messages 0\n"
    )
    return [_mosquitto_program() or "mosquitto", "-c", str(config)]


def _nats_command(place: Place) -> list[str]:
    config = place.data / "nats.conf"
    # MQTT in nats-server needs a server name and JetStream; -1 is "any free port" for its own protocol.
    config.write_text(
        "host: 127.0.0.1\nport: -1\nserver_name: bench\n"
        f'jetstream {{ store_dir: "{place.data}/jetstream" }}\n'
        f"mqtt {{ host: 127.0.0.1, port: {place.port}, max_ack_pending: 65535 }}\n"
    )
    return ["nats-server", "-c", str(config)]


def _rumqttd_command(place: Place) -> list[str]:
    config = place.data / "rumqttd.toml"
    # The limits of its own example, with a window that does not hold it back.
    connections = "connection_timeout_ms = 60000\nmax_payload_size = 20480\nmax_inflight_count = 10000\n"
    config.write_text(
        "id = 0\n[router]\nid = 0\nmax_connections = 10010\nmax_outgoing_packet_count = 200\n"
        "max_segment_size = 104857600\nmax_segment_count = 10\n"
        + "".join(
            f'[{name}.1]\nname = "{name}"\nlisten = "127.0.0.1:{port}"\nnext_connection_delay_ms = 1\n'
            f"[{name}.1.connections]\n{connections}dynamic_filters = true\n"
            for name, port in (("v4", place.port), ("v5", place.port5))
        )
    )
    return [str(_rumqttd_program()), "-c", str(config)]


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0].strip() if lines else "unknown"


def tidegate_of(name: str, checkout: Path) -> Peer:
    """The broker of a checkout, run with this interpreter and what is installed there beside it."""
    source = checkout / "src"
    if not (source / "tidegate" / "cli.py").exists():
        raise BrokerError(f"{name}: no src/tidegate/cli.py in {checkout}")
    version = f"tidegate {importlib.metadata.version('tidegate')}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # an archive of the source has no commit to name
        asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
        version += f" ({subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()})"
    return Peer(name, _tidegate_command, version, source=source.resolve())


def _tidegate() -> Peer:
    return tidegate_of("tidegate", HERE.parent)


def _mosquitto() -> Peer:
    program = _mosquitto_program()
    if program is None:
        raise BrokerError(f"mosquitto: not installed; {INSTALL_HINT}")
    return Peer("mosquitto", _mosquitto_command, _first_line([program, "-h"]))


def _nats() -> Peer:
    if shutil.which("nats-server") is None:
        raise BrokerError(f"nats: nats-server is not installed; {INSTALL_HINT}")
    version = _first_line(["nats-server", "--version"])
    return Peer("nats", _nats_command, version, (4,), ("QoS 2", "shared subscriptions"))


def _rumqttd_program() -> str | None:
    built = RUMQTTD_FOLDER / "bin" / "rumqttd"
    return str(built) if built.exists() else shutil.which("rumqttd")


def _rumqttd() -> Peer:
    program = _rumqttd_program()
    if program is None:
        program = _build_rumqttd()
    return Peer("rumqttd", _rumqttd_command, _first_line([program, "--version"]), two_ports=True)


def _build_rumqttd() -> str:
    """Once: what is built stays in bench/out, and so does the word that it could not be."""
    failed = RUMQTTD_FOLDER / "build.log"
    if shutil.which("cargo") is None:
        raise BrokerError("rumqttd: NOT MEASURED, it is not installed and there is no cargo to build it with")
    if failed.exists():
        raise BrokerError(f"rumqttd: NOT MEASURED, it did not build; {shown(failed)} says why, delete it to try again")
    print(f"Building rumqttd {RUMQTTD_VERSION} with cargo, once: this takes minutes", file=sys.stderr, flush=True)
    RUMQTTD_FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["cargo", "install", "rumqttd", "--version", RUMQTTD_VERSION, "--root", str(RUMQTTD_FOLDER)]
    try:
        with failed.open("wb") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, timeout=RUMQTTD_BUILD_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise BrokerError(f"rumqttd: NOT MEASURED, cargo could not build it; {shown(failed)} says why") from error
    failed.unlink()
    return str(RUMQTTD_FOLDER / "bin" / "rumqttd")


def shown(path: Path) -> Path:
    return path.relative_to(HERE.parent)


KNOWN: dict[str, Callable[[], Peer]] = {
    "tidegate": _tidegate,
    "mosquitto": _mosquitto,
    "nats": _nats,
    "rumqttd": _rumqttd,
}


def peer_of_argument(text: str) -> Peer:
    """`name=host:port[,pid=PID]`, or `name=command with {port} and {data}`."""
    name, separator, rest = text.partition("=")
    if not separator or not name or not rest:
        raise BrokerError(f"--broker {text}: takes name=host:port[,pid=PID] or name='command {{port}}'")
    if "{port}" in rest:

        def command(place: Place) -> list[str]:
            filled = rest.replace("{port}", str(place.port)).replace("{data}", str(place.data))
            return shlex.split(filled)

        return Peer(name, command, rest)
    where, _, pid_text = rest.partition(",pid=")
    host, _, port_text = where.rpartition(":")
    try:
        address = (socket.gethostbyname(host), int(port_text))
        pid = int(pid_text) if pid_text else None
    except (OSError, ValueError) as error:
        raise BrokerError(f"--broker {text}: {error}") from error
    return Peer(name, None, where, address=address, pid=pid)


# ---- life ----


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            raise BrokerError(f"{name} ended with code {process.returncode} before it listened:\n{tail}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise BrokerError(f"{name} did not listen on its port within {READY_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def start(
    peer: Peer, data_root: Path, durability: str, fill: Callable[[Path], None] | None = None
) -> Iterator[Running]:
    """Run the broker on a data folder of its own for the duration of the `with`; the folder is deleted after. It is
    empty, unless `fill` puts something there."""
    if peer.command is None:
        assert peer.address is not None
        yield Running(peer.name, *peer.address, peer.pid)
        return
    data_root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{peer.name}-", dir=data_root) as folder:
        place = Place(_free_port(), _free_port(), Path(folder).resolve(), durability)
        if os.geteuid() == 0:
            # Started by root, mosquitto drops to a user of its own, who must still read its configuration.
            place.data.chmod(0o755)
        if fill is not None:
            fill(place.data)
        log = place.data / "broker.log"
        with log.open("wb") as sink:
            try:
                command = peer.command(place)
                environment = os.environ | ({"PYTHONPATH": str(peer.source)} if peer.source else {})
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment
                )
            except OSError as error:
                raise BrokerError(f"{peer.name}: {error}") from error
        try:
            _wait_ready(peer.name, place.port, process, log)
            port5 = place.port5 if peer.two_ports else None
            if port5:
                _wait_ready(peer.name, port5, process, log)
            yield Running(peer.name, "127.0.0.1", place.port, process.pid, place.data, port5)
        finally:
            _stop(process)


def filesystem_of(path: Path) -> str:
    """The type of the file system that holds `path`: a log on tmpfs would measure no disk."""
    real = path.resolve()
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, fs_type, *_ = line.split()
        if real.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, fs_type
    return kind
