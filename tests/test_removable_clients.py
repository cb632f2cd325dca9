"""Deleting the folder of a client deletes its feature: all others work as before, unless they are built on it."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from pathlib import Path

import pytest

import hookline as hl
from tests.support.needs import needs
from tests.support.quick_python import run_forked

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hookline"

# A few quick tests of each client, which need no library beside hookline's own. Where there are none, see CHECKS below.
SAMPLES = {
    "_scan": [
        "tests/scan/test_list_sites.py::test_the_table_shows_module_parameters_and_other_names",
        "tests/scan/test_scan.py::test_every_module_is_listed_in_the_order_it_begins_with_its_shape_and_parameters",
    ],
    "_jobs": [],
    "_store": [
        "tests/store/test_store.py::test_a_store_prints_as_a_table",
        "tests/store/test_store.py::test_rows_are_compared_when_they_are_read",
    ],
    "_sweep": [
        "tests/sweep/test_result.py::test_a_real_sweep_has_its_axes_and_says_how_it_was_measured",
        "tests/sweep/test_sweep_file.py::test_a_sweep_comes_back_bit_for_bit_with_its_axes_and_notes",
    ],
    "_compare": [
        "tests/compare/test_report.py::test_it_prints_the_worst_first_and_folds_repeated_blocks",
        "tests/compare/test_report.py::test_it_is_a_mapping",
    ],
    "_watch": ["tests/watch/test_watch.py::test_a_forward_without_bad_values_passes_and_gives_the_same_bits"],
    "callbacks": [],
    "_explore": ["tests/explore/test_explore.py::test_a_page_is_replaced_but_nothing_else_is"],
    "_harvest": ["tests/harvest/test_harvest.py::test_a_dtype_may_be_given_by_its_name"],
    "points": ["tests/points/test_check.py::test_a_model_whose_points_work_passes"],
    "compat": ["tests/compat/test_nice_hooks.py::test_the_examples_of_run"],
    "_cli": [],
}

KERNEL_SAMPLE = ["tests/hooks/test_hooks.py::test_hooks_act_as_soon_as_they_are_added_until_they_are_removed"]

PROGRAM = """
import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "hookline"]:
    del sys.modules[name]  # The original, which this process was started with.
for name in ("transformers", "transformer_lens"):
    sys.modules[name] = None  # They take seconds to import.
import pytest, torch
import hookline as hl

assert hl.__file__.startswith(FOLDER), hl.__file__
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
output, acts = hl.run(model, torch.ones(1, 2), capture="*")
assert [*acts] == ["0", "1"] and acts["1"].equal(output)
for name in KEPT:
    assert getattr(hl, name) is not None
for name in LOST:
    assert not hasattr(hl, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': 'hookline.* was removed"):
        getattr(hl, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from hookline import {name}")


def check_callbacks():
    with pytest.raises(hl.HooklineError, match="TrainerWatch needs transformers"):  # It imports that last.
        hl.callbacks.TrainerWatch


def check_command_line():
    from hookline._cli import main
    from typer.testing import CliRunner

    shown = CliRunner().invoke(main.application(), ["--help"]).output
    assert all(command in shown for command in ("scan", "show", "harvest", "compare")), shown


for check in CHECKS:
    globals()[check]()
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "--basetemp", FOLDER + "/temporary", *SAMPLES]))
"""
CHECKS = {"callbacks": "check_callbacks", "_cli": "check_command_line"}
WITHOUT_NAMES = {"_jobs"}  # It has no public name: the samples of sweeps and harvests run it.
PACKAGES = {"callbacks", "compat", "points"}  # Clients that are themselves public names.
# Where each public name is defined; the errors are defined in hookline itself.
HOMES = {name: getattr(hl, name).__module__ for name in hl.__all__ if getattr(hl, name).__module__ != "hookline"}


def clients() -> list[str]:
    """Return the clients, each after those that it may be built on; test_architecture.py compares this list."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("The clients: ")[2]
    return re.findall(r"`([^`]+)`", text.partition("\n\n")[0])


CLIENTS = clients()


@functools.cache
def used_by(client: str) -> frozenset[str]:
    """Return the earlier clients whose modules or public names a client uses."""
    found = set()
    for path in (SOURCE / client).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module == "hookline":
                modules = [HOMES.get(alias.name, f"hookline.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hl":
                modules = [HOMES.get(node.attr, f"hookline.{node.attr}")]
            found |= {module.split(".")[1] for module in modules if module.startswith("hookline.")}
    return frozenset(found & {*CLIENTS[: CLIENTS.index(client)]})


def built_on(removed: str) -> set[str]:
    """Return a client and those that use it, directly or through others."""
    found = {removed}
    for client in CLIENTS:
        if used_by(client) & found:
            found.add(client)
    return found


def test_every_client_has_a_sample():
    assert [*SAMPLES] == CLIENTS
    assert {name for name, tests in SAMPLES.items() if not tests} == {*CHECKS} | WITHOUT_NAMES


def test_what_is_built_on_a_client_is_found():
    assert {"_store", "_harvest", "_cli"} <= built_on("_store")
    assert "compat" in built_on("_scan"), "it calls hl.sites"
    assert built_on("_cli") == {"_cli"}


@pytest.mark.process
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_can_be_deleted(client, tmp_path):
    needs("typer")
    gone = built_on(client)
    shutil.copytree(SOURCE, tmp_path / "hookline")
    for name in gone:
        shutil.rmtree(tmp_path / "hookline" / name)
    homes = {name: home.split(".")[1] for name, home in HOMES.items()} | {name: name for name in PACKAGES}
    kept = [name for name in CLIENTS if name not in gone]
    given = {
        "FOLDER": str(tmp_path),
        "KEPT": {name for name, home in homes.items() if home not in gone},
        "LOST": {name for name, home in homes.items() if home in gone},
        "CHECKS": [CHECKS[name] for name in kept if name in CHECKS],
        "SAMPLES": [*KERNEL_SAMPLE, *(test for name in kept for test in SAMPLES[name])],
    }
    code = "".join(f"{name} = {value!r}\n" for name, value in given.items()) + PROGRAM
    done = run_forked(code, ROOT, path=(tmp_path,))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
