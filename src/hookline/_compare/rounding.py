"""How far rounding alone may take a module from its counterpart: measured by running it once more in another dtype."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hookline._compare.apart import OtherShape, apart, largest_element
from hookline._compare.recording import Recording
from hookline._kernel import leaves, map_tensors, resting, unwrap

_MARGIN = 4  # Two ways to compute the same may round this many times as far as one and its version in another dtype.
_FREE = 8  # This many units in the last place of the largest element need no explanation.


def dtype_of_model(model: nn.Module) -> torch.dtype:
    """Return the dtype that most parameters of a model have."""
    return _most((one.dtype, one.numel()) for one in (*model.parameters(), *model.buffers())) or torch.get_default_dtype()


def dtype_of_run(model: nn.Module, ran: Recording) -> torch.dtype:
    """Return the coarser of the dtype that a model has, and that in which its matrices gave their results.

    Under autocast, the second is not that of the parameters.
    """
    calls = [call for calls in ran.calls.values() for call in calls if isinstance(call.output, Tensor)]
    given = [any(one.is_floating_point() for one in leaves(call.inputs)) for call in calls]  # Embeddings only look up.
    matrices = [sum(one.numel() for one in call.module.parameters(recurse=False) if one.dim() > 1) for call in calls]
    sizes = zip(calls, given, matrices, strict=True)
    computed = _most((call.output.dtype, size) for call, computes, size in sizes if computes and size)
    return max((dtype_of_model(model), computed or dtype_of_model(model)), key=_eps)


def _most(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype | None:
    """Return the dtype of floating-point numbers that most elements have."""
    total = Counter[torch.dtype]()
    for dtype, size in sizes:
        if dtype.is_floating_point:
            total[dtype] += size
    return max(total, key=lambda dtype: total[dtype], default=None)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


class Rounding:
    """What rounding explains in the comparison of two models."""

    def __init__(self, of_a: torch.dtype, of_b: torch.dtype, tolerance: float | None) -> None:
        self.eps = max(_eps(of_a), _eps(of_b))
        # What a module does in the dtype of the other model shows what that dtype explains; if both have the same one,
        # how far it is from exact shows what its own explains.
        self.other = of_b if of_a != of_b else torch.float64
        self.for_b = of_a if of_a != of_b else torch.float64  # The same for a module of b.
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
