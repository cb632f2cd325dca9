"""`.plot()`: choose the kind of picture that suits the values, or check the kind asked for, and draw it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from torch import Tensor, nn

from hookline._option_checks import refuse_flags_or_none, refuse_numbers, refuse_texts, short_text
from hookline._plot.plot_data import (
    POSITIONS,
    NamedTensor,
    PlotOptions,
    dense,
    families,
    full_shape,
    grid_labels,
    is_drawable,
    is_gradient,
    kind_of,
    measure,
    refuse_statistic,
    site_of,
    statistic_name,
    tensor_to_draw,
)
from hookline._sites.language import Site
from hookline._tables import count
from hookline._values.nested import describe
from hookline.errors import HooklineError, NotCaptured, SiteError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Where = str | Site | nn.Module | Sequence[str | Site | nn.Module] | None


class Kind(NamedTuple):
    """A kind of picture: whether it shows one value, many or both, and the dimensions that a value needs."""

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
    "calls": Kind(True, True),
}

OF_A_SAMPLE = ("maps", "attention", "tokens", "layers")
OF_TOKENS = ("attention", "tokens", "layers")
OF_A_STATISTIC = ("layers", "depth", "flow", "calls")


class PlotValues(NamedTuple):
    """Values to draw, by site; the sample that is still to be chosen; and a note."""

    values: dict[str, Any]
    sample: int | None
    note: str


class Curves(NamedTuple):
    """Numbers to draw over calls, by site; the name of a call, such as "step"; and the number of each call."""

    values: dict[str, list[float]]
    along: str
    numbers: Sequence[int]


class Plottable:
    """Gives `plot` to a class that holds values by site and implements `_to_draw`."""

    def _to_draw(self, where: Sequence[str | Site], call: int | None, sample: int | None) -> PlotValues:
        """Return the values at some places; at all of them if `where` is empty."""
        raise NotImplementedError

    def _over_calls(self, where: Sequence[str | Site], statistic: str | None) -> Curves | None:
        """Return a statistic of several calls as curves; without a statistic, the values if they are single numbers."""
        return None

    @overload
    def plot(
        self, where: Where = None, kind: str | None = None, *, ax: None = None, statistic: str = "norm",
        tokens: Any = None, sample: int | None = None, call: int | None = None, most: int = 64,
        log: bool | None = None, title: str | None = None,
    ) -> Figure: ...  # fmt: skip

    @overload
    def plot(
        self, where: Where = None, kind: str | None = None, *, ax: Axes, statistic: str = "norm",
        tokens: Any = None, sample: int | None = None, call: int | None = None, most: int = 64,
        log: bool | None = None, title: str | None = None,
    ) -> Axes: ...  # fmt: skip

    def plot(
        self,
        where: Where = None,
        kind: str | None = None,
        *,
        ax: Axes | None = None,
        statistic: str = "norm",
        tokens: Any = None,
        sample: int | None = None,
        call: int | None = None,
        most: int = 64,
        log: bool | None = None,
        title: str | None = None,
    ) -> Figure | Axes:
        """Draw the values at some places, or all, as the picture that suits them or as `kind`.

        `acts.plot("h.*", tokens=words)` is a heat map of tokens and layers, `acts.plot("h.*", "flow")` gradient flow.
        Single numbers of several calls, such as `watch.log` has, are drawn as curves; with a kind or `call=`, those of
        one call are drawn. `acts.plot("h.*", "calls")` draws a statistic of each site over its calls, such as the steps
        of a generation.

        Args:
            where: A site or a pattern, which may have subscripts (`"h.0.attn[1]"`, `"conv[:, 8:16]"`), or a list.
            kind: For one value "maps", "attention", "tokens", "units" or "histogram"; for several "layers" (token ×
                layer), "depth", "flow" (activations and gradients), "dead", "histogram" or "attention"; for one or
                several "calls".
            ax: The axes to draw into; by default, those of a new figure, which shows itself in a notebook.
            statistic: What "layers", "depth", "flow" and "calls" show: "norm", "rms", "mean", "std", "min", "max",
                "abs", "zeros", "nan" or "inf".
            tokens: The labels of tokens: those of the sample, or a list for each sample.
            sample: Which sample "maps", "attention", "tokens" and "layers" show, instead of the first. With a store,
                every kind draws only the rows of this sample.
            call: Which call of a module that ran several times, as an index of `calls()`; by default the latest.
            most: The most channels or heads to draw.
            log: Whether the scale is logarithmic; by default, that depends on the values.
            title: A title instead of the default, which describes the values.
        """

        if kind is None and isinstance(where, str) and where in KINDS and where not in cast("Container[str]", self):
            raise NotCaptured(f"{where!r} is a kind of picture, not a site here; write plot(kind={where!r})")
        _refuse_options(statistic, sample, call, log, title)
        places = _places_in(where)
        curves = self._over_calls(places, None) if kind in (None, "calls") and call is None and sample is None else None
        label = None
        if kind == "calls" and curves is None:
            _refuse_for_calls(call=call, sample=sample, tokens=tokens)
            curves, label = self._over_calls(places, statistic), statistic_name(statistic)
        if curves is not None:
            return plot_curves(curves.values, curves.along, curves.numbers, ax=ax, log=log, title=title, label=label)
        drawn = self._to_draw(places, call, sample)
        values = {**drawn.values, **self._gradients_of(drawn.values, call, sample)} if kind == "flow" else drawn.values
        return plot(
            values, kind, ax=ax, statistic=statistic, tokens=tokens, sample=drawn.sample, most=most, log=log,
            title=title, note=drawn.note,
        )  # fmt: skip

    def _gradients_of(self, values: dict[str, Any], call: int | None, sample: int | None) -> dict[str, Any]:
        """Return the gradients of the values that are drawn, if there are any."""
        found: dict[str, Any] = {}
        for site in map(Site.parse, values):
            if not site.is_gradient:
                with contextlib.suppress(NotCaptured, SiteError):
                    found |= self._to_draw([site._replace(port=f"grad_{site.port}")], call, sample).values
        return found


def _places_in(where: Any) -> list[Any]:
    """Return the places in `where` as a list; an empty list means all places."""
    if where is None or isinstance(where, (str, Site, nn.Module, type)):
        return [] if where is None else [where]
    listed = list(where) if isinstance(where, Iterable) and not isinstance(where, (Mapping, Tensor)) else []
    if not listed:
        raise SiteError(
            f"where={short_text(where)} names no site; give a site, a pattern or a list of them, or leave it out"
        )
    return listed


def _refuse_options(statistic: Any, sample: Any, call: Any, log: Any, title: Any) -> None:
    refuse_statistic(statistic)
    refuse_numbers(**{name: given for name, given in (("sample", sample), ("call", call)) if given is not None})
    refuse_flags_or_none(log=log)
    if title is not None:
        refuse_texts(title=title)


def _refuse_for_calls(**given: Any) -> None:
    for name, one in given.items():
        if one is not None:
            raise HooklineError(f"{name}= has no meaning for 'calls', which draws a statistic of every call")


def statistic_of(site: str, value: Any, statistic: str | None) -> float:
    """Return a statistic of a value; without one, the number that the value is."""
    if statistic is None:
        return float(value)
    return measure(dense(tensor_to_draw(site, value).tensor), statistic)


def one_call(site: str, calls: Sequence[Any], call: int) -> Any:
    """Return the value of one of the calls that were kept."""
    refuse_numbers(call=call)
    if not -len(calls) <= call < len(calls):
        raise NotCaptured(f"{site!r} has {count(len(calls), 'call')} kept, and call={call} is not among them")
    return calls[call]


def note_of(call: int | None, calls: int) -> str:
    """Return a note that says which of several calls is drawn."""
    if call is not None:
        return f"call {call} of those kept"
    return f"the latest of {calls} calls" if calls > 1 else ""


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
    """Draw values by site into `ax`, or into a new figure. `Plottable.plot` explains the options.

    Args:
        note: Text below the title.
        base: For single numbers, the number that was measured without any change to the model, drawn for comparison.
        label: For single numbers, the label of their axis.
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
    return drawn if ax is not None else cast("Figure", drawn.figure)  # The `figure` of a figure is the figure itself.


def plot_curves(
    values: Mapping[str, Sequence[float]], along: str, numbers: Sequence[int], *, ax: Axes | None, log: bool | None,
    title: str | None, label: str | None = None,
) -> Figure | Axes:  # fmt: skip
    """Draw one number of each site over its calls; `numbers` are the positions of calls along the axis `along`.

    Without `label`, the name of the quantity is the subscript of a site, such as `["rms"]`.
    """
    _refuse_other_axes(ax)
    charts, _ = _painters()
    drawn: Axes = charts.curves(values, ax, along, numbers, PlotOptions(log=log, title=title, label=label))
    return drawn if ax is not None else cast("Figure", drawn.figure)


def plot_grid(
    values: Tensor, axes: Mapping[str, Sequence[int | str]], *, base: float, pattern: str = "", ax: Axes | None = None,
    tokens: Any = None, title: str | None = None,
) -> Figure | Axes:  # fmt: skip
    """Draw numbers along named axes: one axis as a curve, two as a map of changes, more as a map for each layer.

    Args:
        base: The number that was measured without any change to the model.
        pattern: The sites of the numbers.
        tokens: Labels of the positions.
    """
    _refuse_other_axes(ax)
    if tokens is not None and not any(name in POSITIONS for name in axes):
        raise HooklineError(f"tokens= are labels of positions, and what varies here is {' and '.join(axes)}")
    labelled = {name: grid_labels(name, labels, tokens) for name, labels in axes.items()}
    charts, heatmaps = _painters()
    options = PlotOptions(title=title, base=base, label="measured", note=pattern)
    draw = charts.along if len(axes) == 1 else heatmaps.grid_map if len(axes) == 2 else heatmaps.grid_maps
    drawn: Figure | Axes = draw(values, labelled, ax, options)
    return drawn if ax is not None else cast("Figure", drawn.figure)


def _refuse_other_axes(ax: Any) -> None:
    """Raise if `ax` is a figure, several axes, or anything else but one axes."""
    if ax is not None and not hasattr(ax, "imshow"):
        raise HooklineError(f"ax= takes one of matplotlib's axes, as in figure.subplots(), not {type(ax).__name__}")


def _refuse_idle(kind: str, many: Mapping[str, NamedTensor], options: PlotOptions) -> None:
    """Raise for an option that this kind of picture does not use."""
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
    """Return the tensors to draw, and a note about sites that are left out for lack of a tensor or of elements."""
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
    """Return the kind of picture that suits the values, from their number and shapes."""
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
    """Raise if the values can't be drawn as this kind, and say which kinds fit."""
    if kind not in KINDS:
        raise HooklineError(
            f"{kind!r} is not a kind of picture{did_you_mean(kind, KINDS)}; there are {', '.join(KINDS)}"
        )
    why_not = _why_not(kind, many)
    if why_not:
        kinds = {kind_of(one.tensor) for one in many.values()}
        # Any matrix could be drawn as attention, so this kind is suggested only if the values are attention.
        others = (one for one in KINDS if one != "attention" or kinds == {"attention"})
        fitting = [one for one in others if not _why_not(one, many)]
        raise HooklineError(f"{kind!r} does not fit: {why_not}; what fits is {', '.join(fitting)}")


def _why_not(kind: str, many: Mapping[str, NamedTensor]) -> str:
    """Return why the values can't be drawn as this kind; an empty text if they can."""
    needed = KINDS[kind]
    first, *_ = many
    if len(many) > 1 and not needed.many:
        return f"it shows one value, and there are {len(many)}; choose one, as in {first!r}"
    if kind == "calls":
        site = site_of(first)
        whole = first if site is None else str(site._replace(call=None))
        return f"{first!r} has one call here; capture {'it' if whole == first else repr(whole)} with keep='all'"
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
    """Return True if values are single numbers whose names differ in two numbers, as in `h.*[:, *]`."""
    if len(many) < 2 or any(one.tensor.dim() for one in many.values()):
        return False
    found = families(many)
    return len(found) == 1 and all(len(parts) == 2 for parts in found[0].members.values())


def _is_of_many(kind: str, many: Mapping[str, NamedTensor]) -> bool:
    return len(many) > 1 or not KINDS[kind].one


def _painter(kind: str, many: Mapping[str, NamedTensor]) -> Callable[..., Any]:
    """Return the function that draws a kind of picture."""
    charts, heatmaps = _painters()
    many_of: dict[str, Callable[..., Any]] = {
        "attention": heatmaps.heads, "histogram": charts.ridges, "layers": heatmaps.layers,
        "depth": charts.depth, "flow": charts.flow, "dead": charts.dead,
    }  # fmt: skip
    one_of: dict[str, Callable[..., Any]] = {
        "maps": heatmaps.maps, "attention": heatmaps.attention, "tokens": heatmaps.tokens, "units": heatmaps.units,
        "histogram": charts.histogram,
    }  # fmt: skip
    if kind in ("depth", "layers") and is_grid(many):
        many_of[kind] = heatmaps.grid
    return many_of[kind] if _is_of_many(kind, many) else one_of[kind]


def _painters() -> tuple[Any, Any]:
    """Return the modules that draw, which need matplotlib."""
    try:
        from hookline._plot import charts, heatmaps
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("matplotlib", "numpy"):
            raise
        raise HooklineError("plots need matplotlib: pip install 'hookline[plot]'") from None
    return charts, heatmaps
