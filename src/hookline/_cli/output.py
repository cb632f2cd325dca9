"""Options that several commands share."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hookline._kernel import WRITTEN_BITS, describe
from hookline._tables import Table, Tabular


@contextmanager
def working() -> Iterator[None]:
    """Send what models and their modules print to stderr, programs and C code of theirs too: stdout is the result's."""
    with redirect_stdout(sys.stderr), _redirected_file():
        yield


@contextmanager
def _redirected_file() -> Iterator[None]:
    """Send what is written to the file of stdout to that of stderr, where both are files."""
    try:
        out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        kept = os.dup(out)
    except (AttributeError, OSError, ValueError):
        yield
        return
    try:
        os.dup2(err, out)
        yield
    finally:
        os.dup2(kept, out)
        os.close(kept)


def say(result: Any, *, whole: bool = False) -> None:
    """Write a result: a table in a terminal as rich draws it, all else as plain text."""
    shown = replace(result._table(), every="--all") if isinstance(result, Tabular) else result
    if whole and isinstance(shown, Table):
        shown = shown.text(whole=True)
    if isinstance(shown, Table) and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console().print(shown)
    else:
        sys.stdout.write(f"{shown}\n")


def say_json(result: Any) -> None:
    """Write a result for a script: one line of JSON."""
    sys.stdout.write(json.dumps(plain(result), ensure_ascii=False, allow_nan=False) + "\n")


def note(text: str) -> None:
    """Say something beside the result."""
    sys.stderr.write(f"hookline: {text}\n")


def plain(value: Any) -> Any:
    """Return a value as JSON has it, every number exact: NaN and Inf, which JSON lacks, as the texts nan, inf, -inf.

    So are integers of thousands of digits, which Python does not write in decimal: they are hexadecimal.

    >>> plain({"h.0": (torch.tensor([1.5, float("nan")]), 2)})
    {'h.0': [[1.5, 'nan'], 2]}
    """
    if isinstance(value, Tensor):
        return plain(_numbers(value))
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, int) and value.bit_length() > WRITTEN_BITS:
        return hex(value)
    return value if value is None or isinstance(value, (bool, int, str)) else describe(value)


def _numbers(tensor: Tensor) -> Any:
    """Return the elements as nested lists."""
    dense = tensor.detach().cpu()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    return (dense.dequantize() if dense.is_quantized else dense).tolist()


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="module:name (a function, class or model), or a folder, name or config.json of transformers.",
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="What goes in: .safetensors (tensors by argument), .npy, texts (.txt, .jsonl), an image or a folder of "
        "them, or module:function.",
    ),
]
Text = Annotated[list[str] | None, typer.Option(metavar="WORDS", help="A text to go in. May be given several times.")]
Shape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZES", help="Numbers of this shape go in: 1,3,224,224 or ids=2,6:int64. Once for each argument."
    ),
]
Processor = Annotated[
    str | None, typer.Option(metavar="NAME", help="The tokenizer or image processor, if not the model's.")
]
Column = Annotated[str | None, typer.Option(metavar="NAME", help="The column or JSON field of the data.")]
Samples = Annotated[int | None, typer.Option(metavar="N", min=1, help="Take so many texts or images, the first ones.")]
MaxLength = Annotated[int | None, typer.Option(metavar="N", min=1, help="Cut texts after so many tokens.")]
Attention = Annotated[
    str | None, typer.Option(metavar="KIND", help="eager, sdpa, ...: eager makes the pattern, at '**/softmax'.")
]
Dtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Run the model in this: bfloat16, float64, ...")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="Where the model runs; a GPU if there is one.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that a checkpoint brings along.")
]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="LOSS",
        help="Run backward, too, from: lm (each token predicts the next), sum (of the output), or module:function of "
        "the output.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every row of a table: no blocks shown as one, none left out.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON for a script, and nothing else.")]
