"""Draw curves, bars and histograms: everything that is not a heat map. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter
from torch import Tensor

from hookline._plot.figures_and_scales import (
    COLOURS,
    NotebookFigure,
    axes_for,
    colour_bar,
    entitle,
    heat,
    height_of,
    label_x,
    label_y,
    refuse_log,
    scale_of,
)
from hookline._plot.plot_data import (
    FAR,
    POSITIVE,
    Axis,
    Depth,
    NamedTensor,
    PlotOptions,
    about,
    along_depth,
    dead_share,
    dense,
    depth_of,
    extremes,
    families,
    is_gradient,
    kind_of,
    layer_labels,
    measure,
    numbers_of,
    statistic_name,
    value_name,
)
from hookline._sites.language import Site
from hookline._stats import histogram as counted
from hookline._stats import numbers as statistics
from hookline.errors import HooklineError

_MARKS = {"vanishing": "v", "exploding": "^", "not finite": "X"}
_MARK: dict[str, Any] = {"color": "black", "markerfacecolor": "#F0E442", "linestyle": "", "markersize": 7}
_MOST_POINTS = 60  # A line with more points has no markers.
_MOST_NAMES = 20  # The most entries of a legend.
_MOST_INSIDE = 2  # The most entries of a legend inside the axes.
_WIDE = 100  # The scale is logarithmic if the largest number is more than this many times the smallest.
_MOST_RIDGES = 40  # More ridges would be too thin to read; they are drawn as a heat map.
_MOST_APART = 8  # More ridges overlap.
_OVERLAP = 1.4  # The height of an overlapping ridge, in lines.


class PlotLine(NamedTuple):
    """One line of a picture: the positions of its points, and their heights."""

    label: str
    places: list[int]
    heights: list[float]
    is_gradient: bool


def depth(many: Mapping[str, NamedTensor], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw a statistic of each site over depth, or the values if they are single numbers; one line for each family."""
    if all(one.tensor.dim() == 0 for one in many.values()):
        heights = {name: float(dense(one.tensor)) for name, one in many.items()}
        label, is_positive = options.label or "value", False
    else:
        heights = {name: measure(dense(one.tensor), options.statistic) for name, one in many.items()}
        label, is_positive = statistic_name(options.statistic), options.statistic in POSITIVE
    log = is_positive and _is_wide(heights.values()) if options.log is None else options.log
    ax = _heights_over(ax, *_lines(heights, label), label, log, options.base)
    entitle(ax, options.title, f"{label} over depth", about(many), options.note)
    return ax


def along(values: Tensor, axes: Mapping[str, Axis], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw numbers along one named axis, and the one without a change."""
    (axis,) = axes.values()
    label = options.label or "value"
    line = PlotLine(label, list(range(len(values))), values.tolist(), False)
    is_short = all(map(str.isdigit, axis.labels))
    ax = _heights_over(
        ax, Depth({}, list(axis.labels), axis.title, by_layer=is_short), [line], label, False, options.base
    )
    entitle(ax, options.title, f"{label} by {axis.title}", options.note)
    return ax


def _heights_over(
    ax: Axes | None, places: Depth, lines: list[PlotLine], label: str, log: bool, base: float | None
) -> Axes:
    """Draw lines over depth or another axis, and the height without a change."""
    ax = _axes(ax, places, [line.label for line in lines])
    _scale(ax, places, label, log, [height for line in lines for height in line.heights])
    _draw(ax, lines)
    _mark(ax, [(line, ["" if math.isfinite(height) else "not finite" for height in line.heights]) for line in lines])
    if base is not None:
        ax.axhline(base, color="#555555", linestyle="--", linewidth=1, label=f"unchanged: {base:.4g}")
    _legend(ax)
    return ax


def flow(many: Mapping[str, NamedTensor], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw activations and gradients over depth on one logarithmic scale, and mark where they vanish or explode."""
    heights = {name: measure(dense(one.tensor), options.statistic) for name, one in many.items()}
    places, lines = _lines(heights, "activations")
    marks = [(line, extremes(line.heights, "last" if line.is_gradient else "first")) for line in lines]
    found = [kind for _, kinds in marks for kind in kinds if kind]
    ax = _axes(ax, places, [*(line.label for line in lines), *{*found}])
    log = options.statistic in POSITIVE if options.log is None else options.log
    _scale(ax, places, statistic_name(options.statistic), log, heights.values())
    _draw(ax, lines)
    _mark(ax, marks)
    _legend(ax)
    text = [f"{found.count(kind)} {kind}" for kind in _MARKS if kind in found]
    meaning = f"{FAR:g} times below or above where they come from" if {*found} & {"vanishing", "exploding"} else ""
    what = "activations and gradients" if any(not line.is_gradient for line in lines) else "gradients"
    notes = (", ".join(text) or "none vanish or explode", meaning, options.note)
    entitle(ax, options.title, f"{statistic_name(options.statistic)} of {what}", *notes)
    return ax


def dead(many: Mapping[str, NamedTensor], ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw the share of dead units of each site: units that are always 0."""
    names = along_depth(many)
    found = {name: dead_share(dense(many[name].tensor), kind_of(many[name].tensor)) for name in names}
    shares = {name: share for name, share in found.items() if share is not None}
    if not shares:
        name, one = next(iter(many.items()))
        raise HooklineError(f"{name!r} is {one.what}: it has no units that may be dead")
    places = depth_of(list(shares))
    if len(places.labels) < len(shares):
        places = Depth.one_by_one(list(shares))
    ax = _axes(ax, places, [])
    ax.bar([places.places[name] for name in shares], list(shares.values()), width=0.8, color=COLOURS[1])
    worst = max(shares, key=lambda name: shares[name])
    ax.set_ylim(0, min(1, 1.25 * shares[worst]) or 1)
    _scale(ax, places, "dead units", False, ())
    ax.set_xlim(-0.6, len(places.labels) - 0.4)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    text = f"most at {worst!r}: {shares[worst]:.1%}" if shares[worst] else "there are none"
    left_out = f"{len(found) - len(shares)} sites have no units" if len(found) > len(shares) else ""
    entitle(ax, options.title, "units that are 0 for every sample and position", text, left_out, options.note)
    return ax


def curves(
    many: Mapping[str, Sequence[float]], ax: Axes | None, along: str, numbers: Sequence[int], options: PlotOptions
) -> Axes:
    """Draw a number of each site over its calls: a panel for each quantity, such as `["rms"]`, a line for each site."""
    panels: dict[str, list[PlotLine]] = {}
    for name, heights in many.items():
        site = Site.parse(name)
        quantity, place = site.index.strip('[]"'), str(site._replace(index="")) or '""'
        if options.label is not None:
            quantity, place = options.label, name or '""'
        line = PlotLine(place, list(numbers[: len(heights)]), list(heights), site.is_gradient)
        panels.setdefault(quantity, []).append(line)
    if ax is not None and len(panels) > 1:
        first = f'**["{next(iter(panels))}"]'
        raise HooklineError(f"{', '.join(panels)} don't go into one axes; choose one, as in {first!r}")
    axes = [ax] if ax is not None else _stacked(panels)
    every = [line for lines in panels.values() for line in lines]
    for one, (quantity, lines) in zip(axes, panels.items(), strict=True):
        heights = [height for line in lines for height in line.heights]
        log = _is_wide(heights) if options.log is None else options.log
        _scale_y(one, quantity or "value", log, heights)
        _draw(one, lines, every)
        _mark(one, [(line, ["not finite" if math.isinf(height) else "" for height in line.heights]) for line in lines])
    _legend(axes[0], axes[1:])
    axes[-1].set_xlabel(along)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    entitle(axes[0], options.title, f"{', '.join(filter(None, panels)) or 'values'} over {along}s", options.note)
    return axes[0]


def _stacked(panels: Mapping[str, Sequence[PlotLine]]) -> list[Axes]:
    """Return axes one below the other, with room for a legend beside them."""
    longest = max(len(line.label) for lines in panels.values() for line in lines)
    beside = 0.6 + 0.07 * longest if max(map(len, panels.values())) > _MOST_INSIDE else 0.0
    figure = NotebookFigure(figsize=(6.0 + beside, 1.0 + 2.4 * len(panels)), layout="compressed")
    return list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])


def _lines(heights: Mapping[str, float], label: str) -> tuple[Depth, list[PlotLine]]:
    """Return the axis of depth, and its lines: one for each family of names, or one called `label`."""
    ordered = along_depth(heights)
    places = depth_of(list(dict.fromkeys(ordered.values())))
    found = families(ordered)
    if not places.by_layer and max(len(family.members) for family in found) < 3:
        groups = {label: [name for name in ordered if not is_gradient(name)],
                  "gradients": [name for name in ordered if is_gradient(name)]}  # fmt: skip
    else:
        groups = {family.template: list(family.members) for family in found}
    return places, [
        PlotLine(label, [places.places[ordered[name]] for name in names], [heights[name] for name in names],
             is_gradient(names[0]))
        for label, names in groups.items() if names
    ]  # fmt: skip


def _axes(ax: Axes | None, places: Depth, names: Sequence[str]) -> Axes:
    upright = 0.07 * max(map(len, places.labels)) if not places.by_layer else 0.0
    beside = 0.6 + 0.07 * max(map(len, names)) if len(names) > _MOST_INSIDE else 0.0
    return axes_for(ax, min(max(6.0, 1.4 + 0.2 * len(places.labels)), 8.0) + beside, 3.4 + min(upright, 1.8))


def _scale(ax: Axes, places: Depth, label: str, log: bool, heights: Iterable[float]) -> None:
    """Set the scale, labels and grid of the axes."""
    _scale_y(ax, label, log, heights)
    label_x(ax, places.labels, places.title)


def _scale_y(ax: Axes, label: str, log: bool, heights: Iterable[float]) -> None:
    if log:
        refuse_log(min(filter(math.isfinite, heights), default=0.0))
        ax.set_yscale("log", nonpositive="mask")
        if not _is_wide(heights, 10 * _WIDE):  # Powers of ten alone would leave one label or none.
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel(label + (", log scale" if log else ""), parse_math=False)
    ax.grid(axis="y", color="#888888", alpha=0.3, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _draw(ax: Axes, lines: Sequence[PlotLine], every: Sequence[PlotLine] = ()) -> None:
    """Draw lines, with colours in the order of `every` line of the picture.

    The line of a gradient is dashed, and has the colour of its value's line if there are several.
    """
    stems = {line.label: line.label.replace(":grad_output", "").replace(":grad_", ":") for line in every or lines}
    order = list(dict.fromkeys(stems.values())) if len({*stems.values()}) > 1 else list(stems)
    for line in lines:
        number = order.index(line.label if len({*stems.values()}) == 1 else stems[line.label])
        colour = COLOURS[number % len(COLOURS)]
        marker = "os^Dv"[number // len(COLOURS) % 5] if len(line.places) <= _MOST_POINTS else None
        ax.plot(
            line.places, line.heights, "--" if line.is_gradient else "-", color=colour, linewidth=1.4, label=line.label,
            marker=marker, markersize=4.5, markerfacecolor="white" if line.is_gradient else colour,
        )  # fmt: skip


def _mark(ax: Axes, marks: Sequence[tuple[PlotLine, list[str]]]) -> None:
    """Mark points that vanish, explode or are not finite; the mark of a point that can't be drawn is at the edge."""
    edge = ax.get_xaxis_transform()  # x in data coordinates, y in axes coordinates.
    is_log = ax.get_yscale() == "log"
    for line, kinds in marks:
        for place, height, kind in zip(line.places, line.heights, kinds, strict=True):
            if kind and math.isfinite(height) and (height > 0 or not is_log):
                ax.plot([place], [height], _MARKS[kind], zorder=5, **_MARK)
            elif kind:
                ax.plot(
                    [place], [0.97 if kind == "not finite" else 0.03], _MARKS[kind], zorder=5, transform=edge, **_MARK
                )
    found = {kind for _, kinds in marks for kind in kinds}
    for kind in _MARKS:
        if kind in found:
            ax.add_line(Line2D([], [], marker=_MARKS[kind], label=kind, **_MARK))


def _legend(ax: Axes, others: Sequence[Axes] = ()) -> None:
    """Add a legend if there is more than one entry; with many entries, beside the axes.

    It includes the entries that only `others`, the other axes of the picture, have.
    """
    handles, labels = ax.get_legend_handles_labels()
    for other in others:
        for handle, label in zip(*other.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles, labels = [*handles, handle], [*labels, label]
    if len(labels) < 2:
        return
    where: dict[str, Any] = {"loc": "best", "frameon": True}
    if len(labels) > _MOST_INSIDE:
        where = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False, "borderaxespad": 0.0}
    legend = ax.legend(handles[:_MOST_NAMES], labels[:_MOST_NAMES], fontsize="small", edgecolor="none", **where)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _is_wide(heights: Iterable[float], times: float = _WIDE) -> bool:
    """Return True if numbers are positive and the largest is more than `times` the smallest."""
    finite = [height for height in heights if math.isfinite(height) and height != 0]
    return bool(finite) and min(finite) > 0 and max(finite) > times * min(finite)


def histogram(one: NamedTensor, ax: Axes | None, options: PlotOptions) -> Axes:
    """Draw the histogram of one value."""
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
    """Draw the histograms of many sites, one above the other."""
    names = list(along_depth(many))
    flat = [dense(many[name].tensor).reshape(-1) for name in names]
    low, high = _usual_range(flat)
    bins = int(min(max(24, min(map(len, flat)) ** 0.5), 96))
    finite = torch.zeros(len(flat), dtype=torch.long)
    counts = torch.zeros(len(flat), bins, dtype=torch.float64)
    for place, values in enumerate(map(_finite, flat)):  # One site at a time, since values may be large.
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
    entitle(ax, options.title, "histogram of each site, relative to its peak", about(many), *notes, options.note)
    return ax


def _ridges(ax: Axes, peaks: Tensor, low: float, high: float) -> None:
    middles = torch.linspace(low, high, 2 * peaks.shape[1] + 1, dtype=torch.float64)[1::2].numpy()
    reach = 0.9 if len(peaks) <= _MOST_APART else _OVERLAP
    for place, line in reversed(list(enumerate(peaks))):  # Lower ridges are drawn in front.
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
    """Return the range that contains nearly all elements of every site."""
    shares = torch.tensor([0.001, 0.999], dtype=torch.float64)
    some = [_finite(values[:: max(1, len(values) // 100_000)]) for values in flat]
    ends = [end for values in some if len(values) for end in torch.quantile(values, shares).tolist()]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    return (low, high) if low < high else (low - 0.5, low + 0.5)


def _finite(values: Tensor) -> Tensor:
    numbers = values.to("cpu", torch.float64)
    return numbers[numbers.isfinite()]
