"""The comparison with other libraries: their scripts run and give right values, and the table is complete."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import run
from benchmarks.peers.table import TASKS, behind, questions, short, sweeps_of, task_table, text_of

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
KNOW_GPT2 = ("TransformerLens", "pyvene", "torchlens")  # These treat GPT-2 differently from other models.
SOURCE = Path(__file__).parents[1] / "src"
# Importing a peer takes seconds: `make test` runs the script that imports none, and `make fuzz` all of them.
SCRIPTS = [
    pytest.param(one, id=one.script, marks=[pytest.mark.deep] if one.requirements else []) for one in run.SOURCES
]


def installed(source: run.Source) -> bool:
    """Return True if the peer is installed."""
    try:
        return all([importlib.metadata.version(name.split("==")[0]) for name in source.requirements])
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("source", SCRIPTS)
def test_a_peers_script_still_runs_and_gives_right_values(source: run.Source, tmp_path: Path) -> None:
    if not installed(source):
        pytest.skip(f"needs {' and '.join(source.requirements)}")
    kept = str(tmp_path / "result.json")
    command = [sys.executable, str(PEERS / source.script), "--quick", "--skip", "compiled", "--json", kept]
    if source.name not in KNOW_GPT2:
        command += ["--model", "mlp"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["cells"]["mlp"]) == set(TASKS)
    for cells in result["cells"].values():
        assert {task: cell["wrong"] for task, cell in cells.items() if cell.get("wrong")} == {}
        assert {task: cell["failed"] for task, cell in cells.items() if "failed" in cell} == {}
    assert result["answers"]["as found"]
    assert source.name in text_of([result])


@pytest.mark.process
@pytest.mark.deep
@pytest.mark.parametrize(
    "source", [source for source in run.SOURCES if source.sweeps], ids=lambda source: source.script
)
def test_a_peers_sweep_still_runs_and_gives_right_values(source: run.Source, tmp_path: Path) -> None:
    if not installed(source):
        pytest.skip(f"needs {' and '.join(source.requirements)}")
    kept = str(tmp_path / "sweep.json")
    command = [sys.executable, str(PEERS / source.script), "--quick", "--only", "sweep", "--json", kept]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "sweep.json").read_text())
    assert f"{source.name}: " in sweeps_of([result])


@pytest.mark.process
def test_hookline_is_right_where_torchs_own_hooks_are_not() -> None:
    script = "import json; from questions import yardsticks; import tasks; print(json.dumps(yardsticks()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(PEERS)])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["hookline"].values()) == {"yes"}
    assert [name for name, answer in found["raw torch hooks"].items() if answer != "yes"] == [
        "in place",
        "compiled",
        "as found, error",
    ]


def result_of(peer: str, **cells: Any) -> dict[str, Any]:
    """Return the result of a peer's run: `one_shot=1.5` is that task's ratio; a text says why the peer can't do it."""
    return {
        "peer": peer,
        "version": "1.0",
        "note": "",
        "answers": {"in place": "no"},
        "cells": {"mlp": {task.replace("_", " "): cell_of(ratio) for task, ratio in cells.items()}},
    }


def cell_of(ratio: float | str) -> dict[str, Any]:
    """Return the figures of a task for which hookline's ratio is 1.6."""
    ratios = {"bare": 1.0, "bare again": 1.0, "raw torch hooks": 1.7, "hookline": 1.6}
    if isinstance(ratio, str):
        return {"cannot": ratio, "ratios": {name: spread(value) for name, value in ratios.items()}}
    ratios["peer"] = ratio
    return {"wrong": "", "ratios": {name: spread(value) for name, value in ratios.items()}}


def spread(ratio: float) -> list[float]:
    """Return a median with quartiles close to it."""
    return [ratio, ratio - 0.01, ratio + 0.01]


def test_a_task_where_a_peer_is_ahead_is_named() -> None:
    results = [result_of("swift", one_shot=1.2), result_of("slow", one_shot=2.5), result_of("close", one_shot=1.595)]
    assert behind(results).splitlines()[1:] == [
        "mlp, attach, capture all, detach: swift 1.20, hookline 1.60",
        "mlp, attach, capture all, detach: close 1.59, hookline 1.60; the quartiles overlap",
    ]
    assert behind([result_of("slow", one_shot=2.5)]).splitlines()[1:] == ["nowhere"]


def test_a_task_that_a_peer_has_not_is_a_dash_with_the_reason() -> None:
    results = [result_of("whole", stop=0.6), result_of("part", stop="no early stop")]
    assert short(results, "mlp").splitlines()[-1].endswith("| 1 | 1.70 | 1.60 | 0.60 | – |")
    row = task_table(results, "mlp", "stop").splitlines()[-1]
    assert row.startswith("part ")
    assert row.endswith("no early stop")


def test_a_wrong_value_is_told() -> None:
    result = result_of("off", patch=1.1)
    result["cells"]["mlp"]["patch"]["wrong"] = "output is off by 3"
    assert "1.10*" in short([result], "mlp")
    assert task_table([result], "mlp", "patch").splitlines()[-1].endswith("wrong: output is off by 3")


def test_a_peer_that_fails_is_a_row_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('it fell over')")
    broken = run.Source("broken", str(tmp_path / "broken.py"), ("broken==2.0",))
    monkeypatch.setattr(run, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(run.Source, "python", Path(sys.executable))
    broken.folder.mkdir()
    result = run.measured(broken, "--quick")
    assert result["failed"] == "it fell over"
    text = text_of([result, result_of("well", one_shot=2.0)])
    assert "broken 2.0, well 1.0" in text
    assert [line for line in text.splitlines() if line.startswith("broken ")][-1].endswith("it fell over")


def test_a_peer_whose_sweep_fails_is_a_line_and_the_others_stay() -> None:
    failed = {"peer": "broken", "version": "2.0", "failed": "it fell over", "note": ""}
    text = sweeps_of([failed, {"peer": "well", "version": "1.0", "sweep": "well; the table\n", "note": ""}])
    assert "broken 2.0, well 1.0" in text
    assert {"broken: it fell over", "well; the table"} <= set(text.splitlines())


def test_questions_are_answered_by_everyone_that_ran() -> None:
    shown = questions([{**result_of("one"), "yardsticks": {"hookline": {"in place": "yes"}}}, result_of("two")])
    assert [line.split() for line in shown.splitlines() if line.startswith("  ")][:3] == [
        ["hookline", "yes"],
        ["one", "no"],
        ["two", "no"],
    ]


def test_the_readme_shows_the_short_table_of_the_last_run() -> None:
    table = (PEERS / "table.txt").read_text().split("the short table of the README\n")[1].split("\n\n")[0]
    assert table in (PEERS.parents[1] / "README.md").read_text()
