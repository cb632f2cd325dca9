"""How far one value is from another, over all elements of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._kernel import leaves, map_tensors
from hookline._plot.plot_data import dense

_PIECE = 1 << 20  # Elements that are compared at a time: copies of them in float64 take little memory.
_PIECE_ON_GPU = 1 << 24

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


class Difference(NamedTuple):
    """How far a value is from another: all of it, and each of its tensors."""

    whole: Apart
    each: tuple[Apart, ...]


@torch.no_grad()
def difference(value: Any, other: Any) -> Difference:
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
    if all(are_equal(*pair) for pair in pairs):
        return Difference(NOTHING_APART, (NOTHING_APART,) * len(pairs))
    found = [[_sums(*piece) for piece in _pieces(*pair)] for pair in pairs]
    return Difference(_of_sums([one for sums in found for one in sums]), tuple(map(_of_sums, found)))


def apart(value: Any, other: Any) -> Apart:
    """Return how far all of `other` is from `value`."""
    return difference(value, other).whole


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
        if one.shape == two.shape and not are_equal(one, two):
            flat = _flat(one), _flat(two.to(one.device))
            place = int((flat[0] - flat[1]).abs().nan_to_num(math.inf).argmax())
            index = ", ".join(str(int(position)) for position in torch.unravel_index(torch.tensor(place), one.shape))
            return f"at [{index}] a has {flat[0][place].item():.6g} and b {flat[1][place].item():.6g}"
    return ""


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value that have elements; of complex ones the real and imaginary parts."""
    tensors = [dense(tensor, complex_as_size=False) for tensor in leaves(value)]
    return [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in tensors if one.numel()]


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on its own device if that knows float64."""
    return tensor.to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)


def are_equal(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors hold the same numbers in the same dtype: a quick look before they are measured."""
    if one.dtype != two.dtype or one.device != two.device or one.numel() != two.numel() or not _has_quick_tests(one):
        return False
    return torch.equal(one.reshape(-1), two.reshape(-1))


def _has_quick_tests(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize > 1 or not tensor.is_floating_point()  # torch can't compare numbers in 8 bits.


@torch.no_grad()
def largest_element(value: Any) -> float:
    """Return the largest finite element of a value."""
    return max((_largest(tensor) for tensor in tensors_of(value)), default=0.0)


def _largest(tensor: Tensor) -> float:
    if _has_quick_tests(tensor):
        low, high = (float(end) for end in tensor.aminmax())
        if max(-low, high) < _limit(tensor):
            return max(-low, high)
    return max(part.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for part in _parts(tensor))


@torch.no_grad()
def largest_difference(one: Tensor, two: Tensor) -> float:
    """Return the largest difference between elements of two tensors of one shape."""
    return max(((ours - theirs).abs().max().item() for ours, theirs in _pieces(one, two)), default=0.0)


@torch.no_grad()
def sums(tensor: Tensor) -> tuple[float, float]:
    """Return the sum of the elements of a tensor, and that of their sizes."""
    found = [torch.stack([part.sum(), part.abs().sum()]) for part in _parts(tensor)]
    total, absolute = torch.stack(found).sum(0).tolist()
    return total, absolute


def worst(found: Sequence[Apart]) -> int:
    """Return which of several is the largest, as a share of the value."""
    return max(range(len(found)), key=lambda place: found[place].relative)


def _pieces(one: Tensor, two: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the elements of two tensors in float64, on one device, a part at a time."""
    return zip(_parts(one), _parts(two.to(one.device)), strict=True)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    return map(_masked, tensor.reshape(-1).split(_PIECE_ON_GPU if tensor.is_cuda else _PIECE))


def _flat(tensor: Tensor) -> Tensor:
    return _masked(tensor.reshape(-1))


def _masked(flat: Tensor) -> Tensor:
    """Return elements in float64. The smallest number of a dtype stands for -inf in masks, and hides all others."""
    numbers = exact(flat)
    is_plain = not flat.is_floating_point() or bool(numbers.amin() > -_limit(flat))
    return numbers if is_plain else numbers.masked_fill(numbers <= -_limit(flat), -math.inf)


def _limit(tensor: Tensor) -> float:
    """Return the number from which the elements of a tensor count as infinite."""
    return torch.finfo(tensor.dtype).max / 2 if tensor.is_floating_point() else math.inf


def _sums(one: Tensor, two: Tensor) -> list[float]:
    """Return what the measures are made of: the largest difference, and sums over the elements."""
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0.0, one - two)  # Two infinities are not NaN apart.
    size = difference.abs()
    mine, yours = one.nan_to_num(0.0, 0.0, 0.0), two.nan_to_num(0.0, 0.0, 0.0)
    products = difference.dot(difference), mine.dot(mine), yours.dot(yours), mine.dot(yours)
    count = size.new_tensor(len(same))
    found: list[float] = torch.stack([size.max(), size.sum(), *products, same.sum(), count]).tolist()
    return found


def _of_sums(found: Sequence[Sequence[float]]) -> Apart:
    largest = max(math.inf if math.isnan(one[0]) else one[0] for one in found)
    if largest == 0:
        return NOTHING_APART
    total, difference, mine, yours, both, same, count = (sum(column) for column in list(zip(*found, strict=True))[1:])
    relative = math.sqrt(difference / mine) if mine and not math.isnan(difference) else math.inf
    cosine = both / math.sqrt(mine * yours) if mine and yours else 0.0
    sqnr = -20 * math.log10(relative) if 0 < relative < math.inf else -math.inf
    return Apart(largest, total / count, relative, cosine, sqnr, same / count)
