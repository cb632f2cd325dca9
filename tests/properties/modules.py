"""What the random models are made of: the base of all composites (`composites.py` has them), and leaves of our own.

A composite calls its children through `Composite.call`, which only calls them: that is where the oracle puts its own
recording instead. All modules take and give tensors of `SHAPE`, alone or inside some structure; `blend` makes one
tensor of a structure again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch._dynamo  # A checkpoint imports it when first called, and that import holds the frames it is called from.
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    total = torch.zeros(SHAPE, dtype=found[0].dtype)
    for tensor in found:
        total = total + (tensor if tensor.shape == SHAPE else tensor.sum() * 0.1)
    return total


def tensors(value: Any) -> list[Tensor]:
    """Return every tensor in a nested value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Result):
        value = [value.hidden, value.extra]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors(part)]
    return []


def arguments(child: nn.Module, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how a parent calls this child with `x`."""
    if isinstance(child, nn.Embedding):
        return ((x.detach() * 7).long().remainder(5)[..., 0],), {}
    if isinstance(child, nn.MultiheadAttention):
        return (x, x, x), {"need_weights": False}
    if isinstance(child, Composite):
        return child.arguments(x)
    return (x,), {}


class Composite(nn.Module):
    """A module that uses its children through `call`, which the oracle replaces."""

    def call(self, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return child(*args, **kwargs)

    def call_forward(self, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return child.forward(*args, **kwargs)

    def checkpoint(self, function: Callable[..., Any], x: Tensor, reentrant: bool) -> Any:
        return checkpoint(function, x, use_reentrant=reentrant)

    def use(self, child: nn.Module, x: Tensor) -> Tensor:
        args, kwargs = arguments(child, x)
        return blend(self.call(child, *args, **kwargs))

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
        if Tripwire.armed is not None:
            raise Tripwire.armed("the tripwire was touched")
        return x * 1.5


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
