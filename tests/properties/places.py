"""Places in a random model: the sites that a program writes, and their meaning, computed without the library."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hookline as hl
from tests.properties import modules
from tests.properties.scripts import Script
from tests.properties.structures import each, paths
from tests.properties.survey import Seen, Survey
from tests.properties.watches import Spot

STAR = "*"
TYPES = {
    "Linear": nn.Linear,
    "ReLU": nn.ReLU,
    "Sequential": nn.Sequential,
    "Composite": modules.Composite,
    "Script": Script,
}


class Point(NamedTuple):
    """One site: a module or a parameter by its path, perhaps a member of it, perhaps one call, and a part."""

    name: str
    member: str
    number: int | None
    indices: tuple[Any, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Place:
    """The site that a program writes (`form`, `text`), and its meaning: module names, and a part of the value there.

    A `member` is a method, a function or a use of a parameter; `meant` lists the matches of a wildcard in its name.
    """

    form: str
    text: str
    names: tuple[str, ...]
    port: str = "output"
    keys: tuple[Any, ...] = ()
    indices: tuple[Any, ...] = ()
    number: int | None = None
    shape: tuple[int, ...] = ()
    member: str = ""
    within: int | None = None
    meant: tuple[tuple[str, str, int | None], ...] = ()

    @property
    def is_gradient(self) -> bool:
        return self.port.startswith("grad")

    @property
    def exact(self) -> bool:
        return self.form in ("text", "module", "site")

    @property
    def suffix(self) -> str:
        return self._suffix(self.text, self.member, self.number, self.indices)

    def where(self, model: nn.Module) -> Any:
        """Return the argument for hookline."""
        bare: Any = self.text
        if self.form == "site":
            return hl.Site.parse(self.text + self.suffix)
        if self.form in ("text", "pattern"):
            return self.text + self.suffix
        if self.form == "module":
            bare = model.get_submodule(self.text)
        elif self.form == "type":
            bare = TYPES[self.text]
        elif self.form == "regex":
            bare = re.compile(self.text)
        elif self.form == "predicate":
            bare = lambda name, _: name in self.names  # noqa: E731
        suffix = self._suffix("a name", self.member, self.number, self.indices)
        return (bare, suffix) if suffix else bare

    def expanded(self) -> list[tuple[Any, ...]]:
        """Return the rows of subscripts that `[*]` stands for."""
        if not self.indices or STAR not in _items(self.indices[0]):
            return [self.indices]
        items = _items(self.indices[0])
        dimension = items.index(STAR)
        rows = [tuple(index if item == STAR else item for item in items) for index in range(self.shape[dimension])]
        return [(row if isinstance(self.indices[0], tuple) else row[0], *self.indices[1:]) for row in rows]

    def points(self) -> list[Point]:
        """Return the sites of this place."""
        meant = self.meant or [(name, self.member, self.number) for name in self.names]
        return [
            Point(name, member, number, indices, name + self._suffix(name, member, number, indices))
            for name, member, number in meant
            for indices in self.expanded()
        ]

    def short_names(self) -> dict[str, list[str]]:
        """Map each site without a call number to the sites it stands for, if a wildcard matches functions."""
        found: dict[str, list[str]] = {}
        for one in self.points() if self.member.startswith("/") and self.meant and not self.is_gradient else ():
            found.setdefault(one.name + self._suffix(one.name, one.member, None, one.indices), []).append(one.text)
        return found

    def _suffix(self, name: str, member: str, number: int | None, indices: tuple[Any, ...]) -> str:
        """Return the text of a site after the path."""
        within = "" if self.within is None else f"#{self.within}"
        dot = "." if name and member.endswith(")") else ""
        call = "" if number is None else f"#{number}"
        marked = "" if self.port == "output" else f":{self.port}"
        inside = "".join(f'["{key}"]' if isinstance(key, str) else f"[{key}]" for key in self.keys)
        part = "".join(f"[{', '.join(map(_item, _items(index)))}]" for index in indices)
        return within + dot + member + call + marked + inside + part

    def spots(self, survey: Survey) -> list[Spot]:
        """Return the spots of this place in a model, each once."""
        owners = survey.owners()
        member = ":param" if self.port == "param" else None
        return list(dict.fromkeys(Spot(owners[one.name], member or one.member) for one in self.points()))

    def seen(self, survey: Survey) -> list[Seen]:
        """Return the calls that a survey recorded at this place."""
        owners = survey.owners()
        member = ":param" if self.port == "param" else None
        meant = dict.fromkeys((one.name, member or one.member, one.number) for one in self.points())
        calls = [survey.calls_at(Spot(owners[name], what), number, self.within) for name, what, number in meant]
        return [seen for some in calls for seen in some]


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _item(item: Any) -> str:
    if isinstance(item, slice):
        bounds = ["" if bound is None else str(bound) for bound in (item.start, item.stop)]
        return ":".join(bounds) + (f":{item.step}" if item.step is not None else "")
    return "..." if item is Ellipsis else str(item)


def random_place(
    source: random.Random, survey: Survey, ports: tuple[str, ...], several: bool = True, among: tuple[str, ...] = ()
) -> Place:
    """Draw a place in the model, mostly at a module that is called; if `among` names some, at one of those."""
    names = survey.names()
    called = [name for name, module in names.items() if Spot(module) in survey.calls]
    if source.random() < 0.02 and len(called) < len(names):
        dead = source.choice([name for name in names if name not in called])
        return Place("text", dead, (dead,), source.choice(ports))
    name = source.choice(among or called)
    form, text, matched = ("text", name, (name,))
    if several and source.random() < 0.3:
        form, text, matched = _random_pattern(source, survey, name)
    elif source.random() < 0.3:
        form = source.choice(("module", "site"))
        matched = (first_name(names, name),) if form == "module" else matched
    port = source.choice(ports)
    if form in ("pattern", "type", "regex", "predicate"):
        return Place(form, text, matched, port)
    return _random_part(source, survey, Place(form, text, matched, port))


def first_name(names: dict[str, nn.Module], name: str) -> str:
    """Return the first of the names that a tied module has."""
    return next(other for other, module in names.items() if module is names[name])


def _random_pattern(source: random.Random, survey: Survey, name: str) -> tuple[str, str, tuple[str, ...]]:
    """Draw a pattern that matches at least `name`; return everything it matches, a tied module once."""
    if not name:
        return "text", name, (name,)
    parent, _, last = name.rpartition(".")
    prefix = parent + "." if parent else ""
    module = survey.names()[name]
    kinds = [one for one, of in TYPES.items() if isinstance(module, of)]
    form = source.choice(("children", "below", "anywhere", "everything", "regex", "predicate", "type"))
    if form == "type" and kinds:
        kind = source.choice(kinds)
        return "type", kind, _matching(survey, lambda _, one: isinstance(one, TYPES[kind]))
    if form == "predicate":
        return "predicate", f"named {name}", _matching(survey, lambda one, _: one == name)
    texts = {
        "children": (f"{prefix}*", re.escape(prefix) + r"[^.]+"),
        "below": (f"{prefix}**", re.escape(prefix) + ".+"),
        "anywhere": (f"**.{last}", rf"(.+\.)?{re.escape(last)}"),
        "everything": ("**", ".+"),
    }
    text, expression = texts.get(form, (f"{prefix}{last}", re.escape(prefix + last)))
    matched = _matching(survey, lambda one, _: re.fullmatch(expression, one) is not None)
    if form in ("regex", "type"):
        return "regex", expression, matched
    return "pattern", text, matched


def _matching(survey: Survey, matches: Callable[[str, nn.Module], bool]) -> tuple[str, ...]:
    found: dict[nn.Module, str] = {}
    for name, module in survey.names().items():
        if matches(name, module):
            found.setdefault(module, name)
    return tuple(found.values())


def _random_part(source: random.Random, survey: Survey, place: Place) -> Place:
    """Narrow a place to a part of its value, and perhaps to one call."""
    calls = survey.calls[Spot(survey.names()[place.names[0]])]
    value = calls[0].value(place.port)
    if value is None:  # A module that only writes into its input returns nothing.
        place, value = dataclasses.replace(place, port="input"), calls[0].first
    keys: tuple[Any, ...] = ()
    part = value
    if source.random() < 0.6:
        keys, part = source.choice(
            [(keys, part) for keys, part in paths(value) if not isinstance(part, (str, NoneType))]
        )
    number = source.randrange(len(calls)) if source.random() < 0.12 else None
    return with_indices(source, dataclasses.replace(place, keys=keys, number=number), part)


def with_indices(source: random.Random, place: Place, part: Any) -> Place:
    """Perhaps narrow a place to some of the elements of a tensor."""
    if not isinstance(part, Tensor) or part.dim() == 0:
        return place
    indices = _random_indices(source, part) if source.random() < 0.4 else ()
    return dataclasses.replace(place, indices=indices, shape=tuple(part.shape))


def _random_indices(source: random.Random, part: Tensor) -> tuple[Any, ...]:
    every, second = slice(None), slice(None, None, 2)
    choices: list[tuple[Any, ...]] = [(0,), (-1,), (STAR,), (slice(0, 1),), ((..., 0),), ((..., second),)]
    if part.dim() > 1:
        choices += [((every, -1),), ((every, slice(1, 3)),), ((every, STAR),), (0, slice(0, 2)), ((-1, 0),)]
    if part.dim() > 2:
        choices += [((every, 0, second),), (0, (every, -1)), ((None, 0, ...),)]
    return source.choice(choices)


def random_like(value: Any, seed: int) -> Any:
    """Return a value of the same structure with other numbers in its floating tensors."""
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        return torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)

    return each(other, value)
