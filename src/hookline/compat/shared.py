"""Helpers for several of the older libraries: which call of a module ended last."""

from __future__ import annotations

from typing import Any

from torch import nn

import hookline as hl


def may_call_itself(module: nn.Module) -> bool:
    """Return True if the forward of a module may call that module again. torch's modules without children never do.

    >>> may_call_itself(nn.ReLU()), may_call_itself(nn.Sequential(nn.ReLU()))
    (False, True)
    """
    is_from_torch = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    return not is_from_torch or next(module.children(), None) is not None


def cache_of(value: Any) -> hl.Cache:
    """Return a cache with one value under "". It keeps the value as it is now, even if the value is overwritten later.

    >>> import torch
    >>> cache_of(torch.ones(2))[""]
    tensor([1., 1.])
    """
    identity = nn.Identity()
    with hl.capture(identity, "", detach=False) as cache:
        identity(value)
    return cache
