"""Warn at the line of the user, which is what the older libraries never did. All of `compat` uses this."""

from __future__ import annotations

import warnings

import hookline as hl
from hookline._torch import frame_at, outside

NOT_THE_USERS = ("hookline", "torch", "contextlib")


def warn(message: str) -> None:
    """Warn at the nearest line that is neither hookline's nor torch's."""
    _, steps = outside(NOT_THE_USERS, frame_at(1))
    warnings.warn(message, hl.HooklineWarning, stacklevel=2 + steps)
