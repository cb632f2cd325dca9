"""The parameters and buffers of two models side by side, before anything runs: half of all ports fail there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookline._compare.apart import are_equal, exact, largest_difference, largest_element, tensors_of
from hookline._kernel import Names, shape_of, unwrap

EQUAL, ROUNDED, DIFFERENT, MISSING, EXTRA, SHAPE = "equal", "rounded", "different", "missing", "extra", "shape"
TRANSPOSED = "transposed"
_LARGEST_SEARCH = 1 << 24  # Elements up to which permutations are looked for.


class Weight(NamedTuple):
    """A parameter or buffer of a, and what b has in its place."""

    name: str
    other: str
    kind: str
    what: str  # In words.


def compare_weights(a: nn.Module, b: nn.Module, pairs: Mapping[str, str]) -> list[Weight]:
    """Compare what paired modules hold themselves. Only what is not equal is returned."""
    ours, theirs = (dict(Names(unwrap(model)).once()) for model in (a, b))
    found = []
    for path, other in pairs.items():
        if path in ours and other in theirs:
            found += _of_pair(path, ours[path], other, theirs[other])
    return found


def _of_pair(path: str, one: nn.Module, other: str, two: nn.Module) -> list[Weight]:
    mine, yours = _held(one), _held(two)
    found = []
    left = dict(yours)
    for name, tensor in mine.items():
        match = name if name in left else _like(tensor, left)
        full, there = _join(path, name), _join(other, match or name)
        if match is None:
            found.append(Weight(full, "", MISSING, f"b has no {there}, which is {shape_of(tensor)} in a"))
            continue
        kind, what = difference_of(tensor, left.pop(match))
        # `Conv1D` of transformers holds the weight of a linear layer transposed.
        is_layout = what == TRANSPOSED and type(one) is not type(two)
        if kind != EQUAL and not is_layout:
            found.append(Weight(full, there, kind, what))
    for name, tensor in left.items():
        found.append(
            Weight("", _join(other, name), EXTRA, f"a has no {_join(path, name)}, which is {shape_of(tensor)} in b")
        )
    return found


def _held(module: nn.Module) -> dict[str, Tensor]:
    both = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return {name: tensor.detach() for name, tensor in both.items()}


def _like(tensor: Tensor, others: Mapping[str, Tensor]) -> str | None:
    """Return the only other tensor of the same shape, in any order of dimensions."""
    fitting = [name for name, other in others.items() if sorted(other.shape) == sorted(tensor.shape)]
    return fitting[0] if len(fitting) == 1 else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@torch.no_grad()
def difference_of(one: Tensor, two: Tensor) -> tuple[str, str]:
    """Say how two tensors that should be equal differ: the kind, and in words."""
    if one.is_meta or two.is_meta or (one.shape == two.shape and not one.numel()):
        return EQUAL, ""
    if not one.numel() or not two.numel():
        return SHAPE, f"{tuple(one.shape)} in a, {tuple(two.shape)} in b"
    (one,), (two,) = tensors_of(one), tensors_of(two)
    if one.shape == two.shape and are_equal(one, two):
        return EQUAL, ""
    rounding, largest = max(_eps(one), _eps(two)), largest_element(one)
    if one.shape == two.shape:
        apart = largest_difference(one, two)
        if apart == 0:
            return EQUAL, ""
        if apart <= rounding * largest:
            return ROUNDED, f"rounded: {str(one.dtype)[6:]} and {str(two.dtype)[6:]}"
    ours = exact(one)
    theirs = exact(two).to(ours.device)
    how = _rearranged(ours, theirs, rounding * max(largest, 1e-30))
    if how:
        return DIFFERENT, how
    if ours.shape != theirs.shape:
        return SHAPE, f"{tuple(one.shape)} in a, {tuple(two.shape)} in b"
    for dtype in (torch.bfloat16, torch.float16):
        if one.is_floating_point() and ours.to(dtype).double().equal(theirs):
            return DIFFERENT, f"rounded to {str(dtype)[6:]} in b"
    return DIFFERENT, _in_words(ours, theirs, rounding * max(largest, 1e-30))


def _rearranged(ours: Tensor, theirs: Tensor, near: float) -> str:
    """Say how the elements of one tensor are those of the other in another order; "" if they are not."""
    if ours.numel() != theirs.numel() or ours.dim() == 0:
        return ""
    if ours.dim() >= 2 and theirs.dim() == ours.dim():
        turned = ours.transpose(-1, -2)
        if turned.shape == theirs.shape and (turned - theirs).abs().max() <= near:
            return TRANSPOSED
    if ours.shape != theirs.shape or ours.numel() > _LARGEST_SEARCH:
        return ""
    for dim in range(ours.dim()):
        if ours.shape[dim] > 1 and (ours.flip(dim) - theirs).abs().max() <= near:
            return f"reversed along dimension {dim}"
    for dim, what in enumerate(("rows", "columns", "planes")[: ours.dim()]):
        one, two = (tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1) for tensor in (ours, theirs))
        order = order_of_rows(one, two, near)
        if order is not None:
            return f"its {what} are in another order{order}"
    return ""


def order_of_rows(ours: Tensor, theirs: Tensor, near: float) -> str | None:
    """Say how the rows of one matrix are ordered in another; None if they are not the same rows."""
    order = _order(ours, theirs, near)
    return None if order is None or not _is_order(ours, theirs, order, near) else _in_blocks(order)


def _is_order(ours: Tensor, theirs: Tensor, order: list[int], near: float) -> bool:
    return bool(((ours[order] - theirs).abs() <= near).all())


def _order(ours: Tensor, theirs: Tensor, near: float) -> list[int] | None:
    """Return for each row of `theirs` which row of `ours` it is; None if it is no permutation."""
    probe = torch.linspace(0.5, 1.5, ours.shape[1], dtype=ours.dtype, device=ours.device)
    one, two = ours @ probe, theirs @ probe
    (_, first), (_, second) = one.sort(), two.sort()
    if (one[first] - two[second]).abs().max() > near * ours.shape[1]:
        return None
    order = [0] * len(first)
    for mine, yours in zip(first.tolist(), second.tolist(), strict=True):
        order[yours] = mine
    return None if order == sorted(order) else order


def _in_blocks(order: list[int]) -> str:
    """Say that rows moved in blocks, such as attention heads, or that they are interleaved."""
    size = len(order)
    runs = 1 + sum(after != before + 1 for before, after in itertools.pairwise(order))
    if runs < size and size % runs == 0:
        return f", in blocks of {size // runs}, as heads are"
    steps = _common_step(order)
    if steps:
        return f": interleaved by {steps}"
    return ""


def _common_step(order: list[int]) -> int:
    """Return the step between most neighbours if it is the same one; 0 if not."""
    steps = [after - before for before, after in itertools.pairwise(order)]
    common = max(set(steps), key=steps.count)
    return common if common > 1 and steps.count(common) >= len(steps) * 0.4 else 0


def _in_words(ours: Tensor, theirs: Tensor, near: float) -> str:
    apart = (ours - theirs).abs()
    if (ours - theirs - 1).abs().max() <= near or (theirs - ours - 1).abs().max() <= near:
        return f"b's is a's {'minus' if ours.flatten()[0] > theirs.flatten()[0] else 'plus'} 1"
    if not theirs.any():
        return "all zeros in b"
    scale = (ours * theirs).sum().item() / (theirs * theirs).sum().item()
    if (ours - scale * theirs).abs().max() <= 8 * near:
        return f"a's is {scale:.6g} times b's"
    share = (apart > near).double().mean().item()
    sizes = f"up to {apart.max().item():.3g}" if math.isfinite(apart.max().item()) else "not finite"
    return f"{100 * share:.3g} % of its elements differ, {sizes}"


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
