"""Every private name of torch that hookline uses, and every look at a frame.

Each says what it is for, and what happens where this torch does not have it.
No other file names a private thing of torch, or walks frames.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch.distributed as dist

_STAGES = "torch.distributed.pipelining.stage"
REHEARSAL = -1  # In the place of a microbatch's number: a stage runs on no data, to learn its shapes.


def is_running() -> bool:
    """Whether this process is one of several, or was started as such."""
    return dist.is_available() and dist.is_initialized()


def microbatch() -> int | None:
    """Return the number of the microbatch that a stage of a pipeline runs now, REHEARSAL, or None outside of one."""
    if not may_be_a_stage():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _STAGES:
            if frame.f_code.co_name == "forward_one_chunk":
                return int(frame.f_locals["fwd_chunk_id"])
            if frame.f_code.co_name == "_prepare_forward_infra":
                return REHEARSAL
        frame = frame.f_back
    return None


def is_rehearsal() -> bool:
    """Whether a stage of a pipeline runs on no data: the first step learns its shapes so."""
    return _STAGES in sys.modules and microbatch() == REHEARSAL


def may_be_a_stage() -> bool:
    """Whether this process may hold one stage of a pipeline, and other processes other modules."""
    return _STAGES in sys.modules and is_running()
