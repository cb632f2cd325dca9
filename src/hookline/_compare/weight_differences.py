"""How two weights that should be equal differ, in words: transposed, in another order, rounded, ..."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hookline._compare.apart import are_equal, exact, largest_difference, largest_element
from hookline._compare.paired_values import tensors_of

EQUAL, ROUNDED, DIFFERENT, MISSING, EXTRA, SHAPE = "equal", "rounded", "different", "missing", "extra", "shape"
TRANSPOSED, MOVED = "transposed", "moved"
_SAME = 1e-5  # Two weights hold the same numbers if their sums are no further apart, as a share.
_LARGEST_SEARCH = 1 << 24  # Elements up to which permutations are looked for.


@torch.no_grad()
def difference_of(one: Tensor, two: Tensor) -> tuple[str, str]:
    """Say how two tensors that should be equal differ: the kind, and in words."""
    one, two = one.detach(), two.detach()
    if one.is_meta or two.is_meta or (one.shape == two.shape and not one.numel()):
        return EQUAL, ""
    if not one.numel() or not two.numel():
        return SHAPE, f"{tuple(one.shape)} in a, {tuple(two.shape)} in b"
    (one,), (two,) = tensors_of(one), tensors_of(two)
    if one.shape == two.shape and are_equal(one, two):
        return EQUAL, ""
    rounding, largest = max(eps_of(one), eps_of(two)), max(largest_element(one), largest_element(two))
    if one.shape == two.shape:
        apart = largest_difference(one, two)
        if apart == 0:
            return EQUAL, ""
        if is_rounded(one, two):
            return ROUNDED, f"rounded: {str(one.dtype)[6:]} and {str(two.dtype)[6:]}"
    in_a = exact(one)
    in_b = exact(two).to(in_a.device)
    how = _rearranged(in_a, in_b, rounding * max(largest, 1e-30))
    if how:
        return DIFFERENT, how
    if in_a.shape != in_b.shape:
        return SHAPE, f"{tuple(one.shape)} in a, {tuple(two.shape)} in b"
    for dtype in (torch.bfloat16, torch.float16):
        if one.is_floating_point() and in_a.to(dtype).double().equal(in_b):
            return DIFFERENT, f"rounded to {str(dtype)[6:]} in b"
    return DIFFERENT, _in_words(in_a, in_b, rounding * max(largest, 1e-30))


def is_rounded(one: Tensor, two: Tensor) -> bool:
    """Return True if each number is that of the other tensor, rounded to the coarser dtype."""
    coarser, finer = sorted((one, two), key=eps_of, reverse=True)
    finer = finer.to(coarser.device)
    if coarser.dtype != finer.dtype and torch.equal(finer.to(coarser.dtype), coarser):
        return True
    sizes = exact(coarser), exact(finer).to(exact(coarser).device)
    return bool(((sizes[0] - sizes[1]).abs() <= eps_of(coarser) * sizes[0].abs()).all())


def _rearranged(in_a: Tensor, in_b: Tensor, near: float) -> str:
    """Say how the elements of one tensor are those of the other in another order; "" if they are not."""
    if in_a.numel() != in_b.numel() or in_a.dim() == 0:
        return ""
    if in_a.dim() >= 2 and in_b.dim() == in_a.dim():
        turned = in_a.transpose(-1, -2)
        if turned.shape == in_b.shape and (turned - in_b).abs().max() <= near:
            return TRANSPOSED
    if in_a.shape != in_b.shape or in_a.numel() > _LARGEST_SEARCH:
        return ""
    for dim in range(in_a.dim()):
        if in_a.shape[dim] > 1 and (in_a.flip(dim) - in_b).abs().max() <= near:
            return f"reversed along dimension {dim}"
    for dim, what in enumerate(("rows", "columns", "planes")[: in_a.dim()]):
        one, two = (tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1) for tensor in (in_a, in_b))
        order = order_of_rows(one, two, near)
        if order is not None:
            return f"its {what} are in another order{order}"
    return ""


def order_of_rows(in_a: Tensor, in_b: Tensor, near: float) -> str | None:
    """Say how the rows of one matrix are ordered in another; None if they are not the same rows."""
    order = _order(in_a, in_b, near)
    return None if order is None or not _is_order(in_a, in_b, order, near) else _in_blocks(order)


def _is_order(in_a: Tensor, in_b: Tensor, order: list[int], near: float) -> bool:
    return bool(((in_a[order] - in_b).abs() <= near).all())


def _order(in_a: Tensor, in_b: Tensor, near: float) -> list[int] | None:
    """Return for each row of `in_b` which row of `in_a` it is; None if it is no permutation."""
    probe = torch.linspace(0.5, 1.5, in_a.shape[1], dtype=in_a.dtype, device=in_a.device)
    one, two = in_a @ probe, in_b @ probe
    (_, first), (_, second) = one.sort(), two.sort()
    if (one[first] - two[second]).abs().max() > near * in_a.shape[1]:
        return None
    order = [0] * len(first)
    for from_a, from_b in zip(first.tolist(), second.tolist(), strict=True):
        order[from_b] = from_a
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


def _in_words(in_a: Tensor, in_b: Tensor, near: float) -> str:
    apart = (in_a - in_b).abs()
    if (in_a - in_b - 1).abs().max() <= near or (in_b - in_a - 1).abs().max() <= near:
        return f"b's is a's {'minus' if in_a.flatten()[0] > in_b.flatten()[0] else 'plus'} 1"
    for side, tensor in (("b", in_b), ("a", in_a)):
        if tensor.min() == tensor.max():
            number = tensor.flatten()[0].item()
            return f"all {'zeros' if number == 0 else 'ones' if number == 1 else f'{number:.6g}'} in {side}"
    scale = (in_a * in_b).sum().item() / (in_b * in_b).sum().item()
    if scale and (in_a - scale * in_b).abs().max() <= 8 * near:
        return f"a's is {scale:.6g} times b's"
    for side, tensor in (("a", in_a), ("b", in_b)):
        if not tensor.isfinite().all():
            return (
                f"{100 * (1 - tensor.isfinite().double().mean().item()):.3g} % of its elements are not finite in {side}"
            )
    share = (apart > near).double().mean().item()
    return f"{100 * share:.3g} % of its elements differ, up to {apart.max().item():.3g}"


def eps_of(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
