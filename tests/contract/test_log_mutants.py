"""Every fault is found: for each log that breaks the contract in one way, some clause fails that the log it was made of
keeps. What breaks them is in `log_mutants`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import test_commitlog_reading
import test_commitlog_refusing
import test_commitlog_state
import test_commitlog_storing
from log_drivers import MAKERS
from log_mutants import MUTANTS, Break

Clause = tuple[Any, dict[str, Any]]

MODULES = (test_commitlog_storing, test_commitlog_refusing, test_commitlog_reading, test_commitlog_state)


def clauses(kind: str) -> Iterator[Clause]:
    """Every clause that a log of this kind is held against, with its arguments."""
    for name, clause in (named for module in MODULES for named in vars(module).items()):
        if not name.startswith("test_"):
            continue
        given = {mark.args[0]: list(mark.args[1]) for mark in clause.pytestmark if mark.name == "parametrize"}
        if kind in given.pop("log"):
            for values in product(*given.values()):
                yield clause, dict(zip(given, values, strict=True))


async def keeps(clause: Clause, kind: str, folder: Path, how: Break | None) -> bool:
    """Whether a log of this kind, broken in that way, keeps the clause."""
    function, arguments = clause
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        driver = None
        try:
            if how is not None:
                how(patch)
            driver = MAKERS[kind](folder)
            if "monkeypatch" in inspect.signature(function).parameters:
                arguments = {**arguments, "monkeypatch": patch}
            await function(driver, **arguments)
        except Exception:
            return False
        finally:
            try:
                if driver is not None:
                    driver.close()
            except Exception:
                pass  # a broken log need not close
    return True


@pytest.mark.parametrize(("kind", "how"), [pytest.param(kind, how, id=name) for name, kind, how in MUTANTS])
async def test_a_log_that_breaks_the_contract_is_found_out(
    kind: str, how: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("log_drivers.PATIENCE_S", 1.0)  # what a broken log does not do is not waited for
    for n, clause in enumerate(clauses(kind)):
        if not await keeps(clause, kind, tmp_path / f"broken{n}", how) and await keeps(
            clause, kind, tmp_path / f"whole{n}", None
        ):
            return
    raise AssertionError("nobody noticed")
