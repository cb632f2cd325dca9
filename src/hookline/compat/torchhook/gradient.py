"""The gradient of an output that is kept as it is, also when a later layer has written into it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class WithGradient(NamedTuple):
    """An output that is kept, or the copy of it that hookline makes when it is overwritten, and how it is read."""

    tensor: Tensor
    read: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, output: Tensor) -> Any:
        """Return an output of a graph with this, any other as it is."""
        return output if output.grad_fn is None else cls(output, _Gradient(output).read)


class _Gradient:
    """Fills the `.grad` of the copy of an output: torch's own follows the output to what was written there."""

    def __init__(self, output: Tensor) -> None:
        self._is_wanted = output.retains_grad
        self._output = weakref.ref(output)
        self._copy: Callable[[], Tensor | None] = lambda: None  # The graph is not to hold it, for it holds the graph.
        self._came: Tensor | None = None
        output.register_hook(self._take)

    def read(self, kept: Tensor) -> Tensor:
        """Return what is kept; a copy gets the gradient that has come, or will."""
        if kept is not self._output() and kept is not self._copy():
            self._copy = weakref.ref(kept)
            if self._is_wanted:
                kept.retain_grad()
                kept.grad, self._came = self._came, None
        return kept

    def _take(self, gradient: Tensor) -> None:
        copy = self._copy()
        if copy is not None and copy.retains_grad:
            copy.grad = _sum(copy.grad, gradient)
        elif self._is_wanted and copy is None:
            self._came = _sum(self._came, gradient)


def _sum(one: Tensor | None, other: Tensor) -> Tensor:
    return other.clone() if one is None else one + other
