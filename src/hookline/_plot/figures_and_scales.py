"""The parts that all pictures share: figures, colour scales, heat maps, titles and ticks. Needs matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from torch import Tensor

from hookline._plot.plot_data import MaskedNumbers, thinned
from hookline.errors import HooklineError

# Okabe and Ito's colours, which colour-blind people can tell apart; yellow, which fades on white, is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
SIGNED, PLAIN = "RdBu_r", "viridis"
NAN = {SIGNED: "#000000", PLAIN: "#ffffff"}  # Neither colour is on its scale.
INFINITE = {SIGNED: "#ffd000", PLAIN: "#d62728"}
_OUTLIERS = 2.5  # If the largest value is over this many times the 99.5th percentile, the scale ends at the percentile.
_LETTER, _LINE = 0.085, 0.16  # The width of a letter and the height of a line, in inches.
_SHARP = 600  # Up to this many elements along a side are drawn without averaging.
_MOST_SPREAD = 4_000_000  # The most elements that `_spread` returns.
_BAR = 0.14  # The width of a colour bar in inches.
_SMALLER = 0.75  # The relative size of letters in panels, which have less room.


class NotebookFigure(Figure):
    """A figure that displays itself in notebooks. pyplot does not know it, so it need not be closed."""

    def _repr_png_(self) -> tuple[bytes, dict[str, float]]:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=2 * self.dpi)
        width, height = self.get_size_inches() * self.dpi
        return file.getvalue(), {"width": width, "height": height}


class Scale(NamedTuple):
    """The numbers at the ends of a colour scale, and its colours."""

    low: float
    high: float
    map: str
    log: bool
    extend: str

    @property
    def norm(self) -> Normalize:
        """The scale as a matplotlib norm."""
        return (LogNorm if self.log else Normalize)(self.low, self.high)


def axes_for(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the user's axes, or those of a new figure of `width` by `height` inches."""
    if ax is not None:
        return ax
    return NotebookFigure(figsize=(width, height), layout="compressed").add_subplot()


def scale_of(values: Tensor, log: bool | None = False) -> Scale:
    """Choose a colour scale: diverging around 0 for values of both signs, else from the smallest to the largest.

    A few outliers would leave too few colours for the other values, so the scale ends before them.
    """
    finite = values[values.isfinite()]
    if not len(finite):
        return Scale(0.0, 1.0, PLAIN, False, "neither")
    low, high = (limit.item() for limit in finite.aminmax())
    usual = _usual(finite)
    if log:
        refuse_log(low)
        # Zeros get the colour of the smallest number above them.
        low = finite[finite > 0].amin().item() if low == 0 < high else low
    if low < 0 < high:
        bound = usual or max(-low, high)
        return Scale(-bound, bound, SIGNED, False, _extend(low, high, -bound, bound))
    if (log or (log is None and high > 100 * low)) and low > 0:
        return Scale(low, high if high > low else 2 * low, PLAIN, True, "neither")
    start, end = (-usual, high) if high <= 0 and usual else (low, usual or high)
    if start == end:  # All values are equal: the scale begins or ends at 0.
        start, end = min(start, 0.0), max(end, 0.0) or (0.0 if start < 0 else 1.0)
    return Scale(start, end, PLAIN, False, _extend(low, high, start, end))


def scale_of_changes(values: Tensor) -> Scale:
    """Return a colour scale around 0 that has room for the largest change, however few changes are large."""
    most = values[values.isfinite()].abs().amax().item() if bool(values.isfinite().any()) else 0.0
    return Scale(-(most or 1.0), most or 1.0, SIGNED, False, "neither")


def refuse_log(least: float) -> None:
    """Raise, for a logarithmic scale, if the smallest number is negative."""
    if least < 0:
        raise HooklineError(
            f"log=True is for positive numbers, and the least here is {least:.4g}; draw cache.map(torch.abs) instead"
        )


def _usual(finite: Tensor) -> float | None:
    """Return the magnitude that nearly all values stay below; None if the largest are not far above it."""
    sizes = finite.abs().reshape(-1)
    sizes = sizes[:: max(1, len(sizes) // 1_000_000)]
    usual = torch.quantile(sizes, 0.995).item()
    return usual if 0 < usual * _OUTLIERS < finite.abs().max().item() else None


def _extend(low: float, high: float, start: float, end: float) -> str:
    return {(True, True): "both", (True, False): "min", (False, True): "max"}.get((low < start, high > end), "neither")


def heat(ax: Axes, numbers: MaskedNumbers, scale: Scale, **options: Any) -> AxesImage:
    """Draw a matrix as a heat map; NaN and infinity have their own colours."""
    values = numbers.values
    rows, columns = values.shape
    ends = (rows - 0.5, -0.5) if options.get("origin", "upper") == "upper" else (-0.5, rows - 0.5)
    options.setdefault("extent", (-0.5, columns - 0.5, *ends))
    drawn = _spread(values.masked_fill(values <= 0, scale.low) if scale.log else values)
    smooth = "nearest" if max(values.shape) <= _SHARP else None  # Elements smaller than a pixel are averaged.
    image = ax.imshow(
        drawn.numpy(), cmap=matplotlib.colormaps[scale.map], norm=scale.norm, interpolation=smooth, **options
    )
    for mask, colours in ((numbers.nan, NAN), (numbers.infinite, INFINITE)):
        if mask.any():
            marks = torch.where(mask, 0.0, float("nan")).numpy()
            ax.imshow(marks, cmap=ListedColormap([colours[scale.map]]), interpolation="nearest", **options)
    return image


def _spread(values: Tensor) -> Tensor:
    """Widen a long strip by repeating each row or column: the strip would blur when its long side is averaged."""
    long, short = max(values.shape), min(values.shape)
    times = _SHARP // short
    if long <= _SHARP or times < 2 or long * _SHARP > _MOST_SPREAD:
        return values
    return values.repeat_interleave(times, dim=values.shape.index(short))


def name_colours(ax: Axes | Figure, numbers: MaskedNumbers, scale: Scale) -> None:
    """Add a legend for the colours of NaN and infinity, if there are any."""
    found = [
        Patch(facecolor=colours[scale.map], edgecolor="#555555", linewidth=0.6, label=text)
        for mask, colours, text in zip((numbers.nan, numbers.infinite), (NAN, INFINITE), numbers.counts, strict=True)
        if mask.any()
    ]
    if found and isinstance(ax, Axes):
        ax.legend(
            handles=found, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize="small",
            borderaxespad=0.1, handlelength=1.0, columnspacing=1.0,
        )  # fmt: skip
    elif found:
        ax.legend(handles=found, loc="outside upper right", ncols=2, frameon=False, fontsize="small", handlelength=1.0)


def colour_bar(image: AxesImage, axes: Axes | Sequence[Axes], scale: Scale, label: str) -> None:
    """Draw the colour bar beside the axes, with its label."""
    first = axes if isinstance(axes, Axes) else axes[0]
    height = inches(first)[1] if isinstance(axes, Axes) else 0.8 * first.figure.bbox.height / first.figure.dpi
    bar = first.figure.colorbar(image, ax=axes, extend=scale.extend, pad=0.02, fraction=0.08, aspect=height / _BAR)
    bar.set_label(label + (", log scale" if scale.log else ""), parse_math=False)
    bar.outline.set_visible(False)


def entitle(ax: Axes, title: str | None, name: str, *notes: str) -> None:
    """Write the title: the user's, or the name with notes below it.

    In a figure that hookline created, the title may be as wide as the figure; in a user's figure, as wide as the axes.
    """
    figure = ax.figure if isinstance(ax.figure, NotebookFigure) else None
    width = inches(ax)[0] if figure is None else figure.get_figwidth()
    lines = [title] if title is not None else [name or '""', *_wrapped([note for note in notes if note], width)]
    text = "\n".join(map(drawable, lines))
    if figure is None:
        ax.set_title(text, loc="left", fontsize="medium", parse_math=False)
    else:
        figure.suptitle(text, x=0.02, ha="left", fontsize="medium", parse_math=False)


def _wrapped(notes: list[str], width: float) -> list[str]:
    """Join notes into as few lines as possible."""
    lines: list[str] = []
    for note in notes:
        longer = f"{lines[-1]} · {note}" if lines else note
        if lines and len(longer) * _LETTER <= width:
            lines[-1] = longer
        else:
            lines.append(note)
    return lines


def inches(ax: Axes) -> tuple[float, float]:
    """Return the width and height of axes in inches."""
    box = ax.get_window_extent()
    dpi = ax.figure.dpi
    return box.width / dpi, box.height / dpi


def label_x(ax: Axes, labels: Sequence[str], title: str, *, room: float | None = None) -> None:
    """Write labels below the axes: vertical if they are long, and only as many as fit.

    Panels give their `room` in inches, and have smaller letters.
    """
    size = 1.0 if room is None else _SMALLER
    room = (inches(ax)[0] if room is None else room) / size
    longest = max(map(len, labels), default=1)
    flat = int(room / ((longest + 1) * _LETTER))
    is_flat = flat >= len(labels) or all(label.isdigit() for label in labels)
    chosen = thinned(len(labels), flat if is_flat else int(room / _LINE))
    ax.set_xticks(
        list(chosen), [drawable(labels[place]) for place in chosen], parse_math=False,
        fontsize=8.5 * size, rotation=0 if is_flat else 90,
    )  # fmt: skip
    ax.set_xlabel(title, parse_math=False)


def label_y(ax: Axes, labels: Sequence[str], title: str, *, room: float | None = None) -> None:
    """Write labels beside the axes, as many as fit."""
    size = 1.0 if room is None else _SMALLER
    chosen = thinned(len(labels), int((inches(ax)[1] if room is None else room) / size / _LINE))
    ax.set_yticks(list(chosen), [drawable(labels[place]) for place in chosen], parse_math=False, fontsize=8.5 * size)
    ax.set_ylabel(title, parse_math=False)


def numbered(count: int) -> list[str]:
    """Return the numbers from 0 to `count` - 1 as labels."""
    return [str(number) for number in range(count)]


def height_of(lines: int, least: float = 2.4, most: float = 8.0) -> float:
    """Return the height in inches of a picture with a label for each of `lines` lines."""
    return math.ceil(10 * min(max(least, 1.0 + 1.1 * _LINE * lines), most)) / 10


def drawable(text: str) -> str:
    """Return text with a box for each letter that the font lacks. matplotlib would draw a box too, but also warn."""
    if text.isascii():
        return text
    usual = tuple(FontProperties().get_family())
    return "".join(letter if letter.isascii() or _has(usual, letter) else "□" for letter in text)


@lru_cache(maxsize=4096)
def _has(usual: tuple[str, ...], letter: str) -> bool:
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in usual]
    return any(font.get_char_index(ord(letter)) for font in fonts)
