"""Simple relations between what two modules return: a factor, a sum with the input, another order, a cap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline._compare.apart import difference
from hookline._compare.paired_values import tensors_of
from hookline._compare.rounding import Limit
from hookline._compare.weight_differences import order_of_rows

LEFT = 0.6  # A correction leaves no more than this share of the error.
_NOTHING = 1e-6  # No factor is so small, or so near to 1.
_LEAST = 4  # Fewer elements show no relation: any number is a factor of another.
_CLEARLY = 3  # If several relations hold, the first is given, unless so many times less is left over by another.


def relation(in_a: Tensor, in_b: Tensor, others: Mapping[str, Any], norm: Sequence[Tensor], limit: Limit) -> str:
    """Return in words how `in_a` is computed from `in_b`, if that gives it up to `limit`; else "".

    Args:
        others: Values that may be added, by name.
        norm: The weight and the bias of a norm that returned the two.
    """
    if in_a.shape != in_b.shape:
        if in_a.dim() >= 2 and in_a.transpose(-1, -2).shape == in_b.shape:
            return "b's transposed" if _near(in_a, in_b.transpose(-1, -2), limit) else ""
        return ""
    if not in_a.is_floating_point() or not in_b.is_floating_point() or in_a.numel() < _LEAST:
        return ""
    one, two = in_a.to("cpu", torch.float64), in_b.to("cpu", torch.float64)
    best, least, most = "", math.inf, LEFT * (one - two).norm().item()
    for words, changed in _candidates(one, two, others, norm):
        if changed.shape == one.shape and _near(one, changed, limit):
            left = (one - changed).norm().item()
            if left <= most and (not best or left < least / _CLEARLY):
                best, least = words, left
    return best or _reordered(one, two, limit.largest)


def _candidates(
    one: Tensor, two: Tensor, others: Mapping[str, Any], norm: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    square = (two * two).sum().item()
    if square:
        scale = (one * two).sum().item() / square
        if abs(scale) > _NOTHING and abs(scale - 1) > _NOTHING:
            yield f"{number_in_words(scale)} times b's", scale * two
    for name, given in others.items():
        for tensor in tensors_of(given):
            if tensor.shape == one.shape and tensor.is_floating_point():
                from_a, what = tensor.to("cpu", torch.float64), _called(name)
                is_input = name == "the input"
                yield f"b's plus {what}{': b leaves out the residual connection' if is_input else ''}", two + from_a
                yield f"b's minus {what}{': b adds it, and a does not' if is_input else ''}", two - from_a
                share = ((one - two) * from_a).sum().item() / max((from_a * from_a).sum().item(), 1e-300)
                if abs(share) > _NOTHING:
                    yield f"b's {'plus' if share > 0 else 'minus'} {abs(share):.6g} times {what}", two + share * from_a
    if norm and norm[0].dim() == 1 and norm[0].shape == one.shape[-1:]:
        weight, bias = (tensor.detach().to("cpu", torch.float64) for tensor in (*norm, torch.zeros(1))[:2])
        plain = two - bias
        yield "that with 1 + weight: b leaves out the offset of the norm", plain / weight * (1 + weight) + bias
        yield "that with weight and not 1 + weight: b adds an offset to the norm", plain / (1 + weight) * weight + bias
        yield "b's times the weight: b leaves out the weight of the norm", plain * weight + bias
    cap = _cap(one, two)
    if cap is not None:
        yield f"b's with a soft cap of {cap:.6g}", cap * torch.tanh(two / cap)
    cap = _cap(two, one)
    if cap is not None and bool((two.abs() < cap).all()):
        yield f"b's without its soft cap of {cap:.6g}", cap * torch.atanh(two / cap)
    if one.dim() >= 2 and one.isfinite().all() and two.isfinite().all():
        shift = one.mean(tuple(range(one.dim() - 1))) - two.mean(tuple(range(one.dim() - 1)))
        if shift.any() and one[..., 0].numel() > 1:
            yield "b's plus a constant vector: a bias is missing in b, or another", two + shift


def _called(name: str) -> str:
    """Return the name of a value: its site in quotes, or what it is in words."""
    return name if name.startswith("the ") else repr(name.replace(":inputs", ":input"))


def _cap(capped: Tensor, plain: Tensor) -> float | None:
    """Return c for which `capped` is c * tanh(plain / c), judging by one element."""
    place = int(plain.abs().argmax())
    high, low = plain.flatten()[place].abs().item(), capped.flatten()[place].abs().item()
    if not 0 < low < high * (1 - 1e-9) or high == math.inf:
        return None
    start, end = low, low * 1e6
    for _ in range(200):
        middle = math.sqrt(start * end)
        start, end = (middle, end) if middle * math.tanh(high / middle) < low else (start, middle)
    found = (start + end) / 2
    return round(found) if abs(found - round(found)) < 1e-3 * found and round(found) else found


def _reordered(one: Tensor, two: Tensor, allowed: float) -> str:
    """Say that the numbers are the same in another order along the last dimension, or one before it."""
    for dim in range(one.dim() - 1, 0, -1):
        order = order_of_rows(one.movedim(dim, 0).flatten(1), two.movedim(dim, 0).flatten(1), max(allowed, 1e-12))
        if order is not None:
            return f"b's in another order of dimension {dim}{order}"
    return ""


def _near(one: Tensor, two: Tensor, limit: Limit) -> bool:
    """Return True if two tensors are no further apart than a limit, and so are the elements that others dwarf."""
    for part in difference(one.to("cpu", torch.float64), two.to("cpu", torch.float64)).parts.values():
        share = part.largest / part.largest_of_all if part.largest_of_all else 1.0
        if not Limit(max(limit.largest * share, 1e-12), limit.relative).covers(part.error):
            return False
    return True


def number_in_words(scale: float) -> str:
    """Write a factor, and what it may come from."""
    for words, value in _known_factors():
        if math.isclose(scale, value, rel_tol=1e-5):
            return f"{scale:.6g} (= {words})"
    return f"{scale:.6g}"


def _known_factors() -> Iterator[tuple[str, float]]:
    sizes = (*range(2, 17), 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 1152, 2048, 2304, 3584, 4096)
    make: list[tuple[str, Callable[[int], float]]] = [("√{}", math.sqrt), ("1/√{}", lambda size: 1 / math.sqrt(size))]
    for words, value in make:
        for size in sizes:
            if math.isqrt(size) ** 2 != size or size > 16:
                yield words.format(size), value(size)
