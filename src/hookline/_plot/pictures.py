"""Pictures of one value: feature maps, attention, tokens, units, a histogram. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor
from torch.nn import functional as F

from hookline._plot.drawing import (
    COLOURS,
    Picture,
    Scale,
    axes_for,
    colour_bar,
    entitle,
    heat,
    height_of,
    label_x,
    label_y,
    name_colours,
    numbered,
    scale_of,
)
from hookline._plot.labels import Numbers, Options, Shown, dense, numbers_of, sample_of, token_labels
from hookline._plot.measures import is_attention
from hookline._tables import count
from hookline._values.stats import histogram as counted
from hookline._values.stats import numbers as statistics
from hookline.errors import HooklineError

_MOST_PANELS = 32
_MOST_BARS = 128
_MOST_ACROSS = 1000  # Elements of a sheet, below which they are not averaged.
_FAINTEST = 1e-4  # Of the largest weight: where a logarithmic scale of attention begins.


def maps(one: Shown, ax: Axes | None, options: Options) -> Axes:
    """Draw the channels of one sample side by side, in one scale."""
    channels, which = sample_of(one, "maps", options.sample)
    total, rows, columns = channels.shape
    channels = channels[: options.most]
    across = _across(len(channels), rows, columns)
    down = math.ceil(len(channels) / across)
    sheet = lay_out(channels, across)
    height, width = sheet.values.shape
    wide = min(7.0, 1.6 + 0.9 * across)
    ax = axes_for(ax, wide, min(max(2.4, (wide - 1.4) * height / width + 1.2), 9.0))
    scale = scale_of(sheet.values, options.log or False)
    image = heat(ax, sheet, scale, extent=(-0.5, across - 0.5, down - 0.5, -0.5), aspect=height / width * across / down)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    size = f"each {rows} rows × {columns} columns"
    label_x(ax, numbered(across) if down == 1 else [], f"channel, {size}" if down == 1 else size)
    label_y(ax, [str(line * across) for line in range(down)] if down > 1 else [], "first channel" if down > 1 else "")
    colour_bar(image, ax, scale, value_name(one.tensor))
    name_colours(ax, sheet, scale)
    some = f"the first {len(channels)} of {total:,} channels" if total > len(channels) else count(total, "channel")
    entitle(ax, options.title, one.name, one.what, which, some, _constant(sheet), options.note)
    return ax


def attention(one: Shown, ax: Axes | None, options: Options) -> Axes | Figure:
    """Draw where each query looks, a panel for each head."""
    heads, which = sample_of(one, "attention", options.sample)
    if ax is not None and len(heads) > 1:
        raise HooklineError(
            f"{one.name!r} has {len(heads)} heads, a panel for each, and ax= is one: leave it out, or choose a head "
            f"by a subscript, as in {one.name + '[:, 0]'!r}"
        )
    kept = heads[: min(options.most, _MOST_PANELS)]
    some = f"the first {len(kept)} of {len(heads)} heads" if len(kept) < len(heads) else ""
    numbers = numbers_of(kept)
    scale, label = weights_of(numbers, heads[None], options.log)
    keys = token_labels(options.tokens, options.sample, heads.shape[2], one.name)
    queries = keys if heads.shape[1] == heads.shape[2] else None
    panels = _Panels(
        numbers, scale, label, queries or numbered(heads.shape[1]), keys or numbered(heads.shape[2]),
        [f"head {head}" for head in range(len(kept))],
    )  # fmt: skip
    about = (options.title, one.name, one.what, which, some, options.note)
    return _one_panel(panels, ax, about) if len(kept) == 1 else _many_panels(panels, about)


def weights_of(numbers: Numbers, heads: Tensor, log: bool | None) -> tuple[Scale, str]:
    """Return the scale for attention, which begins at 0, and what it shows."""
    if not is_attention(heads):
        return scale_of(numbers.values, log or False), value_name(heads)
    most = float(numbers.values[numbers.values.isfinite()].max())
    return scale_of(torch.tensor([_FAINTEST * most if log else 0.0, most]), bool(log)), "attention weight"


class _Panels(NamedTuple):
    """Matrices that are drawn in one scale with the same labels."""

    numbers: Numbers
    scale: Scale
    label: str
    queries: Sequence[str]
    keys: Sequence[str]
    names: Sequence[str]

    def draw(self, ax: Axes, panel: int, room: float | None = None) -> AxesImage:
        """Draw one of the matrices."""
        image = heat(ax, self.numbers.part(panel), self.scale)
        ratio = len(self.queries) / len(self.keys)
        label_x(ax, self.keys, "key", room=room)
        label_y(ax, self.queries, "query", room=None if room is None else room * ratio)
        ax.tick_params(length=2)
        return image


def _one_panel(panels: _Panels, ax: Axes | None, about: Sequence[str | None]) -> Axes:
    rows, columns = len(panels.queries), len(panels.keys)
    size = min(max(3.0, 0.2 * columns), 6.0)
    ax = axes_for(ax, size + 1.6, min(max(2.6, size * rows / columns + 1.4), 8.0))
    image = panels.draw(ax, 0)
    colour_bar(image, ax, panels.scale, panels.label)
    name_colours(ax, panels.numbers, panels.scale)
    entitle(ax, about[0], *map(str, about[1:]))
    return ax


def _many_panels(panels: _Panels, about: Sequence[str | None]) -> Figure:
    """Draw one panel for each head, labelled at the left and at the bottom only."""
    total = len(panels.names)
    across = min(total, 4 if total <= 16 else 8)
    down = math.ceil(total / across)
    side = 2.0 if across <= 4 else 1.1
    high = side * len(panels.queries) / len(panels.keys)
    beside = 0.065 * max(map(len, panels.queries)), 0.065 * max(map(len, panels.keys))
    figure = Picture(
        figsize=((side + 0.1) * across + beside[0] + 1.3, (high + 0.25) * down + beside[1] + 0.95), layout="compressed"
    )
    axes = [figure.add_subplot(down, across, panel + 1) for panel in range(total)]
    for panel, ax in enumerate(axes):
        image = panels.draw(ax, panel, side)
        ax.set_title(panels.names[panel], fontsize="small", pad=3)
        if panel % across:
            ax.set_ylabel("")
            ax.tick_params(labelleft=False)
        if panel + across < total:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    colour_bar(image, axes, panels.scale, panels.label)
    entitle(axes[0], about[0], *map(str, about[1:]))
    name_colours(figure, panels.numbers, panels.scale)
    return figure


def tokens(one: Shown, ax: Axes | None, options: Options) -> Axes:
    """Draw one sample as token × unit."""
    matrix, which = sample_of(one, "tokens", options.sample)
    labels = token_labels(options.tokens, options.sample, len(matrix), one.name)
    return _matrix(one, ax, options, matrix, (labels or numbered(len(matrix)), "token"), which)


def units(one: Shown, ax: Axes | None, options: Options) -> Axes:
    """Draw all samples as sample × unit; a single one as bars."""
    matrix = dense(one.tensor)
    while matrix.dim() > 2 and matrix.shape[-1] == 1:  # Maps that were pooled to one number each.
        matrix = matrix.squeeze(-1)
    rows = "sample" if matrix.dim() == 2 else "sample and position"
    matrix = matrix.reshape(-1, matrix.shape[-1] if matrix.dim() else 1)
    if len(matrix) == 1:
        return _bars(one, ax, options, numbers_of(matrix[0]))
    return _matrix(one, ax, options, matrix, (numbered(len(matrix)), rows), "")


def _matrix(
    one: Shown, ax: Axes | None, options: Options, matrix: Tensor, rows: tuple[Sequence[str], str], which: str
) -> Axes:
    numbers = numbers_of(matrix)
    scale = scale_of(numbers.values, options.log or False)
    ax = axes_for(ax, 7.0, height_of(len(matrix) if options.tokens is not None else min(len(matrix), 24)))
    image = heat(ax, numbers, scale, aspect="auto")
    label_y(ax, *rows)
    label_x(ax, numbered(matrix.shape[1]), "unit")
    colour_bar(image, ax, scale, value_name(one.tensor))
    name_colours(ax, numbers, scale)
    entitle(ax, options.title, one.name, one.what, which, _constant(numbers), options.note)
    return ax


def _bars(one: Shown, ax: Axes | None, options: Options, numbers: Numbers) -> Axes:
    """Draw a bar for each unit, or a line if they are too many."""
    ax = axes_for(ax, 6.4, 3.2)
    values = numbers.values
    if len(values) <= _MOST_BARS:
        ax.bar(range(len(values)), values.nan_to_num(0.0).numpy(), width=0.8, color=COLOURS[0])
    else:
        ax.plot(values.numpy(), color=COLOURS[0], linewidth=0.8)
    ax.axhline(0, color="#888888", linewidth=0.6)
    for mask, mark, told in zip((numbers.nan, numbers.infinite), "X^", numbers.told, strict=True):
        if mask.any():
            where = mask.nonzero()[:, 0].tolist()
            ax.plot(where, [0.0] * len(where), mark, color="black", markerfacecolor="#F0E442", label=told)
            ax.legend(edgecolor="none", fontsize="small")
    label_x(ax, numbered(len(values)), "unit")
    ax.set_ylabel(value_name(one.tensor))
    ax.spines[["top", "right"]].set_visible(False)
    entitle(ax, options.title, one.name, one.what, options.note)
    return ax


def histogram(one: Shown, ax: Axes | None, options: Options) -> Axes:
    """Draw how often each value occurs."""
    found, told = counted([one.tensor]), statistics([one.tensor])
    ax = axes_for(ax, 6.0, 3.4)
    low, high = (found.low, found.high) if found.low < found.high else (found.low - 0.5, found.low + 0.5)
    if math.isfinite(low):
        edges = torch.linspace(low, high, len(found.counts) + 1, dtype=torch.float64)
        ax.stairs(found.counts, edges.numpy(), fill=True, color=COLOURS[0])
    largest = sorted(found.counts, reverse=True)
    few_hold_all = sum(largest[:3]) > 0.99 * sum(largest) and largest[3] > 0
    log = few_hold_all if options.log is None else options.log
    if log:
        ax.set_yscale("log", nonpositive="clip")
    ax.set_xlabel(value_name(one.tensor))
    ax.set_ylabel("elements" + (", log scale" if log else ""))
    ax.spines[["top", "right"]].set_visible(False)
    shares = ((told.zeros, "0"), (told.nan, "NaN"), (told.inf, "Inf"))
    bad = ", ".join(f"{share:.2%} are {name}" for share, name in shares if share > 0)
    about = f"mean {told.mean:.3g}, std {told.std:.3g}, from {told.min:.3g} to {told.max:.3g}"
    entitle(ax, options.title, one.name, one.what, about, bad, options.note)
    return ax


def value_name(tensor: Tensor) -> str:
    """Return what the numbers of a picture are."""
    return "size of the complex value" if tensor.is_complex() else "value"


def lay_out(tiles: Tensor, across: int) -> Numbers:
    """Lay matrices out side by side, line by line, with gaps between them; what is finer than pixels is averaged."""
    numbers = numbers_of(tiles)
    finer = across * tiles.shape[2] // _MOST_ACROSS
    if finer > 1:
        numbers = _averaged(numbers, finer)
    gap = max(1, round(max(numbers.values.shape[1:]) / 14))
    values = _laid(numbers.values, across, gap, float("nan"))
    nan, infinite = (_laid(mask, across, gap, False) for mask in (numbers.nan, numbers.infinite))
    return Numbers(values, nan, infinite, numbers.told)


def _averaged(numbers: Numbers, times: int) -> Numbers:
    values = F.avg_pool2d(numbers.values, times, ceil_mode=True)
    nan, infinite = (
        F.max_pool2d(mask.double(), times, ceil_mode=True).bool() for mask in (numbers.nan, numbers.infinite)
    )
    return Numbers(values, nan, infinite, numbers.told)


def _laid(tiles: Tensor, across: int, gap: int, blank: float) -> Tensor:
    total, rows, columns = tiles.shape
    down = math.ceil(total / across)
    sheet = tiles.new_full((down * across, rows + gap, columns + gap), blank)
    sheet[:total, :rows, :columns] = tiles
    return sheet.view(down, across, rows + gap, columns + gap).transpose(1, 2).flatten(2).flatten(0, 1)[:-gap, :-gap]


def _across(total: int, rows: int, columns: int) -> int:
    """Return how many tiles make a line, so that the whole is wider than high."""
    wanted = math.sqrt(1.6 * total * rows / columns)
    return total if total <= 4 else max(1, min(total, 2 ** round(math.log2(max(wanted, 1)))))


def _constant(numbers: Numbers) -> str:
    finite = numbers.values[numbers.values.isfinite()]
    return f"every value is {finite[0]:.4g}" if len(finite) > 1 and bool((finite == finite[0]).all()) else ""
