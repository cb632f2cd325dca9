"""How far one value is from another, over all elements of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._kernel import leaves, map_tensors

Convert = Callable[[Tensor], Tensor]  # Changes the layout of a tensor of a into that of b, or back.


class Apart(NamedTuple):
    """How far a value of b is from that of a.

    `largest` and `mean` are absolute, `relative` is the norm of the difference as a share of the norm of a, `sqnr` is
    the same in decibels, `exact` is the share of elements that are equal bit for bit.
    """

    largest: float
    mean: float
    relative: float
    cosine: float
    sqnr: float
    exact: float

    @property
    def is_none(self) -> bool:
        """Whether the two are equal."""
        return self.largest == 0


NOTHING_APART = Apart(0.0, 0.0, 0.0, 1.0, math.inf, 1.0)


class OtherShape(Exception):
    """Two values can't be compared: one has other tensors, or other shapes."""


@torch.no_grad()
def apart(value: Any, other: Any) -> Apart:
    """Return how far `other` is from `value`. Raises `OtherShape` if they can't be compared."""
    ours, theirs = tensors_of(value), tensors_of(other)
    if len(ours) != len(theirs) and ours and theirs:
        ours, theirs = ours[:1], theirs[:1]  # The first is the main one, as the hidden states before a cache.
    pairs = list(zip(ours, theirs, strict=False))
    for one, two in pairs:
        if [size for size in one.shape if size != 1] != [size for size in two.shape if size != 1]:
            raise OtherShape(f"{tuple(one.shape)} and {tuple(two.shape)}")
    if not pairs:
        raise OtherShape("one has no tensors")
    return _of_flat(*(torch.cat([_flat(pair[side]) for pair in pairs]) for side in (0, 1)))


def in_one_layout(ours: Any, theirs: Any, to_b: Convert | None, to_a: Convert | None) -> tuple[Any, Any]:
    """Return a value of a and one of b in one layout: b's is changed into that of a, or else a's into that of b."""
    if to_a is not None:
        return ours, map_tensors(_where(to_a), theirs)
    shapes = [[tensor.shape for tensor in tensors_of(value)] for value in (ours, theirs)]
    if to_b is not None and shapes[0] != shapes[1]:
        return map_tensors(_where(to_b), ours), theirs
    return ours, theirs


def _where(convert: Convert) -> Convert:
    return lambda tensor: convert(tensor) if tensor.dim() > 1 else tensor


@torch.no_grad()
def where_apart(value: Any, other: Any) -> str:
    """Say at which element two values differ most, and what it is in both."""
    for one, two in zip(tensors_of(value), tensors_of(other), strict=False):
        if one.shape == two.shape and not torch.equal(one, two.to(one)):
            flat = _flat(one), _flat(two)
            place = int((flat[0] - flat[1]).abs().nan_to_num(math.inf).argmax())
            index = ", ".join(str(int(position)) for position in torch.unravel_index(torch.tensor(place), one.shape))
            return f"at [{index}] a has {flat[0][place].item():.6g} and b {flat[1][place].item():.6g}"
    return ""


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value that hold real numbers."""
    return [tensor.detach() for tensor in leaves(value) if not tensor.is_complex() and tensor.numel()]


def largest_element(value: Any) -> float:
    """Return the largest finite element of a value."""
    found = [_flat(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max().item() for tensor in tensors_of(value)]
    return max(found, default=0.0)


def worst(found: Sequence[Apart]) -> Apart:
    """Return the largest of several."""
    return max(found, key=lambda one: one.largest if not math.isnan(one.largest) else math.inf)


def _of_flat(one: Tensor, two: Tensor) -> Apart:
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0.0, one - two)  # Two infinities are not NaN apart.
    largest = difference.abs().max().item()
    if largest == 0:
        return NOTHING_APART
    first = one.nan_to_num(0.0, 0.0, 0.0)
    norm, size = difference.norm().item(), first.norm().item()
    relative = norm / size if size else math.inf
    cosine = torch.nn.functional.cosine_similarity(first, two.nan_to_num(0.0, 0.0, 0.0), 0).item()
    sqnr = -20 * math.log10(relative) if 0 < relative < math.inf else -math.inf
    mean, exact = difference.abs().mean().item(), same.double().mean().item()
    largest = math.inf if math.isnan(largest) else largest
    return Apart(largest, mean, relative, cosine, sqnr, exact)


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    flat = tensor.to("cpu", torch.float64).reshape(-1)
    # The smallest number of a dtype stands for -inf in masks, and hides all other numbers beside it.
    return (
        flat.masked_fill(flat <= torch.finfo(tensor.dtype).min / 2, -math.inf) if tensor.is_floating_point() else flat
    )
