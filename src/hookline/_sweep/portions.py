"""What processes exchange about a sweep, in a folder or in messages: what it is, its units, and what was measured.

A unit is some cells of one batch, which one process measures together. In a folder, sweep.json holds the specification
and the units, and units/ has a file for each unit that is done. A file is written as a whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from hookline._jobs.compare_specs import difference_of_specs, difference_of_versions
from hookline._jobs.fingerprints import reconcile
from hookline._store.disk_format import has_manifest
from hookline._store.storage import open_storage
from hookline._untrusted_files import parse_json
from hookline.errors import StoreError, did_you_mean, first_line

_PLAN, _UNITS = "sweep.json", "units"
_FORMAT = ["hookline sweep", 1]
_UNIT = re.compile(r"([0-9]{8,15})\.safetensors")
_AGAIN = "remove it and run the sweep again"


class PackCounts(NamedTuple):
    """How cells were measured."""

    packed: int = 0  # The cells that shared runs.
    runs: int = 0  # The runs that cells shared.
    rounding: float = 0.0  # See `Packs.rounding`.
    notes: tuple[str, ...] = ()
    does_edit: bool = False  # See `Change.does_edit`.

    def since(self, before: PackCounts) -> PackCounts:
        """Return the counts without those before. Notes, which are made once, stay."""
        return self._replace(packed=self.packed - before.packed, runs=max(self.runs - before.runs, 0))

    def plus(self, other: PackCounts) -> PackCounts:
        """Return the counts of both."""
        return PackCounts(
            self.packed + other.packed,
            self.runs + other.runs,
            max(self.rounding, other.rounding),
            (*self.notes, *(note for note in other.notes if note not in self.notes)),
            self.does_edit or other.does_edit,
        )


class Measured(NamedTuple):
    """What was measured of one batch."""

    base: Any
    values: Mapping[str, Any]  # By site.
    dimensions: Mapping[str, tuple[str, ...]]
    counts: PackCounts


class SweepUnit(NamedTuple):
    """Cells that are measured together."""

    run: int  # The number of the batch.
    cells: list[int]


@dataclass(frozen=True)
class SweepPlan:
    """The places of a sweep, which are those of each batch, and the units into which they are divided."""

    sites: list[str]
    dimensions: dict[str, tuple[str, ...]]
    units: list[SweepUnit]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON, without the sites, which the specification has."""
        return {"dimensions": self.dimensions, "units": self.units}

    @classmethod
    def from_json(cls, found: Any, sites: Any) -> SweepPlan:
        """Read a plan; raise a ValueError if it is none."""
        names = {site: tuple(map(str, names)) for site, names in found["dimensions"].items()}
        units = [SweepUnit(run, cells) for run, cells in found["units"]]
        plan = cls([str(site) for site in sites], names, units)
        numbers = [(unit.run, cell) for unit in units for cell in unit.cells]
        batches = 1 + max((run for run, _ in numbers), default=0)
        every = [(run, cell) for run in range(batches) for cell in range(len(plan.sites))]
        if not all(type(run) is type(cell) is int for run, cell in numbers) or sorted(numbers) != every:
            raise ValueError("its units")
        return plan


@dataclass(frozen=True)
class Portion:
    """What was measured of the cells of a unit, and without a change."""

    base: Any
    values: dict[int, Any]  # By the number of the cell.
    counts: PackCounts = field(default_factory=PackCounts)

    def to_bytes(self) -> bytes:
        """Return a safetensors file. Numbers become tensors of one element."""
        record = torch.frombuffer(bytearray(json.dumps(self.counts).encode()), dtype=torch.uint8)
        values = {"base": self.base, **{str(cell): value for cell, value in self.values.items()}}
        tensors = {name: _as_tensor(value) for name, value in values.items()}
        return safetensors.torch.save({"counts": record, **tensors})

    @classmethod
    def from_bytes(cls, data: bytes, unit: SweepUnit) -> Portion:
        """Read what `to_bytes` wrote for a unit; raise an error of any kind if it is not that."""
        found = safetensors.torch.load(data)
        packed, runs, rounding, notes, does_edit = parse_json(bytes(found.pop("counts").tolist()))
        counts = PackCounts(int(packed), int(runs), float(rounding), tuple(map(str, notes)), does_edit is True)
        return cls(_as_value(found["base"]), {cell: _as_value(found[str(cell)]) for cell in unit.cells}, counts)


class SweepFolder:
    """The folder in which a sweep keeps what was measured. Several processes may write to it."""

    def __init__(self, to: str) -> None:
        self.storage = open_storage(to)
        self.plan: SweepPlan

    def begin(self, spec: Mapping[str, Any], make_plan: Callable[[], SweepPlan]) -> SweepPlan:
        """Begin or resume a sweep, and return its plan; refuse a folder that holds something else."""
        if has_manifest(self.storage):
            raise StoreError(f"{str(self.storage)!r} holds a harvest; give the sweep another path")
        if _PLAN not in self.storage.names(""):
            content = {"format": _FORMAT, "spec": spec, "plan": make_plan().as_json()}
            self.storage.create(_PLAN, json.dumps(content).encode())
        found = self._read_plan()
        different = difference(found, spec)
        if different:
            raise StoreError(f"{str(self.storage)!r} holds another sweep: {different}; give another path")
        return self.plan

    def _read_plan(self) -> dict[str, Any]:
        """Read sweep.json, and return the specification."""
        name = repr(f"{self.storage}/{_PLAN}")
        try:
            found = parse_json(self.storage.read(_PLAN))
            form, spec = found["format"], found["spec"]
            if form == _FORMAT:
                self.plan = SweepPlan.from_json(found["plan"], spec["places"])
                dict(spec["model"])
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise StoreError(f"{name} is damaged ({first_line(error)}); {_AGAIN}") from error
        if form != _FORMAT:
            raise StoreError(f"{name} is of format {first_line(form)}, but this hookline reads {_FORMAT}")
        return dict(spec)

    def done(self) -> set[int]:
        """Return the units that are done."""
        found = (_UNIT.fullmatch(name) for name in self.storage.names(_UNITS))
        return {int(name[1]) for name in found if name is not None} & {*range(len(self.plan.units))}

    def write(self, unit: int, portion: Portion) -> bool:
        """Write what was measured of a unit; return False if another process was faster."""
        return self.storage.create(_name(unit), portion.to_bytes())

    def _read(self, unit: int, sizes: Mapping[str, int]) -> Portion:
        name = _name(unit)
        try:
            data = self.storage.read(name, 0, sizes[name.partition("/")[2]])
            return Portion.from_bytes(data, self.plan.units[unit])
        except StoreError:
            raise
        except Exception as error:  # The file may hold anything.
            raise StoreError(f"{f'{self.storage}/{name}'!r} is damaged ({first_line(error)}); {_AGAIN}") from error

    def read(self) -> dict[int, Portion]:
        """Return what was measured of the units that are done."""
        sizes = self.storage.sizes(_UNITS)
        return {unit: self._read(unit, sizes) for unit in sorted(self.done())}


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say in words how a sweep differs from the one that was begun, or return ""."""
    different = difference_of_versions(found, wanted) or _difference_of_places(found["places"], wanted["places"])
    same = {**wanted, "model": reconcile(wanted["model"], found["model"])}
    return different or difference_of_specs(found, same)


def _difference_of_places(found: Sequence[str], wanted: Sequence[str]) -> str:
    theirs, ours = dict.fromkeys(found), dict.fromkeys(wanted)
    for site in ours:
        if site not in theirs:
            return f"it has no {site!r}, which this run is to measure{did_you_mean(site, found)}"
    for site in theirs:
        if site not in ours:
            return f"it has {site!r}, which this run does not measure"
    return "its places come in another order" if list(found) != list(wanted) else ""


def _name(unit: int) -> str:
    return f"{_UNITS}/{unit:08d}.safetensors"


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value.detach().cpu().contiguous()


def _as_value(tensor: Tensor) -> Any:
    """Return a measurement as `settled` would: a tensor of one element as a number."""
    return float(tensor) if tensor.numel() == 1 else tensor
