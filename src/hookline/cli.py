"""The command line: `hookline demo`, `hookline harvest`, `hookline --version`.

A command is one small function in `COMMANDS`: its docstring is the help, its parameters are the options. typer is an
extra, so nothing here touches it before `main` has made sure that it is there.
"""

from __future__ import annotations

import sys
from typing import Annotated

from hookline import __version__
from hookline.demo import EPOCHS, PAGE
from hookline.demo import main as run_demo
from hookline.errors import HooklineError
from hookline.harvesting import command

try:
    import typer
except ImportError:
    HAS_TYPER = False
else:
    HAS_TYPER = True


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="How many times the net sees the training digits.")] = EPOCHS,
    to: Annotated[str, typer.Option(help="Where to write the page to browse.")] = PAGE,
) -> None:
    """Train a small net on handwritten digits and look inside it: offline, on the CPU, under a minute."""
    run_demo(epochs, to)


def harvest(
    model: Annotated[str, typer.Argument(help="A name or folder of transformers, or module:function.")],
    data: Annotated[
        str, typer.Option(help="Texts (a line each, .jsonl, .parquet), a folder of images, or module:function.")
    ],
    at: Annotated[list[str], typer.Option(help="A place, as in 'h.*.mlp'. May be given several times.")],
    to: Annotated[str, typer.Option(help="The folder of the store, or s3://... and the like.")],
    rows: Annotated[
        str | None, typer.Option(help="What a row is: tokens (of texts, without padding), or batch.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast floats to this: bfloat16, float16, ...")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 8,
    processor: Annotated[str | None, typer.Option(help="The tokenizer or image processor, if not the model's.")] = None,
    column: Annotated[str | None, typer.Option(help="The column or JSON field of the data.")] = None,
    targets: Annotated[str | None, typer.Option(help="The column (or file) that a decoder is given.")] = None,
    also: Annotated[list[str] | None, typer.Option(help="An entry of the batch to keep, as in input_ids.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Cut texts after so many tokens.")] = None,
    generate: Annotated[int | None, typer.Option(min=1, help="Let the model write so many tokens, too.")] = None,
    sort_by_length: Annotated[bool, typer.Option("--sort-by-length", help="Batch texts of like length.")] = False,
    unit: Annotated[int | None, typer.Option(min=1, help="Samples in a unit of work.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs; a GPU if there is one.")] = None,
    skip_errors: Annotated[
        bool, typer.Option("--skip-errors", help="Leave out samples that fail, and list them.")
    ] = False,
    engine: Annotated[str | None, typer.Option(help="Who runs it: ray. By default, this process.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="How many processes Ray is to have.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a store that is there.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Add to a store that is complete.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much it would be.")] = False,
) -> None:
    """Run a dataset through a model, and keep what passes at some places on disk."""
    asked = dict(locals())
    command.show_progress()
    for text in command.run(command.Task(**{**asked, "also": also or ()})):
        typer.echo(text)


COMMANDS = (demo, harvest)


def main() -> None:
    """Run the command line. What hookline refuses is one line on stderr and exit status 1, no traceback."""
    if not HAS_TYPER:
        sys.exit("hookline: the command line needs typer: pip install 'hookline[cli]'")
    try:
        application()(prog_name="hookline")
    except HooklineError as error:
        sys.exit(f"hookline: {' '.join(str(error).split())}")


def application() -> typer.Typer:
    """Put the commands together."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(options)
    for one in COMMANDS:
        app.command()(one)
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
