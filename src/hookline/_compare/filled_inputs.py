"""Give the modules of one model the inputs that their counterparts in another had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline._compare.apart import Convert
from hookline._compare.paired_values import without_ones
from hookline._kernel import children, leaves, rebuild


class Filled:
    """The inputs of a call in b, with the tensors of a's call put in where they fit.

    Arguments of the same name correspond, and so do the first ones. Objects such as key-value caches stay b's.
    """

    def __init__(self, in_a: Mapping[str, Any], in_b: Mapping[str, Any], convert: Convert | None) -> None:
        self.kept: list[str] = []  # The tensors of b that stay, since a has none that fits.
        self._convert = convert
        self.named = self._names(in_a, in_b)  # The names of arguments that correspond: in b, and in a.
        self.inputs = {name: self._fill(name, in_a[from_a], in_b[name]) for name, from_a in self.named}
        for name, given in in_b.items():
            if name not in self.inputs:
                self.inputs[name] = given
                self.kept += [name] * any(True for _ in leaves(given))
        self.inputs = {name: self.inputs[name] for name in in_b}

    def _names(self, in_a: Mapping[str, Any], in_b: Mapping[str, Any]) -> list[tuple[str, str]]:
        pairs = [(name, name) for name in in_b if name in in_a]
        from_a = [name for name in in_a if name not in in_b and _has_tensor(in_a[name])]
        from_b = [name for name in in_b if name not in in_a and _has_tensor(in_b[name])]
        if from_a and from_b and list(in_a).index(from_a[0]) == list(in_b).index(from_b[0]) == 0:
            return [*pairs, (from_b[0], from_a[0])]
        if len(from_a) == len(from_b) == 1:
            return [*pairs, (from_b[0], from_a[0])]
        return pairs

    def _fill(self, name: str, in_a: Any, in_b: Any) -> Any:
        if isinstance(in_b, Tensor):
            if isinstance(in_a, Tensor):
                given = self._convert(in_a) if self._convert is not None and in_a.shape != in_b.shape else in_a
                if without_ones(given) == without_ones(in_b):
                    given = given.reshape(in_b.shape)
                if given.shape == in_b.shape and given.is_floating_point() == in_b.is_floating_point():
                    return _cast(given, in_b)
            self.kept.append(name)
            return in_b
        parts, own = children(in_b), children(in_a)
        if not parts or not own or parts.keys() != own.keys():
            self.kept += [name] * any(True for _ in leaves(in_b))
            return in_b
        return rebuild(in_b, {key: self._fill(name, own[key], part) for key, part in parts.items()})


def _has_tensor(value: Any) -> bool:
    return any(True for _ in leaves(value))


def _cast(given: Tensor, like: Tensor) -> Tensor:
    """Return a tensor on the device and in the dtype of another; too large numbers become its largest."""
    if like.is_floating_point() and torch.finfo(like.dtype).max < torch.finfo(given.dtype).max:
        limits = torch.finfo(like.dtype)
        given = given.where(given.isinf(), given.clamp(limits.min, limits.max))
    return given.to(like.device, like.dtype)
