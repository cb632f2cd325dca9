"""Helpers for several of the older libraries: checks on modules, weakly held functions, warnings at the user's line."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hookline as hl
from hookline._torch import frame_at, outside

NOT_THE_USERS = ("hookline", "torch", "contextlib")


def warn(message: str) -> None:
    """Warn at the nearest line outside hookline, torch and contextlib."""
    _, steps = outside(NOT_THE_USERS, frame_at(1))
    warnings.warn(message, hl.HooklineWarning, stacklevel=2 + steps)


def is_called(module: nn.Module) -> bool:
    """Return True if a module has a forward that can be hooked.

    Containers have no forward, and torch.jit runs outside Python.

    >>> is_called(nn.ReLU()), is_called(nn.ModuleList())
    (True, False)
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)  # torch.compile sets it.


def may_call_itself(module: nn.Module) -> bool:
    """Return True if the forward of a module may call that module again. torch's modules without children never do.

    >>> may_call_itself(nn.ReLU()), may_call_itself(nn.Sequential(nn.ReLU()))
    (False, True)
    """
    is_from_torch = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    return not is_from_torch or next(module.children(), None) is not None


def cache_of(value: Any) -> hl.Cache:
    """Return a cache with one value under "". It keeps the value as it is now, even if the value is overwritten later.

    >>> cache_of(torch.ones(2))[""]
    tensor([1., 1.])
    """
    identity = nn.Identity()
    with hl.capture(identity, "", detach=False) as cache:
        identity(value)
    return cache


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive. It returns None once the object is gone.

    The module holds the hook's function, which may be a method of the object that owns the hooks.
    """
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        here = found()
        return None if here is None else here(*args)

    return call
