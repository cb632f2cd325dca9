"""Modules that depend on the identity of their arguments: containers to write into, one tensor passed twice."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.containers import WRITES, container, recall
from tests.properties.modules import SHAPE, Composite, use
from tests.properties.seams import call
from tests.properties.seams import function as do


class Writer(Composite):
    """Reads a container, and writes a new tensor, its argument or its result into it."""

    def __init__(self, option: tuple[str, str, str, bool, bool]) -> None:
        super().__init__()
        self.kind, self.how, self.what, self.beside, self.by_name = option
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor, memory: Any) -> Any:
        mixed = x * 0.5
        for earlier in recall(memory):
            mixed = mixed + earlier * 0.3
        y = mixed * self.scale
        WRITES[self.how](memory, {"new": mixed * 0.2, "given": x, "returned": y}[self.what])
        return (y, memory) if self.beside else y

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.with_memory(x, container(self.kind, do("mul", operator.mul, x, 0.1)))

    def with_memory(self, x: Tensor, memory: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((x,), {"memory": memory}) if self.by_name else ((x, memory), {})


class Remembering(Composite):
    """Passes one container to several children, and reads it afterwards."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        *children, (self.kind, self.starts_empty) = given
        self.layers = nn.ModuleList(children)

    def forward(self, x: Tensor, memory: Any = None) -> Tensor:
        if memory is None:
            memory = container(self.kind, *([] if self.starts_empty else [x * 0.1]))
        first = recall(memory)[:1]
        for layer in self.layers:
            x = use_with(layer, x, memory)
        if first and first[0] is recall(memory)[0]:  # The first tensor is still the same object.
            x = x * 1.25
        for index, tensor in enumerate(recall(memory)):
            x = x + tensor * (0.1 + 0.05 * index)
        return x

    def with_memory(self, x: Tensor, memory: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (x, memory), {}


def use_with(child: nn.Module, x: Tensor, memory: Any) -> Tensor:
    """Call a child with `x`, and a container if it takes one; the result shows if it returns the same container."""
    if not isinstance(child, (Writer, Remembering)):
        return use(child, x)
    args, kwargs = child.with_memory(x, memory)
    result = call(child, *args, **kwargs)
    if isinstance(result, Tensor):
        return result
    return result[0] if result[1] is memory else result[0] * 0.9


class Twice(Composite):
    """Depends on whether its arguments are the same tensor."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, a: Tensor, b: Tensor, c: Any = None) -> Tensor:
        third = a * 0.2 if c is None else c[0] * 0.3
        if a is b and (c is None or c[0] is a):
            return a * 0.7 + b * 0.4 + third
        return a * 0.3 - b * 0.6 + third

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.form == "keyword":
            return (x,), {"b": x}
        return ((x, x, [x]) if self.form == "list" else (x, x)), {}


class Stride(nn.Module):
    """Depends on the stride of a dimension of size 1, as the choice of kernels does, and returns an odd stride."""

    def forward(self, x: Tensor) -> Tensor:
        return odd(x * (x.stride(0) / 50), 55)


class Striding(Composite):
    """Passes a tensor with an odd stride to its child, and depends on the stride of the result."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.inner = child

    def forward(self, x: Tensor) -> Tensor:
        y = call(self.inner, odd(x.sum(0, keepdim=True), 77))
        return (y * (y.stride(0) / 40)).expand(SHAPE) + x


def odd(x: Tensor, stride: int) -> Tensor:
    """Return a view of a tensor whose first dimension, of size 1, has another stride."""
    return x.as_strided(x.shape, (stride, *x.stride()[1:]))


class Keeper(Composite):
    """Keeps a list as state, and returns it together with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(SHAPE)]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y = x + self.kept[0].to(x.dtype) * 0.1
        self.kept[0] = x.detach() * 0.5
        return y, self.kept
