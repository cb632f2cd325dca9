"""The tensors of two values side by side: those of a tuple by position, those of a dict by key.

Numbers count as tensors. Key-value caches are left out: what they hold was returned by modules, which are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._kernel import ATOMS, DEEPEST, children, describe, leaves, object_parts, write_subscripts
from hookline._plot.plot_data import dense

_NUMBERS = (bool, int, float, complex)
_OPTIONAL = "hidden_states$|attentions$"  # What models of transformers return if they are asked to.


class Pair(NamedTuple):
    """A tensor of a and that of b which stands for it, in the same shape; complex ones as pairs of numbers."""

    a: Tensor
    b: Tensor


class Paired:
    """The tensors that two values have in the same places.

    `pairs` has them by their place in a, as in "[0]"; "" is the value itself. `odd` says in words what has no
    counterpart, or one of another shape. `besides` says what only one value has besides its main tensors, such as all
    hidden states. `reshaped` says which have other dimensions of size 1, `unequal` which have another shape.
    """

    def __init__(self, a: Any, b: Any) -> None:
        self.pairs: dict[str, Pair] = {}
        self.odd: list[str] = []
        self.besides: list[str] = []
        self.reshaped: list[str] = []
        self.unequal: list[str] = []
        self._add("", a, b, 0)

    def _add(self, place: str, a: Any, b: Any, depth: int) -> None:
        one, two = as_tensor(a), as_tensor(b)
        if one is not None and two is not None:
            self._add_tensors(place, one, two)
        elif one is not None or two is not None:
            self._add_tensor_and_container(place, a, b, one, two)
        else:
            parts, others = _parts(a), _parts(b)
            if parts is not None and others is not None and depth < DEEPEST:
                self._add_parts(place, parts, others, depth)
            elif _has_tensors(a) != _has_tensors(b) or (isinstance(a, ATOMS) and isinstance(b, ATOMS) and a != b):
                self.odd.append(f"output{place} is {_in_words(a)} in a, {_in_words(b)} in b")

    def _add_tensors(self, place: str, a: Tensor, b: Tensor) -> None:
        one, two = _as_numbers(a), _as_numbers(b)
        if without_ones(one) != without_ones(two):
            self.unequal.append(f"output{place} is {tuple(a.shape)} in a, {tuple(b.shape)} in b")
            self.odd.append(self.unequal[-1])
        elif one.numel():
            self.pairs[place] = Pair(one, two)
            if one.shape != two.shape:
                self.reshaped.append(f"output{place} is {tuple(a.shape)} in a, {tuple(b.shape)} in b")

    def _add_tensor_and_container(self, place: str, a: Any, b: Any, one: Tensor | None, two: Tensor | None) -> None:
        """Add a tensor and the main one of a container: the first of the same shape."""
        tensor, container, side = (one, b, "b") if one is not None else (two, a, "a")
        assert tensor is not None
        found = list(_places_of(container))
        fitting = [inner for inner, other in found if other.shape == tensor.shape] or [inner for inner, _ in found]
        if not fitting:
            self.odd.append(f"output{place} is {_in_words(a)} in a, {_in_words(b)} in b")
            return
        main = dict(found)[fitting[0]]
        if side == "b":
            self._add_tensors(place, tensor, main)
        else:
            self._add_tensors(place + fitting[0], main, tensor)
        self.besides += [f"output{place}{inner} is only in {side}" for inner, _ in found if inner != fitting[0]]

    def _add_parts(self, place: str, a: dict[Any, Any], b: dict[Any, Any], depth: int) -> None:
        pairs = [(key, key) for key in a if key in b] or list(zip(a, b, strict=False))
        for key, other in pairs:
            self._add(place + write_subscripts((key,)), a[key], b[other], depth + 1)
        taken = [{key for key, _ in pairs}, {other for _, other in pairs}]
        for parts, known, side in ((a, taken[0], "a"), (b, taken[1], "b")):
            for key in (key for key in parts if key not in known):
                words = f"output{place}{write_subscripts((key,))} is only in {side}"
                if isinstance(key, str) and re.search(_OPTIONAL, key) and _has_tensors(parts[key]):
                    self.besides.append(words)
                elif as_tensor(parts[key]) is not None or _has_tensors(parts[key]):
                    self.odd.append(words)


def without_ones(tensor: Tensor) -> list[int]:
    """Return the shape of a tensor without dimensions of size 1."""
    return [size for size in tensor.shape if size != 1]


def as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or one with the numbers of a number or an array; None for anything else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, _NUMBERS):
        return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    if type(value).__module__ == "numpy":
        try:
            return torch.as_tensor(value)
        except (TypeError, RuntimeError):  # An array of text, for example.
            return None
    return None


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a value that have elements; of complex ones the real and imaginary parts."""
    tensors = map(_as_numbers, leaves(value))
    return [one for one in tensors if one.numel()]


def _as_numbers(tensor: Tensor) -> Tensor:
    tensor = dense(tensor, complex_as_size=False)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container, or of an object with tensors, without key-value caches."""
    parts = children(value)
    parts = object_parts(value) if parts is None else parts
    return None if parts is None else {key: part for key, part in parts.items() if not _is_cache(key, part)}


def _in_words(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, ATOMS) else describe(value)


def _is_cache(key: Any, part: Any) -> bool:
    is_named = isinstance(key, str) and re.search(r"past_key|^cache", key) is not None
    return (is_named and as_tensor(part) is None) or (
        not isinstance(part, (Tensor, *ATOMS)) and "Cache" in type(part).__name__
    )


def _has_tensors(value: Any) -> bool:
    return any(True for _ in _places_of(value))


def _places_of(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the place and the tensor of each in a container."""
    if isinstance(value, Tensor):
        yield place, value
    elif not isinstance(value, ATOMS) and depth < DEEPEST:
        for key, part in (_parts(value) or {}).items():
            yield from _places_of(part, place + write_subscripts((key,)), depth + 1)
