"""Copies of one batch side by side in a larger batch: repeat values, find the rows of each copy, compare them.

A *copy* is the batch of one run. With 4 copies of a batch of 2, a tensor of shape (2, 5) becomes one of shape (8, 5),
in which copy 1 has the rows 2 and 3. The dimension that counts rows may be another one than the first, and some
tensors have none, such as the positions of tokens. `row_dims` finds it from a run with one copy and one with two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._kernel import children, leaves, map_tensors, object_parts, rebuild

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# For each tensor of a value, the dimension that counts rows; None if there is none. MIXED: it depends on other rows.
Dims = list[int | None]
MIXED = -1
_ALIKE = 0.1  # The largest difference between copies that may be rounding, as a share of their size.
_SAMPLE = 4096  # So many elements show the usual size.


class NotCopies(Exception):
    """A value does not consist of copies side by side."""


def rows_given(arguments: Arguments, dim: int) -> int | None:
    """Return how many rows the first tensor among the arguments of a model has; None if there is none."""
    return next((tensor.shape[dim] for tensor in leaves(arguments) if tensor.dim() > dim), None)


def repeat_arguments(arguments: Arguments, copies: int, dim: int = 0) -> Arguments:
    """Return the arguments of a run with several copies. Objects such as key-value caches are new in each run."""
    rows = rows_given(arguments, dim)

    def repeat(tensor: Tensor) -> Tensor:
        has_rows = copies > 1 and tensor.dim() > dim and tensor.shape[dim] == rows
        return _repeat(tensor, copies, dim) if has_rows else tensor.clone()

    repeated: Arguments = map_tensors(repeat, arguments, in_objects=True)
    return repeated


def repeat_value(value: Any, dims: Dims, copies: int) -> Any:
    """Return a value of a run with one copy as it is in a run with several."""
    own = iter(dims)

    def repeat(tensor: Tensor) -> Tensor:
        dim = next(own)
        return tensor if dim is None else _repeat(tensor, copies, dim)

    return _map(repeat, value)


def rows_of(value: Any, dims: Dims, copy: int, copies: int) -> Any:
    """Return the rows of one copy."""
    own = iter(dims)

    def take(tensor: Tensor) -> Tensor:
        dim = next(own)
        return tensor if dim is None else _take(tensor, dim, copy, copies)

    return _map(take, value)


class NotOfOneCopy(Exception):
    """Something was read that belongs to all copies of a batch together."""


class Unreadable:
    """Stands for a part of an output that can't be cut into copies, such as a loss. Whatever reads it raises."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotOfOneCopy(self.name)

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be an argument of a torch function."""
        given = [*args, *(kwargs or {}).values()]
        given += [one for held in given if isinstance(held, (list, tuple)) for one in held]
        raise NotOfOneCopy(next((one.name for one in given if isinstance(one, Unreadable)), "a part of the output"))


def _refuse(self: Unreadable, *_: object) -> Any:
    raise NotOfOneCopy(self.name)


_READING = """float int bool len iter getitem index format str repr lt le gt ge neg abs add radd sub rsub mul rmul
truediv rtruediv pow rpow array"""
for _name in _READING.split():
    setattr(Unreadable, f"__{_name}__", _refuse)


def cuttable(value: Any, base: Any, dims: Dims) -> tuple[Any, Dims]:
    """Return a value in which `Unreadable` stands for all that can't be cut, and the dimensions of the other tensors.

    That is what is MIXED, arrays, objects that hold tensors, and numbers that are others in `base`.
    """
    own, left = iter(dims), list[int | None]()

    def cut(part: Any, before: Any, name: str) -> Any:
        if isinstance(part, Tensor):
            dim = next(own)
            if dim == MIXED:
                return Unreadable(name)
            left.append(dim)
            return part
        parts = children(part)
        if parts is None:
            is_other = isinstance(part, (int, float)) and part != before
            has_more = object_parts(part) is not None or hasattr(part, "__array__")
            return Unreadable(name) if is_other or has_more else part
        others = children(before) or {}
        new = {key: cut(one, others.get(key), _name_of(key)) for key, one in parts.items()}
        return part if all(new[key] is one for key, one in parts.items()) else rebuild(part, new)

    return cut(value, base, "the output"), left


def row_dims(one: Any, two: Any, by_value: bool = True) -> Dims:
    """Return the dimension of each tensor that counts rows, given a value in runs with one and with two copies.

    Raises `NotCopies` if the value with two copies is not twice the value with one; without `by_value`, only if its
    shapes are not.
    """
    tensors, doubled = list(tensors_of(one)), list(tensors_of(two))
    if len(tensors) != len(doubled):
        raise NotCopies
    dims = [_row_dim(tensor, other) for tensor, other in zip(tensors, doubled, strict=True)]
    for copy in (0, 1) if by_value else ():
        if any(apart.share() > _ALIKE for apart in differences(rows_of(two, dims, copy, 2), one)):
            raise NotCopies
    return dims


class Difference(NamedTuple):
    """How far two tensors are apart: the largest difference of two elements, as a share of their size."""

    largest: Tensor | float  # It stays on its device until `share` is asked for.

    def share(self) -> float:
        """Return it as a number."""
        return float(self.largest)


def differences(value: Any, other: Any) -> list[Difference]:
    """Return how far the tensors of two values are apart."""
    pairs = zip(tensors_of(value), tensors_of(other), strict=True)
    return [difference(one.detach(), two.detach()) for one, two in pairs]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, but not those in other objects, such as key-value caches."""
    if isinstance(value, Tensor):
        yield value
        return
    for part in (children(value) or {}).values():
        yield from tensors_of(part)


def _name_of(key: Any) -> str:
    return repr(key) if isinstance(key, str) else f"item {key}"


def _map(function: Any, value: Any) -> Any:
    """Return a value with a function applied to what `tensors_of` yields, in that order."""
    if isinstance(value, Tensor):
        return function(value)
    parts = children(value)
    return rebuild(value, {key: _map(function, part) for key, part in parts.items()}) if parts else value


def _repeat(tensor: Tensor, copies: int, dim: int) -> Tensor:
    times = [1] * tensor.dim()
    times[dim] = copies
    return tensor.repeat(times)


def _take(tensor: Tensor, dim: int, copy: int, copies: int) -> Tensor:
    size = tensor.shape[dim] // copies
    return tensor.narrow(dim, copy * size, size)


def _row_dim(one: Tensor, two: Tensor) -> int | None:
    if one.dim() != two.dim() or one.layout is not torch.strided or two.layout is not torch.strided:
        raise NotCopies
    sizes = list(zip(one.shape, two.shape, strict=True))
    changed = [dim for dim, (size, other) in enumerate(sizes) if size != other]
    if not changed:
        return None
    if len(changed) > 1 or two.shape[changed[0]] != 2 * one.shape[changed[0]]:
        raise NotCopies
    return changed[0]


def difference(one: Tensor, two: Tensor) -> Difference:
    """Return how far two tensors are apart."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return Difference(float("inf"))
    if not one.numel():
        return Difference(0.0)
    if not (one.is_floating_point() or one.is_complex()):
        return Difference((one != two).any().float())
    # Equal elements are 0 apart, also if they are infinite or NaN, as in the masks of attention.
    alike = (one == two) | (one.isnan() & two.isnan())
    apart = (one - two).abs().masked_fill(alike, 0)
    size = two.abs()
    # One element may be very large, as a masked logit is, so each is compared with its own size and a usual one.
    share = apart / (size + _usual(size)).clamp_min(torch.finfo(size.dtype).tiny)
    return Difference(share.nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(alike, 0).max())


def _usual(sizes: Tensor) -> Tensor:
    """Return the median of the sizes that are finite and not 0, in a sample; 0 if there are none."""
    flat = sizes.reshape(-1)
    some = flat[:: max(1, len(flat) // _SAMPLE)].float()
    return some.where((some > 0) & some.isfinite(), torch.nan).nanmedian().nan_to_num(0.0).to(sizes.dtype)
