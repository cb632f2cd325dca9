"""`hookline scan`: show what every module of a model would do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

import hookline as hl
from hookline._cli.inputs import InputRequest, ModelInput, example_input, model_input
from hookline._cli.models import ModelOptions, UserModel, model_of
from hookline._cli.output import say, say_json, working
from hookline._scan.list_sites import Sites
from hookline._scan.scan import Scan
from hookline._tables import table_of
from hookline.errors import HooklineError


def run_scan(wanted: InputRequest, model_options: ModelOptions, at: Sequence[str], *, whole: bool, json: bool) -> None:
    """Scan a model and write the report."""
    with working():
        net, report = scan_model(wanted, model_options, at)
    if json:
        say_json({"model": type(net).__name__, **as_json(report)})
    else:
        say(report, whole=whole)


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
