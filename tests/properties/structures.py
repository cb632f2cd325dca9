"""Functions for nested values, for the oracle. They share no code with the library under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.properties.containers import KeyValues, State
from tests.properties.modules import Pair, Result

MUTABLE = (list, dict, Result, State, KeyValues)
CONTAINERS = (tuple, *MUTABLE)


def parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys and parts of a container, or [] for any other value."""
    if isinstance(value, Pair):
        return [("first", value.first), ("second", value.second)]
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, Result):
        return [("hidden", value.hidden), ("extra", value.extra), ("label", value.label)]
    if isinstance(value, (State, KeyValues)):
        return list(vars(value).items())
    return []


def like(value: Any, items: list[Any]) -> Any:
    """Return a container like `value` that holds `items`."""
    if isinstance(value, (Pair, Result, State, KeyValues)):
        return type(value)(*items)
    if isinstance(value, dict):
        return type(value)(zip(value, items, strict=True))
    return type(value)(items)


def each(function: Callable[[Tensor], Any], value: Any, other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return `value` with `function` applied to each tensor and `other` to each other leaf."""
    if isinstance(value, Tensor):
        return function(value)
    inside = parts(value)
    if not isinstance(value, CONTAINERS):
        return other(value)
    return like(value, [each(function, part, other) for _, part in inside])


def flat(value: Any) -> list[Any]:
    """Return every leaf."""
    inside = parts(value)
    return [leaf for _, part in inside for leaf in flat(part)] if inside else [value]


def copied(value: Any) -> Any:
    """Return a copy that later writes can't change."""
    return each(lambda tensor: tensor.detach().clone(), value)


def at(value: Any, keys: tuple[Any, ...]) -> Any:
    """Return the part of nested containers at `keys`."""
    for key in keys:
        value = dict(parts(value))[key]
    return value


def replaced(value: Any, keys: tuple[Any, ...], new: Any) -> Any:
    """Return `value` with `new` at `keys`; every container on the way is copied."""
    if not keys:
        return new
    return like(value, [replaced(part, keys[1:], new) if key == keys[0] else part for key, part in parts(value)])


def picked(tensor: Tensor, indices: tuple[Any, ...]) -> Tensor:
    """Return the part of a tensor that a row of subscripts names."""
    for index in indices:
        tensor = tensor[index]
    return tensor


def written(tensor: Tensor, indices: tuple[Any, ...], new: Any) -> Tensor:
    """Return a copy of a tensor with `new` in the part that a row of subscripts names."""
    if not indices:
        return new
    result = tensor.clone()
    part = result
    for index in indices[:-1]:
        part = part[index]
    part[indices[-1]] = new
    return result


def paths(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every part at every depth with its keys, the value itself first."""
    yield keys, value
    for key, part in parts(value):
        yield from paths(part, (*keys, key))


def difference(one: Any, other: Any, tolerance: float = 0.0) -> str:
    """Return how two nested values differ, or ""."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return tensor_difference(one, other, tolerance)
    if type(one) is not type(other):
        return f"{_short(one)} is not {_short(other)}"
    mine, theirs = parts(one), parts(other)
    if not mine and not theirs:
        return "" if one == other else f"{_short(one)} is not {_short(other)}"
    if [key for key, _ in mine] != [key for key, _ in theirs]:
        return f"keys {[key for key, _ in mine]} are not {[key for key, _ in theirs]}"
    for (key, part), (_, other_part) in zip(mine, theirs, strict=True):
        found = difference(part, other_part, tolerance)
        if found:
            return f"[{key!r}] {found}"
    return ""


def tensor_difference(one: Tensor, other: Tensor, tolerance: float) -> str:
    """Return how two tensors differ, or ""; without a tolerance they must be exactly equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {tuple(one.shape)} is not {other.dtype} {tuple(other.shape)}"
    one, other = one.detach(), other.detach()
    if torch.equal(one, other) or (tolerance and torch.allclose(one, other, tolerance, tolerance, equal_nan=True)):
        return ""
    if one.is_floating_point() and torch.allclose(one, other, 0.0, 0.0, equal_nan=True):
        return ""
    gap = (one.double() - other.double()).abs().max().item()
    return f"values differ by up to {gap:.3g}"


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
