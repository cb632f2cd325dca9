"""The parameters and buffers of two models side by side, before anything runs: half of all ports fail there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline._compare.apart import are_equal, exact, largest_difference, largest_element, sums
from hookline._compare.matching import renamed, renamed_start
from hookline._compare.moved import moved
from hookline._compare.paired_values import tensors_of
from hookline._kernel import shape_of, unwrap
from hookline.errors import HooklineError

Match = Mapping[str, str | None] | None

EQUAL, ROUNDED, DIFFERENT, MISSING, EXTRA, SHAPE = "equal", "rounded", "different", "missing", "extra", "shape"
TRANSPOSED, MOVED = "transposed", "moved"
_SAME = 1e-5  # Two weights hold the same numbers if their sums are no further apart, as a share.
_LARGEST_SEARCH = 1 << 24  # Elements up to which permutations are looked for.


class Weight(NamedTuple):
    """A parameter or buffer of a, and what b has in its place."""

    name: str
    other: str
    kind: str
    what: str  # In words.


class _Held(NamedTuple):
    """A parameter or buffer, the module that holds it, and whether a checkpoint has it."""

    tensor: Tensor
    holder: nn.Module
    is_saved: bool


def pair_weights(
    a: nn.Module, b: nn.Module, pairs: Mapping[str, str] | None = None, match: Match = None
) -> dict[str, str]:
    """Return which parameters and buffers of b stand for those of a.

    Those of paired modules correspond, then those that have one name, then those that hold the same numbers, then those
    of one shape in their order.
    """
    in_a, in_b = _left_in(a, match), _held(unwrap(b))
    names = _by_name(in_a, in_b, pairs or {}, match)
    _add_by_numbers(names, in_a, in_b, match)
    _add_by_shape(names, in_a, in_b)
    return names


def compare_weights(
    a: nn.Module, b: nn.Module, pairs: Mapping[str, str] | None = None, match: Match = None
) -> list[Weight]:
    """Compare the parameters and buffers of two models. Only what is not equal is returned.

    Args:
        a: The model that is right.
        b: The model to look at.
        pairs: The paths of modules of a, and what stands for them in b.
        match: The patterns of `match=`.
    """
    in_a, in_b = _left_in(a, match), _held(unwrap(b))
    for side, held in (("a", in_a), ("b", in_b)):
        unready = [name for name, one in held.items() if is_lazy(one.tensor)]
        if unready:
            raise HooklineError(f"{unready[0]!r} of {side} has no numbers yet: run the model once")
    names = pair_weights(a, b, pairs, match)
    if not names and in_a and in_b:
        raise HooklineError(
            f"no weight of b has the name, the numbers or the shape of one of a, as {next(iter(in_a))!r}: "
            "name pairs with match="
        )
    found = []
    elsewhere = moved({name: names[name] for name in in_a if names.get(name, name) != name}, in_b)
    for name in (name for name in in_a if name in names):
        other = names[name]
        if name in elsewhere:
            found.append(
                Weight(name, other, MOVED, f"its numbers are in {other!r} of b, and not in {elsewhere[name]!r}")
            )
        (one, holder, _), (two, other_holder, _) = in_a[name], in_b[other]
        kind, what = difference_of(one, two)
        # `Conv1D` of transformers holds the weight of a linear layer transposed.
        is_known = "Conv1D" in (type(holder).__name__, type(other_holder).__name__) or one.shape != two.shape
        is_layout = what == TRANSPOSED and type(holder) is not type(other_holder) and is_known
        if kind != EQUAL and not is_layout:
            found.append(Weight(name, other, kind, what))
    taken = set(names.values())
    known = [{id(in_a[name].tensor) for name in names}, {id(in_b[name].tensor) for name in taken}]
    for name, (tensor, _, is_saved) in in_a.items():
        if is_saved and name not in names and id(tensor) not in known[0]:
            found.append(
                Weight(
                    name, "", MISSING, f"b has no {_in_b(name, pairs or {}, match)}, which is {shape_of(tensor)} in a"
                )
            )
    left_out = _held(unwrap(a)).keys() - in_a.keys()
    for name, (tensor, _, is_saved) in in_b.items():
        if is_saved and name not in taken and name not in left_out and id(tensor) not in known[1]:
            found.append(Weight("", name, EXTRA, f"a has no {name}, which is {shape_of(tensor)} in b"))
    return found


def _left_in(a: nn.Module, match: Match) -> dict[str, _Held]:
    """Return the weights of a that match= does not leave out."""
    held = _held(unwrap(a))
    return {name: one for name, one in held.items() if match is None or renamed(name, match) is not None}


def _held(model: nn.Module) -> dict[str, _Held]:
    """Return the parameters and buffers of a model by name, also those that it has under several names."""
    found: dict[str, _Held] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unsaved: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        both = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        found |= {_join(path, name): _Held(one, module, name not in unsaved) for name, one in both}
    return found


def _in_b(name: str, pairs: Mapping[str, str], match: Match) -> str:
    """Return what a weight of a is called in b, if b has it."""
    path, _, own = name.rpartition(".")
    if path in pairs:
        return _join(pairs[path], own)
    return (renamed(name, match) if match is not None else name) or name


def _by_name(
    in_a: Mapping[str, _Held], in_b: Mapping[str, _Held], pairs: Mapping[str, str], match: Match
) -> dict[str, str]:
    names, free = {}, dict(in_b)
    for name in in_a:
        other = _in_b(name, pairs, match)
        if other in free:
            names[name] = other
            del free[other]
    for name, (tensor, _, _) in in_a.items():  # Paired modules may call it by other names, as weight and gamma.
        path = name.rpartition(".")[0]
        if name not in names and path in pairs:
            fitting = [
                other
                for other, held in free.items()
                if other.rpartition(".")[0] == pairs[path] and sorted(held.tensor.shape) == sorted(tensor.shape)
            ]
            if len(fitting) == 1:
                names[name] = fitting[0]
                del free[fitting[0]]
    return names


def _add_by_numbers(names: dict[str, str], in_a: Mapping[str, _Held], in_b: Mapping[str, _Held], match: Match) -> None:
    """Add pairs of weights with other names that hold the same numbers, in any order."""
    taken = set(names.values())
    numbers: dict[tuple[int, ...], list[tuple[str, float, float, float]]] = {}
    for name, (tensor, _, _) in in_b.items():
        if name not in taken and not tensor.is_meta and tensor.numel():
            numbers.setdefault(_size(tensor), []).append((name, *sums(tensor), _eps(tensor)))
    for name, (tensor, _, _) in in_a.items():
        others = numbers.get(_size(tensor)) if name not in names and not tensor.is_meta else None
        if others:
            total, absolute = sums(tensor)
            near = max(_SAME, _eps(tensor), others[0][3]) * absolute
            alike = [
                one
                for one in others
                if abs(one[1] - total) <= near
                and abs(one[2] - absolute) <= near
                and _may_stand_for(name, one[0], match)
            ]
            if alike:
                same = next((one for one in alike if _begin_alike(tensor, in_b[one[0]].tensor)), alike[0])
                names[name] = same[0]
                others.remove(same)


def _may_stand_for(name: str, other: str, match: Match) -> bool:
    """Return True unless patterns say that another module of b stands for that which holds a weight."""
    start = renamed_start(name, match) if match is not None else ""
    return not start or other.startswith(f"{start}.")


def _begin_alike(one: Tensor, two: Tensor) -> bool:
    """Return True if two weights begin with the same numbers, as far as the coarser dtype shows."""
    return one.shape == two.shape and _is_rounded(one.flatten()[:64].detach(), two.flatten()[:64].detach())


def _add_by_shape(names: dict[str, str], in_a: Mapping[str, _Held], in_b: Mapping[str, _Held]) -> None:
    """Add pairs of the same shape in their order, where both models have as many of that shape left."""
    taken = set(names.values())
    left: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}
    for side, held in enumerate((in_a, in_b)):
        for name, (tensor, _, _) in held.items():
            if name not in (taken if side else names):
                left.setdefault(_size(tensor), ([], []))[side].append(name)
    for from_a, from_b in left.values():
        if len(from_a) == len(from_b):
            names.update(zip(from_a, from_b, strict=True))


def _size(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
    rounding, largest = max(_eps(one), _eps(two)), max(largest_element(one), largest_element(two))
    if one.shape == two.shape:
        apart = largest_difference(one, two)
        if apart == 0:
            return EQUAL, ""
        if _is_rounded(one, two):
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


def _is_rounded(one: Tensor, two: Tensor) -> bool:
    """Return True if each number is that of the other tensor, rounded to the coarser dtype."""
    coarser, finer = sorted((one, two), key=_eps, reverse=True)
    finer = finer.to(coarser.device)
    if coarser.dtype != finer.dtype and torch.equal(finer.to(coarser.dtype), coarser):
        return True
    sizes = exact(coarser), exact(finer).to(exact(coarser).device)
    return bool(((sizes[0] - sizes[1]).abs() <= _eps(coarser) * sizes[0].abs()).all())


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


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
