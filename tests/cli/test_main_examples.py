"""Every example in a command's help and on the page about the command line is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import hookline
from hookline._cli import main as cli
from tests.errors.wording import says
from tests.support.command_line import lines_of, run, said
from tests.support.documentation import blocks, run_page
from tests.support.quick_python import quick_python

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"


def help_of(*command: str) -> str:
    return said(*command, "--help")


def examples(text: str) -> list[list[str]]:
    """Return the commands at the end of a help text."""
    return lines_of(text.partition("Examples:\n")[2])


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.COMMANDS)], ids=lambda names: " ".join(names))
def test_the_examples_of_a_help_text_work_as_they_stand(command, folder):
    found = examples(help_of(*command))
    assert found
    for line in found:
        if "--to" in line:  # The file that an example writes must not exist yet.
            (folder / line[line.index("--to") + 1]).unlink(missing_ok=True)
        if "store/" in line and "--to" not in line and not (folder / "store").exists():
            said("harvest", "gpt2/", "--data", "texts.txt", "--at", "transformer.h.*", "--to", "store")
        assert line[0] == "hookline"
        result = run(*line[1:])
        assert result.exit_code == 0, (line, result.stderr)
        if "--to" in line and "--dry-run" not in line:
            assert (folder / line[line.index("--to") + 1]).exists()


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.COMMANDS)], ids=lambda names: " ".join(names))
def test_help_fits_80_columns_and_ends_with_examples(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(*command)
    assert max(map(len, text.splitlines())) <= 80
    assert text.partition("Examples:\n")[2].strip().startswith("hookline ")
    assert "<str>" not in text.partition("Options:")[2].partition("Examples:")[0]


def shell(code: str, folder: Path) -> str:
    """Run a block of shell commands, and return what they write to stdout."""
    if not re.search(r"[|>$;]", code):
        lines = [run(*words[1:]) for words in lines_of(code)]
        assert all(result.exit_code == 0 for result in lines), [result.stderr for result in lines]
        return "".join(result.stdout for result in lines)
    command = f'hookline() {{ {shlex.join(quick_python())} -m hookline "$@"; }}\n{code}'
    source = str(Path(hookline.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_every_shell_example_of_the_page_gives_what_it_shows(empty):
    text = PAGE.read_text(encoding="utf-8")
    run_page(PAGE, text)  # The page's Python blocks create the models and files for the commands.
    found = blocks(text)
    seen = 0
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "sh":
            continue
        shown = shell(block.code, empty)
        seen += 1
        if after is not None and after.language == "text":
            assert shown.rstrip("\n") == after.code.rstrip("\n"), block.code
    assert seen >= 8


@pytest.mark.process
def test_an_example_that_goes_wrong_is_noticed(empty):
    with pytest.raises(AssertionError, match=says("can't be read")):
        shell("hookline show nothing.safetensors\n", empty)
    with pytest.raises(AssertionError):
        shell("hookline show nothing.safetensors | cat; false\n", empty)
