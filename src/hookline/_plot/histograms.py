"""Histograms of one value, or of many one above the other. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from matplotlib.axes import Axes
from torch import Tensor

from hookline._plot.figures_and_scales import (
    COLOURS,
    axes_for,
    colour_bar,
    entitle,
    heat,
    height_of,
    label_y,
    scale_of,
)
from hookline._plot.heatmaps import layer_labels, value_name
from hookline._plot.labels import along_depth
from hookline._plot.measures import NamedTensor, PlotOptions, about, dense, numbers_of
from hookline._stats import histogram as counted
from hookline._stats import numbers as statistics

_MOST_RIDGES = 40  # Beyond that they are too thin to read, and become colours.
_OVERLAP = 1.4  # How many lines high a ridge is, where they are many.
_MOST_APART = 8  # Ridges that stand apart.


def histogram(one: NamedTensor, ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw how often each value occurs."""
    found, numbers = counted([one.tensor]), statistics([one.tensor])
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
    shares = ((numbers.zeros, "0"), (numbers.nan, "NaN"), (numbers.inf, "Inf"))
    bad = ", ".join(f"{share:.2%} are {name}" for share, name in shares if share > 0)
    about = f"mean {numbers.mean:.3g}, std {numbers.std:.3g}, from {numbers.min:.3g} to {numbers.max:.3g}"
    entitle(ax, options.title, one.name, one.what, about, bad, options.note)
    return ax


def ridges(many: Mapping[str, NamedTensor], ax: Axes | None, options: PlotOptions) -> Axes:
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
    label_y(ax, *layer_labels(names))
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
