"""Running a harvest in this process: the units that are not done yet, so that many processes can share them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hookline.errors import HooklineError, StoreError
from hookline.harvest.progress import Progress
from hookline.store.places import Place
from hookline.store.records import Manifest
from hookline.store.writer import committed, end, how_many, read_record, sweep

if TYPE_CHECKING:
    from hookline.harvest.plan import Harvest


def run(plan: Harvest) -> None:
    """Run what is left of a harvest; other processes may be at it too."""
    rank, world = ranks()
    if world > 1 and plan.source.units(1) is None:
        raise HooklineError("several processes can't share data of unknown length; give a dataset or a list of batches")
    live = plan.live
    place, manifest = live.begun()
    units = how_many(place, manifest)
    done = committed(place)
    if units is not None and len(done) >= units:
        return
    sweep(place)
    _refuse_too_large(plan, len(done), units)
    try:
        with Progress(plan.source.samples, _samples(place, manifest, done), plan.progress) as progress:
            order = _unknown(place) if units is None else shared(place, units, rank, world)
            live.runner(progress).run(
                order, manifest.plan["unit"], lambda unit, text: _check(place, manifest, unit, text)
            )
    finally:
        live.close()
    if units is None:
        total = plan.source.units(manifest.plan["unit"])
        assert total is not None
        end(place, total)


def ranks() -> tuple[int, int]:
    """Return which process of how many this is, as launchers such as torchrun tell it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def shared(place: Place, units: int, rank: int, world: int) -> Iterator[int]:
    """Return the units that nobody has done when they come: first this process's share, then what is left."""
    left = sorted(set(range(units)) - committed(place))
    start = len(left) * rank // world
    for unit in left[start:] + left[:start]:
        if unit not in committed(place):
            yield unit


def _unknown(place: Place) -> Iterator[int]:
    """Return units without end; the data say when it is over."""
    return (unit for unit in itertools.count() if unit not in committed(place))


def _samples(place: Place, manifest: Manifest, done: set[int]) -> int:
    return sum(read_record(place, manifest, unit).samples for unit in done)


def _check(place: Place, manifest: Manifest, unit: int, text: str) -> None:
    """Refuse to go on if what is passed over is not what was harvested then."""
    if unit in committed(place) and read_record(place, manifest, unit).inputs not in ("", text):
        size = manifest.plan["unit"]
        raise StoreError(
            f"the data are not those of the store: batches {unit * size} to {(unit + 1) * size - 1} were others when "
            "they were harvested; give the same data in the same order, or another path"
        )


def _refuse_too_large(plan: Harvest, done: int, units: int | None) -> None:
    told = plan.estimate()
    if told.bytes is None or told.free is None or not units:
        return
    left = told.bytes * (units - done) // units
    if left > told.free:
        raise StoreError(f"{str(plan.to)!r} has no room: {told}; keep fewer sites, a smaller dtype or fewer rows")
