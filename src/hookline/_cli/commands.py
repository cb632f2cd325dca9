"""The commands: what each takes, its help and its examples. This is all that `--help` and completion need.

The work of a command is in a file of its own: that of `scan` in `scan_command.py`. A command imports its work when it
runs, and torch with it. Importing torch takes a second or more, which nobody who presses TAB should wait for. So this
file and `options.py` import nothing that imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hookline._cli.options import (
    EPOCHS,
    PAGE,
    All,
    Attention,
    Column,
    Device,
    Dtype,
    Input,
    Json,
    Loss,
    MaxLength,
    Model,
    Processor,
    Samples,
    Shape,
    Text,
    TrustRemoteCode,
)

EXAMPLES = {
    "scan": """
hookline scan gpt2/
hookline scan gpt2/config.json --at 'transformer.h.0.attn/*' \\
    --attention eager
hookline scan mine:net --shape 1,3,32,32
hookline scan mine:net --input batch.safetensors --json
""",
    "capture": """
hookline capture gpt2/ --at 'transformer.h.*' --text "the cat sat" \\
    --to acts.safetensors
hookline capture gpt2/ --at '**/softmax' --attention eager \\
    --input texts.txt --to maps.safetensors
hookline capture gpt2/ --at '**.mlp' --at '**.mlp:grad_output' --loss lm \\
    --input texts.txt --to gradients.safetensors
hookline capture mine:net --at 'blocks.*[:, 0]' --input batch.npy \\
    --to first.safetensors --json
""",
    "show": """
hookline show acts.safetensors
hookline show acts.safetensors --at 'transformer.h.*' --stats
hookline show acts.safetensors --at 'transformer.h.1[0, -1]' --values
hookline show store/ --stats --json
""",
    "explore": """
hookline explore acts.safetensors
hookline explore acts.safetensors --against other.safetensors \\
    --model gpt2/ --to both.html
hookline explore gpt2/ --text "the cat sat" --against-text "the dog sat" \\
    --loss lm --to cats.html
hookline explore store/ --no-open
hookline explore acts.html
""",
    "harvest": """
hookline harvest gpt2/ --data texts.txt --at 'transformer.h.*' --to store/
hookline harvest gpt2/ --data texts.txt --at 'transformer.h.1[:, -1]' \\
    --to last/ --dtype bfloat16
hookline harvest gpt2/ --data pairs.jsonl --column question --at '**.mlp' \\
    --to written/ --generate 4
hookline harvest mine:net --data mine:images --at 'blocks.*' --to blocks/ \\
    --dry-run --json
""",
    "compare": """
hookline compare gpt2/ gpt2/ --attention-b eager --text "the cat sat"
hookline compare gpt2/ gpt2/ --dtype-b bfloat16 --input texts.txt --json
hookline compare mine:net mine:Net --input batch.npy --match 'stem=stem'
hookline compare acts.safetensors gpt2/ --text "the cat sat"
""",
    "demo": """
hookline demo --epochs 1 --to digits.html
""",
}


class Command(TyperCommand):
    """A command whose values are not converted while a word of it is completed: to convert, typer imports pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _unconverted(super().get_params(ctx)) if ctx.resilient_parsing else super().get_params(ctx)


class CommandGroup(TyperGroup):
    """A group of commands, completed like `Command`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _unconverted(super().get_params(ctx)) if ctx.resilient_parsing else super().get_params(ctx)


def _unconverted(parameters: list[Any]) -> list[Any]:
    """Return parameters that take each value as it is written, and call no callback."""
    for parameter in parameters:
        parameter.process_value = lambda ctx, value: value
    return parameters


def scan(
    model: Model,
    input: Input = None,
    text: Text = None,
    shape: Shape = None,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="List these places, also functions inside forwards: 'h.0.attn/*'."),
    ] = None,
    processor: Processor = None,
    column: Column = None,
    samples: Samples = None,
    max_length: MaxLength = None,
    attention: Attention = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    all: All = False,
    json: Json = False,
) -> None:
    """Show what every module of a model would do.

    The table has calls, shapes, parameters and hazards, in the order of execution. The model runs on fake tensors, so
    the weights of a checkpoint are not read. A transformers model needs no input.
    """
    from hookline._cli.inputs import InputRequest
    from hookline._cli.models import ModelOptions
    from hookline._cli.scan_command import run_scan

    trusted = trust_remote_code
    wanted = InputRequest(
        model, input, text or (), shape or (), processor, column, samples, max_length, trusted=trusted
    )
    run_scan(wanted, ModelOptions("cpu", dtype, attention, trusted), at or (), whole=all, json=json)


def capture(
    model: Model,
    at: Annotated[list[str], typer.Option(metavar="PATTERN", help="A place, as in 'h.*.mlp'. May be repeated.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: acts.safetensors.")],
    input: Input = None,
    text: Text = None,
    shape: Shape = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE", help="A second input, saved to acts.against.safetensors.")
    ] = None,
    against_text: Annotated[
        list[str] | None, typer.Option(metavar="WORDS", help="A second input as text, such as a corrupted one.")
    ] = None,
    loss: Loss = None,
    keep: Annotated[
        str, typer.Option(metavar="WHICH", help="Which call to keep if a place is called more than once: last, all, N.")
    ] = "last",
    processor: Processor = None,
    column: Column = None,
    samples: Samples = None,
    max_length: MaxLength = None,
    attention: Attention = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    json: Json = False,
) -> None:
    """Run a model once and save the captured values to a file.

    --at takes any place, including functions inside forwards and gradients. The file is a plain safetensors file:
    `hookline show`, `hookline explore` and hl.Cache.load read it.
    """
    from hookline._cli.capture_command import run_capture
    from hookline._cli.inputs import InputRequest
    from hookline._cli.models import ModelOptions

    trusted = trust_remote_code
    wanted = InputRequest(
        model, input, text or (), shape or (), processor, column, samples, max_length, trusted=trusted
    )
    second = replace(wanted, input=against, text=against_text or (), shape=())
    model_options = ModelOptions(device, dtype, attention, trusted)
    run_capture(wanted, second, model_options, at, to, loss=loss, keep=keep, overwrite=overwrite, json=json)


def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file of `capture`, or the folder of a `harvest`.")],
    at: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only these places: 'h.*[:, -1]'. May be repeated.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show mean, std, min, max, norm, zeros, NaN, Inf.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Show the numbers; in JSON, all of them.")] = False,
    rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --values, N rows of a store; 4 by default.")
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Show the finished part of an unfinished store.")] = False,
    all: All = False,
    json: Json = False,
) -> None:
    """Show what a file or store holds, as tables and numbers."""
    from hookline._cli.show_command import run_show

    run_show(file, at or (), stats=stats, values=values, rows=rows, partial=partial, whole=all, json=json)


def explore(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of `capture`, a folder of `harvest`, a MODEL, or a page.")
    ],
    to: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="The page to write; by default named after FILE.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE", help="A second run to compare: another FILE, or a MODEL's input.")
    ] = None,
    against_text: Annotated[
        list[str] | None, typer.Option(metavar="WORDS", help="A second run of a MODEL, on these words.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model of FILE, for types and parameters; it is not run.")
    ] = None,
    at: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only these places; by default every module of a MODEL.")
    ] = None,
    input: Input = None,
    text: Text = None,
    shape: Shape = None,
    loss: Loss = None,
    processor: Processor = None,
    column: Column = None,
    samples: Samples = None,
    max_length: MaxLength = None,
    attention: Attention = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="The title of the page.")] = None,
    open: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open the page; by default if there is a screen.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a page for browsing a model's values, and open it.

    The page needs no network, and can be sent to others. FILE may also be a model: it runs on --input, --text or
    --shape, and every module's output is on the page.
    """
    from hookline._cli.explore_command import run_explore
    from hookline._cli.inputs import InputRequest
    from hookline._cli.models import ModelOptions

    trusted = trust_remote_code
    wanted = InputRequest(file, input, text or (), shape or (), processor, column, samples, max_length, trusted=trusted)
    second = replace(wanted, input=against, text=against_text or (), shape=())
    model_options = ModelOptions(device, dtype, attention, trusted)
    run_explore(
        wanted, second, model_options, to=to, model=model, at=at, loss=loss, title=title, is_opened=open, json=json
    )


def harvest(
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA", help="Texts (one per line, .jsonl, .parquet), a folder of images, or module:function."
        ),
    ],
    at: Annotated[list[str], typer.Option(metavar="PATTERN", help="A place, as in 'h.*.mlp'. May be repeated.")],
    to: Annotated[str, typer.Option(metavar="FOLDER", help="The folder of the store, or s3://... and the like.")],
    rows: Annotated[
        str | None, typer.Option(metavar="ROWS", help="What a row is: tokens (of texts, no padding), or batch.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Cast floats to this: bfloat16, float16, ...")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Samples in a batch.")] = 8,
    processor: Processor = None,
    column: Column = None,
    targets: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column (or file) with the decoder's input.")
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(metavar="ENTRY", help="An entry of the batch to keep, as in input_ids.")
    ] = None,
    max_length: MaxLength = None,
    generate: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Also let the model generate N tokens.")
    ] = None,
    sort_by_length: Annotated[bool, typer.Option("--sort-by-length", help="Batch texts of similar length.")] = False,
    unit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples in a unit of work.")] = None,
    device: Device = None,
    attention: Attention = None,
    trust_remote_code: TrustRemoteCode = False,
    skip_errors: Annotated[
        bool, typer.Option("--skip-errors", help="Leave out samples that fail, and list them.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="What runs the harvest: ray. By default, this process.")
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many processes Ray starts.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished store.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Add to a store that is complete.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the estimate.")] = False,
    json: Json = False,
) -> None:
    """Run a dataset through a model and write the values to disk.

    Rows are written while the model runs. An estimate is printed first, and --dry-run stops there. --resume continues
    an interrupted run. Under torchrun the ranks share the work.
    """
    asked = {name: value for name, value in locals().items() if name != "json"}

    from hookline._cli.harvest_command import Task, run_harvest

    run_harvest(Task(**{**asked, "also": also or ()}), json=json)


def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="The model that is right; or values of one: a file of `capture`, or a store."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The model to look at, named like MODEL of other commands.")],
    input: Input = None,
    text: Text = None,
    shape: Shape = None,
    match: Annotated[
        list[str] | None,
        typer.Option(metavar="A=B", help="What stands for what: 'h.*=layers.*'; 'extra=' leaves one out. Repeatable."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="What counts as rounding, as a share of the largest element."),
    ] = None,
    processor: Processor = None,
    column: Column = None,
    samples: Samples = None,
    max_length: MaxLength = None,
    attention: Attention = None,
    attention_b: Annotated[str | None, typer.Option(metavar="KIND", help="The attention of B, if another.")] = None,
    dtype: Dtype = None,
    dtype_b: Annotated[str | None, typer.Option(metavar="DTYPE", help="The dtype of B, if another.")] = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    all: All = False,
    json: Json = False,
) -> None:
    """Find where two models part, and why.

    Both run on the same input, and each module of B also on the inputs of its counterpart in A. So the module that
    makes an error is told from those that inherit it. Without an input, the weights are compared. The exit status is 1
    if the models part.
    """
    from hookline._cli.compare_command import run_compare
    from hookline._cli.inputs import InputRequest
    from hookline._cli.models import ModelOptions

    trusted = trust_remote_code
    wanted = InputRequest(b, input, text or (), shape or (), processor, column, samples, max_length, trusted=trusted)
    ours = ModelOptions(device, dtype, attention, trusted)
    theirs = replace(ours, dtype=dtype_b or dtype, attention=attention_b or attention)
    run_compare(a, wanted, (ours, theirs), match or (), tolerance, whole=all, json=json)


def demo(
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="How many epochs the net is trained for.")] = EPOCHS,
    to: Annotated[str, typer.Option(metavar="PAGE", help="Where to write the page to browse.")] = PAGE,
) -> None:
    """Train a small net on digits and look inside it.

    It uses handwritten digits, runs offline on the CPU, and takes under a minute.
    """
    from hookline._cli.demo_command import main

    main(epochs, to)
