"""The benchmarks run, and the figures they print are meaningful."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path

import pytest

from tests.support.quick_python import run_forked

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
SHARED = {"harness", "baseline", "allocations", "formats", "patching"}  # Modules that the scripts import.
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_runs_and_a_quick_run_writes_nothing(name):
    before = {path: path.read_bytes() for path in FOLDER.glob("*.txt")}
    script = str(FOLDER / f"{name}.py")
    code = f"import runpy, sys\nsys.argv = [{script!r}, '--quick']\nrunpy.run_path({script!r}, run_name='__main__')"
    done = run_forked(code, path=(FOLDER,))
    assert done.returncode == 0, done.stderr
    assert "HooklineWarning" not in done.stderr
    date, _, rest = done.stdout.partition("\n")
    assert re.match(r"\d{4}-\d\d-\d\d, torch [\d.]+\S*, Python 3\.\d+\.\d+\S*, \d+ thread", date)
    assert len(rest.strip().splitlines()) > 2
    assert {path: path.read_bytes() for path in FOLDER.glob("*.txt")} == before


def test_make_bench_runs_every_benchmark():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"BENCHMARKS := .*%.py,(.*)\)", text).group(1).split()
    assert set(SCRIPTS) <= set(listed)


def test_every_benchmark_has_its_last_tables_beside_it():
    assert {path.stem for path in FOLDER.glob("*.txt")} >= set(SCRIPTS)


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("harness")
    sys.modules.pop("harness")


def spin(times: int):
    def run() -> None:
        for _ in range(times):
            pass

    return run


def test_twice_the_work_is_about_twice_the_time(harness):
    ratios = harness.compare({"one": spin(20_000), "two": spin(40_000)}, rounds=20)
    assert list(ratios) == ["one", "one again", "two"]
    assert 1.4 < harness.quartiles(ratios["two"])[1] < 2.8
    assert 0.7 < harness.quartiles(ratios["one again"])[1] < 1.4


def test_a_table_shows_the_median_and_the_quartiles(harness):
    table = harness.report("what", {"bare": [1.0] * 5, "hooked": [1.0, 1.1, 1.2, 1.3, 1.4]})
    assert re.search(r"hooked +1\.200 +1\.050–1\.350$", table, flags=re.MULTILINE)


def test_the_fit_finds_what_is_linear_and_what_is_not(harness, monkeypatch):
    growth = importlib.import_module("growth")
    linear = growth.fit({size: 3e-6 * size for size in (10, 20, 40, 80)})
    quadratic = growth.fit({size: 1e-6 * size**2 for size in (10, 20, 40, 80)})
    assert math.isclose(linear.exponent, 1)
    assert math.isclose(quadratic.exponent, 2)
    assert math.isclose(quadratic.r_squared, 1)
    for name in ("growth", "baseline"):
        sys.modules.pop(name)
