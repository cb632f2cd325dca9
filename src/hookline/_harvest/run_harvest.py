"""Run a harvest in this process: the arguments (`Job`), the hooked model (`ReadyModel`), and the order of the units.

A unit is a group of samples or batches whose rows are stored together, or not at all: see _store/writer.py.
`Job` holds the arguments of a harvest and can be pickled. `ReadyModel` is the model in this process with its hooks. It
is made when it is first needed, and runs the first batch, which shows what each array will hold.

If a launcher such as torchrun started several processes, each begins with its own share of the units, and then helps
the others (`turns`). They do not communicate. A wrong rank, or a process that never starts, only costs time: every unit
is done by some process, and if two processes do the same unit, the store keeps the first result.

Ranks that hold one model together run it in step (`run_together`). With FSDP, every rank has its own batches, and all
need the same number of forwards: a rank that is done early repeats its first batch and discards the result. With tensor
parallelism, all ranks have the same batch, and the first rank writes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hookline._harvest.data import Batch, Source, source_of
from hookline._harvest.resume import begin_or_resume, check_skipped_batches, specification
from hookline._harvest.run_batch import BatchRows, BatchRunner, RowOptions, needs_output, run_first
from hookline._harvest.run_units import Counts, Listener, Progress, UnitRunner
from hookline._jobs.fingerprints import model_digest, reconcile, without_writes
from hookline._jobs.turns import share_of, turns
from hookline._kernel import Where, is_open_ended, rank_and_world
from hookline._store.disk_format import Manifest, committed, has_manifest, read_record, unit_count
from hookline._store.storage import Storage, open_storage
from hookline._store.writer import end, remove_leftovers
from hookline._tables import count
from hookline._tables import size as written
from hookline._torch import may_be_a_stage
from hookline.errors import HooklineError, NeverFired, StoreError, warn
from hookline.parallel import Replica, meet, replica

_LARGEST, _SMALLEST = 128 << 20, 8 << 20  # The most and the fewest bytes of one array in a unit.
_UNITS = 64  # How many units to aim for.
_LONGEST = 60.0  # Seconds that one unit should take at most.


class Job:
    """The arguments of a harvest. The hooked model, the source and the storage are made when they are first needed."""

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
        """Return the arguments to pickle for other processes, without the objects made from them here."""
        return {name: value for name, value in vars(self).items() if name not in ("ready", "source", "storage")}

    @cached_property
    def storage(self) -> Storage:
        """The storage of the store."""
        return open_storage(self.to)

    @cached_property
    def source(self) -> Source:
        """The numbered samples."""
        return source_of(self.data, self.batch_size, self.collate, self.sorts)

    @cached_property
    def ready(self) -> ReadyModel:
        """The hooked model, after it has run the first batch."""
        return ReadyModel(self)

    @property
    def is_ready(self) -> bool:
        """True once the model has run the first batch."""
        return "ready" in vars(self)

    def renew(self) -> None:
        """Forget the model if it has changed; otherwise only the state of the store."""
        if self.is_ready and reconcile(model_digest(self.ready.model), self.ready.digest) != self.ready.digest:
            del self.ready
        elif self.is_ready:
            self.ready.forget_store()

    def estimate(self) -> Estimate:
        """Return how much will be stored, estimated from the first batch, and how much space is free."""
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
        """Return the progress of all processes that work on this harvest."""
        if not has_manifest(self.storage) and not self.append:
            return Status(0, self.ready.manifest.units, 0, 0)  # `open_store` would begin a store.
        storage, manifest = self.ready.open_store()
        records = [read_record(storage, manifest, unit) for unit in sorted(committed(storage))]
        rows = sum(file.rows for record in records for file in record.files)
        return Status(len(records), unit_count(storage, manifest), rows, sum(len(record.skipped) for record in records))

    def pending(self) -> list[int]:
        """Return the units that are not done. The number of units must be known."""
        storage, manifest = self.ready.open_store()
        units = unit_count(storage, manifest)
        if units is None:
            raise HooklineError("the number of units of an iterator is not known in advance; give data with a length")
        return sorted(set(range(units)) - committed(storage))

    def prepare(self) -> tuple[Storage, Manifest]:
        """Begin or resume the store, remove files that killed processes left, and check that the rest fits on disk."""
        if not has_manifest(self.storage):
            self._check_room(1.0)  # Before a manifest is written, since later runs are compared with it.
        storage, manifest = self.ready.open_store()
        remove_leftovers(storage)
        units = unit_count(storage, manifest)
        if units:
            self._check_room(1 - len(committed(storage)) / units)
        return storage, manifest

    def _check_room(self, share: float) -> None:
        """Raise if this fraction of the harvest can't fit on the disk."""
        estimate = self.estimate()
        if estimate.bytes is None or estimate.free is None:
            return
        most = estimate.free if estimate.is_sure else estimate.free * 4  # The first batch may have the longest samples.
        if estimate.bytes * share > most:
            raise StoreError(f"{self.to!r} has no room: {estimate}; keep fewer sites, a smaller dtype or fewer rows")


@dataclass(frozen=True)
class Estimate:
    """How much a harvest will store, over all arrays. Unknown numbers are None."""

    samples: int | None
    rows: int | None
    bytes: int | None
    units: int | None
    free: int | None
    arrays: int = 1
    is_sure: bool = True  # False if the number of rows varies between samples, so that this is only a guess.

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
    """The progress of a harvest."""

    done: int
    units: int | None
    rows: int
    skipped: int

    def __str__(self) -> str:
        units = "an unknown number of" if self.units is None else f"{self.units:,}"
        skipped = f", {self.skipped:,} samples skipped" if self.skipped else ""
        return f"{self.done:,} of {units} units done, {self.rows:,} rows{skipped}"


class ReadyModel:
    """The hooked model of a job in this process, and what its first batch showed. It is not pickled."""

    def __init__(self, job: Job, keeps_rows: bool = False) -> None:
        self.job = job
        self.model = job.model if isinstance(job.model, nn.Module) or not callable(job.model) else job.model()
        if not isinstance(self.model, nn.Module):
            raise HooklineError(f"harvest takes a model or a function that makes one, not {type(job.model).__name__}")
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model = self.model.module  # DDP would wait for other ranks, which may have no batch.
        self.together = replica(self.model)
        self.opaque: set[str] = set()
        self.digest = model_digest(self.model, self.opaque)  # Before the first batch, which may write into buffers.
        batch = job.source.first()
        began = time.perf_counter()
        batch, found = self._run_first(batch)
        self.note_writes()  # A GPU may still be running the batch.
        for part in found.values():
            part.arrived()  # Raises now if the copy from the GPU failed.
        if any(module.training for module in self.model.modules()):
            warn("the model is in training mode: dropout and batch statistics affect the values; call model.eval()")
        self.seconds = time.perf_counter() - began
        self.first_samples = len(batch.samples)
        self.first = {name: replace(part, rows=torch.empty(0)) for name, part in found.items()}  # Without the rows.
        # Ranks that run a model in step need equally many forwards, so there every batch runs.
        keeps_rows = keeps_rows and self.together is None and not may_be_a_stage()
        self._kept = (list(batch.samples), found) if keeps_rows else None
        self.manifest = self._manifest()
        self._opened: tuple[Storage, Manifest] | None = None
        self.busy = threading.RLock()  # Only one thread at a time may use the hooks of a job.

    def _run_first(self, batch: Batch) -> tuple[Batch, dict[str, BatchRows]]:
        """Run the first batch without stopping early, to see which sites fire, how often, and what their rows are."""
        job, options = self.job, self.job.options
        trial = BatchRunner(self.model, job.where, options, stop=False)
        try:
            trial.refuse_idle_options()
            batch, found = run_first(batch, job.source.singles, trial.run, job.on_error)
        finally:
            trial.close()
        taken = [name for name in options.columns or {} if name in {str(place.site) for place in trial.places}]
        if taken:
            raise HooklineError(f"column {taken[0]!r} has the name of a site; give it another")
        if trial.has_gradients and job.on_error == "skip":
            raise HooklineError('on_error="skip" is not for gradients: they depend on which samples share a batch, '
                                "since most losses are means; leave the bad samples out of the data")  # fmt: skip
        if found.keys() <= (options.columns or {}).keys():
            where = ", ".join(map(repr, job.where))
            raise NeverFired(f"nothing passed at any place of {where}, so there is nothing to keep; a warning says why")
        self.stops = self._stops(trial)
        return batch, found

    def _stops(self, trial: BatchRunner) -> bool:
        """Return True if each forward can end after the last site."""
        options = self.job.options
        if options.stop is not None:
            return options.stop
        if any(is_open_ended(place.site) for place in trial.places):
            return False
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
        """Return the size of a unit, in samples or batches: enough for a file, but little work to lose."""
        source = self.job.source
        per_batch = max((part.nbytes for part in self.first.values()), default=1) or 1
        count = source.units(1) if source.samples is None else source.samples / self.first_samples
        largest = _LARGEST if count is None else min(max(int(per_batch * count) // _UNITS, _SMALLEST), _LARGEST)
        batches = max(1, min(largest // per_batch, int(_LONGEST / max(self.seconds, 1e-6))))
        return batches if source.batch_size is None else batches * source.batch_size

    def open_store(self) -> tuple[Storage, Manifest]:
        """Begin or resume the store; return the storage that this job writes to, and its manifest."""
        if self._opened is None:
            job = self.job
            self._opened = begin_or_resume(job.storage, self.manifest, self.digest, append=job.append, unit=job.unit)
            self.manifest = self._opened[1]
        return self._opened

    def forget_store(self) -> None:
        """Open the store again the next time it is needed."""
        self._opened = None

    @cached_property
    def batch_runner(self) -> BatchRunner:
        """The runner of all further batches. It hooks the sites that fired, by name: it raises if one does not fire."""
        names = [name for name in self.first if name not in (self.job.options.columns or {})]
        kept, self._kept = self._kept, None
        return BatchRunner(self.model, names, self.job.options, stop=self.stops, ran=kept)

    def unit_runner(self, listener: Listener) -> UnitRunner:
        """Return a runner of units that reports to the listener."""
        storage, manifest = self.open_store()
        threads = min(4, os.cpu_count() or 1)
        return UnitRunner(
            self.batch_runner, self.job.source, storage, manifest,
            on_error=self.job.on_error, listener=listener, threads=threads,
        )  # fmt: skip

    def note_writes(self) -> None:
        """Mark the attributes that the model wrote as it ran, since a later run can't compare them."""
        self.digest = without_writes(self.digest, self.model)

    def close(self) -> None:
        """Remove the hooks; the next run adds them again."""
        self._kept = None
        if "batch_runner" in vars(self):
            self.batch_runner.close()
            del self.batch_runner

    def end_run(self) -> None:
        """Remove the hooks, and note what the model wrote as it ran. Does nothing the second time."""
        if "batch_runner" in vars(self):
            self.batch_runner.close()
            self.note_writes()
        self.close()


def run_job(job: Job) -> None:
    """Run the remaining units of a harvest. Other processes may run it at the same time."""
    rank, world = rank_and_world() if _takes_share(job) else (0, 1)
    if world > 1 and job.source.units(1) is None:
        raise HooklineError("several processes can't share data of unknown length; give a dataset or a list of batches")
    job.renew()
    if not job.is_ready:
        job.ready = ReadyModel(job, keeps_rows=True)
    storage, manifest = job.prepare()
    units, done = unit_count(storage, manifest), committed(storage)
    checked = functools.partial(check_skipped_batches, storage, manifest)
    if units is not None and len(done) >= units and job.ready.together is None:
        job.source.compare(manifest.plan["unit"], checked)
        if job.append and world == 1:  # Among several processes, a late one may find that the others did everything.
            warn(f"{job.to!r} holds these data already, so append=True added nothing; give other data to add")
        job.ready.close()
        return
    try:
        with Progress(job.source.samples, _samples_done(storage, manifest, done), job.progress) as progress:
            if job.ready.together is not None:
                run_together(job, job.ready.together, progress)
            else:
                order = _order(job, storage, units, rank, world, progress)
                job.ready.unit_runner(progress).run(order, manifest.plan["unit"], checked, job.ready.end_run)
    finally:
        job.ready.end_run()
    if units is None:
        total = job.source.units(manifest.plan["unit"])
        assert total is not None
        end(storage, total)
    remove_leftovers(storage)  # A process may have died during this run.


def run_unit(job: Job, unit: int) -> Counts:
    """Run one unit unless it is done, then remove the hooks; return counts of the work."""
    storage, manifest = job.ready.open_store()
    counts, units = Counts(), unit_count(storage, manifest)
    if unit < 0 or (units is not None and unit >= units):
        raise HooklineError(f"there is no unit {unit}: the harvest has units 0 to {(units or 1) - 1}")
    if unit in committed(storage):
        return counts
    with job.ready.busy:
        try:
            job.ready.unit_runner(counts).run([unit], manifest.plan["unit"], lambda *_: None)
        finally:
            job.ready.close()
    return counts


def _takes_share(job: Job) -> bool:
    """Return True if this process runs only its share of the units."""
    return job.share if job.share is not None else not may_be_a_stage()


def _order(job: Job, storage: Storage, units: int | None, rank: int, world: int, progress: Progress) -> Iterator[int]:
    """Return the units that this process runs, in order. If their number is unknown, the series is endless."""
    if units is None:
        return (unit for unit in itertools.count() if unit not in committed(storage))
    jumps = job.source.batch_size is not None  # An iterable of batches would have to be read again for each jump.
    return turns(units, lambda: committed(storage), rank, world, lambda: jumps and progress.lost > 0)


def _samples_done(storage: Storage, manifest: Manifest, done: set[int]) -> int:
    """Return how many samples are in the finished units."""
    return sum(read_record(storage, manifest, unit).samples for unit in done)


def run_together(job: Job, together: Replica, listener: Listener) -> None:
    """Run the remaining units of a harvest on a model that several ranks hold together."""
    if job.on_error != "raise":
        raise HooklineError('on_error="skip" is not for a model that several processes hold together: they would no '
                            "longer run it equally often; leave the bad samples out of the data")  # fmt: skip
    mine = _divide_units(job, together, first=True)
    while mine:
        _run_share(job, together, mine, listener)
        mine = _divide_units(job, together, first=False)


def _divide_units(job: Job, together: Replica, first: bool) -> list[list[int]]:
    """Return the units of this process, then those of each group of processes that run the same batches.

    If no units are left, return []. The ranks exchange their lists of units that are left, so that all
    agree.
    """
    storage, manifest = job.ready.open_store()
    units = unit_count(storage, manifest)
    assert units is not None
    left = sorted(set(range(units)) - committed(storage))
    if first:  # If there are several replicas, each begins with its own share.
        number = dist.get_world_size() // len(together.ranks)
        index = together.ranks[0] * number // dist.get_world_size()
        left = share_of(left, index, number) or left
    said_by_rank = meet(
        together.ranks, json.dumps([left, together.alike[:1] or [dist.get_rank()]]), "the units of a harvest"
    )
    agreed = sorted({unit for said in said_by_rank.values() for unit in json.loads(said)[0]})
    leaders = sorted({json.loads(said)[1][0] for said in said_by_rank.values()})
    own = leaders.index((together.alike or (dist.get_rank(),))[0])
    shares = [agreed[start :: len(leaders)] for start in range(len(leaders))]
    return [shares[own], *shares] if agreed else []


def _run_share(job: Job, together: Replica, shares: Sequence[list[int]], listener: Listener) -> None:
    """Run this process's share, then repeat the first batch until every process has run equally many."""
    ready = job.ready
    _, manifest = ready.open_store()
    size, (own, *every) = manifest.plan["unit"], shares
    if not together.alike or dist.get_rank() == together.alike[0] or not job.options.gather:
        ready.unit_runner(listener).run(own, size, lambda *_: None)
    else:
        for _, batch in job.source.batches(own, size, lambda *_: None):
            ready.batch_runner.run(batch)
    counts = [sum(job.source.count(unit, size) for unit in units) for units in every]
    for _ in range(max(counts) - sum(job.source.count(unit, size) for unit in own)):
        ready.batch_runner.run(job.source.first())
