"""`hl.sweep`: measure a model with one place at a time changed, to see which places matter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline._jobs.ray_pool import check_engine
from hookline._kernel import NOTHING, Where, describe, refuse_flags_or_none, refuse_numbers
from hookline._store.storage import full_path
from hookline._sweep.changes import Change
from hookline._sweep.job import SweepJob
from hookline._sweep.portions import Measured, PackCounts
from hookline._sweep.result import Sweep, with_values
from hookline._sweep.share import sweep_shared
from hookline._tables import count
from hookline.errors import HooklineError


def sweep(
    model: nn.Module | Callable[..., Any],
    where: Where | Mapping[Any, Any],
    metric: Callable[..., Any] | list[Callable[..., Any]],
    *,
    run: Any = None,
    patch: Any = NOTHING,
    edit: Callable[[Any], Any] | None = None,
    skip: bool = False,
    against: Any = None,
    metric_at: Where | None = None,
    batch: int | None = None,
    progress: bool | None = None,
    to: str | os.PathLike[str] | None = None,
    share: bool | None = None,
    engine: str | None = None,
    workers: int | None = None,
) -> Sweep:
    """Measure a model with one place at a time changed: set to zero by default.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    >>> found = sweep(model, "*", lambda output: output.norm(), run=(Tensor(1, 4).fill_(1.0),))
    >>> list(found), found["2"]
    (['0', '1', '2'], 0.0)

    With `run=`, many places share a run: the batch holds a copy of the inputs for each. Modules that are over before
    the first change are not run again. The result is that of one run for each place.

    Args:
        where: The places; `[*]` and `/*` stand for all places that a first run finds. Or a Cache or mapping from site
            to value, for example from another run: its values are put in one at a time.
        metric: With `run=`, a function of the model's output, which returns a number or a tensor. It gets the output
            for each place by itself. For several batches, also a list of functions, one for each. Without `run=`, a
            function without arguments that runs the model.
        run: What the model is called with: a tuple of arguments, or a dict of keywords. A list of these is several
            batches, whose measurements are joined.
        patch: The value to put in instead of zero. "mean" is the mean over the rows of the batch, "resample" the value
            of another row.
        edit: A function whose result replaces the value that passes.
        skip: Skip each module: it returns its input.
        against: Where the values come from that are put in: the arguments of another run, as for `run`, or a Cache;
            or for `patch="mean"` a Store.
        metric_at: A site whose value the metric gets instead of the output. What comes after it is not computed.
        batch: How many copies of the inputs a run may have, the unchanged one included; 1 runs each place alone. By
            default, as many as memory allows.
        progress: Whether to show a progress bar; None shows it in a terminal.
        to: A folder, or a URL that fsspec can open, for what was measured. The same call goes on where it stopped.
        share: Divide the places among the processes of a launcher, such as torchrun. None does so if each of them has
            the whole model.
        engine: None runs in this process. "ray" runs on Ray, which gets the model, or a function that makes it.
        workers: How many processes Ray starts. None starts one for each GPU or, if there are none, each CPU.
    """
    refuse_flags_or_none(progress=progress, share=share)
    check_engine(engine, workers)
    if batch is not None:
        refuse_numbers(1, batch=batch)
    if to is not None and not isinstance(to, (str, os.PathLike)):
        raise HooklineError(f"to= is a folder or a URL, not {describe(to)}")
    if run is None:
        _refuse_without_run(metric_at=metric_at, batch=batch)
    runs = _each_run(run)
    sources = _each_run(against) if isinstance(against, list) and run is not None else [against] * len(runs)
    if len(sources) != len(runs):
        raise HooklineError(f"run= has {len(runs)} batches and against= has {len(sources)}; give one for each")
    where = list(where) if isinstance(where, Iterator) else where  # It is read for each batch.
    changes = [Change(where, patch, edit, skip, source) for source in sources]
    job = SweepJob(model, metric, runs, changes, metric_at, batch, may_make=engine == "ray")
    shared = sweep_shared(job, None if to is None else full_path(to), share, engine, workers, progress)
    if shared is None:
        labels = [f"sweep {number} of {len(runs)}" if len(runs) > 1 else "sweep" for number in range(1, len(runs) + 1)]
        shared = [job.sweeper(number).sweep(label, progress) for number, label in enumerate(labels)]
    results = [_result(measured, str(change)) for measured, change in zip(shared, changes, strict=True)]
    return _joined(results) if len(results) > 1 else results[0]


def _result(measured: Measured, change: str) -> Sweep:
    """Return the result of one batch."""
    notes = [*measured.counts.notes, *([_how(measured.counts)] if measured.counts.packed else [])]
    return Sweep(measured.base, measured.values, change, dimensions=measured.dimensions, notes=notes)


def _how(counts: PackCounts) -> str:
    """Return a note on how cells were packed."""
    exact = ", bit for bit"
    if counts.rounding:
        exact = f" to {counts.rounding:.1g} of the size of its elements: another size of batch is rounded otherwise"
    runs = f"{count(counts.packed, 'place')} in {count(counts.runs, 'run')}"
    return f"{runs}; an unchanged copy in each came out as in a run of its own{exact}"


def _each_run(run: Any) -> list[Any]:
    """Return the batches in `run=`: a list of tuples or dicts is several."""
    if not isinstance(run, list):
        return [run]
    if not run or not all(isinstance(one, (tuple, Mapping)) for one in run):
        raise HooklineError(
            "a list is several batches, each a tuple of arguments or a dict of keywords, as in [(ids,), (others,)]; if "
            "the model takes a list, give it in a tuple: ([...],)"
        )
    return run


def _refuse_without_run(**given: Any) -> None:
    for name, one in given.items():
        if one is not None:
            raise HooklineError(f"{name}= needs run=, with what the model is called with")


def _joined(results: list[Sweep]) -> Sweep:
    """Return the measurements of several batches as one: for each place, those of all batches one after the other."""
    first = results[0]
    for other in results[1:]:
        differing = [site for site in {**first, **other} if (site in first) != (site in other)]
        if differing:
            raise HooklineError(f"'{differing[0]}' is not a place in each of the batches; give batches of one shape")
    base = _in_a_row([one.base for one in results])
    measured = {site: _in_a_row([one[site] for one in results]) for site in first}
    return with_values(first, base, measured, notes=tuple(dict.fromkeys(note for one in results for note in one.notes)))


def _in_a_row(values: list[Any]) -> Tensor:
    return torch.cat([torch.as_tensor(value).reshape(-1) for value in values])
