"""Places that are not modules: methods, functions, parameters as read or used; and the sites that name them."""

from __future__ import annotations

import dataclasses
import fnmatch
import random
from typing import Any

from torch import Tensor, nn

from tests.properties.arguments import AS_WRITTEN, FUNCTIONS
from tests.properties.places import TYPES, Place, first_name, with_indices
from tests.properties.scripts import Script
from tests.properties.structures import paths
from tests.properties.survey import Survey
from tests.properties.watches import Spot

WRITERS = ("/add_", "/mul_", "/relu_", "/setitem")  # Drawn more often than other functions.
OWN = ("mixed", "countdown", "through_children", "offset", "fragile")
METHODS = (*OWN, "damped", "halves", "shifted", "scaled", "act", "squash")


def random_member(source: random.Random, survey: Survey, ports: tuple[str, ...], families: tuple[str, ...]) -> Place:
    """Draw a place of one of these families: "methods", "functions", "uses" of parameters, "parameters"."""
    families = tuple(one for one in families if spots_of(survey, one))
    if not families:
        return Place("text", "", ("",), source.choice(ports))
    family = source.choice(families)
    if family == "parameters":
        return _parameter(source, survey)
    spots = spots_of(survey, family)
    spot = source.choices(spots, [3 if spot.member in WRITERS else 1 for spot in spots])[0]
    name = source.choice([name for name, owner in survey.owners().items() if owner == spot.owner])
    place = Place("text", name, (name,), _port(source, spot, ports), member=spot.member)
    draw = source.random()
    if draw < 0.2:
        return _pattern_of_names(source, survey, place, spot)
    several = _pattern_of_modules(source, survey, place) if draw < 0.3 and family != "uses" else None
    return _in_some_form(source, survey, _part(source, survey, place, spot)) if several is None else several


def _in_some_form(source: random.Random, survey: Survey, place: Place) -> Place:
    """Perhaps turn a place into a `Site`, or into a module with the rest as text."""
    draw = source.random()
    if draw < 0.1:
        return dataclasses.replace(place, form="site")
    if draw < 0.2 and place.text in survey.names():
        return dataclasses.replace(place, form="module", names=(first_name(survey.names(), place.text),))
    return place


def spots_of(survey: Survey, family: str) -> list[Spot]:
    """Return the spots of a family that the survey knows completely."""
    return [spot for spot in survey.calls if _family(spot) == family and survey.knows(spot)]


def _family(spot: Spot) -> str:
    if not spot.member:
        return "modules"
    if spot.member == ":param":
        return "parameters"
    if spot.member.endswith("()"):
        return "methods"
    return "functions" if isinstance(spot.owner, nn.Module) else "uses"


def _port(source: random.Random, spot: Spot, ports: tuple[str, ...]) -> str:
    """Draw a port; "inputs" only if the names of the spot's arguments are known."""
    port = source.choice(ports)
    is_named = spot.member[1:] in FUNCTIONS if spot.member.startswith("/") else spot.member != "act()"
    return port if is_named else port.removesuffix("s")


def _part(source: random.Random, survey: Survey, place: Place, spot: Spot) -> Place:
    """Narrow a place to one call or to a part of its value."""
    calls = survey.calls[spot]
    index = source.randrange(len(calls))
    chosen = calls[index]
    if spot.member.startswith("/"):
        number = chosen.number if source.random() < 0.4 else None
        is_own = isinstance(spot.owner, nn.Module)
        within = chosen.within if is_own and source.random() < 0.15 else None
        place = dataclasses.replace(place, number=number, within=within)
    elif source.random() < 0.15:
        place = dataclasses.replace(place, number=index)
    value = place.seen(survey)[0].value(place.port)
    parts = [(keys, part) for keys, part in paths(value) if isinstance(part, Tensor)]
    must_name = place.port.endswith("inputs") and spot.member[1:] not in AS_WRITTEN and spot.member.startswith("/")
    if not parts or (not must_name and source.random() < 0.4):
        return place if not must_name else dataclasses.replace(place, port=place.port.removesuffix("s"))
    keys, part = source.choice(parts)
    return with_indices(source, dataclasses.replace(place, keys=keys), part)


def _pattern_of_names(source: random.Random, survey: Survey, place: Place, spot: Spot) -> Place:
    """Draw a wildcard in the name of a method or a function."""
    name = spot.member.strip("/()")
    wildcard = source.choice(("*", name[:1] + "*", "*" + name[-1:], "{" + name + ",other}"))
    if len(name) < 2:
        wildcard = "*"
    port = place.port.removesuffix("s")  # The argument names of all functions are not known.
    if spot.member.endswith("()"):
        found = [(place.text, f"{one}()", None) for one in _methods(survey, place.text) if matches(one, wildcard)]
        return dataclasses.replace(place, form="pattern", member=f"{wildcard}()", port=port, meant=tuple(found))
    meant = [
        (place.text, other.member, seen.number)
        for other, calls in survey.calls.items()
        if other.owner == spot.owner and other.member.startswith("/") and matches(other.member[1:], wildcard)
        for seen in calls
        if any(isinstance(part, Tensor) for _, part in paths(seen.output))
    ]
    return dataclasses.replace(
        place, form="pattern", member=f"/{wildcard}", port=port, meant=tuple(dict.fromkeys(meant))
    )


def matches(name: str, wildcard: str) -> bool:
    """Return True if a name matches a wildcard, in which `*` is never empty."""
    if wildcard.startswith("{"):
        return name in wildcard.strip("{}").split(",")
    return fnmatch.fnmatchcase(name, wildcard.replace("*", "?*"))


def _methods(survey: Survey, path: str) -> tuple[str, ...]:
    return METHODS if isinstance(survey.names()[path], Script) else ("encode", "arguments")


def _pattern_of_modules(source: random.Random, survey: Survey, place: Place) -> Place | None:
    """Draw a wildcard in the path, for the same member of several modules; None if some are not known completely."""
    names = survey.names()
    form, text, matched = _matched(source, names, place.text)
    if place.member.endswith("()"):
        matched = ["", *matched] if text == "**" else matched
        matched = [name for name in matched if hasattr(names[name], place.member[:-2])]
    firsts = {names[name]: name for name in reversed(matched)}
    ordered = [name for name in matched if firsts[names[name]] == name]
    if not all(survey.knows(Spot(names[name])) for name in ordered) or not ordered:
        return None
    port = place.port.removesuffix("s")
    return dataclasses.replace(place, form=form, text=text, names=tuple(ordered), port=port)


def _matched(source: random.Random, names: dict[str, nn.Module], name: str) -> tuple[str, str, list[str]]:
    """Draw a wildcard or a type that matches at least the module `name`; return all names that it matches."""
    parent, _, last = name.rpartition(".")
    prefix = parent + "." if parent else ""
    depth = prefix.count(".")
    below = [other for other in names if other]
    meant = {
        f"{prefix}*": [other for other in below if other.startswith(prefix) and other.count(".") == depth],
        "**": below,
        f"**.{last}": [other for other in below if other.rpartition(".")[2] == last],
    }
    kinds = [kind for kind, of in TYPES.items() if isinstance(names[name], of)]
    if kinds and source.random() < 0.25:
        kind = source.choice(kinds)
        return "type", kind, [other for other, module in names.items() if isinstance(module, TYPES[kind])]
    text = source.choice(list(meant)) if name else "**"
    return "pattern", text, meant[text]


def _parameter(source: random.Random, survey: Survey) -> Place:
    """Draw reads of one parameter, by one of its names, or of several by a pattern."""
    spot = source.choice(spots_of(survey, "parameters"))
    owners = survey.owners()
    name = source.choice([name for name, owner in owners.items() if owner == spot.owner])
    place = Place("text", name, (name,), "param")
    if source.random() < 0.2:
        return _pattern_of_parameters(source, survey, place)
    place = with_indices(source, place, survey.calls[spot][0].output)
    return dataclasses.replace(place, form="site") if source.random() < 0.1 else place


def _pattern_of_parameters(source: random.Random, survey: Survey, place: Place) -> Place:
    parent, _, last = place.text.rpartition(".")
    names = dict(survey.model.named_parameters(remove_duplicate=False))
    texts: dict[str, Any] = {
        f"{parent}.*".lstrip("."): lambda name: name.rpartition(".")[0] == parent,
        "**": lambda name: True,
        f"**.{last}": lambda name: name.rpartition(".")[2] == last,
    }
    text = source.choice(list(texts))
    firsts: dict[int, str] = {}
    for name, tensor in names.items():
        if texts[text](name):
            firsts.setdefault(id(tensor), name)
    owners = survey.owners()
    known = all(name in owners and survey.knows(Spot(owners[name])) for name in firsts.values())
    if not known or not firsts:
        return place
    return dataclasses.replace(place, form="pattern", text=text, names=tuple(firsts.values()))
