"""Share a sweep among processes, and resume it: each measures some units of cells, and gets what all have measured.

Processes meet in a folder (`to=`), through torch.distributed, or on Ray. Each makes the first run itself, for the base
values. Units are cells in a row, in the order in which their values pass, so each can reuse what comes before them.
In a folder, a process whose share is done waits a little for the others and then does the units that are left.
"""

from __future__ import annotations

import base64
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from hookline import Cache, Site, Store
from hookline._jobs.fingerprints import DIGESTS, digest, function_text, model_digest, without_writes
from hookline._jobs.ray_pool import ray_pool
from hookline._jobs.turns import share_of, turns
from hookline._kernel import latest_value, rank_and_world, sites_without_values
from hookline._progress import Bar
from hookline._sweep.changes import Change
from hookline._sweep.job import SweepJob
from hookline._sweep.portions import Measured, PackCounts, Portion, SweepFolder, SweepPlan, SweepUnit, difference
from hookline._sweep.sweeper import Sweeper
from hookline._sweep.task import settled
from hookline._torch import is_running, may_be_a_stage
from hookline.errors import HooklineError, HooklineWarning, first_line, warn
from hookline.parallel import meet, replica

_SHORTEST = 0.5  # Seconds that a unit takes at least, if there are enough: its file takes some milliseconds.
_WHAT = "a sweep that all processes share (share=False measures it in one)"


def sweep_shared(
    job: SweepJob, to: str | None, share: bool | None, engine: str | None, workers: int | None, progress: bool | None
) -> list[Measured] | None:
    """Measure a sweep with other processes or into a folder; None if this process has it to itself."""
    if engine == "ray":
        return _on_ray(job, to, workers, progress)
    rank, world = _rank_and_world(job, to, share)
    if to is None and world == 1:
        return None
    part = Part(job)
    with part:
        if to is not None:
            return _through_folder(part, SweepFolder(to), rank, world, progress)
        return _through_messages(part, rank, world, progress)


def _rank_and_world(job: SweepJob, to: str | None, share: bool | None) -> tuple[int, int]:
    """Return the rank of this process and how many share the sweep: (0, 1) if it is alone."""
    rank, world = rank_and_world()
    if world == 1:
        return 0, 1
    why = ""
    if replica(job.owner) is not None:
        why = "the processes hold this model together, so each of them takes part in every run"
        if to is not None:
            raise HooklineError(f"to= is not for this sweep: {why}; leave to= out")
    elif may_be_a_stage():
        why = "the processes may be stages of a pipeline"
    elif any(isinstance(module, nn.parallel.DistributedDataParallel) for module in job.owner.modules()):
        why = "a DistributedDataParallel model may wait for all processes in each run; give model.module"
    elif to is None and not is_running():
        why = "the processes are not connected: call torch.distributed.init_process_group, or give to=, a folder"
        if share is None:
            warn(f"each of the {world} processes measures the whole sweep: {why}; share=False says this is meant")
    if share and why:
        raise HooklineError(f"share=True can't be: {why}")
    return (rank, world) if share is not False and not why else (0, 1)


class Part:
    """A sweep in this process: it measures units, and keeps the first run of the batch that was last at work."""

    def __init__(self, job: SweepJob) -> None:
        self.job = job
        self.bar = Bar("sweep", progress=False)
        self._sites: list[str] = []  # The places of each batch.
        self._run = -1
        self._block = ExitStack()
        self._at_work: Sweeper
        self._seconds = 0.0  # How long its first run took.

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()

    @cached_property
    def spec(self) -> dict[str, Any]:
        """What the sweep is, as plain JSON, with fingerprints of the model, the functions and the inputs."""
        job, change, model = self.job, self.job.changes[0], self.job.owner
        before = model_digest(model)
        self.sweeper(0)
        return {
            "digests": DIGESTS,
            "model": without_writes(before, model),
            "places": self._sites,
            "change": str(change),
            "edit": function_text(change.edit, model=model),
            "values": digest([_contents(change.values), None if change.needs_sources else change.patch]),
            "against": None if change.against is None else [digest(_contents(one.against)) for one in job.changes],
            "inputs": [None if run is None else digest(run) for run in job.runs],
            "method": None if job.makes_model else getattr(job.model, "__name__", None),
            "metric": [function_text(one, model=model) for one in dict.fromkeys(job.metrics)],
            "metric_at": None if job.metric_at is None else str(job.metric_at),
        }

    def sweeper(self, run: int) -> Sweeper:
        """Return what measures a batch, after its first run."""
        if run != self._run:
            self._block.close()
            self._run = -1
            self._at_work = self.job.sweeper(run)
            began = time.perf_counter()
            self._block.enter_context(self._at_work.begun())
            self._seconds = time.perf_counter() - began
            self._run = run
            self._compare([str(cell.site) for cell in self._at_work.cells])
        self._at_work.bar = self.bar
        return self._at_work

    def _compare(self, sites: list[str]) -> None:
        self._sites = self._sites or sites
        if sites != self._sites:
            differing = sorted({*sites} ^ {*self._sites}) or sites
            raise HooklineError(f"'{differing[0]}' is not a place in each of the batches; give batches of one shape")

    def divide(self, processes: int) -> SweepPlan:
        """Divide the cells into units: packs of cells that share runs, and groups of cells that run alone."""
        first = self.sweeper(0)
        numbers = {cell: number for number, cell in enumerate(first.cells)}
        most = -(-len(numbers) * len(self.job.runs) // processes)
        packs = first.packs
        packed = [] if packs is None else [cell for cell in first.cells if packs.can_take(cell)]
        units: list[list[int]] = []
        if packs is not None and packed:
            planned = [[numbers[cell] for cell in pack] for pack in packs.plan(packed, most)]
            units += _merged(planned, packs.seconds, most)
        taken = {number for unit in units for number in unit}
        units += _merged([[number] for number in numbers.values() if number not in taken], self._seconds, most)
        every = [SweepUnit(run, cells) for run in range(len(self.job.runs)) for cells in units]
        return SweepPlan(self._sites, first.dimensions, every)

    def measure(self, unit: SweepUnit) -> Portion:
        """Measure the cells of a unit."""
        sweeper = self.sweeper(unit.run)
        before = sweeper.counts()
        cells = [sweeper.cells[number] for number in unit.cells]
        sweeper.measure(cells)
        base, *values = settled([sweeper.base, *(sweeper.measured.pop(cell) for cell in cells)])
        return Portion(base, dict(zip(unit.cells, values, strict=True)), sweeper.counts().since(before))


def joined(plan: SweepPlan, portions: list[Portion], changes: list[Change]) -> list[Measured]:
    """Return what was measured of each batch, given what was measured of each unit."""
    found = []
    for run, change in enumerate(changes):
        own = [portion for unit, portion in zip(plan.units, portions, strict=True) if unit.run == run]
        values = {number: value for portion in own for number, value in portion.values.items()}
        counts = PackCounts()
        for portion in own:
            counts = counts.plus(portion.counts)
        change.does_edit = counts.does_edit
        change.refuse_idle()
        named = {site: values[number] for number, site in enumerate(plan.sites)}
        found.append(Measured(own[0].base, named, plan.dimensions, counts))
    return found


def _merged(groups: list[list[int]], seconds: float, most: int) -> list[list[int]]:
    """Join small groups to units that take a while, if that leaves several for each process."""
    least = min(_SHORTEST / max(seconds, 1e-9), most / 4)
    units: list[list[int]] = []
    for group in groups:
        if units and len(units[-1]) + len(group) <= least:
            units[-1] += group
        else:
            units.append(list(group))
    return units


def _contents(given: Any) -> Any:
    """Return the values that a change puts in, in a form that has a digest."""
    if isinstance(given, Store):
        return [dict(given.spec), given.samples]
    if isinstance(given, Cache):
        without = sites_without_values(given)
        sites = [site for site in map(Site.parse, given) if site not in without]
        return {str(site): latest_value(given, site)[0] for site in sites}
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    return given


def _through_folder(part: Part, folder: SweepFolder, rank: int, world: int, progress: bool | None) -> list[Measured]:
    """Measure the units that are not in a folder yet, and return what is in it then."""
    plan = folder.begin(part.spec, lambda: part.divide(world))
    done = folder.done()
    before = sum(len(plan.units[unit].cells) for unit in done)
    cells = len(plan.sites) * len(part.job.runs)
    with Bar("sweep", cells, before, progress, unit="places") as part.bar:
        pace = Pace()
        for number in turns(len(plan.units), folder.done, rank, world, pace.has_lost, pace.patience):
            with pace.timed():
                portion = part.measure(plan.units[number])
            pace.lost += not folder.write(number, portion)
    folder.storage.remove_temporary("units")
    found = folder.read()
    return joined(plan, [found[number] for number in range(len(plan.units))], part.job.changes)


class Pace:
    """How long the units take here, and how many of them another process was faster with."""

    def __init__(self) -> None:
        self.longest = 0.5
        self.lost = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a unit."""
        began = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - began)

    def patience(self) -> float:
        """Return how many seconds without news from other processes mean that they may have died."""
        return 2 * self.longest

    def has_lost(self) -> bool:
        """Return True once another process was faster with a unit."""
        return self.lost > 0


def _through_messages(part: Part, rank: int, world: int, progress: bool | None) -> list[Measured]:
    """Measure the share of this rank, and exchange the results. The first rank divides the cells."""

    def begin() -> Any:
        return {"spec": part.spec, "plan": part.divide(world).as_json() if rank == 0 else None}

    heard = _exchange(begin, world)
    first = heard[0]
    for other, said in enumerate(heard):
        different = difference(first["spec"], said["spec"])
        if different:
            raise HooklineError(
                f"rank {other} has another sweep than rank 0: of that on rank 0, {different}; "
                "share=False measures each in its own process"
            )
    plan = SweepPlan.from_json(first["plan"], first["spec"]["places"])
    numbers = [*range(len(plan.units))]
    own = share_of(numbers, rank, world)

    def measure() -> Any:
        cells = sum(len(plan.units[number].cells) for number in own)
        with Bar("sweep", cells, 0, progress, unit="places") as part.bar:
            return [base64.b64encode(part.measure(plan.units[number]).to_bytes()).decode() for number in own]

    found = [text for said in _exchange(measure, world) for text in said]
    portions = [Portion.from_bytes(base64.b64decode(text), unit) for text, unit in zip(found, plan.units, strict=True)]
    return joined(plan, portions, part.job.changes)


def _exchange(make: Callable[[], Any], world: int) -> list[Any]:
    """Return what each rank makes, as plain JSON. If one of them fails, all raise."""
    failed: Exception | None = None
    try:
        said = {"made": make()}
    except Exception as error:  # The other ranks would wait for this one.
        failed, said = error, {"failed": f"{type(error).__name__}: {first_line(error)}"}
    heard = {rank: json.loads(text) for rank, text in meet(range(world), json.dumps(said), _WHAT).items()}
    if failed is not None:
        raise failed
    for rank, one in heard.items():
        if "failed" in one:
            raise HooklineError(f"the sweep failed on rank {rank}: {one['failed']}")
    return [heard[rank]["made"] for rank in range(world)]


class RayJob:
    """A sweep that is sent to workers on Ray."""

    def __init__(self, job: SweepJob, to: str | None) -> None:
        self.job = job
        self.to = to

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent: the arguments."""
        return {"job": self.job, "to": self.to}

    @cached_property
    def part(self) -> Part:
        """The sweep in this process."""
        return Part(self.job)


def _on_ray(job: SweepJob, to: str | None, workers: int | None, progress: bool | None) -> list[Measured]:
    """Measure a sweep on Ray. What workers warn of is said here."""
    device = None if job.makes_model else next((one.device for one in job.owner.parameters()), torch.device("cpu"))
    said = set[str]()
    with ray_pool(RayJob(job, to), workers, device) as pool:
        (spec, plan, found), texts = pool.call(partial(_begin_on_ray, processes=pool.workers))
        _repeat(texts, said)
        portions = {number: Portion.from_bytes(data, plan.units[number]) for number, data in found.items()}
        left = [number for number in range(len(plan.units)) if number not in portions]
        done = sum(len(portion.values) for portion in portions.values())
        with Bar("sweep", len(plan.sites) * len(job.runs), done, progress, unit="places") as bar:
            measure = partial(_measure_on_ray, spec=spec, plan=plan)
            for (number, data), texts in pool.each(measure, left) if left else ():
                portions[number] = Portion.from_bytes(data, plan.units[number])
                bar.advance(len(portions[number].values))
                _repeat(texts, said)
    return joined(plan, [portions[number] for number in range(len(plan.units))], job.changes)


def _begin_on_ray(sent: RayJob, processes: int) -> Any:
    """Begin or resume a sweep; return its specification, its plan, and the files of the units that are done."""

    def begin() -> Any:
        part = sent.part
        with part:
            if sent.to is None:
                return part.spec, part.divide(processes), {}
            folder = SweepFolder(sent.to)
            plan = folder.begin(part.spec, lambda: part.divide(processes))
            return part.spec, plan, {number: portion.to_bytes() for number, portion in folder.read().items()}

    return _with_warnings(begin)


def _measure_on_ray(sent: RayJob, number: int, spec: Mapping[str, Any], plan: SweepPlan) -> Any:
    """Measure a unit, and write it into the folder, if there is one; return its number and its file."""

    def measure() -> Any:
        part = sent.part
        different = difference(spec, part.spec)
        if different:
            raise HooklineError(f"a worker has another sweep than the first one: of the first, {different}")
        portion = part.measure(plan.units[number])
        if sent.to is not None:
            SweepFolder(sent.to).write(number, portion)
        return number, portion.to_bytes()

    return _with_warnings(measure)


def _with_warnings(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result of a function, and what hookline warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HooklineWarning)
        found = function()
    return found, [str(one.message) for one in caught if issubclass(one.category, HooklineWarning)]


def _repeat(texts: list[str], said: set[str]) -> None:
    """Warn of what a worker warned of, once."""
    for text in texts:
        if text not in said:
            said.add(text)
            warn(text)
