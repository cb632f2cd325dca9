"""How far rounding alone may take a module from its counterpart: measured by running it once more in another dtype."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hookline._compare.apart import OtherShape, apart, largest_element
from hookline._kernel import map_tensors, resting, unwrap

_MARGIN = 4  # Two ways to compute the same may round this many times as far as one and its version in another dtype.
_FREE = 8  # This many units in the last place of the largest element need no explanation.


def dtype_of_model(model: nn.Module) -> torch.dtype:
    """Return the dtype that most parameters of a model have."""
    sizes: dict[torch.dtype, int] = {}
    for one in (*model.parameters(), *model.buffers()):
        if one.is_floating_point():
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())


class Rounding:
    """What rounding explains in the comparison of two models."""

    def __init__(
        self, a: nn.Module, b: nn.Module, tolerance: float | None, dtypes_of_a: Collection[torch.dtype] = ()
    ) -> None:
        coarsest = max(dtypes_of_a, key=lambda dtype: torch.finfo(dtype).eps, default=dtype_of_model(a))
        dtypes = coarsest, dtype_of_model(b)
        self.coarser = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        self.eps = torch.finfo(self.coarser).eps
        # What a module does in the dtype of the other model shows what that dtype explains; if both have the same one,
        # how far it is from exact shows what its own explains.
        self.other = dtypes[1] if dtypes[0] != dtypes[1] else torch.float64
        self.for_b = dtypes[0] if dtypes[0] != dtypes[1] else torch.float64  # The same for a module of b.
        self.tolerance = tolerance

    def free(self, output: Any) -> float:
        """Return the error of an output that needs no explanation."""
        if self.tolerance is not None:
            return self.tolerance * largest_element(output)
        return _FREE * self.eps * largest_element(output)

    def with_explained(self, output: Any, explained: float) -> float:
        """Return the largest error of an output if rounding inside is known to explain so much."""
        return self.free(output) + (0.0 if self.tolerance is not None else _MARGIN * explained)

    def allowed(self, module: nn.Module, inputs: Mapping[str, Any], output: Any) -> float:
        """Return the largest error of a module's output that rounding may make."""
        free = self.free(output)
        if self.tolerance is not None:
            return free
        again = run_in(module, inputs, self.other)
        if again is not None:
            try:
                explained = apart(output, again).largest
            except OtherShape:
                explained = float("inf")
            if explained <= 0.5 * largest_element(output):
                return free + _MARGIN * explained
        return float(free * (1 + sum(1 for _ in module.modules())) ** 0.5)


def run_in(module: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Run a copy of a module in a dtype. Return None if it can't be."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()

    try:
        return run_alone(copied(module, dtype), map_tensors(cast, dict(inputs), in_objects=True))
    except Exception:  # For example, one of its kernels knows no float64.
        return None


def copied(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a module that hooks do not see, in another dtype if one is given."""
    module = unwrap(module)
    if dtype is None:
        return copy.deepcopy(module)
    # Where a weight is cast, there is no need to copy it first.
    plain = [one for one in module.parameters() if type(one) is nn.Parameter and one.is_floating_point()]
    cast = {id(one): nn.Parameter(one.detach().to(dtype), one.requires_grad) for one in plain if one.dtype != dtype}
    return copy.deepcopy(module, cast).to(dtype)


def run_alone(module: nn.Module, inputs: Mapping[str, Any], rests: bool = True, grad: bool = False) -> Any:
    """Run a module by itself on inputs that are named by its parameters; with `rests`, without the hooks on it."""
    left = dict(inputs)
    positional: list[Any] = []
    for name, parameter in inspect.signature(type(module).forward).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and name in left:
            positional.append(left.pop(name))
        elif parameter.kind is parameter.VAR_POSITIONAL and left.get(name):
            before = [one for one in inspect.signature(type(module).forward).parameters if one in left]
            positional += [left.pop(one) for one in before[: before.index(name)]]
            positional += left.pop(name)
    with torch.set_grad_enabled(grad), resting() if rests else nullcontext():
        return module(*positional, **left)
