"""The method `plot` of a cache and of a store: its options, and which values it draws."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from torch import Tensor, nn

from hookline._option_checks import refuse_flags_or_none, refuse_numbers, refuse_texts, short_text
from hookline._plot.measures import refuse_statistic
from hookline._sites.language import Site
from hookline._tables import count
from hookline.errors import NotCaptured, SiteError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Where = str | Site | nn.Module | Sequence[str | Site | nn.Module] | None


class PlotValues(NamedTuple):
    """Values to draw: by site, which sample of them is still to be chosen, and what is to be said of them."""

    values: dict[str, Any]
    sample: int | None
    note: str


class Curves(NamedTuple):
    """Numbers to draw over calls: by site, what the calls are, and their numbers."""

    values: dict[str, list[float]]
    along: str
    numbers: Sequence[int]


class Plottable:
    """Gives `plot` to what holds values by site, and has to say only which ones a place means."""

    def _to_draw(self, where: Sequence[str | Site], call: int | None, sample: int | None) -> PlotValues:
        """Return the values at some places, or all."""
        raise NotImplementedError

    def _over_calls(self, where: Sequence[str | Site]) -> Curves | None:
        """Return the values as curves, if each place has one number for each of several calls."""
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
        """Draw the values at some places, or all: the picture that suits them, or the kind that is named.

        `acts.plot("h.*", tokens=words)` is a heat map of tokens and layers, `acts.plot("h.*", "flow")` gradient flow.
        Single numbers of several calls, as `watch.log` has, are curves; a kind or `call=` draws those of one call.

        Args:
            where: A site or a pattern, with subscripts if need be (`"h.0.attn[1]"`, `"conv[:, 8:16]"`), or a list.
            kind: Of one value "maps", "attention", "tokens", "units" or "histogram"; of several "layers" (token ×
                layer), "depth", "flow" (activations and gradients), "dead", "histogram" or "attention".
            ax: Where to draw; without it a new figure is made, which shows itself in a notebook.
            statistic: What "layers", "depth" and "flow" show: "norm", "rms", "mean", "std", "min", "max", "abs",
                "zeros", "nan" or "inf".
            tokens: The labels of tokens: those of the sample, or a list for each sample.
            sample: Which sample "maps", "attention", "tokens" and "layers" show, instead of the first. Of a store, any
                kind draws the rows of one sample.
            call: Which call of a module that ran several times, as an index of `calls()`; the latest.
            most: How many channels or heads to draw at most.
            log: Whether a scale is logarithmic; without it, that depends on the values.
            title: Instead of the one that says what is drawn.
        """
        from hookline._plot.choose_picture import KINDS, plot, plot_curves

        if kind is None and isinstance(where, str) and where in KINDS and where not in cast("Container[str]", self):
            raise NotCaptured(f"{where!r} is a kind of picture, and no site here; write plot(kind={where!r})")
        _refuse_options(statistic, sample, call, log, title)
        places = _listed(where)
        curves = self._over_calls(places) if kind is None and call is None and sample is None else None
        if curves is not None:
            return plot_curves(curves.values, curves.along, curves.numbers, ax=ax, log=log, title=title)
        drawn = self._to_draw(places, call, sample)
        values = {**drawn.values, **self._gradients_of(drawn.values, call, sample)} if kind == "flow" else drawn.values
        return plot(
            values, kind, ax=ax, statistic=statistic, tokens=tokens, sample=drawn.sample, most=most, log=log,
            title=title, note=drawn.note,
        )  # fmt: skip

    def _gradients_of(self, values: dict[str, Any], call: int | None, sample: int | None) -> dict[str, Any]:
        """Return the gradients that are here of values that are to be drawn with them."""
        found: dict[str, Any] = {}
        for site in map(Site.parse, values):
            if not site.is_gradient:
                with contextlib.suppress(NotCaptured, SiteError):
                    found |= self._to_draw([site._replace(port=f"grad_{site.port}")], call, sample).values
        return found


def _listed(where: Any) -> list[Any]:
    """Return the places that were given, none for all of them."""
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


def one_call(site: str, calls: Sequence[Any], call: int) -> Any:
    """Return the value of one call of those that were kept."""
    refuse_numbers(call=call)
    if not -len(calls) <= call < len(calls):
        raise NotCaptured(f"{site!r} has {count(len(calls), 'call')} kept, and call={call} is not among them")
    return calls[call]


def note_of(call: int | None, calls: int) -> str:
    """Say which call of several is drawn."""
    if call is not None:
        return f"call {call} of those kept"
    return f"the latest of {calls} calls" if calls > 1 else ""
