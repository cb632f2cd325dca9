"""Run a harvest in this process: the units that nobody has done yet, all of them (`run`) or one (`run_one`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from hookline._harvest.harvest_progress import Counts, Progress
from hookline._harvest.job import Job
from hookline._harvest.resume import check_skipped_batches
from hookline._harvest.share_units import ranks, run_together, turns
from hookline._kernel import may_be_a_stage
from hookline._store.create_or_append import end
from hookline._store.manifest import Manifest, committed, how_many, read_record
from hookline._store.storage import Storage
from hookline._store.writer import sweep
from hookline.errors import HooklineError, warn


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
