"""The names that managers give to modules: unique ones, and `module.name`, which hooks read.

A module that has no `name` of its own shows one while a hook is registered there: that of the first manager, and to a
hook that of its own manager. The last hook to go takes it away.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager

from torch import nn

_claims: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


def increment_name(name: str) -> str:
    """Return the next name of a row: "conv" is followed by "conv_1", "conv_9" by "conv_10"."""
    base, mark, number = name.rpartition("_")
    return f"{base}_{int(number) + 1}" if mark and number.isdecimal() else f"{name}_1"


def unique(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: this one, or the first free one of its row."""
    while name in taken:
        name = increment_name(name)
    return name


def claim(module: nn.Module, name: str) -> bool:
    """Give a module this name for one hook, unless it has a `name` of its own. Return whether it got it."""
    if module not in _claims and hasattr(module, "name"):
        return False
    _claims.setdefault(module, []).append(name)
    _show(module)
    return True


def release(module: nn.Module, name: str) -> None:
    """Take back what `claim` gave: the module shows the next claim, or none."""
    names = _claims[module]
    shown = names[0]
    names.remove(name)
    if names:
        return _show(module)
    del _claims[module]
    if module.__dict__.get("name") == shown:  # Else somebody has named it since.
        del module.__dict__["name"]
    return None


@contextmanager
def named(module: nn.Module, name: str) -> Iterator[None]:
    """Let a module have this name, of several that managers gave it, while a hook runs."""
    if module not in _claims or module.__dict__.get("name") == name:
        yield
        return
    module.__dict__["name"] = name
    try:
        yield
    finally:
        _show(module)


def _show(module: nn.Module) -> None:
    if module in _claims:
        module.__dict__["name"] = _claims[module][0]
