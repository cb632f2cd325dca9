"""A small block with a norm, an attention and an MLP, and pairs of it, for the tests of `hl.compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl


class Block(nn.Module):
    """A residual block, in which a linear layer stands for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        x = x + self.attn(self.norm(x)) * self.scale
        return x + self.mlp(x)


def pair(other: type[Block] = Block) -> tuple[Block, Block]:
    """Return a block, and another one with the same weights."""
    torch.manual_seed(0)
    a, b = Block(), other()
    b.load_state_dict(a.state_dict())
    return a, b


class Computes(nn.Module):
    """A module that returns a function of its weight and inputs."""

    def __init__(self, function: Callable[..., Any], weight: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        if weight is not None:
            self.weight = nn.Parameter(weight.clone())

    def forward(self, *inputs: Any) -> Any:
        """Return the output."""
        return self.function(*self.parameters(), *inputs)


def compared(of_a: Callable[..., Any], of_b: Callable[..., Any], *inputs: Any, **options: Any) -> hl.Comparison:
    """Compare two models that are functions of their inputs."""
    return hl.compare(Computes(of_a), Computes(of_b), run=inputs, **options)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the calls of all modules by the name of their class, and those of modules that hold no others."""
    calls: Counter[str] = Counter()

    def count(module: nn.Module, inputs: Any) -> None:
        calls[type(module).__name__] += 1
        calls["without others"] += not any(True for _ in module.children())

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield calls
    finally:
        handle.remove()
