"""Other leaves in the same containers: a value that passes keeps the lists, dicts and objects that it is made of.

Whoever gives a module a list, a dict or a key-value cache expects the module to write into that very object. So a leaf
is exchanged in the container that holds it. Only what can't be written to, such as a tuple, is built again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn

from hookline.values import DEEPEST, USUAL, attributes_of, held_by, rebuild


class Exchange:
    """Puts other parts into the containers of a passing value, and can put the old ones back.

    Args:
        keepers: For an output, the module and its arguments. What they hold is not written to: it would stay changed.
            There a copy passes on.
    """

    def __init__(self, *keepers: Any) -> None:
        self.keepers = keepers
        self._kept: dict[int, Any] | None = None  # The containers that the keepers hold, by their ids.
        self._written: list[tuple[Any, Any, Any, Any]] = []  # A container, a key, what was there, what was put there.

    def rebuild(self, container: Any, parts: Mapping[Any, Any]) -> Any:
        """Return the container with these parts: itself if it can be written to, or if nothing in it changes."""
        before = held_by(container) or {}
        changed = [key for key, part in parts.items() if part is not before[key]]
        if not changed:
            return container
        if not is_mutable(container) or self.keeps(container):
            return rebuild(container, parts)
        for key in changed:
            self._written.append((container, key, before[key], parts[key]))  # First, for a Ctrl-C between the two.
            _write(container, key, parts[key])
        return container

    def merge(self, new: Any, old: Any, _inside: tuple[int, ...] = ()) -> Any:
        """Return `new`, held by the containers of `old` wherever both are of one kind and have the same keys."""
        if new is old or isinstance(new, Tensor) or type(new) is not type(old):
            return new
        if id(old) in _inside or len(_inside) > DEEPEST:
            return old
        before, parts = held_by(old), held_by(new)
        if before is None or parts is None:
            return new
        inside = (*_inside, id(old))
        merged = {key: self.merge(part, before[key], inside) if key in before else part for key, part in parts.items()}
        return self.rebuild(old, merged) if before.keys() == parts.keys() else rebuild(new, merged)

    def put_back(self) -> None:
        """Put back what was there, except where somebody else has written since."""
        while self._written:
            container, key, old, new = self._written[-1]
            for place, part in (held_by(container) or {}).items():
                if part is new and (place == key or isinstance(new, Tensor)):  # The module may have moved it in a list.
                    _write(container, place, old)
            self._written.pop()

    def keeps(self, container: Any) -> bool:
        """Return True if the container is one that the keepers hold."""
        if self._kept is None:
            held = [attributes_of(one) if isinstance(one, nn.Module) else one for one in self.keepers]
            self._kept = mutable_containers(held)
        return id(container) in self._kept


def is_mutable(container: Any) -> bool:
    """Return True if a container's parts can be exchanged in place."""
    if type(container) in USUAL:
        return type(container) is not tuple
    if isinstance(container, tuple) or (isinstance(container, Mapping) and not isinstance(container, MutableMapping)):
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


def _write(container: Any, key: Any, part: Any) -> None:
    if isinstance(container, (list, deque, MutableMapping)):
        container[key] = part
    else:
        object.__setattr__(container, key, part)
