"""Swap tensors inside a passing value, and keep the lists, dicts and objects that it is made of.

A caller that gives a module a list, a dict or a key-value cache expects the module to write into that very object. So
a leaf is exchanged in the container that holds it. Only what can't be written to, such as a tuple, is built again.
"""

from __future__ import annotations

import weakref
from collections import ChainMap, deque
from collections.abc import Mapping, MutableMapping
from dataclasses import is_dataclass
from sys import getrefcount
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hookline._values.copy_or_share import references_in_call
from hookline._values.nested import DEEPEST, USUAL, children, held_by, rebuild


class Exchange:
    """Puts other parts into the containers of a passing value, and can put the old ones back.

    Args:
        own: The only containers that may be written to, by their ids; None allows all. A copy of any other passes on.
    """

    def __init__(self, own: dict[int, Any] | None = None) -> None:
        self.own = own
        self._written: list[tuple[Any, Any, Any, Any]] = []  # A container, a key, what was there, what was put there.

    def rebuild(self, container: Any, parts: Mapping[Any, Any]) -> Any:
        """Return the container with these parts: itself if it may be written to, or if nothing in it changes."""
        before = held_by(container) or {}
        changed = [key for key, part in parts.items() if part is not before[key]]
        if not changed:
            return container
        if self.own is not None and id(container) not in self.own:
            new = rebuild(container, parts)
            self.own[id(new)] = new
            return new
        if not is_mutable(container):
            return rebuild(container, parts)
        for key in changed:
            self._write(container, key, before[key], parts[key])
        return container

    def merge(self, new: Any, old: Any, _inside: tuple[int, ...] = ()) -> Any:
        """Return `new`, held by the containers of `old` wherever both are of one kind and have the same keys."""
        if new is old or isinstance(new, Tensor) or type(new) is not type(old):
            return new
        if id(old) in _inside or len(_inside) > DEEPEST:
            return old
        before, parts = held_by(old), held_by(new)
        if before is None or parts is None or (not before and children(old) is None):  # An array, say.
            return new
        inside = (*_inside, id(old))
        merged = {key: self.merge(part, before[key], inside) if key in before else part for key, part in parts.items()}
        return self.rebuild(old, merged) if _same_keys(before, parts) else rebuild(new, merged)

    def _write(self, container: Any, key: Any, old: Any, new: Any) -> None:
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            old = self.remember(old, new)
        self._written.append((container, key, old, new))  # Before it is there, for a Ctrl-C between the two.
        _set(container, key, new)

    def remember(self, old: Tensor, new: Tensor) -> Tensor:
        """Remember which tensor `new` replaces. Return the tensor to put back later.

        That is not `old` if another thread's call has put `old` there for now.
        """
        first, thread = _stands_for.get(old, (None, 0))
        before = first() if first else None
        if thread != get_ident() and before is not None:
            old = before
        _stands_for[new] = weakref.ref(old if before is None else before), get_ident()
        return old

    @property
    def replaced(self) -> list[Any]:
        """What is out of its container until it is put back."""
        return [old for _, _, old, _ in self._written]

    def put_back(self) -> None:
        """Put back what was there, except where somebody else has written since. May be called again if interrupted."""
        while self._written:
            container, key, old, new = self._written[-1]
            for place, part in (held_by(container) or {}).items():
                if part is new and (isinstance(new, Tensor) or _is_key(place, key)):  # A list may have moved it.
                    _set(container, place, old)
            self._written.pop()


def _is_key(one: Any, other: Any) -> bool:
    return one is other or (type(one) in (str, int) and one == other)  # Others may be tensors, which can't be compared.


def _same_keys(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return True if two containers have the same keys in the same order, in which keyword arguments are passed."""
    return len(one) == len(other) and all(map(_is_key, one, other))


# For each tensor that a call has put into a container: what was there before any call, and the thread of that call.
_stands_for: MutableMapping[Tensor, tuple[weakref.ref[Tensor], int]] = WeakIdKeyDictionary()


def is_mutable(container: Any) -> bool:
    """Return True if a container's parts can be exchanged in place."""
    if type(container) in USUAL:
        return type(container) is not tuple
    if isinstance(container, (tuple, ChainMap)):  # The second would be written to in another of its maps.
        return False
    if isinstance(container, Mapping) and not isinstance(container, MutableMapping):
        return False
    frozen = is_dataclass(container) and getattr(type(container), "__dataclass_params__").frozen  # noqa: B009
    return not frozen


def mutable_containers(value: Any) -> dict[int, Any]:
    """Return every container in a value whose parts can be exchanged in place, by its id."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor) or id(one) in seen:
            continue
        parts = held_by(one)
        if parts:
            seen.add(id(one))
            waiting += parts.values()
            if is_mutable(one):
                found[id(one)] = one
    return found


def private_containers(value: Any) -> dict[int, Any]:
    """Return the containers of a value that nobody but the caller's one variable holds, by their ids."""
    found: dict[int, Any] = {}
    if getrefcount(value) == references_in_call():
        _add_private(value, found)
    return found


def _add_private(container: Any, found: dict[int, Any]) -> None:
    parts = held_by(container)
    if not parts:
        return
    if is_mutable(container):
        found[id(container)] = container
    for key in list(parts):
        part = parts.pop(key)  # Now its container holds it, and this variable.
        if getrefcount(part) == _ALONE_IN_CONTAINER and not isinstance(part, Tensor):
            _add_private(part, found)


def _references_in_container() -> int:
    """Count the references to what one container and one variable hold."""
    outer: list[Any] = [[]]
    parts = held_by(outer) or {}
    part = parts.pop(0)
    return getrefcount(part)


_ALONE_IN_CONTAINER = _references_in_container()


def _set(container: Any, key: Any, part: Any) -> None:
    if isinstance(container, (list, deque, MutableMapping)):
        container[key] = part
    else:
        object.__setattr__(container, key, part)
