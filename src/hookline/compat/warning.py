"""Warn at the line of the user, which is what the older libraries never did. All of `compat` uses this."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

import hookline as hl

NOT_THE_USERS = ("hookline", "torch", "contextlib")


def warn(message: str) -> None:
    """Warn at the nearest line that is neither hookline's nor torch's."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in NOT_THE_USERS:
        frame = frame.f_back
        level += 1
    warnings.warn(message, hl.HooklineWarning, stacklevel=level)
