"""How processes share a harvest: which units each rank takes, and how ranks run a model that they hold together.

Where a launcher such as torchrun started several processes, each begins with a share of its own, and then helps the
others (`ranks`, `turns`). They do not talk to each other. A wrong rank, or a process that never comes, only costs time:
every unit is done by somebody, and if two do the same one, the store keeps the first.

Ranks that hold one model together run it in step (`run_together`). With FSDP every rank has batches of its own, and all
need as many forwards: those that are done first run their first batch again, and keep nothing of it. With tensor
parallelism all have the same batch, and the first rank writes.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist

from hookline._harvest.harvest_progress import Listener
from hookline._harvest.job import Job
from hookline._kernel import is_running
from hookline._store.manifest import committed, how_many
from hookline.errors import HooklineError
from hookline.parallel import Replica, meet

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
