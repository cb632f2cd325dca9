"""The kinds of pictures: which one suits some values, why another does not, and the function that draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hookline._option_checks import refuse_numbers
from hookline._plot.labels import families, is_gradient
from hookline._plot.measures import NamedTensor, PlotOptions, full_shape, is_drawable, kind_of, tensor_to_draw
from hookline._tables import count
from hookline._values.nested import describe
from hookline.errors import HooklineError, NotCaptured, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Kind(NamedTuple):
    """A kind of picture: whether one value and whether many can be drawn so, and the dimensions that each needs."""

    one: bool
    many: bool
    dimensions: int = 0
    named: str = ""


KINDS = {
    "maps": Kind(True, False, 2, "(sample, channel, row, column)"),
    "attention": Kind(True, True, 2, "(sample, head, query, key)"),
    "tokens": Kind(True, False, 2, "(sample, token, unit)"),
    "units": Kind(True, False),
    "histogram": Kind(True, True),
    "layers": Kind(False, True, 2, "(sample, token, unit)"),
    "depth": Kind(False, True),
    "flow": Kind(False, True),
    "dead": Kind(False, True, 1, "units"),
}

OF_A_SAMPLE = ("maps", "attention", "tokens", "layers")
OF_TOKENS = ("attention", "tokens", "layers")
OF_A_STATISTIC = ("layers", "depth", "flow")


def plot(
    values: Mapping[str, Any],
    kind: str | None = None,
    *,
    ax: Axes | None = None,
    statistic: str = "norm",
    tokens: Any = None,
    sample: int | None = None,
    most: int = 64,
    log: bool | None = None,
    title: str | None = None,
    note: str = "",
    base: float | None = None,
    label: str | None = None,
) -> Figure | Axes:
    """Draw values by site: a figure, or, where `ax` is given, into it. `Plottable.plot` says what the options mean.

    Args:
        note: What else is to be said below the title.
        base: For single numbers: what the number is if nothing is done, drawn for comparison.
        label: What single numbers are.
    """
    _refuse_other_axes(ax)
    refuse_numbers(1, most=most)
    many, left_out = _drawable(values)
    notes = " · ".join(filter(None, (note, left_out)))
    options = PlotOptions(statistic, tokens, sample or 0, most, log, title, notes, base, label)
    if kind is not None:
        _check(kind, many)
    kind = kind or _suited(many)
    first = next(iter(many.values()))
    if sample is not None and kind not in OF_A_SAMPLE:
        raise HooklineError(
            f"sample={sample} has no meaning for {kind!r}, which shows all samples; choose one with a subscript, as in "
            f"{f'{first.name}[{sample}]'!r} where samples come first"
        )
    _refuse_idle(kind, many, options)
    drawn: Figure | Axes = _painter(kind, many)(many if _is_of_many(kind, many) else first, ax, options)
    return drawn if ax is not None else cast("Figure", drawn.figure)  # That of a figure is itself.


def plot_curves(
    values: Mapping[str, Sequence[float]], along: str, numbers: Sequence[int], *, ax: Axes | None, log: bool | None,
    title: str | None,
) -> Figure | Axes:  # fmt: skip
    """Draw one number of each site over its calls, which have these numbers `along` something."""
    _refuse_other_axes(ax)
    _, _, lines = _painters()
    drawn: Axes = lines.curves(values, ax, along, numbers, PlotOptions(log=log, title=title))
    return drawn if ax is not None else cast("Figure", drawn.figure)


def _refuse_other_axes(ax: Any) -> None:
    """Raise for what is not a place to draw: a figure, or several axes."""
    if ax is not None and not hasattr(ax, "imshow"):
        raise HooklineError(f"ax= takes one of matplotlib's axes, as in figure.subplots(), not {type(ax).__name__}")


def _refuse_idle(kind: str, many: Mapping[str, NamedTensor], options: PlotOptions) -> None:
    """Raise for an option that the picture has no use for."""
    idle = {
        "tokens=": (options.tokens is not None and not _shows_tokens(kind, many), OF_TOKENS),
        "statistic=": (options.statistic != "norm" and kind not in OF_A_STATISTIC, OF_A_STATISTIC),
    }
    for option, (is_idle, kinds) in idle.items():
        if is_idle:
            raise HooklineError(f"{option} has no meaning for {kind!r}; it is for {', '.join(kinds)}")
    if options.log and (kind == "dead" or (kind == "histogram" and len(many) > 1)):
        several = " of several" if kind == "histogram" else ""
        raise HooklineError(f"log=True has no meaning for {kind!r}{several}")


def _shows_tokens(kind: str, many: Mapping[str, NamedTensor]) -> bool:
    is_sheet = kind == "attention" and len(many) > 1
    return (kind in OF_TOKENS and not is_sheet) or is_grid(many)


def _drawable(values: Mapping[str, Any]) -> tuple[dict[str, NamedTensor], str]:
    """Return the tensors to draw, and how many sites have none or none with elements, which are left out."""
    if not values:
        raise NotCaptured("there is nothing to draw: no site has a value")
    with_tensors = {name: value for name, value in values.items() if is_drawable(value)} or values
    found = {name: tensor_to_draw(name, value) for name, value in with_tensors.items()}
    many = {name: one for name, one in found.items() if one.tensor.numel()}
    if not many:
        name, one = next(iter(found.items()))
        raise HooklineError(f"{name!r} is {describe(one.tensor)}: it has no elements to draw")
    left_out = {"a tensor": len(values) - len(found), "elements": len(found) - len(many)}
    return many, " · ".join(f"{count(n, 'site')} without {what} left out" for what, n in left_out.items() if n)


def _suited(many: Mapping[str, NamedTensor]) -> str:
    """Return the kind of picture that suits values, by how many there are and by their shapes."""
    kinds = {kind_of(one.tensor) for one in many.values()}
    if len(many) == 1:
        (kind,) = kinds
        pooled = kind == "maps" and next(iter(many.values())).tensor.shape[-2:].numel() == 1
        return kind if kind in KINDS and not pooled else "units"
    if any(map(is_gradient, many)):
        return "flow"
    suited = "attention" if kinds == {"attention"} else "layers"
    are_alike = kinds in ({"attention"}, {"tokens"}) and len(families(many)) == 1
    return suited if are_alike and not _why_not(suited, many) else "depth"


def _check(kind: str, many: Mapping[str, NamedTensor]) -> None:
    """Raise if values have no picture of a kind, and say which ones they have."""
    if kind not in KINDS:
        raise HooklineError(
            f"{kind!r} is not a kind of picture{did_you_mean(kind, KINDS)}; there are {', '.join(KINDS)}"
        )
    why_not = _why_not(kind, many)
    if why_not:
        kinds = {kind_of(one.tensor) for one in many.values()}
        others = (one for one in KINDS if one != "attention" or kinds == {"attention"})  # Any matrix can be drawn so.
        fitting = [one for one in others if not _why_not(one, many)]
        raise HooklineError(f"{kind!r} does not fit: {why_not}; what fits is {', '.join(fitting)}")


def _why_not(kind: str, many: Mapping[str, NamedTensor]) -> str:
    """Say why a kind of picture can't be drawn of values, or nothing."""
    needed = KINDS[kind]
    first, *_ = many
    if len(many) > 1 and not needed.many:
        return f"it shows one value, and there are {len(many)}; choose one, as in {first!r}"
    if kind == "flow" and not any(map(is_gradient, many)):
        return f"there are no gradients; capture them too, as in {first + ':grad_output'!r}"
    if kind in ("depth", "layers") and is_grid(many):
        return ""
    for name, one in many.items():
        if one.tensor.dim() < needed.dimensions or (kind == "layers" and one.tensor.dim() > 3):
            return f"{name!r} is {describe(one.tensor)}, and it needs {needed.named}"
    if len(many) > 1 and kind in ("attention", "layers"):
        return _why_not_together(kind, many)
    return ""


def _why_not_together(kind: str, many: Mapping[str, NamedTensor]) -> str:
    shapes = {
        name: full_shape(one.tensor.shape, "attention" if kind == "attention" else "tokens")
        for name, one in many.items()
    }
    sizes = {name: shape[1:] if kind == "attention" else shape[1] for name, shape in shapes.items()}
    first, *others = sizes
    other = next((name for name in others if sizes[name] != sizes[first]), None)
    if other is None:
        return ""
    what = "heads, queries and keys" if kind == "attention" else "tokens"
    return f"{first!r} has {sizes[first]} {what} and {other!r} has {sizes[other]}"


def is_grid(many: Mapping[str, NamedTensor]) -> bool:
    """Whether values are single numbers whose names differ in two numbers, as in `h.*[:, *]`."""
    if len(many) < 2 or any(one.tensor.dim() for one in many.values()):
        return False
    found = families(many)
    return len(found) == 1 and all(len(parts) == 2 for parts in found[0].members.values())


def _is_of_many(kind: str, many: Mapping[str, NamedTensor]) -> bool:
    return len(many) > 1 or not KINDS[kind].one


def _painter(kind: str, many: Mapping[str, NamedTensor]) -> Callable[..., Any]:
    """Return the function that draws a kind of picture."""
    heatmaps, histograms, lines = _painters()
    many_of: dict[str, Callable[..., Any]] = {
        "attention": heatmaps.heads, "histogram": histograms.ridges, "layers": heatmaps.layers,
        "depth": lines.depth, "flow": lines.flow, "dead": lines.dead,
    }  # fmt: skip
    one_of: dict[str, Callable[..., Any]] = {
        "maps": heatmaps.maps, "attention": heatmaps.attention, "tokens": heatmaps.tokens, "units": heatmaps.units,
        "histogram": histograms.histogram,
    }  # fmt: skip
    if kind in ("depth", "layers") and is_grid(many):
        many_of[kind] = heatmaps.grid
    return many_of[kind] if _is_of_many(kind, many) else one_of[kind]


def _painters() -> tuple[Any, Any, Any]:
    """Return the modules that draw, which need matplotlib."""
    try:
        from hookline._plot import heatmaps, histograms, lines
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("matplotlib", "numpy"):
            raise
        raise HooklineError("plots need matplotlib: pip install 'hookline[plot]'") from None
    return heatmaps, histograms, lines
