"""Find the places in a model that a pattern, a type, a module or a predicate means.

`find_places` turns the user's `where` into `Found`s: a site, its module, and whether it was named exactly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Union

import torch
from torch import nn

from hookline._sites import members
from hookline._sites.language import PARAM_ALONE, PORTS, Pattern, Site, is_pattern, parse, parse_subscripts
from hookline._sites.members import Holders, ParameterPlace
from hookline._sites.suggest import EVERY_NAME, in_list, near
from hookline._sites.tree import (
    Children,
    Named,
    Names,
    Survey,
    children_of,
    is_container,
    is_scripted,
    locate_plain,
    may_be_blind,
    refuse_data_parallel,
    refuse_other_model,
    unwrap,
    wrapping,
)
from hookline._torch import may_be_a_stage
from hookline.errors import SiteError, did_you_mean, warn

Predicate = Callable[[str, nn.Module], bool]
Where = Union[str, Site, nn.Module, type, "re.Pattern[str]", Predicate, Iterable[Any]]

MARKS = (":", "[", "#", "/", ".")  # The second part of a pair begins with one of these.
_PLAIN = Pattern("", "", ())
_GRADIENT = ":grad_output"
_make = tuple.__new__  # Makes a named tuple twice as fast as a call of its class.


class Found(NamedTuple):
    """One place that a `where` means in one model."""

    site: Site
    module: nn.Module
    exact: bool = False  # Whether it was named, not matched by a pattern.
    siblings: Children | None = None  # The children of its parent, to notice a replaced module.
    holders: Holders = ()  # For a parameter: all modules that hold it.


def find_places(model: nn.Module, where: Iterable[Where]) -> list[Found]:
    """Return the places that `where` means in `model`, each once, in the order given."""
    refuse_other_model(model)
    _refuse_replicas(model)
    where = list(where)
    return _find_one(model, Survey(model), where[0] if len(where) == 1 else where)


def _refuse_replicas(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        refuse_data_parallel()


def _find_one(model: nn.Module, names: Names, where: Any) -> list[Found]:
    if isinstance(where, Site):
        return _exact(model, names, where)
    if isinstance(where, str):
        return _find_text(model, names, where)
    if isinstance(where, nn.Module):
        module = unwrap(where)
        path = names.of(module)[0]
        _refuse_blind(path, module)
        place = names.locate(path)
        return [Found(Site(path), module, True, place[2] if place is not None else None)]
    if isinstance(where, (type, re.Pattern)):
        return _find_all(model, names, where)
    if isinstance(where, tuple) and len(where) == 2 and isinstance(where[1], str) and where[1][:1] in MARKS:
        if where[1][0] == "[" and "@" in where[1]:
            return _with_tokens(_find_one(model, names, where[0]), parse(where[1]).index)
        return _find_pair(model, names, *where)
    if callable(where):
        _refuse_predicate(where)
        return _find_all(model, names, where)
    if isinstance(where, dict):
        raise SiteError(
            "a dict names no places, and its values would be ignored; to keep a function of a value write "
            "capture(site, transform=function), and to name its keys list(...)"
        )
    if isinstance(where, Iterable) and not isinstance(where, torch.Tensor):
        found = _each_once(place for one in where for place in _find_one(model, names, one))
        if not found:
            raise SiteError("an empty list matches nothing; hl.sites(model) lists every name")
        return found
    raise SiteError(
        f"{type(where).__name__} names no place; text, a module, a module type, a regular expression, "
        "a predicate (name, module) -> bool, a Site, and lists of these do"
    )


def _refuse_predicate(function: Callable[..., Any]) -> None:
    """Raise for a function that can't be called with a name and a module."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # A builtin may have no signature.
        return
    try:
        signature.bind("", None)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise SiteError(
            f"{name}{signature} names no place: a predicate is called with (name, module) and returns True for a "
            "place; a method of a module is written as text, as in 'h.0.split_heads()'"
        ) from None


def _each_once(places: Iterable[Found]) -> list[Found]:
    found: dict[tuple[Any, ...], Found] = {}
    for place in places:
        name = place.holders[0][1] if place.holders else ""
        key = (id(place.module), name, *place.site[1:])
        if key not in found or (place.exact and not found[key].exact):
            found[key] = place  # An exact name stays exact if a pattern matches it too.
    return list(found.values())


def _find_text(model: nn.Module, names: Names, text: str) -> list[Found]:
    place = names.locate(text)
    if place is not None:  # Text that equals a module's name is that module, even with marks in it.
        path, module, siblings = place
        _refuse_blind(path, module)
        return [Found(Site(path), module, True, siblings)]
    pattern = _parse(names, text)
    if pattern.path is not None:
        return _exact(model, names, pattern.at(pattern.path))
    if pattern.port == "param":
        return _find_parameters(model, names, pattern)
    return _find_all(model, names, pattern, pattern)


def _parse(names: Names, text: str) -> Pattern:
    """Parse a text. If it has the name of a parameter after the ':', where a port belongs, the error says so."""
    try:
        return parse(text)
    except SiteError:
        path, _, port = text.partition(":")
        module = names.find(path) if port.isidentifier() else None
        if module is not None and (port in module._parameters or port in module._buffers):
            held = f"{path}.{port}".lstrip(".")
            raise SiteError(f"{text!r}: {port!r} is a parameter or buffer; did you mean '{held}:param'?") from None
        raise


def _find_pair(model: nn.Module, names: Names, where: Any, rest: str) -> list[Found]:
    """Return the places of a pair such as `(nn.LayerNorm, ":input[0]")`: a `where` and a member, port or subscripts."""
    pattern = parse(rest)
    if pattern.path != "":
        raise SiteError(f"({where!r}, {rest!r}): the second part is a port and subscripts, as in ':input[0]'")
    plain = _find_one(model, names, where)
    for place in plain:
        site = place.site
        if site[1:4] != _PLAIN.at("")[1:4] or (site.member and pattern.member):
            raise SiteError(f"({where!r}, {rest!r}): the first part has a port or subscripts already")
        if pattern.port == "param":
            raise SiteError(f"({where!r}, {rest!r}): ':param' is of a parameter, by its name or a pattern of names")
    sites = [pattern.at(place.site.path) for place in plain]
    if not pattern.member:
        pairs = zip(sites, plain, strict=True)
        sites = [site._replace(member=place.site.member, within=place.site.within) for site, place in pairs]
    found = [place._replace(site=site) for place, site in zip(plain, sites, strict=True)]
    if not pattern.member.endswith("()"):
        return found
    name = pattern.member[:-2]
    able = [place for place in found if place.exact or members.has_method(place.module, name) or is_pattern(name)]
    chosen = [one for place in able for one in _with_methods(place)]
    if not chosen:
        raise SiteError(f"({where!r}, {rest!r}): none of these modules has such a method")
    return chosen


def _with_tokens(places: list[Found], index: str) -> list[Found]:
    """Return places with the tokens of a pair such as `("h.5:input[0]", hl.tokens(positions))`."""
    found = [place._replace(site=place.site._replace(index=place.site.index + index)) for place in places]
    for place in found:
        parse(f":{place.site.port}{place.site.index}")  # Raises where tokens can't be named.
    return found


def _exact(model: nn.Module, names: Names, site: Site) -> list[Found]:
    """Return the places that a site means: one, or the methods of one module that a pattern of names matches."""
    if site.port not in PORTS:
        raise SiteError(f"{site!r} has no port {site.port!r}{did_you_mean(site.port, PORTS)}")
    if site.member and parse(site.member).member != site.member:
        raise SiteError(f"{site!r} has no member {site.member!r}: '/softmax' is a function, 'split_heads()' a method")
    if site.port == "param" and (site.member or site.call is not None):
        raise SiteError(f"{site!r}: {PARAM_ALONE}")
    parse_subscripts(site.index)
    place = names.locate(site.path)
    if site.port == "param" or (site.function and place is None):
        held = members.locate(names, site.path)
        if held is not None:
            return [_parameter(site, held, exact=not is_pattern(site.function))]
    if place is None or site.port == "param":
        raise SiteError(f"{site.path!r} {_why_not_there(model, names, site, place)}")
    path, module, siblings = place
    if not site.method or is_scripted(module):
        _refuse_blind(path, module, site)
    return _with_methods(Found(site._replace(path=path), module, not is_pattern(site.function), siblings))


def _why_not_there(model: nn.Module, names: Names, site: Site, place: Any) -> str:
    if place is not None:
        return f"is a module, no parameter; did you mean {f'{site.path}.*:param'.lstrip('.')!r}?"
    above, _, name = site.path.rpartition(".")
    parent = names.find(above)
    if parent is not None and (name in parent._parameters or name in parent._buffers):
        return f"is a parameter; did you mean '{site.path}:param', its value, or '{site.path}/*', operations on it?"
    if parent is not None and not site.member and members.has_method(parent, name):
        return f"is a method; did you mean '{site.path}()'?"
    if parent is not None and name in parent._modules:
        return "is None in this model: it was left out, or is on another stage of the pipeline"
    of_parameters = [held.path for held in members.parameters(names)] if site.member or site.port == "param" else []
    if parent is None and name in PORTS and members.locate(names, above) is not None:
        return f"is written with ':'; did you mean '{above}:param'?"
    found = near(site.path, names.walk(), of_parameters)
    if found == EVERY_NAME and not site.member:
        of_parameters = [held.path for held in members.parameters(names)]
        found = near(site.path, [], of_parameters).replace("'?", ":param'?")
    return f"matches nothing in {type(unwrap(model)).__name__}{_or_elsewhere(found)}"


def _or_elsewhere(near: str) -> str:
    """Return the hint. In a process that may hold one stage of a pipeline, add that the name may be on another."""
    if not may_be_a_stage():
        return near
    return f"{near}{'' if near.endswith('?') else '.'} Or it is on another stage of the pipeline: hook it there"


def _parameter(site: Site, held: ParameterPlace, exact: bool) -> Found:
    if site.within is not None:
        raise SiteError(
            f"'{site}': a parameter is not called; '#n' goes behind the function, as in '{held.path}/add#1'"
        )
    return Found(site._replace(path=held.path), held.holders[0][0], exact, held.siblings, held.holders)


def _find_parameters(model: nn.Module, names: Names, pattern: Pattern) -> list[Found]:
    """Return all parameters that a pattern matches; a tied one is returned once, under the name that matches."""
    chosen = list(members.parameters(names, pattern.matches))
    chosen = chosen or list(members.parameters(names, pattern.matches, buffers=True))
    if "{" in pattern.text and chosen:
        _warn_of_absent(pattern, (held.path for held in chosen))
    found = [_parameter(pattern.at(held.path), held, exact=False) for held in chosen]
    if not found:
        every = [held.path for held in members.parameters(names)]
        near = did_you_mean(pattern.text.partition(":")[0].partition("/")[0], every)
        raise SiteError(f"{pattern.text!r} matches no parameter of {type(unwrap(model)).__name__}{near}")
    return found


def _with_methods(place: Found) -> list[Found]:
    """Return the place, or if its method is a pattern of names, one place for each method that matches."""
    site = place.site
    if not site.method:
        return [place]
    if site.within is not None:
        raise SiteError(f"'{site}': calls of a method are counted behind it, as in '{site.path}.{site.member}#0'")
    chosen = members.methods(site.path, place.module, site.method)
    if not chosen and place.exact:
        raise SiteError(f"'{site}' matches no method of {type(place.module).__name__}")
    exact = place.exact and not is_pattern(site.method)
    return [place._replace(site=site._replace(member=f"{name}()"), exact=exact) for name in chosen]


def _refuse_blind(path: str, module: nn.Module, site: Site | None = None) -> None:
    if is_scripted(module):
        raise SiteError(
            f"{path!r} is compiled by torch.jit, and nothing inside its graph can be seen; "
            "hook the module that calls it, or the model before it is compiled"
        )
    if is_container(module):
        if type(module).__call__ is not nn.Module.__call__:
            kind = type(module).__name__
            raise SiteError(
                f"{path!r} is a {kind}, whose own __call__ can't be seen: it has no forward; hook what it calls"
            )
        index, subscripts = (site.index, site.subscripts) if site is not None else ("", ())
        below = f"; did you mean {in_list(path, module, index, subscripts)!r}?" if children_of(module) else ""
        raise SiteError(f"{path!r} is a {type(module).__name__}, which is never called{below}")


class Modules(NamedTuple):
    """Modules that one `where` means, and which value of each: its output or the gradient of that."""

    places: list[Named]
    exact: bool
    port: str


def find_modules(model: nn.Module, where: Sequence[Any]) -> list[Modules] | None:
    """Return the modules that names, patterns, types and regular expressions mean, with or without ":grad_output".

    It is a fast `find_places` for whole outputs and their gradients. It returns None if `find_places` has to be used.
    """
    if isinstance(model, nn.DataParallel):
        _refuse_replicas(model)
    one = where[0] if len(where) == 1 else None
    if type(one) is str:
        place = locate_plain(model, one)
        if place is not None:
            return None if may_be_blind(type(place[1])) else [_make(Modules, ([place], True, "output"))]
    names = Names(model)
    if one is not None and type(one) is not list:
        modules = _modules(names, one)
        return None if modules is None else [modules]
    if list in map(type, where):
        where = [item for one in where for item in (one if type(one) is list and one else (one,))]
    if len(where) > 1 and set(map(type, where)) == {str}:
        every = _by_names(names, where)
        if every is not None:
            return every
    found: list[Modules] = []
    for one in where:
        modules = _modules(names, one)
        if modules is None:
            return None
        if found and found[-1][1:] == modules[1:]:
            found[-1].places.extend(modules.places)
        else:
            found.append(modules)
    return _if_different(found)


def _by_names(names: Names, texts: Sequence[str]) -> list[Modules] | None:
    """Return the modules of many exact names, with or without ":grad_output"; None if a text is anything else."""
    found: list[Modules] = []
    for is_gradient, group in groupby(texts, lambda text: text.endswith(_GRADIENT)):
        same = list(group)
        places = names.locate_each([text.removesuffix(_GRADIENT) for text in same] if is_gradient else same)
        if places is None or any(map(may_be_blind, {type(module) for _, module, _ in places})):
            return None
        if is_gradient and any(
            [text.rpartition(".")[2] in (place[2] or ()) for text, place in zip(same, places, strict=True)]
        ):
            return None  # Part of the name of a module.
        found.append(Modules(places, True, "grad_output" if is_gradient else "output"))
    return found if len(found) == 1 else _if_different(found)


def _if_different(found: list[Modules]) -> list[Modules] | None:
    """Return the modules, or None if two of the same port are one."""
    each = [(id(place[1]), modules.port) for modules in found for place in modules.places]
    return found if len(set(each)) == len(each) else None


def _modules(names: Names, where: Any) -> Modules | None:
    """Return the modules that one `where` means; None if `find_places` has to be used."""
    port = "output"
    if type(where) is tuple and len(where) == 2 and where[1] == _GRADIENT:
        where, port = where[0], "grad_output"
        if isinstance(where, str):
            where += _GRADIENT
    if isinstance(where, str):
        place = names.locate_plain(where)
        if place is not None:
            return None if may_be_blind(type(place[1])) else Modules([place], True, port)
        try:
            pattern = parse(where)
        except SiteError:
            return None  # It may be the name of a module below a wrapper, even with marks in it.
        if pattern[4:] != _PLAIN[4:] or pattern.port not in ("output", "grad_output"):
            return None
        if pattern.path is not None:
            place = names.locate_plain(pattern.path)
            usable = place is not None and not may_be_blind(type(place[1])) and names.locate(where) is None
            return Modules([place], True, pattern.port) if place is not None and usable else None
        if names.locate(where) is not None:
            return None
        where, port = pattern, pattern.port
    elif not isinstance(where, (type, re.Pattern)):
        return None
    places = _seen(names.walk(where) if isinstance(where, type) else _choose(names.walk(), where))
    return Modules(places, False, port) if places else None


def _seen(chosen: list[Named]) -> list[Named]:
    """Leave out modules that are never called or can't be seen, and all but the first name of a tied module."""
    modules = [module for _, module, _ in chosen]
    if len(set(map(id, modules))) < len(chosen):
        chosen = _once(chosen)
    if any(map(may_be_blind, set(map(type, modules)))):
        return [place for place in chosen if not (is_scripted(place[1]) or is_container(place[1]))]
    return chosen


def _once(chosen: list[Named]) -> list[Named]:
    first = {id(place[1]): place for place in reversed(chosen)}
    return [place for place in chosen if first[id(place[1])] is place]


def _find_all(model: nn.Module, names: Names, where: Any, pattern: Pattern = _PLAIN) -> list[Found]:
    """Return all places that a type, a regular expression, a predicate or a pattern means; a tied module once."""
    everything = names.walk()
    chosen = _choose(everything, where)
    if pattern.member.endswith("()"):
        return _find_methods(model, _once(chosen), pattern)
    seen = _seen(chosen)
    if not seen and pattern.member and not chosen:
        return _find_parameters(model, names, pattern)
    around = wrapping(model) if not seen and pattern is where else ""
    if around and pattern.text.startswith(around):  # A name as in the wrapper's named_modules().
        return _find_text(model, names, pattern.text.removeprefix(around))
    if not seen:
        why = _or_elsewhere(_why(where, model, chosen, everything))
        raise SiteError(f"{_label(where)} matches nothing in {type(unwrap(model)).__name__}{why}")
    _, port, index, call, member, within = pattern.at("")
    return [
        _make(Found, (_make(Site, (name, port, index, call, member, within)), module, False, siblings, ()))
        for name, module, siblings in seen
    ]


def _find_methods(model: nn.Module, chosen: list[Named], pattern: Pattern) -> list[Found]:
    """Return the methods that a pattern matches, in the modules that have them."""
    name = pattern.member[:-2]
    holders = [place for place in chosen if is_pattern(name) or members.has_method(place[1], name)]
    places = [Found(pattern.at(path), module, False, siblings) for path, module, siblings in holders]
    found = [one for place in places for one in _with_methods(place)]
    if not found:
        near = did_you_mean(name, {one for _, module, _ in chosen for one in members.method_names(module)})
        raise SiteError(f"{pattern.text!r} matches no method in {type(unwrap(model)).__name__}{near}")
    return found


def _choose(everything: list[Named], where: Any) -> list[Named]:
    if isinstance(where, type):
        return [place for place in everything if isinstance(place[1], where)]
    if isinstance(where, Pattern):
        chosen = where.choose(everything)
        if "{" in where.text and chosen:
            _warn_of_absent(where, (path for path, _, _ in chosen))
        return chosen
    if isinstance(where, re.Pattern):
        return [place for place in everything if where.fullmatch(place[0])]
    return [place for place in everything if where(place[0], place[1])]


def _warn_of_absent(pattern: Pattern, paths: Iterable[str]) -> None:
    """Warn about a number in braces that matches nothing, as in `h.{0,9}`.

    Choices that differ in more than their numbers don't warn: some may be meant for other models.
    """
    names = {name for path in paths for name in path.split(".")}
    for choices in pattern.segments:
        plain = [pieces[0] for pieces in choices or () if len(pieces) == 1]
        absent = [name for name in plain if name not in names]
        if absent and len(plain) > 1 and len({re.sub(r"\d+", "", name) for name in plain}) == 1:
            warn(f"{pattern.text!r}: nothing there is named {' or '.join(map(repr, absent))}; only the others are used")


def _why(where: Any, model: nn.Module, chosen: list[Named], everything: list[Named]) -> str:
    """Say why nothing that can be hooked was found."""
    if is_scripted(unwrap(model)):
        return ", a torch.jit graph, in which nothing can be seen"
    for name, module, _ in chosen:
        blind = (
            "runs in a torch.jit graph, in which nothing can be seen"
            if is_scripted(module)
            else "is never called itself"
        )
        return f"; {name!r} is a {type(module).__name__} and {blind}"
    if isinstance(where, (Pattern, re.Pattern)):
        text = _label(where).strip("'\"")
        if isinstance(where, Pattern):
            return near(text, everything)
        part = next((name for name, _, _ in everything if where.search(name)), None)
        if part is not None:
            return f": it has to match the whole name, and matches a part of {part!r}; write '.*' for the rest of it"
        return did_you_mean(text, (name for name, _, _ in everything)) or EVERY_NAME
    types = sorted({type(module).__name__ for _, module, _ in everything})
    return did_you_mean(_label(where), types) or f"; it has {', '.join(types[:12])}"


def _label(where: Any) -> str:
    if isinstance(where, (Pattern, re.Pattern)):
        return repr(where.text if isinstance(where, Pattern) else where.pattern)
    return getattr(where, "__name__", None) or repr(where)
