"""How far rounding alone may take a module from its counterpart: measured by running it once more in another dtype."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline._compare.apart import COARSE, SMALL, Apart, MeasuredPart, OtherShape, difference
from hookline._compare.random_numbers import RandomState, random_numbers
from hookline._compare.recording import ModuleCall, Recording
from hookline._kernel import leaves, map_tensors, resting, unwrap

_MARGIN = 8  # Two ways to compute the same may round this many times as far as one and its version in another dtype;
_MARGIN_IF_COARSE = 2  # in half precision, this many times, as a share of the whole: there faults can be as small.
_MOST = 0.25  # No larger share of an output is rounding, unless it was measured.
_FREE = 8  # This many units in the last place of the largest element need no explanation.
_FREE_SHARE = 2  # Nor does an error that is this many units in the last place as a share of the whole.
_RELATED = 0.5  # In another dtype, a module whose output is further off than this share does something else.


class Limit(NamedTuple):
    """The largest error of a tensor that is explained: of an element, and of the whole as a share of its norm."""

    largest: float = 0.0
    relative: float = 0.0

    def times(self, factor: float) -> Limit:
        """Return a limit that is so many times as large."""
        return Limit(self.largest * factor, self.relative * factor)

    def larger(self, other: Limit) -> Limit:
        """Return the larger of two limits."""
        return Limit(max(self.largest, other.largest), max(self.relative, other.relative))

    def covers(self, error: Apart) -> bool:
        """Return True if an error is no larger."""
        return error.is_none or (error.largest <= self.largest and error.relative <= self.relative)


NO_ERROR = Limit()


def uncovered(parts: Mapping[str, MeasuredPart], limits: Mapping[str, Limit]) -> str | None:
    """Return the part of a value that has the largest error which is not explained; None if all are."""
    off = [name for name, part in parts.items() if not limits.get(name, NO_ERROR).covers(part.error)]
    return max(off, key=lambda name: parts[name].error.relative, default=None)


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

    @property
    def share(self) -> float:
        """The error of a small module that needs no explanation, as a share of the whole."""
        return _FREE_SHARE * self.eps

    def free(self, parts: Mapping[str, MeasuredPart]) -> dict[str, Limit]:
        """Return the errors of the parts of an output that need no explanation."""
        if self.tolerance is not None:
            return {name: Limit(self.tolerance * part.largest_of_all, math.inf) for name, part in parts.items()}
        return {name: Limit(_FREE * self.eps * part.largest, self.share) for name, part in parts.items()}

    def with_explained(
        self, parts: Mapping[str, MeasuredPart], explained: Mapping[str, MeasuredPart]
    ) -> dict[str, Limit]:
        """Return the largest errors of the parts of an output if rounding inside is known to make such errors."""
        free = self.free(parts)
        if self.tolerance is not None:
            return free
        margin = _MARGIN if self.eps < COARSE else _MARGIN_IF_COARSE
        limits = {}
        for name in free:
            if name in explained:
                error = explained[name].error
                limits[name] = Limit(_MARGIN * error.largest, min(margin * error.relative, max(_MOST, error.relative)))
            elif name.removesuffix(SMALL) in explained:  # Small ones have the errors that all have.
                limits[name] = Limit(_MARGIN * explained[name.removesuffix(SMALL)].error.largest, math.inf)
        return {name: limit.larger(limits.get(name, limit)) for name, limit in free.items()}

    def measured(self, call: ModuleCall, parts: Mapping[str, MeasuredPart]) -> dict[str, Limit]:
        """Return the largest errors that rounding may make in the parts of the output of a call."""
        if self.tolerance is not None:
            return self.free(parts)
        again = run_in(call, self.other)
        if again is not None:
            with suppress(OtherShape):
                found = difference(call.output, again)
                if found.whole.relative <= _RELATED:
                    return self.with_explained(parts, found.parts)
        more = (1 + sum(1 for _ in call.module.modules())) ** 0.5
        return {name: limit.times(more) for name, limit in self.free(parts).items()}


def run_in(call: ModuleCall, dtype: torch.dtype) -> Any:
    """Run a copy of a module in a dtype on what it got in a call. Return None if it can't be."""
    try:
        return run_alone(copied(call.module, dtype), cast(call.inputs, dtype), random=call.random)
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


def run_alone(
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    random: RandomState | None = None,
    rests: bool = True,
    grad: bool = False,
) -> Any:
    """Run a module by itself on inputs that are named by its parameters.

    Args:
        module: The module.
        inputs: What it is called with.
        random: The state of the random numbers; by default, that of seed 0.
        rests: Whether the hooks on the module rest.
        grad: Whether a graph is recorded.
    """
    left = dict(inputs)
    positional: list[Any] = []
    for name, parameter in inspect.signature(type(module).forward).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and name in left:
            positional.append(left.pop(name))
        elif parameter.kind is parameter.VAR_POSITIONAL and left.get(name):
            before = [one for one in inspect.signature(type(module).forward).parameters if one in left]
            positional += [left.pop(one) for one in before[: before.index(name)]]
            positional += left.pop(name)
    with random_numbers(random), torch.set_grad_enabled(grad), resting() if rests else nullcontext():
        return module(*positional, **left)
