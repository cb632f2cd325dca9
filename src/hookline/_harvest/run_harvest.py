"""Run a harvest in this process: what was asked for (`Job`), the hooked model, and the units this process takes.

`Job` is what was asked for; it can be pickled. `ReadyModel` is the model in this process with its hooks. It is made
when it is first needed, and runs the first batch, which shows what each array will hold.

Where a launcher such as torchrun started several processes, each begins with a share of its own, and then helps the
others (`ranks`, `turns`). They do not talk to each other. A wrong rank, or a process that never comes, only costs time:
every unit is done by somebody, and if two do the same one, the store keeps the first.

Ranks that hold one model together run it in step (`run_together`). With FSDP every rank has batches of its own, and all
need as many forwards: those that are done first run their first batch again, and keep nothing of it. With tensor
parallelism all have the same batch, and the first rank writes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hookline._harvest.data import Batch, Source, source
from hookline._harvest.fingerprints import agreed, model_digest, steady
from hookline._harvest.resume import begin_or_resume, check_skipped_batches, specification
from hookline._harvest.run_batch import BatchRows, Pass, RowOptions, needs_output, run_first
from hookline._harvest.run_units import Counts, Listener, Progress, UnitRunner
from hookline._kernel import Where
from hookline._store.disk_format import MANIFEST, Manifest, committed, how_many, read_record
from hookline._store.storage import Storage, open_storage
from hookline._store.writer import end, sweep
from hookline._tables import count
from hookline._tables import size as written
from hookline._torch import is_running, may_be_a_stage
from hookline.errors import HooklineError, NeverFired, StoreError, warn
from hookline.parallel import Replica, meet, replica

_LARGEST, _SMALLEST, _UNITS = 128 << 20, 8 << 20, 64  # Bytes of an array in one unit; how many units to aim for.
_LONGEST = 60.0  # Seconds that one unit may take.


@dataclass(frozen=True)
class Estimate:
    """What a harvest will take: rows of all arrays together; None where that is not known."""

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


class Job:
    """What a harvest was asked to do. Its model, data and storage are made here when they are first needed."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Any,
        where: Sequence[Where],
        to: str,
        options: RowOptions,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        sort_by_length: bool = False,
        unit: int | None = None,
        on_error: str = "raise",
        append: bool = False,
        share: bool | None = None,
        progress: bool | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.where = where
        self.to = to
        self.options = options
        self.batch_size = batch_size
        self.collate = collate
        self.sorts = sort_by_length
        self.unit = unit
        self.on_error = on_error
        self.append = append
        self.share = share
        self.progress = progress

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to other processes: what was asked for, and nothing that was made here."""
        return {name: value for name, value in vars(self).items() if name not in ("ready", "source", "storage")}

    @cached_property
    def storage(self) -> Storage:
        """Where the store is."""
        return open_storage(self.to)

    @cached_property
    def source(self) -> Source:
        """The numbered samples."""
        return source(self.data, self.batch_size, self.collate, self.sorts)

    @cached_property
    def ready(self) -> ReadyModel:
        """The model with its hooks, and what the first batch showed."""
        return ReadyModel(self)

    @property
    def is_ready(self) -> bool:
        """Whether the model was made and has run the first batch."""
        return "ready" in vars(self)

    def renew(self) -> None:
        """Forget what was found before: the model or the folder may have changed since."""
        if self.is_ready and agreed(model_digest(self.ready.model), self.ready.digest) != self.ready.digest:
            del self.ready
        elif self.is_ready:
            self.ready.forget_store()

    def estimate(self) -> Estimate:
        """Return how much will be stored, from what the first batch gives, and how much room there is."""
        ready, samples = self.ready, self.source.samples
        free = self.storage.free()
        if samples is None:
            return Estimate(None, None, None, ready.manifest.units, free, len(ready.first))
        rows, nbytes, is_sure = 0.0, 0.0, True
        for part in ready.first.values():
            times = samples / ready.first_samples
            if part.shape[0] != ready.first_samples:
                times *= self.source.longer(ready.first_samples)
                is_sure = False
            rows += part.shape[0] * times
            nbytes += part.nbytes * times
        return Estimate(samples, round(rows), round(nbytes), ready.manifest.units, free, len(ready.first), is_sure)

    def status(self) -> Status:
        """Return how far it has come, in all processes that work on it."""
        if MANIFEST not in self.storage.names("") and not self.append:
            return Status(0, self.ready.manifest.units, 0, 0)  # Asking for the status does not begin a store.
        storage, manifest = self.ready.begun()
        records = [read_record(storage, manifest, unit) for unit in sorted(committed(storage))]
        rows = sum(file.rows for record in records for file in record.files)
        return Status(len(records), how_many(storage, manifest), rows, sum(len(record.skipped) for record in records))

    def pending(self) -> list[int]:
        """Return the units that are not done, where their number is known."""
        storage, manifest = self.ready.begun()
        units = how_many(storage, manifest)
        if units is None:
            raise HooklineError(
                "how many units an iterator will give is not known before; give something with a length"
            )
        return sorted(set(range(units)) - committed(storage))

    def prepare(self) -> tuple[Storage, Manifest]:
        """Begin a store, or go on with it: remove what killed processes left, and check that the rest has room."""
        if MANIFEST not in self.storage.names(""):
            self._check_room(1.0)  # Before anything is there that a later run would be compared with.
        storage, manifest = self.ready.begun()
        sweep(storage)
        units = how_many(storage, manifest)
        if units:
            self._check_room(1 - len(committed(storage)) / units)
        return storage, manifest

    def _check_room(self, share: float) -> None:
        """Raise if this share of the harvest can't fit on the disk."""
        estimate = self.estimate()
        if estimate.bytes is None or estimate.free is None:
            return
        if estimate.bytes * share > estimate.free * (1 if estimate.is_sure else 4):  # A first batch may mislead.
            raise StoreError(f"{self.to!r} has no room: {estimate}; keep fewer sites, a smaller dtype or fewer rows")


class ReadyModel:
    """The model of a job in this process, with its hooks, and what the first batch showed. It is not pickled."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = job.model if isinstance(job.model, nn.Module) or not callable(job.model) else job.model()
        if not isinstance(self.model, nn.Module):
            raise HooklineError(f"harvest takes a model or a function that makes one, not {type(job.model).__name__}")
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model = self.model.module  # DDP would wait for the other ranks, which may have no batch.
        self.together = replica(self.model)
        self.opaque: set[str] = set()
        self.digest = model_digest(self.model, self.opaque)  # Before anything runs: a forward may write into buffers.
        batch = job.source.first()
        began = time.perf_counter()
        batch, self.first = self._run_first(batch)
        self.note_writes()
        if any(module.training for module in self.model.modules()):
            warn("the model is in training mode: dropout and batch statistics go into what is kept; call model.eval()")
        self.seconds = time.perf_counter() - began
        self.first_samples = len(batch.samples)
        self.manifest = self._manifest()
        self._begun: tuple[Storage, Manifest] | None = None
        self.busy = threading.RLock()  # The hooks of one job serve one thread at a time.

    def _run_first(self, batch: Batch) -> tuple[Batch, dict[str, BatchRows]]:
        """Run the first batch to its end: which sites there are, how often they are called, and what their rows are."""
        job, options = self.job, self.job.options
        trial = Pass(self.model, job.where, options, stop=False)
        try:
            trial.refuse_idle_options()
            batch, found = run_first(batch, job.source.singles, trial.run, job.on_error)
        finally:
            trial.close()
        for part in found.values():
            part.arrived()  # Raises now if the copy from the GPU failed.
        taken = [name for name in options.columns or {} if name in {str(place.site) for place in trial.places}]
        if taken:
            raise HooklineError(f"column {taken[0]!r} has the name of a site; give it another")
        if trial.has_gradients and job.on_error == "skip":
            raise HooklineError('on_error="skip" is not for gradients: those of a batch change with who is in it, for '
                                "most losses are means; leave the bad samples out of the data")  # fmt: skip
        if found.keys() <= (options.columns or {}).keys():
            where = ", ".join(map(repr, job.where))
            raise NeverFired(f"nothing passed at any place of {where}, so there is nothing to keep; a warning says why")
        self.stops = self._stops(trial)
        return batch, {name: replace(part, rows=torch.empty(0)) for name, part in found.items()}  # Without the rows.

    def _stops(self, trial: Pass) -> bool:
        """Return whether each forward can end after the last site."""
        options = self.job.options
        if options.stop is not None:
            return options.stop
        return not (trial.has_gradients or options.calls != "one" or needs_output(options))

    def _manifest(self) -> Manifest:
        job = self.job
        arrays = tuple(part.array(name) for name, part in self.first.items())
        spec = specification(self.digest, job.source, job.sorts, job.options, self.opaque)
        if not job.options.gather and self.together is not None:
            cut = {name: part.placement for name, part in self.first.items() if part.placement != "null"}
            spec["part"] = {"rank": dist.get_rank(), "of": list(self.together.ranks), "placements": cut}
        unit = job.unit or self._unit_size()
        return Manifest(spec, arrays, job.source.units(unit), {"unit": unit, "batch_size": job.source.batch_size})

    def _unit_size(self) -> int:
        """Return how many samples (or batches) make a unit that is worth a file, and not too long to be lost."""
        source = self.job.source
        per_batch = max((part.nbytes for part in self.first.values()), default=1) or 1
        count = source.units(1) if source.samples is None else source.samples / self.first_samples
        largest = _LARGEST if count is None else min(max(int(per_batch * count) // _UNITS, _SMALLEST), _LARGEST)
        batches = max(1, min(largest // per_batch, int(_LONGEST / max(self.seconds, 1e-6))))
        return batches if source.batch_size is None else batches * source.batch_size

    def begun(self) -> tuple[Storage, Manifest]:
        """Begin the store, or go on with it: return the storage that this job writes to, and its manifest."""
        if self._begun is None:
            job = self.job
            self._begun = begin_or_resume(job.storage, self.manifest, self.digest, append=job.append, unit=job.unit)
            self.manifest = self._begun[1]
        return self._begun

    def forget_store(self) -> None:
        """Look at the store again when it is next needed."""
        self._begun = None

    @cached_property
    def passing(self) -> Pass:
        """The hooks of the run: at the sites that fired, by name, so that a batch that misses one is noticed."""
        names = [name for name in self.first if name not in (self.job.options.columns or {})]
        return Pass(self.model, names, self.job.options, stop=self.stops)

    def runner(self, listener: Listener) -> UnitRunner:
        """Return what runs units, and tells the listener."""
        storage, manifest = self.begun()
        threads = min(4, os.cpu_count() or 1)
        return UnitRunner(
            self.passing, self.job.source, storage, manifest,
            on_error=self.job.on_error, listener=listener, threads=threads,
        )  # fmt: skip

    def note_writes(self) -> None:
        """Note what the model has written as it ran, so that the same process may go on with it."""
        self.digest = steady(self.digest, self.model)

    def close(self) -> None:
        """Remove the hooks; the next run adds them again."""
        if "passing" in vars(self):
            self.passing.close()
            del self.passing


# How torchrun (and what is like it), Slurm and Open MPI say which rank a process has, and how many processes there are.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def ranks(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return which process this is, and of how many.

    >>> ranks({"RANK": "1", "WORLD_SIZE": "4"}), ranks({})
    ((1, 4), (0, 1))
    """
    variables = os.environ if environment is None else environment
    for rank, world in _VARIABLES:
        if rank not in variables or world not in variables:
            continue
        try:
            found = int(variables[rank]), int(variables[world])
        except ValueError:
            found = -1, -1
        if not 0 <= found[0] < found[1]:
            raise HooklineError(
                f"{rank}={variables[rank]} and {world}={variables[world]} are no rank and number of processes"
            )
        return found
    return (dist.get_rank(), dist.get_world_size()) if environment is None and is_running() else (0, 1)


def turns(
    units: int, done: Callable[[], set[int]], rank: int = 0, world: int = 1, lost: Callable[[], bool] = bool
) -> Iterator[int]:
    """Return the units for a process to do, each when it is asked for: its share, then what others have left.

    `done` returns the units that are done by now. When this ends, every unit was done or begun by some process.
    `lost` says that another process was faster with a unit of this share: it has the same share, because nobody gave
    them ranks. From then on units are taken at random.

    >>> list(turns(6, lambda: {1}, rank=1, world=2))
    [3, 4, 5, 0, 2]
    """
    left = sorted(set(range(units)) - done())
    given: set[int] = set()
    for unit in left[len(left) * rank // world : len(left) * (rank + 1) // world]:
        if lost():
            break
        if unit not in done():
            given.add(unit)
            yield unit
    chance = random.Random()  # Leaves Python's global random numbers as they are.
    while left := sorted(set(range(units)) - given - done()):
        # From the end, where the process that has the share arrives last; each helper at another one.
        unit = chance.choice(left) if lost() else left[-1 - rank % len(left)]
        given.add(unit)
        yield unit


def run_together(job: Job, together: Replica, listener: Listener) -> None:
    """Run what is left of a harvest on a model that is spread over these ranks."""
    if job.on_error != "raise":
        raise HooklineError('on_error="skip" is not for a model that several processes hold together: they would no '
                            "longer run it as often as each other; leave the bad samples out of the data")  # fmt: skip
    mine = _share(job, together, first=True)
    while mine:
        _run(job, together, mine, listener)
        mine = _share(job, together, first=False)


def _share(job: Job, together: Replica, first: bool) -> list[list[int]]:
    """Return the units of each process that has batches of its own; all agree on what is left for any of them."""
    storage, manifest = job.ready.begun()
    units = how_many(storage, manifest)
    assert units is not None
    left = sorted(set(range(units)) - committed(storage))
    if first:  # Of several replicas, each begins with a share of its own.
        number = dist.get_world_size() // len(together.ranks)
        index = together.ranks[0] * number // dist.get_world_size()
        left = left[len(left) * index // number : len(left) * (index + 1) // number] or left
    said_by_rank = meet(
        together.ranks, json.dumps([left, together.alike[:1] or [dist.get_rank()]]), "the units of a harvest"
    )
    agreed = sorted({unit for said in said_by_rank.values() for unit in json.loads(said)[0]})
    leaders = sorted({json.loads(said)[1][0] for said in said_by_rank.values()})
    own = leaders.index((together.alike or (dist.get_rank(),))[0])
    shares = [agreed[start :: len(leaders)] for start in range(len(leaders))]
    return [shares[own], *shares] if agreed else []


def _run(job: Job, together: Replica, shares: Sequence[list[int]], listener: Listener) -> None:
    """Run this process's share, and then as many more batches as another one has."""
    ready = job.ready
    _, manifest = ready.begun()
    size, (own, *every) = manifest.plan["unit"], shares
    if not together.alike or dist.get_rank() == together.alike[0] or not job.options.gather:
        ready.runner(listener).run(own, size, lambda *_: None)
    else:
        for _, batch in job.source.batches(own, size, lambda *_: None):
            ready.passing.run(batch)
    counts = [sum(job.source.count(unit, size) for unit in units) for units in every]
    for _ in range(max(counts) - sum(job.source.count(unit, size) for unit in own)):
        ready.passing.run(job.source.first())


def run(job: Job) -> None:
    """Run what is left of a harvest; other processes may be at it too."""
    rank, world = ranks() if _shares(job) else (0, 1)
    if world > 1 and job.source.units(1) is None:
        raise HooklineError("several processes can't share data of unknown length; give a dataset or a list of batches")
    job.renew()
    storage, manifest = job.prepare()
    units, done = how_many(storage, manifest), committed(storage)
    checked = functools.partial(check_skipped_batches, storage, manifest)
    if units is not None and len(done) >= units and job.ready.together is None:
        job.source.compare(manifest.plan["unit"], checked)
        if job.append and world == 1:  # One of several processes may come when the others have done everything.
            warn(f"{job.to!r} holds these data already, so append=True added nothing; give other data to add")
        return
    try:
        with Progress(job.source.samples, _samples(storage, manifest, done), job.progress) as progress:
            if job.ready.together is not None:
                run_together(job, job.ready.together, progress)
            else:
                order = _order(job, storage, units, rank, world, progress)
                job.ready.runner(progress).run(order, manifest.plan["unit"], checked)
    finally:
        job.ready.close()
        job.ready.note_writes()
    if units is None:
        total = job.source.units(manifest.plan["unit"])
        assert total is not None
        end(storage, total)
    sweep(storage)  # Removes what a process left that died meanwhile.


def run_one(job: Job, unit: int) -> Counts:
    """Run one unit, unless it is done, and remove the hooks again; return what was done."""
    storage, manifest = job.ready.begun()
    counts, units = Counts(), how_many(storage, manifest)
    if unit < 0 or (units is not None and unit >= units):
        raise HooklineError(f"there is no unit {unit}: the harvest has units 0 to {(units or 1) - 1}")
    if unit in committed(storage):
        return counts
    with job.ready.busy:
        try:
            job.ready.runner(counts).run([unit], manifest.plan["unit"], lambda *_: None)
        finally:
            job.ready.close()
    return counts


def _shares(job: Job) -> bool:
    """Return whether this process runs only some of the units."""
    return job.share if job.share is not None else not may_be_a_stage()


def _order(job: Job, storage: Storage, units: int | None, rank: int, world: int, progress: Progress) -> Iterator[int]:
    """Return the units that this process runs, in order. Without their number, the data say when it is over."""
    if units is None:
        return (unit for unit in itertools.count() if unit not in committed(storage))
    jumps = job.source.batch_size is not None  # For each jump, an iterable of batches would be passed over again.
    return turns(units, lambda: committed(storage), rank, world, lambda: jumps and progress.lost > 0)


def _samples(storage: Storage, manifest: Manifest, done: set[int]) -> int:
    """Return how many samples the units have that are done."""
    return sum(read_record(storage, manifest, unit).samples for unit in done)
