"""The command line, in process and as a real one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import hookline
from hookline import cli
from hookline.errors import HooklineError

# A module that is None in sys.modules can't be imported: an environment in which that extra is missing.
WITHOUT = """
import sys
sys.modules[{missing!r}] = None
sys.argv = ["hookline", *{arguments!r}]
import hookline
from hookline import cli
cli.main()
"""


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli.application(), arguments)
    assert result.exit_code == 0, result.output
    return result.output


def run_without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_the_version_is_that_of_the_package():
    assert invoke("--version") == f"hookline {hookline.__version__}\n"


def test_help_lists_every_command_with_its_first_line():
    output = invoke("--help")
    assert len(cli.COMMANDS) == 2
    assert "demo" in output
    assert "handwritten digits" in output
    assert "harvest" in output
    assert "keep what passes" in output


def test_demo_passes_its_options_on(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "run_demo", lambda *options: asked.append(options))
    invoke("demo", "--epochs", "3", "--to", "digits.html")
    invoke("demo")
    assert asked == [(3, "digits.html"), (12, "hookline-demo.html")]


def test_a_demo_without_epochs_is_refused():
    result = CliRunner().invoke(cli.application(), ["demo", "--epochs", "0"])
    assert result.exit_code == 2
    assert "--epochs" in result.output


def test_an_error_of_hookline_is_one_line_and_status_1(monkeypatch, capsys):
    def refuse(epochs, to):
        raise HooklineError("'h.3.mpl' matches nothing in GPT; did you mean 'h.3.mlp'?")

    monkeypatch.setattr(cli, "run_demo", refuse)
    monkeypatch.setattr(sys, "argv", ["hookline", "demo"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == "hookline: 'h.3.mpl' matches nothing in GPT; did you mean 'h.3.mlp'?"


def test_without_typer_one_line_says_how_to_install_it():
    done = run_without("typer", "demo")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "hookline: the command line needs typer: pip install 'hookline[cli]'\n"


def test_the_demo_without_scikit_learn_is_one_line_too():
    done = run_without("sklearn", "demo")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "hookline: the demo needs scikit-learn: pip install 'hookline[demo]'\n"


def test_commands_are_plain_functions_that_typer_can_read():
    names = {command.name or command.callback.__name__ for command in cli.application().registered_commands}
    assert isinstance(cli.application(), typer.Typer)
    assert names == {command.__name__ for command in cli.COMMANDS}
