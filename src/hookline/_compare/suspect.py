"""A module of b that is off, with what a reason may be tested on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline import Hooks, Site
from hookline._compare.apart import MeasuredPart, OtherShape, difference, largest_element
from hookline._compare.paired_values import tensors_of
from hookline._compare.random_numbers import RandomState
from hookline._compare.relations import LEFT
from hookline._compare.rounding import Limit, cast, copied, run_alone, uncovered
from hookline._kernel import is_container, map_tensors, short_form
from hookline._scan.restore_modules import buffers_as_found, left_as_found
from hookline.errors import HooklineWarning, NeverFired

Results = dict[str, dict[str, Any]]  # The inputs and the output of each function, by site.
_NEAR = 16  # The results of a function are the same if elements are so many units in the last place apart,
_NEAR_SHARE = 4  # and if all of them are so many apart, as a share.


@dataclass
class Suspect:
    """A module of b that returns something else than its counterpart in a, given the same inputs."""

    a: nn.Module
    b: nn.Module
    inputs: Mapping[str, Any]  # What a's module got.
    given: Mapping[str, Any]  # The same, as b's module takes it.
    of_a: Any  # What a's module returned,
    of_b: Any  # and what b's did.
    limits: Mapping[str, Limit]  # The largest errors that rounding may make, of each part of the output.
    convert: Callable[[Any], tuple[Any, Any]]  # Returns a's output and an output of b in the same layout.
    owner: Callable[[Tensor], str] = lambda _: ""  # Returns the name of a's parameter that has these numbers.
    random: RandomState | None = None  # The random numbers with which a's module began.
    innermost: Callable[[Tensor], str] = lambda _: ""  # Returns the innermost module inside a's that returned a tensor.
    inputs_of: Callable[[str], Any] = lambda _: None  # Returns what a module inside a's got.
    names: Mapping[str, str] = field(default_factory=dict)  # The paths of modules inside a's, and those of their pairs.

    moved: Mapping[str, str] = field(default_factory=dict)  # Weights of a that are elsewhere in b: where they are.

    @cached_property
    def changeable(self) -> nn.Module:
        """A copy of b's module, which is changed, run and changed back."""
        return copied(self.b)

    @cached_property
    def can_run_alone(self) -> bool:
        """Whether b's module returns what it did if it runs by itself. If not, no change of it can be tested."""
        return self.are_same(self.of_b, self.convert(self._run(self.changeable))[1])

    @cached_property
    def passing_in_a(self) -> dict[str, Any]:
        """What passes inside a's module, by site."""
        return passing_inside(self.a, self.inputs, self.names, self.random)

    @cached_property
    def passing_in_b(self) -> dict[str, Any]:
        """What passes inside b's module on the same inputs. Modules that are paired have the names of a."""
        inside = passing_inside(self.b, self.given, self.names.values(), self.random)
        return {self.as_in_a(site): value for site, value in inside.items()}

    def has(self, name: str) -> bool:
        """Return True if b has a module that stands for one inside a's."""
        return name in self.names or any(True for path in self.names if path.startswith(f"{name}."))

    def as_in_a(self, site: str) -> str:
        """Return what a site inside b's module is called in a; where a has none, its name and "of b" if a has that."""
        name, colon, port = site.partition(":")
        of_a = next((path for path, other in self.names.items() if other == name), None)
        if of_a is None:
            of_a = f"{name} of b" if name in self.names else name
        return f"{of_a}{colon}{port}"

    def as_in_b(self, site: str) -> str:
        """Return what a site is called in b."""
        name, colon, port = site.partition(":")
        return f"{self.names.get(name, name).removesuffix(' of b')}{colon}{port}"

    @cached_property
    def results_in_a(self) -> Results:
        """What the functions get and return that a's module calls itself."""
        return results_of(self.a, self.inputs, self.random)

    @cached_property
    def results_in_b(self) -> Results:
        """What the functions get and return that b's module calls itself."""
        return results_of(self.b, self.given, self.random)

    def explained_at(self, site: str, value: Any) -> bool:
        """Return True if b's module returns what a's does once it gets a value at a site inside."""
        module = copied(self.b)
        hooks = short_form(module)
        hooks.patch({site: value})
        return self.explains(run_under(hooks, module, self.given, self.random))

    @property
    def main_limit(self) -> Limit:
        """The largest error of the first tensor of the output."""
        return next(iter(self.limits.values()))

    def near(self, value: Any) -> Limit:
        """How far the results of one function may be apart."""
        eps = [torch.finfo(one.dtype).eps for one in tensors_of((self.of_a, self.of_b)) if one.is_floating_point()]
        unit = max(eps, default=1e-7)
        return Limit(_NEAR * unit * largest_element(value), _NEAR_SHARE * unit)

    def are_same(self, value: Any, other: Any) -> bool:
        """Return True if two outputs are equal, up to rounding."""
        try:
            parts = difference(value, other).parts
        except OtherShape:
            return False
        return uncovered({name: part for name, part in parts.items() if name in self.limits}, self.limits) is None

    def explains(self, output: Any) -> bool:
        """Return True if an output is what a's module returns, up to rounding, and clearly nearer than that of b."""
        value, other = self.convert(output)
        if not self.are_same(value, other):
            return False
        parts = difference(value, other).parts
        before = {name: part.error.relative for name, part in self.parts.items() if name in parts}
        return all(parts[name].error.relative <= LEFT * error for name, error in before.items() if self.is_off(name))

    @cached_property
    def parts(self) -> Mapping[str, MeasuredPart]:
        """How far the parts of b's output are from a's."""
        return difference(*self.convert(self.of_b)).parts

    def is_off(self, part: str) -> bool:
        """Return True if rounding does not explain the error of a part of the output."""
        return part in self.limits and not self.limits[part].covers(self.parts[part].error)

    def explained_by(self, module: nn.Module) -> bool:
        """Return True if a changed copy of b's module returns what a's module does."""
        try:
            return self.explains(self._run(module))
        except Exception:
            return False

    def _run(self, module: nn.Module) -> Any:
        dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
        given = cast(self.given, *dtypes) if len(dtypes) == 1 else map_tensors(torch.clone, self.given, in_objects=True)
        with left_as_found(module), buffers_as_found(module):
            return run_alone(module, given, random=self.random)


def passing_inside(
    module: nn.Module, inputs: Mapping[str, Any], paths: Iterable[str] = (), random: RandomState | None = None
) -> dict[str, Any]:
    """Return what the modules directly inside another, and at some paths, get and return in their first calls."""
    module = copied(module)
    hooks = short_form(module)
    names = [name for name, child in module.named_children() if not is_container(child)]
    names += [
        f"{name}.{one}"
        for name, child in module.named_children()
        if is_container(child)
        for one, _ in child.named_children()
    ]
    names = list(dict.fromkeys((*names, *paths)))
    if not names:
        return {}
    kept = hooks.capture([Site(name, port=port) for name in names for port in ("inputs", "output")], keep="all")
    with suppress(NeverFired):
        run_under(hooks, module, inputs, random)
    return {site: kept.calls(site)[0] for site in kept}


def results_of(module: nn.Module, inputs: Mapping[str, Any], random: RandomState | None) -> Results:
    """Return what the functions that a module's own forward calls get and return, in order."""
    module = copied(module)
    hooks = short_form(module)
    kept = hooks.capture("/*", "/*:inputs", keep="all")
    run_under(hooks, module, inputs, random)
    found: dict[str, dict[str, Any]] = {}
    for site in kept:
        place = Site.parse(str(site))
        found.setdefault(str(place._replace(port="output")), {"inputs": {}})[place.port] = kept[site]
    return found


def run_under(hooks: Hooks, module: nn.Module, inputs: Mapping[str, Any], random: RandomState | None) -> Any:
    with warnings.catch_warnings(), hooks:
        warnings.simplefilter("ignore", HooklineWarning)  # Not every module calls functions itself.
        return run_alone(module, map_tensors(torch.clone, inputs, in_objects=True), random=random, rests=False)


@dataclass
class Hint:
    """A reason in words, and the function inside the module at which it was found, if it was."""

    text: str
    function: str = ""
