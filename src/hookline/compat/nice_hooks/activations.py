"""ActivationCache: activations by the paths of their modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

ActivationCacheLike = dict[str, Tensor]


class ActivationCache(dict[str, Tensor]):
    """Activations by path; arithmetic is done on the keys that both sides have."""

    def __add__(self, other: Mapping[str, Tensor]) -> ActivationCache:
        return self._with(other, operator.add)

    def __sub__(self, other: Mapping[str, Tensor]) -> ActivationCache:
        return self._with(other, operator.sub)

    def __mul__(self, factor: float | Tensor) -> ActivationCache:
        return ActivationCache({path: value * factor for path, value in self.items()})

    def __truediv__(self, divisor: float | Tensor) -> ActivationCache:
        return ActivationCache({path: value / divisor for path, value in self.items()})

    def __or__(self, other: Mapping[str, Tensor]) -> ActivationCache:  # type: ignore[override]
        return ActivationCache({**self, **other})

    def copy(self) -> ActivationCache:
        """Return another cache with the same tensors."""
        return ActivationCache(self)

    def to(self, *args: Any, **kwargs: Any) -> ActivationCache:
        """Return the activations on another device, or of another dtype."""
        return ActivationCache({path: value.to(*args, **kwargs) for path, value in self.items()})

    def index(self, key: Any) -> ActivationCache:
        """Return `value[key]` of each."""
        return ActivationCache({path: value[key] for path, value in self.items()})

    def _with(self, other: Mapping[str, Tensor], operation: Callable[[Tensor, Tensor], Tensor]) -> ActivationCache:
        if not isinstance(other, Mapping):
            return NotImplemented
        return ActivationCache({path: operation(value, other[path]) for path, value in self.items() if path in other})
