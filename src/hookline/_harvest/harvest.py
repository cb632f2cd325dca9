"""`Harvest`, the plan to run a model over a dataset into a store, and `harvest`, which makes a plan and runs it."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from hookline._harvest.ray import on_ray
from hookline._harvest.resume import compared_data, not_compared
from hookline._harvest.rows_and_padding import Rule, check_rule
from hookline._harvest.run_batch import CALLS, ON_ERROR, BatchEntry, RowOptions
from hookline._harvest.run_harvest import Estimate, Job, Status, run_job, run_unit
from hookline._jobs.ray_pool import check_engine
from hookline._kernel import (
    Where,
    describe,
    device_of,
    dtype_of,
    refuse_flags,
    refuse_flags_or_none,
    refuse_numbers,
    refuse_unknown,
    short_text,
)
from hookline._store.storage import full_path
from hookline._store.store import Store
from hookline._tables import Table
from hookline.errors import HooklineError, SiteError, warn

_Arguments = ParamSpec("_Arguments")


class Harvest:
    """A plan to run a dataset through a model and to store the values at some places on disk, as rows.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval()
    >>> plan = Harvest(model, torch.ones(10, 4), "0", to="acts", batch_size=4)
    >>> print(plan.estimate())  # doctest: +ELLIPSIS
    10 samples, about 10 rows in 1 array, 320 B, of ... free, 1 unit
    >>> plan.run()["0"].shape
    torch.Size([10, 8])

    Args:
        model: A module, or a function that makes one. A function can be sent to other machines.
        data: An iterable of batches, a DataLoader, numbered samples with `batch_size`, or a function that returns one
            of these.
        where: The places, as everywhere.
        to: A folder, or a URL that fsspec can open ("s3://...").
        rows: What a row is: "batch" (a sample), "tokens" (a position that is not padding), a function of the batch that
            returns a mask [samples, positions], or a mapping of place to these.
        dtype: Cast floats to this dtype before they leave the device.
        transform: Keep `transform(value)` instead of the value.
        stop: End each forward after the last place. None does so if nothing after it is needed.
        columns: Further values to keep: names of the batch's entries, or a mapping of name to function of the batch.
        call: A function `call(model, batch)` that runs the model on a batch.
        calls: "one", or how the calls of a place in one batch are joined: along the "sequence" or the "batch", or as
            "tokens" of a sequence that pass in several forwards of the model.
        loss: `loss(output, batch)` or `loss(output)`, for gradients.
        batch_size: How many samples are in a batch.
        collate: A function that makes a batch from a list of samples.
        sort_by_length: Put samples of similar length into a batch. Rows keep the order of the samples.
        unit: The size of a unit of work, in samples (in batches for an iterable). A crash loses at most a few units.
        device: The device for the batches; None is the model's.
        on_error: "raise", or "skip" to leave out samples that fail and list them.
        append: Add to an existing store.
        gather: Join values that a parallel model has split among processes. False keeps this process's part, in a store
            of its own.
        share: Divide the units among the processes of a launcher. None does so unless they are stages of a pipeline.
        progress: Show a progress bar. None shows one in a terminal.
        engine: None runs in this process, and in all others that a launcher such as torchrun started. "ray" runs on
            Ray, and needs a function as `model`.
        workers: How many processes Ray starts. None starts one for each GPU or, if there are none, each CPU.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Any,
        *where: Where,
        to: str | os.PathLike[str],
        rows: Rule | Mapping[str, Rule] = "batch",
        dtype: torch.dtype | str | None = None,
        transform: Callable[[Any], Any] | None = None,
        stop: bool | None = None,
        columns: Sequence[Any] | Mapping[str, Any] | None = None,
        call: Callable[[nn.Module, Any], Any] | None = None,
        calls: str | None = None,
        loss: Callable[..., Tensor] | None = None,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        sort_by_length: bool = False,
        unit: int | None = None,
        device: torch.device | str | None = None,
        on_error: str = "raise",
        append: bool = False,
        gather: bool = True,
        share: bool | None = None,
        progress: bool | None = None,
        engine: str | None = None,
        workers: int | None = None,
    ) -> None:
        if not where:
            raise SiteError('harvest what? Give sites, as in harvest(model, data, "h.*.mlp", to="acts/")')
        refuse_flags(sort_by_length=sort_by_length, append=append, gather=gather)
        refuse_flags_or_none(stop=stop, share=share, progress=progress)
        calls = getattr(call, "calls", "one") if calls is None else calls
        refuse_unknown(CALLS, calls=calls)
        refuse_unknown(ON_ERROR, on_error=on_error)
        check_rule(rows)
        for name, given in {"transform": transform, "call": call, "loss": loss, "collate": collate}.items():
            if given is not None and not callable(given):
                raise HooklineError(f"{name}= is a function, not {given!r:.80}")
        if unit is not None:
            refuse_numbers(1, unit=unit)
        to = full_path(to)
        options = RowOptions(
            rows=rows,
            dtype=None if dtype is None else dtype_of(dtype),
            transform=transform,
            stop=getattr(call, "stop", None) if stop is None else stop,
            columns=_columns(columns),
            call=call,
            calls=calls,
            loss=loss,
            device=None if device is None else device_of(device),
            gather=gather,
            default_call=getattr(getattr(data, "dataset", data), "give", None),  # `data` may be a DataLoader.
        )
        self.model, self.data, self.where = model, data, where
        self.to = to
        self.engine, self.workers = engine, workers
        self._job = Job(
            model,
            data,
            where,
            self.to,
            options,
            batch_size=batch_size,
            collate=collate,
            sort_by_length=sort_by_length,
            unit=unit,
            on_error=on_error,
            append=append,
            share=share,
            progress=progress,
        )

    def __repr__(self) -> str:
        model = getattr(self.model, "__name__", type(self.model).__name__)
        where = ", ".join(map(repr, self.where))
        line = f"Harvest({model}, {type(self.data).__name__}, {where}, to={self.to!r})"
        if not self._job.is_ready:
            return line
        ready, source = self._job.ready, self._job.source
        spec = ready.manifest.spec
        rows = [
            ("model", "classes and code of its modules, every bit of weights and buffers, attributes, training mode"),
            ("data", compared_data(spec, source.batch_size)),
            ("functions", "code, and the values that it uses"),
            *(("not compared", one) for one in not_compared(spec, ready.digest, ready.opaque)),
        ]
        return f"{line}\n{Table(('to resume', 'is compared by'), rows)}"

    def renew(self) -> None:
        """Examine the model and the folder again. They may have changed."""
        self._job.renew()

    def estimate(self) -> Estimate:
        """Return how much will be stored, estimated from the first batch, and how much space is free."""
        return self._job.estimate()

    def status(self) -> Status:
        """Return the progress of all processes that work on this harvest."""
        return self._job.status()

    def pending(self) -> list[int]:
        """Return the units that are not done. The number of units must be known."""
        return self._job.pending()

    def run(self, engine: str | None = None, workers: int | None = None) -> Store:
        """Run the units that are left, and return the store. `engine` and `workers` override those of the plan.

        Other processes may run the same harvest at the same time.
        """
        engine = engine if engine is not None else self.engine
        workers = workers if workers is not None else self.workers
        check_engine(engine, workers)
        _warn_if_ctrl_c_is_ignored()
        if engine == "ray":
            on_ray(self._job, workers)
        else:
            run_job(self._job)
        return Store(self.to)

    def run_unit(self, unit: int) -> bool:
        """Run one unit in this process, for engines to call. Return False if another process has done it already."""
        refuse_numbers(unit=unit)
        return run_unit(self._job, unit).committed > 0


def _warn_if_ctrl_c_is_ignored() -> None:
    """Warn if SIGINT is ignored, as it is in a process that a shell script starts with `&`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        warn(f"Ctrl-C is ignored in this process, as in any process that a script starts with `&`; to stop this "
             f"harvest, run `kill {os.getpid()}`; the same call resumes it")  # fmt: skip


def _columns(columns: Sequence[Any] | Mapping[str, Any] | None) -> Mapping[str, Callable[..., Any]] | None:
    """Return columns as functions of the batch."""
    if columns is None:
        return None
    if isinstance(columns, str):
        columns = [columns]
    if not isinstance(columns, (Sequence, Set, Mapping)):
        raise HooklineError(f"columns= is a list of names, or name to function of the batch, not {short_text(columns)}")
    pairs = columns.items() if isinstance(columns, Mapping) else [(str(key), key) for key in columns]
    for name, column in pairs:
        if isinstance(column, list) or hasattr(column, "__array__"):
            raise HooklineError(f"column {name!r} is {describe(column)}, and a column is an entry of the batch, or a "
                                "function of it; put the values into the data: TensorDataset(x, labels), call=lambda "
                                "model, batch: model(batch[0]), columns={'label': lambda batch: batch[1]}")  # fmt: skip
    return {name: column if callable(column) else BatchEntry(column) for name, column in pairs}


def _run_of(plan: Callable[_Arguments, Harvest]) -> Callable[_Arguments, Store]:
    """Return a function that takes the arguments of a plan, makes the plan and runs it."""

    def harvest(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Store:
        """Run a dataset through a model, keep the values at some places on disk, and return the store.

        If a harvest was interrupted, the same call goes on where it stopped.

        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval()
        >>> store = harvest(model, torch.ones(10, 4), "0", to="acts", batch_size=4)
        >>> store["0"][:2].shape
        torch.Size([2, 8])
        """
        return plan(*args, **kwargs).run()

    harvest.__doc__ = f"{harvest.__doc__}\n{_arguments(plan)}"
    harvest.__signature__ = inspect.signature(plan).replace(return_annotation=Store)  # type: ignore[attr-defined]
    return harvest


def _arguments(plan: Callable[..., Harvest]) -> str:
    """Return the part of the plan's docstring that explains its arguments."""
    return "    Args:" + (plan.__doc__ or "").partition("    Args:")[2]


harvest = _run_of(Harvest)
harvest.__qualname__ = "harvest"
