"""The oracle's data: watches at spots of a model, the calls there, and the gradients that arrive."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.properties.structures import each, flat

Receiver = Callable[[Tensor], Tensor]


class Halt(BaseException):
    """Ends a forward of the oracle."""

    passing: Any = None  # The result that an in-place function was about to write.


class SiteError(Exception):
    """A value does not have the requested part."""


class EditError(Exception):
    """A new value does not fit in place of the old one."""


class NeverFired(Exception):
    """A gradient was requested by an exact name at a place that can't have one."""


class Tap(torch.autograd.Function):
    """An identity whose gradient goes through some functions, one after the other."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, receivers: list[Receiver]) -> Tensor:
        context.receivers = receivers
        context.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        for receive in context.receivers if grad is not None else ():
            grad = receive(grad)
        return grad, None


class Spot(NamedTuple):
    """A module, a method or a function of one, or a parameter that is read or used by a function."""

    owner: Any  # A module, or all holders of a parameter with their names for it.
    member: str = ""  # "damped()", "/softmax", ":param"


@dataclasses.dataclass(eq=False)
class Watch:
    """One action at one place of one spot. `function(part, number)` returns the value to keep or to go on with."""

    text: str
    spot: Spot
    port: str
    keys: tuple[Any, ...]
    indices: tuple[Any, ...]
    number: int | None
    kind: str
    function: Callable[[Any, int], Any]
    exact: bool = True
    within: int | None = None  # Only functions in this call of the module.
    family: list[Watch] = dataclasses.field(default_factory=list, repr=False)  # All of one `[*]` or `/*`.
    active: bool = False
    blocks: set[object] = dataclasses.field(default_factory=set)
    calls: int = 0
    fired: int = 0
    fired_in_forward: bool = False
    first: int = 0  # Time of the first value kept.
    hopeless: int = -1  # Number of values when last found that no gradient can arrive.
    values: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)

    @property
    def acts(self) -> bool:
        return self.active or bool(self.blocks)

    @property
    def is_silent(self) -> bool:
        return not any(watch.fired for watch in self.family)

    @property
    def is_gradient(self) -> bool:
        return self.port.startswith("grad")

    @property
    def is_before(self) -> bool:
        return self.kind != "skip" and "input" in self.port


@dataclasses.dataclass
class Gradients:
    """The gradients in one nested value, as they arrive."""

    value: Any
    tensors: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def whole(self) -> Any:
        """Return a value of the same structure, with None where there is no gradient."""
        positions = iter(range(len(flat(self.value))))
        return each(lambda _: self.tensors.get(next(positions)), self.value)


@dataclasses.dataclass
class Call:
    """One call at a spot: the functions that each tapped tensor's gradient goes through."""

    stamp: int
    taps: list[tuple[Tensor, list[Receiver]]] = dataclasses.field(default_factory=list)
    tapped: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)  # Tensors and their taps.
    given: Any = ()  # The arguments, with the caller's containers.
    entered: list[Tensor] = dataclasses.field(default_factory=list)  # The arguments' tensors before the call.


@dataclasses.dataclass
class Frame:
    """A running forward: how often each function ran in it, and the number of this call for each watch."""

    module: nn.Module
    number: int
    functions: Counter[str] = dataclasses.field(default_factory=Counter)
    numbers: dict[Watch, int] = dataclasses.field(default_factory=dict)


class Occurrence(NamedTuple):
    """A call at a spot. Calls of modules and methods are numbered by each watch, from when it was opened."""

    spot: Spot
    number: int | None = None
    frame: Frame | None = None
