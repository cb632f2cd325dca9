"""Which modules run where they can be seen: the older libraries are given every module of a model."""

from __future__ import annotations

import torch
from torch import nn


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward that can be hooked; containers have none, and torch.jit runs outside Python.

    >>> is_called(nn.ReLU()), is_called(nn.ModuleList())
    (True, False)
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)  # As torch.compile sets it.
