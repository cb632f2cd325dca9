"""What is asked for, and is not there: a category, a name, a module."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from hookline.compat.tacklebox.handles import HookFunction

CATEGORIES = (*HookFunction.HOOK_TYPES, "all")
OPTIONS = ("hook_fn_name", "activate", "retain_forward_cache")
T = TypeVar("T")


def check_category(category: str) -> None:
    """Raise for a kind of hook that there is not."""
    if category not in CATEGORIES:
        raise AssertionError(f"{category} is not a valid hook category. Choices are: {', '.join(CATEGORIES)}")


def validate_hook_category(fn: Callable[..., T]) -> Callable[..., T]:
    """Let a function check its keyword `category` first."""

    @wraps(fn)
    def validated(*args: Any, category: str = "all", **kwargs: Any) -> T:
        check_category(category)
        return fn(*args, category=category, **kwargs)

    return validated


def look_up(table: Mapping[Any, T], key: Hashable) -> T:
    """Return an entry of a table; for a key that is not there raise what a dict does, with a note of what is near."""
    if key not in table:
        raise _missing(table, key)
    return table[key]


def no_module(value: T) -> T:
    """Return what is given as `wrap_calls`; TorchHook's manager takes a model there."""
    if isinstance(value, nn.Module):
        kind = type(value).__name__
        raise TypeError(f"wrap_calls is True or False, not a {kind}; modules are given to register_forward_hook")
    return value


def refuse_other(name: str | None, value: object) -> None:
    """Raise for what is given in the place of a module, by position or by a name, and is none."""
    if isinstance(value, nn.Module):
        return
    if name is None:
        raise TypeError(f"a module is a torch.nn.Module, not {type(value).__name__}")
    near = difflib.get_close_matches(name, OPTIONS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise TypeError(f"{name}={value!r}: a module is a torch.nn.Module, not {type(value).__name__}{hint}")


def _missing(table: Mapping[Any, Any], key: Hashable) -> KeyError:
    error = KeyError(key)
    near = difflib.get_close_matches(key, table, n=3) if isinstance(key, str) else []
    if hasattr(error, "add_note"):  # Python 3.11.
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        error.add_note(f"hookline: not registered with this manager{hint}")
    return error
