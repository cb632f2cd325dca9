"""The command line: `hookline scan`, `capture`, `show`, `explore`, `harvest`, `compare`, `demo`.

Each command is a function in `commands.py`, and its work is in a file of its own. This file puts the commands together,
and imports nothing that imports torch: `commands.py` says why. Every error becomes one line on stderr and an exit
status: 1 if hookline raised, something failed or two models part, 2 if the command line is invalid, 130 if it was
interrupted. typer is an optional dependency: `main` checks that it is installed.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Collection
from typing import Annotated, Any, TextIO

from hookline import __version__
from hookline.errors import HooklineError, HooklineWarning

try:
    import typer
except ImportError:
    HAS_TYPER = False
else:
    HAS_TYPER = True

COMMANDS = ("scan", "capture", "show", "explore", "harvest", "compare", "demo")
EXAMPLES = """
hookline scan gpt2/
hookline capture gpt2/ --at '**.mlp' --text "the cat sat" \\
    --to acts.safetensors
hookline show acts.safetensors --stats
hookline explore acts.safetensors
"""
_OPTION = re.compile(r"\b(?P<name>[a-z]\w+)=(?P<quote>['\"]?)(?P<value>\w+)?(?P=quote)")
_LOOK = re.compile(r"`?hl\.(sites|scan)\(model(, (?P<at>'[^']*'|\"[^\"]*\"))?(, [\w=.]+(\(\.\.\.\))?)*\)`?")
FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141  # The last two are 128 + the signal, as in shells.
FAILED_IN = {"compare": 2}  # Its status 1 says that the models part, as that of diff does.


def main() -> None:
    """Run the command line."""
    if not HAS_TYPER:
        sys.exit("hookline: the command line needs typer: pip install 'hookline[cli]'")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # A closed stream, as in `hookline show x >&-`.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # A terminal that can't show a character still gets the rest.
    try:
        names_command = sys.argv[1:2] != [] and sys.argv[1] in COMMANDS
        application(own_options=not names_command)(prog_name="hookline")
    finally:
        _flush()


def application(*, own_options: bool = True) -> typer.Typer:
    """Return the application with all commands.

    Args:
        own_options: Add --help, --install-completion and --show-completion. They stand in the place of a command, and
            to read them typer imports pydantic, which takes as long as all the rest of `hookline show --help`.
    """
    from hookline._cli import commands  # It needs typer, which may not be installed.

    app = typer.Typer(
        add_completion=own_options, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    app.callback(cls=commands.CommandGroup, add_help_option=own_options, epilog=_examples(EXAMPLES))(options)
    for name in COMMANDS:
        work = guarded(getattr(commands, name), FAILED_IN.get(name, FAILED))
        app.command(name, cls=commands.Command, epilog=_examples(commands.EXAMPLES[name]))(work)
    return app


def guarded(command: Callable[..., None], failed: int = FAILED) -> Callable[..., None]:
    """Return a command that reports an error in one line, or as a traceback with --debug."""
    hints = typing.get_type_hints(command, include_extras=True)
    debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

    @functools.wraps(command)
    def run(*, debug: bool, **asked: Any) -> None:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                command(**asked)
                sys.stdout.flush()
            except KeyboardInterrupt:
                _leave("interrupted", INTERRUPTED)
            except BrokenPipeError:
                _close_pipe()
                raise typer.Exit(PIPE_CLOSED) from None
            except (typer.Exit, typer.Abort):
                raise
            except Exception as error:
                if debug:
                    raise
                _leave(_line(error, asked), failed)

    signature = inspect.signature(command)
    known = [one.replace(annotation=hints[one.name]) for one in signature.parameters.values()]
    added = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=debug)
    run.__signature__ = signature.replace(parameters=[*known, added])  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, "debug": debug}
    return run


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=lambda asked: _show_version(asked), is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Look inside and reach into any PyTorch model."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hookline {__version__}")
        raise typer.Exit


def _examples(lines: str) -> str:
    """Return examples for the end of a help text; after \b, typer does not rewrap the lines."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines.strip().splitlines())])


def _line(error: Exception, asked: Collection[str]) -> str:
    """Return an error as one line; an error that is not hookline's gets its type, and a hint at --debug."""
    text = " ".join(str(error).split())
    if isinstance(error, HooklineError):
        text = _in_shell(text)
        return _OPTION.sub(lambda found: _spelled(found) if found["name"] in asked else found[0], text)
    return f"{type(error).__name__}: {text[:300]} (--debug shows where)"


def _in_shell(text: str) -> str:
    """Return a message with the Python call that it suggests replaced by the shell command."""
    return _LOOK.sub(lambda found: f"`hookline scan MODEL{' --at ' + found['at'] if found['at'] else ''}`", text)


def _spelled(found: re.Match[str]) -> str:
    """Return an option as it is written on the command line."""
    name = f"--{found['name'].replace('_', '-')}"
    return name if found["value"] in (None, "True") else f"{name} {found['value']}"


def _leave(text: str, status: int) -> None:
    typer.echo(f"hookline: {text}", err=True)
    raise typer.Exit(status)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a hookline warning as one line, without the line of code; write others as Python does."""
    if issubclass(category, HooklineWarning):
        typer.echo(f"hookline: warning: {_in_shell(' '.join(str(message).split()))}", err=True)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _flush() -> None:
    """Flush stdout. Say nothing if the reader of a pipe is gone, as in `hookline show x | head`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _close_pipe()
        sys.exit(PIPE_CLOSED)


def _close_pipe() -> None:
    """Discard the rest of the output: Python would complain when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
