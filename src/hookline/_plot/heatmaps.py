"""Heat maps of one value or of many: feature maps, attention, tokens, units, token × layer. Needs matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor
from torch.nn import functional as F

from hookline._plot.figures_and_scales import (
    COLOURS,
    NotebookFigure,
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
    scale_of_changes,
)
from hookline._plot.plot_data import (
    POSITIVE,
    Axis,
    MaskedNumbers,
    NamedTensor,
    PlotOptions,
    about,
    along_depth,
    by_token,
    dense,
    families,
    is_attention,
    layer_labels,
    numbers_of,
    sample_of,
    statistic_name,
    token_labels,
    value_name,
)
from hookline._tables import count
from hookline.errors import HooklineError

_MOST_PANELS = 32
_MOST_BARS = 128
_MOST_ACROSS = 1000  # A sheet with more elements across is averaged.
_FAINTEST = 1e-4  # Where a logarithmic scale of attention begins, as a share of the largest weight.


def maps(one: NamedTensor, ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw the channels of one sample side by side, on one colour scale."""
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


def attention(one: NamedTensor, ax: Axes | None, options: PlotOptions) -> Axes | Figure:
    """Draw attention weights, one panel for each head."""
    heads, which = sample_of(one, "attention", options.sample)
    if ax is not None and len(heads) > 1:
        raise HooklineError(
            f"{one.name!r} has {len(heads)} heads, a panel for each, and ax= is one: leave ax= out, or choose a head "
            f"with a subscript, as in {one.name + '[:, 0]'!r}"
        )
    kept = heads[: min(options.most, _MOST_PANELS)]
    some = f"the first {len(kept)} of {len(heads)} heads" if len(kept) < len(heads) else ""
    numbers = numbers_of(kept)
    scale, label = weights_of(numbers, heads[None], options.log)
    keys = token_labels(options.tokens, options.sample, heads.shape[2], one.name)
    queries = keys if heads.shape[1] == heads.shape[2] else None
    down = Axis(queries or numbered(heads.shape[1]), "query")
    across = Axis(keys or numbered(heads.shape[2]), "key")
    panels = _Panels(numbers, scale, label, down, across, [f"head {head}" for head in range(len(kept))])
    about = (options.title, one.name, one.what, which, some, options.note)
    return _one_panel(panels, ax, about) if len(kept) == 1 else _many_panels(panels, about)


def weights_of(numbers: MaskedNumbers, heads: Tensor, log: bool | None) -> tuple[Scale, str]:
    """Return the colour scale for attention, which begins at 0, and its label."""
    if not is_attention(heads):
        return scale_of(numbers.values, log or False), value_name(heads)
    most = float(numbers.values[numbers.values.isfinite()].max())
    return scale_of(torch.tensor([_FAINTEST * most if log else 0.0, most]), bool(log)), "attention weight"


class _Panels(NamedTuple):
    """Matrices that share a colour scale and labels."""

    numbers: MaskedNumbers
    scale: Scale
    label: str
    down: Axis
    across: Axis
    names: Sequence[str]
    aspect: Literal["equal", "auto"] = "equal"

    def draw(self, ax: Axes, panel: int, room: tuple[float, float] | None = None) -> AxesImage:
        """Draw one of the matrices into axes; `room` is their width and height in inches."""
        image = heat(ax, self.numbers.part(panel), self.scale, aspect=self.aspect)
        wide, high = room or (None, None)
        label_x(ax, *self.across, room=wide)
        label_y(ax, *self.down, room=high)
        ax.tick_params(length=2)
        return image

    def room(self, across: int) -> tuple[float, float]:
        """Return the width and height of each panel in inches if there are so many beside each other."""
        rows, columns = len(self.down.labels), len(self.across.labels)
        if self.aspect == "equal":
            side = 2.0 if across <= 4 else 1.1
            return side, side * rows / columns
        return min(max(2.0, 0.14 * columns), 7.0 / across), min(max(0.8, 0.14 * rows), 2.4)


def _one_panel(panels: _Panels, ax: Axes | None, about: Sequence[str | None]) -> Axes:
    rows, columns = len(panels.down.labels), len(panels.across.labels)
    size = min(max(3.0, 0.2 * columns), 6.0)
    ax = axes_for(ax, size + 1.6, min(max(2.6, size * rows / columns + 1.4), 8.0))
    image = panels.draw(ax, 0)
    colour_bar(image, ax, panels.scale, panels.label)
    name_colours(ax, panels.numbers, panels.scale)
    entitle(ax, about[0], *map(str, about[1:]))
    return ax


def _many_panels(panels: _Panels, about: Sequence[str | None]) -> Figure:
    """Draw one panel for each head or layer, with labels only at the left and at the bottom."""
    total = len(panels.names)
    across = min(total, 4 if total <= 16 else 8)
    down = math.ceil(total / across)
    wide, high = panels.room(across)
    beside = 0.065 * max(map(len, panels.down.labels)), 0.065 * max(map(len, panels.across.labels))
    figure = NotebookFigure(
        figsize=((wide + 0.1) * across + beside[0] + 1.3, (high + 0.25) * down + beside[1] + 0.95), layout="compressed"
    )
    axes = [figure.add_subplot(down, across, panel + 1) for panel in range(total)]
    for panel, ax in enumerate(axes):
        image = panels.draw(ax, panel, (wide, high))
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


def tokens(one: NamedTensor, ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw one sample as token × unit."""
    matrix, which = sample_of(one, "tokens", options.sample)
    labels = token_labels(options.tokens, options.sample, len(matrix), one.name)
    return _matrix(one, ax, options, matrix, (labels or numbered(len(matrix)), "token"), which)


def units(one: NamedTensor, ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw all samples as sample × unit; a single one as bars."""
    matrix = dense(one.tensor)
    while matrix.dim() > 2 and matrix.shape[-1] == 1:  # Maps that were pooled to one number.
        matrix = matrix.squeeze(-1)
    rows = "sample" if matrix.dim() == 2 else "sample and position"
    matrix = matrix.reshape(-1, matrix.shape[-1] if matrix.dim() else 1)
    if len(matrix) == 1:
        return _bars(one, ax, options, numbers_of(matrix[0]))
    return _matrix(one, ax, options, matrix, (numbered(len(matrix)), rows), "")


def _matrix(
    one: NamedTensor, ax: Axes | None, options: PlotOptions, matrix: Tensor, rows: tuple[Sequence[str], str], which: str
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


def _bars(one: NamedTensor, ax: Axes | None, options: PlotOptions, numbers: MaskedNumbers) -> Axes:
    """Draw a bar for each unit, or a line if there are too many."""
    ax = axes_for(ax, 6.4, 3.2)
    values = numbers.values
    if len(values) <= _MOST_BARS:
        ax.bar(range(len(values)), values.nan_to_num(0.0).numpy(), width=0.8, color=COLOURS[0])
    else:
        ax.plot(values.numpy(), color=COLOURS[0], linewidth=0.8)
    ax.axhline(0, color="#888888", linewidth=0.6)
    for mask, mark, text in zip((numbers.nan, numbers.infinite), "X^", numbers.counts, strict=True):
        if mask.any():
            where = mask.nonzero()[:, 0].tolist()
            ax.plot(where, [0.0] * len(where), mark, color="black", markerfacecolor="#F0E442", label=text)
            ax.legend(edgecolor="none", fontsize="small")
    label_x(ax, numbered(len(values)), "unit")
    ax.set_ylabel(value_name(one.tensor))
    ax.spines[["top", "right"]].set_visible(False)
    entitle(ax, options.title, one.name, one.what, options.note)
    return ax


def lay_out(tiles: Tensor, across: int) -> MaskedNumbers:
    """Lay out matrices in rows, with gaps between them, averaged if they have more elements than pixels."""
    numbers = numbers_of(tiles)
    finer = across * tiles.shape[2] // _MOST_ACROSS
    if finer > 1:
        numbers = _averaged(numbers, finer)
    gap = max(1, round(max(numbers.values.shape[1:]) / 14))
    values = _laid(numbers.values, across, gap, float("nan"))
    nan, infinite = (_laid(mask, across, gap, False) for mask in (numbers.nan, numbers.infinite))
    return MaskedNumbers(values, nan, infinite, numbers.counts)


def _averaged(numbers: MaskedNumbers, times: int) -> MaskedNumbers:
    values = F.avg_pool2d(numbers.values, times, ceil_mode=True)
    nan, infinite = (
        F.max_pool2d(mask.double(), times, ceil_mode=True).bool() for mask in (numbers.nan, numbers.infinite)
    )
    return MaskedNumbers(values, nan, infinite, numbers.counts)


def _laid(tiles: Tensor, across: int, gap: int, blank: float) -> Tensor:
    total, rows, columns = tiles.shape
    down = math.ceil(total / across)
    sheet = tiles.new_full((down * across, rows + gap, columns + gap), blank)
    sheet[:total, :rows, :columns] = tiles
    return sheet.view(down, across, rows + gap, columns + gap).transpose(1, 2).flatten(2).flatten(0, 1)[:-gap, :-gap]


def _across(total: int, rows: int, columns: int) -> int:
    """Return how many tiles to lay in a row, so that the sheet is wider than high."""
    wanted = math.sqrt(1.6 * total * rows / columns)
    return total if total <= 4 else max(1, min(total, 2 ** round(math.log2(max(wanted, 1)))))


def _constant(numbers: MaskedNumbers) -> str:
    finite = numbers.values[numbers.values.isfinite()]
    return f"every value is {finite[0]:.4g}" if len(finite) > 1 and bool((finite == finite[0]).all()) else ""


def layers(many: Mapping[str, NamedTensor], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw a statistic of each token at each layer."""
    names = list(along_depth(many))
    found = [sample_of(many[name], "tokens", options.sample) for name in names]
    values = torch.stack([by_token(dense(tensor), options.statistic) for tensor, _ in found])
    tokens = token_labels(options.tokens, options.sample, values.shape[1], names[0])
    log = options.log if options.log or options.statistic in POSITIVE else False
    sides = layer_labels(names), Axis(tokens or numbered(values.shape[1]), "token")
    label = statistic_name(options.statistic)
    return _grid(ax, options, values, sides, label, log, (about(many), found[0][1], options.note))


def grid(many: Mapping[str, NamedTensor], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw numbers whose names differ in two numbers, as in `h.*[:, *]`, as layer × position."""
    (family,) = families(many)
    rows, columns = (list(dict.fromkeys(parts[side] for parts in family.members.values())) for side in (0, 1))
    values = torch.full((len(rows), len(columns)), float("nan"), dtype=torch.float64)
    for name, (row, column) in family.members.items():
        values[rows.index(row), columns.index(column)] = float(dense(many[name].tensor))
    tokens = token_labels(options.tokens, options.sample, len(columns), family.template)
    across = Axis(columns, "position") if tokens is None else Axis(tokens, "token")
    down = Axis(rows, f"layer {family.template}")
    return _grid(ax, options, values, (down, across), options.label or "value", options.log or False, [options.note])


def grid_map(values: Tensor, axes: Mapping[str, Axis], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw the changes of numbers along two named axes."""
    down, across = axes.values()
    changes, unchanged = _changes(values, options)
    scale = scale_of_changes(changes)
    origin = "lower" if down.title == "layer" else "upper"
    return _grid(ax, options, changes, (down, across), "change", False, (unchanged, options.note), scale, origin)


def grid_maps(values: Tensor, axes: Mapping[str, Axis], ax: Axes | None, options: PlotOptions) -> Figure:
    """Draw the changes of numbers along three or more named axes: a panel for each layer, or whatever comes first."""
    *several, down, across = axes.values()
    if ax is not None:
        name = several[0].title
        raise HooklineError(f"there is a map for each {name}, and ax= is one: leave ax= out, or select one {name}")
    names = [
        ", ".join(f"{axis.title} {label}" for axis, label in zip(several, labels, strict=True))
        for labels in itertools.product(*(axis.labels for axis in several))
    ]
    changes, unchanged = _changes(values.reshape(len(names), *values.shape[-2:]), options)
    kept = changes[:_MOST_PANELS]
    some = f"the first {len(kept)} of {len(names)}" if len(kept) < len(names) else ""
    numbers = numbers_of(kept)
    panels = _Panels(numbers, scale_of_changes(kept), "change", down, across, names[: len(kept)], aspect="auto")
    what = f"change by {', '.join(axis.title for axis in several)}, {down.title} and {across.title}"
    return _many_panels(panels, (options.title, what, unchanged, some, options.note))


def _changes(values: Tensor, options: PlotOptions) -> tuple[Tensor, str]:
    """Return how far numbers are from the one that was measured without a change, and a note with that one."""
    base = options.base or 0.0
    return values - base, f"{options.label} without a change: {base:.4g}"


def _grid(
    ax: Axes | None, options: PlotOptions, values: Tensor, sides: tuple[Axis, Axis], label: str, log: bool | None,
    notes: Sequence[str], scale: Scale | None = None, origin: str = "lower",
) -> Axes:  # fmt: skip
    down, across = sides
    numbers = numbers_of(values)
    scale = scale or scale_of(numbers.values, log)
    ax = axes_for(ax, min(max(4.6, 2.2 + 0.22 * len(across.labels)), 8.0), height_of(len(values), least=3.0))
    image = heat(ax, numbers, scale, aspect="auto", origin=origin)
    label_y(ax, *down)
    label_x(ax, *across)
    colour_bar(image, ax, scale, label)
    name_colours(ax, numbers, scale)
    entitle(ax, options.title, f"{label} by {down.title.split()[0].strip(',')} and {across.title}", *notes)
    return ax


def heads(many: Mapping[str, NamedTensor], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw the attention of every layer and head as one sheet."""
    names = list(along_depth(many))
    found = [sample_of(many[name], "attention", options.sample) for name in names]
    across, queries, keys = found[0][0].shape
    tiles = torch.cat([heads for heads, _ in found])
    sheet = lay_out(tiles, across)
    scale, label = weights_of(sheet, tiles[None], options.log)
    width = min(max(3.6, 1.6 + 0.75 * across), 8.5)
    ax = axes_for(ax, width, min(1.2 + (width - 1.4) * len(names) * queries / (across * keys), 10.0))
    rows, columns = sheet.values.shape
    image = heat(
        ax,
        sheet,
        scale,
        extent=(-0.5, across - 0.5, len(names) - 0.5, -0.5),
        aspect=rows / columns * across / len(names),
    )
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    label_y(ax, *layer_labels(names))
    label_x(ax, numbered(across), "head")
    colour_bar(image, ax, scale, label)
    name_colours(ax, sheet, scale)
    notes = (about(many), found[0][1], options.note)
    entitle(ax, options.title, f"{label}, each {queries} queries × {keys} keys", *notes)
    return ax
