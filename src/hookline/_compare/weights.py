"""The parameters and buffers of two models side by side, before anything runs: half of all ports fail there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline._compare.apart import sums
from hookline._compare.matching import renamed, renamed_start
from hookline._compare.moved import moved
from hookline._compare.weight_differences import (
    EQUAL,
    EXTRA,
    MISSING,
    MOVED,
    TRANSPOSED,
    difference_of,
    eps_of,
    is_rounded,
)
from hookline._kernel import shape_of, unwrap
from hookline._torch import non_persistent_buffers
from hookline.errors import HooklineError

Match = Mapping[str, str | None] | None
_SAME = 1e-5  # Two weights hold the same numbers if their sums are no further apart, as a share.


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
    _add_by_shape(names, in_a, in_b, match)
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
    renamed_ones = {name: names[name] for name in in_a if names.get(name, name) != name}
    elsewhere = moved(renamed_ones, in_b, {name: _size(in_a[name].tensor) for name in renamed_ones})
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
        unsaved = non_persistent_buffers(module)
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
            numbers.setdefault(_size(tensor), []).append((name, *sums(tensor), eps_of(tensor)))
    for name, (tensor, _, _) in in_a.items():
        others = numbers.get(_size(tensor)) if name not in names and not tensor.is_meta else None
        if others:
            total, absolute = sums(tensor)
            near = max(_SAME, eps_of(tensor), others[0][3]) * absolute
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
    return one.shape == two.shape and is_rounded(one.flatten()[:64].detach(), two.flatten()[:64].detach())


def _add_by_shape(names: dict[str, str], in_a: Mapping[str, _Held], in_b: Mapping[str, _Held], match: Match) -> None:
    """Add pairs of the same shape in their order, where both models have as many of that shape left."""
    taken = set(names.values())
    left: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}
    for side, held in enumerate((in_a, in_b)):
        for name, (tensor, _, _) in held.items():
            if name not in (taken if side else names):
                left.setdefault(_size(tensor), ([], []))[side].append(name)
    for from_a, from_b in left.values():
        if len(from_a) == len(from_b):
            pairs = zip(from_a, from_b, strict=True)
            names.update(pair for pair in pairs if _may_stand_for(*pair, match))


def _size(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
