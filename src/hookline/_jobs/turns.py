"""Divide the units of a job among processes. They need not communicate: `turns` looks at which units are done."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Unit = TypeVar("Unit")
_POLL = 0.05  # Seconds between two looks at what is done.


def share_of(units: list[Unit], rank: int, world: int) -> list[Unit]:
    """Return the units that one of `world` processes begins with: as many as the others have, in a row.

    >>> share_of([0, 1, 2, 3, 4], 0, 2), share_of([0, 1, 2, 3, 4], 1, 2)
    ([0, 1], [2, 3, 4])
    """
    return units[len(units) * rank // world : len(units) * (rank + 1) // world]


def turns(
    units: int,
    done: Callable[[], set[int]],
    rank: int = 0,
    world: int = 1,
    lost: Callable[[], bool] = bool,
    patience: Callable[[], float] = float,
) -> Iterator[int]:
    """Yield the units for a process to run: first its own share, then units of other processes that are not done.

    `done` returns the units that are done by now. At the end, every unit is done, or was yielded here.
    `lost` returns True once another process was faster with a unit of this share. Then both have the same share,
    because no launcher gave them ranks, and from then on units are taken at random.
    `patience` returns for how many seconds no other process may finish a unit before this one helps it.

    >>> list(turns(6, lambda: {1}, rank=1, world=2))
    [3, 4, 5, 0, 2]
    """
    left = sorted(set(range(units)) - done())
    given: set[int] = set()
    for unit in share_of(left, rank, world):
        if lost():
            break
        if unit not in done():
            given.add(unit)
            yield unit
    chance = random.Random()  # Leaves Python's global random numbers alone.
    seen, news = done(), time.monotonic()
    while left := sorted(set(range(units)) - given - (now := done())):
        if now - given - seen:
            seen, news = now, time.monotonic()
        if world > 1 and time.monotonic() - news < patience():
            time.sleep(_POLL)
            continue
        # Help from the end of the last share, which its own process reaches last. Each rank takes a different unit.
        unit = chance.choice(left) if lost() else left[-1 - rank % len(left)]
        given.add(unit)
        yield unit
