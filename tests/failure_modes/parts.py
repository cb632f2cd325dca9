"""Modules and values that several of these tests use."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    """What a model may return instead of a tuple."""

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


class Returns(nn.Module):
    """A module whose forward is the given function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Overwrites(nn.Module):
    """Passes its input through a module, then writes into every tensor that came out."""

    def __init__(self, function: Callable[[Tensor], Any], write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.source = Returns(function)
        self.write = write

    def forward(self, x: Tensor) -> Any:
        value = self.source(x)
        self.write(value)
        return value


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()
