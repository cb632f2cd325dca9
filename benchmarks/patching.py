"""Sweeps by hand, which the benchmarks of hl.sweep compare it with: one forward for each cell, and cells in batches.

A *cell* is a layer and a position whose residual stream is patched from a clean run, or a layer and a head that is
zeroed. Every contender returns the measurement of each of its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from harness import measure, quartiles
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import hookline as hl

Cell = tuple[int, int]
Run = Callable[[], Sequence[float]]


def gpt2(**sizes: Any) -> nn.Module:
    """Return GPT-2 with random weights: 12 layers of width 768, if `sizes` don't say otherwise."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()  # type: ignore[no-any-return]


def difference(output: Any) -> Tensor:
    """Return the metric of all sweeps for each row: the difference of two logits at the last position."""
    logits = output if isinstance(output, Tensor) else output.logits
    return logits[:, -1, 3] - logits[:, -1, 5]


@dataclass(frozen=True)
class Residual:
    """Patch the residual stream before each block at each position, from a clean run into a corrupted one."""

    model: Any
    corrupted: Mapping[str, Any]  # What the model is called with.
    clean: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", block_inputs(self.model, self.clean))

    @property
    def size(self) -> int:
        """The number of cells in a layer."""
        return self.corrupted["input_ids"].shape[1]  # type: ignore[no-any-return]

    def hook(self, layer: int, rows: Any, places: Any) -> RemovableHandle:
        """Patch these places of a layer in these rows of the batch."""
        clean = self.values[layer][0, places]  # type: ignore[attr-defined]

        def patch(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            value = args[0].clone()
            value[rows, places] = clean
            return (value, *args[1:])

        return self.model.transformer.h[layer].register_forward_pre_hook(patch)  # type: ignore[no-any-return]

    def in_packs(self) -> hl.Sweep:
        """Sweep all cells with `run=`."""
        where = "transformer.h.*:input[:, *]"
        return hl.sweep(self.model, where, difference, run=self.corrupted, against=self.clean, progress=False)

    def by_closure(self, cells: Sequence[Cell]) -> hl.Sweep:
        """Sweep some cells with a function that calls the model."""
        values = self.values  # type: ignore[attr-defined]
        where = {f"transformer.h.{layer}:input[:, {place}]": values[layer][:, place] for layer, place in cells}
        return hl.sweep(self.model, where, lambda: difference(self.model(**self.corrupted)), progress=False)


@dataclass(frozen=True)
class Heads:
    """Zero what each attention head gives."""

    model: Any
    corrupted: Mapping[str, Any]

    @property
    def size(self) -> int:
        """The number of cells in a layer."""
        return self.model.config.n_head  # type: ignore[no-any-return]

    def hook(self, layer: int, rows: Any, places: Any) -> RemovableHandle:
        """Zero these heads of a layer in these rows of the batch."""

        def zero(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            value = args[0].clone()
            value.view(*value.shape[:2], self.size, -1)[rows, :, places] = 0.0
            return (value, *args[1:])

        return self.model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(zero)  # type: ignore[no-any-return]

    def in_packs(self) -> hl.Sweep:
        """Sweep all cells with `run=`."""
        where = "transformer.h.*.attn/scaled_dot_product_attention[:, *]"
        return hl.sweep(self.model, where, difference, run=self.corrupted, progress=False)

    def by_closure(self, cells: Sequence[Cell]) -> hl.Sweep:
        """Sweep some cells with a function that calls the model."""
        where = {f"transformer.h.{layer}.attn/scaled_dot_product_attention[:, {place}]": 0.0 for layer, place in cells}
        return hl.sweep(self.model, where, lambda: difference(self.model(**self.corrupted)), progress=False)


Grid = Residual | Heads


def block_inputs(model: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return what goes into each block."""
    found: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0])

    handles = [block.register_forward_pre_hook(keep) for block in model.transformer.h]
    model(**arguments)
    for handle in handles:
        handle.remove()
    return found


def cells_of(grid: Grid, every: int = 1) -> list[Cell]:
    """Return every so manieth cell of each layer."""
    return [(layer, place) for layer in range(len(grid.model.transformer.h)) for place in range(0, grid.size, every)]


def loop(grid: Grid, cells: Sequence[Cell]) -> list[float]:
    """Run one forward for each cell, with a hook."""
    values = []
    for layer, place in cells:
        handle = grid.hook(layer, slice(None), place)
        values.append(difference(grid.model(**grid.corrupted)))
        handle.remove()
    return torch.cat(values).tolist()  # type: ignore[no-any-return]


def packed(grid: Grid) -> list[float]:
    """Run one forward for each layer, with a row for each of its cells."""
    ids = grid.corrupted["input_ids"]
    rows = torch.arange(grid.size, device=ids.device)
    arguments = {**grid.corrupted, "input_ids": ids.expand(grid.size, -1)}
    values = []
    for layer in range(len(grid.model.transformer.h)):
        handle = grid.hook(layer, rows, rows)
        values.append(difference(grid.model(**arguments)))
        handle.remove()
    return torch.cat(values).tolist()  # type: ignore[no-any-return]


def packed_from_layer(grid: Grid) -> list[float]:
    """Run the blocks from each layer on, with a row for each of its cells. What is before it comes from one run."""
    body, last = grid.model.transformer, slice(-grid.corrupted.get("logits_to_keep", 0), None)
    inputs = block_inputs(grid.model, grid.corrupted)
    rows = torch.arange(grid.size, device=inputs[0].device)
    values = []
    for layer, value in enumerate(inputs):
        handle = grid.hook(layer, rows, rows)
        value = value.expand(grid.size, -1, -1)
        for block in body.h[layer:]:
            value = block(value)
        handle.remove()
        values.append(difference(grid.model.lm_head(body.ln_f(value)[:, last])))
    return torch.cat(values).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Way:
    """A way to sweep. One that runs a forward for each cell is timed on some cells, which `run` gets."""

    run: Callable[[Sequence[Cell]], Sequence[float]]
    packs: bool = True


def contenders_for(grid: Grid) -> dict[str, Way]:
    """Return all ways to sweep a grid."""
    return {
        "loop by hand": Way(lambda cells: loop(grid, cells), packs=False),
        "packed by hand": Way(lambda _: packed(grid)),
        "packed by hand, from the changed layer on": Way(lambda _: packed_from_layer(grid)),
        "hl.sweep(model, where, closure)": Way(lambda cells: [*grid.by_closure(cells).values()], packs=False),
        "hl.sweep(model, where, metric, run=)": Way(lambda _: [*grid.in_packs().values()]),
    }


def compare(
    title: str, grid: Grid, contenders: Mapping[str, Way], every: int, rounds: int, tolerance: float = 1e-3
) -> str:
    """Check the measurements of all contenders, time them, and return a table.

    All measurements are compared with those of the loop; `tolerance` is a share of the largest one. Contenders that run
    a forward for each cell are timed on every so manieth cell, since each of theirs takes the same time.
    """
    cells, some = cells_of(grid), cells_of(grid, every)
    right = dict(zip(cells, contenders["loop by hand"].run(cells), strict=True))
    same, timed, number = {}, {}, {}
    for name, one in contenders.items():
        own = cells if one.packs else some
        found = one.run(own)
        same[name] = likeness(found, [right[cell] for cell in own], tolerance)
        timed[name], number[name] = (lambda one=one, own=own: one.run(own)), len(own)
    seconds = measure(timed, rounds=rounds, repeat=1, warm_up=0)
    per_cell = {name: [one / number.get(name, len(some)) for one in taken] for name, taken in seconds.items()}
    return table(title, per_cell, len(cells), same)


def likeness(found: Sequence[float], right: Sequence[float], tolerance: float) -> str:
    """Say how far measurements are from those of the loop. Raises if they are wrong."""
    apart = max(abs(one - other) for one, other in zip(found, right, strict=True))
    if not apart:
        return "bit for bit"
    share = apart / max(abs(one) for one in right)
    if not share <= tolerance:
        raise AssertionError(f"off by {share:.2g} of the largest")
    return f"to {share:.0e} of the largest"


def table(title: str, per_cell: Mapping[str, Sequence[float]], cells: int, same: Mapping[str, str]) -> str:
    """Return a table of cells per second, of ratios to the loop in the same round, and of how equal values are."""
    lines = [title, f"{'':42s}{'ms':>9s}{'cells/s':>10s}{'× loop':>9s}{'quartiles':>15s}  values as in the loop"]
    base = next(iter(per_cell.values()))
    for name, taken in per_cell.items():
        low, middle, high = quartiles([first / one for one, first in zip(taken, base, strict=True)])
        lines.append(
            f"{name:42s}{1000 * cells * median(taken):9.1f}{1 / median(taken):10.1f}{middle:9.2f}"
            f"{low:8.2f}–{high:<6.2f}  {same.get(name, '')}".rstrip()
        )
    return "\n".join(lines) + "\n"
