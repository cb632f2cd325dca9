"""A harvest as an object: what goes through which model, what is kept of it, and where. It can be pickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline._harvest.data import Source, source
from hookline._harvest.fingerprints import agreed, model_digest
from hookline._harvest.live import Live
from hookline._harvest.passes import CALLS, Entry, Manner
from hookline._harvest.ray import on_ray
from hookline._harvest.running import run, run_one
from hookline._harvest.tokens import Rule, check_rule
from hookline._harvest.units import ON_ERROR
from hookline._kernel import (
    Where,
    describe,
    device_of,
    dtype_of,
    refuse_flags,
    refuse_flags_or_none,
    refuse_numbers,
    short_text,
)
from hookline._store.manifest import MANIFEST
from hookline._store.places import Place, place
from hookline._store.store import Store
from hookline._store.writer import committed, how_many, read_record
from hookline._tables import Table, count
from hookline._tables import size as written
from hookline.errors import HooklineError, SiteError

ENGINES = (None, "ray")


@dataclass(frozen=True)
class Estimate:
    """What a harvest will take: rows of all arrays together; None where nobody can know."""

    samples: int | None
    rows: int | None
    bytes: int | None
    units: int | None
    free: int | None
    arrays: int = 1
    is_sure: bool = True  # Whether every sample has as many rows as those that were looked at.

    def __str__(self) -> str:
        if self.rows is None or self.bytes is None:
            return "an unknown number of samples" + (
                f"; {written(self.free)} are free" if self.free is not None else ""
            )
        free = f", of {written(self.free)} free" if self.free is not None else ""
        return (
            f"{self.samples:,} samples, about {self.rows:,} rows in {count(self.arrays, 'array')}, "
            f"{written(self.bytes)}{free}, {count(self.units or 0, 'unit')}"
        )


@dataclass(frozen=True)
class Status:
    """How far a harvest has come."""

    done: int
    units: int | None
    rows: int
    skipped: int

    def __str__(self) -> str:
        units = "an unknown number of" if self.units is None else f"{self.units:,}"
        skipped = f", {self.skipped:,} samples skipped" if self.skipped else ""
        return f"{self.done:,} of {units} units done, {self.rows:,} rows{skipped}"


class Harvest:
    """A dataset through a model, onto disk: what passes at the places, as rows.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval()
    >>> plan = Harvest(model, torch.ones(10, 4), "0", to="acts", batch_size=4)
    >>> print(plan.estimate())  # doctest: +ELLIPSIS
    10 samples, about 10 rows in 1 array, 320 B, of ... free, 1 unit
    >>> plan.run()["0"].shape
    torch.Size([10, 8])

    Args:
        model: A module, or a function that makes one: that is what travels to other machines.
        data: An iterable of batches, a DataLoader, samples by number with `batch_size`, or a function that makes one of
            these.
        where: The places, as everywhere.
        to: A folder, or whatever fsspec knows ("s3://...").
        rows: What a row is: "batch" (a sample), "tokens" (a position that is no padding), a function of the batch that
            gives a mask [samples, positions], or a mapping of place to these.
        dtype: Cast floats to this before they leave the device.
        transform: Keep `transform(value)` instead.
        stop: End each forward after the last place; None does if nothing after it is needed.
        columns: More to keep: names of the batch's entries, or name to function of the batch.
        call: How a batch is given to the model, `call(model, batch)`.
        calls: "one", or how the calls of a place in one batch are joined: along the "sequence" or the "batch".
        loss: `loss(output, batch)` or `loss(output)`, for gradients.
        batch_size: How many samples to a batch.
        collate: Makes a batch of a list of samples.
        sort_by_length: Put samples of like length into a batch; rows are found in the samples' order all the same.
        unit: How many samples (of an iterable: batches) are one unit of work. No more than a few are lost if it dies.
        device: Where batches go; None is where the model is.
        on_error: "raise", or "skip" a sample that fails and list it.
        append: Add to a store that is there.
        gather: Make whole what a parallel model has cut among processes. False keeps this one's part, in a store of its
            own.
        share: Whether processes of a launcher share the units; None does, unless they are the stages of a pipeline.
        progress: Whether to show it; None does in a terminal.
        engine: None is this process, or all that a launcher such as torchrun started; "ray" is Ray, with a function as
            `model`.
        workers: How many processes Ray is to have; None is one for each GPU, or else each CPU.
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
        _refuse(calls, CALLS, "calls")
        _refuse(on_error, ON_ERROR, "on_error")
        check_rule(rows)
        for name, given in {"transform": transform, "call": call, "loss": loss, "collate": collate}.items():
            if given is not None and not callable(given):
                raise HooklineError(f"{name}= is a function, not {given!r:.80}")
        if unit is not None:
            refuse_numbers(1, unit=unit)
        if os.fsdecode(to) == "":
            raise HooklineError("to='' is not a folder; '.' is the one you are in")
        self.model = model
        self.data = data
        self.where = where
        self.to = to if "://" in os.fsdecode(to) else os.path.abspath(to)  # Wherever it is run.
        self.unit = unit
        self.on_error = on_error
        self.append = append
        self.share = share
        self.progress = progress
        self.engine = engine
        self.workers = workers
        self.sorts = sort_by_length
        self._batching = (batch_size, collate, sort_by_length)
        where_to = None if device is None else device_of(device)
        cast_to = None if dtype is None else dtype_of(dtype)
        own = getattr(getattr(data, "dataset", data), "give", None)  # A DataLoader has a dataset.
        self.manner = Manner(
            rows, cast_to, transform, stop, _columns(columns), call, calls, loss, where_to, gather, own
        )

    def __repr__(self) -> str:
        model = getattr(self.model, "__name__", type(self.model).__name__)
        where = ", ".join(map(repr, self.where))
        line = f"Harvest({model}, {type(self.data).__name__}, {where}, to={str(self.to)!r})"
        if "live" not in vars(self):
            return line
        rows = [
            ("model", "classes and code of its modules, every bit of weights and buffers, attributes, training mode"),
            ("data", self.live.known_data()),
            ("functions", "code, and the values that it uses"),
            *(("not compared", one) for one in self.live.unknown()),
        ]
        return f"{line}\n{Table(('to go on', 'is compared by'), rows)}"

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: the plan, and nothing it has made here."""
        return {name: value for name, value in vars(self).items() if name not in ("live", "source", "place")}

    @cached_property
    def place(self) -> Place:
        """Where the store is."""
        return place(self.to)

    @cached_property
    def source(self) -> Source:
        """The numbered samples."""
        return source(self.data, *self._batching)

    @cached_property
    def live(self) -> Live:
        """The model with its hooks, and what the first batch told."""
        return Live(self)

    def renew(self) -> None:
        """Look again at what this plan has looked at before: the model or the folder may have changed since."""
        live = vars(self).get("live")
        if live is not None and agreed(model_digest(live.model), live.digest) != live.digest:
            del self.live
        elif live is not None:
            live.forget()

    def estimate(self) -> Estimate:
        """Return how much will be stored, from what the first batch gives, and how much room there is."""
        live, samples = self.live, self.source.samples
        free = self.place.free()
        if samples is None:
            return Estimate(None, None, None, live.manifest.units, free, len(live.first))
        rows, nbytes, is_sure = 0.0, 0.0, True
        for part in live.first.values():
            times = samples / live.first_samples
            if part.shape[0] != live.first_samples:
                times *= self.source.longer(live.first_samples)
                is_sure = False
            rows += part.shape[0] * times
            nbytes += part.nbytes * times
        return Estimate(samples, round(rows), round(nbytes), live.manifest.units, free, len(live.first), is_sure)

    def status(self) -> Status:
        """Return how far it has come, in all processes that work on it."""
        if MANIFEST not in self.place.names("") and not self.append:
            return Status(0, self.live.manifest.units, 0, 0)  # To ask begins nothing.
        place, manifest = self.live.begun()
        records = [read_record(place, manifest, unit) for unit in sorted(committed(place))]
        rows = sum(file.rows for record in records for file in record.files)
        return Status(len(records), how_many(place, manifest), rows, sum(len(record.skipped) for record in records))

    def run(self, engine: str | None = None, workers: int | None = None) -> Store:
        """Run what is not done yet, here or on another engine than was given, and return the store.

        Other processes may run the same at the same time.
        """
        engine = engine if engine is not None else self.engine
        workers = workers if workers is not None else self.workers
        _refuse(engine, ENGINES, "engine")
        if engine == "ray":
            on_ray(self, workers)
        elif workers is not None:
            raise HooklineError(f'workers={workers!r} is for engine="ray"; processes of a launcher share by themselves')
        else:
            run(self)
        return Store(self.to)

    def run_unit(self, unit: int) -> bool:
        """Run one unit, in whatever process: the primitive for engines. Return False if somebody else has done it."""
        refuse_numbers(unit=unit)
        return run_one(self, unit).committed > 0

    def pending(self) -> list[int]:
        """Return the units that are not done, where their number is known."""
        place, manifest = self.live.begun()
        units = how_many(place, manifest)
        if units is None:
            raise HooklineError(
                "how many units an iterator will give is not known before; give something with a length"
            )
        return sorted(set(range(units)) - committed(place))


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
                                "function of it; put all samples' into the data: TensorDataset(x, labels), call=lambda "
                                "model, batch: model(batch[0]), columns={'label': lambda batch: batch[1]}")  # fmt: skip
    return {name: column if callable(column) else Entry(column) for name, column in pairs}


def _refuse(given: Any, known: Any, name: str) -> None:
    if not isinstance(given, (str, type(None))) or given not in known:
        raise HooklineError(f"{name}= is one of {', '.join(map(repr, known))}, not {short_text(given)}")
