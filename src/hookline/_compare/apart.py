"""How far one value is from another, over all elements of its tensors.

A few elements may dwarf all others, as -1e9 in a mask does, or one channel of a residual stream. Then an error of the
others is small beside the whole, and so the others are also measured by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._compare.paired_values import Paired, tensors_of
from hookline._kernel import map_tensors

_PIECE = 1 << 20  # Elements that are compared at a time: copies of them in float64 take little memory.
_PIECE_ON_GPU = 1 << 22
_DWARFS = 4096  # An element so many times as large as the median, or as those of another channel, dwarfs the others;
_DWARFS_IF_COARSE = 64  # in half precision, so many times.
COARSE = 1e-4  # The unit in the last place of half precision is larger than this.
_SAMPLE = 4096  # About so many elements are looked at for the median.
SMALL = " without its largest elements"

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
    """Two values can't be compared: they have no tensors of one shape in the same places."""


class MeasuredPart(NamedTuple):
    """How far one tensor of a value is apart, and its largest element.

    Integers have to be equal: their largest element counts as 0.
    """

    error: Apart
    largest: float
    largest_of_all: float  # If this is about the elements that others dwarf, the largest with those.


class MeasuredValue(NamedTuple):
    """How far a value is from another: all of it, and each of its tensors by place; and what could not be compared."""

    whole: Apart
    parts: dict[str, MeasuredPart]
    odd: list[str]
    besides: list[str]
    reshaped: list[str]
    unequal: list[str]


@torch.no_grad()
def difference(a: Any, b: Any) -> MeasuredValue:
    """Return how far `b` is from `a`. Raises `OtherShape` if nothing in them can be compared."""
    paired = Paired(a, b)
    if not paired.pairs:
        raise OtherShape("; ".join(paired.odd) or "no tensors in it")
    parts: dict[str, MeasuredPart] = {}
    all_sums: list[_Sums] = []
    equal: list[Tensor] = []
    for place, pair in paired.pairs.items():
        if are_equal(*pair):
            parts[place] = MeasuredPart(NOTHING_APART, 0.0, 0.0)
            equal.append(pair.a)
            continue
        sums, of_small = _measured(*pair)
        all_sums += sums
        for name, found in ((place, sums), (f"{place}{SMALL}", of_small)):
            if found:
                is_exact = not pair.a.is_floating_point() and not pair.b.is_floating_point()
                largest = [0.0 if is_exact else max(one.largest for one in one_of) for one_of in (found, sums)]
                parts[name] = MeasuredPart(_of_sums(found), *largest)
    whole = _of_sums([*all_sums, *map(_sums_if_equal, equal)]) if all_sums else NOTHING_APART
    return MeasuredValue(whole, parts, paired.odd, paired.besides, paired.reshaped, paired.unequal)


def apart(a: Any, b: Any) -> Apart:
    """Return how far all of `b` is from `a`."""
    return difference(a, b).whole


def in_one_layout(a: Any, b: Any, to_b: Convert | None, to_a: Convert | None) -> tuple[Any, Any]:
    """Return a value of a and one of b in one layout: b's is changed into that of a, or else a's into that of b."""
    if to_a is not None:
        return a, map_tensors(_where(to_a), b)
    shapes = [[tensor.shape for tensor in tensors_of(value)] for value in (a, b)]
    if to_b is not None and shapes[0] != shapes[1]:
        return map_tensors(_where(to_b), a), b
    return a, b


def _where(convert: Convert) -> Convert:
    """Return a function that changes the layout of matrices, and of vectors if it can."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() > 1:
            return convert(tensor)
        try:
            return convert(tensor) if tensor.dim() else tensor
        except (IndexError, RuntimeError):
            return tensor

    return change


@torch.no_grad()
def where_apart(a: Any, b: Any, part: str) -> str:
    """Say at which element of a part of two values they differ most, and what it is in both."""
    place = part.removesuffix(SMALL)
    pair = Paired(a, b).pairs.get(place)
    if pair is None or are_equal(*pair):
        return ""
    one, two = _flat(pair.a), _flat(pair.b.to(pair.a.device))
    size = torch.where(one == two, 0.0, one - two).abs().nan_to_num(math.inf)
    small = _small(pair.a, pair.b, _largest(pair.a)) if place != part else None
    if small is not None:
        size = size.where(small.reshape(-1), 0.0)
    number = int(size.argmax())
    index = ", ".join(str(int(position)) for position in torch.unravel_index(torch.tensor(number), pair.a.shape))
    where = f"[{index}]" if not place else f"[{index}] of output{place}"
    return f"at {where} a has {one[number].item():.6g} and b {two[number].item():.6g}"


def has_nothing_finite(value: Any) -> bool:
    """Return True if a tensor in a value has no finite number."""
    return any(one.is_floating_point() and not one.isfinite().any() for one in tensors_of(value))


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
    pieces = zip(_parts(one), _parts(two.to(one.device)), strict=True)
    return max((_sums(a, b).apart for a, b in pieces), default=0.0)


@torch.no_grad()
def sums(tensor: Tensor) -> tuple[float, float]:
    """Return the sum of the elements of a tensor, and that of their sizes."""
    found = [torch.stack([part.sum(), part.abs().sum()]) for part in _parts(tensor)]
    total, absolute = torch.stack(found).sum(0).tolist()
    return total, absolute


def worst(found: Sequence[Apart]) -> int:
    """Return which of several is the largest, as a share of the value."""
    return max(range(len(found)), key=lambda place: found[place].relative)


def _measured(a: Tensor, b: Tensor) -> tuple[list[_Sums], list[_Sums]]:
    """Return the sums over the pieces of two tensors; and over the elements that others dwarf, if there are such."""
    b = b.to(a.device)
    all_of_it = [_sums(*piece) for piece in zip(_parts(a), _parts(b), strict=True)]
    small = _small(a, b, max(one.largest for one in all_of_it))
    if small is None:
        return all_of_it, []
    return all_of_it, [_sums(*piece) for piece in zip(_parts(a[small]), _parts(b.reshape(a.shape)[small]), strict=True)]


def _small(tensor: Tensor, other: Tensor, largest: float) -> Tensor | None:
    """Return which elements others dwarf: single large ones, or those of other channels; None if there are none."""
    if not tensor.is_floating_point():
        return None
    flat = tensor.reshape(-1)
    sizes = exact(flat[:: 1 + len(flat) // _SAMPLE]).abs()
    sizes = sizes.where((sizes > 0) & (sizes < _limit(tensor)), torch.nan)
    median = sizes.nanmedian().item()
    is_coarse = max(torch.finfo(one.dtype).eps for one in (tensor, other) if one.is_floating_point()) > COARSE
    dwarfs = _DWARFS_IF_COARSE if is_coarse else _DWARFS
    if dwarfs * median < largest:
        return exact(tensor).abs() <= dwarfs * median
    for dim in (-1, 1) if tensor.dim() > 2 else (-1,) if tensor.dim() == 2 else ():
        channels = exact(tensor).movedim(dim, 0).flatten(1).abs().amax(1)
        is_small = (channels > 0) & (channels < channels.max() / dwarfs)
        if is_small.any():
            return is_small.reshape([-1 if one == dim % tensor.dim() else 1 for one in range(tensor.dim())]).expand_as(
                tensor
            )
    return None


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


class _Sums(NamedTuple):
    """What the measures are made of: the largest difference and element, and sums over the elements."""

    apart: float
    largest: float
    size: float  # Of the differences.
    squares: float  # Of the differences,
    squares_of_a: float
    squares_of_b: float
    products: float
    equal: float
    elements: float


def _sums(one: Tensor, two: Tensor) -> _Sums:
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0.0, one - two)  # Two infinities are not NaN apart.
    size = difference.abs()
    one, two = one.nan_to_num(0.0, 0.0, 0.0), two.nan_to_num(0.0, 0.0, 0.0)
    products = difference.dot(difference), one.dot(one), two.dot(two), one.dot(two)
    count = size.new_tensor(len(same))
    return _Sums(*torch.stack([size.max(), one.abs().max(), size.sum(), *products, same.sum(), count]).tolist())


def _sums_if_equal(tensor: Tensor) -> _Sums:
    """Return the sums for a tensor and its equal."""
    finite = (part.nan_to_num(0.0, 0.0, 0.0) for part in _parts(tensor))
    squares, count = torch.stack([part.dot(part) for part in finite]).sum().item(), float(tensor.numel())
    return _Sums(0.0, 0.0, 0.0, 0.0, squares, squares, squares, count, count)


def _of_sums(found: Sequence[_Sums]) -> Apart:
    largest = max(math.inf if math.isnan(one.apart) else one.apart for one in found)
    if largest == 0:
        return NOTHING_APART
    total = _Sums(*(sum(column) for column in zip(*found, strict=True)))
    is_known = total.squares_of_a and not math.isnan(total.squares)
    relative = math.sqrt(total.squares / total.squares_of_a) if is_known else math.inf
    both = math.sqrt(total.squares_of_a * total.squares_of_b)
    cosine = total.products / both if both else 0.0
    sqnr = -20 * math.log10(relative) if 0 < relative < math.inf else -math.inf
    return Apart(largest, total.size / total.elements, relative, cosine, sqnr, total.equal / total.elements)
