"""What all pictures are drawn with: figures, scales of colours, heat maps, titles and ticks. Needs matplotlib."""

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
NAN = {SIGNED: "#000000", PLAIN: "#ffffff"}  # Neither is on its scale.
INFINITE = {SIGNED: "#ffd000", PLAIN: "#d62728"}
_OUTLIERS = 2.5  # A scale ends before the largest values if these are so many times the 99.5th percentile.
_LETTER, _LINE = 0.085, 0.16  # Inches that a letter takes along its line, and a line of letters across.
_SHARP = 600  # Elements along a side of a picture that have a pixel each.
_MOST_SPREAD = 4_000_000  # Elements of a picture to which it may grow by that.
_BAR = 0.14  # Inches that the scale beside a picture is wide.
_SMALLER = 0.75  # How large the letters of panels are, which have less room.


class NotebookFigure(Figure):
    """A figure that shows itself in notebooks, and that pyplot does not know."""

    def _repr_png_(self) -> tuple[bytes, dict[str, float]]:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=2 * self.dpi)
        width, height = self.get_size_inches() * self.dpi
        return file.getvalue(), {"width": width, "height": height}


class Scale(NamedTuple):
    """Which numbers the ends of a scale of colours stand for."""

    low: float
    high: float
    map: str
    log: bool
    extend: str

    @property
    def norm(self) -> Normalize:
        """The scale as matplotlib has it."""
        return (LogNorm if self.log else Normalize)(self.low, self.high)


def axes_for(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the user's axes, or those of a new figure of so many inches."""
    if ax is not None:
        return ax
    return NotebookFigure(figsize=(width, height), layout="compressed").add_subplot()


def scale_of(values: Tensor, log: bool | None = False) -> Scale:
    """Choose a scale: diverging around 0 for values of both signs, else from the least to the greatest.

    A few values that are far beyond all others would leave no colours for these: then the scale ends before them.
    """
    finite = values[values.isfinite()]
    if not len(finite):
        return Scale(0.0, 1.0, PLAIN, False, "neither")
    low, high = (limit.item() for limit in finite.aminmax())
    usual = _usual(finite)
    if log:
        refuse_log(low)
        low = finite[finite > 0].amin().item() if low == 0 < high else low  # What is 0 has the colour of the least.
    if low < 0 < high:
        bound = usual or max(-low, high)
        return Scale(-bound, bound, SIGNED, False, _extend(low, high, -bound, bound))
    if (log or (log is None and high > 100 * low)) and low > 0:
        return Scale(low, high if high > low else 2 * low, PLAIN, True, "neither")
    start, end = (-usual, high) if high <= 0 and usual else (low, usual or high)
    if start == end:  # All the same: the scale begins or ends at 0.
        start, end = min(start, 0.0), max(end, 0.0) or (0.0 if start < 0 else 1.0)
    return Scale(start, end, PLAIN, False, _extend(low, high, start, end))


def refuse_log(least: float) -> None:
    """Raise if numbers can't be drawn on a logarithmic scale that was asked for."""
    if least < 0:
        raise HooklineError(
            f"log=True is for positive numbers, and the least here is {least:.4g}; cache.map(torch.abs) has their sizes"
        )


def _usual(finite: Tensor) -> float | None:
    """Return the size that nearly all values keep below, if the largest ones are far beyond it."""
    sizes = finite.abs().reshape(-1)
    sizes = sizes[:: max(1, len(sizes) // 1_000_000)]
    usual = torch.quantile(sizes, 0.995).item()
    return usual if 0 < usual * _OUTLIERS < finite.abs().max().item() else None


def _extend(low: float, high: float, start: float, end: float) -> str:
    return {(True, True): "both", (True, False): "min", (False, True): "max"}.get((low < start, high > end), "neither")


def heat(ax: Axes, numbers: MaskedNumbers, scale: Scale, **options: Any) -> AxesImage:
    """Draw a matrix as colours; NaN and infinity have colours of their own."""
    values = numbers.values
    rows, columns = values.shape
    ends = (rows - 0.5, -0.5) if options.get("origin", "upper") == "upper" else (-0.5, rows - 0.5)
    options.setdefault("extent", (-0.5, columns - 0.5, *ends))
    drawn = _spread(values.masked_fill(values <= 0, scale.low) if scale.log else values)
    smooth = "nearest" if max(values.shape) <= _SHARP else None  # What is finer than pixels is averaged.
    image = ax.imshow(
        drawn.numpy(), cmap=matplotlib.colormaps[scale.map], norm=scale.norm, interpolation=smooth, **options
    )
    for mask, colours in ((numbers.nan, NAN), (numbers.infinite, INFINITE)):
        if mask.any():
            marks = torch.where(mask, 0.0, float("nan")).numpy()
            ax.imshow(marks, cmap=ListedColormap([colours[scale.map]]), interpolation="nearest", **options)
    return image


def _spread(values: Tensor) -> Tensor:
    """Repeat the rows or columns of a long strip: where its long side is averaged, the short one would blur too."""
    long, short = max(values.shape), min(values.shape)
    times = _SHARP // short
    if long <= _SHARP or times < 2 or long * _SHARP > _MOST_SPREAD:
        return values
    return values.repeat_interleave(times, dim=values.shape.index(short))


def name_colours(ax: Axes | Figure, numbers: MaskedNumbers, scale: Scale) -> None:
    """Say which colours stand for NaN and infinity, where there are any."""
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
    """Draw the scale beside the axes, and say what it is of."""
    first = axes if isinstance(axes, Axes) else axes[0]
    height = inches(first)[1] if isinstance(axes, Axes) else 0.8 * first.figure.bbox.height / first.figure.dpi
    bar = first.figure.colorbar(image, ax=axes, extend=scale.extend, pad=0.02, fraction=0.08, aspect=height / _BAR)
    bar.set_label(label + (", log scale" if scale.log else ""), parse_math=False)
    bar.outline.set_visible(False)


def entitle(ax: Axes, title: str | None, name: str, *notes: str) -> None:
    """Write the title: the user's own, or the name, and below it what is to be known.

    A figure of ours is as wide as it is for the title too; in the user's, that stays above the axes.
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
    """Put notes on as few lines as they fit on."""
    lines: list[str] = []
    for note in notes:
        longer = f"{lines[-1]} · {note}" if lines else note
        if lines and len(longer) * _LETTER <= width:
            lines[-1] = longer
        else:
            lines.append(note)
    return lines


def inches(ax: Axes) -> tuple[float, float]:
    """Return how wide and high axes are."""
    box = ax.get_window_extent()
    dpi = ax.figure.dpi
    return box.width / dpi, box.height / dpi


def label_x(ax: Axes, labels: Sequence[str], title: str, *, room: float | None = None) -> None:
    """Write labels below the axes: upright if they are long, and only as many as there is room for.

    Panels tell their `room` in inches, and have smaller letters.
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
    """Write labels beside the axes, as many as there is room for."""
    size = 1.0 if room is None else _SMALLER
    chosen = thinned(len(labels), int((inches(ax)[1] if room is None else room) / size / _LINE))
    ax.set_yticks(list(chosen), [drawable(labels[place]) for place in chosen], parse_math=False, fontsize=8.5 * size)
    ax.set_ylabel(title, parse_math=False)


def numbered(count: int) -> list[str]:
    """Return the labels of what has numbers only."""
    return [str(number) for number in range(count)]


def height_of(lines: int, least: float = 2.4, most: float = 8.0) -> float:
    """Return the height of a picture in which each line of so many may have a label."""
    return math.ceil(10 * min(max(least, 1.0 + 1.1 * _LINE * lines), most)) / 10


def drawable(text: str) -> str:
    """Return text with a box for each letter that the font lacks: matplotlib would draw one too, and warn of it."""
    if text.isascii():
        return text
    usual = tuple(FontProperties().get_family())
    return "".join(letter if letter.isascii() or _has(usual, letter) else "□" for letter in text)


@lru_cache(maxsize=4096)
def _has(usual: tuple[str, ...], letter: str) -> bool:
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in usual]
    return any(font.get_char_index(ord(letter)) for font in fonts)
