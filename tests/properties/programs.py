"""Random programs of hooks, as plain data: blocks of actions, and the events of a run in their order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.composites import Recursive
from tests.properties.modules import SHAPE, Boom
from tests.properties.places import Place, Survey, random_like, random_place
from tests.properties.structures import at, each, flat, picked

VALUES = ("output", "output", "input", "inputs")
GRADIENTS = ("grad_output", "grad_output", "grad_input", "grad_inputs")


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing that a block does: at these places, with these options."""

    kind: str
    places: tuple[Place, ...]
    option: Any = None
    keep: Any = "last"
    clone: bool | None = None
    detach: bool = True
    stop: bool = False

    def __repr__(self) -> str:
        shown = ", ".join(f"{place.form} {place.text + place.suffix!r}" for place in self.places)
        given = {name: getattr(self, name) for name in ("option", "keep", "clone", "detach", "stop")}
        usual = {"option": None, "keep": "last", "clone": None, "detach": True, "stop": False}
        return f"{self.kind}({shown}{''.join(f', {k}={v}' for k, v in given.items() if v != usual[k])})"


@dataclasses.dataclass(frozen=True)
class Block:
    """A short form with one action, a `Hooks` that is kept and managed, or one line of `hl.run`."""

    actions: tuple[Action, ...]
    kept: bool = False
    line: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """Blocks, and what happens: ("open", 0), ("forward", 0, "grad", None), ("close", 0, False), ..."""

    blocks: tuple[Block, ...]
    events: tuple[tuple[Any, ...], ...]

    @property
    def actions(self) -> list[Action]:
        return [action for block in self.blocks for action in block.actions]

    @property
    def observes(self) -> bool:
        """Whether nothing in it changes the run."""
        return all(action.kind == "capture" and not action.stop for action in self.actions)

    @property
    def keeps_graphs(self) -> bool:
        """Whether a capture keeps the graph's own tensors."""
        return any(not action.detach for action in self.actions)

    @property
    def places(self) -> list[Place]:
        return [place for action in self.actions for place in action.places]


def double(value: Tensor) -> Tensor:
    """Return a new tensor."""
    return value * 2


def write(value: Tensor) -> Tensor:
    """Write into the argument and return it."""
    return value.mul_(0.5)


def noise(value: Tensor) -> Tensor:
    """Draw random numbers."""
    return value + torch.rand(value.shape, dtype=value.dtype)


def explode(value: Any) -> None:
    """Fail."""
    raise Boom("the function failed")


def numbered(value: Tensor, call: Any) -> Tensor:
    """Depend on the number of the call."""
    return value * (call.number + 2)


def reenter(value: Tensor, call: Any) -> Tensor:
    """Use the very module that is hooked."""
    if type(call.module) is not nn.Linear:
        return value * 1.5
    return value + call.module(torch.ones(SHAPE, dtype=value.dtype)).detach().sum()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "double": double,
    "write": write,
    "noise": noise,
    "explode": explode,
    "numbered": numbered,
    "reenter": reenter,
    "none": lambda value: None,
    "same": lambda value: value,
    "flip": lambda value: value.flip(0),
    "zero": torch.zeros_like,
    "whole": lambda value: each(lambda tensor: tensor * 3 if tensor.is_floating_point() else tensor, value),
}
WITH_CALL = ("numbered", "reenter")
OF_TENSORS = ("double", "double", "write", "noise", "numbered", "reenter", "none", "same", "flip", "zero")
OF_GRADIENTS = ("double", "numbered", "none", "flip", "zero")
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "peak": lambda value: each(lambda tensor: tensor.double().max() if tensor.numel() else tensor, value),
    "noisy": lambda value: each(lambda tensor: tensor.double() + torch.rand(()), value),
    "overwrite": lambda value: each(lambda tensor: tensor.zero_() if tensor.is_floating_point() else tensor, value),
}


class Drawing:
    """Draws the actions of a program for one surveyed model."""

    def __init__(self, source: random.Random, survey: Survey, gradients: bool) -> None:
        self.source, self.survey, self.gradients = source, survey, gradients
        self.modules = survey.names()
        self.captured: set[Any] = set()
        self.skipped: set[nn.Module] = set()

    def block(self) -> Block:
        """Draw a block."""
        if self.source.random() < 0.3:
            count = self.source.choice((1, 2, 3, 4))
            return Block(tuple(self.action() for _ in range(count)), kept=True)
        if self.source.random() < 0.15:
            return Block(self._line(), line=True)
        return Block((self.action(),))

    def _line(self) -> tuple[Action, ...]:
        """Draw what `hl.run` takes, in the order in which it acts: patches, edits, a skip, captures."""
        drawn = [self.action() for _ in range(self.source.choice((1, 2, 3)))]
        drawn = [action for action in drawn if action.option not in WITH_CALL]
        drawn = [dataclasses.replace(action, keep="last", clone=None, detach=True) for action in drawn]
        drawn = [action for action in drawn if action.kind != "capture" or action.option is None]
        last = {action.kind: action for action in drawn} or {"edit": self._doubling()}
        return tuple(last[kind] for kind in ("patch", "edit", "skip", "capture") if kind in last)

    def _doubling(self) -> Action:
        return Action("edit", (self._place(VALUES, True, tensor=True),), "double")

    def action(self) -> Action:
        """Draw an action."""
        kind = self.source.choice(("capture", "capture", "capture", "capture", "patch", "edit", "skip"))
        if kind == "patch":
            return self._patch()
        if kind == "edit":
            return self._edit()
        if kind == "skip":
            return self._skip() or self._capture()
        return self._capture()

    def _capture(self) -> Action:
        ports = GRADIENTS if self.gradients and self.source.random() < 0.4 else VALUES
        drawn = [self._place(ports) for _ in range(self.source.choice((1, 1, 2, 3)))]
        places = tuple(place for place in drawn if self._is_new(place))
        if not places:
            return self._edit()
        options: dict[str, Any] = {"keep": self.source.choice(("last", "last", "all", "all", 2))}
        draw = self.source.random()
        if draw < 0.08:
            options["clone"] = True
        elif draw < 0.14 and ports is VALUES:
            options["clone"] = False
        elif draw < 0.20 and ports is VALUES:
            options["detach"] = False
        elif draw < 0.30 and ports is VALUES:
            options["option"] = self.source.choice(list(TRANSFORMS))
        elif draw < 0.36 and ports is VALUES and all(self._can_stop(place) for place in places):
            options["stop"] = True
        return Action("capture", places, **options)

    def _can_stop(self, place: Place) -> bool:
        return place.number is None and (place.exact or not self.survey.parametrized)

    def _is_new(self, place: Place) -> bool:
        """Whether none of its sites was captured before; two of one cache would be one."""
        rest = (place.port, place.keys, place.number)
        keys = {(self.modules[name], repr(indices), *rest) for name, indices, _ in place.sites()}
        known = not keys.isdisjoint(self.captured)
        self.captured |= keys
        return not known

    def _place(self, ports: tuple[str, ...], changes: bool = False, tensor: bool = False) -> Place:
        """Draw a place where the action makes sense."""
        for _ in range(30):
            place = random_place(self.source, self.survey, ports, several=not tensor)
            if self._fits(place, changes, tensor):
                return place
        return Place("text", "", ("",), "grad_output" if ports[0] == "grad_output" else "input")

    def _fits(self, place: Place, changes: bool, tensor: bool) -> bool:
        if changes and not place.exact and self.survey.parametrized:
            return False  # A pattern means the parametrizations too, and the oracle does not stand there.
        called = [self.modules[name] for name in place.names if self.modules[name] in self.survey.calls]
        if (changes or place.is_gradient) and any(module in self.survey.aliasing for module in called):
            return False
        if place.is_gradient and not all(self._has_gradient(module, place) for module in called):
            return False
        return not tensor or (len(called) == len(place.names) and all(self._is_floating(one, place) for one in called))

    def _has_gradient(self, module: nn.Module, place: Place) -> bool:
        if place.keys or place.indices:
            part = self._part(module, place)
            return self.survey.can_have_gradient(module, place.port) and any(
                isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in flat(part)
            )
        return self.survey.can_have_gradient(module, place.port)

    def _is_floating(self, module: nn.Module, place: Place) -> bool:
        part = self._part(module, place)
        return isinstance(part, Tensor) and part.is_floating_point()

    def _part(self, module: nn.Module, place: Place) -> Any:
        return at(self.survey.value(module, place.port), place.keys)

    def _patch(self) -> Action:
        if self.source.random() < 0.2:
            place = dataclasses.replace(self._place(VALUES, changes=True), keys=(), indices=(), number=None)
            modules = [self.modules[name] for name in place.names if self.modules[name] in self.survey.calls]
            # The same arguments for each call of a module that calls itself would never end.
            unfit = self.survey.reentrant | {module for module in modules if isinstance(module, Recursive)}
            if len(modules) == len(place.names) == 1 and modules[0] not in unfit:
                return Action("patch", (place,), ("structure", self.source.randrange(1000)))
        drawn = [self._place(VALUES, True, tensor=True) for _ in range(self.source.choice((1, 1, 2)))]
        if any(self.modules[place.names[0]] in self.survey.reentrant for place in drawn):
            return self._edit()
        kind = self.source.choice(("number", "tensor", "leaf", "row"))
        places = {place.text + place.suffix: place for place in drawn}
        return Action("patch", tuple(places.values()), (kind, self.source.randrange(1000)))

    def _edit(self) -> Action:
        if self.gradients and self.source.random() < 0.25:
            place = self._place(("grad_output", "grad_input"), True, tensor=True)
            return Action("edit", (place,), self.source.choice(OF_GRADIENTS))
        if self.source.random() < 0.2:
            return Action("edit", (self._place(VALUES, changes=True),), "whole")
        function = "explode" if self.source.random() < 0.03 else self.source.choice(OF_TENSORS)
        place = self._place(VALUES, True, tensor=True)
        if function == "zero" and self.modules[place.names[0]] in self.survey.reentrant:
            function = "double"
        return Action("edit", (place,), function)

    def _skip(self) -> Action | None:
        unfit = self.survey.aliasing | self.survey.overwritten | self.skipped | self.survey.reentrant
        usable = [
            name
            for name, module in self.modules.items()
            if module in self.survey.calls and name and module not in unfit
        ]
        if not usable:
            return None
        name = self.source.choice(usable)
        self.skipped.add(self.modules[name])
        seen = self.survey.calls[self.modules[name]][0]
        first, output = seen.first, seen.output
        same = isinstance(output, Tensor) and isinstance(first, Tensor) and first.shape == output.shape
        passes_on = same and first.dtype == output.dtype and self.source.random() < 0.6
        place = Place("text", name, (name,))
        return Action("skip", (place,), None if passes_on else ("structure", self.source.randrange(1000)))


def patch_value(kind: str, seed: int, part: Any) -> Any:
    """Return the value that a patch puts in the place of `part`."""
    if kind == "number":
        return seed / 100
    if kind == "structure":
        return random_like(part, seed)
    value = random_like(part[..., :1] if kind == "row" and part.dim() else part, seed)
    return value.requires_grad_() if kind == "leaf" else value


def chosen(survey: Survey, place: Place) -> Any:
    """Return the part of what passed in the survey that a place names."""
    value = at(survey.value(survey.names()[place.names[0]], place.port), place.keys)
    return picked(value, place.expanded()[0]) if place.indices else value
