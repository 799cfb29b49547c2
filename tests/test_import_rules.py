"""A line of code knows its room: which package may import what, and which may touch sockets and files.

The imports are read from the source, so a lazy import inside a function counts like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "tidegate"
MODULES = sorted(SOURCE.rglob("*.py"))

BASE = {"errors", "limits"}

# Room → the rooms and modules of the project that it may import besides itself.
ROOMS = {
    "wire": BASE,
    "router": BASE,
    "log": BASE,
    "session": BASE | {"wire"},
    "delivery": BASE | {"session", "router", "log", "wire", "ports", "counters"},
    "broker": BASE | {"session", "router", "log", "wire", "delivery", "ports", "config", "counters"},
    "counters": set(),
    "ports": BASE | {"log"},
    "client": BASE | {"wire"},
    "pipeline": BASE
    | {"config", "client", "router.filters", "session.changes", "session.skip", "session.stored"}
    | {"log.run", "log.frame", "log.segment", "log.index", "log.recovery", "log.snapshot", "log.files.disk"},
    "errors": set(),
    "limits": set(),
    "config": BASE,
    "config_sources": BASE | {"config", "router.filters"},
}

# Anything that waits for, or talks to, the world outside the process.
NETWORK = {"asyncio", "socket", "selectors", "ssl", "uvloop", "socketserver", "select"}
NETWORK_ROOMS = {"server", "adapters", "client", "cli", "commands"}

FILE_ROOMS = {
    "log.files",
    "log.snapshot",
    "adapters",
    "server",
    "cli",
    "commands",
    "config_sources",
    "pipeline",
}
OPENERS = {
    "open",
    "os.open",
    "io.open",
    "os.fdopen",
    "os.write",
    "os.replace",
    "os.rename",
    "os.unlink",
    "os.remove",
}
OPENERS |= {"os.mkdir", "os.makedirs", "os.truncate", "os.ftruncate", "os.fsync", "os.fdatasync", "os.link"}
PATH_METHODS = {"write_text", "write_bytes", "read_text", "read_bytes", "unlink", "mkdir", "rmdir", "touch"}
PATH_METHODS |= {"symlink_to", "hardlink_to", "iterdir", "glob", "rglob"}


def name_of(path: Path) -> str:
    """`log.files` for src/tidegate/log/files.py; `log` for its __init__."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, rooms: set[str]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def imports(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    """The full dotted names that a module imports, relative ones resolved. `from a import b` is `a.b`."""
    package = ["tidegate", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, node.lineno) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{start}.{each.name}", node.lineno) for each in node.names)


def own_imports(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    """What it imports of the project, without the project's name."""
    for name, line in imports(tree, path):
        if name == "tidegate" or name.startswith("tidegate."):
            yield name.removeprefix("tidegate").removeprefix("."), line


def foreign_rooms(tree: ast.Module, path: Path) -> list[str]:
    """Imports that the module's room does not allow, as `name (line)`."""
    name = name_of(path)
    room = name.partition(".")[0]
    if room not in ROOMS:
        return []
    return [
        f"{each} (line {line})"
        for each, line in own_imports(tree, path)
        if not within(each, ROOMS[room] | {room}) and not each.startswith("__version__")
    ]


def network_imports(tree: ast.Module, path: Path) -> list[str]:
    if within(name_of(path), NETWORK_ROOMS):
        return []
    return [
        f"{each} (line {line})" for each, line in imports(tree, path) if each.partition(".")[0] in NETWORK
    ]


def file_accesses(tree: ast.Module, path: Path) -> list[str]:
    if within(name_of(path), FILE_ROOMS):
        return []
    return [
        f"{ast.unparse(node.func)} (line {node.lineno})"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func) in OPENERS
            or (isinstance(node.func, ast.Attribute) and node.func.attr in PATH_METHODS)
        )
    ]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_room_may_know(path: Path) -> None:
    assert foreign_rooms(parsed(path), path) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_outer_rooms_know_the_network(path: Path) -> None:
    assert network_imports(parsed(path), path) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_rooms_that_keep_files_touch_them(path: Path) -> None:
    assert file_accesses(parsed(path), path) == []


@pytest.mark.parametrize("path", [each for each in MODULES if each.name == "__init__.py"], ids=name_of)
def test_a_package_says_what_belongs_in_it(path: Path) -> None:
    docstring = ast.get_docstring(parsed(path))
    assert docstring and docstring.strip()


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("wire/bad.py", "from tidegate.session import machine", ["session.machine (line 1)"]),
        ("wire/bad.py", "from ..session.machine import Machine", ["session.machine.Machine (line 1)"]),
        ("wire/bad.py", "def f():\n    import tidegate.log.run", ["log.run (line 2)"]),
        (
            "pipeline/bad.py",
            "from tidegate.log.files import SegmentedLog",
            ["log.files.SegmentedLog (line 1)"],
        ),
        ("pipeline/good.py", "from tidegate.log.frame import parse_header", []),
        ("session/good.py", "from tidegate import errors\nfrom ..wire import Publish", []),
        ("wire/good.py", "from .primitives import varint", []),
    ],
)
def test_the_rule_for_rooms_finds_what_it_should(file: str, source: str, found: list[str]) -> None:
    assert foreign_rooms(ast.parse(source), SOURCE / file) == found


@pytest.mark.parametrize(
    ("file", "source", "count"),
    [
        ("router/bad.py", "import asyncio", 1),
        ("broker/bad.py", "from asyncio import sleep", 1),
        ("server/good.py", "import asyncio", 0),
    ],
)
def test_the_rule_for_the_network_finds_what_it_should(file: str, source: str, count: int) -> None:
    assert len(network_imports(ast.parse(source), SOURCE / file)) == count


@pytest.mark.parametrize(
    ("file", "source", "count"),
    [
        ("log/bad.py", "open('x')", 1),
        ("log/bad.py", "import os\nos.open('x', 0)", 1),
        ("session/bad.py", "path.write_bytes(b'')", 1),
        ("log/files.py", "open('x')", 0),
    ],
)
def test_the_rule_for_files_finds_what_it_should(file: str, source: str, count: int) -> None:
    assert len(file_accesses(ast.parse(source), SOURCE / file)) == count
