"""`hookline capture`: run a model once and save the captured values to a file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hookline as hl
from hookline._cli.inputs import InputRequest, ModelInput, add_labels, model_input, names_the_last
from hookline._cli.loss import LossFunction, asks_for_gradients, loss_of
from hookline._cli.models import ModelOptions, model_of
from hookline._cli.output import note, say, say_json, working
from hookline._cli.show_command import entry_of
from hookline.errors import HooklineError, HooklineWarning, NeverFired, NotCaptured, StoreError


def run_capture(
    wanted: InputRequest,
    second: InputRequest,
    model_options: ModelOptions,
    at: Sequence[str],
    to: Path,
    *,
    loss: str | None,
    keep: str,
    overwrite: bool,
    json: bool,
) -> None:
    """Run a model on an input, and on a second one if there is one, and write what was captured."""
    left = names_the_last(at)
    runs = [(to, replace(wanted, left=left))]
    if second:
        runs.append((beside(to), replace(second, left=left)))
    with working():
        found = capture_to_files(runs, model_options, at, loss, keep, overwrite)
    if json:
        entries = [{"file": str(path), "sites": [entry_of(acts, site) for site in acts]} for path, acts in found]
        say_json(entries[0] if len(entries) == 1 else {**entries[0], "against": entries[1]})
    else:
        for path, acts in found:
            say(acts)
            note(f"kept in {path}")


def capture_to_files(
    runs: Sequence[tuple[Path, InputRequest]],
    model_options: ModelOptions,
    at: Sequence[str],
    loss: str | None,
    keep: str,
    overwrite: bool,
) -> list[tuple[Path, hl.Cache]]:
    """Run a model on each input, and write the values to files. Files that can't be written are refused first."""
    for path, wanted in runs:
        _check(path, wanted, overwrite)
    calls = _calls(keep)
    backward = loss_of(loss, at)
    if loss is not None and not asks_for_gradients(at):
        near = f"{at[0].partition(':')[0].partition('[')[0]}:grad_output"
        raise HooklineError(f"--loss is for gradients, and no --at names one; add --at '{near}', or leave --loss out")
    net = model_of(runs[0][1].model, model_options)()
    entries = [add_labels(model_input(wanted, net), loss) for _, wanted in runs]
    found = [
        (path, capture_values(net, entry, at, backward, calls)) for (path, _), entry in zip(runs, entries, strict=True)
    ]
    for path, acts in found:
        acts.save(path, overwrite=overwrite)
    return found


def capture_values(
    net: nn.Module, entry: ModelInput, at: Sequence[str], loss: LossFunction | None = None, keep: Any = "last"
) -> hl.Cache:
    """Return the values of one run."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", HooklineWarning)
        try:
            with torch.set_grad_enabled(loss is not None), hl.capture(net, *at, keep=keep) as acts:
                output = entry.call(net)
                if loss is not None:
                    loss(output).backward()
        except NeverFired as error:
            raise NeverFired(_hinted(str(error))) from error
    for where in at:
        _check_passed(where, acts, [str(one.message) for one in warned if one.category is HooklineWarning])
    for one in warned:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return acts


def _check_passed(where: str, acts: hl.Cache, warned: Sequence[str]) -> None:
    """Raise if none of the places that a pattern matches fired."""
    try:
        acts.select(where)
    except NotCaptured as error:
        raise NeverFired(f"nothing passed {where!r}: {_hinted(warned[0]) if warned else error}") from None


def _hinted(text: str) -> str:
    """Replace the Python code that an error message suggests with the command line option."""
    return re.sub(
        r"Choose the eager implementation: model\.set_attn\w+\(.*?when the model is made",
        "Choose --attention eager",
        text,
    )


def beside(path: Path) -> Path:
    """Return the file of the second run: acts.against.safetensors beside acts.safetensors."""
    return path.with_name(f"{path.stem}.against{path.suffix}")


def _check(path: Path, wanted: InputRequest, overwrite: bool) -> None:
    if not wanted:
        raise HooklineError("the model needs an input: give --input FILE, --text WORDS or --shape SIZES")
    if path.exists() and not overwrite:
        raise StoreError(f"{str(path)!r} exists already; --overwrite replaces it")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"can't be written: there is no folder {str(path.parent)!r}"
        raise StoreError(f"{str(path)!r} {what}; give another --to")


def _calls(keep: str) -> Any:
    if keep.isdecimal():
        return int(keep)
    if keep not in ("last", "all"):
        raise HooklineError(f"--keep {keep}: give last, all, or a number")
    return keep
