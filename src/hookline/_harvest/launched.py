"""Which units a process takes, where a launcher such as torchrun started several: nothing is said between them.

Each begins with a share of its own, and then helps the others. A wrong rank, or a process that never comes, only costs
time: every unit is done by somebody, and if two do the same one, the store keeps the first.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist

from hookline._kernel import is_running
from hookline.errors import HooklineError

# How torchrun (and what is like it), Slurm and Open MPI tell a process its rank, and how many there are.
_TOLD = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def ranks(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return which process this is, and of how many.

    >>> ranks({"RANK": "1", "WORLD_SIZE": "4"}), ranks({})
    ((1, 4), (0, 1))
    """
    told = os.environ if environment is None else environment
    for rank, world in _TOLD:
        if rank not in told or world not in told:
            continue
        try:
            found = int(told[rank]), int(told[world])
        except ValueError:
            found = -1, -1
        if not 0 <= found[0] < found[1]:
            raise HooklineError(f"{rank}={told[rank]} and {world}={told[world]} are no rank and number of processes")
        return found
    return (dist.get_rank(), dist.get_world_size()) if environment is None and is_running() else (0, 1)


def turns(
    units: int, done: Callable[[], set[int]], rank: int = 0, world: int = 1, lost: Callable[[], bool] = bool
) -> Iterator[int]:
    """Return the units for a process to do, each when it is asked for: those of its share, then what others have left.

    `done` returns those that are done by now. When all have been given, none is left that nobody has done or begun.
    `lost` says that another was faster with a unit of this process's share: one that has the same share, where nobody
    told them their ranks. From then on units are taken at random.

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
    chance = random.Random()  # Nobody else's numbers are drawn.
    while left := sorted(set(range(units)) - given - done()):
        # From the end, where the process that has the share arrives last; each helper at another one.
        unit = chance.choice(left) if lost() else left[-1 - rank % len(left)]
        given.add(unit)
        yield unit
