"""Pictures of many values as one sheet, a line for each: token × layer, attention, histograms. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

from hookline._plot.drawing import (
    COLOURS,
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
from hookline._plot.labels import (
    Depth,
    Options,
    Shown,
    about,
    along_depth,
    dense,
    depth_of,
    families,
    numbers_of,
    sample_of,
    token_labels,
)
from hookline._plot.measures import POSITIVE, by_token, statistic_name
from hookline._plot.pictures import lay_out, weights_of

_MOST_RIDGES = 40  # Beyond that they are too thin to read, and become colours.
_OVERLAP = 1.4  # How many lines high a ridge is, where they are many.
_MOST_APART = 8  # Ridges that stand apart.


class Axis(NamedTuple):
    """The labels along one side of a sheet, and what they are."""

    labels: Sequence[str]
    title: str


def layers(many: Mapping[str, Shown], ax: Axes | None, options: Options) -> Axes:
    """Draw a statistic of each token at each layer."""
    names = list(along_depth(many))
    found = [sample_of(many[name], "tokens", options.sample) for name in names]
    values = torch.stack([by_token(dense(tensor), options.statistic) for tensor, _ in found])
    tokens = token_labels(options.tokens, options.sample, values.shape[1], names[0])
    log = options.log if options.log or options.statistic in POSITIVE else False
    sides = _down(names), Axis(tokens or numbered(values.shape[1]), "token")
    label = statistic_name(options.statistic)
    return _grid(ax, options, values, sides, label, log, (about(many), found[0][1], options.note))


def grid(many: Mapping[str, Shown], ax: Axes | None, options: Options) -> Axes:
    """Draw numbers whose names differ in two numbers, as in `h.*[:, *]`, as layer × position."""
    (family,) = families(many)
    rows, columns = (list(dict.fromkeys(parts[side] for parts in family.members.values())) for side in (0, 1))
    values = torch.full((len(rows), len(columns)), float("nan"), dtype=torch.float64)
    for name, (row, column) in family.members.items():
        values[rows.index(row), columns.index(column)] = float(dense(many[name].tensor))
    tokens = token_labels(options.tokens, options.sample, len(columns), family.template)
    across = Axis(columns, "position") if tokens is None else Axis(tokens, "token")
    label, notes = options.label or "value", [options.note]
    if options.base is not None:
        values, label, notes = values - options.base, f"change of {label}", [f"unchanged: {options.base:.4g}", *notes]
    return _grid(
        ax, options, values, (Axis(rows, f"layer {family.template}"), across), label, options.log or False, notes
    )


def _grid(
    ax: Axes | None, options: Options, values: Tensor, sides: tuple[Axis, Axis], label: str, log: bool | None,
    notes: Sequence[str],
) -> Axes:  # fmt: skip
    down, across = sides
    numbers = numbers_of(values)
    scale = scale_of(numbers.values, log)
    ax = axes_for(ax, min(max(4.6, 2.2 + 0.22 * len(across.labels)), 8.0), height_of(len(values), least=3.0))
    image = heat(ax, numbers, scale, aspect="auto", origin="lower")
    label_y(ax, *down)
    label_x(ax, *across)
    colour_bar(image, ax, scale, label)
    name_colours(ax, numbers, scale)
    entitle(ax, options.title, f"{label} by {down.title.split()[0].strip(',')} and {across.title}", *notes)
    return ax


def heads(many: Mapping[str, Shown], ax: Axes | None, options: Options) -> Axes:
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
    label_y(ax, *_down(names))
    label_x(ax, numbered(across), "head")
    colour_bar(image, ax, scale, label)
    name_colours(ax, sheet, scale)
    notes = (about(many), found[0][1], options.note)
    entitle(ax, options.title, f"{label}, each {queries} queries × {keys} keys", *notes)
    return ax


def ridges(many: Mapping[str, Shown], ax: Axes | None, options: Options) -> Axes:
    """Draw the histogram of each site, one above the other."""
    names = list(along_depth(many))
    flat = [dense(many[name].tensor).reshape(-1) for name in names]
    low, high = _usual_range(flat)
    bins = int(min(max(24, min(map(len, flat)) ** 0.5), 96))
    finite = torch.zeros(len(flat), dtype=torch.long)
    counts = torch.zeros(len(flat), bins, dtype=torch.float64)
    for place, values in enumerate(map(_finite, flat)):  # One at a time: they may be large.
        finite[place], counts[place] = len(values), torch.histc(values, bins, low, high)
    peaks = counts / counts.amax(1, keepdim=True).clamp(min=1)
    ax = axes_for(ax, 6.0, height_of(len(names), least=3.0))
    (_ridges if len(names) <= _MOST_RIDGES else _colours)(ax, peaks, low, high)
    label_y(ax, *_down(names))
    ax.set_xlabel("value")
    total = int(finite.sum())
    bad, outside = sum(map(len, flat)) - total, total - int(counts.sum())
    notes = [
        f"{outside / total:.2g} of all elements are beyond the axis" if outside else "",
        f"{bad:,} are NaN or Inf" if bad else "",
    ]
    entitle(
        ax, options.title, "how often values occur, at each site against its peak", about(many), *notes, options.note
    )
    return ax


def _ridges(ax: Axes, peaks: Tensor, low: float, high: float) -> None:
    middles = torch.linspace(low, high, 2 * peaks.shape[1] + 1, dtype=torch.float64)[1::2].numpy()
    reach = 0.9 if len(peaks) <= _MOST_APART else _OVERLAP
    for place, line in reversed(list(enumerate(peaks))):  # Those below stand before those above.
        top = (place + reach * line).numpy()
        ax.fill_between(middles, place, top, facecolor=COLOURS[0], edgecolor="white", linewidth=0.7)
    ax.set_xlim(low, high)
    ax.set_ylim(-0.2, len(peaks) - 1 + reach)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _colours(ax: Axes, peaks: Tensor, low: float, high: float) -> None:
    numbers = numbers_of(peaks)
    scale = scale_of(numbers.values)
    extent = (low, high, -0.5, len(peaks) - 0.5)
    colour_bar(heat(ax, numbers, scale, aspect="auto", origin="lower", extent=extent), ax, scale, "share of the peak")


def _usual_range(flat: list[Tensor]) -> tuple[float, float]:
    """Return the range in which nearly all elements of every site lie."""
    shares = torch.tensor([0.001, 0.999], dtype=torch.float64)
    some = [_finite(values[:: max(1, len(values) // 100_000)]) for values in flat]
    ends = [end for values in some if len(values) for end in torch.quantile(values, shares).tolist()]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    return (low, high) if low < high else (low - 0.5, low + 0.5)


def _finite(values: Tensor) -> Tensor:
    numbers = values.to("cpu", torch.float64)
    return numbers[numbers.isfinite()]


def _down(names: list[str]) -> Axis:
    """Return the labels of a line for each name: its layer if that is enough."""
    values = list(along_depth(names).values())
    places = depth_of(values if len({*values}) == len(names) else names)
    if len(places.labels) < len(names):
        places = Depth.one_by_one(names)
    return Axis(places.labels, places.title)
