"""One run of a model that records every value. The random programs are drawn from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties import random_models
from tests.properties.arguments import Arguments
from tests.properties.layers import is_transparent
from tests.properties.memories import Stride
from tests.properties.oracle import Oracle, written_by
from tests.properties.structures import copied, flat
from tests.properties.watches import Occurrence, Spot


@dataclasses.dataclass
class Seen:
    """One call at a spot: copies of the values, where gradients can flow, and the numbers of the call."""

    inputs: dict[str, Any]
    first: Any
    differentiable_inputs: dict[str, bool]
    output: Any = None
    differentiable: bool = False
    number: int = 0
    within: int = 0
    began: int = 0  # Times at which the arguments and the result passed.
    ended: int = 0

    def value(self, port: str) -> Any:
        """Return the value at a port."""
        values = {"input": self.first, "inputs": self.inputs, "output": self.output, "param": self.output}
        return values[port.removeprefix("grad_")]

    def can_have_gradient(self, port: str, keys: tuple[Any, ...]) -> bool:
        """Return True if a gradient can reach this port, or one of its arguments."""
        if port == "grad_output":
            return self.differentiable
        if port == "grad_inputs" and keys:
            return self.differentiable_inputs.get(keys[0], False)
        flags = list(self.differentiable_inputs.values())
        return any(flags) if port == "grad_inputs" else flags[:1] == [True]


class Survey(Oracle):
    """An oracle that records every call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: dict[Spot, list[Seen]] = {}
        self.passing = 0
        self.aliasing = {Spot(module) for module in random_models.aliasing(model)}
        self.strided = {Spot(module) for module in model.modules() if isinstance(module, Stride)}
        self.parametrized = any("parametrizations" in name for name, _ in model.named_modules())
        self.overwritten = {Spot(module) for module in random_models.overwritten(model)}
        # Torch refuses a reentrant segment in which nothing needs a gradient, but only in backward.
        self.reentrant = {Spot(module) for module in random_models.inside_reentrant(model)}
        self.segments: list[tuple[bool, int]] = []  # Running segments: reentrant? How many forwards around it?
        self.segmented: set[Spot] = set()  # Functions in a checkpointed part of a forward.
        self.lazy = {module for module in model.modules() if isinstance(module, nn.LazyLinear)}
        self.made: list[tuple[Tensor, Spot]] = []
        self.views: set[Spot] = set()  # Spots that return a view of an argument.
        self.writing: set[Spot] = set()  # Spots that write into a tensor.
        self.through_views: dict[Spot, bool] = {}  # Spots that write into a part of a tensor; True if it is contiguous.

    def segment(self, function: Callable[..., Any], x: Tensor, reentrant: bool) -> Any:
        self.segments.append((reentrant, len(self.frames)))
        try:
            return function(x)
        finally:
            self.segments.pop()

    def function(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = written_by(name, args, kwargs)
        if target is not None:
            self.overwritten |= {spot for tensor, spot in self.made if _memory(tensor) == _memory(target)}
            self._note_target(target, Spot(self.frames[-1].module, f"/{name}"))
        return super().function(name, run, args, kwargs)

    def _note_target(self, target: Tensor, spot: Spot) -> None:
        self.writing.add(spot)
        if target._base is not None and target._base.numel() != target.numel():
            self.through_views[spot] = self.through_views.get(spot, True) and target._base.is_contiguous()

    def read(self, owner: nn.Module, name: str) -> Tensor:
        value = super().read(owner, name)
        if (owner, name) in self.holders:
            self.passing += 1
            self._note(Spot(self.holders[owner, name], ":param"), Seen({}, None, {}, copied(value), ended=self.passing))
        return value

    def _around(self, here: list[Occurrence], given: Arguments, run: Callable[[], Any], *_: Any) -> Any:
        inputs = given.by_name()
        flags = {name: torch.is_grad_enabled() and _differentiable(value) for name, value in inputs.items()}
        self.passing += 1
        noted = [Seen(copied(inputs), copied(given.first()), flags, began=self.passing) for _ in here]
        for seen, occurrence in zip(noted, here, strict=True):
            self._note(occurrence.spot, seen)
            seen.number = occurrence.number or 0
            seen.within = occurrence.frame.number if occurrence.frame is not None else 0
        output = super()._around(here, given, run)
        self.passing += 1
        for seen, occurrence in zip(noted, here, strict=True):
            seen.ended = self.passing
            seen.output, seen.differentiable = copied(output), _differentiable(output)
            self.made += [(leaf, occurrence.spot) for leaf in flat(output) if isinstance(leaf, Tensor)]
            if any(_is_view(leaf, other) for leaf in flat(output) for other in flat(inputs)):
                self.views.add(occurrence.spot)
        return output

    def _note(self, spot: Spot, seen: Seen) -> None:
        self.calls.setdefault(spot, []).append(seen)
        if any(reentrant for reentrant, _ in self.segments):
            self.reentrant.add(spot)
        is_function = isinstance(spot.owner, nn.Module) and spot.member.startswith("/")
        if is_function and len(self.frames) in [depth for _, depth in self.segments]:
            self.segmented.add(spot)

    def knows(self, spot: Spot) -> bool:
        """Return True if the oracle sees everything at a spot, and the spot exists before the first forward."""
        owners = [spot.owner] if isinstance(spot.owner, nn.Module) else [module for module, _ in spot.owner]
        return all(is_transparent(owner) and owner not in self.lazy for owner in owners)

    def loses_gradient(self, spot: Spot, port: str) -> bool:
        """Return True if hookline refuses to follow the gradient, or the oracle can't, as it taps a copy of a view."""
        if spot.member == "offset()":  # It returns a parameter that is used elsewhere.
            return True
        if spot in self.through_views and not (port == "grad_output" and self.through_views[spot]):
            return True
        return spot in self.views and spot in self.overwritten and spot not in self.through_views

    def calls_at(self, spot: Spot, number: int | None, within: int | None = None) -> list[Seen]:
        """Return the calls at a spot that a site with these numbers selects."""
        calls = self.calls.get(spot, [])
        if not spot.member.startswith("/"):
            return calls if number is None else calls[number : number + 1]
        return [one for one in calls if number in (None, one.number) and within in (None, one.within)]


def _memory(leaf: Any) -> int:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else 0


def _is_view(leaf: Any, other: Any) -> bool:
    return leaf is not other and _memory(leaf) == _memory(other) != 0


def _differentiable(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flat(value))
