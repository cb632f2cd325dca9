"""The oracle's handling of the caller's containers: a call gets copies, and its writes are carried over afterwards.

Hookline instead replaces parts inside the containers, and restores the old parts. The results must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tests.properties.structures import CONTAINERS, MUTABLE, each, flat, like, parts


class Loan:
    """The containers in a value, and the copies of them, some with other parts, that a call gets instead."""

    def __init__(self, value: Any, copy: Any) -> None:
        self.pairs = list(_copies(value, copy))
        self.before = [(parts(original), parts(copy)) for original, copy in self.pairs]

    def bring_home(self, restoring: bool = True) -> None:
        """Write the contents of the copies into the containers. If `restoring`, undo parts replaced at the start."""
        for (original, copy), (old, new) in zip(self.pairs, self.before, strict=True):
            began = [(there, was) for (_, was), (_, there) in zip(old, new, strict=True)] if restoring else []
            _refill(original, [(key, self.home(_instead(part, began))) for key, part in parts(copy)])

    def home(self, value: Any) -> Any:
        """Return a value with each copy replaced by its original container."""
        for original, copy in self.pairs:
            if value is copy:
                return original
        inside = parts(value)
        at_home = [self.home(part) for _, part in inside]
        is_same = all(new is part for new, (_, part) in zip(at_home, inside, strict=True))
        return value if is_same else like(value, at_home)


def _copies(value: Any, copy: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each mutable container with its copy, if both have the same keys."""
    if value is copy or type(value) is not type(copy) or not isinstance(value, CONTAINERS):
        return
    old, new = dict(parts(value)), dict(parts(copy))
    if isinstance(value, MUTABLE) and old.keys() == new.keys():
        yield value, copy
    for key in old:
        if key in new:
            yield from _copies(old[key], new[key])


def _refill(container: Any, held: list[tuple[Any, Any]]) -> None:
    if isinstance(container, list):
        container[:] = [part for _, part in held]
        return
    inside = container if isinstance(container, dict) else vars(container)
    inside.clear()
    inside.update(held)


def settled(value: Any, new: Any) -> Any:
    """Return `new`, but with the containers of `value` where they hold the same objects, as an empty list does."""
    old, others = parts(value), parts(new)
    if type(value) is not type(new) or not isinstance(value, CONTAINERS) or _keys(old) != _keys(others):
        return new
    held = [settled(part, other) for (_, part), (_, other) in zip(old, others, strict=True)]
    is_same = all(part is one for (_, part), one in zip(old, held, strict=True))
    return value if is_same else like(new, held)


def _keys(held: list[tuple[Any, Any]]) -> list[Any]:
    return [key for key, _ in held]


def substituted(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a value with tensors replaced as in `pairs` of (old, new)."""
    return each(lambda tensor: _instead(tensor, pairs), value)


def _instead(part: Any, pairs: list[tuple[Any, Any]]) -> Any:
    return next((new for old, new in pairs if old is part), part)


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in a value."""
    return [leaf for leaf in flat(value) if isinstance(leaf, Tensor)]


def stuck_in(output: Any, given: Any, entered: list[Tensor]) -> list[Tensor]:
    """Return the tensors that enter and leave in the same container, where a tap can't replace them."""
    came = list(_mutable(given))
    held = [part for one in _mutable(output) if any(one is other for other in came) for _, part in parts(one)]
    return [part for part in held if any(part is one for one in entered)]


def _mutable(value: Any) -> Iterator[Any]:
    if isinstance(value, MUTABLE):
        yield value
    for _, part in parts(value):
        yield from _mutable(part)
