"""`hl.sweep`: measure a model with one place at a time changed, to see which places matter."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookline import Cache, Hooks, Site, capture
from hookline._kernel import (
    NOTHING,
    Where,
    describe,
    raise_if_all_miss,
    refuse_flags_or_none,
    refuse_several_calls,
    refuse_texts,
    short_form,
)
from hookline._progress import Bar
from hookline._tables import Table, Tabular, count
from hookline._tables.terminal import bar
from hookline._torch import AnyDropout
from hookline.errors import EditError, HooklineError, NotCaptured, did_you_mean, warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 20


class Sweep(Tabular, Mapping[str, Any]):
    """The measurement with each place changed, in the order in which places fire; prints as a table with bars.

    `base` is the one without a change. Single numbers are floats; a tensor with several elements stays a tensor.
    """

    def __init__(self, base: Any, measured: Mapping[str, Any], change: str = "changed") -> None:
        self.base = base
        self._measured = dict(measured)
        self._change = change

    def __getitem__(self, site: str | Site) -> Any:
        if not isinstance(site, (str, Site)):
            raise NotCaptured(f"a sweep is read by site, not by {type(site).__name__}")
        name = str(Site.parse(site) if isinstance(site, str) else site)
        if name not in self._measured:
            raise NotCaptured(f"'{name}' was not measured in this sweep{did_you_mean(name, self._measured)}")
        return self._measured[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._measured)

    def __len__(self) -> int:
        return len(self._measured)

    def plot(
        self, kind: str | None = None, *, ax: Axes | None = None, tokens: Any = None, title: str | None = None
    ) -> Figure | Axes:
        """Plot the measurements over the places. If the sites differ in two numbers, plot a map over both."""
        from hookline._plot.plot import plot

        if title is not None:
            refuse_texts(title=title)
        numbers = {site: _number(value) for site, value in self.items()}
        base = _number(self.base)
        return plot(numbers, kind, ax=ax, tokens=tokens, title=title, base=base, label="measured")

    def _table(self) -> Table:
        base = _number(self.base)
        changes = {site: _number(value) - base for site, value in self._measured.items()}
        weights = [abs(change) if math.isfinite(change) else math.inf for change in changes.values()]
        most = max((weight for weight in weights if weight < math.inf), default=0.0) or 1.0
        rows = [
            (site or '""', f"{_number(self._measured[site]):.4g}", f"{change:+.4g}", bar(weight / most, _BAR))
            for (site, change), weight in zip(changes.items(), weights, strict=True)
        ]
        what = "mean of what was measured" if isinstance(self.base, Tensor) else "measured"
        title = f"{count(len(rows), 'place')}, one at a time {self._change}; {what} without: {base:.4g}"
        return Table(("site", "measured", "change", ""), rows, title, weights=weights)


def sweep(
    model: nn.Module,
    where: Where | Mapping[Any, Any],
    measure: Callable[[], Any],
    *,
    patch: Any = NOTHING,
    edit: Callable[[Any], Any] | None = None,
    skip: bool = False,
    progress: bool | None = None,
) -> Sweep:
    """Measure a model with one place at a time changed: set to zero by default.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    >>> found = sweep(model, "*", lambda: model(Tensor(1, 4).fill_(1.0)).norm())
    >>> list(found), found["2"]
    (['0', '1', '2'], 0.0)

    Args:
        where: The places; `[*]` and `/*` stand for all places that a first run finds. Or a Cache or mapping from site
            to value, for example from another run: its values are put in one at a time.
        measure: Runs the model, and returns a number or a tensor.
        patch: The value to put in instead of zero.
        edit: A function whose result replaces the value that passes.
        skip: Skip each module: it returns its input.
        progress: Whether to show a progress bar; None shows it in a terminal.
    """
    refuse_flags_or_none(progress=progress)
    change = _Change(where, patch, edit, skip)
    _refuse_measure(measure)
    _warn_of_dropout(model)
    base, sites = _first_run(model, change, measure)
    measured: dict[str, Any] = {}
    with Bar("sweep", total=len(sites), progress=progress) as shown:
        for site, key in sites.items():
            shown.advance(0, str(site))
            hooks = short_form(model)
            change.add(hooks, site, key)
            with hooks:
                measured[str(site)] = _checked(measure())
            shown.advance(1, str(site))
    if edit is not None and not change.does_edit:
        raise EditError(
            f"{change.name} returned None at every place, which leaves the value as it is; return the new one"
        )
    return Sweep(base, measured, str(change))


class _Change:
    """The change to make at each place, and the requested places."""

    def __init__(self, where: Any, patch: Any, edit: Callable[[Any], Any] | None, skip: bool) -> None:
        if not isinstance(skip, bool):
            raise EditError(f"skip= of a sweep is True or False, not {describe(skip)}; patch= puts a value in")
        if edit is not None and not callable(edit):
            raise EditError(f"edit= takes a function of the value, not {describe(edit)}; patch= puts a value in")
        given = {"patch": patch is not NOTHING, "edit": edit is not None, "skip": skip}
        several = [name for name, is_given in given.items() if is_given]
        if isinstance(where, Mapping) and several:
            raise EditError(f"where= has the values to put in; with {several[0]}=, give its sites alone: list(where)")
        if len(several) > 1:
            raise EditError(f"a sweep makes one change: {' or '.join(f'{name}=' for name in several)}")
        if isinstance(where, Mapping) and not where:
            raise EditError(f"sweep what? This {type(where).__name__} is empty; give {{site: value}}, or sites")
        if isinstance(where, Cache):
            refuse_several_calls(where)
        self.values = where if isinstance(where, Mapping) else None
        self.asked = list(where) if isinstance(where, Mapping) else [where]
        self.patch = 0.0 if patch is NOTHING else patch
        self.edit = edit
        self.skip = skip
        self.does_edit = False  # Whether the edit function has returned anything but None.

    @property
    def name(self) -> str:
        """The name of the edit function."""
        return getattr(self.edit, "__name__", None) or type(self.edit).__name__

    def add(self, hooks: Hooks, site: Site, key: Any) -> None:
        """Add the hook that makes the change at one place, which matches `key`."""
        if self.edit is not None:
            hooks.edit(site, self._noted(self.edit))
        elif self.skip:
            hooks.skip(site)
        else:
            hooks.patch({site: self.patch if self.values is None else self.values[key]})

    def _noted(self, edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(edit, updated=())
        def noted(*args: Any) -> Any:
            result = edit(*args)
            self.does_edit = self.does_edit or result is not None
            return result

        return noted

    def __str__(self) -> str:
        if self.edit is not None:
            return f"edited by {self.name}"
        if self.skip:
            return "skipped"
        if self.values is not None:
            return "set to what another run had" if isinstance(self.values, Cache) else "set to a value of its own"
        return f"set to {describe(self.patch)}"


def _refuse_measure(measure: Any) -> None:
    """Raise if `measure` can't be called without arguments, before the model runs."""
    if not callable(measure):
        what = "measure is a function that runs the model and returns a number, as in `lambda: loss(model(x))`"
        raise HooklineError(f"{what}, not {describe(measure)}")
    try:
        signature = inspect.signature(measure)
    except (TypeError, ValueError):  # A builtin may have no signature.
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(measure, "__name__", type(measure).__name__)
        what = "measure is called without arguments, as in `lambda: loss(model(x))`"
        raise HooklineError(f"{what}; {name}{signature} can't be: {error}") from None


def _warn_of_dropout(model: Any) -> None:
    """Warn if dropout is on, since measurements then vary by chance."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, AnyDropout) and module.training and module.p > 0:
            warn(
                f"'{Site(name)}' is in train mode, and drops different elements in each run of the sweep, so "
                "measurements vary by chance too; call model.eval() first"
            )
            return


def _first_run(model: nn.Module, change: _Change, measure: Callable[[], Any]) -> tuple[Any, dict[Site, Any]]:
    """Measure without a change; return the result, and each place that fires with the key that matches it."""
    with ExitStack() as blocks:
        seen = [(key, blocks.enter_context(_looking(model, key))) for key in change.asked]
        base = _checked(measure())
    sites: dict[Site, Any] = {}
    for key, cache in seen:
        for site in map(Site.parse, cache):
            if site in sites:
                raise EditError(f"'{site}' is asked for twice, by {sites[site]!r} and {key!r}")
            sites[site] = key
    if not sites:
        raise HooklineError(
            "nothing passed at these places while measure ran: does it run this model, and for gradients backward()?"
        )
    return base, sites


def _looking(model: nn.Module, where: Where) -> Hooks:
    """Return hooks that note where values pass. If none does, the end of their block raises and says why."""
    # What a transform makes of tokens is kept for each call, as several calls may carry them.
    hooks = capture(model, where, transform=_nothing, keep="all" if "@" in str(where) else "last")
    raise_if_all_miss(hooks)
    return hooks


def _nothing(_value: Any) -> int:
    """Return a placeholder: it only matters that a value passed."""
    return 0


def _checked(value: Any) -> Any:
    """Return a measurement as a float, or as a detached tensor of several elements."""
    if isinstance(value, Tensor) and not value.is_complex() and value.numel():
        return value.detach().clone() if value.numel() > 1 else float(value.detach())
    is_array = getattr(value, "size", 1) != 1
    if isinstance(value, (Tensor, complex, str)) or not hasattr(value, "__float__") or is_array:
        raise HooklineError(f"measure returns a number or a tensor, not {describe(value)}")
    return float(value)


def _number(value: Any) -> float:
    return value.double().mean().item() if isinstance(value, Tensor) else float(value)
