"""WHERE, in a model: which modules a pattern, a type, a module or a predicate means.

`find` turns what a user wrote into `Found`s: a site, its module, and whether it was named exactly. `sites` shows them
before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Union, overload

import torch
from torch import nn

from hookline.errors import HooklineError, SiteError, did_you_mean
from hookline.sites import PORTS, Pattern, Site, parse, parse_subscripts
from hookline.tables import html_table, table
from hookline.tree import Children, Named, Names, children_of, is_container, is_scripted, parameter_count, unwrap

Predicate = Callable[[str, nn.Module], bool]
Where = Union[str, Site, nn.Module, type, "re.Pattern[str]", Predicate, Iterable[Any]]

_PLAIN = Pattern("", "", ())


class Found(NamedTuple):
    """One place that a `where` means in one model, and the children of its parent, among which its module was."""

    site: Site
    module: nn.Module
    exact: bool
    siblings: Children | None


def find(model: nn.Module, where: Iterable[Where]) -> list[Found]:
    """Return what `where` means in `model`, each place once, in the order asked for."""
    if not isinstance(model, nn.Module):
        raise SiteError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    _refuse_replicas(model)
    where = list(where)
    return _find_one(model, Names(model), where[0] if len(where) == 1 else where)


class Sites(Sequence[Site]):
    """What a pattern means in a model: a sequence of sites that prints as a table."""

    def __init__(self, found: list[Found], names: Names) -> None:
        self._found = found
        self._names = names

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> list[Site]: ...
    def __getitem__(self, index: int | slice) -> Site | list[Site]:
        return [place.site for place in self._found][index]

    def __len__(self) -> int:
        return len(self._found)

    def _rows(self) -> list[tuple[str, str, str, str]]:
        aliases: dict[int, list[str]] = {}
        for name, module, _ in self._names.walk():
            aliases.setdefault(id(module), []).append(name)
        return [
            (
                str(site) or '""',
                type(module).__name__,
                f"{parameter_count(module):,}",
                ", ".join(name for name in aliases.get(id(module), []) if name != site.path),
            )
            for site, module, _, _ in self._found
        ]

    def __repr__(self) -> str:
        return table(("site", "module", "parameters", "also named"), self._rows())

    def _repr_html_(self) -> str:
        return html_table(("site", "module", "parameters", "also named"), self._rows())


def sites(model: nn.Module, *where: Where) -> Sites:
    """Show what `where` means in `model`, before anything runs; without one, every module.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> sites(model, nn.Linear, "1:input")
    site     module  parameters  also named
    ───────  ──────  ──────────  ──────────
    0        Linear          40
    2        Linear          18
    1:input  ReLU             0
    """
    return Sites(find(model, where or (_everything,)), Names(model))


def _everything(_name: str, _module: nn.Module) -> bool:
    return True


def _refuse_replicas(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise HooklineError(
            "DataParallel runs copies of the model on other threads and devices; use DistributedDataParallel, or hook "
            "model.module on one device"
        )


def _find_one(model: nn.Module, names: Names, where: Any) -> list[Found]:
    if isinstance(where, Site):
        return [_exact(model, names, where)]
    if isinstance(where, str):
        return _find_text(model, names, where)
    if isinstance(where, nn.Module):
        return [_find_object(names, where)]
    if isinstance(where, (type, re.Pattern)):
        return _find_all(model, names, where)
    if isinstance(where, tuple) and len(where) == 2 and isinstance(where[1], str) and where[1][:1] in (":", "[", "#"):
        return _find_pair(model, names, *where)
    if callable(where):
        return _find_all(model, names, where)
    if isinstance(where, Iterable) and not isinstance(where, torch.Tensor):
        found = _each_once(place for one in where for place in _find_one(model, names, one))
        if not found:
            raise SiteError("an empty list matches nothing; hl.sites(model) lists every name")
        return found
    raise SiteError(
        f"{type(where).__name__} names no place; text, a module, a module type, a regular expression, "
        "a predicate (name, module) -> bool, a Site, and lists of these do"
    )


def _each_once(places: Iterable[Found]) -> list[Found]:
    found: dict[tuple[int, str, str, int | None], Found] = {}
    for place in places:
        site = place.site
        key = (id(place.module), site.port, site.index, site.call)
        if key not in found or (place.exact and not found[key].exact):
            found[key] = place  # What is named exactly counts so, also when a pattern matches it too.
    return list(found.values())


def _find_text(model: nn.Module, names: Names, text: str) -> list[Found]:
    place = names.locate(text)
    if place is not None:  # Text that equals a module's name is that module, whatever marks are in it.
        path, module, siblings = place
        _refuse_blind(path, module)
        return [Found(Site(path), module, True, siblings)]
    pattern = parse(text)
    if pattern.path is not None:
        return [_exact(model, names, pattern.at(pattern.path))]
    return _find_all(model, names, pattern, pattern)


def _find_pair(model: nn.Module, names: Names, where: Any, rest: str) -> list[Found]:
    """`(nn.LayerNorm, ":input[0]")`: any other `where`, with a port and subscripts."""
    pattern = parse(rest)
    if pattern.path != "":
        raise SiteError(f"({where!r}, {rest!r}): the second part is a port and subscripts, as in ':input[0]'")
    plain = _find_one(model, names, where)
    if any(place.site != Site(place.site.path) for place in plain):
        raise SiteError(f"({where!r}, {rest!r}): the first part has a port or subscripts already")
    return [place._replace(site=pattern.at(place.site.path)) for place in plain]


def _exact(model: nn.Module, names: Names, site: Site) -> Found:
    if site.port not in PORTS or site.member:
        raise SiteError(f"{site!r} has no port {site.port!r}{did_you_mean(site.port, PORTS)}")
    parse_subscripts(site.index)
    place = names.locate(site.path)
    if place is None:
        near = did_you_mean(site.path, (name for name, _, _ in names.walk())) or "; hl.sites(model) lists every name"
        raise SiteError(f"{site.path!r} matches nothing in {type(unwrap(model)).__name__}{near}")
    path, module, siblings = place
    _refuse_blind(path, module)
    return Found(site._replace(path=path), module, True, siblings)


def _refuse_blind(path: str, module: nn.Module) -> None:
    if is_scripted(module):
        raise SiteError(f"{path!r} is compiled by torch.jit, and nothing inside its graph can be seen; hook its parent")
    if is_container(module):
        below = f"; did you mean {(path + '.*').lstrip('.')!r}?" if children_of(module) else ""
        raise SiteError(f"{path!r} is a {type(module).__name__}, which is never called{below}")


def _find_object(names: Names, module: nn.Module) -> Found:
    """A module object, under its first name."""
    module = unwrap(module)
    path = names.of(module)[0]
    _refuse_blind(path, module)
    place = names.locate(path)
    return Found(Site(path), module, True, place[2] if place is not None else None)


def _find_all(model: nn.Module, names: Names, where: Any, pattern: Pattern = _PLAIN) -> list[Found]:
    """Return all that a type, a regular expression, a predicate or a pattern means, tied modules under one name."""
    everything = names.walk()
    chosen = _choose(everything, where)
    modules = [place[1] for place in chosen]
    if len(set(map(id, modules))) < len(chosen):
        first = {id(place[1]): place for place in reversed(chosen)}
        chosen = [place for place in chosen if first[id(place[1])] is place]
    if any(map(_may_be_blind, set(map(type, modules)))):
        seen = [place for place in chosen if not (is_scripted(place[1]) or is_container(place[1]))]
    else:
        seen = chosen
    if not seen:
        raise SiteError(
            f"{_label(where)} matches nothing in {type(unwrap(model)).__name__}{_why(where, model, chosen, everything)}"
        )
    _, port, index, call, member = pattern.at("")
    make = tuple.__new__  # Half the time of Site(...) and Found(...): one of each is made for every hooked module.
    return [
        make(Found, (make(Site, (name, port, index, call, member)), module, False, siblings))
        for name, module, siblings in seen
    ]


def _choose(everything: list[Named], where: Any) -> list[Named]:
    if isinstance(where, type):
        return [place for place in everything if isinstance(place[1], where)]
    if isinstance(where, Pattern):
        return [place for place in everything if where.matches(place[0])]
    if isinstance(where, re.Pattern):
        return [place for place in everything if where.fullmatch(place[0])]
    return [place for place in everything if where(place[0], place[1])]


def _why(where: Any, model: nn.Module, chosen: list[Named], everything: list[Named]) -> str:
    """Say why nothing that can be hooked was found."""
    if is_scripted(unwrap(model)):
        return ", a torch.jit graph, of which nothing can be seen"
    for name, module, _ in chosen:
        blind = (
            "runs in a torch.jit graph, of which nothing can be seen"
            if is_scripted(module)
            else "is never called itself"
        )
        return f"; {name!r} is a {type(module).__name__} and {blind}"
    if isinstance(where, (Pattern, re.Pattern)):
        text = _label(where).strip("'\"")
        return did_you_mean(text, (name for name, _, _ in everything)) or "; hl.sites(model) lists every name"
    types = sorted({type(module).__name__ for _, module, _ in everything})
    return did_you_mean(_label(where), types) or f"; it has {', '.join(types[:12])}"


def _may_be_blind(kind: type[nn.Module]) -> bool:
    return issubclass(kind, torch.jit.ScriptModule) or kind.forward is nn.Module.forward


def _label(where: Any) -> str:
    if isinstance(where, (Pattern, re.Pattern)):
        return repr(where.text if isinstance(where, Pattern) else where.pattern)
    return getattr(where, "__name__", None) or repr(where)
