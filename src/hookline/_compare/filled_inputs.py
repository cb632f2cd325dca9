"""Give the modules of one model the inputs that their counterparts in another had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline._compare.apart import Convert
from hookline._kernel import children, leaves, rebuild


class Filled:
    """The inputs of a call in b, with the tensors of a's call put in where they fit.

    Arguments of the same name correspond, and so do the first ones. Objects such as key-value caches stay b's.
    """

    def __init__(self, ours: Mapping[str, Any], theirs: Mapping[str, Any], convert: Convert | None) -> None:
        self.kept: list[str] = []  # The tensors of b that stay, since a has none that fits.
        self._convert = convert
        self.named = self._names(ours, theirs)  # The names of arguments that correspond: in b, and in a.
        self.inputs = {name: self._fill(name, ours[mine], theirs[name]) for name, mine in self.named}
        for name, given in theirs.items():
            if name not in self.inputs:
                self.inputs[name] = given
                self.kept += [name] * any(True for _ in leaves(given))
        self.inputs = {name: self.inputs[name] for name in theirs}

    def _names(self, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, str]]:
        pairs = [(name, name) for name in theirs if name in ours]
        mine = [name for name in ours if name not in theirs and _has_tensor(ours[name])]
        yours = [name for name in theirs if name not in ours and _has_tensor(theirs[name])]
        if mine and yours and list(ours).index(mine[0]) == list(theirs).index(yours[0]) == 0:
            return [*pairs, (yours[0], mine[0])]
        if len(mine) == len(yours) == 1:
            return [*pairs, (yours[0], mine[0])]
        return pairs

    def _fill(self, name: str, ours: Any, theirs: Any) -> Any:
        if isinstance(theirs, Tensor):
            if isinstance(ours, Tensor):
                given = self._convert(ours) if self._convert is not None and ours.shape != theirs.shape else ours
                if [size for size in given.shape if size != 1] == [size for size in theirs.shape if size != 1]:
                    given = given.reshape(theirs.shape)
                if given.shape == theirs.shape and given.is_floating_point() == theirs.is_floating_point():
                    return _cast(given, theirs)
            self.kept.append(name)
            return theirs
        parts, own = children(theirs), children(ours)
        if not parts or not own or parts.keys() != own.keys():
            self.kept += [name] * any(True for _ in leaves(theirs))
            return theirs
        return rebuild(theirs, {key: self._fill(name, own[key], part) for key, part in parts.items()})


def _has_tensor(value: Any) -> bool:
    return any(True for _ in leaves(value))


def _cast(given: Tensor, like: Tensor) -> Tensor:
    """Return a tensor on the device and in the dtype of another; too large numbers become its largest."""
    if like.is_floating_point() and torch.finfo(like.dtype).max < torch.finfo(given.dtype).max:
        limits = torch.finfo(like.dtype)
        given = given.where(given.isinf(), given.clamp(limits.min, limits.max))
    return given.to(like.device, like.dtype)
