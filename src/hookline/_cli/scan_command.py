"""`hookline scan`: show what every module of a model would do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from torch import nn

import hookline as hl
from hookline._cli.inputs import InputRequest, ModelInput, example_input, model_input
from hookline._cli.models import ModelOptions, UserModel, model_of
from hookline._cli.options import (
    All,
    Attention,
    Column,
    Dtype,
    Input,
    Json,
    MaxLength,
    Model,
    Processor,
    Samples,
    Shape,
    Text,
    TrustRemoteCode,
)
from hookline._cli.output import say, say_json, working
from hookline._scan.list_sites import Sites
from hookline._scan.scan import Scan
from hookline._tables import table_of
from hookline.errors import HooklineError

EXAMPLES = """
hookline scan gpt2/
hookline scan gpt2/config.json --at 'transformer.h.0.attn/*' \\
    --attention eager
hookline scan mine:net --shape 1,3,32,32
hookline scan mine:net --input batch.safetensors --json
"""


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
    trusted = trust_remote_code
    wanted = InputRequest(
        model, input, text or (), shape or (), processor, column, samples, max_length, trusted=trusted
    )
    with working():
        net, report = scan_model(wanted, ModelOptions("cpu", dtype, attention, trusted), at or ())
    if json:
        say_json({"model": type(net).__name__, **as_json(report)})
    else:
        say(report, whole=all)


def scan_model(wanted: InputRequest, model_options: ModelOptions, at: Sequence[str]) -> tuple[nn.Module, Scan | Sites]:
    """Return a model and its scan. A transformers model is scanned without weights, if that works."""
    maker = model_of(wanted.model, model_options)
    if isinstance(maker, UserModel):
        net = maker()
        return net, scan_or_list(net, input_for(wanted, net), at)
    net = maker.empty()
    entry = input_for(wanted, net)
    try:
        return net, scan_or_list(net, entry, at)
    except HooklineError:
        raise
    except Exception:  # The model may need real numbers. If the input is wrong, the next line raises the error again.
        net = maker()
        return net, scan_or_list(net, entry.fitted(net), at)


def input_for(wanted: InputRequest, net: nn.Module) -> ModelInput:
    """Return the input that the options describe, or one that fits the model's config."""
    return model_input(wanted, net) if wanted else example_input(net)


def scan_or_list(net: nn.Module, entry: ModelInput, at: Sequence[str]) -> Scan | Sites:
    """Scan all modules, or list the values at some places."""
    if at:
        return hl.sites(net, *at, run=entry.run)
    return hl.scan(net, *entry.args, **(entry.kwargs or {}))


def as_json(report: Scan | Sites) -> dict[str, Any]:
    """Return a report for JSON."""
    if isinstance(report, Scan):
        modules = [{**row._asdict(), "shape": _shapes(row.shape)} for row in report]
        return {"note": report.note, "modules": modules}
    table = table_of(report)
    passing = [
        {"site": str(site), "calls": int(str(row[1])), "value": row[2], "line": row[3]}
        for site, row in zip(report, table.rows, strict=True)
    ]
    return {"note": table.title, "sites": passing}


def _shapes(text: str) -> list[list[int]]:
    """Return the shapes of a value's tensors as numbers.

    >>> _shapes("(2, 6, 16), (2,), ()")
    [[2, 6, 16], [2], []]
    """
    return [[int(size) for size in re.findall(r"\d+", shape)] for shape in re.findall(r"\(([^)]*)\)", text)]
