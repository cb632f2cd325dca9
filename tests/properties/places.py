"""Places in a random model: how a program names them, and what that means, worked out without the library."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from tests.properties import models, modules
from tests.properties.oracle import Arguments, Oracle
from tests.properties.structures import copied, each, flat, paths

STAR = "*"
TYPES = {"Linear": nn.Linear, "ReLU": nn.ReLU, "Sequential": nn.Sequential, "Composite": modules.Composite}


@dataclasses.dataclass(frozen=True)
class Place:
    """What a program writes (`form`, `text`), and what it means: these modules, and this part of what passes there."""

    form: str
    text: str
    names: tuple[str, ...]
    port: str = "output"
    keys: tuple[Any, ...] = ()
    indices: tuple[Any, ...] = ()
    number: int | None = None
    shape: tuple[int, ...] = ()

    @property
    def is_gradient(self) -> bool:
        return self.port.startswith("grad")

    @property
    def exact(self) -> bool:
        return self.form in ("text", "module", "site")

    @property
    def suffix(self) -> str:
        return suffix(self.port, self.keys, self.indices, self.number)

    def where(self, model: nn.Module) -> Any:
        """Return what is given to hookline."""
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
        return (bare, self.suffix) if self.suffix else bare

    def expanded(self) -> list[tuple[Any, ...]]:
        """Return the rows of subscripts that `[*]` stands for."""
        if not self.indices or STAR not in _items(self.indices[0]):
            return [self.indices]
        items = _items(self.indices[0])
        dimension = items.index(STAR)
        rows = [tuple(index if item == STAR else item for item in items) for index in range(self.shape[dimension])]
        return [(row if isinstance(self.indices[0], tuple) else row[0], *self.indices[1:]) for row in rows]

    def sites(self) -> list[tuple[str, tuple[Any, ...], str]]:
        """Return the module, the subscripts and the text of each site that this place is."""
        return [
            (name, indices, name + suffix(self.port, self.keys, indices, self.number))
            for name in self.names
            for indices in self.expanded()
        ]


def suffix(port: str, keys: tuple[Any, ...], indices: tuple[Any, ...], number: int | None) -> str:
    """Write the part of a site behind the path."""
    call = "" if number is None else f"#{number}"
    marked = "" if port == "output" else f":{port}"
    inside = "".join(f'["{key}"]' if isinstance(key, str) else f"[{key}]" for key in keys)
    return call + marked + inside + "".join(f"[{', '.join(map(_item, _items(index)))}]" for index in indices)


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _item(item: Any) -> str:
    if isinstance(item, slice):
        bounds = ["" if bound is None else str(bound) for bound in (item.start, item.stop)]
        return ":".join(bounds) + (f":{item.step}" if item.step is not None else "")
    return "..." if item is Ellipsis else str(item)


@dataclasses.dataclass
class Seen:
    """One call of a module in the survey: copies of what passed, and where gradients can flow."""

    inputs: dict[str, Any]
    first: Any
    differentiable_inputs: dict[str, bool]
    output: Any = None
    differentiable: bool = False


class Survey(Oracle):
    """One run of a model that notes everything that passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: dict[nn.Module, list[Seen]] = {}
        self.aliasing = models.aliasing(model)
        self.parametrized = any("parametrizations" in name for name, _ in model.named_modules())
        self.overwritten = models.overwritten(model)
        # Torch refuses a reentrant segment in which nothing needs a gradient, but only in backward.
        self.reentrant = models.inside_reentrant(model)

    def call(self, child: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = Arguments(child, args, kwargs)
        inputs = arguments.by_name()
        flags = {name: _differentiable(value) for name, value in inputs.items()}
        seen = Seen(copied(inputs), copied(arguments.first()), flags)
        self.calls.setdefault(child, []).append(seen)
        output = self._result(child, run, arguments, [])
        seen.output, seen.differentiable = copied(output), _differentiable(output)
        return output

    def names(self) -> dict[str, nn.Module]:
        """Return every module that can be called, by every name; nothing is known of parametrizations."""
        return {
            name: module
            for name, module in self.model.named_modules(remove_duplicate=False)
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "parametrizations" not in name
        }

    def value(self, module: nn.Module, port: str) -> Any:
        """Return what passed at the first call."""
        seen = self.calls[module][0]
        return {"input": seen.first, "inputs": seen.inputs, "output": seen.output}[port.removeprefix("grad_")]

    def can_have_gradient(self, module: nn.Module, port: str) -> bool:
        """Whether a gradient can reach this port in every call."""
        calls = self.calls[module]
        if port == "grad_output":
            return all(seen.differentiable for seen in calls)
        if port == "grad_inputs":
            return all(any(seen.differentiable_inputs.values()) for seen in calls)
        return all(next(iter(seen.differentiable_inputs.values())) for seen in calls)


def _differentiable(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flat(value))


def random_place(source: random.Random, survey: Survey, ports: tuple[str, ...], several: bool = True) -> Place:
    """Draw a place of the model, mostly of a module that is called."""
    names = survey.names()
    called = [name for name, module in names.items() if module in survey.calls]
    if source.random() < 0.02 and len(called) < len(names):
        dead = source.choice([name for name in names if name not in called])
        return Place("text", dead, (dead,), source.choice(ports))
    name = source.choice(called)
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
    """Draw a pattern that matches at least `name`, with everything that it matches; a tied module counts once."""
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
    module = survey.names()[place.names[0]]
    value = survey.value(module, place.port)
    if value is None:  # A module that only writes into its input; there is nothing to see.
        place, value = dataclasses.replace(place, port="input"), survey.value(module, "input")
    keys: tuple[Any, ...] = ()
    part = value
    if source.random() < 0.6:
        keys, part = source.choice(
            [(keys, part) for keys, part in paths(value) if not isinstance(part, (str, NoneType))]
        )
    number = source.randrange(len(survey.calls[module])) if source.random() < 0.12 else None
    place = dataclasses.replace(place, keys=keys, number=number)
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
