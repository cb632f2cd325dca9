"""Reasons that lie in the weights of a module: others, of another place, or a bias that one does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hookline._compare.paired_values import tensors_of
from hookline._compare.rounding import copied
from hookline._compare.suspect import Suspect
from hookline._compare.weight_differences import EQUAL, ROUNDED, difference_of


def other_weights(suspect: Suspect) -> str | None:
    """Put weights of a into a copy of b's module."""
    in_a = {**dict(suspect.a.named_parameters()), **dict(suspect.a.named_buffers())}
    in_b = {**dict(suspect.b.named_parameters()), **dict(suspect.b.named_buffers())}
    pairs = [name for name in in_a if name in in_b]
    differing = {}
    for name in pairs:
        kind, what = difference_of(in_a[name], in_b[name])
        if kind not in (EQUAL, ROUNDED):
            differing[name] = what
    for names in [*([name] for name in differing), list(differing)]:
        if names and _explained_with(suspect, {name: in_a[name] for name in names}):
            said = {name: _in_words(suspect, name, in_a[name], in_b[name], differing[name]) for name in names[:4]}
            return "; ".join(f"{name}: {words}" for name, words in said.items())
    for name in pairs:  # Another class may hold the same weight transposed.
        is_own = "." not in name and in_a[name].dim() == 2
        if is_own and _explained_with(suspect, {name: in_a[name].T}):
            return f"{name}: transposed"
    return None


def moved_weights(suspect: Suspect) -> str | None:
    """Let the weights of b that hold numbers of other weights of a change places."""
    in_a = dict(suspect.a.named_parameters())
    in_b = dict(suspect.b.named_parameters())
    # Where one is, another one belongs: that which the order of a's weights in b gives.
    places = [other for other in in_b if other in suspect.moved.values()]
    names = [name for name in in_a if name in suspect.moved]
    if (
        len(names) < 2
        or len(names) != len(places)
        or not _explained_with(suspect, {place: in_a[name] for place, name in zip(places, names, strict=True)})
    ):
        return None
    return "; ".join(f"the numbers of {name!r} are in {suspect.moved[name]!r} of b" for name in names[:4])


def _explained_with(suspect: Suspect, weights: Mapping[str, Tensor]) -> bool:
    """Return True if b's module does what a's does with these weights, in its own dtype or in theirs."""
    module = suspect.changeable
    if any(weight.shape != _held(module, name).shape for name, weight in weights.items()):
        return False
    with _put(module, weights):
        if suspect.explained_by(module):
            return True
    own = {_held(module, name).dtype for name in weights}
    for dtype in {one.dtype for one in weights.values()} - own:
        changed = copied(suspect.b, dtype)
        with _put(changed, weights):
            if suspect.explained_by(changed):
                return True
    return False


def _in_words(suspect: Suspect, name: str, in_a: Tensor, in_b: Tensor, what: str) -> str:
    """Say how a weight differs."""
    is_constant = bool(in_b.min() == in_b.max())
    other = suspect.owner(in_b.detach()) if "%" in what and not is_constant else ""
    return _base(name, in_a, in_b) or (f"it is that of {other!r} in a" if other else what)


def _held(module: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    held: Tensor = getattr(module.get_submodule(path), own)
    return held


@contextmanager
def _put(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Write weights of a into a module of b, for a while."""
    held = {name: _held(module, name) for name in weights}
    before = {name: one.detach().clone() for name, one in held.items()}
    with torch.no_grad():
        try:
            for name, weight in weights.items():
                held[name].copy_(weight)
            yield
        finally:
            for name, one in before.items():
                held[name].copy_(one)


def _base(name: str, in_a: Tensor, in_b: Tensor) -> str:
    """Name the base of rotary frequencies."""
    if "inv_freq" not in name or in_a.numel() < 2 or in_a.shape != in_b.shape:
        return ""
    places = torch.arange(len(in_a), dtype=torch.float64) / len(in_a)
    bases = []
    for tensor in (in_a.double().cpu(), in_b.double().cpu()):
        base = (tensor[0] / tensor[-1]).item() ** (len(tensor) / (len(tensor) - 1))
        if not torch.allclose(tensor, base**-places, rtol=1e-2):
            return ""
        bases.append(base)
    return f"the base of the rotary embedding is {bases[0]:.6g} in a and {bases[1]:.6g} in b"


def other_biases(suspect: Suspect) -> str | None:
    from_a, from_b = getattr(suspect.a, "bias", None), getattr(suspect.b, "bias", None)
    outputs = tensors_of(suspect.of_b)
    if isinstance(from_a, Tensor) and from_b is None and outputs and suspect.explains(_with_bias(outputs[0], from_a)):
        return "b has no bias"
    if isinstance(from_b, Tensor) and from_a is None and outputs and suspect.explains(_with_bias(outputs[0], -from_b)):
        return "b has a bias, and a has none"
    return None


def _with_bias(output: Tensor, bias: Tensor) -> Tensor:
    shape = (
        (-1, *[1] * (output.dim() - 2))
        if output.dim() > 2 and output.shape[1] == len(bias) != output.shape[-1]
        else (-1,)
    )
    return output + bias.detach().reshape(shape).to(output)
