"""The command line: `hookline demo`, `hookline --version`.

A command is one small function in `COMMANDS`: its docstring is the help, its parameters are the options. typer is an
extra, so nothing here touches it before `main` has made sure that it is there.
"""

from __future__ import annotations

import sys
from typing import Annotated

from hookline import __version__
from hookline.demo import EPOCHS
from hookline.demo import main as run_demo
from hookline.errors import HooklineError

try:
    import typer
except ImportError:
    HAS_TYPER = False
else:
    HAS_TYPER = True


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="How many times the net sees the training digits.")] = EPOCHS,
) -> None:
    """Train a small net on handwritten digits and look inside it: offline, on the CPU, under a minute."""
    run_demo(epochs)


COMMANDS = (demo,)


def main() -> None:
    """Run the command line. What hookline refuses is one line on stderr and exit status 1, no traceback."""
    if not HAS_TYPER:
        sys.exit("hookline: the command line needs typer: pip install 'hookline[cli]'")
    try:
        application()(prog_name="hookline")
    except HooklineError as error:
        sys.exit(f"hookline: {error}")


def application() -> typer.Typer:
    """Put the commands together."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(options)
    for command in COMMANDS:
        app.command()(command)
    return app


def show_version(asked: bool) -> None:
    """Print the version and leave."""
    if asked:
        typer.echo(f"hookline {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Look inside and reach into any PyTorch model."""


if __name__ == "__main__":
    main()
