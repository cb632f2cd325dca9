"""Replace tensors inside a passing value, and keep the lists, dicts and objects that hold them.

A caller that gives a module a list, a dict or a key-value cache expects the module to write into that same object.
Tensors are therefore replaced inside the container that holds them. Only an immutable one, such as a tuple, is rebuilt.
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
    """Replaces parts inside the containers of a passing value, and can put the old parts back.

    Args:
        own: The only containers that may be written to, by id; None allows all. Any other container is copied.
    """

    def __init__(self, own: dict[int, Any] | None = None) -> None:
        self.own = own
        self._written: list[tuple[Any, Any, Any, Any]] = []  # Container, key, old part, new part.

    def rebuild(self, container: Any, parts: Mapping[Any, Any]) -> Any:
        """Return a container with these parts: the same object if it may be written to, or if nothing in it changes."""
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
        """Return `new`, but use the containers of `old` wherever both have the same type and keys."""
        if new is old or isinstance(new, Tensor) or type(new) is not type(old):
            return new
        if id(old) in _inside or len(_inside) > DEEPEST:
            return old
        before, parts = held_by(old), held_by(new)
        if before is None or parts is None or (not before and children(old) is None):  # For example an array.
            return new
        inside = (*_inside, id(old))
        merged = {key: self.merge(part, before[key], inside) if key in before else part for key, part in parts.items()}
        return self.rebuild(old, merged) if _same_keys(before, parts) else rebuild(new, merged)

    def _write(self, container: Any, key: Any, old: Any, new: Any) -> None:
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            old = self.remember(old, new)
        self._written.append((container, key, old, new))  # Noted before the write, in case Ctrl-C comes between.
        _set(container, key, new)

    def remember(self, old: Tensor, new: Tensor) -> Tensor:
        """Remember which tensor `new` replaces. Return the tensor to put back later.

        That is not `old` if a call on another thread has put `old` there temporarily.
        """
        first, thread = _stands_for.get(old, (None, 0))
        before = first() if first else None
        if thread != get_ident() and before is not None:
            old = before
        _stands_for[new] = weakref.ref(old if before is None else before), get_ident()
        return old

    @property
    def replaced(self) -> list[Any]:
        """The parts that are out of their containers until `put_back`."""
        return [old for _, _, old, _ in self._written]

    def put_back(self) -> None:
        """Put the old parts back, except where other code has written since. If interrupted, it may be called again."""
        while self._written:
            container, key, old, new = self._written[-1]
            for place, part in (held_by(container) or {}).items():
                if part is new and (isinstance(new, Tensor) or _is_key(place, key)):  # A list may be reordered.
                    _set(container, place, old)
            self._written.pop()


def _is_key(one: Any, other: Any) -> bool:
    return one is other or (type(one) in (str, int) and one == other)  # Other keys may be tensors: == gives no bool.


def _same_keys(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return True if two containers have the same keys in the same order, which matters for keyword arguments."""
    return len(one) == len(other) and all(map(_is_key, one, other))


# For each tensor that a call has put into a container: the tensor there before any call, and the thread of the call.
_stands_for: MutableMapping[Tensor, tuple[weakref.ref[Tensor], int]] = WeakIdKeyDictionary()


def is_mutable(container: Any) -> bool:
    """Return True if a container's parts can be replaced in place."""
    if type(container) in USUAL:
        return type(container) is not tuple
    if isinstance(container, (tuple, ChainMap)):  # Writing to a ChainMap changes only its first map.
        return False
    if isinstance(container, Mapping) and not isinstance(container, MutableMapping):
        return False
    frozen = is_dataclass(container) and getattr(type(container), "__dataclass_params__").frozen  # noqa: B009
    return not frozen


def mutable_containers(value: Any) -> dict[int, Any]:
    """Return, by id, every container in a value whose parts can be replaced in place."""
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
    """Return, by id, the containers of a value that can be reached only through one variable of the caller."""
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
        part = parts.pop(key)  # Now only its container and this variable hold it.
        if getrefcount(part) == _ALONE_IN_CONTAINER and not isinstance(part, Tensor):
            _add_private(part, found)


def _references_in_container() -> int:
    """Return the reference count of an object that one container and one variable hold."""
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
