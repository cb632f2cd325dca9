"""Parts of the random models: the base class of the composites in `composites.py`, and some leaf modules.

A composite does everything that a hook may see through the `seams`, where the oracle can record it. All modules take
and return tensors of `SHAPE`, alone or inside a structure; `blend` turns a structure into one tensor.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar, NamedTuple

import torch
import torch._dynamo  # The first checkpoint would import it, and that import keeps the calling frames alive.
from torch import Tensor, nn

from tests.properties import seams
from tests.properties.containers import KeyValues, State, recall
from tests.properties.seams import function as do

SHAPE = (2, 3, 4)


class Boom(Exception):
    """Raised on purpose in the middle of a forward."""


class Pair(NamedTuple):
    """A named tuple that modules return."""

    first: Any
    second: Any


@dataclasses.dataclass
class Result:
    """A dataclass that modules return."""

    hidden: Any
    extra: Any = None
    label: str = "result"


def blend(value: Any) -> Tensor:
    """Return one tensor of `SHAPE` made of every floating tensor in a nested value."""
    found = [tensor for tensor in tensors(value) if tensor.is_floating_point()]
    if len(found) == 1 and found[0].shape == SHAPE:
        return found[0]
    total = do("zeros", torch.zeros, SHAPE, dtype=found[0].dtype)
    for tensor in found:
        if tensor.shape != SHAPE:
            tensor = do("mul", operator.mul, do("sum", Tensor.sum, tensor), 0.1)
        total = do("add", operator.add, total, tensor)
    return total


def tensors(value: Any) -> list[Tensor]:
    """Return every tensor in a nested value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Result):
        value = [value.hidden, value.extra]
    if isinstance(value, (State, KeyValues)):
        return recall(value)
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors(part)]
    return []


def arguments(child: nn.Module, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a parent calls this child for `x`."""
    if isinstance(child, nn.Embedding):
        numbers = do("long", Tensor.long, do("mul", operator.mul, do("detach", Tensor.detach, x), 7))
        indices = do("remainder", Tensor.remainder, numbers, 5)
        return (do("getitem", operator.getitem, indices, (..., 0)),), {}
    if isinstance(child, nn.MultiheadAttention):
        return (x, x, x), {"need_weights": False}
    if isinstance(child, Composite):
        return child.arguments(x)
    return (x,), {}


def use(child: nn.Module, x: Tensor) -> Tensor:
    """Call a child with `x`, and turn its output into one tensor."""
    args, kwargs = arguments(child, x)
    return blend(seams.call(child, *args, **kwargs))


class Composite(nn.Module):
    """A module with a method that returns the arguments of its call."""

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x,), {}


class Scale(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


class Tripwire(nn.Module):
    """Passes its input on, or raises when armed."""

    armed: ClassVar[type[BaseException] | None] = None

    def forward(self, x: Tensor) -> Tensor:
        return do("mul", operator.mul, fail_if_armed(x), 1.5)


def fail_if_armed(x: Tensor) -> Tensor:
    """Return the value, or raise if armed."""
    if Tripwire.armed is not None:
        raise Tripwire.armed("the tripwire was touched")
    return x


class Mutator(nn.Module):
    """Writes into its input, and returns it or nothing."""

    def __init__(self, silent: bool) -> None:
        super().__init__()
        self.silent = silent

    def forward(self, x: Tensor) -> Tensor | None:
        x.mul_(0.5)
        x.add_(1.0)
        return None if self.silent else x


class Reuser(nn.Module):
    """Returns the same preallocated buffer from each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(SHAPE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.memory.copy_(x.detach() * 2.0)
        return self.memory
