"""What a model is between runs: its attributes, hooks, parameters and buffers, and the random numbers; to put back."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookline.copies import share_for_now
from hookline.tree import Names, is_scripted
from hookline.trial import snapshot
from hookline.values import ATOMS, leaves

Key = tuple[str, str]  # The path of a module, and what of it.


class State:
    """What a model was when this was made. `restore` puts it back, `leftovers` tells what is different."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, module) for path, module in Names(model).once() if not is_scripted(module)]
        seen: set[int] = set()
        self._put_back = [snapshot(module, seen) for _, module in self._modules]
        self._held = [dict(module.__dict__) for _, module in self._modules]  # So that no id is given away again.
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self._tensors = [(tensor, share_for_now(tensor.detach())) for _, tensor in self._named_tensors()]
        self._random = _random_numbers()
        self._before = self.read()

    def restore(self) -> None:
        """Put everything back; gradients are empty until `close`."""
        for put_back in self._put_back:
            put_back()
        with torch.no_grad():
            for tensor, before in self._tensors:
                if not is_same(tensor, before):
                    tensor.copy_(before)
        for parameter, _ in self._gradients:
            parameter.grad = None
        _set_random_numbers(self._random)

    def close(self) -> None:
        """Put everything back, gradients too."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def read(self) -> dict[Key, Any]:
        """Return what can be compared: tensors by their numbers, anything else by what it is."""
        found: dict[Key, Any] = {}
        for path, module in self._modules:
            found[path, "its class"] = type(module)
            found |= {(path, f"{name!r}"): _token(value) for name, value in module.__dict__.items()}
        for (path, name), tensor in self._named_tensors():
            found[path, f"the numbers of {name!r}"] = share_for_now(tensor.detach())
            found[path, f"the gradient of {name!r}"] = id(tensor.grad) if tensor.is_leaf else 0
        return found | {("", f"the random numbers {kind}"): state for kind, state in _random_numbers().items()}

    def leftovers(self, bare: Mapping[Key, Any] | None = None) -> Iterator[Key]:
        """Yield what is not as it was, or not as a bare run left it; what changes by itself in one is no matter."""
        before, now = self._before, self.read()
        reference = before if bare is None else bare
        for key in {**reference, **now}:
            mine, other = now.get(key), reference.get(key)
            if _is_equal(mine, other):
                continue
            changes_by_itself = not isinstance(mine, Tensor) and not _is_equal(other, before.get(key))
            if bare is None or not changes_by_itself:
                yield key

    def _named_tensors(self) -> Iterator[tuple[Key, Tensor]]:
        seen: set[int] = set()
        for path, module in self._modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (path, name), tensor


@contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Give the random numbers back that are drawn meanwhile."""
    before = _random_numbers()
    try:
        yield
    finally:
        _set_random_numbers(before)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values hold the same tensors, bit by bit."""
    ones, others = leaves(one), leaves(other)
    return len(ones) == len(others) and all(map(_are_same, ones, others))


def _are_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if torch.equal(one, other):
        return True
    has_nan = one.is_floating_point() or one.is_complex()
    return has_nan and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _token(value: Any) -> Any:
    if isinstance(value, (dict, OrderedDict)):
        return tuple((key, id(part)) for key, part in value.items())
    if isinstance(value, (list, tuple, set, deque)):
        return tuple(map(id, value))
    return value if isinstance(value, ATOMS) else id(value)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and is_same(one, other)
    return type(one) is type(other) and bool(one == other)


def _random_numbers() -> dict[str, Any]:
    found: dict[str, Any] = {"of torch": torch.get_rng_state(), "of Python": random.getstate()}
    if torch.cuda.is_initialized():
        found |= {f"of cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    if "numpy" in sys.modules:
        name, numbers, *rest = sys.modules["numpy"].random.get_state()
        found["of numpy"] = (name, tuple(numbers.tolist()), *rest)  # Arrays can't be compared as one.
    return found


def _set_random_numbers(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["of torch"])
    random.setstate(states["of Python"])
    if "of numpy" in states:
        sys.modules["numpy"].random.set_state(states["of numpy"])
    for kind, state in states.items():
        if kind.startswith("of cuda:"):
            torch.cuda.set_rng_state(state, int(kind.partition(":")[2]))
