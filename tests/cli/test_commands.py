"""The start of the command line: help, completion and usage errors don't wait for torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hookline as hl
from tests.support.needs import needs

needs("typer")
from hookline._cli import main as cli  # noqa: E402
from tests.support.command_line import said  # noqa: E402

# Runs the command line in a new interpreter, then writes to stderr which of these packages it has imported.
SLOW = ("torch", "numpy", "safetensors", "transformers", "rich", "pydantic")
START = f"""
import sys
sys.argv = ["hookline", *sys.argv[1:]]
from hookline._cli.main import main
try:
    main()
finally:
    print("imported:", *[name for name in {SLOW} if name in sys.modules], file=sys.stderr)
"""


def started(*arguments: str, **variables: str) -> tuple[str, str]:
    """Return what a command line writes to stdout, and the last line of stderr: the slow packages it imports."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hl.__file__).parent.parent), **variables}
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout, done.stderr.splitlines()[-1]


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [("--help",), (), ("--version",), *((name, "--help") for name in cli.COMMANDS)],
    ids=" ".join,
)
def test_help_imports_nothing_slow(arguments):
    assert started(*arguments)[1] == "imported:"


@pytest.mark.process
def test_a_usage_error_does_not_import_torch():
    assert started("show", "--rows", "many")[1] in ("imported:", "imported: pydantic")  # typer checks values with it.


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "completed"),
    [("sh", ["show"]), ("show --st", ["--stats"]), ("capture m:f --ove", ["--overwrite"])],
)
def test_completion_imports_nothing_slow(words, completed):
    position = str(len(words.split()))
    variables = {"_HOOKLINE_COMPLETE": "complete_bash", "COMP_WORDS": f"hookline {words}", "COMP_CWORD": position}
    output, imported = started(**variables)
    assert (output.split(), imported) == (completed, "imported:")


@pytest.mark.process
def test_a_command_that_needs_torch_imports_it():
    assert started("show", "nothing.safetensors")[1].startswith("imported: torch")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_examples(name):
    assert re.search(rf"^ *hookline {name} ", said(name, "--help"), flags=re.MULTILINE)
