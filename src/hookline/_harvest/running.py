"""Running a harvest in this process: the units that are not done yet, so that many processes can share them."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hookline._harvest.launched import ranks, turns
from hookline._harvest.progress import Progress
from hookline._harvest.replicas import run_together
from hookline._harvest.units import Told
from hookline._kernel import may_be_a_stage
from hookline._store.manifest import MANIFEST, Manifest
from hookline._store.places import Place
from hookline._store.writer import committed, end, how_many, read_record, sweep
from hookline.errors import HooklineError, StoreError, warn

if TYPE_CHECKING:
    from hookline._harvest.plan import Harvest


def run(plan: Harvest) -> None:
    """Run what is left of a harvest; other processes may be at it too."""
    rank, world = ranks() if _shares(plan) else (0, 1)
    if world > 1 and plan.source.units(1) is None:
        raise HooklineError("several processes can't share data of unknown length; give a dataset or a list of batches")
    plan.renew()
    place, manifest = prepare(plan)
    units, done = how_many(place, manifest), committed(place)
    checked = functools.partial(_check, place, manifest)
    if units is not None and len(done) >= units and plan.live.together is None:
        plan.source.compare(manifest.plan["unit"], checked)
        if plan.append and world == 1:  # One of several processes may come when the others have done everything.
            warn(f"{str(plan.to)!r} holds these data already, so append=True added nothing; give other data to add")
        return
    try:
        with Progress(plan.source.samples, _samples(place, manifest, done), plan.progress) as progress:
            if plan.live.together is not None:
                run_together(plan, plan.live.together, progress)
            else:
                lost = lambda: _jumps(plan) and progress.lost > 0  # noqa: E731
                order = _unknown(place) if units is None else turns(units, lambda: committed(place), rank, world, lost)
                plan.live.runner(progress).run(order, manifest.plan["unit"], checked)
    finally:
        plan.live.close()
        plan.live.note()
    if units is None:
        total = plan.source.units(manifest.plan["unit"])
        assert total is not None
        end(place, total)
    sweep(place)  # Of a process that died meanwhile.


def _shares(plan: Harvest) -> bool:
    """Return whether this process runs some of the units only."""
    return plan.share if plan.share is not None else not may_be_a_stage()


class Heard(Told):
    """What was done."""

    def __init__(self) -> None:
        self.committed = self.samples = self.rows = self.nbytes = 0
        self._lock = threading.Lock()  # Several threads write.

    def wrote(self, rows: int, nbytes: int) -> None:
        """Count what is on disk."""
        with self._lock:
            self.rows += rows
            self.nbytes += nbytes

    def passed(self, samples: int) -> None:
        """Count what has been through the model."""
        self.samples += samples

    def finished(self, unit: int, committed: bool) -> None:
        """Count what was kept."""
        self.committed += committed


def run_one(plan: Harvest, unit: int) -> Heard:
    """Run one unit, unless it is done, and take the hooks away again; return what was done."""
    place, manifest = plan.live.begun()
    heard, units = Heard(), how_many(place, manifest)
    if unit < 0 or (units is not None and unit >= units):
        raise HooklineError(f"there is no unit {unit}: the harvest has units 0 to {(units or 1) - 1}")
    if unit in committed(place):
        return heard
    with plan.live.busy:
        try:
            plan.live.runner(heard).run([unit], manifest.plan["unit"], lambda *_: None)
        finally:
            plan.live.close()
    return heard


def prepare(plan: Harvest) -> tuple[Place, Manifest]:
    """Begin a store, or go on with it: clear away what the dead left, and see that there is room for the rest."""
    if MANIFEST not in plan.place.names(""):
        _check_room(plan, 1.0)  # Before anything is there that another call would have to be like.
    place, manifest = plan.live.begun()
    sweep(place)
    units = how_many(place, manifest)
    if units:
        _check_room(plan, 1 - len(committed(place)) / units)
    return place, manifest


def _check_room(plan: Harvest, share: float) -> None:
    """Refuse what can't fit."""
    told = plan.estimate()
    if told.bytes is None or told.free is None:
        return
    if told.bytes * share > told.free * (1 if told.is_sure else 4):  # Of sequences, a first batch may mislead.
        raise StoreError(f"{str(plan.to)!r} has no room: {told}; keep fewer sites, a smaller dtype or fewer rows")


def _unknown(place: Place) -> Iterator[int]:
    """Return units without end; the data say when it is over."""
    return (unit for unit in itertools.count() if unit not in committed(place))


def _jumps(plan: Harvest) -> bool:
    """Return whether any unit may come next: an iterable of batches would be passed over again for each."""
    return plan.source.batch_size is not None


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
