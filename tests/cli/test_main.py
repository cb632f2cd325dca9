"""The command line as a whole: version, help, errors and exit codes, in this process and in a new one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hookline as hl
from tests.support.needs import needs
from tests.support.quick_python import quick_python

typer = needs("typer")
from typer.testing import CliRunner  # noqa: E402

from hookline._cli import main as cli  # noqa: E402

# Runs a command without one extra: a module that is None in sys.modules can't be imported.
WITHOUT = """
import sys
sys.modules[{missing!r}] = None
sys.argv = ["hookline", *{arguments!r}]
import hookline
from hookline._cli import main as cli
cli.main()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(hl.__file__).parent.parent)}


def hookline() -> list[str]:
    """Return the words that start the command in a process of its own."""
    return [*quick_python(), "-m", "hookline"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli.application(), arguments)
    assert result.exit_code == 0, result.output
    return result.output


def run_without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing, arguments=arguments)
    return subprocess.run([*quick_python(), "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def acts(tmp_path):
    path = tmp_path / "acts.safetensors"
    hl.Cache({f"h.{number}": torch.ones(2, 3) for number in range(400)}).save(path)
    return path


def test_the_version_is_that_of_the_package():
    assert invoke("--version") == f"hookline {hl.__version__}\n"


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of Unix")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_one_that_nobody_reads(closed, acts):
    line = shlex.join([*hookline(), "show", str(acts)])
    done = subprocess.run(f"{line} {closed}", shell=True, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_that_is_not_here_is_told_as_such():
    pytest.importorskip("transformers")
    result = CliRunner().invoke(cli.application(), ["scan", "./nosuch"])
    assert result.exit_code == 1
    assert "can't load './nosuch': there is no such folder here" in result.output


def test_help_lists_every_command_with_its_first_line():
    output = invoke("--help")
    assert len(cli.COMMANDS) == 7
    for name in cli.COMMANDS:
        (line,) = [line for line in output.splitlines() if line.startswith(f"  {name} ")]
        assert line.endswith(".")  # Not truncated.
        assert not line.endswith("...")


@pytest.mark.process
def test_a_command_imports_only_what_it_needs(acts):
    names = ("transformers", "hookline._harvest", "hookline._cli.demo_command", "rich")
    code = f"""
import sys
from contextlib import suppress
from hookline._cli import main as cli
sys.argv = ["hookline", "show", {str(acts)!r}, "--json"]
with suppress(SystemExit):
    cli.main()
print([name for name in {names} if name in sys.modules])
"""
    done = subprocess.run([*quick_python(), "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_options_of_the_demo_have_defaults():
    shown = " ".join(invoke("demo", "--help").split())
    assert "12" in shown
    assert "hookline-demo.html" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("demo", "--epochs", "0"), "--epochs"),
        (("show",), "FILE"),
        (("show", "x", "--att", "h"), "--att"),
        (("capture", "m:f", "--to", "x"), "--at"),
        (("nonsense",), "nonsense"),
    ],
    ids=" ".join,
)
def test_a_line_that_makes_no_sense_is_status_2_and_says_what_is_wrong(arguments, told):
    result = CliRunner().invoke(cli.application(), arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert told in result.stderr


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Return a function that gives a command line which raises an error: the model's function raises it."""

    def command(error: str) -> list[str]:
        (tmp_path / "failing.py").write_text(
            f"from hookline.errors import HooklineError\n\ndef model():\n    raise {error}\n"
        )
        monkeypatch.chdir(tmp_path)
        return ["scan", "failing.py:model", "--shape", "1"]

    return command


def test_an_error_of_hookline_is_one_line_and_status_1(failing, monkeypatch, capsys):
    words = failing("""HooklineError("'h.3.mpl' matches nothing in GPT;\\ndid you mean 'h.3.mlp'?")""")
    monkeypatch.setattr(sys, "argv", ["hookline", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    assert capsys.readouterr() == ("", "hookline: 'h.3.mpl' matches nothing in GPT; did you mean 'h.3.mlp'?\n")


def test_any_other_error_is_one_line_too_and_debug_shows_the_traceback(failing):
    words = failing('RuntimeError("shapes\\ndo not fit")')
    result = CliRunner().invoke(cli.application(), words)
    assert result.exit_code == 1
    assert result.stderr == "hookline: RuntimeError: shapes do not fit (--debug shows where)\n"
    with pytest.raises(RuntimeError, match="shapes"):
        CliRunner().invoke(cli.application(), [*words, "--debug"], catch_exceptions=False)


def test_an_interrupted_command_is_status_130(failing):
    result = CliRunner().invoke(cli.application(), failing("KeyboardInterrupt()"))
    assert result.exit_code == 130
    assert result.stderr == "hookline: interrupted\n"


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="needs a system where Ctrl-C is a signal to one process")
def test_a_real_interrupt_is_one_line_and_status_130(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef model():\n    open('began', 'w').close()\n    time.sleep(60)\n"
    )
    line = [*hookline(), "scan", "slow:model", "--shape", "1"]
    process = subprocess.Popen(line, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "hookline: interrupted\n"


@pytest.mark.process
@pytest.mark.parametrize("options", [[], ["--json"]], ids=" ".join)
def test_a_reader_that_has_seen_enough_ends_it_quietly(options, acts):
    shown = subprocess.Popen(
        [*hookline(), "show", str(acts), *options], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert shown.stdout is not None
    assert shown.stderr is not None
    shown.stdout.read(10)
    shown.stdout.close()
    errors = shown.stderr.read()
    shown.stderr.close()
    assert shown.wait(60) in (0, cli.PIPE_CLOSED)
    assert errors == b""


@pytest.mark.process
def test_signs_that_a_stream_has_no_code_for_do_no_harm(acts):
    done = subprocess.run(
        [*hookline(), "show", str(acts)],
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert b"400 sites" in done.stdout
    assert b"\n????" in done.stdout


@pytest.mark.process
def test_the_shell_completes_commands_and_options():
    asked = {
        **ENVIRONMENT,
        "_HOOKLINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "hookline show --st",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(hookline(), env=asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["--stats"]


@pytest.mark.process
def test_the_script_for_a_shell_is_shown():
    pytest.importorskip("shellingham")
    line = f"'{sys.executable}' -m hookline --show-completion; true"  # The shell is hookline's parent process.
    done = subprocess.run(["bash", "-c", line], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True)
    assert "complete -o default -F _hookline_completion hookline" in done.stdout


@pytest.mark.process
def test_without_typer_one_line_says_how_to_install_it():
    done = run_without("typer", "demo")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "hookline: the command line needs typer: pip install 'hookline[cli]'\n"


@pytest.mark.process
def test_the_demo_without_scikit_learn_is_one_line_too():
    done = run_without("sklearn", "demo")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "hookline: the demo needs scikit-learn: pip install 'hookline[demo]'\n"


def test_commands_are_plain_functions_that_typer_can_read():
    names = [command.name for command in cli.application().registered_commands]
    assert isinstance(cli.application(), typer.Typer)
    assert names == list(cli.COMMANDS)
