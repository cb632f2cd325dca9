"""The names that managers give to modules: unique ones, and `module.name`, which hooks read.

A module that has no `name` of its own shows one while a hook is registered there: that of the first manager, and to a
hook that of its own manager. The last hook to go takes it away, and no copy of the module has it.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

GETSTATE = "__getstate__"

_claims: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


def increment_name(name: str) -> str:
    """Return the next name of a row: "conv" is followed by "conv_1", "conv_9" by "conv_10"."""
    base, mark, number = name.rpartition("_")
    return f"{base}_{int(number) + 1}" if mark and number.isdecimal() else f"{name}_1"


def unique(name: str, taken: Container[str], latest: dict[str, str] | None = None) -> str:
    """Return a name that is not taken: this one, or the first free one of its row.

    Args:
        latest: The name that was last given in each row, to go on from there.
    """
    found = name
    while found in taken:
        start = found if latest is None or found != name else latest.get(name, name)
        found = increment_name(start)
    if latest is not None:
        latest[name] = found
    return found


def claim(module: nn.Module, name: str) -> bool:
    """Give a module this name for one hook, unless it has a `name` of its own. Return whether it got it."""
    if module in _claims:
        _claims[module].append(name)
        return True
    if hasattr(module, "name"):
        return False
    _claims[module] = [name]
    module.__dict__["name"] = name
    module.__dict__[GETSTATE] = partial(_state_without_name, module)  # What copy and pickle ask an instance for.
    return True


def release(module: nn.Module, name: str) -> None:
    """Take back what `claim` gave: the module shows the next claim, or none."""
    names = _claims.get(module)
    if names is None:  # It is being collected, together with what holds the hook.
        return
    is_shown = module.__dict__.get("name") in names  # Else somebody has named it since.
    names.remove(name)
    if not names:
        del _claims[module]
        module.__dict__.pop(GETSTATE, None)
    if is_shown and names:
        module.__dict__["name"] = names[0]
    elif is_shown:
        del module.__dict__["name"]


def shows(module: nn.Module, name: str) -> bool:
    """Whether a module has this name now."""
    return module.__dict__.get("name") == name


@contextmanager
def named(module: nn.Module, name: str) -> Iterator[None]:
    """Let a module have this name, of several that managers gave it, while a hook runs."""
    if module.__dict__.get("name") not in _claims.get(module, ()):
        yield
        return
    module.__dict__["name"] = name
    try:
        yield
    finally:
        if module in _claims and shows(module, name):
            module.__dict__["name"] = _claims[module][0]


def _state_without_name(module: nn.Module) -> Any:
    """Return what a copy of a module is made of, without what `claim` put there."""
    own = getattr(type(module), GETSTATE, None)  # Of every class, since Python 3.11.
    state = module.__dict__ if own is None else own(module)
    if not isinstance(state, dict):  # A class may keep what it wants.
        return state
    given = "name" if state.get("name") in _claims.get(module, ()) else None
    return {key: value for key, value in state.items() if key not in (GETSTATE, given)}
