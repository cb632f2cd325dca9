"""What several of the older libraries need: which module is called, and warnings at the line of the user."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import hookline as hl
from hookline._torch import frame_at, outside


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward that can be hooked; containers have none, and torch.jit runs outside Python.

    >>> is_called(nn.ReLU()), is_called(nn.ModuleList())
    (True, False)
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)  # As torch.compile sets it.


NOT_THE_USERS = ("hookline", "torch", "contextlib")


def warn(message: str) -> None:
    """Warn at the nearest line that is neither hookline's nor torch's."""
    _, steps = outside(NOT_THE_USERS, frame_at(1))
    warnings.warn(message, hl.HooklineWarning, stacklevel=2 + steps)
