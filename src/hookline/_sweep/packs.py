"""Measure many cells of a sweep in one run: the batch holds a copy for each of them, changed only in its own rows.

The last copy of each pack is left unchanged. Its output has to be that of the first run, so a model whose samples
influence each other is noticed in every run; the last copy is also what experts with a capacity drop first. Modules
that are over before the first change of a pack are not run: they return what they returned in the first run.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._kernel import describe, get_part, put_part, short_form, split
from hookline._sweep.batch_rows import (
    MIXED,
    Difference,
    Dims,
    NotCopies,
    cuttable,
    difference,
    differences,
    repeat_arguments,
    repeat_value,
    row_dims,
    rows_given,
    rows_of,
    tensors_of,
)
from hookline._sweep.changes import Change
from hookline._sweep.first_run import Cell, RunLog, Spot, modules_before, whole_places
from hookline._sweep.pack_sizes import PackSizes
from hookline._sweep.task import ModelTask, checked

_RERUN = 2  # So many packs are run again unchanged where a larger batch is rounded differently.
_TIMED = 2  # So many packs are timed. On a GPU the first may be slow, since torch then chooses kernels.


class Unpackable(Exception):
    """The reason why the cells of a model can't share a run."""


class FirstRun(NamedTuple):
    """What the first run showed."""

    output: Any
    log: RunLog
    spots: dict[Cell, Spot]


class Unchanged(NamedTuple):
    """The unchanged copy of a pack."""

    value: Any
    apart: list[Difference]  # How far its tensors are from those of the first run.


class Packs:
    """Measures cells in packs. See the top of this file."""

    def __init__(self, task: ModelTask, change: Change, first: FirstRun, batch: int | None) -> None:
        self.task = task
        self.change = change
        self.first = first
        self.rounding = 0.0  # How far an unchanged copy was from the first run, as a share of the size of its elements.
        self.runs = 0
        self.timed = 0  # How many runs were timed.
        self.rerun = 0  # How many packs were run again unchanged, to tell rounding from influence.
        self.dim = self._find_dims()
        device = next(tensors_of(first.output)).device
        self.sizes = PackSizes(device, self._bytes_of_copy(), None if batch is None else batch - 1)

    @property
    def model(self) -> nn.Module:
        """The model that is run."""
        return self.task.model

    def _find_dims(self) -> int:
        """Run two copies, unchanged. Find the dimensions that count rows; return that of the arguments."""
        if rows_given(self.task.arguments, 0) is None:
            raise Unpackable("its arguments have no tensor, so there is no batch to enlarge")
        reason = ""
        for dim in (0, 1):
            try:
                self._find_dims_at(dim)
            except Unpackable as error:
                reason = reason or str(error)
            except NotCopies:
                reason = reason or "with two copies of the batch, its output is not twice that with one"
            except Exception as error:
                if is_out_of_memory(error):
                    raise Unpackable("two copies of the batch do not fit into memory") from None
                first = str(error).strip().partition("\n")[0]
                reason = reason or f"with two copies of the batch it raises {type(error).__name__}: {first}"
            else:
                return dim
        raise Unpackable(reason)

    def _find_dims_at(self, dim: int) -> None:
        log = RunLog(keeps_modules=False)
        sites = list(dict.fromkeys(cell.site for cell in self.first.spots))
        places = whole_places(self.model, self.change.asked)
        hooks = log.hook(self.model, places, modules_before(self.model, sites))
        began = time.perf_counter()
        output = self.task.run(hooks, repeat_arguments(self.task.arguments, 2, dim))
        self.seconds = (time.perf_counter() - began) / 2  # About those of a copy.
        self.output_dims = row_dims(self.first.output, output)
        if all(one is None for one in self.output_dims):
            raise Unpackable(f"its output, {describe(self.first.output)}, has no rows for the samples of the batch")
        self.holder_dims = self._dims_of_holders(log)
        self.reusable = self._reusable(log)

    def _dims_of_holders(self, log: RunLog) -> dict[Site, int]:
        """Return the dimension of the rows of each tensor that cells change; those without one are left out."""
        found: dict[Site, int] = {}
        for cell, spot in self.first.spots.items():
            seen = log.places.get(cell.site._replace(index=""), [])
            if spot.holder in found or not seen:
                continue
            tensor, _ = split(seen[0].value, spot.holder.subscripts)
            try:
                (dim,) = row_dims(spot.value, tensor)
            except (NotCopies, ValueError):
                continue
            if dim is not None:
                found[spot.holder] = dim
        return found

    def _reusable(self, log: RunLog) -> dict[str, tuple[int, Any, Dims]]:
        """Return the modules that need not run again: when each was over, its output, the dimensions of its rows."""
        found = {}
        for path, passed in self.first.log.modules.items():
            again = log.modules.get(path, [])
            if len(passed) != 1 or len(again) != 1:
                continue
            try:
                dims = row_dims(passed[0].value, again[0].value, by_value=False)
            except NotCopies:
                continue
            if dims:
                found[path] = (passed[0].start, passed[0].value, dims)
        return found

    def _bytes_of_copy(self) -> int:
        """Return about how many bytes a copy needs."""
        tensors = [*tensors_of(self.first.output)]
        held = [one.value for passed in self.first.log.modules.values() for one in passed]
        largest = max((tensor.nbytes for tensor in tensors_of([*held, *tensors])), default=1)
        # In a forward without gradients, a few tensors of the size of the largest one are alive at a time.
        return 8 * largest + 2 * sum(tensor.nbytes for tensor in tensors)

    def can_take(self, cell: Cell) -> bool:
        """Return True if a cell can share a run with others."""
        return cell in self.first.spots and not self.why_not(cell)

    def why_not(self, cell: Cell) -> str:
        """Return why a cell, whose value is seen, can't share a run with others; "" if it can."""
        spot = self.first.spots[cell]
        if spot.holder not in self.holder_dims:
            return "places whose values have no rows for the samples of the batch"
        given = spot.given
        is_like = isinstance(given, Tensor) and given.shape == spot.value.shape and given.dtype == spot.value.dtype
        return "modules whose input is unlike their output" if self.change.skip and not is_like else ""

    def in_order(self, cells: Sequence[Cell]) -> deque[Cell]:
        """Return cells in the order in which their values pass."""
        return deque(sorted(cells, key=lambda cell: self.first.spots[cell].start))

    def next_pack(self, waiting: deque[Cell]) -> list[Cell]:
        """Return the first of the waiting cells, as many as share the next run."""
        number = self.sizes.next_pack([self.first.spots[cell].start for cell in waiting])
        return [*itertools.islice(waiting, number)]

    def plan(self, cells: Sequence[Cell], most: int) -> list[list[Cell]]:
        """Divide cells into packs of at most so many."""
        waiting = self.in_order(cells)
        packs = []
        while waiting:
            pack = self.next_pack(waiting)[:most]
            packs.append(pack)
            for _ in pack:
                waiting.popleft()
        return packs

    def run(self, pack: Sequence[Cell], is_changed: bool = True) -> Any:
        """Run the model with a copy for each cell, and an unchanged one after them; return what the metric gets."""
        copies = len(pack) + 1
        hooks = short_form(self.model)
        for path, value, dims in self._before(pack):
            hooks.skip(Site(path), value, check=False)
            repeat = partial(repeat_value, dims=dims, copies=copies)  # Only when it returns: all at once are large.
            hooks.edit(Site(path), repeat, check=False)
        if is_changed:
            self._add_changes(hooks, pack, copies)
        self.runs += 1
        if self.timed == _TIMED or not is_changed:
            return self.task.run(hooks, repeat_arguments(self.task.arguments, copies, self.dim))
        began = time.perf_counter()
        output = self.task.run(hooks, repeat_arguments(self.task.arguments, copies, self.dim))
        _wait_for(output)
        self._note_time(time.perf_counter() - began, pack)
        return output

    def _note_time(self, seconds: float, pack: Sequence[Cell]) -> None:
        """Note how long a pack took, which leaves out what comes before it."""
        self.timed += 1
        left_out = self.first.log.share_before(min(self.first.spots[cell].start for cell in pack))
        self.sizes.note_shared(seconds / (1 - left_out), len(pack))

    def _before(self, pack: Sequence[Cell]) -> list[tuple[str, Any, Dims]]:
        """Return the outermost modules that are over before the first change of a pack, with their outputs."""
        spots = [self.first.spots[cell] for cell in pack]
        start = min(spot.start for spot in spots)
        # The output of a module may be changed though the module does not run.
        own = {spot.holder.path for spot in spots if spot.start == start and spot.holder.port == "output"}
        own -= {spot.holder.path for spot in spots if spot.holder.member}
        over = [path for path, (end, _, _) in self.reusable.items() if end < start or path in own]
        names = set(over)
        outermost = [path for path in over if not any(above in names for above in _above(path))]
        return [(path, *self.reusable[path][1:]) for path in outermost]

    def _add_changes(self, hooks: Hooks, pack: Sequence[Cell], copies: int) -> None:
        """Add an edit for each tensor that cells of a pack change: it changes the rows of each cell."""
        by_holder: dict[Site, list[tuple[int, Cell]]] = {}
        for number, cell in enumerate(pack):
            by_holder.setdefault(self.first.spots[cell].holder, []).append((number, cell))
        for holder, numbered in by_holder.items():
            dim = self.holder_dims[holder]
            if self.change.skip:
                skip = _Skip([number for number, _ in numbered], dim, copies)
                hooks.edit(holder._replace(port="input"), skip.keep)
                hooks.edit(holder, skip.put_in)
            else:
                hooks.edit(holder, self._changes(numbered, dim, copies))

    def _changes(self, numbered: list[tuple[int, Cell]], dim: int, copies: int) -> Callable[[Tensor], Tensor]:
        spots = self.first.spots
        holder = spots[numbered[0][1]].holder
        written_together = (
            _places_in_one_dimension([spots[cell].rest for _, cell in numbered], spots[numbered[0][1]].value, dim)
            if len(numbered) > 1
            else None
        )
        given = self.change.value_for(holder) if written_together is not None else None

        def change(value: Tensor) -> Tensor:
            value = _writable(value)
            size = value.shape[dim] // copies
            if written_together is not None and given is not None:
                own = value.unflatten(dim, (copies, size))
                if _write_together(own, dim, [number for number, _ in numbered], written_together, given):
                    return value
            for number, cell in numbered:
                own = value.narrow(dim, number * size, size)
                rest = spots[cell].rest
                part = get_part(own, rest)
                new = self.change.action(cell.site, cell.key)(part, None, False)
                if new is not part:
                    own.copy_(put_part(own, rest, new) if rest else new)
            return value

        return change

    def note_mixed(self, output: Any) -> None:
        """Note what the model computes of the whole batch, such as a loss, given the output of the first pack."""
        for number, (tensor, base) in enumerate(zip(tensors_of(output), tensors_of(self.first.output), strict=True)):
            if self.output_dims[number] is None and difference(tensor, base).share():
                self.output_dims[number] = MIXED

    def values(self, output: Any, pack: Sequence[Cell]) -> list[Any]:
        """Return what the metric says of the rows of each cell. Raises `NotOfOneCopy` if it reads anything else."""
        output, dims = cuttable(output, self.first.output, self.output_dims)
        return [checked(self.task.metric(rows_of(output, dims, number, len(pack) + 1))) for number in range(len(pack))]

    def unchanged(self, output: Any, copies: int) -> Unchanged:
        """Return the unchanged copy of a run, and how far it is from the first run."""
        own = self._copy(output, copies - 1, copies)
        return Unchanged(own, self._differences(own, self.first.output))

    def _copy(self, output: Any, copy: int, copies: int) -> Any:
        dims = [None if dim is MIXED else dim for dim in self.output_dims]
        return rows_of(output, dims, copy, copies)

    def _differences(self, value: Any, other: Any) -> list[Difference]:
        pairs = zip(differences(value, other), self.output_dims, strict=True)
        return [apart for apart, dim in pairs if dim is not MIXED]

    def is_right(self, unchanged: Unchanged, pack: Sequence[Cell]) -> bool:
        """Return True if the unchanged copy of a pack is that of the first run, up to rounding.

        A batch of another size is rounded otherwise. So if they differ, the pack is run again without any change, and
        then the unchanged copy must be the same, bit for bit. If it is not, the changes in other rows influence it.
        After a few such runs it is known how far rounding goes.
        """
        found = _largest(unchanged.apart)
        if not found or (self.rerun >= _RERUN and found <= 2 * self.rounding):
            return True
        if found > self.coarse:
            return False
        apart = _largest(self._differences(self._again(pack), unchanged.value))
        if apart:  # Some kernels round differently each time.
            noise = _largest(self._differences(self._again(pack), self._again(pack)))
            if apart > 2 * noise:
                return False
        self.rerun += 1
        self.rounding = max(self.rounding, found)
        return True

    def _again(self, pack: Sequence[Cell]) -> Any:
        """Return the unchanged copy of a pack in which nothing is changed."""
        return self._copy(self.run(pack, is_changed=False), len(pack), len(pack) + 1)

    def is_like_alone(self, output: Any, copies: int, copy: int, alone: Any) -> bool:
        """Return True if the rows of one copy of a pack are the output of a run of its own, up to rounding."""
        found = _largest(self._differences(self._copy(output, copy, copies), alone))
        if found > self.coarse:
            return False
        self.rounding = max(self.rounding, found)
        return True

    def why_wrong(self) -> str:
        """Return why cells that share a run are not what they are alone."""
        again = self.task.run(short_form(self.model))
        if _largest(differences(again, self.first.output)) > self.coarse:
            return "its output is another one each time"
        if self.change.edit is not None:
            return "samples of its batch influence each other, or the edit function does something else each time"
        return "samples of its batch influence each other"

    @property
    def coarse(self) -> float:
        """The largest difference between batches of different sizes that may be rounding."""
        used = [*self._floats(), *(one for one in self.model.parameters() if one.is_floating_point())]
        eps = max(torch.finfo(tensor.dtype).eps for tensor in used if tensor.is_floating_point())
        on_gpu = any(tensor.is_cuda for tensor in used)
        if on_gpu and torch.backends.cuda.matmul.allow_tf32:
            eps = max(eps, 2.0**-10)
        if torch.is_autocast_enabled():
            eps = max(eps, 2.0**-7)
        return 2048 * eps if eps < 1e-4 else 32 * eps

    def _floats(self) -> list[Tensor]:
        found = [tensor for tensor in tensors_of(self.first.output) if tensor.is_floating_point()]
        return found or [torch.zeros(())]


class _Skip:
    """Puts the input of a module in place of its output, in the rows of some copies."""

    def __init__(self, numbers: list[int], dim: int, copies: int) -> None:
        self.numbers = numbers
        self.dim = dim
        self.copies = copies
        self.kept: list[Tensor] = []

    def keep(self, given: Tensor) -> None:
        """Copy these rows of the input, since the module may write into it."""
        self.kept = [self._rows(given, number).clone() for number in self.numbers]

    def put_in(self, value: Tensor) -> Tensor:
        """Write the rows of the input into the output."""
        value = _writable(value)
        for number, rows in zip(self.numbers, self.kept, strict=True):
            self._rows(value, number).copy_(rows)
        return value

    def _rows(self, value: Tensor, number: int) -> Tensor:
        size = value.shape[self.dim] // self.copies
        return value.narrow(self.dim, number * size, size)


def _places_in_one_dimension(rests: Sequence[tuple[Any, ...]], value: Tensor, dim: int) -> tuple[int, list[int]] | None:
    """Return a dimension of a tensor, and the index in it that each of these subscripts selects.

    None if they select anything else than one index of one dimension, which is the same for all.
    """
    found: set[int] = set()
    indices = []
    for subscripts in rests:
        rest = subscripts[0] if len(subscripts) == 1 and isinstance(subscripts[0], tuple) else subscripts
        if Ellipsis in rest:
            at = rest.index(Ellipsis)
            rest = (*rest[:at], *[slice(None)] * (value.dim() - len(rest) + 1), *rest[at + 1 :])
        ints = [place for place, one in enumerate(rest) if type(one) is int]
        if len(ints) != 1 or any(one != slice(None) for place, one in enumerate(rest) if place != ints[0]):
            return None
        found.update(ints)
        indices.append(rest[ints[0]] % value.shape[ints[0]])
    return None if len(found) != 1 or found == {dim} else (found.pop(), indices)


def _write_together(own: Tensor, dim: int, copies: list[int], places: tuple[int, list[int]], given: Any) -> bool:
    """Write into one index of each of these copies. Return False if `given` does not fit exactly.

    Args:
        own: A tensor whose dimension `dim` counts copies, and the next one the rows of a copy.
        places: The dimension of a copy in which the indices count, and an index for each copy.
        given: A number, or the tensor of another run whose parts at the same indices are put in.
    """
    at, indices = places
    rows = torch.tensor(copies, device=own.device), torch.tensor(indices, device=own.device)
    shown = own.movedim((dim, at if at < dim else at + 1), (0, 1))
    if isinstance(given, Tensor):
        shape = own.shape[:dim] + own.shape[dim + 1 :]
        if given.shape != shape or given.dtype != own.dtype or given.device != own.device:
            return False
        shown[rows] = given.movedim(at, 0)[rows[1]]
        return True
    if not own.is_floating_point():
        return False
    shown[rows] = given
    return True


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a run needed more memory than there is. On a CPU, torch then raises a RuntimeError."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _largest(apart: Sequence[Difference]) -> float:
    return max((one.share() for one in apart), default=0.0)


def _wait_for(output: Any) -> None:
    """Wait until a GPU has computed an output."""
    for device in {tensor.device for tensor in tensors_of(output) if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _above(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:length]) for length in range(1, len(names))]


def _writable(value: Tensor) -> Tensor:
    """Return a tensor into which rows can be written one by one."""
    is_spread = any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.clone(memory_format=torch.contiguous_format) if is_spread else value
