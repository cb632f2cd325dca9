"""`hl.sites`: the places that a pattern matches in a model, before it runs or in one trial run."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

from torch import Tensor, nn

from hookline import Site
from hookline._kernel import (
    Call,
    Found,
    Names,
    Observer,
    Where,
    describe,
    find_places,
    is_wanted,
    leaves,
    matches_name,
    parameter_count,
    shape_of,
    unwrap,
)
from hookline._scan import fake_run
from hookline._scan.fake_run import Places, call_arguments_of, refuse_lazy, try_out
from hookline._tables import Table, Tabular
from hookline._torch import CALLING_FILES, frame_at, frames
from hookline.errors import SiteError

# Frames in these files are skipped when looking for the user's line.
_SKIPPED = (os.path.dirname(os.path.dirname(__file__)), *CALLING_FILES)
_LONGEST_LINE = 72


class Sites(Tabular, Sequence[Site]):
    """The sites that a pattern matches in a model: a sequence that prints as a table."""

    def __init__(self, sites: list[Site], header: tuple[str, ...], rows: Sequence[Any], note: str = "") -> None:
        self._sites = sites
        self._shown = Table(header, rows, note)

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> list[Site]: ...
    def __getitem__(self, index: int | slice) -> Site | list[Site]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, site: object) -> bool:
        return (Site.parse(site) if isinstance(site, str) else site) in self._sites

    def _table(self) -> Table:
        return self._shown


def sites(model: nn.Module, *where: Where, run: Any = None) -> Sites:
    """List the sites that `where` matches in `model`, without running it. Without `where`, list every module.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> sites(model, nn.Linear, "1:input")
    site     module  parameters  also named
    ───────  ──────  ──────────  ──────────
    0        Linear          40
    2        Linear          18
    1:input  ReLU             0

    Args:
        run: The model's arguments as a tuple, or its keywords as a mapping. The model runs with them once, on fake
            tensors if possible. Sites are listed in the order in which values pass, with the name of each function:
            `sites(model, "0/*", run=(x,))`.
    """
    found = find_places(model, where or (every_module,))
    return _sites_by_name(model, found) if run is None else _sites_in_a_run(model, found, run)


def every_module(_name: str, _module: nn.Module) -> bool:
    """Match every module; pass this function as a place to mean the output of each."""
    return True


def _sites_by_name(model: nn.Module, found: list[Found]) -> Sites:
    aliases: dict[int, list[str]] = {}
    for name, module, _ in Names(model).walk():
        aliases.setdefault(id(module), []).append(name)
    rows = [
        (
            str(place.site) or '""',
            type(place.module).__name__,
            f"{_parameter_count(place):,}",
            ", ".join(name for name in aliases.get(id(place.module), []) if name != place.site.path)
            if not place.holders
            else "",
        )
        for place in found
    ]
    return Sites([place.site for place in found], ("site", "module", "parameters", "also named"), rows)


def _parameter_count(place: Found) -> int:
    if not place.holders:
        return parameter_count(place.module)
    module, name = place.holders[0]
    tensor = module._parameters.get(name)
    return 0 if tensor is None else tensor.numel()


class FirstCall(NamedTuple):
    """The value at a site in its first call, as text, and the user's line that made the call."""

    value: str
    line: str


class SitesObserver(Observer):
    """Notes the first value at each site, and the user's line that made the call."""

    kind = "list"

    def __init__(self) -> None:
        self.seen: dict[Site, FirstCall] = {}
        self.calls: dict[Site, int] = {}

    def __call__(self, value: Any, call: Call, _is_whole: bool, /) -> Any:
        """Note a value."""
        self.calls[call.site] = self.calls.get(call.site, 0) + 1
        if call.site not in self.seen:
            tensors = leaves(value)
            self.seen[call.site] = FirstCall(
                dtypes_and_shapes(tensors) if tensors else describe(value), user_line_text()
            )
        return value


def _sites_in_a_run(model: nn.Module, found: list[Found], run: Any) -> Sites:
    """List sites in the order in which a run reaches them. Exactly named sites that it does not reach come last."""
    for place in found:
        if place.site.is_gradient:
            raise SiteError(f"'{place.site}': a forward shows no gradient; leave run= out")
    refuse_lazy(model, "list")
    args, kwargs = call_arguments_of(run)

    def make_observers() -> tuple[Places, Callable[[], SitesObserver]]:
        observer = SitesObserver()
        return [(place, observer) for place in found], lambda: observer

    observer, note = try_out(unwrap(model), args, kwargs, make_observers)
    asked = {place.site for place in found}
    names = {site: site if site in asked else _shortest(site, observer) for site in observer.seen}
    rows = [(str(names[site]) or '""', str(observer.calls[site]), *call) for site, call in observer.seen.items()]
    exact = [place for place in found if place.exact]
    silent = [place.site for place in exact if not any(_is_at(site, place.site) for site in observer.seen)]
    rows += [(str(site) or '""', "0", "", "") for site in silent]
    note += "; none of these ran" if not observer.seen else ""
    return Sites([*names.values(), *silent], ("site", "calls", "what passes", "line"), rows, note)


def _shortest(site: Site, observer: SitesObserver) -> Site:
    """Leave out the number of a function's call if it is called only once."""
    second = site._replace(call=1)
    return site._replace(call=None) if site.function and site.call == 0 and second not in observer.seen else site


def _is_at(site: Site, asked: Site) -> bool:
    same = site._replace(member="", call=None) == asked._replace(member="", call=None)
    is_call = site.call == asked.call or (isinstance(site.call, int) and is_wanted(asked.call, site.call))
    return same and is_call and matches_name(site.member, asked.member)


def dtypes_and_shapes(tensors: Sequence[Tensor]) -> str:
    """Return the dtypes and the first shapes of some tensors in one line."""
    kinds = ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
    return f"{kinds} {', '.join(map(shape_of, tensors[:4]))}{', …' if len(tensors) > 4 else ''}"


def user_line_text() -> str:
    """Return the current line of the user's code as text: the innermost frame outside of hookline and torch's calls."""
    for one in frames(frame_at(1)):
        file, number = one.f_code.co_filename, one.f_lineno
        if file == fake_run.__file__:  # The model was called from there.
            return ""
        if not file.startswith(_SKIPPED):
            break
    else:
        return ""
    text = " ".join(linecache.getline(file, number, one.f_globals).split())
    text = text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"
    return f"{os.path.basename(file)}:{number}" + (f"  {text}" if text else "")
