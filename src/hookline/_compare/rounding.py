"""How far rounding alone may take a module from its counterpart: measured by running it once more in another dtype."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline._compare.apart import Apart, OtherShape, difference, largest_element, tensors_of
from hookline._compare.recording import Recording
from hookline._kernel import leaves, map_tensors, resting, unwrap

_MARGIN = 4  # Two ways to compute the same may round this many times as far as one and its version in another dtype.
_FREE = 8  # This many units in the last place of the largest element need no explanation.
_FREE_SHARE = 2  # Nor does an error that is this many units in the last place as a share of the whole.
_RELATED = 0.5  # In another dtype, a module whose output is further off than this share does something else.
_FEW = 16  # In so many modules, rounding does not add up to more than that.


class Limit(NamedTuple):
    """The largest error of a tensor that is explained: of an element, and of the whole as a share of its norm."""

    largest: float = 0.0
    relative: float = 0.0

    def covers(self, error: Apart) -> bool:
        """Return True if an error is no larger."""
        return error.is_none or (error.largest <= self.largest and error.relative <= self.relative)


NO_ERROR = Limit()


def uncovered(errors: Sequence[Apart], limits: Sequence[Limit]) -> int | None:
    """Return which of the tensors of a value has the largest error that is not explained; None if all are."""
    off = [place for place, (error, limit) in enumerate(zip(errors, limits, strict=False)) if not limit.covers(error)]
    return max(off, key=lambda place: errors[place].relative, default=None)


def dtype_of_model(model: nn.Module) -> torch.dtype:
    """Return the dtype that most parameters of a model have."""
    return (
        _most((one.dtype, one.numel()) for one in (*model.parameters(), *model.buffers())) or torch.get_default_dtype()
    )


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

    def free(self, output: Any, modules: int = 1) -> list[Limit]:
        """Return the errors of the tensors of an output that need no explanation, if so many modules computed it."""
        sizes = [largest_element(tensor) for tensor in tensors_of(output)]
        if self.tolerance is not None:
            return [Limit(self.tolerance * size, math.inf) for size in sizes]
        share = _FREE_SHARE * self.eps * max(1.0, modules / _FEW) ** 0.5
        return [Limit(_FREE * self.eps * size, share) for size in sizes]

    def with_explained(self, output: Any, explained: Sequence[Apart], modules: int = 1) -> list[Limit]:
        """Return the largest errors of an output if rounding inside is known to make such errors."""
        free = self.free(output, modules)
        if self.tolerance is not None or len(explained) != len(free):
            return free
        return [
            Limit(max(limit.largest, _MARGIN * error.largest), max(limit.relative, _MARGIN * error.relative))
            for limit, error in zip(free, explained, strict=True)
        ]

    def measured(self, module: nn.Module, inputs: Mapping[str, Any], output: Any) -> list[Limit]:
        """Return the largest errors of a module's output that rounding may make."""
        modules = sum(1 for _ in module.modules())
        again = run_in(module, inputs, self.other) if self.tolerance is None else None
        if again is not None:
            with suppress(OtherShape):
                found = difference(output, again)
                if found.whole.relative <= _RELATED:
                    return self.with_explained(output, found.each, modules)
        free = self.free(output, modules)
        more = (1 + modules) ** 0.5 if self.tolerance is None else 1
        return [Limit(limit.largest * more, limit.relative * more) for limit in free]


def run_in(module: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Run a copy of a module in a dtype. Return None if it can't be."""
    try:
        return run_alone(copied(module, dtype), cast(inputs, dtype))
    except Exception:  # For example, one of its kernels knows no float64.
        return None


def cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return copies of inputs, those of floating-point numbers in a dtype."""

    def of_one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()

    return map_tensors(of_one, dict(inputs), in_objects=True)


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
