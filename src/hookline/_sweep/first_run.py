"""The first run of a sweep: nothing is changed, and it shows which places there are, and what passes at them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import Hooks, Site, capture
from hookline._kernel import (
    Call,
    Found,
    Names,
    Observer,
    Where,
    add_observers,
    arguments_by_name,
    choose,
    describe,
    find_places,
    is_container,
    map_tensors,
    raise_if_all_miss,
    share,
    short_form,
    split,
    tokens_in,
)
from hookline._sweep.axes import dimension_names
from hookline._sweep.changes import Change, whole_site
from hookline.errors import EditError, HooklineError, SiteError


@dataclass(frozen=True, eq=False)
class Cell:
    """One place of a sweep, and the requested place that it belongs to."""

    site: Site
    key: Any


class Spot(NamedTuple):
    """Where the place of a cell is in one run of the model."""

    holder: Site  # The site of the tensor that the cell changes, or a part of it.
    rest: tuple[Any, ...]  # The subscripts of that part.
    value: Tensor  # The tensor, in the first run.
    given: Any  # The first argument of the call, for a skip.
    start: int  # When it passed: see `RunLog`.


class Passed(NamedTuple):
    """A value that passed in the first run."""

    start: int
    value: Any
    call: Call | None


class RunLog:
    """What passed in a run, in order: at the places of a sweep, and out of the modules that may be left out later.

    Where values are not kept, tensors of the same shape without elements stand for them.
    """

    def __init__(self, keeps_places: bool = True, keeps_modules: bool = True) -> None:
        self.keeps_places = keeps_places
        self.keeps_modules = keeps_modules
        self._times: list[float] = []  # When each value passed.
        self.places: dict[Site, list[Passed]] = {}
        self.modules: dict[str, list[Passed]] = {}  # By path.

    def hook(self, model: nn.Module, sites: Iterable[Found], modules: Iterable[Found]) -> Hooks:
        """Return hooks that fill this log."""
        hooks = short_form(model)
        places: list[tuple[Found, Observer]] = [(place, _AtPlace(self)) for place in sites]
        places += [(place, _AtModule(self, place.site.path)) for place in modules]
        add_observers(hooks, [(place._replace(exact=False), observer) for place, observer in places])
        return hooks

    def note(self, into: list[Passed], value: Any, call: Call | None, keeps: bool) -> None:
        """Add a value to a list of this log."""
        into.append(Passed(len(self._times), share(value) if keeps else map_tensors(_shape_alone, value), call))
        self._times.append(time.perf_counter())

    def share_before(self, start: int) -> float:
        """Return the share of the run that was over when a value passed."""
        first, last = self._times[0], self._times[-1]
        return min(0.9, (self._times[start] - first) / max(last - first, 1e-9))


class _AtPlace(Observer):
    with_call = True

    def __init__(self, log: RunLog) -> None:
        self.log = log

    def __call__(self, value: Any, call: Call, _is_whole: bool, /) -> Any:
        """Note a value that passes at a place of the sweep."""
        self.log.note(self.log.places.setdefault(call.site, []), value, call, self.log.keeps_places)
        return value


class _AtModule(Observer):
    def __init__(self, log: RunLog, path: str) -> None:
        self.log = log
        self.path = path

    def __call__(self, value: Any, _call: Any, _is_whole: bool, /) -> Any:
        """Note the output of a module that may be left out later."""
        self.log.note(self.log.modules.setdefault(self.path, []), value, None, self.log.keeps_modules)
        return value


def _shape_alone(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def run_first(model: nn.Module, change: Change, measure: Callable[[], Any]) -> tuple[Any, list[Cell]]:
    """Measure without a change; return the result, and a cell for each place that fires, in this order."""
    with ExitStack() as blocks:
        seen = [(key, blocks.enter_context(_looking(model, key))) for key in change.asked]
        base = measure()
    cells: dict[Site, Any] = {}
    for key, cache in seen:
        for site in map(Site.parse, cache):
            if site in cells:
                raise EditError(f"'{site}' is asked for twice, by {cells[site]!r} and {key!r}")
            cells[site] = key
    if not cells:
        raise HooklineError(
            "nothing passed at these places while metric ran: does it run this model, and for gradients backward()?"
        )
    return base, [Cell(site, key) for site, key in cells.items()]


def _looking(model: nn.Module, where: Where) -> Hooks:
    """Return hooks that note where values pass. If none does, the end of their block raises and says why."""
    # What a transform makes of tokens is kept for each call, as several calls may carry them.
    hooks = capture(model, where, transform=_nothing, keep="all" if "@" in str(where) else "last")
    raise_if_all_miss(hooks)
    return hooks


def _nothing(_value: Any) -> int:
    """Return a placeholder: it only matters that a value passed."""
    return 0


def whole_places(model: nn.Module, asked: list[Where]) -> list[Found]:
    """Return the requested places without their subscripts, each once."""
    places = [place for key in asked for place in find_places(model, [key])]
    whole = {place.site._replace(index=""): place for place in places if place.site.port != "param"}
    return [place._replace(site=site) for site, place in whole.items()]


def modules_before(model: nn.Module, sites: Iterable[Site]) -> list[Found]:
    """Return the modules that may be over before a value passes at one of these sites.

    These are the children of the modules around each place. What runs inside them is over with them.
    """
    by_name = dict(Names(model).once())
    found: dict[str, None] = {}
    for path in _around(sites):
        module = by_name.get(path)
        for name, child in module.named_children() if module is not None else ():
            if not is_container(child):
                found[f"{path}.{name}" if path else name] = None
    return find_places(model, [Site(path) for path in found]) if found else []


def _around(sites: Iterable[Site]) -> Iterator[str]:
    """Yield the paths of the modules that run while a value passes at one of these sites, each once."""
    seen: set[str] = set()
    for site in sites:
        names = site.path.split(".") if site.path else []
        inner = bool(site.member) or site.port != "output"
        for length in range(len(names) + (1 if inner else 0)):
            path = ".".join(names[:length])
            if path not in seen:
                seen.add(path)
                yield path


def spot_of(cell: Cell, log: RunLog, model: nn.Module, is_forward: bool) -> Spot | str:
    """Return where the place of a cell is in the first run; or, as text, why it can't be said for all its calls.

    Args:
        is_forward: Whether a run is one forward of the model. A method such as `generate` may run it several times, and
            decide from all rows when to stop.
    """
    seen = log.places.get(cell.site._replace(index=""), [])
    if cell.site.port == "param":
        return "parameters"
    if not seen:
        return "places whose values are not seen as a whole"
    first, subscripts = seen[0], cell.site.subscripts
    call = first.call
    differ = tokens_in(subscripts) is not None or len({_shape(one.value) for one in seen}) > 1
    if len(seen) > 1 and (differ or not is_forward):
        return "places that are passed several times"
    if tokens_in(subscripts) is not None and call is not None:
        chosen = [*choose(first.value, subscripts, call.passing, call.module, model)]
        if len(chosen) != 1 or chosen[0][1].rows is not None:
            return "tokens that rows have in different columns"
        subscripts = chosen[0][0]
    held, rest = split(first.value, subscripts)
    if not isinstance(held, Tensor):
        return f"places where {describe(held)} passes"
    holder = whole_site(cell.site, subscripts[: len(subscripts) - len(rest)])
    given = next(iter(arguments_by_name(call).values()), None) if call is not None and not call.site.function else None
    return Spot(holder, rest, held, given, first.start)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value)


def dimensions_of(cells: list[Cell], log: RunLog) -> dict[str, tuple[str, ...]]:
    """Return for each site the names of the dimensions that its last subscript counts in."""
    found = {}
    for cell in cells:
        seen = log.places.get(cell.site._replace(index=""), [])
        if not seen or not cell.site.index:
            continue
        try:
            held, rest = split(seen[0].value, cell.site.subscripts)
        except SiteError:
            continue
        passing = seen[0].call.passing if seen[0].call is not None else None
        if isinstance(held, Tensor) and rest:
            width = None if passing is None else passing.width
            found[str(cell.site)] = dimension_names(cell.site, tuple(held.shape), width)
    return found
