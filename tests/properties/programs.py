"""Random programs of hooks, as plain data: blocks of actions, and the events of a run in order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.arguments import AS_WRITTEN
from tests.properties.composites import Recursive, Root
from tests.properties.members import random_member
from tests.properties.memories import Keeper, Remembering, Stride, Twice, Writer
from tests.properties.modules import SHAPE, Boom
from tests.properties.places import Place, random_like, random_place
from tests.properties.structures import at, each, flat, picked
from tests.properties.survey import Survey
from tests.properties.watches import Spot

VALUES = ("output", "output", "input", "inputs")
GRADIENTS = ("grad_output", "grad_output", "grad_input", "grad_inputs")
ASKING = (Root, Writer, Remembering, Twice, Stride, Keeper)  # Depend on the identity of values.


@dataclasses.dataclass(frozen=True)
class Action:
    """One action of a block, at some places, with some options."""

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
    """A short form with one action, a `Hooks` that is kept, or a call of `hl.run`."""

    actions: tuple[Action, ...]
    kept: bool = False
    line: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """Blocks and events: ("open", 0), ("forward", 0, "grad", None), ("close", 0, False), ..."""

    blocks: tuple[Block, ...]
    events: tuple[tuple[Any, ...], ...]

    @property
    def actions(self) -> list[Action]:
        return [action for block in self.blocks for action in block.actions]

    @property
    def observes(self) -> bool:
        """True if no action changes the run."""
        return all(action.kind == "capture" and not action.stop for action in self.actions)

    @property
    def keeps_graphs(self) -> bool:
        """True if a capture keeps tensors attached to the graph."""
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
    """Call the hooked module again."""
    if type(call.module).__name__ != "Linear":
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
    "peak": lambda value: _each(lambda tensor: tensor.double().max() if tensor.numel() else tensor, value),
    "noisy": lambda value: _each(lambda tensor: tensor.double() + torch.rand(()), value),
    "overwrite": lambda value: _each(lambda tensor: tensor.zero_() if tensor.is_floating_point() else tensor, value),
}


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return "nothing" if value is None else each(function, value)  # A transform that returns None keeps nothing.


class Drawing:
    """Draws the actions of a program for one surveyed model, at modules and at members of some families."""

    def __init__(
        self,
        source: random.Random,
        survey: Survey,
        gradients: bool,
        members: tuple[str, ...] = (),
        containers: bool = False,
    ) -> None:
        self.source, self.survey, self.gradients, self.members = source, survey, gradients, members
        self.modules = survey.names()
        asking = {name: one for name, one in self.modules.items() if isinstance(one, ASKING) and containers}
        self.asking = tuple(name for name, module in asking.items() if Spot(module) in survey.calls)
        self.captured: set[Any] = set()
        self.skipped: set[Spot] = set()

    def block(self) -> Block:
        """Draw a block."""
        if self.source.random() < 0.3:
            count = self.source.choice((1, 2, 3, 4))
            return Block(tuple(self.action() for _ in range(count)), kept=True)
        if self.source.random() < 0.15:
            return self.line()
        return Block((self.action(),))

    def line(self) -> Block:
        """Draw arguments for `hl.run`, in the order in which it acts: patches, edits, a skip, captures."""
        drawn = [self.action() for _ in range(self.source.choice((1, 2, 3)))]
        drawn = [action for action in drawn if action.option not in WITH_CALL]
        drawn = [dataclasses.replace(action, keep="last", clone=None, detach=True) for action in drawn]
        drawn = [action for action in drawn if action.kind != "capture" or action.option is None]
        last = {action.kind: action for action in drawn} or {"edit": self._doubling()}
        return Block(tuple(last[kind] for kind in ("patch", "edit", "skip", "capture") if kind in last), line=True)

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
        is_whole = place.number is None and not place.meant  # The number of matching functions is unknown.
        return is_whole and (place.exact or not self.survey.parametrized)

    def _is_new(self, place: Place) -> bool:
        """Return True if none of its sites was captured before; a cache would merge two captures of one site."""
        owners, rest = self.survey.owners(), (place.port, place.keys, place.within)
        keys = {(owners[one.name], one.member, one.number, repr(one.indices), *rest) for one in place.points()}
        known = not keys.isdisjoint(self.captured)
        self.captured |= keys
        return not known

    def _place(self, ports: tuple[str, ...], changes: bool = False, tensor: bool = False) -> Place:
        """Draw a place where the action makes sense."""
        for _ in range(30):
            place = self._any_place(ports, several=not tensor)
            if self._fits(place, changes, tensor):
                return place
        return Place("text", "", ("",), "grad_output" if ports[0] == "grad_output" else "input")

    def _any_place(self, ports: tuple[str, ...], several: bool) -> Place:
        if self.members and self.source.random() < 0.85:
            return random_member(self.source, self.survey, ports, self._families(ports))
        if self.asking and self.source.random() < 0.7:
            return random_place(self.source, self.survey, (*ports, ports[-1]), several, self.asking)
        return random_place(self.source, self.survey, ports, several)

    def _families(self, ports: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(one for one in self.members if one != "parameters" or not ports[0].startswith("grad"))

    def _fits(self, place: Place, changes: bool, tensor: bool) -> bool:
        if changes and not place.exact and self.survey.parametrized:
            return False  # A pattern also matches parametrizations, which the oracle can't see.
        spots = place.spots(self.survey)
        called = [spot for spot in spots if spot in self.survey.calls]
        # Hookline refuses to change functions in a checkpointed part of a forward.
        unfit = self.survey.aliasing | self.survey.segmented
        if (changes or place.is_gradient) and not unfit.isdisjoint(called):
            return False
        if changes and not self.survey.strided.isdisjoint(called):
            return False  # The strides of a new value are unspecified.
        if place.is_gradient and not self._can_have_gradient(place, called):
            return False
        # Hookline refuses to change a gradient that arrives in two parts, as when a changed result is written back.
        if changes and place.port == "grad_input" and not self.survey.writing.isdisjoint(called):
            return False
        parts = self._parts(place)
        if parts is None or (place.is_gradient and not all(map(_has_floats, parts))):
            return False
        alike = {(part.shape, part.dtype) if isinstance(part, Tensor) else None for part in parts}
        if not tensor:
            return not place.indices or alike == {(place.shape, parts[0].dtype)}
        return len(called) == len(spots) and all(map(_is_floating, parts)) and len(alike) == 1

    def _can_have_gradient(self, place: Place, spots: list[Spot]) -> bool:
        if any(self.survey.loses_gradient(spot, place.port) for spot in spots):
            return False
        return all(one.can_have_gradient(place.port, place.keys) for one in place.seen(self.survey))

    def _parts(self, place: Place) -> list[Any] | None:
        """Return the values at a place, call by call, or None if one of them does not have the part."""
        try:
            return [at(one.value(place.port), place.keys) for one in place.seen(self.survey)]
        except KeyError:
            return None

    def _patch(self) -> Action:
        if self.source.random() < 0.2:
            place = dataclasses.replace(self._place(VALUES, changes=True), keys=(), indices=())
            if not place.member:
                place = dataclasses.replace(place, number=None)
            spots = place.spots(self.survey)
            # A module that calls itself would never end if each call got the same arguments.
            unfit = self.survey.reentrant | {spot for spot in spots if isinstance(spot.owner, Recursive)}
            unfit |= {spot for spot in spots if spot.member == "countdown()"}
            as_written = place.port != "inputs" or place.member[:1] != "/" or place.member[1:] in AS_WRITTEN
            if as_written and len(spots) == 1 and spots[0] not in unfit and self._are_alike(place):
                return Action("patch", (place,), ("structure", self.source.randrange(1000)))
        drawn = [self._place(VALUES, True, tensor=True) for _ in range(self.source.choice((1, 1, 2)))]
        if any(spot in self.survey.reentrant for place in drawn for spot in place.spots(self.survey)):
            return self._edit()
        kind = self.source.choice(("number", "tensor", "leaf", "row"))
        places = {place.text + place.suffix: place for place in drawn}
        return Action("patch", tuple(places.values()), (kind, self.source.randrange(1000)))

    def _are_alike(self, place: Place) -> bool:
        """Return True if the value has the same structure at every call."""
        parts = self._parts(place) or []
        return len({repr(each(lambda tensor: (tuple(tensor.shape), tensor.dtype), part)) for part in parts}) == 1

    def _edit(self) -> Action:
        if self.gradients and self.source.random() < 0.25:
            place = self._place(("grad_output", "grad_input"), True, tensor=True)
            return Action("edit", (place,), self.source.choice(OF_GRADIENTS))
        if self.source.random() < 0.2:
            return Action("edit", (self._place(VALUES, changes=True),), self.source.choice(("whole", "whole", "same")))
        function = "explode" if self.source.random() < 0.03 else self.source.choice(OF_TENSORS)
        place = self._place(VALUES, True, tensor=True)
        if function == "reenter" and not all(isinstance(spot.owner, nn.Module) for spot in place.spots(self.survey)):
            function = "numbered"  # For a shared parameter, `call.module` may be any of its modules.
        if function == "write" and any(spot.member == "/expand" for spot in self.survey.calls):
            function = "double"  # Torch refuses to write into a tensor whose elements share memory.
        if function == "zero" and not self.survey.reentrant.isdisjoint(place.spots(self.survey)):
            function = "double"
        return Action("edit", (place,), function)

    def _skip(self) -> Action | None:
        unfit = self.survey.aliasing | self.survey.overwritten | self.skipped | self.survey.reentrant
        unfit |= self.survey.segmented | self.survey.strided
        place = self._place_to_skip()
        if place is None or not unfit.isdisjoint(place.spots(self.survey)):
            return None
        seen = place.seen(self.survey)
        self.skipped |= set(place.spots(self.survey))
        first, output = seen[0].first, seen[0].output
        same = isinstance(output, Tensor) and isinstance(first, Tensor) and first.shape == output.shape
        passes_on = same and first.dtype == output.dtype and self.source.random() < 0.6
        return Action("skip", (place,), None if passes_on else ("structure", self.source.randrange(1000)))

    def _place_to_skip(self) -> Place | None:
        families = tuple(one for one in self.members if one != "parameters")
        if families and self.source.random() < 0.85:
            place = random_member(self.source, self.survey, ("output",), families)
            place = dataclasses.replace(place, keys=(), indices=())
            return place if place.exact and place.member and self._are_alike(place) else None
        usable = [name for name, module in self.modules.items() if Spot(module) in self.survey.calls and name]
        if not usable:
            return None
        name = self.source.choice(usable)
        return Place("text", name, (name,))


def _has_floats(part: Any) -> bool:
    return any(map(_is_floating, flat(part)))


def _is_floating(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


def patch_value(kind: str, seed: int, part: Any) -> Any:
    """Return the value with which a patch replaces `part`."""
    if kind == "number":
        return seed / 100
    if kind == "structure":
        return random_like(part, seed)
    value = random_like(part[..., :1] if kind == "row" and part.dim() else part, seed)
    return value.requires_grad_() if kind == "leaf" else value


def chosen(survey: Survey, place: Place) -> Any:
    """Return the part of the first surveyed value that a place names."""
    value = at(place.seen(survey)[0].value(place.port), place.keys)
    return picked(value, place.expanded()[0]) if place.indices else value
