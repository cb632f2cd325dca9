"""The comparison of two sources finds planted differences, and none between equal sources."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.properties.differ import ROOT, Dead, Worker, first_difference, observed
from tests.properties.observations import case_of
from tests.properties.programs import Program
from tests.properties.worlds import Case

pytestmark = pytest.mark.slow
SEEDS = range(60)
# Added to `hookline/__init__.py`. It uses only public names, so it fits any kernel.
PLANTED = """
import os, time, warnings

_edit, _skip, _sites = map(__getattr__, ("edit", "skip", "sites"))
_warn = warnings.warn

def edit(model, where, function, **options):
    return _edit(model, where, lambda *given: _more(function(*given)), **options)

def _more(value):
    return value * 1.000001 if hasattr(value, "is_floating_point") else value

def skip(model, *given):
    vars(model)["left"] = True
    return _skip(model, *given)

def sites(model, where, **options):
    if where == "crash":
        os._exit(7)
    if where == "hang":
        time.sleep(600)
    return _sites(model, where, **options)

def _silent(message, category=UserWarning, *given, **options):
    if category is not HooklineWarning:
        _warn(message, category, *given, **options)

warnings.warn = _silent
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Worker]:
    with Worker(ROOT / "src") as worker:
        yield worker


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    copy = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "src", copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    with open(copy / "hookline" / "__init__.py", "a") as file:
        file.write(PLANTED)
    with Worker(copy) as worker:
        yield worker


@pytest.fixture(scope="module")
def missing(planted: Worker, here: Worker) -> list[str]:
    """The lines that a case shows here, but not with the planted differences."""
    shown = [both for _, both in observed([planted, here], SEEDS)]
    assert any(first_difference(*both) for both in shown)
    return [line for theirs, ours in shown for line in ours if line not in theirs]


def test_equal_sources_show_no_difference(here: Worker) -> None:
    with Worker(ROOT / "src") as same:
        found = {seed: first_difference(*both) for seed, both in observed([same, here], SEEDS)}
    assert found == dict.fromkeys(SEEDS, "")


@pytest.mark.parametrize("label", ["output of forward", "gradients", "left on the model", "warned"])
def test_wrong_values_a_forgotten_attribute_and_a_missing_warning_are_found(missing: list[str], label: str) -> None:
    assert any(line.startswith(label) for line in missing)


@pytest.mark.parametrize(("site", "end"), [("crash", "died with exit status 7"), ("hang", "took longer than 0.5 s")])
def test_a_case_that_ends_the_process_is_a_difference(here: Worker, planted: Worker, site: str, end: str) -> None:
    list(observed([planted], [0]))  # So that the process has started, if the one before ended.
    planted.limit = 0.5
    [(_, (theirs, ours))] = observed([planted, here], [listing(site)])
    planted.limit = 60.0
    assert theirs == [f"the process {end}"]
    assert f"the process {end}" in first_difference(theirs, ours)


def test_a_source_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hookline").mkdir()
    (tmp_path / "hookline" / "__init__.py").write_text("raise SystemExit(5)")
    with Worker(tmp_path) as worker, pytest.raises(Dead, match="exit status 5"):
        worker.wait_until_ready()


def listing(site: str) -> Case:
    case = next(case for case in map(case_of, SEEDS) if case is not None)
    return dataclasses.replace(case, program=Program((), (("sites", site),)))
