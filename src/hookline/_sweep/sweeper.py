"""Measures the cells of one batch of a sweep: a first run finds them, then packs of them run, or each alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hookline import Hooks
from hookline._kernel import Names, short_form
from hookline._progress import Bar
from hookline._scan.fake_run import call_arguments_of
from hookline._sweep.batch_rows import NotOfOneCopy, repeat_arguments
from hookline._sweep.changes import Change
from hookline._sweep.first_run import (
    Cell,
    RunLog,
    Spot,
    dimensions_of,
    modules_before,
    run_first,
    spot_of,
    whole_places,
)
from hookline._sweep.packs import FirstRun, Packs, Unchanged, Unpackable, is_out_of_memory
from hookline._sweep.portions import Measured, PackCounts
from hookline._sweep.task import FunctionTask, ModelTask, checked, dropout_in, settled
from hookline.errors import HooklineError, warn


class Sweeper:
    """Measures the cells of one batch."""

    def __init__(self, model: nn.Module, task: FunctionTask | ModelTask, change: Change, batch: int | None) -> None:
        self.model = model
        self.task = task
        self.change = change
        self.batch = batch
        is_packed = isinstance(task, ModelTask) and batch != 1
        self.log = RunLog(keeps_places=is_packed, keeps_modules=is_packed)
        self.output: Any = None
        self.notes: list[str] = []
        self.base: Any = None
        self.cells: list[Cell] = []
        self.dimensions: dict[str, tuple[str, ...]] = {}
        self.measured: dict[Cell, Any] = {}
        self.is_checked = False  # Whether a pack was compared with runs of single cells.
        self.packed = 0  # How many cells were measured in packs.
        self.bar = Bar("sweep", progress=False)

    def sweep(self, label: str, progress: bool | None) -> Measured:
        """Measure every cell."""
        with self.begun(), Bar(label, total=len(self.cells), progress=progress, unit="places") as self.bar:
            self.measure(self.cells)
        self.change.refuse_idle()
        values = settled([self.base, *(self.measured[cell] for cell in self.cells)])
        named = {str(cell.site): value for cell, value in zip(self.cells, values[1:], strict=True)}
        return Measured(values[0], named, self.dimensions, self.counts())

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Make the first run, which finds the cells. Leave the model as it was found at the end of the block."""
        try:
            self.base, self.cells = run_first(self.model, self.change, self._measure_first)
            self.dimensions = dimensions_of(self.cells, self.log)
            if self.change.needs_sources:
                self.change.find_sources(self.model, [cell.site for cell in self.cells], self._run_source)
            for cell in self.cells:
                if "@" in cell.site.index or cell.site.call is not None:
                    self.change.add(short_form(self.model), cell.site, cell.key)  # Raises for `@-1` and `#-1`.
            yield
        finally:
            if isinstance(self.task, ModelTask):
                self.task.start.put_back_modules()

    @cached_property
    def packs(self) -> Packs | None:
        """What measures cells that share runs; None if each has to run alone."""
        return self._packs(self.cells)

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure these cells."""
        if self.packs is not None:
            self._measure_packs(self.packs, [cell for cell in cells if self.packs.can_take(cell)])
        for cell in cells:
            if cell not in self.measured:
                self._measure_alone(cell)

    def counts(self) -> PackCounts:
        """Return how the cells were measured so far."""
        packs = self.packs
        runs, rounding = (packs.runs, packs.rounding) if packs is not None else (0, 0.0)
        return PackCounts(self.packed, runs, rounding, tuple(self.notes), self.change.does_edit)

    def _measure_first(self) -> Any:
        places = whole_places(self.model, self.change.asked)
        gradient = next((place.site for place in places if place.site.is_gradient), None)
        if gradient is not None and isinstance(self.task, ModelTask):
            raise HooklineError(
                f"'{gradient}' gets no gradient from run=: leave it out, and give a metric that calls backward()"
            )
        hooks = self.log.hook(self.model, places, self._modules())
        if not isinstance(self.task, ModelTask):
            return self.task.measure(hooks)
        self.output = self.task.run(hooks)
        return checked(self.task.metric(self.output))

    def _modules(self) -> list[Any]:
        if not isinstance(self.task, ModelTask) or self.batch == 1:
            return []
        return modules_before(self.model, [place.site for place in whole_places(self.model, self.change.asked)])

    def _run_source(self, hooks: Hooks) -> None:
        """Run the model for the values to put in: on the arguments of `against`, or as it is measured."""
        given = None if self.change.against is None else call_arguments_of(self.change.against)
        if isinstance(self.task, ModelTask):
            self.task.run_model(hooks, repeat_arguments(given or self.task.arguments, 1))
        elif given is not None:
            with hooks, torch.no_grad():
                self.model(*given[0], **given[1])
        else:
            self.task.measure(hooks)

    def _packs(self, cells: Sequence[Cell]) -> Packs | None:
        """Return packs for these cells; None if each has to run alone."""
        if not isinstance(self.task, ModelTask) or self.batch == 1:
            return None
        try:
            if self.task.start.are_buffers_written:
                raise Unpackable("it changes its buffers, as BatchNorm does in train mode")
            if limited := _with_capacity(self.model):
                raise Unpackable(f"'{limited}' is a capacity, which the samples of a batch share")
            if dropping := dropout_in(self.model):
                raise Unpackable(f"'{dropping}' drops elements at random; call model.eval() first")
            spots, reasons = self._spots(cells)
            if not spots:
                raise Unpackable(f"these are {next(iter(reasons))}")
            packs = Packs(self.task, self.change, FirstRun(self.output, self.log, spots), self.batch)
        except Unpackable as error:
            self._say(f"each place was run alone: {error}")
            return None
        for reason in {**reasons, **dict.fromkeys(filter(None, map(packs.why_not, spots)))}:
            self._say(f"{reason} were run alone")
        return packs

    def _spots(self, cells: Sequence[Cell]) -> tuple[dict[Cell, Spot], dict[str, None]]:
        """Return where the cells are that can share a run, and why others can't."""
        spots: dict[Cell, Spot] = {}
        reasons: dict[str, None] = {}
        for cell in cells:
            is_forward = isinstance(self.task, ModelTask) and self.task.runs_forward
            found = spot_of(cell, self.log, self.model, is_forward)
            if isinstance(found, Spot):
                spots[cell] = found
            else:
                reasons[found] = None
        return spots, reasons

    def _measure_packs(self, packs: Packs, cells: Sequence[Cell]) -> None:
        """Measure cells in packs. If these are not right, try without leaving modules out, then run each cell alone."""
        while self.packs is not None:
            try:
                self._measure_each_pack(packs, cells)
            except Unpackable as error:
                self._forget(cells)
                if not packs.reusable:
                    self._say(f"each place was run alone: {error}")
                    self.packs = None
                packs.reusable = {}
            else:
                return

    def _measure_each_pack(self, packs: Packs, cells: Sequence[Cell]) -> None:
        """Measure cells in packs. The check of a pack waits until the next one was started, for the sake of a GPU."""
        waiting = packs.in_order(cells)
        unchecked: tuple[list[Cell], Unchanged] | None = None
        while waiting:
            pack = packs.next_pack(waiting)
            is_first = not self.is_checked
            try:
                if is_first:
                    values, unchanged = self._measure_first_pack(packs, pack)
                else:
                    values, unchanged = self._measure_pack(packs, pack, is_last=len(pack) == len(waiting))
            except Unpackable:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    if len(pack) > 1:
                        packs.sizes.halve(len(pack))
                    else:
                        waiting.popleft()  # It runs alone.
                    continue
                self._measure_alone(pack[0])  # It raises too, and names the place; or the larger batch is at fault.
                self._say(f"{len(pack)} places were run alone: in a larger batch, {type(error).__name__}: {error}")
            else:
                if unchecked is not None:
                    self._check(packs, *unchecked)
                self.measured.update(zip(pack, values, strict=True))
                self.bar.advance(len(pack), str(pack[-1].site))
                self.packed += len(pack)
                unchecked = None if is_first else (pack, unchanged)
            for _ in pack:
                waiting.popleft()
        if unchecked is not None:
            self._check(packs, *unchecked)

    def _check(self, packs: Packs, pack: list[Cell], unchanged: Unchanged) -> None:
        if not packs.is_right(unchanged, pack):
            raise Unpackable(packs.why_wrong())

    def _measure_pack(self, packs: Packs, pack: list[Cell], is_last: bool) -> tuple[list[Any], Unchanged]:
        """Measure a pack. The last one, in which most is left out, is compared with runs of their own too."""
        output = packs.run(pack)
        values = self._values(packs, output, pack)
        if is_last:
            self._compare_with_alone(packs, output, pack, values)
        return values, packs.unchanged(output, len(pack) + 1)

    def _measure_first_pack(self, packs: Packs, pack: list[Cell]) -> tuple[list[Any], Unchanged]:
        """Measure a pack, and compare it with runs of their own."""
        output = packs.run(pack)
        packs.note_mixed(output)
        unchanged = packs.unchanged(output, len(pack) + 1)
        if not packs.is_right(unchanged, pack):
            raise Unpackable(packs.why_wrong())
        values = self._values(packs, output, pack)
        self._compare_with_alone(packs, output, pack, values)
        self.is_checked = True
        return values, unchanged

    def _values(self, packs: Packs, output: Any, pack: list[Cell]) -> list[Any]:
        try:
            return packs.values(output, pack)
        except NotOfOneCopy as error:
            raise Unpackable(f"metric reads {error}, which the model gives for the whole batch") from None

    def _forget(self, cells: Sequence[Cell]) -> None:
        """Forget what was measured of these cells."""
        done = [cell for cell in cells if self.measured.pop(cell, None) is not None]
        self.packed -= len(done)
        self.bar.advance(-len(done))
        self.is_checked = False

    def _compare_with_alone(self, packs: Packs, output: Any, pack: list[Cell], values: list[Any]) -> None:
        """Compare the first cell of a pack, and the one with the largest measurement, with runs of their own.

        Raises `Unpackable` if they differ.
        """
        for number in sorted({0, _largest_of(values)}):
            began = time.perf_counter()
            alone = self._run_alone(pack[number])
            if not packs.is_like_alone(output, len(pack) + 1, number, alone):
                raise Unpackable(packs.why_wrong())
            packs.sizes.note_alone(time.perf_counter() - began)

    def _run_alone(self, cell: Cell) -> Any:
        assert isinstance(self.task, ModelTask)
        hooks = short_form(self.model)
        self.change.add(hooks, cell.site, cell.key)
        return self.task.run(hooks)

    def _measure_alone(self, cell: Cell) -> None:
        self.bar.advance(0, str(cell.site))
        hooks = short_form(self.model)
        self.change.add(hooks, cell.site, cell.key)
        self.measured[cell] = self.task.measure(hooks)
        self.bar.advance(1, str(cell.site))

    def _say(self, note: str) -> None:
        """Warn once of what makes the sweep slower, and note it in the result."""
        if note not in self.notes:
            self.notes.append(note)
            warn(f"{type(self.model).__name__}: {note}")


def _largest_of(values: list[Any]) -> int:
    """Return the number of the largest measurement."""
    flat = [torch.as_tensor(value).reshape(-1) for value in values]
    if len({len(one) for one in flat}) > 1:  # As where the metric returns what it found.
        flat = [one.double().norm().reshape(1) for one in flat]
    return int(torch.stack(flat).double().abs().sum(1).nan_to_num(-1.0).argmax())


def _with_capacity(model: nn.Module) -> str:
    """Return the name of a module, such as a router of experts, that has a capacity; "" if there is none.

    What is more than that is dropped, so whether a row keeps its expert depends on other rows. A run may not show it.
    """
    return next(
        (
            f"{path}.{name}" if path else name
            for path, module in Names(model).once()
            for name, held in vars(module).items()
            if "capacity" in name and isinstance(held, (int, float)) and held
        ),
        "",
    )
